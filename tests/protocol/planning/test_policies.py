from collections.abc import Sequence
from dataclasses import replace
from math import floor
from unittest.mock import patch

import pytest

from meshllm.errors import ModelError, UserError
from meshllm.names import Span, short
from meshllm.protocol.agreement.advice import advise
from meshllm.protocol.agreement.best_plan import to_division
from meshllm.protocol.membership.charter import Amendments, Term, merge
from meshllm.protocol.planning import policies
from meshllm.protocol.planning.partition import token_time
from meshllm.protocol.planning.plan import Ends, Links, Offer, Plan, PlanConstraints, PlanStage
from meshllm.protocol.planning.policies import Policy, make_plan
from meshllm.protocol.planning.prediction import compare
from meshllm.protocol.planning.problem import kv_rooms, memory_for, pose, room_tokens
from tests.builders.offers import A, B, C, D, apart, model, node, offer, spans
from tests.builders.snapshots import World, charter, profile

NEAR = Links()
EXACT_POLICIES = ["fastest", "throughput"]
POLICIES = [*EXACT_POLICIES, "auto", "proportional"]


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


def test_the_reason_of_a_slower_standby_is_its_cost() -> None:
    plan = make_plan([offer(A, 4, ms=1), offer(B, 4, ms=3)], apart({}), model(4))

    assert spans(plan) == {A: "0:4"}
    assert plan.standbys[0].reason == "its link adds 2.0 ms and its layers cost 2.0 ms"


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


def test_the_ring_is_the_shortest_tour() -> None:
    offers = [offer(at, 1) for at in (A, B, C, D)]
    links = apart({(A, C): 1, (C, B): 1, (B, D): 1, (D, A): 1}, others=5)

    plan = make_plan(offers, links, model(4), terms=PlanConstraints(entry=A))

    order = [stage.node for stage in plan.stages]
    assert order in ([A, C, B, D], [A, D, B, C])


def test_equal_nodes_get_even_spans() -> None:
    offers = [offer(at, 8) for at in (A, B, C)]

    plans = [
        make_plan(offers, NEAR, model(8), policy=policy, terms=PlanConstraints(members=3))
        for policy in POLICIES
    ]

    for plan in plans:
        assert spans(plan) == {A: "0:3", B: "3:6", C: "6:8"}


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


def test_proportional_leaves_out_a_node_that_holds_no_layer_in_any_order() -> None:
    # The third has room for the first layer only, but not for the ends besides.
    offers = [offer(A, 6), offer(B, 5), offer(C, 1)]
    shape = model(sizes=(80, 320, 320), ends=80)

    plan = make_plan(offers, NEAR, shape, policy="proportional")

    assert spans(plan) == {A: "0:2", B: "2:3"}
    with pytest.raises(ModelError):
        make_plan(offers, NEAR, shape, policy="proportional", terms=PlanConstraints(members=3))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_entry_has_less_room_for_the_ends(policy: str) -> None:
    offers = [offer(A, 4), offer(B, 4)]

    plan = make_plan(
        offers, NEAR, model(4, ends=200), policy=policy, terms=PlanConstraints(entry=B, members=2)
    )

    assert plan.stages[0].node == B
    assert len(plan.stages[0].span) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a_client_holds_the_ends_and_no_layer(policy: str) -> None:
    offers = [offer(A, 1), offer(B, 8), offer(C, 8)]
    terms = PlanConstraints(ends=Ends.CLIENT, entry=A, members=3)

    plan = make_plan(offers, NEAR, model(4, ends=80), policy=policy, terms=terms)

    assert [str(stage.span) for stage in plan.stages] == ["0:0", "0:2", "2:4"]
    assert (plan.ends, plan.stages[0].node) == (Ends.CLIENT, A)


