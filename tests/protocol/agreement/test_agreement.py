from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from meshllm.names import GroupId, NodeId, Span, short
from meshllm.protocol.agreement.advice import advise
from meshllm.protocol.agreement.agreement import agree
from meshllm.protocol.agreement.best_plan import nodes_of
from meshllm.protocol.membership.charter import OverridableTerm
from meshllm.protocol.membership.records import Lifecycle, Profile, StateRecord
from meshllm.protocol.planning.plan import MAX_EPOCH, Ends, Plan, PlanStage, Standby
from meshllm.protocol.planning.policies import POLICIES
from tests.builders.agreements import ALONE, THREE, planned, ring, standbys
from tests.builders.offers import A, B, C, D, model, node, spans
from tests.builders.snapshots import World, charter, profile, weights


def test_the_first_ring_has_the_first_epoch() -> None:
    agreement = ALONE.agree()

    assert spans(planned(agreement)) == {A: "0:4"}
    assert planned(agreement).epoch == 1
    assert agreement.reason == "first plan"


def test_every_node_reaches_the_same_plan() -> None:
    agreements = [THREE.agree(me) for me in (A, B, C)]

    assert agreements[0] == agreements[1] == agreements[2]
    assert planned(agreements[0]).layers == 4


def test_without_a_ring_the_reason_says_what_is_missing() -> None:
    agreement = World({A: profile(1), B: profile(1)}).agree()

    assert agreement.plan is None
    assert "The ring lacks 160 B" in agreement.reason


def test_a_mesh_without_ready_nodes_has_no_ring() -> None:
    agreement = World({A: replace(profile(4), layer_s=())}).agree()

    assert agreement.plan is None
    assert standbys(agreement) == {A: "it has measured no speed, or cannot load layers now"}


def test_a_plan_contains_no_standbys() -> None:
    agreement = World({A: profile(4), B: profile(4, ms=2.0)}).agree()

    assert planned(agreement).standbys == ()
    assert standbys(agreement) == {B: "its link adds 1.0 ms and its layers cost 1.0 ms"}


def test_standbys_that_come_and_go_do_not_change_the_plan() -> None:
    before = planned(ALONE.agree())
    grown = World({A: profile(4), B: profile(4, ms=2.0)}, followed={A: before})

    assert grown.agree().plan == before
    assert replace(grown, gone={B}).agree().plan == before


def test_the_followed_plan_is_chosen_again() -> None:
    first = THREE.agree()

    again = THREE.follow(first).agree(C)

    assert again.plan == first.plan
    assert again.reason == "no plan is better"


def test_a_small_gain_does_not_change_the_plan() -> None:
    world = World({A: profile(4), B: profile(4, ms=0.9)}, followed={A: ring((A, 0, 4))})

    agreement = world.agree()

    assert agreement.plan == ring((A, 0, 4))
    assert "would gain 10%" in agreement.reason


@pytest.mark.parametrize(("ms", "changes"), [(0.85, False), (0.84, True)])
def test_a_gain_at_the_limit_does_not_change_the_plan(ms: float, *, changes: bool) -> None:
    world = World({A: profile(4), B: profile(4, ms=ms)}, followed={A: ring((A, 0, 4))})

    agreement = world.agree()

    assert (agreement.plan != ring((A, 0, 4))) == changes
    assert ("would gain 15%" in agreement.reason) != changes


def test_a_much_better_ring_is_adopted_in_the_next_epoch() -> None:
    world = World({A: profile(4), B: profile(4, ms=0.5)}, followed={A: ring((A, 0, 4))})

    agreement = world.agree()

    assert agreement.plan == ring((B, 0, 4), epoch=6)
    assert agreement.reason == "it gains 50%"


def test_a_better_ring_waits_for_the_sessions_of_the_entry() -> None:
    world = World({A: profile(4), B: profile(4, ms=0.5)}, followed={A: ring((A, 0, 4))})

    assert replace(world, busy={A}).agree().plan == ring((A, 0, 4))
    assert "waits until sessions end" in replace(world, busy={A}).agree().reason
    assert replace(world, busy={A}).agree().ahead == world.agree().plan
    assert world.agree().ahead is None
    assert replace(world, busy={B}).agree().plan == ring((B, 0, 4), epoch=6)


def without(found: Profile, *parts: int) -> Profile:
    kept = enumerate(found.weights)
    return replace(found, weights=tuple(bytes(16) if at in parts else each for at, each in kept))


def test_a_better_ring_waits_for_the_weights_of_its_nodes() -> None:
    lacking = without(profile(4, ms=0.5), 2)
    world = World({A: profile(4), B: lacking}, followed={A: ring((A, 0, 4))})

    waiting = world.agree()
    ready = replace(world, profiles={A: profile(4), B: profile(4, ms=0.5)}).agree()

    assert waiting.plan == ring((A, 0, 4))
    assert waiting.reason == f"another plan waits for weights on `{short(B)}`: it gains 50%"
    assert ready.plan == ring((B, 0, 4), epoch=6)


