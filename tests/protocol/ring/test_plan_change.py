"""When a node follows a plan: settled, prepared for, late, or because others do or a ring broke."""

from dataclasses import replace

import pytest

from meshllm.names import NodeId, Span
from meshllm.protocol.planning.plan import MAX_JUMP, Ends, Plan, PlanStage
from meshllm.protocol.ring.plan_change import (
    PREPARE_S,
    Follow,
    PlanChange,
    PlanChangeInput,
    PlanChangeState,
    Prepare,
)
from tests.builders.offers import A, B, C, D


def plan_of(*places: tuple[NodeId, str], epoch: int = 1) -> Plan:
    stages = tuple(PlanStage(node, Span.parse(span)) for node, span in places)
    return Plan(epoch, "tiny", Ends.ENTRY, stages)


OLD = plan_of((A, "0:2"), (B, "2:6"))
NEW = plan_of((A, "0:2"), (B, "2:4"), (C, "4:6"), epoch=2)
OTHER = plan_of((A, "0:3"), (C, "3:6"), epoch=2)
WHOLE = PlanChangeInput(NEW, OLD, 0.5, is_whole=True)
BROKEN = replace(WHOLE, is_whole=False)


def preparing() -> PlanChange:
    """Return the machine of a node that prepares for the next plan since 0.5 s."""
    machine = PlanChange()
    machine.look(WHOLE, 0.0)
    assert machine.look(WHOLE, 0.5) == [Prepare(NEW)]
    return machine


def test_the_plan_that_is_followed_needs_nothing() -> None:
    machine = PlanChange()

    assert machine.look(replace(WHOLE, plan=OLD), 0.0) == []
    assert (machine.state, machine.deadline) == (PlanChangeState.FOLLOWING, None)


def test_an_older_plan_is_not_followed() -> None:
    machine = PlanChange()

    assert machine.look(PlanChangeInput(OLD, NEW, 0.0), 0.0) == []
    assert machine.state is PlanChangeState.FOLLOWING


def test_an_older_plan_that_others_follow_is_followed() -> None:
    machine = PlanChange()
    others_follow = PlanChangeInput(OLD, NEW, 2.0, is_whole=True, is_begun=True)

    assert machine.look(others_follow, 0.0) == []
    assert machine.state is PlanChangeState.SETTLING
    assert machine.look(others_follow, 2.0) == [Follow(OLD)]


def test_an_older_plan_that_others_leave_while_it_settles_is_not_followed() -> None:
    machine = PlanChange()
    machine.look(PlanChangeInput(OLD, NEW, 2.0, is_begun=True), 0.0)

    assert machine.look(PlanChangeInput(OLD, NEW, 2.0), 2.0) == []
    assert machine.state is PlanChangeState.FOLLOWING


@pytest.mark.parametrize(("epoch", "follows"), [(MAX_JUMP + 1, False), (MAX_JUMP + 2, True)])
def test_a_much_older_plan_replaces_one_with_an_absurd_epoch(epoch: int, *, follows: bool) -> None:
    machine = PlanChange()

    actions = machine.look(PlanChangeInput(OLD, replace(NEW, epoch=epoch), 0.0), 0.0)

    assert actions == [Follow(OLD)] * follows


@pytest.mark.parametrize("followed", [None, OLD], ids=["none", "broken"])
def test_without_a_ring_that_serves_a_plan_is_followed_once_it_is_settled(
    followed: Plan | None,
) -> None:
    machine, plan_change_input = PlanChange(), replace(BROKEN, followed=followed)

    assert machine.look(plan_change_input, 0.0) == []
    assert (machine.state, machine.deadline) == (PlanChangeState.SETTLING, 0.5)
    assert machine.look(plan_change_input, 0.4) == []
    assert machine.look(plan_change_input, 0.5) == [Follow(NEW)]
    assert machine.deadline is None


def test_another_plan_or_another_time_to_settle_begins_again() -> None:
    machine = PlanChange()
    machine.look(BROKEN, 0.0)

    assert machine.look(replace(BROKEN, plan=OTHER), 0.4) == []
    assert machine.deadline == pytest.approx(0.9)
    assert machine.look(replace(BROKEN, plan=OTHER, settle_s=0.15), 0.5) == []
    assert machine.deadline == pytest.approx(0.65)
    assert machine.look(replace(BROKEN, plan=OTHER, settle_s=0.15), 0.7) == [Follow(OTHER)]


