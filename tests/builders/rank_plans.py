"""Plans for a model of one node after the other."""

from meshllm.names import Span
from meshllm.protocol.planning.plan import Ends, Plan, PlanStage
from tests.builders.offers import A, B, C


def plan_of(*spans: str, epoch: int = 1) -> Plan:
    stages = (
        PlanStage(node, Span.parse(span)) for node, span in zip((A, B, C), spans, strict=False)
    )
    return Plan(epoch, "tiny", Ends.ENTRY, tuple(stages))