def test_a_ring_without_nodes_that_lack_weights_takes_the_place_of_a_better_one() -> None:
    profiles = {A: profile(4), B: without(profile(4, ms=0.4), 2), C: profile(4, ms=0.5)}
    world = World(profiles, followed={A: ring((A, 0, 4))})

    meanwhile = world.agree()

    assert meanwhile.plan == ring((C, 0, 4), epoch=6)
    assert meanwhile.reason == "it gains 50%"
    assert replace(world, busy={A}).agree().ahead == meanwhile.plan
    kept = world.follow(meanwhile).agree()
    assert kept.plan == meanwhile.plan
    assert kept.reason == f"another plan waits for weights on `{short(B)}`: it gains 20%"
    ready = replace(world.follow(meanwhile), profiles={**profiles, B: profile(4, ms=0.4)})
    assert spans(planned(ready.agree())) == {B: "0:4"}


def test_every_node_that_lacks_weights_is_done_without() -> None:
    lacking = {B: without(profile(4, ms=0.2), 2), C: without(profile(4, ms=0.3), 1)}
    profiles = {A: profile(4), **lacking, D: profile(4, ms=0.5)}

    agreement = World(profiles, followed={A: ring((A, 0, 4))}).agree()

    assert agreement.plan == ring((D, 0, 4), epoch=6)


@pytest.mark.parametrize(("members", "after"), [(None, {C: "0:4"}), (2, {A: "0:2", C: "2:4"})])
def test_an_exclusion_waits_for_no_weights_if_other_nodes_satisfy_the_charter(
    members: int | None, after: dict[NodeId, str]
) -> None:
    agreed = replace(charter(), exclude=(A,), members=members)
    profiles = {A: profile(4), B: without(profile(4, ms=0.5), 0, 1, 2, 3), C: profile(4, ms=2.0)}
    world = World(profiles, agreed, followed={A: ring((A, 0, 2), (C, 2, 4))})

    agreement = world.agree()

    assert spans(planned(agreement)) == after
    assert ("waits for weights" in agreement.reason) is (members == 2)


def test_the_plan_without_nodes_that_lack_weights_is_reused() -> None:
    profiles = {A: profile(4), B: without(profile(4, ms=0.4), 2), C: profile(4, ms=0.5)}
    view = World(profiles, followed={A: ring((A, 0, 4))}).view(A)

    first = agree(view)
    again = agree(view, first)

    assert again == first
    assert again.best
    assert again.best.spare
    assert first.best
    assert first.best.spare
    assert again.best.spare.problem is first.best.spare.problem


def test_a_ring_that_replaces_a_broken_one_does_not_wait_for_weights() -> None:
    world = World({A: profile(4), B: without(profile(4), 0, 1, 2, 3)}, gone={A})

    found = replace(world, followed={B: ring((A, 0, 4))}).agree()

    assert found.plan == ring((B, 0, 4), epoch=6)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_measures_gain_by_its_objective(policy: str) -> None:
    agreed = replace(charter(), policy=policy)
    world = World({A: profile(8), B: profile(8)}, agreed, followed={A: ring((A, 0, 4))})

    plan = planned(world.agree())

    together = policy in {"throughput", "proportional"}
    assert plan.epoch == (6 if together else 5)
    assert spans(plan) == ({A: "0:2", B: "2:4"} if together else {A: "0:4"})


def test_small_changes_of_shares_move_no_layers() -> None:
    agreed = replace(charter(8), policy="proportional")
    profiles = {at: replace(profile(9), weights=weights(8)) for at in (A, B)}
    world = World(profiles, agreed, followed={A: ring((A, 0, 5), (B, 5, 8))})

    agreement = world.agree()

    assert agreement.plan == ring((A, 0, 5), (B, 5, 8))
    assert "gain 12%" in agreement.reason


def test_a_dead_member_is_replaced_at_once() -> None:
    world = THREE.follow(THREE.agree())
    lost = planned(world.agree()).stages[1].node

    agreement = replace(world, gone={lost}, busy={A, B, C}).agree()

    assert planned(agreement).epoch == 2
    assert lost not in spans(planned(agreement))
    assert agreement.reason == f"`{short(lost)}` is gone"


def test_a_member_that_leaves_is_dropped_from_the_plan() -> None:
    world = THREE.follow(THREE.agree())
    lost = planned(world.agree()).stages[1].node

    agreement = replace(world, left={lost}).agree()

    assert lost not in agreement.alive
    assert planned(agreement).epoch == 2


@pytest.mark.parametrize("leaver", [A, B, C], ids=["entry", "middle", "last"])
def test_a_leaving_member_is_replaced_while_sessions_run(leaver: NodeId) -> None:
    followed = ring((A, 0, 1), (B, 1, 2), (C, 2, 4))
    world = replace(THREE, followed={A: followed}, leaving={leaver}, busy={A})

    agreements = [world.agree(me) for me in (A, B, C)]

    plan = planned(agreements[0])
    assert set(nodes_of(plan)) == {A, B, C} - {leaver}
    assert plan.epoch == followed.epoch + 1
    assert agreements[0].reason == f"`{short(leaver)}` is leaving"
    assert standbys(agreements[0]) == {leaver: "it is leaving"}
    assert agreements[0] == agreements[1] == agreements[2]


def test_a_leaving_member_serves_on_while_no_other_ring_is_found() -> None:
    world = World({A: profile(2), B: profile(2)})
    followed = world.agree()

    agreement = replace(world.follow(followed), leaving={B}).agree()

    assert agreement.plan == followed.plan
    assert agreement.reason == "no other plan was found"


