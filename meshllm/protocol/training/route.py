"""Which node of a ring takes a batch."""

from meshllm.names import NodeId, Span
from meshllm.protocol.planning.plan import Plan


def holder(plan: Plan, span: Span) -> NodeId | None:
    """Return the node that holds all layers of a span; None if several hold parts of it."""
    for stage in plan.stages:
        if span.start in stage.span and span.stop <= stage.span.stop:
            return stage.node
    return None
