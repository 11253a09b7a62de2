"""Why the ring of an answer was lost, and which nodes took its layers over."""

from collections.abc import Callable, Collection, Iterator

from meshllm.names import LossCause, NodeId, Span
from meshllm.protocol.planning.plan import Plan


def explain(
    before: Plan | None,
    after: Plan | None,
    *,
    alive: Collection[NodeId],
    leaving: Collection[NodeId],
    name: Callable[[NodeId], str],
) -> tuple[LossCause, str]:
    """Return why a ring was lost and another one serves, as a cause and as a phrase.

    Nodes that are `leaving` or have left are not counted as lost.
    """
    if before is None or after is None or before == after:
        return LossCause.LINK_LOST, "a link was lost for a moment"
    nodes = [stage.node for stage in before.stages]
    left = [node for node in nodes if node in leaving]
    lost = [node for node in nodes if node not in alive and node not in leaving]
    away = [f"{name(node)} is gone" for node in lost] + [f"{name(node)} left" for node in left]
    what = ", ".join(away) or "the ring has a new plan"
    taken = [f"{name(node)} takes layers {span}" for node, span in _taken(before, after)]
    cause = LossCause.NODE_LEFT if left else LossCause.REPLANNED
    return LossCause.NODE_LOST if lost else cause, "; ".join((what, *taken))


def _taken(before: Plan, after: Plan) -> Iterator[tuple[NodeId, Span]]:
    """Yield the layers of each node that it did not hold before."""
    held = {stage.node: stage.span for stage in before.stages}
    for stage in after.stages:
        span, had = stage.span, held.get(stage.node, Span(0, 0))
        ends = (span.start, min(had.start, span.stop)), (max(had.stop, span.start), span.stop)
        yield from ((stage.node, Span(start, stop)) for start, stop in ends if start < stop)