def test_a_leaving_client_keeps_the_ring_that_has_its_ends() -> None:
    profiles = {A: profile(0), B: profile(4), C: profile(4)}
    world = World(profiles, replace(charter(), ends=Ends.CLIENT))
    followed = world.agree()

    agreement = replace(world.follow(followed), leaving={A}).agree()

    assert agreement.plan == followed.plan


def test_a_node_that_leaves_before_the_first_plan_gets_no_layers() -> None:
    agreement = World({A: profile(4), B: profile(4)}, leaving={A}).agree()

    assert spans(planned(agreement)) == {B: "0:4"}


def test_a_standby_takes_the_fixed_span_of_a_leaving_member() -> None:
    fixed = replace(profile(2), span=Span(2, 4))
    world = World({A: profile(2), B: fixed, C: replace(fixed, layer_s=((1, 0.5),))})
    world = world.follow(world.agree())
    assert spans(planned(world.agree())) == {A: "0:2", B: "2:4"}

    agreement = replace(world, leaving={B}).agree()

    assert spans(planned(agreement)) == {A: "0:2", C: "2:4"}


def test_a_leaving_standby_changes_no_plan() -> None:
    world = World({A: profile(4), B: profile(4, ms=2.0)})
    world = world.follow(world.agree())

    agreement = replace(world, leaving={B}).agree()

    assert agreement.plan == world.agree().plan
    assert standbys(agreement) == {B: "it is leaving"}


def test_the_epoch_outlives_the_ring() -> None:
    world = World({A: profile(2), B: profile(2)}, followed={A: ring((A, 0, 2), (B, 2, 4))})

    assert replace(world, gone={B}).agree().plan is None
    assert world.agree().plan == ring((A, 0, 2), (B, 2, 4))
    other = World({A: profile(2), C: profile(2)}, followed=world.followed)
    assert planned(other.agree()).epoch == 6


def test_the_epoch_of_the_dead_is_not_used_again() -> None:
    followed = {A: ring((A, 0, 2), (B, 2, 4)), C: ring((C, 0, 4), epoch=9)}
    world = World({A: profile(4), B: profile(2), C: profile(4)}, followed=followed, gone={B, C})

    assert world.agree().plan == ring((A, 0, 4), epoch=10)


@pytest.mark.parametrize("lower", [B, C])
def test_after_a_partition_heals_the_higher_epoch_wins(lower: NodeId) -> None:
    epochs = {B: 6, C: 6} | {lower: 5}
    plans = {at: ring((at, 0, 4), epoch=epoch) for at, epoch in epochs.items()}
    world = World({A: profile(0), B: profile(4), C: profile(4)}, followed=plans)

    (higher,) = {B, C} - {lower}
    assert world.agree(B).plan == world.agree(C).plan == plans[higher]


def test_after_a_partition_heals_the_ring_with_more_nodes_wins_then_that_with_the_author() -> None:
    two = dict.fromkeys((C, D), ring((C, 0, 2), (D, 2, 4)))
    alone = {A: ring((A, 0, 4), epoch=6), B: ring((B, 0, 4), epoch=7)}
    profiles = {A: profile(4, ms=9), B: profile(4, ms=9), C: profile(2), D: profile(2)}

    assert World(profiles, followed={**alone, **two}).agree(A).plan == two[C]
    alike = {A: profile(4), B: profile(4)}
    assert World(alike, followed=alone).agree(B).plan == alone[A]


def test_after_a_partition_heals_a_ring_that_works_outlives_a_later_one_that_does_not() -> None:
    works = ring((A, 0, 2), (B, 2, 4))
    followed = {A: works, B: works, C: ring((C, 0, 3), (D, 3, 4), epoch=7)}
    profiles = {A: profile(2), B: profile(2), C: profile(3), D: profile(1)}

    assert World(profiles, followed=followed, gone={D}).agree(C).plan == works


@pytest.mark.parametrize(
    "claimed",
    [
        ring((D, 0, 4), epoch=6),
        ring((A, 0, 1), (B, 1, 4), epoch=6),
        ring((B, 0, 2), (A, 2, 4), epoch=6),
        ring((A, 0, 2), (B, 2, 4), epoch=6),
        ring((A, 0, 2), (C, 2, 4), epoch=6),
        ring((C, 0, 4), epoch=6),
    ],
    ids=["unknown node", "other split", "other order", "other epoch", "with itself", "alone"],
)
def test_a_member_outside_of_a_ring_cannot_end_it(claimed: Plan) -> None:
    followed = dict.fromkeys((A, B), ring((A, 0, 2), (B, 2, 4)))
    profiles = {A: profile(3), B: profile(3), C: profile(4, ms=9)}
    world = World(profiles, followed={**followed, C: claimed})

    assert world.agree(A).plan == world.agree(C).plan == followed[A]


def test_a_node_outside_of_a_ring_may_be_the_first_to_follow_the_next_plan() -> None:
    followed = dict.fromkeys((A, B), ring((A, 0, 2), (B, 2, 4)))
    profiles = {A: profile(2), B: profile(2, ms=9), C: profile(2)}
    world = World(profiles, followed=followed)
    better = planned(world.agree(C))
    assert (set(spans(better)), better.epoch) == ({A, C}, 6)

    begun = replace(world, followed={**followed, C: better})

    assert begun.agree(A).plan == begun.agree(C).plan == better