@pytest.mark.parametrize("policy", POLICIES)
def test_caches_of_all_sessions_take_room(policy: str) -> None:
    # A layer of 80 bytes with 10 tokens of 4 bytes in 2 sessions takes 160, and growing one of them
    # 40 more: two fit into 360.
    offers = [replace(offer(each, 0), memory_bytes=360 * 100 // 80) for each in (A, B)]

    plan = make_plan(offers, NEAR, model(4, kv=4), policy=policy, terms=PlanConstraints(sessions=2))

    assert [len(stage.span) for stage in plan.stages] == [2, 2]


@pytest.mark.parametrize("policy", POLICIES)
def test_large_layers_count_by_their_own_bytes(policy: str) -> None:
    offers = [offer(A, 5), offer(B, 5)]

    plan = make_plan(offers, NEAR, model(sizes=(80, 80, 80, 160, 240, 160)), policy=policy)

    assert [str(stage.span) for stage in plan.stages] == ["0:4", "4:6"]


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


GIB = 1 << 30


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
        ([8.0], PlanConstraints(spans={A: Span(0, 3)}), "lacks 1.0 GiB"),
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


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (
            PlanConstraints(entry=D),
            f"Node `{short(D)}` is required but excluded, or made no offer",
        ),
        (PlanConstraints(entry=A, exclude=[A]), "made no offer"),
        (PlanConstraints(spans={D: Span(0, 1)}), "made no offer"),
        (
            PlanConstraints(spans={A: Span(0, 5)}),
            "Span `0:5` is empty, overlaps another, or ends above layer 4",
        ),
        (PlanConstraints(spans={A: Span(2, 2)}), "Span `2:2` is empty"),
        (PlanConstraints(spans={A: Span(0, 2), B: Span(1, 4)}), "Span `1:4` is empty, overlaps"),
        (PlanConstraints(members=5), "`tiny` has 4 layers for a ring of 5 nodes"),
        (PlanConstraints(members=0), "`tiny` has 4 layers for a ring of 0 nodes"),
        (PlanConstraints(members=1, entry=A, ends=Ends.CLIENT), "for a ring of 1 nodes"),
        (PlanConstraints(ends=Ends.CLIENT), "The client that holds the ends must be the entry"),
        (PlanConstraints(ends=Ends.CLIENT, entry=A, spans={A: Span(0, 1)}), "without a span"),
        (
            PlanConstraints(entry=A, spans={B: Span(0, 1)}),
            "`mjrgeyt` cannot hold `0:1`: layer 0",
        ),
        (
            PlanConstraints(entry=A, spans={A: Span(1, 2)}),
            "`mfqwcyl` cannot hold `1:2`: layer 0",
        ),
        (PlanConstraints(sessions=0), "0 sessions"),
    ],
)
def test_terms_that_contradict_each_other_are_refused(terms: PlanConstraints, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_plan([offer(A, 9), offer(B, 9)], NEAR, model(4), terms=terms)


def test_proportional_refuses_fixed_spans() -> None:
    with pytest.raises(UserError, match="does not support fixed spans"):
        make_plan(
            [offer(A, 9)],
            NEAR,
            model(4),
            policy="proportional",
            terms=PlanConstraints(spans={A: Span(0, 4)}),
        )


def test_two_offers_of_one_node_are_refused() -> None:
    with pytest.raises(UserError, match="more than one offer"):
        make_plan([offer(A, 9), offer(A, 8)], NEAR, model(4))


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


def two_sites(count: int) -> tuple[list[Offer], Links]:
    """Even nodes are 1 ms from each other and 50 ms from the odd ones; each holds two layers."""
    offers = [offer(node(at), 2, ms=1 + at % 5) for at in range(count)]
    pairs = ((low, high) for high in range(count) for low in range(high))
    ways = {(node(low), node(high)): 1.0 if (high - low) % 2 == 0 else 50.0 for low, high in pairs}
    return offers, apart(ways)


@pytest.mark.parametrize("count", [8, 12, 14, 20])
def test_many_nodes_stay_within_one_site(count: int) -> None:
    offers, links = two_sites(count)

    plan = make_plan(offers, links, model(6), terms=PlanConstraints(members=3))

    assert len({stage.node[-1] % 2 for stage in plan.stages}) == 1
    assert [str(stage.span) for stage in plan.stages] == ["0:2", "2:4", "4:6"]


def test_throughput_takes_the_fastest_of_many_nodes() -> None:
    offers, links = two_sites(20)

    plan = make_plan(offers, links, model(4), policy="throughput")

    assert [stage.node[-1] % 5 for stage in plan.stages] == [0] * 4


def test_more_nodes_than_are_searched_exactly_can_all_be_needed() -> None:
    offers, links = two_sites(16)

    plan = make_plan(offers, links, model(32))

    assert len(plan.stages) == 16


def test_of_more_nodes_than_layers_the_largest_form_a_ring() -> None:
    # Fourteen fast nodes hold one layer of fifteen each: dropping one by one ends with too many.
    offers = [offer(node(at), 1, ms=1) for at in range(14)]
    offers += [offer(node(at), 15, ms=90) for at in range(14, 16)]

    plan = make_plan(offers, NEAR, model(28), terms=PlanConstraints(members=2, entry=node(14)))

    assert [stage.node for stage in plan.stages] == [node(14), node(15)]


@pytest.mark.parametrize("members", [None, 14])
def test_a_client_plans_with_many_nodes(members: int | None) -> None:
    offers, links = two_sites(20)
    terms = PlanConstraints(ends=Ends.CLIENT, entry=node(0), members=members, prefer=[node(1)])

    plan = make_plan(offers, links, model(24), terms=terms)

    assert plan.stages[0].node == node(0)
    assert plan.rank(node(1)) is not None
    assert len(plan.stages) == members or members is None


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
    assert compared == ["auto", "fastest", "throughput", "proportional", "widest"]
    assert (asked.policy, asked.obstacle) == ("widest", "")


def test_proportional_minimises_its_objective() -> None:
    offers = [offer(A, 3), offer(B, 9), offer(C, 4, ms=9)]
    problem = pose(offers, NEAR, model(8), PlanConstraints())
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

    assert caught.value.hint == "one of `auto`, `fastest`, `throughput`, `proportional`"


def test_the_cache_room_of_a_rank_is_what_its_weights_leave() -> None:
    shape = model(4, ends=20, kv=4)
    plan = Plan(1, "tiny", Ends.ENTRY, (PlanStage(A, Span(0, 1)), PlanStage(B, Span(1, 4))))
    offers = [replace(offer(A, 0), memory_bytes=1000, reserve_bytes=500), offer(B, 1)]

    assert kv_rooms(plan, offers, shape) == [500 * 80 // 100 - 80 - 20, 80 - 240]
    assert room_tokens(plan, offers, shape) == [300 // 4, 0]
    stages = (PlanStage(A, Span(0, 0)), PlanStage(B, Span(0, 4)))
    empty = replace(plan, ends=Ends.CLIENT, stages=stages)
    assert room_tokens(empty, offers, shape)[0] is None
    with pytest.raises(UserError, match="is in the plan but made no offer"):
        kv_rooms(plan, offers[:1], shape)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_has_room_for_its_sessions(policy: str) -> None:
    offers, terms = [offer(A, 20), offer(B, 30), offer(C, 9)], PlanConstraints(sessions=3)
    shape = model(4, ends=10, kv=2)

    plan = make_plan(offers, NEAR, shape, policy=policy, terms=terms)

    rooms = room_tokens(plan, offers, shape)
    assert min(room for room in rooms if room is not None) >= 3 * shape.context


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_least_memory_for_a_stage_is_exact(rank: int) -> None:
    shape = model(sizes=(81, 97, 50, 33), ends=7, kv=3)
    stages = PlanStage(A, Span(0, 1)), PlanStage(B, Span(1, 3)), PlanStage(C, Span(3, 4))
    plan = Plan(1, "tiny", Ends.ENTRY, stages)
    stage = stages[rank]
    least = memory_for(plan, stage.node, shape, sessions=2, reserve=11)

    def stops(memory: int) -> int:
        offered = replace(offer(stage.node, 1), memory_bytes=memory, reserve_bytes=11)
        terms = PlanConstraints(sessions=2)
        problem = pose([offered], NEAR, shape, terms)
        return max(problem.stops(0, stage.span.start, entry=rank == 0), default=stage.span.start)

    assert stops(least - 1) < stage.span.stop == stops(least)
    assert memory_for(plan, D, shape, sessions=2, reserve=11) == 11
