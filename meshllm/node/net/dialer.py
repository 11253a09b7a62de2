"""A secure link at whichever of several addresses answers first.

Addresses are tried in their order, each some time after the one before, as RFC 8305 does with those
of one host; the first handshake that ends well wins, and the other attempts are given up.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshllm.errors import LinkLost, MeshError, NotAuthorised
from meshllm.names import NodeId
from meshllm.node.net.secure import HungUp, SecureLink, secure_dial
from meshllm.protocol.trust.credential import Removals
from meshllm.protocol.trust.handshake import Own, Purpose
from meshllm.transport.contract import Transport

STAGGER_S = 0.25  # s; RFC 8305, section 5
DIAL_S = 10.0  # s for all addresses together
MAX_TRIED = 16  # addresses; a peer says what they are


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who dials, and over what."""

    transports: Mapping[str, Transport]
    """By the scheme of their addresses."""
    own: Own

    async def reach(
        self,
        addresses: Sequence[str],
        purpose: Purpose,
        *,
        expect: NodeId | None,
        removals: Removals,
    ) -> SecureLink:
        """Open a link to a node at one of its addresses.

        Raises:
            NotAuthorised: who answers refuses us, or is not who is expected.
            HungUp: who answers does not know us.
            LinkLost: nobody answers.
        """
        errors: list[MeshError] = []

        async def attempt(place: int, address: str) -> SecureLink | None:
            await asyncio.sleep(place * STAGGER_S)
            try:
                return await self._dial(address, purpose, expect, removals)
            except MeshError as error:
                errors.append(error)
            except Exception as error:  # the supervisor: a plugin and an address are foreign
                logger.warning("the transport met a bug at %s", address, exc_info=error)
                errors.append(LinkLost(f"`{address}`: {type(error).__name__}"))
            return None

        known = [address for address in addresses if self._transport(address)][:MAX_TRIED]
        tasks = [asyncio.ensure_future(attempt(*each)) for each in enumerate(known)]
        winner = None
        try:
            async with asyncio.timeout(DIAL_S):
                winner = await _first(tasks)
        except TimeoutError:
            errors.append(LinkLost(f"No answer in {DIAL_S:.0f} s"))
        finally:
            await _give_up(tasks, winner)
        if winner is None:
            raise _weightiest(errors, addresses)
        return winner

    def _transport(self, address: str) -> Transport | None:
        return self.transports.get(address.partition(":")[0])

    async def _dial(
        self, address: str, purpose: Purpose, expect: NodeId | None, removals: Removals
    ) -> SecureLink:
        transport = self._transport(address)
        if transport is None:
            raise LinkLost(f"No transport here dials `{address}`")
        link = await transport.dial(address)
        secured = await secure_dial(
            link, self.own, purpose, expect=expect, now_s=time.time(), removals=removals
        )
        secured.address = address
        return secured


async def _first(tasks: Iterable[asyncio.Task[SecureLink | None]]) -> SecureLink | None:
    """Wait until one of the attempts has a link, or none is left."""
    pending = set(tasks)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if link := task.result():
                return link
    return None


async def _give_up(
    tasks: Iterable[asyncio.Task[SecureLink | None]], winner: SecureLink | None
) -> None:
    """End the attempts, and close what they have but the winner; if cancelled, that too."""
    for task in tasks:
        task.cancel()
    try:
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    except asyncio.CancelledError:
        if winner is not None:
            await winner.close()
        raise
    for outcome in outcomes:
        if isinstance(outcome, SecureLink) and outcome is not winner:
            await outcome.close()


def _weightiest(errors: Sequence[MeshError], addresses: Sequence[str]) -> MeshError:
    """Choose what to report: a refusal tells more than a hang-up, and that more than silence."""
    for kind in (NotAuthorised, HungUp):
        for error in errors:
            if isinstance(error, kind):
                return error
    if errors:
        return LinkLost(f"Cannot reach the node: {errors[-1]}")
    listed = ", ".join(f"`{address}`" for address in addresses)
    return LinkLost(f"No transport here reaches the node at {listed or 'no address'}")