def test_a_plan_that_waits_keeps_the_epoch_in_which_a_node_outside_follows_it() -> None:
    followed = dict.fromkeys((A, B), ring((A, 0, 2), (B, 2, 4)))
    profiles = {A: profile(2), B: profile(2, ms=9), C: profile(2)}
    world = World(profiles, followed=followed)
    better = planned(world.agree(C))

    agreement = replace(world, followed={**followed, C: better}, busy={A}).agree(A)

    assert (agreement.plan, agreement.ahead) == (followed[A], better)


@pytest.mark.parametrize("first", [A, B])
def test_two_plans_of_one_epoch_are_ordered_by_digest(first: NodeId) -> None:
    (last,) = {A, B} - {first}
    plans = {at: ring((here, 0, 4)) for at, here in zip((A, B), (first, last), strict=True)}
    world = World({A: profile(4), B: profile(4)}, followed=plans)

    assert world.agree().plan == max(plans.values(), key=lambda plan: plan.digest)


def test_a_node_that_restarts_adopts_the_current_plan() -> None:
    followed = {A: ring((A, 0, 2), (B, 2, 4), epoch=7)}
    world = World({A: profile(2), B: profile(2)}, followed=followed)

    assert world.agree(B).plan == followed[A]


def test_another_model_ends_a_ring() -> None:
    other = replace(charter(), shape=replace(model(), name="other"))
    world = World({A: profile(4)}, other, followed={A: ring((A, 0, 4))}, busy={A})

    agreement = world.agree()

    assert planned(agreement).model == "other"
    assert planned(agreement).epoch == 6
    assert agreement.reason == "the charter requires another ring"


def test_members_without_a_link_form_no_ring() -> None:
    world = THREE.follow(THREE.agree())
    here, there = spans(planned(world.agree()))

    agreement = replace(world, cut=[frozenset({here, there})]).agree()

    assert set(spans(planned(agreement))) != {here, there}
    assert planned(agreement).epoch == 2
    assert "have no link" in agreement.reason


def test_a_node_whose_data_is_invalid_is_left_out_with_the_reason() -> None:
    world = THREE.follow(THREE.agree())
    here, there = spans(planned(world.agree()))
    (third,) = {A, B, C} - {here, there}

    faulty = {here: (there,), third: (there,)}
    view = replace(world, faulty=faulty, busy={here}).view(A, author=D)

    agreement = agree(view)

    assert set(spans(planned(agreement))) == {here, third}
    why = (
        f"`{short(max(here, third))}` refuses it: its data was invalid, or it did not load in time"
    )
    assert agreement.reason == f"`{short(there)}` is left out: {why}"
    assert standbys(agreement) == {there: why}


def test_a_node_that_accuses_all_others_is_left_out_itself() -> None:
    world = THREE.follow(THREE.agree())
    here, there = spans(planned(world.agree()))
    (third,) = {A, B, C} - {here, there}

    agreement = agree(replace(world, faulty={here: (there, third)}).view(A, author=D))

    assert set(spans(planned(agreement))) == {there, third}


def test_without_another_node_the_reason_says_whose_data_is_invalid() -> None:
    world = World({A: profile(2), B: profile(2)}, faulty={A: (B,)})

    agreement = agree(world.view(A, author=D))

    assert agreement.plan is None
    assert agreement.reason.startswith(f"`{short(B)}` is left out: `{short(A)}` refuses it")


def test_a_node_that_the_author_refuses_is_not_a_ring_by_itself() -> None:
    world = World({A: profile(0), B: profile(4)})
    first = world.agree()
    assert spans(planned(first)) == {B: "0:4"}

    agreement = replace(world.follow(first), faulty={A: (B,)}).agree()

    assert agreement.plan is None
    assert f"`{short(A)}` refuses it" in standbys(agreement)[B]


@pytest.mark.parametrize(("ms", "after"), [(0.9, [A, B]), (0.1, [B, C])])
def test_a_ring_of_the_policy_that_was_fallen_back_to_changes_for_a_gain_in_time(
    ms: float, after: list[NodeId]
) -> None:
    agreed, cut = replace(charter(), policy="proportional"), [frozenset({A, C})]
    profiles = {A: profile(3), B: profile(3), C: profile(3, ms=ms)}
    followed = dict.fromkeys(profiles, ring((A, 0, 3), (B, 3, 4)))

    agreement = World(profiles, agreed, cut=cut, followed=followed).agree()

    assert nodes_of(planned(agreement)) == after


def test_a_loss_moves_few_layers_where_the_policy_was_fallen_back_to() -> None:
    terms = replace(WIDE, policy="proportional")
    profiles = dict.fromkeys((A, B, C, D), replace(wide(), memory_bytes=800))
    followed = dict.fromkeys(profiles, ring((A, 0, 5), (B, 5, 12)))
    cut = [frozenset({A, C})]
    world = World(profiles, terms, cut=cut, followed=followed)

    agreement = replace(world, gone={B}).agree(A)

    assert spans(planned(agreement)) == {A: "0:5", D: "5:12"}