def test_plans_that_keep_changing_settle_after_twice_the_time() -> None:
    machine, plans = PlanChange(), [NEW, OTHER] * 10
    followed = [
        now / 10
        for now, plan in enumerate(plans)
        if machine.look(replace(BROKEN, plan=plan), now / 10)
    ]

    assert followed[0] == 1.0
    assert machine.state is PlanChangeState.SETTLING  # as the next one is agreed on


def test_that_there_is_no_plan_any_more_is_followed() -> None:
    machine, plan_change_input = PlanChange(), replace(WHOLE, plan=None)
    machine.look(plan_change_input, 0.0)

    assert machine.look(plan_change_input, 0.5) == [Follow(None)]


def test_a_ring_that_serves_goes_on_until_all_have_prepared() -> None:
    machine = preparing()

    assert (machine.state, machine.deadline) == (PlanChangeState.PREPARING, 0.5 + PREPARE_S)
    assert machine.look(WHOLE, 1.0) == []
    assert machine.look(replace(WHOLE, prepared={A, C}), 2.0) == []
    assert machine.look(replace(WHOLE, prepared={A, B, C}), 3.0) == [Follow(NEW)]
    assert (machine.state, machine.deadline) == (PlanChangeState.FOLLOWING, None)


def test_a_node_that_leaves_is_awaited_too() -> None:
    machine, all_loaded = preparing(), {A, B, C}
    plan_change_input = replace(WHOLE, leaving={D})

    assert machine.look(replace(plan_change_input, prepared=all_loaded), 2.0) == []
    assert machine.look(replace(plan_change_input, prepared={*all_loaded, D}), 3.0) == [Follow(NEW)]


def test_what_all_have_prepared_before_is_followed_once_it_is_settled() -> None:
    machine, plan_change_input = PlanChange(), replace(WHOLE, prepared=(A, B, C))
    machine.look(plan_change_input, 0.0)

    assert machine.look(plan_change_input, 0.5) == [Prepare(NEW), Follow(NEW)]


@pytest.mark.parametrize(
    "change",
    [replace(WHOLE, is_begun=True), BROKEN, replace(BROKEN, settle_s=0.15)],
    ids=["another node follows", "the ring broke", "a node was lost"],
)
def test_nothing_is_awaited_that_does_not_come(change: PlanChangeInput) -> None:
    assert preparing().look(change, 1.0) == [Follow(NEW)]


def test_a_node_that_follows_takes_one_along_that_is_not_settled() -> None:
    machine = PlanChange()
    machine.look(WHOLE, 0.0)

    assert machine.look(replace(WHOLE, is_begun=True), 0.1) == [Follow(NEW)]


def test_a_node_that_says_nothing_holds_up_the_rest_for_a_while() -> None:
    machine = preparing()

    assert machine.look(WHOLE, PREPARE_S) == []
    assert machine.look(WHOLE, 0.5 + PREPARE_S) == [Follow(NEW)]


def test_plans_that_keep_changing_do_not_extend_the_time() -> None:
    machine, other = preparing(), replace(WHOLE, plan=OTHER)

    assert machine.look(other, 40.0) == []
    assert machine.look(other, 40.5) == [Prepare(OTHER)]
    assert machine.deadline == 0.5 + PREPARE_S
    assert machine.look(WHOLE, 50.0) == []
    assert machine.look(WHOLE, 0.5 + PREPARE_S) == [Prepare(NEW), Follow(NEW)]


def test_the_followed_plan_again_ends_it() -> None:
    machine = preparing()

    assert machine.look(replace(WHOLE, plan=OLD), 40.0) == []
    assert machine.deadline is None
    machine.look(WHOLE, 50.0)
    assert machine.look(WHOLE, 50.5) == [Prepare(NEW)]
    assert machine.deadline == 50.5 + PREPARE_S


def test_a_node_that_moves_begins_again() -> None:
    machine = preparing()
    machine.reset()

    assert machine.deadline is None
    assert machine.look(replace(BROKEN, followed=None), 2.0) == []
    assert machine.deadline == 2.5
