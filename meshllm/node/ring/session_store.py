"""The caches that a rank keeps between sessions, and over a change of plan."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Self

from meshllm.model.split.received_rows import ReceivedRows
from meshllm.model.split.session_cache import SessionCache
from meshllm.model.split.structure import PROBE_ERRORS
from meshllm.model.steps.runner import SpanRunner
from meshllm.names import NodeId, SessionId, Span
from meshllm.node.ring.model_runtime import ModelRuntime
from meshllm.protocol.kv_cache.budget import KvBudget
from meshllm.protocol.kv_cache.prefix_index import RESUME_S, prefix_index_for
from meshllm.protocol.kv_cache.prefix_matching import PrefixCache
from meshllm.protocol.planning.plan import Plan

Received = Mapping[SessionId, ReceivedRows]
"""What another node has handed over of the layers of a span."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SessionStore:
    """The prefix cache of a rank; it outlives a ring, with the layers that stay on this node."""

    plan: Plan
    """The plan that it was moved to last."""
    prefixes: PrefixCache[SessionCache]
    """Its index and caches, and on the entry the texts."""
    opened_s: float = inf
    """When the ring of that plan opened, on the driver's clock."""

    @classmethod
    def empty(
        cls,
        plan: Plan,
        budget: KvBudget,
        model: ModelRuntime,
        me: NodeId,
        before: Plan | None,
    ) -> Self:
        """Start empty; layers of this node, and those moved since ``before``, count as lost."""
        index = prefix_index_for(budget, model.prefix_bytes, model.max_crop, resumes=model.resumes)
        prefixes = PrefixCache[SessionCache](index, model.max_crop)
        own = plan.stages[plan.rank(me) or 0].span
        moved = _moved(before, plan) if before and before.layers == plan.layers else ()
        prefixes.lose({*moved, *range(own.start, own.stop)})
        return cls(plan, prefixes)

    def move(self, plan: Plan, me: NodeId, budget: KvBudget, now: float) -> None:
        """Count what is kept in the budget of another plan, and note the layers that it moves.

        What does not fit is evicted. An entry that becomes a stage keeps its caches without the
        texts. A stage that becomes the entry has caches only for those who know their keys, see
        `PrefixCache.resume`.
        """
        if plan != self.plan:
            if now > self.opened_s + RESUME_S:  # else a session of a ring before it may go on
                self.prefixes.forget_moves()
            self.opened_s = inf
        if plan.stages[0].node != self.plan.stages[0].node:
            self.prefixes.change_entry(is_entry=plan.rank(me) == 0)
        self.prefixes.lose(_moved(self.plan, plan))
        self.prefixes.move(budget)
        self.plan = plan

    def opened(self, now: float) -> None:
        """Note that a ring of the plan opens."""
        self.opened_s = min(self.opened_s, now)

    def regroup(self, layers: SpanRunner, received: Received) -> None:
        """Move all caches to the pieces of another span; runs on the compute thread."""
        for cache in self.prefixes.caches.values():
            layers.regroup(cache)
        _adopt(layers, self.prefixes.caches, received)

    def held(self, session: SessionId) -> int:
        """Return how many positions of a kept session all layers hold."""
        cache = self.prefixes.caches.get(session)
        return cache.length if cache else 0

    def add(self, caches: Mapping[SessionId, SessionCache], span: Span, now: float) -> None:
        """Keep sessions of a lost ring in which this node had no rank, see `begun`."""
        for session, cache in caches.items():
            longest = max(part.length for part in cache.parts)
            self.prefixes.keep_begun(session, cache.length, longest, cache, span, now)


def begun(layers: SpanRunner, received: Received) -> dict[SessionId, SessionCache]:
    """Return caches with what was handed over; runs on the compute thread."""
    caches = {session: layers.new_cache() for session in received}
    _adopt(layers, caches, received)
    return {session: cache for session, cache in caches.items() if cache.length}


def _adopt(
    layers: SpanRunner, caches: Mapping[SessionId, SessionCache], received: Received
) -> None:
    pairs = [(caches[each], rows) for each, rows in received.items() if each in caches]
    try:
        layers.adopt(pairs)
    except (MemoryError, *PROBE_ERRORS):  # of model code; what is missing is computed again
        logger.warning("KV caches that were handed over are not used", exc_info=True)


def _moved(before: Plan, after: Plan) -> list[int]:
    """Return the layers that another node holds."""
    one, other = (
        [stage.node for stage in plan.stages for _ in range(len(stage.span))]
        for plan in (before, after)
    )
    pairs = zip(one, other, strict=True)
    return [layer for layer, (was, is_) in enumerate(pairs) if was != is_]
