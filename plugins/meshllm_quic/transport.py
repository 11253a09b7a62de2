"""The transport over QUIC."""

import errno
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import ClassVar

from meshllm.errors import LinkLost, UserError, cannot_listen
from meshllm.transport import contract
from meshllm_quic.base.identity import KEY_BYTES, Identity
from meshllm_quic.link.dialer import dial
from meshllm_quic.link.endpoint import Endpoint
from meshllm_quic.link.listener import QuicListener
from meshllm_quic.net.address import RELAY_PORT, QuicAddress, parse
from meshllm_quic.net.network import DatagramNetwork
from meshllm_quic.net.udp import UdpNetwork
from meshllm_quic.relay.configured_relays import registered

PORTS = range(7700, 7800)
"""Tried in turn when no address is given; the same numbers as the WebSocket transport, over UDP."""


class QuicTransport:
    """Links over QUIC; direct to the peer if the NATs in between allow it."""

    name: ClassVar[str] = "quic"
    schemes: ClassVar[tuple[str, ...]] = ("quic",)

    def __init__(
        self,
        network: DatagramNetwork | None = None,
        random: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._network = network or UdpNetwork()
        self._random = random
        self._identity: Identity | None = None
        self._endpoint: Endpoint | None = None
        self._relays: list[QuicAddress] = []

    def identify(self, seed: bytes) -> None:
        """Use the Ed25519 key of these 32 bytes."""
        self._identity = Identity(seed)

    def add_relay(self, address: str) -> None:
        """Register at the relay ``quic://HOST:PORT``, from the next `listen` on."""
        place = parse(address, RELAY_PORT)
        if place.key is not None:
            raise UserError(f"`{address}` is a node, not a relay", hint="leave out NODE@")
        self._relays.append(place)

    @asynccontextmanager
    async def listen(self, address: str | None = None) -> AsyncIterator[contract.Listener]:
        """Accept links at ``quic://HOST:PORT``, or on every interface at the first free port."""
        endpoint = await self._open(address)
        if self._live is None or self._live.listener is None:
            self._endpoint = endpoint
        listener = endpoint.listener = QuicListener(
            lambda: _places(endpoint), endpoint.admission.reserve
        )
        # A relay keeps one registration per node.
        places = self._relays if endpoint is self._endpoint else ()
        try:
            async with registered(endpoint.relays, self._network, places):
                yield listener
        finally:
            endpoint.listener = None
            listener.close()
            endpoint.release()

    async def dial(self, address: str) -> contract.Link:
        """Open a link to ``quic://HOST:PORT``, or to ``quic://NODE@HOST:PORT`` through a relay."""
        place = parse(address)
        try:
            endpoint = self._live or await self._bind(None, 0)
        except OSError as error:
            raise LinkLost(f"Cannot open a UDP socket: {error.strerror}") from error
        with endpoint.held():
            return await dial(endpoint, self._network, place)

    def survey(self) -> contract.Network | None:
        """Return NAT type, observed addresses and relays; None without an open socket."""
        return None if self._live is None else self._live.survey()

    @property
    def _live(self) -> Endpoint | None:
        return self._endpoint if self._endpoint is not None and self._endpoint.is_open else None

    async def _open(self, address: str | None) -> Endpoint:
        """Open an endpoint for a listener, or reuse the one that earlier dials opened."""
        if address is None:
            if self._live is not None and self._live.listener is None:
                return self._live
            return await self._open_anywhere()
        place = parse(address)
        if place.key is not None:
            why = "it names a node behind a relay"
            raise UserError(f"Cannot listen on `{address}`: {why}", hint="leave out NODE@")
        try:
            return await self._bind(place.host, place.port)
        except OSError as error:
            raise cannot_listen(address, error) from error

    async def _open_anywhere(self) -> Endpoint:
        for port in PORTS:
            try:
                return await self._bind(None, port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise UserError(f"Cannot open a UDP port: {error.strerror}") from error
        raise UserError(
            f"No free UDP port from {PORTS.start} to {PORTS.stop - 1}",
            hint="choose one with `--listen quic://HOST:PORT`",
        )

    async def _bind(self, host: str | None, port: int) -> Endpoint:
        self._identity = self._identity or Identity(self._random(KEY_BYTES))
        endpoint = Endpoint(self._network, self._identity, self._random)
        await endpoint.open(host, port)
        if self._live is None:
            self._endpoint = endpoint
        return endpoint


def _places(endpoint: Endpoint) -> tuple[str, ...]:
    """List the addresses of an endpoint: public ones, relays, private ones, loopback."""
    own = [QuicAddress(host, endpoint.port) for host in endpoint.hosts]
    own.sort(key=lambda place: not ip_address(place.host).is_global)
    public = [place for place in own if ip_address(place.host).is_global]
    relays = [QuicAddress(*relay, endpoint.identity.key) for relay in endpoint.relays.addresses]
    return tuple(map(str, [*public, *relays, *own[len(public) :]]))