def test_a_first_ring_of_fewer_members_than_requested_counts_the_missing() -> None:
    agreed = replace(charter(), members=3)
    two = World({A: profile(4), B: profile(4)}, agreed)
    unready = replace(two, profiles={**two.profiles, C: replace(profile(4), layer_s=())})
    three = replace(two, profiles={**two.profiles, C: profile(4)})

    found = [world.agree() for world in (two, unready, three)]

    assert [agreement.lacking for agreement in found] == [1, 1, 0]
    assert [agreement.ready for agreement in found] == [{A, B}, {A, B}, {A, B, C}]
    assert [len(planned(agreement).stages) for agreement in found] == [2, 2, 3]


def test_what_is_left_of_a_ring_waits_for_no_member() -> None:
    agreed, own = replace(charter(), members=2), ring((A, 0, 2), (B, 2, 4))
    both = World({A: profile(4), B: profile(4)}, agreed, followed={A: own, B: own})

    agreement = replace(both, groups={B: GroupId(b"elsewhere")}).agree(A)

    assert spans(planned(agreement)) == {A: "0:4"}
    assert agreement.lacking == 0


def test_a_requested_member_that_fetches_weights_is_waited_for() -> None:
    agreed = replace(charter(), members=2)

    agreement = World({A: profile(4), B: profile(4)}, agreed, fetching={B}).agree()

    assert (agreement.lacking, *agreement.ready) == (1, A)
    assert standbys(agreement) == {B: "it fetches weights"}


def test_a_ring_that_lost_a_member_counts_none_missing() -> None:
    agreed = replace(charter(), members=2)
    both = World({A: profile(4), B: profile(4)}, agreed)
    both = both.follow(both.agree())

    agreement = replace(both, gone={B}).agree()

    assert spans(planned(agreement)) == {A: "0:4"}
    assert agreement.lacking == 0


def test_a_refused_node_is_not_waited_for() -> None:
    agreed = replace(charter(), members=2)
    other = replace(profile(4), weights=weights(changed={1: b"x" * 16}))

    agreement = World({A: profile(4), B: other}, agreed).agree()

    assert set(agreement.refused) == {B}
    assert agreement.lacking == 0


def test_a_changed_constraint_is_applied_once_no_session_is_hurt() -> None:
    agreed = replace(charter(), exclude=(A,))
    world = World({A: profile(4), B: profile(4)}, agreed, followed={A: ring((A, 0, 4))})

    assert replace(world, busy={A}).agree().plan == ring((A, 0, 4))
    agreement = world.agree()
    assert agreement.plan == ring((B, 0, 4), epoch=6)
    assert agreement.reason == "it satisfies the charter"
    assert standbys(agreement) == {A: "it is excluded"}


def test_a_ring_that_ignores_the_exclusions_of_a_member_is_kept() -> None:
    agreed = replace(charter(), exclude=(A, B, C), yields=(OverridableTerm("exclude", C, ()),))
    world = World(THREE.profiles, agreed)
    followed = world.follow(world.agree())

    agreement = followed.agree()
    nearer = replace(followed, apart_ms={frozenset({A, B}): 0.99}).agree()

    assert agreement.plan == world.agree().plan == nearer.plan
    assert agreement.reason == "no plan is better"


def test_a_lost_node_is_replaced_by_one_that_a_member_excluded() -> None:
    agreed = replace(charter(), exclude=(B,), yields=(OverridableTerm("exclude", C, ()),))
    world = World({A: profile(4), B: profile(4)}, agreed)
    followed = world.follow(world.agree())

    agreement = replace(followed, gone={A}).agree(B)

    assert agreement.plan == ring((B, 0, 4), epoch=2)


def test_a_fixed_span_makes_no_other_node_the_entry() -> None:
    fixed = profile(4, span=Span(0, 2))
    world = World({A: profile(4), B: fixed}, replace(charter(), entries=(A,)))

    assert spans(planned(world.agree())) == {A: "0:4"}


def test_a_node_holds_exactly_its_fixed_span() -> None:
    world = World({A: profile(4), B: profile(4, span=Span(1, 3)), C: profile(4)})

    assert spans(planned(world.agree()))[B] == "1:3"


def test_a_ring_that_violates_a_fixed_span_is_replaced() -> None:
    world = World(
        {A: profile(4), B: profile(4, span=Span(2, 4))}, followed={A: ring((A, 0, 1), (B, 1, 4))}
    )

    agreement = world.agree()

    assert spans(planned(agreement)) == {A: "0:2", B: "2:4"}
    assert agreement.reason == f"`{short(B)}` cannot hold `1:4`"


def test_a_new_fixed_span_waits_for_sessions_too() -> None:
    world = World(
        {A: profile(4), B: profile(4, span=Span(0, 2))}, followed={A: ring((A, 0, 4))}, busy={A}
    )

    agreement = world.agree()

    assert agreement.plan == ring((A, 0, 4))
    assert standbys(agreement) == {B: "its span `0:2` does not fit the ring"}
    assert spans(planned(replace(world, busy={}).agree())) == {B: "0:2", A: "2:4"}


