"""The configured relays of a node: name resolution, and registration in the background.

A name may not resolve yet, because a laptop starts before its network, and a relay may move to
another address, or have one that does not work from here, such as an IPv6 address. So a node starts
without waiting long for its relays, and periodically resolves those that do not answer, to try the
next address. A relay that carries a link is not left, since it may only have restarted.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from meshllm_quic.net.address import QuicAddress
from meshllm_quic.net.network import Address, DatagramNetwork, of_each_family
from meshllm_quic.relay.relays import Relays, RelayUsage, raise_error

READY_S = 4.0
"""How long a listener waits for its relays before it publishes its addresses; UDP takes 3 s."""
SEEK_S = 10.0
"""How long an address of a relay is tried: 3 s until UDP counts as blocked, then TCP."""

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
    for task in keeping:
        task.add_done_callback(raise_error)
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
            await _seek(relays, network, place, found, logging.DEBUG)


async def _seek(
    relays: Relays,
    network: DatagramNetwork,
    place: QuicAddress,
    found: dict[QuicAddress, Address],
    level: int = logging.WARNING,
) -> None:
    try:
        addresses = await network.resolve(place.host, place.port)
    except OSError as error:
        logger.log(level, "cannot resolve the relay %s: %s", place, error.strerror or error)
        return
    before = found.get(place)
    address = _next(addresses, before)
    if before not in (None, address):
        if before in addresses and relays.usage(before) is not RelayUsage.NONE:
            return
        if before not in [at for each, at in found.items() if each != place]:
            relays.drop(before)
    found[place] = address
    relays.add(address, is_wanted=True, others=of_each_family([address, *addresses]))


def _next(addresses: Sequence[Address], silent: Address | None) -> Address:
    """Return the address after one that does not answer, or else the first."""
    if silent not in addresses:
        return addresses[0]
    return addresses[(addresses.index(silent) + 1) % len(addresses)]


def _listed(
    relays: Relays, places: Sequence[QuicAddress], found: dict[QuicAddress, Address]
) -> str:
    late = (place for place in places if found.get(place) not in relays.registered)
    return ", ".join(map(str, late)) or "its relays"
