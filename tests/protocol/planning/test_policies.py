from collections.abc import Sequence
from dataclasses import replace
from math import floor
from unittest.mock import patch

import pytest

from meshllm.errors import ModelError, UserError
from meshllm.names import NodeId, Span
from meshllm.protocol.agreement.advice import advise
from meshllm.protocol.agreement.best_plan import to_division
from meshllm.protocol.membership.charter import Amendments, Term, merge
from meshllm.protocol.planning import policies
from meshllm.protocol.planning.partition import token_time
from meshllm.protocol.planning.plan import Ends, PlanConstraints
from meshllm.protocol.planning.policies import Policy, make_plan
from meshllm.protocol.planning.prediction import compare
from meshllm.protocol.planning.problem import build_problem
from tests.builders.offers import A, B, C, D, apart, model, node, offer, spans
from tests.builders.policies import NEAR, POLICIES
from tests.builders.snapshots import World, charter, profile


def test_one_node_that_fits_the_model_is_the_ring() -> None:
    plan = make_plan([offer(A, 4)], NEAR, model(4), epoch=3)

    assert (plan.epoch, plan.model, plan.ends) == (3, "tiny", Ends.ENTRY)
    assert spans(plan) == {A: "0:4"}
    assert plan.standbys == ()


def test_the_fastest_node_is_filled_first() -> None:
    plan = make_plan([offer(A, 4, ms=9), offer(B, 3, ms=1)], NEAR, model(4))

    assert sorted(spans(plan).values()) in (["0:1", "1:4"], ["0:3", "3:4"])
    assert [len(stage.span) for stage in plan.stages if stage.node == B] == [3]


def test_a_node_that_only_adds_latency_stands_by() -> None:
    offers = [offer(A, 4, ms=5), offer(B, 4, ms=4)]

    near = make_plan(offers, apart({}, others=1), model(4), terms=PlanConstraints(entry=A))
    far = make_plan(offers, apart({}, others=20), model(4), terms=PlanConstraints(entry=A))

    assert spans(near) == {A: "0:1", B: "1:4"}
    assert spans(far) == {A: "0:4"}
    assert [standby.reason for standby in far.standbys] == [
        "its link adds 40.0 ms and its layers save 3.0 ms"
    ]


def test_a_slow_head_makes_a_bad_entry() -> None:
    plan = make_plan([offer(A, 2, head_ms=9), offer(B, 2)], NEAR, model(4))

    assert plan.stages[0].node == B


TWO = PlanConstraints(members=2)


@pytest.mark.parametrize(
    ("slower", "expected"),
    [(1.0, [14, 14]), (1.05, [14, 14]), (1.1, [13, 15]), (1.2, [8, 20]), (2.0, [1, 27])],
)
def test_nearly_equal_nodes_share_the_layers(slower: float, expected: list[int]) -> None:
    offers = [offer(A, 35, ms=slower), offer(B, 35)]

    plan = make_plan(offers, apart({}, others=0), model(28), terms=TWO)
    fastest = make_plan(offers, apart({}, others=0), model(28), terms=TWO, policy="fastest")

    layers = {stage.node: len(stage.span) for stage in plan.stages}
    assert [layers[A], layers[B]] == expected
    if slower > 1:
        assert [len(stage.span) for stage in fastest.stages if stage.node == A] == [1]


def test_the_head_counts_where_layers_are_shared() -> None:
    offers = [offer(A, 35, head_ms=8), offer(B, 35, ms=1.01, head_ms=8)]

    plan = make_plan(
        offers, apart({}, others=0), model(28), terms=PlanConstraints(members=2, entry=A)
    )

    assert spans(plan) == {A: "0:10", B: "10:28"}


def test_no_node_is_added_to_share_the_layers() -> None:
    offers = [offer(A, 35), offer(B, 35)]

    plan = make_plan(offers, apart({}, others=0.01), model(28))

    assert [len(stage.span) for stage in plan.stages] == [28]


