"""What a node publishes about itself: its addresses, and the offer of memory, speed and weights.

Theory of operation
-------------------
Other nodes plan only with nodes whose profile has layer times, that is, an open offer. The offer is
retracted while this node cannot serve: when its span did not load, for a time that doubles with
each failure in a row (backoff); while its compute thread hangs; and while it moves to another ring.

The speed was measured once. If the steps of a ring take `SLOW` times as long from some time on, as
when the machine does something else, the offer says so, and other nodes may take over layers. It is
the measured speed again once the steps are as fast, or if for `RESTORE_S` no step could tell: twice
as long after each relapse. Steps that are `FAST` times as fast as measured show that the machine
was busy when it was measured: the offer says so until steps take about as long as measured.

After a span did not fit into memory, less is offered for `RESTORE_S`, as another program may have
taken the memory for a while: twice as long after each relapse.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshllm.errors import ModelError, OutOfMemory
from meshllm.names import GroupId, ModelKey
from meshllm.node.agreement.own_state import OwnState
from meshllm.node.agreement.ring_member import RingMember
from meshllm.node.timer import CallLater, loop_time
from meshllm.protocol.membership.gossip import MAX_ITEM_BYTES
from meshllm.protocol.membership.records import MAX_BYTES, Profile, RingShare
from meshllm.protocol.planning.plan import MAX_SECONDS

if TYPE_CHECKING:  # a provider holds no layers, and imports no torch
    from meshllm.node.compute.worker import Worker

FIRST_RETRY_S, LAST_RETRY_S = 5.0, 300.0  # s; backoff before the offer is published again
SIGNED_BYTES = 1024  # of a record beside the profile
SMALLER = 0.9  # factor on the weights of a span that did not fit into memory
SLOW = 2.0  # change of the speed that is published, as a factor
FAST = 1.4  # change of the speed, as a factor, up to which it is as measured
STILL_FAST = 0.85  # times as slow as measured, and less: as fast as before, if that was faster
MAX_SLOW = 64.0  # times as slow as measured that are published
RESTORE_S, LAST_RESTORE_S = 600.0, 6 * 3600.0  # s; then a slow node may get layers again
WATCH_S = 1.0  # s between two checks of the speed, and of a compute thread that hangs

logger = logging.getLogger(__name__)


class NodeOffer:
    """The profile of this node."""

    def __init__(
        self,
        profile: Profile,
        publish: Callable[[Profile], None],
        member: RingMember,
        call_later: CallLater,
    ) -> None:
        self.profile = profile
        """As it is published."""
        self.measured = profile
        """The offer, also while it is retracted."""
        self.hang = ""
        """How long the compute thread has hung; empty if it responds."""
        self._workspace = 0  # that the published reserve contains
        self._send = publish
        self._member = member
        self._call_later = call_later
        self._retry_s = FIRST_RETRY_S
        self._waiting: object | None = None  # for the timer that will publish the offer again
        self._is_over = False
        self._slow = 1.0  # times as slow as measured
        self._slow_since = 0.0  # when that was last seen
        self._restore_s = RESTORE_S / 2  # doubled by each slowdown
        self._lack: object | None = None  # of memory, for the timer that will end it
        self._fitting = MAX_BYTES  # that are offered at most, besides shares
        self._lack_s = RESTORE_S

    def publish(self, **changes: Any) -> None:
        """Publish the profile with other fields than before."""
        self.profile = replace(self.profile, **changes)
        if not self._is_over:
            self._send(self.profile)

    def close(self) -> None:
        """Publish nothing from now on, as the ring has ended; timers may still run."""
        self._is_over = True

    def hold(self, models: Collection[ModelKey]) -> None:
        """Publish which models this node may hold."""
        self.measured = replace(self.measured, models=tuple(models))
        self.publish(models=tuple(models))

    def begin(self, measured: Profile, workspace: int = 0) -> None:
        """Publish the offer for a model, which reserves a ``workspace`` of this many bytes.

        What else has changed meanwhile stays.
        """
        now = self.profile
        if now.shares:  # measured now, what they hold would count twice
            memory, reserve = now.memory_bytes, now.reserve_bytes + workspace - self._workspace
            measured = replace(measured, memory_bytes=memory, reserve_bytes=reserve)
        self._workspace = workspace
        self._slow, self._lack_s = 1.0, RESTORE_S
        self.measured = replace(measured, models=now.models)
        self.profile = replace(
            self.measured, addresses=now.addresses, revoked=now.revoked, shares=now.shares
        )
        self.publish()

    def share(self, group: GroupId, offered: Profile | None) -> None:
        """Publish what this node offers to a further ring; None ends that.

        Raises:
            ModelError: the profile would be too large for one record.
        """
        shares = {each.group: each for each in self.profile.shares if each.group != group}
        if offered is not None:
            left = self.profile.memory_bytes - sum(each.memory_bytes for each in shares.values())
            shares[group] = RingShare(
                group,
                max(0, min(offered.memory_bytes, left)),
                offered.layer_s,
                offered.head_s,
                offered.model,
                offered.weights,
            )
        ordered = tuple(shares[each] for each in sorted(shares))
        size = len(replace(self.profile, shares=ordered).encode())
        if offered is not None and size > MAX_ITEM_BYTES - SIGNED_BYTES:
            raise ModelError("This node cannot describe one more model in its record")
        self.publish(shares=ordered)

    def resize(self, memory: int) -> None:
        """Offer more or less memory, also while the offer is retracted."""
        self.measured = replace(self.measured, memory_bytes=memory)
        self.publish(memory_bytes=self._memory)

    @property
    def shared_bytes(self) -> int:
        """The memory of the further rings."""
        return sum(each.memory_bytes for each in self.profile.shares)

    def end(self) -> None:
        """Retract the offer for the last model for good."""
        self._retry_s, self._waiting = FIRST_RETRY_S, None
        if self._lack:
            self._lack, self._fitting = None, MAX_BYTES
            self.profile = replace(self.profile, memory_bytes=self._memory)
        self.publish(weights=(), layer_s=(), model="")
        self.measured = self.profile

    def set_weights(self, weights: tuple[bytes, ...]) -> None:
        """Publish the digests of the weights that are here now."""
        self.measured = replace(self.measured, weights=weights)
        self._show(is_open=bool(self.profile.layer_s))

    def withdraw(self) -> None:
        """Retract the offer if the span cannot be loaded; offer again later, with backoff.

        After running out of memory, the next offer is too small for that span, for a while.
        """
        failure, self._member.failure = self._member.failure, None
        if failure is None:
            if self._member.is_loaded:
                self._retry_s = FIRST_RETRY_S
            return
        if isinstance(failure, OutOfMemory):
            fitting = self.measured.reserve_bytes + int(failure.needed_bytes * SMALLER)
            self._fitting = min(fitting, self._fitting)
            self._lack = lack = object()
            self._call_later(self._lack_s, self._end_lack, lack)
            self._lack_s = min(2 * self._lack_s, LAST_RESTORE_S)
        if self._waiting:
            return
        self._waiting = waiting = object()
        self._show(is_open=False)
        self._call_later(self._retry_s, self._offer_again, waiting)
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)

    async def watch(self, worker: "Worker", own: OwnState) -> None:
        """Retract the offer while the compute thread hangs.

        The event loop still sends heartbeats, so peers cannot tell a hung node from a busy one.
        """
        while True:
            await worker.sleep()
            is_used = bool(self.profile.layer_s or own.ranks)  # by a ring, if only by a further one
            if not (hung_s := worker.hung_s) or not is_used:
                continue
            self.hang = _why_hung(hung_s)
            logger.warning("%s: this node retracts its offer until it responds", self.hang)
            own.is_hung = True
            self._show(is_open=False)
            own.publish()
            while hung_s := worker.hung_s:  # a hung thread sets no event
                self.hang = _why_hung(hung_s)
                await asyncio.sleep(WATCH_S)
                if self.profile.layer_s:  # offered again, for another ring
                    self._show(is_open=False)
            self.hang = ""
            logger.warning("the compute thread responds again")
            own.is_hung = False
            own.publish()
            if not self._waiting:
                self._show(is_open=True)

    async def refine(self) -> None:
        """Publish another speed when the steps of the ring take much longer than before."""
        while True:
            await asyncio.sleep(WATCH_S)
            self._refine()

    def _refine(self) -> None:
        runtime, measured = self._member.runtime, self.measured.layer_s
        if not measured or not self.profile.layer_s:
            return
        seen_s, now = runtime.take_layer_s() if runtime else None, loop_time()
        if seen_s is not None:
            slow = max(1 / MAX_SLOW, min(seen_s / measured[0][1], MAX_SLOW))
            least = 1 / FAST if self._slow >= 1.0 else STILL_FAST
            slow, self._slow_since = 1.0 if least < slow <= FAST else slow, now
        elif self._slow > 1.0 and now - self._slow_since >= self._restore_s:
            slow = 1.0
        else:
            return
        change = SLOW if slow > 1.0 else FAST
        is_small = change * min(slow, self._slow) > max(slow, self._slow)
        if slow == self._slow or (is_small and slow != 1.0):
            return
        if slow == 1.0:
            logger.info("layers take as long as measured again, or nothing is known of them")
            self._restore_s = self._restore_s if seen_s is None else RESTORE_S / 2
        elif slow < 1.0:
            logger.info("layers are %.1f times as fast as when they were measured", 1 / slow)
        else:
            logger.warning("layers take %.1f times as long as when they were measured", slow)
        if slow > max(1.0, self._slow):
            self._restore_s = min(2 * self._restore_s, LAST_RESTORE_S)
        self._slow = slow
        self._show(is_open=True)

    def _offer_again(self, waiting: object) -> None:
        if waiting is not self._waiting:  # it began in another ring
            return
        trouble, self._member.trouble = self._member.trouble, None
        self._waiting = None
        self._show(is_open=not self.hang)
        if self._member.runtime and not isinstance(trouble, OutOfMemory):
            self._member.runtime.reload()  # the plan may still be the same

    def _end_lack(self, lack: object) -> None:
        """Offer all of the memory again, unless there was another lack since."""
        if lack is not self._lack:
            return
        self._lack, self._fitting = None, MAX_BYTES
        if self.profile.layer_s:
            self._show(is_open=True)

    @property
    def _memory(self) -> int:
        """The memory to offer: what is measured, or less for a while, but not less than shares."""
        shared = self.shared_bytes
        return max(min(self.measured.memory_bytes, self._fitting + shared), shared)

    def _show(self, *, is_open: bool) -> None:
        """Publish the measured offer, or retract it: others may fetch the weights all the same."""
        if is_open:
            own, slow = self.measured, self._slow
            self.publish(
                weights=own.weights,
                layer_s=tuple((rows, _most(slow * seconds)) for rows, seconds in own.layer_s),
                head_s=_most(slow * own.head_s),
                memory_bytes=self._memory,
            )
        else:
            self.publish(weights=self.measured.weights, layer_s=())


def _most(seconds: float) -> float:
    return min(seconds, MAX_SECONDS)


def _why_hung(seconds: float) -> str:
    return f"the compute thread has hung for {seconds:.0f} s"
