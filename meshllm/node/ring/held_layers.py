"""The layers that a node holds for a ring: those of its rank, and those of a plan that may follow.

What lives as long as the layers of the rank is here, too: their caches, the limits of their jobs,
and how many rows they have computed again.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from meshllm.errors import MeshError, OutOfMemory
from meshllm.model.shape import free_memory
from meshllm.model.split.received_rows import ReceivedRows
from meshllm.model.split.session_cache import SessionCache
from meshllm.names import Digest, NodeId, SessionId, Span
from meshllm.node.ring.kv_transfer import KvReceiver
from meshllm.node.ring.model_runtime import ModelRuntime
from meshllm.node.ring.session_store import Received, SessionStore, begun
from meshllm.node.ring.span_loader import LoadedSpan
from meshllm.node.session.stage import StageNode
from meshllm.node.timer import loop_time
from meshllm.protocol.kv_cache.budget import KvBudget
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.ring.hang import HangLimits

logger = logging.getLogger(__name__)

_Part = tuple[Span, bool, bool]
"""See `_part_of`."""
_LATE = None, True
"""Equals nothing that is foreseen, so that the next `prepare` releases what came too late."""


class HeldLayers:
    """Loads and releases layers; layers for a plan that may follow take memory lent by caches."""

    def __init__(  # noqa: PLR0913 -- its node, and what it asks of the rank
        self,
        me: NodeId,
        model: ModelRuntime,
        tasks: asyncio.TaskGroup,
        sessions: Callable[[], int],
        changed: Callable[[], None],
        stage: Callable[[], StageNode | None],
        hand_over: Callable[[Plan], Coroutine[Any, Any, None]],
    ) -> None:
        """Hold nothing yet; load in advance in ``tasks``.

        ``sessions`` returns how many the rank has; ``changed`` is called once `prepared` has.
        ``stage`` returns the rank if it is a stage at work. ``hand_over`` sends KV caches to
        the nodes of a plan that this one leaves.
        """
        self._me = me
        self._model = model
        self._tasks = tasks
        self._sessions = sessions
        self._changed = changed
        self._stage = stage
        self._hand_over = hand_over
        self.span: LoadedSpan | None = None
        """The layers of the rank."""
        self.store: SessionStore | None = None
        """Their caches, which outlive a change of plan."""
        self.limits = HangLimits()
        """Of the jobs of the span."""
        self._recomputed = 0  # by earlier spans, and in all layers of the rings of this entry
        self._foreseen: tuple[Plan | None, bool] = None, False  # a plan, and whether it is urgent
        self._preparing: asyncio.Task[None] | None = None
        self._ahead: _Part | None = None  # what may be loaded in advance, or just be loading
        self.prepared: Plan | None = None
        """The plan that may follow for which this node has loaded what it can."""
        self.preloaded: Plan | None = None
        """The plan that may follow whose span this node has loaded."""
        self.is_handed_over = False
        """Whether the plan in force was prepared, so that a node may have handed over caches."""
        self._receivers: dict[NodeId, KvReceiver] = {}  # by the node that hands over its caches
        self._begun: dict[SessionId, SessionCache] = {}  # handed over, until there is a store
        self._handing: asyncio.Task[None] | None = None  # while this node hands over its caches
        self._lent = 0  # bytes for layers of the plan that may follow
        self._lent_rows = 0  # the same for caches that were handed over
        self._news = asyncio.Event()  # set, and replaced, when this node has prepared

    @property
    def recomputed(self) -> int:
        """Rows computed again after losses, times the layers that computed them."""
        return self._recomputed + (self.span.layers.recomputed if self.span else 0)

    @property
    def received_bytes(self) -> int:
        """What is counted for caches that are handed over for layers loaded in advance."""
        return sum(each.bytes for each in self._receivers.values())

    def note_recomputed(self, layers: int, rows: int) -> None:
        """Count rows that this many layers of all ranks have computed again."""
        self._recomputed += layers * rows

    # The plan in force.

    async def load(self, plan: Plan, budget: KvBudget | None) -> None:
        """Load the span of the plan in force; keep those caches that fit into the budget.

        Without a budget, as a node of the plan has left, all are kept, unless the memory is short:
        another plan will follow.

        Raises:
            MeshError: it cannot be loaded; all caches are dropped, to free memory for the next try.
        """
        self._stop_preparing()
        self.is_handed_over = self.prepared == plan
        self.preloaded = self.prepared = self._ahead = None  # it is used, or replaced
        self._foreseen = None, False
        self._drop_span()
        received, self._begun, self._lent = self._take_received(), {}, 0
        if store := self.store:
            used = budget or store.prefixes.index.budget
            store.move(plan, self._me, used, loop_time())
        try:
            await self._hold(plan, budget, received)
        except MeshError as error:
            if store:  # frames of the traceback still name it
                store.prefixes.clear()
            is_short = store is not None and budget is None and isinstance(error, OutOfMemory)
            self.store = store = None
            if not is_short:
                raise
        else:
            return
        await self._hold(plan, None, received)

    async def _hold(self, plan: Plan, budget: KvBudget | None, received: Received) -> None:
        store = self.store
        used = store.prefixes.index.budget if store else budget
        room, has = used.rooms[0].total if used else 0, self._has_caches
        self.span = await self._model.hold(plan, self._me, room, has_caches=has)
        if store:
            await self._model.worker.run(store.regroup, self.span.layers, received)
        elif received:
            self._begun = await self._model.worker.run(begun, self.span.layers, received)

    def caches(self, plan: Plan, budget: KvBudget, before: Plan | None) -> SessionStore:
        """Return the caches of the plan in force; ``before`` is the plan before it."""
        now = loop_time()
        if self.store is None:
            self.store = SessionStore.empty(plan, budget, self._model, self._me, before)
            if self.span:
                self.store.add(self._begun, self.span.span, now)
            self._begun = {}
        self.store.move(plan, self._me, budget, now)
        self.store.opened(now)
        if self._lent + self._lent_rows and not self._lend_all(is_urgent=self._foreseen[1]):
            self._take_back()
        return self.store

    def release(self) -> None:
        """Release the span and its caches; what was loaded in advance stays."""
        if self._handing is not None:
            self._handing.cancel()
        self._drop_span()
        self.store = None
        self._take_received()
        self._begun = {}
        self._model.unload()

    def _drop_span(self) -> None:
        self._recomputed, self.span = self.recomputed, None
        self.limits = HangLimits()

    @property
    def _has_caches(self) -> bool:
        return self.store is not None and len(self.store.prefixes.caches) > 0

    # A plan that may follow.

    def prepare(self, plan: Plan | None, *, is_urgent: bool) -> None:
        """Load the span of a plan that may follow; see `RingRuntime.prepare`."""
        wanted = plan, is_urgent
        if wanted != self._foreseen:
            self._foreseen = wanted
            self._stop_preparing()
            self._preparing = self._tasks.create_task(self._prepare(plan, is_urgent))

    def keep_preloaded(self) -> None:
        """Keep what is loaded in advance until `load` uses it."""
        self._foreseen = None, False

    def release_late(self) -> None:
        """Let the next `prepare` release what was loaded too late to be used."""
        if self._foreseen[0] is None:
            self._foreseen = _LATE

    async def _prepare(self, plan: Plan | None, is_urgent: bool) -> None:
        rank = plan.rank(self._me) if plan else None
        before = self.preloaded
        if plan is None or rank is None:
            await self._release_ahead()
            if plan and is_urgent:
                await self._hand_over_to(plan)
        elif before and _part_of(before, self._me) == _part_of(plan, self._me):
            self.preloaded = plan
            self._lend_all(is_urgent=is_urgent)
        else:
            if self._ahead != _part_of(plan, self._me):
                await self._release_ahead()
            await self._preload(plan, is_urgent)
        self._set_prepared(plan)

    async def _hand_over_to(self, plan: Plan) -> None:
        """Hand over KV caches, until that is done or the layers are released."""
        handing = self._handing = self._tasks.create_task(self._hand_over(plan))
        try:
            await asyncio.wait([handing])
        finally:
            handing.cancel()
            self._handing = None

    def _set_prepared(self, plan: Plan | None) -> None:
        self.prepared = plan
        news, self._news = self._news, asyncio.Event()
        news.set()
        self._changed()

    async def receiver(
        self, peer: NodeId, digest: Digest, room: Callable[[Plan], int]
    ) -> tuple[Plan, KvReceiver] | None:
        """Wait until this node has prepared for a plan; return what takes caches of a peer for it.

        None if it has not loaded the layers. ``room`` returns the bytes for caches in a plan. What
        the peer has handed over before is released.
        """
        while self.prepared is None or self.prepared.digest != digest:
            await self._news.wait()
        plan = self.prepared
        if self.preloaded != plan:
            return None
        if before := self._receivers.pop(peer, None):
            before.is_closed = True
        lend = partial(self._lend_rows, room(plan))
        receiver = self._receivers[peer] = KvReceiver(self._model.worker, lend, self._model)
        return plan, receiver

    def _take_received(self) -> Received:
        """Return what was handed over, and take no more of it."""
        receivers, self._receivers, self._lent_rows = self._receivers, {}, 0
        received = dict[SessionId, ReceivedRows]()
        for each in receivers.values():
            each.is_closed = True
            for session, rows in list(each.sessions.items()):  # one may come meanwhile
                received.setdefault(session, ReceivedRows()).join(rows)
        return received

    async def _preload(self, plan: Plan, is_urgent: bool) -> None:
        lend, has = partial(self._lend, is_urgent), self._has_caches or self._sessions() > 0
        self._ahead = _part_of(plan, self._me)
        try:
            await self._model.preload(plan, self._me, lend, is_urgent=is_urgent, has_caches=has)
        except MeshError as error:
            await self._release_ahead()  # also what an earlier task has loaded
            logger.info("layers of %s are not loaded in advance: %s", plan.stages, error)
        else:
            self.preloaded = plan
            logger.info("layers %s are loaded in advance", _part_of(plan, self._me)[0])

    def _lend(self, is_urgent: bool, size: int) -> bool:
        """Lend bytes of the room for caches, where this node has a rank, to layers."""
        self._lent = max(self._lent, size)  # nothing is missing if an earlier task has loaded them
        return self._lend_all(is_urgent=is_urgent)

    def _lend_all(self, *, is_urgent: bool) -> bool:
        """Lend what layers and handed over caches take; kept sessions make room for urgent ones."""
        if (store := self.store) is None:
            return True
        size, budget = self._lent + self._lent_rows, store.prefixes.index.budget
        if is_urgent and budget.has_room(size, without_kept=True):
            # A stage frees caches in order with what its compute thread has yet to keep.
            (self._stage() or store.prefixes).make_room(size)
        return budget.lend(size, self._take_back, is_urgent=is_urgent)

    def _lend_rows(self, room: int) -> bool:
        """Lend bytes to caches that are handed over, beside the layers; return whether they are."""
        size = self.received_bytes
        if size > room or size - self._lent_rows > free_memory():
            return False
        before, self._lent_rows = self._lent_rows, size
        if not (is_lent := self._lend_all(is_urgent=True)):
            self._lent_rows = before
        return is_lent

    def _take_back(self) -> None:
        """Release what is loaded in advance: a session needs its memory."""
        logger.info("layers that were loaded in advance are released for a session")
        self._stop_preparing()
        self._preparing = self._tasks.create_task(self._give_up())

    async def _give_up(self) -> None:
        await self._release_ahead()
        self._set_prepared(self._foreseen[0])

    async def _release_ahead(self) -> None:
        self.preloaded, self._ahead, self._lent = None, None, 0
        self._take_received()
        await self._model.release_ahead()
        if self.store is not None:
            self.store.prefixes.index.budget.end_loan()

    def _stop_preparing(self) -> None:
        if self._preparing is not None:
            self._preparing.cancel()


def _part_of(plan: Plan, node: NodeId) -> _Part:
    """Return what a node loads for a plan: its span, and whether it is the entry, or alone."""
    rank = plan.rank(node) or 0
    return plan.stages[rank].span, rank == 0, len(plan.stages) == 1