def test_sharing_respects_the_memory_of_a_node() -> None:
    offers = [offer(A, 35, ms=1), offer(B, 5, ms=1.02)]

    plan = make_plan(offers, apart({}, others=0), model(28), terms=TWO)

    assert sorted(len(stage.span) for stage in plan.stages) == [5, 23]


def test_equal_nodes_get_even_spans() -> None:
    offers = [offer(at, 8) for at in (A, B, C)]

    plans = [
        make_plan(offers, NEAR, model(8), policy=policy, terms=PlanConstraints(members=3))
        for policy in POLICIES
    ]

    for plan in plans:
        assert spans(plan) == {A: "0:3", B: "3:6", C: "6:8"}


def test_of_two_equally_fast_rings_the_one_with_the_lower_entry_is_taken() -> None:
    # The slow node holds one of two equal layers, the first or the last: the same time.
    offers = [offer(A, 3, ms=2), offer(B, 6, ms=1)]

    plan = make_plan(offers, NEAR, model(sizes=(160, 80, 160)), policy="fastest", terms=TWO)

    assert spans(plan) == {A: "0:1", B: "1:3"}


def test_throughput_has_the_fastest_slowest_stage() -> None:
    offers = [offer(A, 8, ms=1), offer(B, 8, ms=3)]

    plan = make_plan(offers, apart({}, others=50), model(8), policy="throughput")

    assert [len(stage.span) for stage in plan.stages if stage.node == A] == [6]


def test_throughput_counts_the_head_of_the_entry() -> None:
    offers = [offer(A, 8, head_ms=4), offer(B, 8)]

    plan = make_plan(offers, NEAR, model(8), policy="throughput", terms=PlanConstraints(entry=A))

    assert spans(plan) == {A: "0:2", B: "2:8"}


def test_throughput_leaves_out_a_node_that_is_too_slow_for_one_layer() -> None:
    offers = [offer(A, 4), offer(B, 4), offer(C, 4, ms=10)]

    plan = make_plan(offers, NEAR, model(4), policy="throughput")

    assert spans(plan) == {A: "0:2", B: "2:4"}


def test_of_equally_fast_rings_the_smallest_is_taken_though_its_bound_is_higher() -> None:
    # B could hold the smallest layer only: it saves what the way there and back takes.
    offers = [offer(A, 6, ms=4), offer(B, 2, ms=3)]
    links = apart({}, others=0.25)

    plan = make_plan(offers, links, model(sizes=(240, 160, 80)), policy="fastest")

    assert spans(plan) == {A: "0:3"}


def test_throughput_limits_the_others_to_the_stage_of_a_slow_preferred_node() -> None:
    # A layer takes C 10 ms. With A alone beside it a token is faster, but the stage takes 10.4 ms.
    offers = [offer(A, 9, ms=1.3), offer(B, 9, ms=2), offer(C, 9, ms=10)]

    plan = make_plan(offers, NEAR, model(9), policy="throughput", terms=PlanConstraints(prefer=[C]))

    assert {stage.node: len(stage.span) for stage in plan.stages} == {A: 7, B: 1, C: 1}


def test_throughput_takes_the_preferred_and_the_largest_of_few_members() -> None:
    sizes = {A: 1, B: 1, C: 2, D: 2}
    offers = [offer(at, size) for at, size in sizes.items()]
    terms = PlanConstraints(members=3, prefer=[B], entry=C)

    plan = make_plan(offers, NEAR, model(5), policy="throughput", terms=terms)

    assert {stage.node: len(stage.span) for stage in plan.stages} == {B: 1, C: 2, D: 2}


def test_throughput_loosens_the_limit_until_whole_layers_fit() -> None:
    # With room for 320, 240 and 480 bytes, two thirds on the quick node would be 2.7 ms; the best
    # that whole layers allow is 3 ms.
    offers = [offer(A, 4, ms=2), offer(B, 3, ms=2), offer(C, 6, ms=1)]

    plan = make_plan(offers, NEAR, model(sizes=(240, 80, 80, 240)), policy="throughput")

    assert spans(plan) == {A: "0:1", C: "1:4"}


