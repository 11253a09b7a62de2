"""Why the ring of an answer was lost, and which nodes took its layers over."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeAlias

from meshllm.names import GroupId, LossCause, NodeId, Span
from meshllm.protocol.planning.plan import Plan

RingPlan: TypeAlias = tuple[GroupId, Plan]
"""A ring, and the plan that it follows."""

_PHRASES = {
    LossCause.NODE_LOST: "is gone",
    LossCause.NODE_HUNG: "hangs",
    LossCause.NODE_REFUSED: "is refused",
    LossCause.NODE_LEFT: "left",
    LossCause.NODE_SILENT: "is silent",
}
"""What happened to a node, by the cause; the first cause among the nodes of a ring counts."""


class RecomputedRows:
    """Rows that a node computed again, each under the cause of the loss before its ring."""

    def __init__(self) -> None:
        self._by_cause = Counter[LossCause]()
        self._cause = LossCause.REPLANNED
        self._total = 0

    def count(self, total: int) -> Counter[LossCause]:
        """Count up to a ``total`` over all causes, which only grows; return the rows by cause."""
        self._by_cause[self._cause] += total - self._total
        self._total = total
        return +self._by_cause

    def lost(self, cause: LossCause, total: int) -> None:
        """Count rows after this ``total`` under another cause."""
        self.count(total)
        self._cause = cause

    def end(self, total: int) -> None:
        """Count up to a ``total`` that begins at 0 again."""
        self.count(total)
        self._total = 0


def explain(
    before: RingPlan | None,
    after: RingPlan | None,
    *,
    alive: Collection[NodeId],
    out: Mapping[LossCause, Collection[NodeId]],
    name: Callable[[NodeId], str],
) -> tuple[LossCause, str]:
    """Return why a ring was lost, as a cause and as a phrase with who took its layers over.

    ``after`` is its next plan, or another ring that goes on; None if that is unknown.

    ``out`` are nodes that are silent, hang, are refused, are leaving or have left; these are not
    counted as lost.
    """
    if before is None or before == after:
        return LossCause.LINK_LOST, "a link was lost for a moment"
    group, plan = before
    nodes = [stage.node for stage in plan.stages]
    away = {node: cause for cause in reversed(_PHRASES) for node in out.get(cause, ())}
    away |= {node: LossCause.NODE_LOST for node in nodes if node not in {*alive, *away}}
    causes = [cause for cause in _PHRASES if cause in map(away.get, nodes)]
    phrases = [
        f"{name(node)} {_PHRASES[cause]}"
        for cause in causes
        for node in nodes
        if away.get(node) is cause
    ]
    if after is None or after[0] != group:
        others = ("another ring goes on",) if after else ()
        what = ", ".join(phrases) or "a link was lost"
        return next(iter(causes), LossCause.LINK_LOST), "; ".join((what, *others))
    what = ", ".join(phrases) or "the ring has a new plan"
    taken = [f"{name(node)} takes layers {span}" for node, span in _taken(plan, after[1])]
    return next(iter(causes), LossCause.REPLANNED), "; ".join((what, *taken))


def _taken(before: Plan, after: Plan) -> Iterator[tuple[NodeId, Span]]:
    """Yield the layers of each node that it did not hold before."""
    held = {stage.node: stage.span for stage in before.stages}
    for stage in after.stages:
        span, had = stage.span, held.get(stage.node, Span(0, 0))
        ends = (span.start, min(had.start, span.stop)), (max(had.stop, span.start), span.stop)
        yield from ((stage.node, Span(start, stop)) for start, stop in ends if start < stop)
