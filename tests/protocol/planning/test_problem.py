"""Rooms of nodes as layers take them, and terms that contradict each other."""

from dataclasses import replace

import pytest

from meshllm.errors import UserError
from meshllm.names import Span, short
from meshllm.protocol.planning.plan import Ends, Plan, PlanConstraints, PlanStage
from meshllm.protocol.planning.policies import make_plan
from meshllm.protocol.planning.problem import build_problem, kv_capacities, memory_for, room_tokens
from tests.builders.offers import A, B, C, D, model, offer
from tests.builders.policies import NEAR, POLICIES


@pytest.mark.parametrize("policy", POLICIES)
def test_the_entry_has_less_room_for_the_ends(policy: str) -> None:
    offers = [offer(A, 4), offer(B, 4)]

    plan = make_plan(
        offers, NEAR, model(4, ends=200), policy=policy, terms=PlanConstraints(entry=B, members=2)
    )

    assert plan.stages[0].node == B
    assert len(plan.stages[0].span) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_caches_of_all_sessions_take_room(policy: str) -> None:
    # A layer of 80 bytes with 10 tokens of 4 bytes in 2 sessions takes 160, and growing one of them
    # 40 more: two fit into 360.
    offers = [replace(offer(each, 0), memory_bytes=360 * 100 // 80) for each in (A, B)]

    plan = make_plan(offers, NEAR, model(4, kv=4), policy=policy, terms=PlanConstraints(sessions=2))

    assert [len(stage.span) for stage in plan.stages] == [2, 2]


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


def test_two_offers_of_one_node_are_refused() -> None:
    with pytest.raises(UserError, match="more than one offer"):
        make_plan([offer(A, 9), offer(A, 8)], NEAR, model(4))


def test_the_cache_room_of_a_rank_is_what_its_weights_leave() -> None:
    shape = model(4, ends=20, kv=4)
    plan = Plan(1, "tiny", Ends.ENTRY, (PlanStage(A, Span(0, 1)), PlanStage(B, Span(1, 4))))
    offers = [replace(offer(A, 0), memory_bytes=1000, reserve_bytes=500), offer(B, 1)]

    assert kv_capacities(plan, offers, shape) == [500 * 80 // 100 - 80 - 20, 80 - 240]
    assert room_tokens(plan, offers, shape) == [300 // 4, 0]
    stages = (PlanStage(A, Span(0, 0)), PlanStage(B, Span(0, 4)))
    empty = replace(plan, ends=Ends.CLIENT, stages=stages)
    assert room_tokens(empty, offers, shape)[0] is None
    with pytest.raises(UserError, match="is in the plan but made no offer"):
        kv_capacities(plan, offers[:1], shape)


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
        problem = build_problem([offered], NEAR, shape, terms)
        return max(problem.stops(0, stage.span.start, entry=rank == 0), default=stage.span.start)

    assert stops(least - 1) < stage.span.stop == stops(least)
    assert memory_for(plan, D, shape, sessions=2, reserve=11) == 11
