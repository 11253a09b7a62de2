"""The relays that the owner of a node has named: found, and found again.

A name may not be known yet: a laptop starts before its network. And whoever runs the relay may move
it. So a node starts without its relays, and looks for those that do not answer from time to time.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from meshllm_quic.net.address import Place
from meshllm_quic.net.network import Address, Network
from meshllm_quic.relay.relays import Relays

READY_S = 4.0
"""A listener waits so long for its relays, as its addresses are told next: 3 s are for UDP."""
SEEK_S = 30.0
"""Between two looks for relays that do not answer."""

logger = logging.getLogger(__name__)


@asynccontextmanager
async def registered(
    relays: Relays, network: Network, places: Sequence[Place]
) -> AsyncIterator[None]:
    """Be registered at relays in the context, as soon as they are there."""
    if not places:
        yield
        return
    found: dict[Place, Address] = {}
    try:
        async with asyncio.timeout(READY_S):
            await _seek(relays, network, places, found)
            await asyncio.gather(*map(relays.wait_ready, found.values()))
    except TimeoutError:
        logger.warning("no answer yet from %s", _listed(relays, places, found))
    keeping = asyncio.ensure_future(_keep(relays, network, places, found))
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def _keep(
    relays: Relays, network: Network, places: Sequence[Place], found: dict[Place, Address]
) -> None:
    while True:
        await asyncio.sleep(SEEK_S)
        lost = [place for place in places if found.get(place) not in relays.registered]
        await _seek(relays, network, lost, found)


async def _seek(
    relays: Relays, network: Network, places: Sequence[Place], found: dict[Place, Address]
) -> None:
    for place in places:
        try:
            address, *_ = await network.resolve(place.host, place.port)
        except OSError as error:
            logger.warning("the relay %s is not found: %s", place, error.strerror or error)
            continue
        if found.get(place) != address:
            if place in found:
                relays.drop(found[place])
            found[place] = address
            relays.add(address, is_wanted=True)


def _listed(relays: Relays, places: Sequence[Place], found: dict[Place, Address]) -> str:
    late = (place for place in places if found.get(place) not in relays.registered)
    return ", ".join(map(str, late)) or "its relays"
