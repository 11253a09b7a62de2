"""Dialling: address resolution, relay registration and the QUIC handshake."""

import asyncio
from collections.abc import Sequence

from meshllm.errors import LinkLost, PeerFault, UserError
from meshllm_quic.link.connection import Connection
from meshllm_quic.link.endpoint import Endpoint
from meshllm_quic.link.link import QuicLink
from meshllm_quic.net.address import QuicAddress
from meshllm_quic.net.network import Address, DatagramNetwork, of_each_family
from meshllm_quic.wire.packets import TAG_BYTES
from meshllm_quic.wire.routes import Direct, Route, ViaRelay

RELAY_S = 10.0
"""Timeout of the registration at a relay, shared by its IPv4 and its IPv6 address.

UDP counts as blocked after 3 s; then TCP is tried.
"""
MAX_ADDRESSES = 4
"""Addresses tried per name; each QUIC retransmission uses the next one."""


async def dial(endpoint: Endpoint, network: DatagramNetwork, place: QuicAddress) -> QuicLink:
    """Open a link; raise `LinkLost`, `PeerFault`, or `UserError` for this node's own address."""
    if place.key == endpoint.identity.key:
        raise UserError(f"`{place}` is this node itself")
    try:
        addresses = list(await network.resolve(place.host, place.port))[:MAX_ADDRESSES]
    except OSError as error:
        raise LinkLost(f"Cannot resolve `{place}`: {error.strerror or error}") from error
    if place.key is None:
        routes: list[Route] = [Direct(address) for address in addresses]
    else:
        routes = await _via_relay(endpoint, place, place.key, addresses)
    connection = endpoint.connect(routes, str(place), place.key)
    try:
        return await _open(connection)
    except (LinkLost, PeerFault):
        if place.key is None or not connection.was_answered:
            raise
        if endpoint.known.pop(place.key, None) is None:
            raise
    return await dial(endpoint, network, place)  # somebody else has its remembered address


async def _open(connection: Connection) -> QuicLink:
    try:
        await connection.wait_open()
    except asyncio.CancelledError:
        connection.abort()
        raise
    connection.take()
    return connection.link


async def _via_relay(
    endpoint: Endpoint, place: QuicAddress, key: bytes, addresses: Sequence[Address]
) -> list[Route]:
    """Register at a relay, as it requires of senders; do not wait if a direct address is known."""
    registered, relays = endpoint.relays.registered, of_each_family(addresses)
    relays = [relay for relay in relays if relay in registered][:1] or relays
    if (known := endpoint.known.get(key)) is not None:
        for relay in relays:
            endpoint.relays.add(relay, is_wanted=False, is_needed=True)
        return [Direct(known), *(ViaRelay(relay, key[:TAG_BYTES]) for relay in relays)]
    is_silent = False
    for relay in relays:
        endpoint.relays.add(relay, is_wanted=False, is_needed=True)
        try:
            async with asyncio.timeout(RELAY_S / len(relays)):
                if await endpoint.relays.wait_ready(relay):
                    return [ViaRelay(relay, key[:TAG_BYTES])]
        except TimeoutError:
            is_silent = True
            endpoint.relays.give_up(relay)
    if not is_silent:
        raise LinkLost(f"Cannot use the relay of `{place}`: too many are in use or tried")
    raise LinkLost(
        f"No answer from the relay of `{place}` within {RELAY_S:g} s",
        hint=f"check that it runs and that UDP or TCP port {place.port} is open",
    )
