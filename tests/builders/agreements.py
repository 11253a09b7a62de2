"""Meshes that agree on a ring, and what they agreed on."""

from meshllm.names import NodeId, Span
from meshllm.protocol.agreement.agreement import Agreement
from meshllm.protocol.planning.plan import Ends, Plan, PlanStage
from tests.builders.offers import A, B, C
from tests.builders.snapshots import World, profile

ALONE = World({A: profile(4)})
THREE = World({A: profile(2), B: profile(2), C: profile(2)})


def ring(*stages: tuple[NodeId, int, int], epoch: int = 5) -> Plan:
    return Plan(epoch, "tiny", Ends.ENTRY, tuple(PlanStage(at, Span(a, b)) for at, a, b in stages))


def planned(agreement: Agreement) -> Plan:
    assert agreement.plan is not None, agreement.reason
    return agreement.plan


def standbys(agreement: Agreement) -> dict[NodeId, str]:
    return {each.node: each.reason for each in agreement.standbys}
