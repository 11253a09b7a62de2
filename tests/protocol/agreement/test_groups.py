"""The groups of a mesh: their order, their plans, and who uses them."""

from dataclasses import replace

import pytest

from meshllm.names import FIRST_GROUP, GroupId, Quant
from meshllm.protocol.agreement.groups import (
    REFUSES,
    UNASSIGNED,
    find_group,
    groups_in,
    groups_of,
    holds,
    is_exact,
    plans_in_force,
    used_models,
)
from meshllm.protocol.membership.records import Lifecycle, Profile, RingMembership, StateRecord
from meshllm.protocol.planning.plan import Plan
from tests.builders.model_groups import group, mesh_of, model, ring, using, view_of
from tests.builders.offers import A, B, C, D


def test_the_groups_are_in_order_and_the_first_is_that_of_earlier_versions() -> None:
    charter = mesh_of(model(1, 4, replicas=2), model(2, 4), model(3, 4, replicas=3))

    groups = groups_of(charter)

    order = {(each.charter.shape.name, each.replica): at for at, each in enumerate(groups)}
    assert groups[0].id == FIRST_GROUP
    assert len({each.id for each in groups}) == len(groups) == 6
    assert {name for name, _ in list(order)[:3]} == {"m1", "m2", "m3"}
    assert [name for name in order if name[1] == 2] == [("m3", 2)]
    assert find_group(charter, groups[3].id) == groups[3]
    assert find_group(charter, UNASSIGNED) is None


def test_a_ring_is_exact_if_all_its_nodes_are_and_nothing_is_quantised() -> None:
    charter, plan = model(1, 4), ring("m1", (A, 0, 2), (B, 2, 4))
    exact, other = (Profile("n", "1", (), 100, is_exact=each) for each in (True, False))

    assert is_exact(charter, plan, {A: exact, B: exact, C: other})
    assert not is_exact(charter, plan, {A: exact, B: other})
    assert not is_exact(charter, plan, {A: exact})
    assert not is_exact(replace(charter, quant=Quant.INT8), plan, {A: exact, B: exact})


def test_a_profile_of_one_ring_names_its_model_by_its_weights() -> None:
    charter = model(1, 4)

    assert holds(
        Profile("", "", (), 0, weights=(charter.config_digest[:16],)), charter, charter.key
    )
    assert not holds(Profile("", "", (), 0, weights=(bytes(16),)), charter, charter.key)
    assert not holds(Profile("", "", (), 0), charter, charter.key)


def test_a_plan_in_force_is_of_nodes_of_one_group() -> None:
    charter = mesh_of(model(1, 4), model(2, 4))
    second = group(charter, 2)
    places = {A: FIRST_GROUP, B: second, C: second, D: second}
    old, new = ring("m2", (B, 0, 4), epoch=3), ring("m2", (B, 0, 2), (C, 2, 4), epoch=4)
    foreign = ring("m1", (A, 0, 2), (B, 2, 4), epoch=9)

    view = view_of(charter, dict.fromkeys(places, 4), places, {A: foreign, B: new, C: old, D: new})

    assert plans_in_force(view) == {second: new}


@pytest.mark.parametrize(
    "claimed",
    [ring("m1", (C, 0, 4), epoch=9), ring("m1", (A, 0, 2), (C, 2, 4), epoch=9)],
    ids=["alone", "with others"],
)
def test_a_node_cannot_change_the_plan_of_a_ring_of_others(claimed: Plan) -> None:
    charter = mesh_of(model(1, 4), model(2, 4))
    plan, places = ring("m1", (A, 0, 2), (B, 2, 4)), dict.fromkeys((A, B, C), FIRST_GROUP)

    view = view_of(charter, dict.fromkeys(places, 4), places, {A: plan, B: plan, C: claimed})

    assert plans_in_force(view) == {FIRST_GROUP: plan}


def test_what_a_node_used_counts_while_it_lives() -> None:
    charter = mesh_of(model(1, 4), model(2, 4))
    places = {A: FIRST_GROUP, B: UNASSIGNED}
    view = using(view_of(charter, {A: 4, B: 1}, places), 1, 2)
    gone = {**view.states, B: replace(view.states[B], links=(), lifecycle=Lifecycle.LEFT)}

    assert used_models(replace(view, states=gone)) == {charter.key}


def test_a_node_takes_part_in_its_first_ring_whatever_obstacle_it_tells() -> None:
    state = StateRecord(
        group=GroupId(b"first"),
        obstacle=REFUSES,
        further=(RingMembership(GroupId(b"a"), obstacle=REFUSES), RingMembership(GroupId(b"b"))),
    )

    assert groups_in(state) == (GroupId(b"first"), GroupId(b"b"))
