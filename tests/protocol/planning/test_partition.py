"""Layers over nodes in a given order: their own bytes, bounds, and fixed spans."""

import pytest

from meshllm.names import Span
from meshllm.protocol.planning.plan import PlanConstraints
from meshllm.protocol.planning.policies import make_plan
from tests.builders.offers import A, B, C, model, offer, spans
from tests.builders.policies import EXACT_POLICIES, NEAR, POLICIES


def test_a_bound_that_unequal_layers_cannot_reach_is_not_trusted() -> None:
    # The quick nodes have room for 160 of 560 bytes each: only the slow one holds the last layer.
    offers = [offer(A, 3, ms=3), offer(B, 2, ms=2), offer(C, 2, ms=2)]

    plan = make_plan(offers, NEAR, model(sizes=(160, 80, 80, 240)))

    assert [str(stage.span) for stage in plan.stages] == ["0:1", "1:3", "3:4"]
    assert plan.stages[-1].node == A


def test_a_ring_of_the_same_bound_may_be_faster() -> None:
    # Both orders have one bound; only the quick node should hold the layer of 240 bytes.
    offers = [offer(A, 3, ms=2), offer(B, 3, ms=1)]

    plan = make_plan(offers, NEAR, model(sizes=(240, 80)))

    assert spans(plan) == {B: "0:1", A: "1:2"}


@pytest.mark.parametrize("policy", POLICIES)
def test_large_layers_count_by_their_own_bytes(policy: str) -> None:
    offers = [offer(A, 5), offer(B, 5)]

    plan = make_plan(offers, NEAR, model(sizes=(80, 80, 80, 160, 240, 160)), policy=policy)

    assert [str(stage.span) for stage in plan.stages] == ["0:4", "4:6"]


@pytest.mark.parametrize("policy", EXACT_POLICIES)
def test_a_fixed_span_stays_on_its_node(policy: str) -> None:
    offers = [offer(at, 9) for at in (A, B, C)]

    plan = make_plan(
        offers, NEAR, model(6), policy=policy, terms=PlanConstraints(spans={B: Span(2, 3)})
    )

    assert spans(plan)[B] == "2:3"
    assert [stage.span.stop for stage in plan.stages][-1] == 6


def test_the_node_of_layer_0_is_the_entry() -> None:
    offers = [offer(A, 9), offer(B, 9, ms=9)]

    plan = make_plan(
        offers, NEAR, model(6), terms=PlanConstraints(spans={B: Span(0, 2), A: Span(2, 6)})
    )

    assert spans(plan) == {B: "0:2", A: "2:6"}


def test_fixed_spans_of_others_leave_a_node_out() -> None:
    terms = PlanConstraints(spans={A: Span(0, 2), B: Span(2, 4)})

    plan = make_plan([offer(at, 9) for at in (A, B, C)], NEAR, model(4), terms=terms)

    assert spans(plan) == {A: "0:2", B: "2:4"}
    assert plan.standbys[0].reason == "the fixed spans leave it no layer"


def test_an_entry_may_be_given_with_fixed_later_spans() -> None:
    terms = PlanConstraints(entry=A, spans={B: Span(2, 4)})

    plan = make_plan([offer(at, 9) for at in (A, B)], NEAR, model(4), terms=terms)

    assert spans(plan) == {A: "0:2", B: "2:4"}
