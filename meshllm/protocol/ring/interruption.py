"""Why the ring of an answer was lost, and which nodes took its layers over."""

from collections.abc import Callable, Collection, Iterator, Mapping

from meshllm.names import LossCause, NodeId, Span
from meshllm.protocol.planning.plan import Plan

_PHRASES = {
    LossCause.NODE_LOST: "is gone",
    LossCause.NODE_HUNG: "hangs",
    LossCause.NODE_REFUSED: "is refused",
    LossCause.NODE_LEFT: "left",
    LossCause.NODE_SILENT: "is silent",
}
"""What happened to a node, by the cause; the first cause among the nodes of a ring counts."""


def explain(
    before: Plan | None,
    after: Plan | None,
    *,
    alive: Collection[NodeId],
    out: Mapping[LossCause, Collection[NodeId]],
    name: Callable[[NodeId], str],
) -> tuple[LossCause, str]:
    """Return why a ring was lost and another one serves, as a cause and as a phrase.

    ``out`` are nodes that are silent, hang, are refused, are leaving or have left; these are not
    counted as lost.
    """
    if before is None or after is None or before == after:
        return LossCause.LINK_LOST, "a link was lost for a moment"
    nodes = [stage.node for stage in before.stages]
    away = {node: cause for cause in reversed(_PHRASES) for node in out.get(cause, ())}
    away |= {node: LossCause.NODE_LOST for node in nodes if node not in {*alive, *away}}
    causes = [cause for cause in _PHRASES if cause in map(away.get, nodes)]
    phrases = [
        f"{name(node)} {_PHRASES[cause]}"
        for cause in causes
        for node in nodes
        if away.get(node) is cause
    ]
    what = ", ".join(phrases) or "the ring has a new plan"
    taken = [f"{name(node)} takes layers {span}" for node, span in _taken(before, after)]
    return next(iter(causes), LossCause.REPLANNED), "; ".join((what, *taken))


def _taken(before: Plan, after: Plan) -> Iterator[tuple[NodeId, Span]]:
    """Yield the layers of each node that it did not hold before."""
    held = {stage.node: stage.span for stage in before.stages}
    for stage in after.stages:
        span, had = stage.span, held.get(stage.node, Span(0, 0))
        ends = (span.start, min(had.start, span.stop)), (max(had.stop, span.start), span.stop)
        yield from ((stage.node, Span(start, stop)) for start, stop in ends if start < stop)
