"""The configured relays of a node: name resolution, and registration in the background.

A name may not resolve yet, because a laptop starts before its network, and a relay may move to
another address. So a node starts without waiting long for its relays, and periodically resolves
those that do not answer.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from meshllm_quic.net.address import QuicAddress
from meshllm_quic.net.network import Address, DatagramNetwork
from meshllm_quic.relay.relays import Relays

READY_S = 4.0
"""How long a listener waits for its relays before it publishes its addresses; UDP takes 3 s."""
SEEK_S = 30.0
"""Interval between attempts to resolve relays that do not answer."""

logger = logging.getLogger(__name__)


@asynccontextmanager
async def registered(
    relays: Relays, network: DatagramNetwork, places: Sequence[QuicAddress]
) -> AsyncIterator[None]:
    """Register at the relays within the context, now or as soon as they are reachable."""
    if not places:
        yield
        return
    found: dict[QuicAddress, Address] = {}
    try:
        async with asyncio.timeout(READY_S):
            await asyncio.gather(*(_seek(relays, network, place, found) for place in places))
            await asyncio.gather(*map(relays.wait_ready, found.values()))
    except TimeoutError:
        logger.warning("no answer yet from %s", _listed(relays, places, found))
    # Each by itself: a name server may take long to answer for one of them.
    jobs = (_keep(relays, network, place, found) for place in places)
    keeping = [asyncio.ensure_future(job) for job in jobs]
    try:
        yield
    finally:
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)


async def _keep(
    relays: Relays,
    network: DatagramNetwork,
    place: QuicAddress,
    found: dict[QuicAddress, Address],
) -> None:
    while True:
        await asyncio.sleep(SEEK_S)
        if found.get(place) not in relays.registered:
            await _seek(relays, network, place, found)


async def _seek(
    relays: Relays,
    network: DatagramNetwork,
    place: QuicAddress,
    found: dict[QuicAddress, Address],
) -> None:
    try:
        address, *_ = await network.resolve(place.host, place.port)
    except OSError as error:
        logger.warning("cannot resolve the relay %s: %s", place, error.strerror or error)
        return
    if found.get(place) != address:
        if place in found:
            relays.drop(found[place])
        found[place] = address
        relays.add(address, is_wanted=True)


def _listed(
    relays: Relays, places: Sequence[QuicAddress], found: dict[QuicAddress, Address]
) -> str:
    late = (place for place in places if found.get(place) not in relays.registered)
    return ", ".join(map(str, late)) or "its relays"
