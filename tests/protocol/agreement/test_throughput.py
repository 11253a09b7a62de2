"""What rings give together, some of whose nodes are in several."""

from fractions import Fraction

from meshllm.names import NodeId, Span
from meshllm.protocol.agreement.throughput import TimedRing, limit, loads, plan_ring, throughput
from meshllm.protocol.planning.plan import Ends, Links, LinkSpeed, Offer, Plan, PlanStage
from tests.builders.offers import A, B, C
from tests.builders.sharing import served_model

MODEL = served_model(0, 12)
MS = 10**6  # ns


def offer(node: NodeId, layers: int = 12, layer_s: float = 0.01, head_s: float = 0.0) -> Offer:
    return Offer(node, layers * 100 + 10, ((1, layer_s),), head_s)


def ring(*stages: tuple[NodeId, int, int], head_s: float = 0.0, layer_s: float = 0.01) -> TimedRing:
    plan = Plan(1, "m0", Ends.ENTRY, tuple(PlanStage(at, Span(*span)) for at, *span in stages))
    offers = {at: offer(at, layer_s=layer_s, head_s=head_s) for at, *_ in stages}
    return TimedRing(plan, MODEL.shape, offers)


def linked(*nodes: NodeId) -> Links:
    wire = LinkSpeed(0.001)
    return Links({(one, other): wire for one in nodes for other in nodes if one < other})


def test_the_slowest_node_of_a_ring_determines_what_it_gives() -> None:
    assert throughput([ring((A, 0, 9), (B, 9, 12))]) == Fraction(1, 90 * MS)
    assert throughput([ring((A, 0, 9), (B, 9, 12), head_s=0.5)]) == Fraction(1, 590 * MS)


def test_a_node_in_several_rings_computes_in_turn() -> None:
    first, second = ring((A, 0, 12)), ring((B, 0, 6), (A, 6, 12))
    other = ring((B, 0, 12), layer_s=0.02)

    assert loads([first, second, other]) == {A: 180 * MS, B: 300 * MS}
    assert throughput([first]) == Fraction(1, 120 * MS)
    assert throughput([first, second]) == Fraction(2, 180 * MS)
    assert throughput([first, second], [other]) == Fraction(1, 180 * MS) + Fraction(1, 300 * MS)


def test_a_node_whose_speed_is_unknown_counts_as_fast() -> None:
    known = ring((A, 0, 9), (B, 9, 12))

    assert throughput([TimedRing(known.plan, known.shape, {B: known.offers[B]})]) == Fraction(
        1, 30 * MS
    )
    assert throughput([TimedRing(known.plan, known.shape, {})]) == 1


def test_no_rings_of_nodes_exceed_what_these_compute() -> None:
    first, second = ring((A, 0, 12)), ring((B, 0, 6), (A, 6, 12))
    most = limit([offer(A), offer(B)], 12)

    assert most == Fraction(2, 120 * MS)
    assert throughput([ring((A, 0, 6), (B, 6, 12))]) == most
    assert throughput([first, second]) < most
    assert limit([offer(A, layer_s=1e-12)], 1) == 1


def test_nodes_plan_a_ring_of_their_own_whatever_the_order() -> None:
    offers, links = [offer(A, 8), offer(B, 8)], linked(A, B, C)

    plan = plan_ring(MODEL, offers, links, {})

    assert plan is not None
    assert {stage.node for stage in plan.stages} == {A, B}
    assert plan == plan_ring(MODEL, offers[::-1], linked(C, B, A), {})


def test_fixed_spans_hold_and_contradictions_give_no_ring() -> None:
    offers, links = [offer(A), offer(B)], linked(A, B)
    last = Span(8, 12)

    plan = plan_ring(MODEL, offers, links, {B: last})

    assert plan is not None
    assert plan.stages[-1] == PlanStage(B, last)
    assert plan_ring(MODEL, offers, links, {A: last, B: last}) is None
    assert plan_ring(MODEL, [offer(A, 5)], links, {}) is None
    assert plan_ring(MODEL, [offer(A, 8), offer(B, 8)], Links({}, LinkSpeed(3600.0)), {}) is None
