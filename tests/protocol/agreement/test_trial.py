from dataclasses import replace

import pytest

from meshllm.errors import Busy, UserError
from meshllm.names import GroupId, Span
from meshllm.protocol.agreement.candidates import MAX_MEMORY_BYTES
from meshllm.protocol.agreement.trial import TrialTerms, try_out
from meshllm.protocol.membership.records import MAX_LAYERS
from tests.builders.offers import A, B, C
from tests.builders.snapshots import World, charter, profile

WORLD = World({A: profile(4), B: profile(4, ms=2.0), C: profile(4, ms=3.0)})


def test_without_changes_it_is_the_plan_in_force() -> None:
    agreed = WORLD.agree()

    found = try_out(agreed, TrialTerms())

    assert agreed.plan
    assert found.plan
    assert found.plan.stages == agreed.plan.stages
    assert (found.policy, found.missing) == ("auto", "")
    assert found.prediction
    assert [hop.node for hop in found.prediction.hops] == [A]
    assert list(found.standbys) == sorted([B, C])


def test_nodes_of_other_rings_are_left_to_these() -> None:
    agreed = replace(WORLD, groups={A: GroupId(bytes(8))}).agree()

    found = try_out(agreed, TrialTerms())

    assert found.plan
    assert [stage.node for stage in found.plan.stages] == [B]
    assert list(found.standbys) == [C]


def test_it_changes_nothing_of_the_mesh() -> None:
    agreed = WORLD.follow(WORLD.agree()).agree()

    try_out(agreed, TrialTerms(policy="throughput", members=3, memory_bytes={A: 0}))

    assert WORLD.follow(WORLD.agree()).agree() == agreed


def test_another_policy_and_number_of_members_are_tried() -> None:
    found = try_out(WORLD.agree(), TrialTerms(policy="proportional", members=2))

    assert found.policy == "proportional"
    assert found.plan
    assert [len(stage.span) for stage in found.plan.stages] == [2, 2]


def test_zero_members_let_the_policy_choose() -> None:
    world = replace(WORLD, charter=replace(charter(), members=2))
    agreed = world.agree()

    kept, free = (try_out(agreed, TrialTerms(members=count)).plan for count in (None, 0))

    assert kept
    assert free
    assert (len(kept.stages), len(free.stages)) == (2, 1)


def test_an_excluded_node_is_on_standby() -> None:
    found = try_out(WORLD.agree(), TrialTerms(exclude=(A,)))

    assert found.plan
    assert [stage.node for stage in found.plan.stages] == [B]
    assert found.standbys[A] == "it is excluded"


def test_memory_that_a_node_does_not_offer_is_tried() -> None:
    small = World({A: profile(2), B: profile(2, ms=2.0)})
    assert small.agree().plan

    found = try_out(small.agree(), TrialTerms(memory_bytes={A: 400}))

    assert found.plan
    assert [(stage.node, stage.span) for stage in found.plan.stages] == [(A, Span(0, 4))]


def test_without_a_ring_it_says_what_is_missing() -> None:
    found = try_out(WORLD.agree(), TrialTerms(memory_bytes={A: 0, B: 0, C: 100}))

    assert (found.plan, found.prediction) == (None, None)
    assert "lacks" in found.missing


def test_a_node_that_is_not_ready_waits() -> None:
    found = try_out(
        World({A: profile(4), B: replace(profile(4), layer_s=())}).agree(), TrialTerms(exclude=(B,))
    )

    assert found.standbys == {B: "it has measured no speed, or cannot load layers now"}


def test_before_anything_can_be_planned_it_is_busy() -> None:
    agreed = replace(WORLD.agree(), best=None, plan=None, reason="nobody is ready")

    with pytest.raises(Busy, match="nobody is ready"):
        try_out(agreed, TrialTerms())


@pytest.mark.parametrize(
    "terms",
    [TrialTerms(members=MAX_LAYERS), TrialTerms(memory_bytes={A: MAX_MEMORY_BYTES, B: 0})],
    ids=["members", "memory"],
)
def test_a_term_at_its_limit_is_tried(terms: TrialTerms) -> None:
    assert try_out(WORLD.agree(), terms).plan


@pytest.mark.parametrize(
    "terms",
    [
        TrialTerms(policy="luck"),
        TrialTerms(members=-1),
        TrialTerms(members=MAX_LAYERS + 1),
        TrialTerms(memory_bytes={A: -1}),
        TrialTerms(memory_bytes={A: MAX_MEMORY_BYTES + 1}),
    ],
    ids=range(5),
)
def test_an_invalid_term_is_refused(terms: TrialTerms) -> None:
    with pytest.raises(UserError):
        try_out(WORLD.agree(), terms)
