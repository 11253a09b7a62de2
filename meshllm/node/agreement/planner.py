"""The planner of a node: computes its groups, the agreement and what follows, off the event loop.

Planning takes about a second with many nodes, during which the event loop must keep serving tokens
and heartbeats. Its input is the latest snapshot when it begins. A result is discarded if its input
has changed meanwhile, but not twice in a row: a mesh whose records change faster than they can be
planned with still gets an agreement.

Groups are computed beside the agreement, not before it: the ring of a lost node awaits the plan
without that node, and nodes move between rings only once they have wanted to for a while.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeAlias

from meshllm.names import GroupId, NodeId
from meshllm.node.event_loop import OffLoop
from meshllm.protocol.agreement.advice import advise
from meshllm.protocol.agreement.agreement import Agreement
from meshllm.protocol.agreement.candidates import MeshView
from meshllm.protocol.agreement.grouping import (
    agree_on_ring,
    group_nodes,
    has_several,
    shortage,
)
from meshllm.protocol.agreement.groups import NodeGroups
from meshllm.protocol.agreement.takeover import takeover
from meshllm.protocol.planning.plan import Plan

QUIET_S = 0.5  # s without a new agreement before advice is computed, and what to prepare for

Compute: TypeAlias = Callable[[MeshView], Awaitable[Callable[[], None]]]
"""Computes something of a view; returns what to call if the result is not discarded."""


class Planner:
    """Computes the agreement, and advice for it, after each `invalidate`."""

    def __init__(
        self,
        view: Callable[[], MeshView | None],
        agreed: Callable[[], None],
        run: OffLoop,
        foreseen: Callable[[Plan | None], None] = lambda _: None,
        grouped: Callable[[], None] | None = None,
    ) -> None:
        """Take snapshots from ``view``, which returns None before there is a charter.

        ``agreed`` is called after each change of `agreement`, and ``foreseen`` later with the plan
        of the loss that this node prepares for. ``grouped`` is called after each change of `parts`
        and `lacks`: the planner of the first ring of a node computes them, that of a further one,
        without ``grouped``, does not.
        """
        self.agreement: Agreement | None = None
        """The latest of the group of this node; None before the first."""
        self.parts: Mapping[NodeId, NodeGroups] = {}
        """The groups in which each node should take part; empty while the mesh has one."""
        self.lacks: Mapping[GroupId, int] = {}
        """The bytes of memory that each group lacks, as `parts`; only of those that lack some."""
        self.advice = ""
        """A change that would make the ring faster; may be of the agreement before the latest."""
        self._view = view
        self._agreed = agreed
        self._foreseen = foreseen
        self._grouped = grouped
        self._off_loop = run
        self._to_plan = asyncio.Event()
        self._to_group = asyncio.Event()
        self._new_agreement = asyncio.Event()
        self._moves = 0  # from one group to another

    def move(self) -> None:
        """Forget the agreement: this node takes part in another group."""
        self.agreement, self.advice = None, ""
        self._moves += 1
        self.invalidate()

    def invalidate(self) -> None:
        """Plan again: the input may have changed."""
        self._to_plan.set()
        self._to_group.set()

    async def run(self) -> None:
        """Plan until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(self._to_plan, self._plan))
            group.create_task(self._advise())
            if self._grouped:
                group.create_task(self._follow(self._to_group, self._group))

    async def _follow(self, changed: asyncio.Event, compute: Compute) -> None:
        """Compute with the latest view after each change, until cancelled."""
        was_dropped = False
        while True:
            await changed.wait()
            changed.clear()
            if (view := self._view()) is None:
                continue
            take = await compute(view)
            now = self._view() if changed.is_set() else view
            has_moved = now is not None and now.group != view.group
            was_dropped = has_moved or (not was_dropped and now != view)
            if not was_dropped:
                take()

    async def _plan(self, view: MeshView) -> Callable[[], None]:
        agreement = await self._off_loop(agree_on_ring, view, self.agreement)
        return partial(self._take_agreement, agreement)

    def _take_agreement(self, agreement: Agreement | None) -> None:
        self.agreement = agreement
        self._new_agreement.set()
        self._agreed()

    async def _group(self, view: MeshView) -> Callable[[], None]:
        if not has_several(view):
            return partial(self._take_parts, {}, {})
        parts = await self._off_loop(group_nodes, view)
        return partial(self._take_parts, parts, await self._off_loop(shortage, view))

    def _take_parts(self, parts: Mapping[NodeId, NodeGroups], lacks: Mapping[GroupId, int]) -> None:
        assert self._grouped is not None  # else there is no task for it
        self.parts, self.lacks = parts, lacks
        self._grouped()

    async def _advise(self) -> None:
        advised: tuple[int, Agreement] | None = None
        while True:
            await self._new_agreement.wait()
            self._new_agreement.clear()
            await asyncio.sleep(QUIET_S)
            moves, agreement = self._moves, self.agreement
            if agreement is None or (moves, agreement) == advised or self._new_agreement.is_set():
                continue
            advice = await self._off_loop(advise, agreement)
            foreseen = await self._off_loop(takeover, agreement)
            if moves == self._moves:  # else both are about another ring
                self.advice, advised = advice, (moves, agreement)
                self._foreseen(foreseen)