@pytest.mark.parametrize(
    ("layers", "memories", "expected"),
    [
        (3, [8, 8, 8, 8], [1, 1, 1]),
        (2, [8, 8, 8], [1, 1]),
        (28, [100, *[1] * 9], [19, *[1] * 9]),
        (24, [100, *[1] * 24], [1] * 24),
        (12, [40, *[1] * 12], [1] * 12),
        (28, [10, 9.9, 9.9, 9.9], [7, 7, 7, 7]),
        (31, [10, 10, 10, 1], [10, 10, 10, 1]),
        (6, [3, 2, 1], [3, 2, 1]),
    ],
)
def test_proportional_repairs_what_algorithm_1_breaks(
    layers: int, memories: list[float], expected: list[int]
) -> None:
    offers = [offer(node(at), memory) for at, memory in enumerate(memories)]

    plan = make_plan(offers, NEAR, model(layers), policy="proportional")

    assert [len(stage.span) for stage in plan.stages] == expected


def algorithm_1(layers: int, memories: Sequence[float]) -> list[int]:
    """The paper's Algorithm 1 as printed: floor of the share, at least 1, the rest to the last."""
    total, spans, start = sum(memories), [], 0
    for memory in sorted(memories, reverse=True)[:-1]:
        spans.append(max(1, floor(memory / total * layers)))
        start += spans[-1]
    return [*spans, layers - start]


@pytest.mark.parametrize(
    ("layers", "memories", "printed"),
    [
        (3, [8, 8, 8, 8], [1, 1, 1, 0]),
        (2, [8, 8, 8], [1, 1, 0]),
        (28, [100, *[1] * 9], [25, *[1] * 8, -5]),
        (24, [100, *[1] * 24], [19, *[1] * 23, -18]),
        (12, [40, *[1] * 12], [9, *[1] * 11, -8]),
        (28, [10, 9.9, 9.9, 9.9], [7, 6, 6, 9]),
    ],
)
def test_algorithm_1_as_printed_really_fails(
    layers: int, memories: list[float], printed: list[int]
) -> None:
    assert algorithm_1(layers, memories) == printed


def test_proportional_takes_the_first_entry_that_works() -> None:
    # The node with most memory cannot be the entry here: it would hold the ends and no layer.
    offers = [offer(A, 3.9), offer(B, 2), offer(C, 3.9)]
    shape = model(sizes=(80, 320), ends=0)

    plan = make_plan([offer(A, 3), offer(B, 4)], NEAR, shape, policy="proportional")

    assert spans(plan) == {A: "0:1", B: "1:2"}
    with pytest.raises(ModelError, match="lacks"):
        make_plan(offers, NEAR, shape, policy="proportional")


@pytest.mark.parametrize(("prefer", "nodes"), [((), {A, B}), ((C,), {A, C}), ((D,), {A, D})])
def test_proportional_uses_the_preferred_nodes_before_larger_ones(
    prefer: tuple[NodeId, ...], nodes: set[NodeId]
) -> None:
    offers = [offer(A, 6), offer(B, 5), offer(C, 4), offer(D, 4)]
    terms = PlanConstraints(entry=A, members=2, prefer=prefer)

    plan = make_plan(offers, NEAR, model(6), policy="proportional", terms=terms)

    assert set(spans(plan)) == nodes


