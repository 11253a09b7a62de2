"""What nodes can hold, and which groups are complete."""

from dataclasses import replace

import pytest

from meshllm.names import FIRST_GROUP, GroupId, ModelKey, NodeId, Span
from meshllm.protocol.agreement.grouping import assign, shortage
from meshllm.protocol.agreement.groups import UNASSIGNED, find_group
from meshllm.protocol.membership.records import Lifecycle
from meshllm.protocol.planning.plan import Ends, Plan, PlanStage
from tests.builders.model_groups import (
    LAYER,
    group,
    mesh_of,
    model,
    refusing,
    retracted,
    ring,
    using,
    view_of,
)
from tests.builders.offers import A, B, C, D


def test_a_ring_that_works_is_complete_whatever_the_estimate_says() -> None:
    one = model(1, 4)
    sizes = (LAYER, LAYER, LAYER // 2, LAYER // 2)
    charter = mesh_of(replace(one, shape=replace(one.shape, layer_bytes=sizes)), model(2, 2))
    places = {A: FIRST_GROUP, B: FIRST_GROUP, C: group(charter, 2)}
    used = ring("m1", (A, 0, 2), (B, 2, 4))
    view = view_of(charter, {A: 2, B: 1, C: 2}, places, {A: used, B: used})

    assert assign(view) == places
    assert shortage(view) == {}


@pytest.mark.parametrize("name", ["m1", "m2"])
def test_a_plan_of_another_model_makes_no_group_complete(name: str) -> None:
    charter = mesh_of(model(1, 2), model(2, 4))
    second = group(charter, 2)
    places = {A: second, B: second}
    left = ring(name, (A, 0, 2))  # of the ring that A has left, or of too few layers

    view = using(view_of(charter, {A: 2, B: 2}, places, {A: left}), 2)

    assert assign(view) == places


@pytest.mark.parametrize("why", ["less memory", "a larger context"])
def test_a_ring_that_can_no_longer_hold_its_plan_gets_a_node(why: str) -> None:
    is_larger = why == "a larger context"
    one = model(1, 4)
    shape = replace(one.shape, kv_bytes_per_token=(2 * LAYER if is_larger else 0,) * 4, context=1)
    charter = mesh_of(replace(one, shape=shape), model(2, 4))
    second = group(charter, 2)
    places = {A: FIRST_GROUP, B: second, C: second}
    used, other = ring("m1", (A, 0, 4)), ring("m2", (B, 0, 4))
    memory = {A: 5 if is_larger else 1, B: 4, C: 14}

    view = view_of(charter, memory, places, {A: used, B: other, C: other})

    assert assign(view) == places | {C: FIRST_GROUP}


@pytest.mark.parametrize("stages", [((A, 0, 4),), ((A, 0, 2), (D, 2, 4))])
def test_a_node_that_cannot_load_its_layers_is_replaced(
    stages: tuple[tuple[NodeId, int, int], ...],
) -> None:
    charter = mesh_of(model(1, 4), model(2, 4))
    second = group(charter, 2)
    places = {A: FIRST_GROUP, B: second, C: second, D: FIRST_GROUP}
    used, other = ring("m1", *stages), ring("m2", (B, 0, 4))
    followed = {A: used, B: other, C: other, D: used}
    view = view_of(charter, {A: 4, B: 4, C: 4, D: 2}, places, followed)

    assert assign(view) == places
    assert assign(retracted(view, A)) == places | {C: FIRST_GROUP}


def test_a_node_that_cannot_load_its_layers_is_free_for_an_earlier_model() -> None:
    charter = mesh_of(model(1, 4), model(2, 4))
    places = {A: group(charter, 2)}
    view = view_of(charter, {A: 4}, places, {A: ring("m2", (A, 0, 4))})

    assert assign(view) == places
    assert assign(retracted(view, A)) == {A: FIRST_GROUP}


@pytest.mark.parametrize("is_followed", [False, True])
def test_nodes_that_refuse_each_other_are_no_ring(*, is_followed: bool) -> None:
    charter = mesh_of(model(1, 4), model(2, 4))
    second = group(charter, 2)
    places = {A: FIRST_GROUP, B: FIRST_GROUP, C: second, D: second}
    used, other = ring("m1", (A, 0, 2), (B, 2, 4)), ring("m2", (C, 0, 4))
    followed = {A: used, B: used, C: other, D: other} if is_followed else {}
    view = view_of(charter, {A: 2, B: 2, C: 4, D: 2}, places, followed)

    assert assign(view) == places
    assert assign(refusing(view, B, A)) == places | {D: FIRST_GROUP}
    assert assign(refusing(view, B, C)) == places


@pytest.mark.parametrize(
    ("layers", "refused", "is_complete"),
    [
        ({A: 2, B: 2, C: 2}, (A,), True),
        ({A: 2, B: 2, C: 2}, (A, C), True),
        ({A: 1, B: 3, C: 1}, (A, C), False),
        ({A: 1, B: 1, C: 1, D: 1}, (A,), True),
    ],
)
def test_up_to_three_nodes_are_all_neighbours(
    layers: dict[NodeId, float], refused: tuple[NodeId, ...], *, is_complete: bool
) -> None:
    view = view_of(model(1, 4), layers, dict.fromkeys(layers, FIRST_GROUP))

    assert shortage(refusing(view, B, *refused)) == ({} if is_complete else {FIRST_GROUP: LAYER})


def test_a_node_takes_part_only_for_a_model_that_it_has() -> None:
    charter = mesh_of(model(1, 4), model(2, 4))
    second = find_group(charter, group(charter, 2))
    assert second
    view = view_of(charter, {A: 4, B: 4, C: 4}, a=(second.charter.key,), c=(ModelKey(bytes(8)),))

    assert assign(view) == {A: group(charter, 2), B: FIRST_GROUP, C: UNASSIGNED}
    moved = assign(
        view_of(charter, {A: 4, B: 4}, dict.fromkeys((A, B), FIRST_GROUP), a=(second.charter.key,))
    )
    assert moved == {A: group(charter, 2), B: FIRST_GROUP}


@pytest.mark.parametrize("lifecycle", [Lifecycle.LEAVING, Lifecycle.OTHER])
def test_nodes_that_cannot_hold_layers_have_no_place(lifecycle: Lifecycle) -> None:
    charter = mesh_of(model(1, 4), model(2, 4))
    view = view_of(charter, {A: 4, B: 4, C: 4})
    states = {
        **view.states,
        B: replace(view.states[B], lifecycle=lifecycle),
        C: replace(view.states[C], obstacle="it provides whole models"),
    }

    assert assign(replace(view, states=states)) == {A: FIRST_GROUP}
    assert assign(replace(view, profiles={A: view.profiles[A]})) == {A: FIRST_GROUP}


def test_excluded_nodes_hold_nothing() -> None:
    charter = mesh_of(model(1, 4), model(2, 4), exclude=(A,))

    assert assign(view_of(charter, {A: 4, B: 4})) == {A: UNASSIGNED, B: FIRST_GROUP}


def test_a_plan_with_layers_on_excluded_nodes_does_not_make_a_ring_complete() -> None:
    charter, places = model(1, 4, exclude=(A,)), dict.fromkeys((A, B), FIRST_GROUP)
    layers = {A: 4, B: 3}

    used = ring("m1", (A, 0, 1), (B, 1, 4))
    view = view_of(charter, layers, places, {A: used, B: used})
    assert shortage(view) == {FIRST_GROUP: LAYER}

    stages = (PlanStage(A, Span(0, 0)), PlanStage(B, Span(0, 4)))  # more than the estimate
    used = Plan(1, "m1", Ends.CLIENT, stages)
    shape = replace(charter.shape, layer_bytes=(LAYER, LAYER, LAYER // 2, LAYER // 2))
    charter = replace(charter, shape=shape, ends=Ends.CLIENT)
    view = view_of(charter, layers, places, {A: used, B: used})
    assert shortage(view) == {}


def test_a_ring_needs_a_node_that_may_be_the_entry() -> None:
    charter = mesh_of(model(1, 4, ends=30), model(2, 4, ends=30), entries=(B,))

    assert assign(view_of(charter, {A: 5, B: 5}))[B] == FIRST_GROUP
    assert shortage(view_of(charter, {A: 5}, {A: FIRST_GROUP})) == {
        FIRST_GROUP: 4 * LAYER,
        group(charter, 2): 4 * LAYER,
    }


@pytest.mark.parametrize("entry", [B, C])
def test_a_ring_whose_entry_may_not_be_one_any_more_lacks_one(entry: NodeId) -> None:
    charter = mesh_of(model(1, 4), model(2, 4), entries=(A, B))
    second = group(charter, 2)
    places = {A: FIRST_GROUP, entry: second}
    followed = {A: ring("m1", (A, 0, 4)), entry: ring("m2", (entry, 0, 4))}
    view = view_of(charter, {A: 4, entry: 4}, places, followed)

    assert shortage(view) == ({} if entry == B else {second: 4 * LAYER})


def test_a_client_that_is_the_entry_holds_no_layers() -> None:
    charter = mesh_of(model(1, 4), model(2, 4), ends=Ends.CLIENT)
    places = {A: FIRST_GROUP, B: FIRST_GROUP}

    assert shortage(view_of(charter, {A: 4, B: 4}, places)) == {group(charter, 2): 4 * LAYER}
    assert shortage(view_of(charter, {A: 9, B: 3}, places))[FIRST_GROUP] == LAYER


@pytest.mark.parametrize(
    ("layers", "lacking"), [({A: 4, B: 4}, 0), ({A: 4, B: 2, C: 2}, 2), ({A: 4, B: 4, C: 4}, 0)]
)
def test_a_client_is_not_the_node_that_holds_the_layers(
    layers: dict[NodeId, float], lacking: int
) -> None:
    charter = mesh_of(model(1, 4), members=1, ends=Ends.CLIENT)

    found = shortage(view_of(charter, layers, dict.fromkeys(layers, FIRST_GROUP)))

    assert found == ({FIRST_GROUP: lacking * LAYER} if lacking else {})


@pytest.mark.parametrize(("memory", "lacking"), [(6.25, {}), (6.24, {FIRST_GROUP: LAYER})])
def test_each_layer_takes_its_caches_and_the_largest_is_copied(
    memory: float, lacking: dict[GroupId, int]
) -> None:
    """4 layers with caches of 2 sessions take 120 bytes each, a copy 20, and that is 80 %."""
    plain = model(1, 4, sessions=2)
    charter = replace(plain, shape=replace(plain.shape, kv_bytes_per_token=(2, 1, 1, 1)))

    assert shortage(view_of(charter, {A: memory}, {A: FIRST_GROUP})) == lacking


def test_a_node_holds_no_more_than_the_span_that_its_owner_fixed() -> None:
    charter = mesh_of(model(1, 4), model(2, 2))
    view = view_of(charter, {A: 4, B: 4})
    fixed = replace(view.profiles[A], span=Span(0, 3))

    found = assign(replace(view, profiles={**view.profiles, A: fixed}))

    assert found == {A: group(charter, 2), B: FIRST_GROUP}