def test_less_memory_ends_a_ring() -> None:
    world = World({A: profile(2), B: profile(4)}, followed={B: ring((A, 0, 4))})

    agreement = world.agree()

    assert agreement.plan == ring((B, 0, 4), epoch=6)
    assert agreement.reason == f"`{short(A)}` cannot hold `0:4`"


def test_a_ring_whose_entry_cannot_hold_the_ends_is_replaced() -> None:
    large = replace(charter(), shape=model(ends=80))
    world = World({A: profile(4), B: profile(5)}, large, followed={B: ring((A, 0, 4))})

    assert world.agree().plan == ring((B, 0, 4), epoch=6)


def test_the_shares_of_all_are_not_why_spans_lack_memory() -> None:
    agreed = replace(charter(), policy="proportional")

    agreement = World({A: profile(1), B: profile(1, span=Span(0, 1))}, agreed).agree()

    assert "The ring lacks" in agreement.reason


def test_the_author_keeps_the_ends_where_the_client_does() -> None:
    world = World({A: profile(1), B: profile(4)}, replace(charter(), ends=Ends.CLIENT))

    plan = planned(world.agree())

    assert [(at.node, str(at.span)) for at in plan.stages] == [(A, "0:0"), (B, "0:4")]
    assert world.follow(world.agree()).agree().plan == plan


def test_without_the_client_there_is_no_ring() -> None:
    agreed = replace(charter(), ends=Ends.CLIENT)

    agreement = World({A: profile(1), B: profile(4)}, agreed, gone={A}).agree()

    assert agreement.plan is None
    assert "made no offer" in agreement.reason


def test_a_member_with_other_weights_is_refused() -> None:
    world = World({A: profile(2), B: profile(2), C: profile(2)}, followed={A: ring((A, 0, 4))})
    changed = replace(profile(2), weights=weights(changed={2: b"x" * 16}))
    followed = {A: ring((A, 0, 2), (B, 2, 4))}

    agreement = replace(world, profiles={**world.profiles, B: changed}, followed=followed).agree()

    assert agreement.refused == {B: f"its layer 2 differs from that of `{short(A)}`"}
    assert spans(planned(agreement)) == {A: "0:2", C: "2:4"}
    assert agreement.reason == f"`{short(B)}` cannot take part: {agreement.refused[B]}"


def test_the_ring_takes_precedence_over_a_returning_author_with_other_weights() -> None:
    changed = replace(profile(4), weights=weights(changed={2: b"x" * 16}))
    world = World({A: changed, B: profile(4)}, followed={B: ring((B, 0, 4))})

    agreement = world.agree()

    assert agreement.plan == ring((B, 0, 4))
    assert set(agreement.refused) == {A}


def test_a_removed_or_departed_node_has_no_plan() -> None:
    assert replace(ALONE, removed={A}).agree(A).plan is None
    assert replace(ALONE, left={A}).agree(A).plan is None


def test_plans_of_removed_nodes_are_ignored() -> None:
    followed = {B: ring((B, 0, 4), epoch=9)}

    agreement = World({A: profile(4), B: profile(4)}, followed=followed, removed={B}).agree()

    assert agreement.plan == ring((A, 0, 4), epoch=1)
    assert agreement.alive == {A}


@pytest.mark.parametrize(
    "followed", [b"garbage", ring((A, 0, 4), epoch=MAX_EPOCH).encode()], ids=["garbage", "epoch"]
)
def test_an_unusable_plan_is_ignored(followed: bytes) -> None:
    view = replace(ALONE.view(A), states={A: StateRecord(followed=followed)})

    assert planned(agree(view)).epoch == 1


def test_no_member_uses_up_the_epochs() -> None:
    profiles = {A: profile(4), B: profile(4), C: profile(4)}
    lie = ring((C, 0, 1), (B, 1, 4), epoch=MAX_EPOCH - 1)
    world = World(profiles, followed={A: ring((A, 0, 4)), B: ring((A, 0, 4)), C: lie})

    assert world.agree().plan == ring((A, 0, 4))
    assert (
        planned(replace(world, gone={A}, followed={B: ring((A, 0, 4)), C: lie}).agree()).epoch == 6
    )


def test_a_member_does_not_use_up_the_epochs_before_the_first_plan() -> None:
    lie = ring((C, 0, 1), (B, 1, 4), epoch=MAX_EPOCH - 1)
    world = World({A: profile(4), B: profile(4), C: profile(4)}, followed={C: lie})

    assert planned(world.agree()).epoch == 1


def test_a_mesh_that_followed_an_absurd_epoch_restarts_without_its_author() -> None:
    lie = ring((A, 0, 4), epoch=MAX_EPOCH - 1)
    world = World({A: profile(4), C: profile(4)}, followed={C: lie}, gone={C})

    assert planned(world.agree()).epoch == 1


@pytest.mark.parametrize("ends", Ends)
def test_a_broken_plan_with_other_ends_is_replaced(ends: Ends) -> None:
    lie = replace(ring((A, 0, 1), (B, 1, 2), (C, 2, 4)), ends=Ends.ENTRY)
    if ends is Ends.ENTRY:
        lie = Plan(
            5, "tiny", Ends.CLIENT, (PlanStage(A, Span(0, 0)), *ring((B, 0, 2), (C, 2, 4)).stages)
        )
    world = World({A: profile(4), B: profile(4)}, replace(charter(), ends=ends), followed={A: lie})

    agreement = world.agree()

    assert planned(agreement).ends is ends
    assert planned(agreement).epoch == 6