def test_proportional_leaves_out_a_node_that_holds_no_layer_in_any_order() -> None:
    # The third has room for the first layer only, but not for the ends besides.
    offers = [offer(A, 6), offer(B, 5), offer(C, 1)]
    shape = model(sizes=(80, 320, 320), ends=80)

    plan = make_plan(offers, NEAR, shape, policy="proportional")

    assert spans(plan) == {A: "0:2", B: "2:3"}
    with pytest.raises(ModelError):
        make_plan(offers, NEAR, shape, policy="proportional", terms=PlanConstraints(members=3))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_client_holds_the_ends_and_no_layer(policy: str) -> None:
    offers = [offer(A, 1), offer(B, 8), offer(C, 8)]
    terms = PlanConstraints(ends=Ends.CLIENT, entry=A, members=3)

    plan = make_plan(offers, NEAR, model(4, ends=80), policy=policy, terms=terms)

    assert [str(stage.span) for stage in plan.stages] == ["0:0", "0:2", "2:4"]
    assert (plan.ends, plan.stages[0].node) == (Ends.CLIENT, A)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_respects_the_terms(policy: str) -> None:
    offers = [offer(A, 9), offer(B, 1), offer(C, 2), offer(D, 3)]
    terms = PlanConstraints(exclude=[A], prefer=[C, node(9)], entry=B, members=3)

    plan = make_plan(offers, NEAR, model(6), policy=policy, terms=terms)

    assert plan.stages[0].node == B
    assert {stage.node: len(stage.span) for stage in plan.stages} == {B: 1, C: 2, D: 3}
    assert [(standby.node, standby.reason) for standby in plan.standbys] == [(A, "it is excluded")]


def test_a_preferred_node_holds_a_span_even_if_slower() -> None:
    offers = [offer(A, 4), offer(B, 4, ms=9)]

    plan = make_plan(offers, apart({}), model(4), terms=PlanConstraints(prefer=[B]))

    assert sorted(len(stage.span) for stage in plan.stages) == [1, 3]


def test_a_preferred_node_without_room_for_a_layer_stands_by() -> None:
    plan = make_plan(
        [offer(A, 4), offer(B, 0.5)], NEAR, model(4), terms=PlanConstraints(prefer=[B])
    )

    assert [standby.node for standby in plan.standbys] == [B]


def test_proportional_refuses_fixed_spans() -> None:
    with pytest.raises(UserError, match="does not support fixed spans"):
        make_plan(
            [offer(A, 9)],
            NEAR,
            model(4),
            policy="proportional",
            terms=PlanConstraints(spans={A: Span(0, 4)}),
        )


def test_a_policy_needs_only_an_objective() -> None:
    offers = [offer(node, 4) for node in (A, B, C)]
    most = Policy(lambda _, division: 99 - len(division.order))

    with patch.dict(policies.POLICIES, {"widest": most}):
        plan = make_plan(offers, NEAR, model(4), policy="widest")
        agreed = replace(charter(), policy="widest")
        world = World({A: profile(4), B: profile(4)}, agreed)
        agreement = world.follow(world.agree()).agree()
        compared = [each.policy for each in compare(offers, NEAR, model(4))]
        asked = merge(charter(), {A: Amendments((Term("policy", 1, "widest"),))})
        advice = advise(agreement)

    assert len(plan.stages) == 3
    assert agreement.plan is not None
    assert len(agreement.plan.stages) == 2
    assert "`--policy widest`" in advice
    assert compared == [*policies.POLICIES, "widest"]
    assert (asked.policy, asked.obstacle) == ("widest", "")


def test_proportional_minimises_its_objective() -> None:
    offers = [offer(A, 3), offer(B, 9), offer(C, 4, ms=9)]
    problem = build_problem(offers, NEAR, model(8), PlanConstraints())
    objective = policies.POLICIES["proportional"].objective

    even, other = (
        objective(problem, to_division(problem, make_plan(offers, NEAR, model(8), policy=name)))
        for name in ("proportional", "throughput")
    )

    assert 0 <= even < other


def test_a_policy_without_a_ring_finds_none() -> None:
    with (
        patch.dict(policies.POLICIES, {"widest": Policy(token_time)}),
        pytest.raises(ModelError),
    ):
        make_plan([offer(A, 1)], NEAR, model(4), policy="widest")


def test_an_unknown_policy_is_refused_with_the_names_of_the_others() -> None:
    with pytest.raises(UserError, match="Unknown policy `greenest`") as caught:
        make_plan([offer(A, 9)], NEAR, model(4), policy="greenest")

    names = ", ".join(f"`{name}`" for name in policies.POLICIES)
    assert caught.value.hint == f"one of {names}"
    assert "`auto`, `fastest`" in names
