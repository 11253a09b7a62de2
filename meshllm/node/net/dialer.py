"""Dialling of a node at several addresses at once: happy eyeballs.

Attempts start in the order of the addresses, staggered as in RFC 8305; the first successful
handshake wins, and the other attempts are cancelled.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from meshllm.errors import LinkLost, MeshError, NotAuthorised, foreign_code
from meshllm.names import NodeId
from meshllm.node.net.peer_address import (
    DialTarget,
    LocalAddressPolicy,
    SameHostDetector,
    is_looked_up,
    permitted,
    resolve,
    target,
)
from meshllm.node.net.secure import HandshakeClosed, SecureLink, secure_dial
from meshllm.node.timer import loop_time
from meshllm.protocol.membership.dial_limit import DialLimit
from meshllm.protocol.trust.credential import Removals
from meshllm.protocol.trust.handshake import LocalIdentity, Purpose
from meshllm.transport.contract import SupportsDialHosts, Transport

STAGGER_S = 0.25  # s; RFC 8305, section 5
DIAL_S = 10.0  # s for all addresses together
MAX_TRIED = 16  # addresses, which a peer supplies
MAX_NAMES = 4  # of them that are looked up


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeDialer:
    """Dials peers with this node's identity and transports."""

    transports: Mapping[str, Transport]
    """By address scheme."""
    own: LocalIdentity
    machine: SameHostDetector | None = None
    """Recognises peers on this machine; None trusts no claim to be there."""
    limit: DialLimit = field(default_factory=DialLimit)
    name_threads: Executor = field(default_factory=lambda: ThreadPoolExecutor(8, "names"))
    """Where the names of hosts are looked up; nothing else waits for slow name servers."""

    async def dial(
        self,
        addresses: Sequence[str],
        purpose: Purpose,
        *,
        expect: NodeId,
        removals: Removals,
        local: LocalAddressPolicy = LocalAddressPolicy.NO,
    ) -> SecureLink:
        """Open a link to a node at one of its addresses; ``local`` allows those of this machine.

        Raises:
            NotAuthorised: the peer rejects this node, or is not the expected one.
            HandshakeClosed: the peer closed the connection during the handshake.
            LinkLost: no address answers.
        """
        errors: list[MeshError] = []

        async def attempt(turn: int, place: DialTarget) -> SecureLink | None:
            address = place.address
            await asyncio.sleep(turn * STAGGER_S)
            try:
                self._count(address, local)
                with foreign_code(partial(_buggy, address)):  # of the plugin
                    return await self._dial_one(place, purpose, expect, removals)
            except HandshakeClosed as error:
                errors.append(error if address in telling else _ClosedNearby(str(error)))
            except MeshError as error:
                errors.append(error)
            return None

        known = await self._targets(addresses, local)
        # Another node of this machine may be at an address that the peer has on its own machine.
        named = [place.address for place in known]
        telling = permitted(named, LocalAddressPolicy.NO) or named
        tasks = [asyncio.ensure_future(attempt(*each)) for each in enumerate(known)]
        winner = None
        try:
            async with asyncio.timeout(DIAL_S):
                winner = await _first(tasks)
        except TimeoutError:
            errors.append(LinkLost(f"No answer within {DIAL_S:.0f} s"))
        finally:
            await _give_up(tasks, winner)
        if winner is None:
            raise _weightiest(errors, addresses)
        return winner

    async def _targets(
        self, addresses: Sequence[str], local: LocalAddressPolicy
    ) -> list[DialTarget]:
        """Choose where to try.

        Raises:
            LinkLost: none may be dialled, no name was found, or all were tried too often.
        """
        known = [address for address in addresses if self._transport(address)][:MAX_TRIED]
        names = [address for address in known if is_looked_up(address, local)]
        known = [address for address in known if address not in names[MAX_NAMES:]]
        found = await asyncio.gather(
            *(resolve(each, local, self.name_threads) for each in known), return_exceptions=True
        )
        if known and not any(isinstance(each, list) and each for each in found):
            raise _unresolved(known, found)
        places = [place for each in found if isinstance(each, list) for place in each][:MAX_TRIED]
        now = loop_time()
        due = [
            place
            for place in places
            if local is LocalAddressPolicy.YES or self.limit.has(*target(place.address), now)
        ]
        if places and not due:
            raise _too_soon(places[0].address)
        return due

    def _count(self, address: str, local: LocalAddressPolicy) -> None:
        """Count an attempt that begins; those at what a user named have no limit.

        Raises:
            LinkLost: there were too many.
        """
        if local is not LocalAddressPolicy.YES and not self.limit.take(
            *target(address), loop_time()
        ):
            raise _too_soon(address)

    def _transport(self, address: str) -> Transport | None:
        return self.transports.get(address.partition(":")[0])

    async def _dial_one(
        self, place: DialTarget, purpose: Purpose, expect: NodeId, removals: Removals
    ) -> SecureLink:
        address, transport = place.address, self._transport(place.address)
        if transport is None:
            raise LinkLost(f"No transport for the address `{address}`")
        if not place.hosts:
            link = await transport.dial(address)
        elif isinstance(transport, SupportsDialHosts):
            link = await transport.dial_hosts(address, place.hosts)
        else:
            raise LinkLost(f"The transport of `{address}` cannot be told which hosts to dial")
        secured = await secure_dial(
            link, self.own, purpose, expect=expect, now_s=time.time(), removals=removals
        )
        secured.address = address
        self.limit.answered(*target(address))
        return secured


async def _first(tasks: Iterable[asyncio.Task[SecureLink | None]]) -> SecureLink | None:
    """Return the first link of an attempt; None if all have failed."""
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
    """Cancel the attempts, and close their links but the winner; if cancelled, that too."""
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


class _ClosedNearby(LinkLost):
    """A handshake closed at an address of this machine, maybe by another node."""


def _too_soon(address: str) -> LinkLost:
    return LinkLost(f"No answer from `{address}` so far: the next attempt is delayed")


def _buggy(address: str, error: Exception) -> LinkLost:
    """Log a bug in a transport; other addresses of the peer may be of others."""
    logger.warning("bug in the transport at %s", address, exc_info=error)
    return LinkLost(f"`{address}`: {type(error).__name__}")


def _unresolved(
    addresses: Sequence[str], found: Sequence[list[DialTarget] | BaseException]
) -> LinkLost:
    for address, each in zip(addresses, found, strict=True):
        if isinstance(each, BaseException):
            return LinkLost(f"Cannot look up `{address}`: {str(each) or type(each).__name__}")
    return LinkLost(f"No address of the node may be dialled: {_listed(addresses)}")


def _weightiest(errors: Sequence[MeshError], addresses: Sequence[str]) -> MeshError:
    """Choose the error to report: a rejection, else a closed handshake, else any other."""
    for kind in (NotAuthorised, HandshakeClosed, _ClosedNearby):
        for error in errors:
            if isinstance(error, kind):
                return error
    if errors:
        return LinkLost(f"Cannot reach the node: {errors[-1]}")
    return LinkLost(f"No transport for the node's addresses: {_listed(addresses) or 'it has none'}")


def _listed(addresses: Sequence[str]) -> str:
    return ", ".join(f"`{address}`" for address in addresses)