def test_a_node_without_a_published_state_can_plan_alone() -> None:
    view = replace(ALONE.view(A), states={})

    assert spans(planned(agree(view))) == {A: "0:4"}


def test_a_working_ring_is_kept_if_no_other_is_found() -> None:
    # The entry must be a node that the charter excludes from holding layers.
    agreed = replace(charter(), exclude=(A,))
    world = World({A: profile(4)}, agreed, followed={A: ring((A, 0, 4))})

    agreement = world.agree()

    assert agreement.plan == ring((A, 0, 4))
    assert agreement.reason == "no other plan was found"


def test_a_reused_result_says_which_nodes_are_refused_now() -> None:
    # C and D are linked to B alone: a refusal between them changes no input of the planner.
    view = World({each: profile(4) for each in (A, B, C, D)}).view(A)
    peers = {A: (B,), B: (A, C, D), C: (B,), D: (B,)}
    linked = {
        each: replace(state, links=tuple((peer, 1000) for peer in peers[each]))
        for each, state in view.states.items()
    }
    before = replace(view, states=linked)
    after = replace(view, states={**linked, C: replace(linked[C], faulty=(D,))})

    assert standbys(agree(before)) != standbys(agree(after))
    assert agree(after, agree(before)) == agree(after)


def test_a_contradictory_charter_is_reported() -> None:
    agreed = replace(charter(), ends=Ends.CLIENT)
    world = World({A: profile(4, span=Span(0, 4)), B: profile(4)}, agreed)

    assert world.agree().plan is None


@pytest.mark.no_cover
def test_a_full_mesh_agrees() -> None:
    nodes = [node(number) for number in range(1, 65)]
    world = World({at: profile(1) for at in nodes}, charter(4))

    agreement = world.agree()

    assert len(planned(agreement).stages) == 4
    assert len(agreement.standbys) == 60
    assert world.follow(agreement).agree(nodes[-1]).plan == agreement.plan


def test_a_node_that_does_not_know_the_policy_is_a_standby_with_a_reason() -> None:
    unknown = ("node `x` set policy `greenest`",)
    world = World({A: profile(4), B: profile(4)}, replace(charter(), unknown=unknown))

    agreement = world.agree(A)

    assert agreement.plan is None
    assert agreement.reason == (
        "node `x` set policy `greenest`, unknown to this version; update meshllm"
    )
    assert agreement.refused == {A: agreement.reason}
    assert advise(agreement) == f"There is no ring: {agreement.reason}"


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"obstacle": "it is old"}, "it is old"),
        (
            {"lifecycle": Lifecycle.OTHER},
            "its state is unknown to this version; update meshllm",
        ),
    ],
)
def test_the_others_plan_without_a_node_with_an_obstacle(
    state: dict[str, Any], reason: str
) -> None:
    world = World({A: profile(4), B: profile(4, ms=9)})
    world = world.follow(world.agree())
    view = world.view(B)
    states = {**view.states, A: replace(view.states[A], **state)}

    agreement = agree(replace(view, states=states))

    assert agreement.plan is not None
    assert [stage.node for stage in agreement.plan.stages] == [B]
    assert agreement.standbys == (Standby(A, reason),)
    assert agreement.standbys[0].reason == reason


def test_a_plan_has_lost_a_node_that_is_gone() -> None:
    world = THREE.follow(THREE.agree())
    before = world.agree()
    after = replace(world, gone={planned(before).stages[1].node}).agree()
    assert not before.has_lost(None)
    assert not before.has_lost(before.plan)
    assert after.has_lost(before.plan)
    assert not after.has_lost(after.plan)


WIDE = charter(12)
FOURS = ring((A, 0, 4), (B, 4, 8), (C, 8, 12))


def wide(ms: float = 1.0) -> Profile:
    return replace(profile(14, ms=ms), weights=weights(12))


@pytest.mark.parametrize(
    ("lost", "after"),
    [(A, {B: "0:8", C: "8:12"}), (B, {A: "0:6", C: "6:12"}), (C, {A: "0:4", B: "4:12"})],
)
@pytest.mark.parametrize("leaves", [False, True])
def test_nodes_that_stay_keep_their_layers_if_that_is_about_as_fast(
    lost: NodeId, after: dict[NodeId, str], *, leaves: bool
) -> None:
    followed = dict.fromkeys((A, B, C), FOURS)
    terms = replace(WIDE, members=2)
    world = World(dict.fromkeys((A, B, C), wide()), terms, followed=followed)

    changed = replace(world, leaving={lost}) if leaves else replace(world, gone={lost})
    agreement = changed.agree(min(after))

    assert spans(planned(agreement)) == after


def test_layers_move_after_a_loss_if_that_makes_a_token_much_faster() -> None:
    profiles = {A: wide(), B: wide(ms=50.0), C: wide()}
    world = World(profiles, WIDE, followed=dict.fromkeys(profiles, FOURS))

    assert spans(planned(replace(world, gone={C}).agree(A))) == {A: "0:12"}


