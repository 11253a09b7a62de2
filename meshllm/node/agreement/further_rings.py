"""The further rings of a node, which serve with a share of its memory, see `grouping`.

Theory of operation
-------------------
A further ring sees the records as that ring does. It publishes its offer as a share of the profile,
and its state as a membership. All rings of a node compute on one thread, in turn. If the first ring
of the node ends, a further one may be named as the first. It ends and begins again with all of the
memory, once no session is in progress or after `DRAIN_S`: until then it serves with its share.
Other further rings end meanwhile; new ones wait, as the first ring may still hold its model.

A node that cannot serve in a ring for now, whose model it serves in another one, tells the others,
which plan without it, and takes no share for that ring until its backoff has passed.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from meshllm.errors import ModelError
from meshllm.names import GroupId, ModelKey
from meshllm.node.agreement.offer import FIRST_RETRY_S, LAST_RETRY_S, NodeOffer
from meshllm.node.agreement.plan_follower import SETTLE_S
from meshllm.node.agreement.ring_server import NodeParts, RingServer
from meshllm.node.timer import loop_time

MOVE_S = 10.0  # s that a node waits for the end of its sessions before it leaves a ring
DRAIN_S = 60.0  # s more for a further ring that will be the first

logger = logging.getLogger(__name__)

Failed: TypeAlias = Callable[[ModelKey, ModelError], None]
"""Called with a model that cannot be served here, and why."""


class SecondaryRing:
    """One further ring, until it has ended."""

    def __init__(self, parts: NodeParts, group: GroupId, memory: int) -> None:
        def why() -> str:
            return self.server.reason()

        self._parts = parts
        self._group = group
        member = parts.state.begin_further(group, why)
        bare = replace(parts.offer.profile, weights=(), layer_s=(), model="", shares=())
        offer = NodeOffer(bare, partial(parts.offer.share, group), member, parts.call_later)
        self.server = RingServer(parts, member, offer, memory=memory)
        self.is_stopped = False
        """Whether it ends, and the node goes on without this ring."""
        self.latest: float | None = None
        """When it ends if it still is not wanted then, in loop time; None while it is wanted."""
        self._task: asyncio.Task[None] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether its model was opened and measured here, until it has ended."""
        return self.server.member.runtime is not None

    def begin(self, failed: Failed, ended: Callable[[], None]) -> None:
        """Serve in the background; ``ended`` is called in the end, ``failed`` before if it did."""
        self._task = self._parts.spawn(partial(self._run, failed, ended))

    async def _run(self, failed: Failed, ended: Callable[[], None]) -> None:
        """Serve until cancelled, or until the model cannot be served here."""
        ring = self.server.member.charter
        try:
            async with asyncio.TaskGroup() as tasks:
                self.server.planner.invalidate()
                tasks.create_task(self.server.planner.run())
                tasks.create_task(self.server.serve())
        except* ModelError as errors:
            self.is_stopped = True
            if ring is not None:
                failed(ring.key, _first_of(errors))
        finally:
            ended()
            self._leave()

    def end(self, patience_s: float) -> None:
        """End soon if no session is in progress or it is late."""
        now = loop_time()
        if self.latest is None:
            self.latest = now + MOVE_S
        if self.is_stopped or (self.server.sessions and now < self.latest + patience_s):
            return
        if self._task is not None:
            self.is_stopped = True
            self._task.cancel()

    def resize(self, memory: int) -> None:
        """Use this much memory."""
        if memory != self.server.memory:
            self.server.memory = memory
            self.server.offer.resize(memory)

    def _leave(self) -> None:
        self._parts.state.end_further(self._group)
        self.server.offer.close()
        if self.is_stopped:  # else the whole node stops
            self.server.end(self._group)
            self._parts.offer.share(self._group, None)
        else:
            self.server.member.end(self._group)


class SecondaryRings:
    """Begins, resizes and ends further rings as the records name them."""

    def __init__(self, parts: NodeParts, failed: Failed) -> None:
        self.rings: dict[GroupId, SecondaryRing] = {}
        """Those that have not ended."""
        self.next_first: GroupId | None = None
        """The group that will be the first ring of this node."""
        self._parts = parts
        self._failed = failed
        # Groups, and memory; None to look again.
        self._wanted: Mapping[GroupId, int] | None = {}
        self._retry_s: dict[GroupId, float] = {}  # of those that could not be served in this run

    def want(self, wanted: Mapping[GroupId, int]) -> None:
        """Take part in these rings, with so much memory, once they have been wanted for a while."""
        if wanted != self._wanted:
            self._wanted = wanted
            self._parts.call_later(SETTLE_S, self._change, wanted)

    def _change(self, wanted: Mapping[GroupId, int]) -> None:
        """Take part in these further rings, and in no others.

        Those that still have sessions end later; new ones wait until all of these have ended, for
        their memory and their places in the state record.
        """
        if wanted is not self._wanted or self._parts.state.is_leaving:
            return
        if self._end_others(wanted):
            self._parts.call_later(SETTLE_S, self._change, wanted)
            return
        for group, memory in wanted.items():
            running = self.rings.get(group)
            if group in self._parts.state.refused:
                continue
            if running is None:
                self._begin(group, memory)
            elif not running.is_stopped:  # else it begins again once it has ended
                running.resize(memory)

    def _end_others(self, wanted: Collection[GroupId]) -> bool:
        """End the rings that are not wanted; return whether there are some."""
        for group, at in self.rings.items():
            if group in wanted:
                at.latest = None
            else:
                at.end(DRAIN_S if group == self.next_first else 0.0)
        return not self.rings.keys() <= set(wanted)

    def _begin(self, group: GroupId, memory: int) -> None:
        ring = self.rings[group] = SecondaryRing(self._parts, group, memory)
        ring.begin(partial(self._give_up, group), partial(self._ended, group))

    def _give_up(self, group: GroupId, model: ModelKey, error: ModelError) -> None:
        """Stay out of a ring for a while; release its model unless another ring holds it."""
        others = (each.charter for each in self._parts.state.members if each.group != group)
        if not any(each and each.key == model for each in others):
            self._failed(model, error)
            return
        self._end_backoff(group)
        retry_s = self._retry_s.get(group, FIRST_RETRY_S)
        self._retry_s[group] = min(2 * retry_s, LAST_RETRY_S)
        self._parts.state.refused.add(group)
        self._parts.call_later(retry_s, self._try_again, group)
        logger.warning(
            "this node cannot serve in one more ring of its model, it tries again in %.0f s: %s",
            retry_s,
            error,
        )

    def _try_again(self, group: GroupId) -> None:
        self._parts.state.refused.discard(group)
        self._parts.state.publish()
        self._look_again()

    def _ended(self, group: GroupId) -> None:
        self._end_backoff(group)
        del self.rings[group]
        self._look_again()

    def _end_backoff(self, group: GroupId) -> None:
        """Begin with the shortest pause at the next failure of a ring that could begin."""
        if self.rings[group].has_begun:
            self._retry_s.pop(group, None)

    def _look_again(self) -> None:
        """Begin what is wanted at the next look at the records, though the same was wanted."""
        self._wanted = None
        self._parts.changed()


def _first_of(group: BaseExceptionGroup[ModelError]) -> ModelError:
    """Return the first error of a group, which may hold groups."""
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first
