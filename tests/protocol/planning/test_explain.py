"""Why a node stands by, and what a model lacks."""

from dataclasses import replace

import pytest

from meshllm.errors import ModelError
from meshllm.names import Span
from meshllm.protocol.planning.plan import Ends, PlanConstraints
from meshllm.protocol.planning.policies import make_plan
from tests.builders.offers import A, B, C, apart, model, offer, spans
from tests.builders.policies import EXACT_POLICIES, GIB, NEAR


def test_the_reason_of_a_slower_standby_is_its_cost() -> None:
    plan = make_plan([offer(A, 4, ms=1), offer(B, 4, ms=3)], apart({}), model(4))

    assert spans(plan) == {A: "0:4"}
    assert plan.standbys[0].reason == "its link adds 2.0 ms and its layers cost 2.0 ms"


@pytest.mark.parametrize(
    ("memories", "terms", "message"),
    [
        (
            [1e-6],
            PlanConstraints(),
            "1.0 KiB of usable",
        ),
        ([2e-9], PlanConstraints(), "2 B of usable"),
        (
            [],
            PlanConstraints(),
            "The ring lacks 4.5 GiB: `tiny` needs 4.0 GiB for 4 layers with KV caches and",
        ),
        (
            [1.0, 2.0],
            PlanConstraints(),
            "lacks 1.5 GiB: .* and 512.0 MiB for embedding .* have 3.0 GiB of usable memory",
        ),
        ([0.5, 8.0], PlanConstraints(entry=A), "lacks 1.0 GiB"),
        ([8.0, 8.0], PlanConstraints(exclude=[A, B]), "lacks 4.5 GiB"),
        ([0.0, 8.0], PlanConstraints(entry=A, ends=Ends.CLIENT), "lacks 512.0 MiB"),
        ([2.0, 2.0, 2.0], PlanConstraints(members=2), "lacks 1.0 GiB"),
        ([0.8, 1.6], PlanConstraints(), "lacks 2.7 GiB"),
        (
            [8.0],
            PlanConstraints(spans={A: Span(0, 3)}),
            "No node may hold layers `3:4` of `tiny`: all have fixed layers",
        ),
        (
            [8.0, 8.0],
            PlanConstraints(spans={A: Span(0, 1), B: Span(2, 4)}),
            "No node may hold layers `1:2` of `tiny`",
        ),
        ([8.0, 0.5], PlanConstraints(spans={A: Span(0, 3)}), "lacks 1.0 GiB"),
        (
            [8.0, 8.0],
            PlanConstraints(prefer=[A, B], members=1),
            "No ring was found that holds `tiny` in whole",
        ),
        ([8.0, 8.0], PlanConstraints(members=3), "No ring was found"),
    ],
)
@pytest.mark.parametrize("policy", EXACT_POLICIES)
def test_a_model_that_does_not_fit_is_refused_with_what_is_missing(
    policy: str, memories: list[float], terms: PlanConstraints, message: str
) -> None:
    names = [A, B, C]
    offers = [offer(at, memory * GIB / 80) for at, memory in zip(names, memories, strict=False)]
    shape = model(sizes=(GIB,) * 4, ends=GIB // 2)

    with pytest.raises(ModelError, match=message) as caught:
        make_plan(offers, NEAR, shape, policy=policy, terms=terms)

    assert caught.value.hint


def test_the_reason_of_a_small_standby_is_the_size_of_a_layer() -> None:
    shape = model(sizes=(GIB, GIB))
    offers = [offer(A, GIB / 20), offer(B, GIB / 200), offer(C, GIB / 20)]

    plan = make_plan(offers, NEAR, shape, terms=PlanConstraints(members=2))

    assert [standby.reason for standby in plan.standbys] == [
        "a layer takes 1.0 GiB and it has 409.6 MiB of usable memory"
    ]


def test_a_node_that_reserves_all_memory_is_not_reported_as_excluded() -> None:
    greedy = replace(offer(B, 4), reserve_bytes=1000)

    plan = make_plan([offer(A, 4), greedy], NEAR, model(4))

    assert plan.standbys[0].reason == "a layer takes 80 B and it has 0 B of usable memory"


def test_a_surplus_node_has_a_reason() -> None:
    offers = [offer(at, 1) for at in (A, B, C)]

    full = make_plan(offers, NEAR, model(2))
    bound = make_plan(
        [offer(at, 9) for at in (A, B, C)], NEAR, model(4), terms=PlanConstraints(members=2)
    )

    assert [standby.reason for standby in full.standbys] == [
        "each of the 2 layers has its own node"
    ]
    assert [standby.reason for standby in bound.standbys] == ["the ring is limited to 2 nodes"]


def test_a_ring_of_one_node_is_limited_to_one_node() -> None:
    offers = [offer(at, 9) for at in (A, B)]

    plan = make_plan(offers, NEAR, model(4), terms=PlanConstraints(members=1))

    assert [standby.reason for standby in plan.standbys] == ["the ring is limited to 1 node"]