@pytest.mark.parametrize(("ms", "after"), [(0.947, {A: "0:4", B: "4:12"}), (0.948, {A: "0:12"})])
def test_nodes_that_stay_keep_their_layers_at_the_limit(
    ms: float, after: dict[NodeId, str]
) -> None:
    """12.0 ms per token instead of 10.2."""
    profiles = {A: wide(ms=0.85), B: wide(ms=ms), C: wide()}
    world = World(profiles, WIDE, followed=dict.fromkeys(profiles, FOURS))

    assert spans(planned(replace(world, gone={C}).agree(A))) == after


@pytest.mark.parametrize(
    ("before", "behind", "after"),
    [
        (wide(), wide(ms=1.2), {A: "0:6", C: "6:12"}),
        (wide(), wide(ms=1.4), {A: "0:7", C: "7:12"}),
        (wide(), wide(ms=1.7), {A: "0:8", C: "8:12"}),
        (wide(ms=1.4), wide(), {A: "0:5", C: "5:12"}),
        (wide(ms=1.7), wide(), {A: "0:4", C: "4:12"}),
        (without(wide(), 5), wide(), {A: "0:5", C: "5:12"}),
        (without(wide(), 4), wide(), {A: "0:4", C: "4:12"}),
        (wide(), without(wide(), 7), {A: "0:8", C: "8:12"}),
        (without(wide(), 4), without(wide(), 7), {A: "0:6", C: "6:12"}),
    ],
)
def test_neighbours_share_lost_layers_unless_steps_get_slower_or_weights_are_missing(
    before: Profile, behind: Profile, after: dict[NodeId, str]
) -> None:
    profiles = {A: before, B: wide(), C: behind}
    world = World(profiles, replace(WIDE, members=2), followed=dict.fromkeys(profiles, FOURS))

    assert spans(planned(replace(world, gone={B}).agree(A))) == after


def test_a_node_without_layers_takes_those_of_a_lost_one() -> None:
    profiles = dict.fromkeys((A, B, C, D), wide())
    terms = replace(WIDE, members=3)
    world = World(profiles, terms, followed=dict.fromkeys(profiles, FOURS))

    found = spans(planned(replace(world, gone={B}).agree(A)))

    assert found == {A: "0:4", D: "4:8", C: "8:12"}


SIX_ONE_FIVE = ring((A, 0, 6), (B, 6, 7), (C, 7, 12))


@pytest.mark.parametrize(
    ("ms", "after"),
    [(0.9, {A: "0:6", D: "6:7", C: "7:12"}), (1.1, {A: "0:7", C: "7:12"})],
)
def test_lost_layers_go_to_a_node_without_any_only_if_it_computes_them_sooner(
    ms: float, after: dict[NodeId, str]
) -> None:
    profiles = dict.fromkeys((A, B, C, D), replace(wide(), memory_bytes=800))
    apart_ms = {frozenset(pair): 0.01 for pair in combinations(profiles, 2)}
    followed = dict.fromkeys(profiles, SIX_ONE_FIVE)
    spare = replace(wide(ms), memory_bytes=100)
    world = World({**profiles, D: spare}, WIDE, apart_ms, followed=followed)

    assert spans(planned(replace(world, gone={B}).agree(A))) == after


@pytest.mark.parametrize(
    ("ms", "after"),
    [(0.1152, {A: "0:6", D: "6:7", C: "7:12"}), (0.1153, {A: "0:7", C: "7:12"})],
)
def test_lost_layers_that_are_computed_sooner_may_make_a_token_slower_by_the_slack(
    ms: float, after: dict[NodeId, str]
) -> None:
    """12 layers and 1.024 ms for two hops: 13.024 ms, and a twentieth more is 13.6752 ms."""
    profiles = dict.fromkeys((A, B, C, D), replace(wide(), memory_bytes=800))
    apart_ms = {frozenset((other, D)): 2.048 for other in (A, C)}
    followed = dict.fromkeys(profiles, SIX_ONE_FIVE)
    spare = replace(wide(ms), memory_bytes=100)
    world = World({**profiles, D: spare}, WIDE, apart_ms, followed=followed)

    assert spans(planned(replace(world, gone={B}).agree(A))) == after


@pytest.mark.parametrize("layers", [1, 4])
def test_a_claimed_plan_takes_no_precedence_from_a_ring(layers: int) -> None:
    plan = ring((A, 0, 2), (B, 2, 4))
    claimed = ring((C, 0, 4), epoch=plan.epoch + 1)
    profiles = {A: profile(4), B: profile(4), C: replace(profile(layers), version="another")}

    agreement = World(profiles, followed={A: plan, B: plan, C: claimed}).agree(A)

    assert {stage.node for stage in planned(agreement).stages} <= {A, B}
    assert planned(agreement).epoch > claimed.epoch
    assert set(agreement.refused) == {C}


def test_a_majority_keeps_precedence_while_its_nodes_follow_one_by_one() -> None:
    first, second = ring((A, 0, 2), (B, 2, 4)), ring((C, 0, 4), epoch=6)
    profiles = {A: profile(4), B: profile(4), C: replace(profile(4), version="another")}
    followed = {A: first, B: first, C: second}
    after = planned(World(profiles, followed=followed).agree(A))

    for follower in (A, B):
        followed = {**followed, follower: after}

        assert planned(World(profiles, followed=followed).agree(A)) == after
