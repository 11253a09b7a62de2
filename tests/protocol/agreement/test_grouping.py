"""Which node takes part in which ring: filling groups, what they lack, and plans of each."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from meshllm.names import FIRST_GROUP, Digest, GroupId, ModelKey, NodeId, Quant, Span
from meshllm.protocol.agreement import replica_gain
from meshllm.protocol.agreement.agreement import agree
from meshllm.protocol.agreement.candidates import MeshView
from meshllm.protocol.agreement.filling import Filling
from meshllm.protocol.agreement.grouping import (
    agree_on_ring,
    assign,
    group_nodes,
    has_several,
    ring_of,
    shortage,
)
from meshllm.protocol.agreement.groups import (
    REFUSES,
    UNASSIGNED,
    NodeGroups,
    find_group,
    groups_in,
    groups_of,
    holds,
    is_exact,
    plans_in_force,
    used_models,
)
from meshllm.protocol.agreement.throughput import plan_ring
from meshllm.protocol.membership.charter import Charter, Yielding
from meshllm.protocol.membership.records import (
    MAX_RINGS,
    Lifecycle,
    Profile,
    RingMembership,
    StateRecord,
)
from meshllm.protocol.planning.plan import Ends, ModelSizes, Offer, Plan, PlanStage
from meshllm.protocol.planning.problem import least_memory
from meshllm.protocol.session.messages import DType
from meshllm.protocol.weights.holders import FETCHES, LACKS, with_fetched
from tests.bench.turnover import SharedTurnover, SpanTurnover, Turnover
from tests.builders.offers import A, B, C, D, node
from tests.builders.sharing import LAYER_S, NODES, SharedMesh, served_model, shared_mesh
from tests.builders.snapshots import World, profile

MOST_MOVES = 4  # the most in 10,000 changes by `tests.bench.turnover`
LAYER = 80  # bytes; a node with 100 of memory holds one


def model(number: int, layers: int, *, ends: int = 0, **changes: Any) -> Charter:
    sizes = ModelSizes(
        f"m{number}", (LAYER,) * layers, (0,) * layers, ends, 0,
        tied=False, hidden_size=4, itemsize=2, context=10,
    )  # fmt: skip
    return replace(Charter(1, sizes, DType.BFLOAT16, Digest(bytes([number]) * 32)), **changes)


def mesh_of(*models: Charter, **terms: Any) -> Charter:
    first, *others = (replace(each, **terms) for each in models)
    return replace(first, models=tuple(sorted(others, key=lambda each: each.key)))


def group(charter: Charter, number: int, replica: int = 0) -> GroupId:
    """Return the group of the model of this number."""
    found = [
        each.id
        for each in groups_of(charter)
        if (each.charter.shape.name, each.replica) == (f"m{number}", replica)
    ]
    return found[0]


def view_of(
    charter: Charter,
    layers: Mapping[NodeId, float],
    places: Mapping[NodeId, GroupId] | None = None,
    followed: Mapping[NodeId, Plan] | None = None,
    **models: tuple[ModelKey, ...],
) -> MeshView:
    """View a fully linked mesh of nodes that hold some layers of any model."""
    keys = tuple(each.key for each in charter.served)
    profiles = {
        at: Profile("n", "1", (), round(count * 100), models=models.get(_name(at), keys))
        for at, count in layers.items()
    }
    states = {
        at: StateRecord(
            Lifecycle.SERVING,
            tuple((peer, 1000) for peer in layers if peer != at),
            group=(places or {}).get(at, UNASSIGNED),
            followed=(followed or {})[at].encode() if at in (followed or {}) else b"",
        )
        for at in layers
    }
    return MeshView(min(layers), charter, min(layers), profiles, states)


def _name(at: NodeId) -> str:
    return at[:1].decode(errors="replace")


def ring(model: str, *stages: tuple[NodeId, int, int], epoch: int = 1) -> Plan:
    spans = tuple(PlanStage(at, Span(start, stop)) for at, start, stop in stages)
    return Plan(epoch, model, Ends.ENTRY, spans)


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


def test_only_a_mesh_of_several_groups_moves_nodes() -> None:
    one, two = mesh_of(model(1, 4)), mesh_of(model(1, 4), model(2, 4))

    assert not has_several(view_of(one, {A: 4}, {A: FIRST_GROUP}))
    assert has_several(view_of(one, {A: 4}, {A: group(two, 2)}))  # which was stopped
    assert has_several(view_of(two, {A: 4}, {A: FIRST_GROUP}))


def test_each_model_gets_the_nodes_that_it_needs() -> None:
    charter = mesh_of(model(1, 4), model(2, 6))

    places = assign(view_of(charter, {A: 4, B: 3, C: 3}))

    assert places == {A: FIRST_GROUP, B: group(charter, 2), C: group(charter, 2)}


def test_nodes_stay_where_they_are() -> None:
    charter = mesh_of(model(1, 4), model(2, 4))
    places = {A: group(charter, 2), B: FIRST_GROUP}

    assert assign(view_of(charter, {A: 4, B: 4}, places)) == places


def test_groups_that_take_a_node_from_each_other_in_turn_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = shared_mesh({0: 1500}, served_model(0, 1), served_model(1, 1))
    first, other = (group.id for group in groups_of(mesh.charter))
    fills = list[GroupId]()

    def take(self: Filling, number: int, *, strict: bool) -> None:
        if strict and not number:
            self.place[NODES[0]] = other if self.place[NODES[0]] == first else first
            fills.append(self.place[NODES[0]])
            assert len(fills) < 9, "it goes on without end"

    monkeypatch.setattr(Filling, "fill", take)
    grouped = group_nodes(mesh.view())

    assert grouped[NODES[0]].first == fills[-1]


def test_a_new_model_takes_standbys_before_nodes_that_a_ring_uses() -> None:
    charter = mesh_of(model(1, 4), model(2, 4))
    places = dict.fromkeys((A, B, C), FIRST_GROUP)
    used = ring("m1", (A, 0, 4))

    found = assign(view_of(charter, {A: 4, B: 9, C: 4}, places, {A: used, B: used, C: used}))

    assert found == places | {C: group(charter, 2)}  # the smallest that suffices


def test_a_new_model_takes_what_a_ring_uses_and_does_not_need() -> None:
    charter = mesh_of(model(1, 4), model(2, 4))
    places = dict.fromkeys((A, B), FIRST_GROUP)
    used = ring("m1", (A, 0, 2), (B, 2, 4))

    found = assign(view_of(charter, {A: 4, B: 4}, places, {A: used, B: used}))

    assert sorted(found.values()) == sorted([FIRST_GROUP, group(charter, 2)])


def test_a_ring_keeps_what_it_needs() -> None:
    charter = mesh_of(model(1, 4), model(2, 4))
    places = dict.fromkeys((A, B), FIRST_GROUP)

    assert assign(view_of(charter, {A: 2, B: 2}, places)) == places
    assert shortage(view_of(charter, {A: 2, B: 2}, places)) == {group(charter, 2): 4 * LAYER}


def test_a_ring_that_works_is_complete_whatever_the_estimate_says() -> None:
    one = model(1, 4)
    sizes = (LAYER, LAYER, LAYER // 2, LAYER // 2)
    charter = mesh_of(replace(one, shape=replace(one.shape, layer_bytes=sizes)), model(2, 2))
    places = {A: FIRST_GROUP, B: FIRST_GROUP, C: group(charter, 2)}
    used = ring("m1", (A, 0, 2), (B, 2, 4))
    view = view_of(charter, {A: 2, B: 1, C: 2}, places, {A: used, B: used})

    assert assign(view) == places
    assert shortage(view) == {}


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


def retracted(view: MeshView, at: NodeId) -> MeshView:
    """Let a node retract its offer, as its layers cannot be loaded."""
    failing = replace(view.profiles[at], weights=(b"w" * 16,) * 7)
    return replace(view, profiles={**view.profiles, at: failing})


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


def refusing(view: MeshView, one: NodeId, *others: NodeId) -> MeshView:
    """Let a node refuse others as neighbours."""
    return replace(view, states={**view.states, one: replace(view.states[one], faulty=others)})


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


def test_later_models_give_their_nodes_until_they_are_complete() -> None:
    charter = mesh_of(model(1, 4), model(2, 4))
    places = {A: FIRST_GROUP, B: group(charter, 2)}

    found = assign(view_of(charter, {A: 2, B: 2}, places))

    assert found == {A: FIRST_GROUP, B: FIRST_GROUP}


def test_nodes_that_do_not_suffice_stay() -> None:
    charter = mesh_of(model(1, 4), model(2, 4))
    places = {A: FIRST_GROUP, B: group(charter, 2)}

    assert assign(view_of(charter, {A: 2, B: 1}, places)) == places


def test_a_model_is_served_once_before_another_is_served_twice() -> None:
    charter = mesh_of(model(1, 4, replicas=2), model(2, 4))
    places = {A: FIRST_GROUP, B: group(charter, 1, 1)}

    found = assign(view_of(charter, {A: 4, B: 4}, places))

    assert found == {A: FIRST_GROUP, B: group(charter, 2)}
    more = assign(view_of(charter, {A: 4, B: 4, C: 4}, found))
    assert more == {**found, C: group(charter, 1, 1)}


def test_a_replica_that_is_short_does_not_take_from_its_equals() -> None:
    charter = mesh_of(model(1, 4, replicas=3))
    places = {A: FIRST_GROUP, B: group(charter, 1, 1)}

    assert assign(view_of(charter, {A: 4, B: 4}, places)) == places
    assert assign(view_of(charter, {B: 4}, places)) == {B: FIRST_GROUP}


def test_the_first_replica_takes_from_any_later_one_if_the_last_does_not_suffice() -> None:
    charter = mesh_of(model(1, 4, replicas=3))
    second, third = (group(charter, 1, replica) for replica in (1, 2))
    places = {A: second, B: third}

    assert assign(view_of(charter, {A: 4, B: 2}, places)) == {A: FIRST_GROUP, B: third}


def test_the_requested_members_are_found_where_nobody_needs_them() -> None:
    charter = mesh_of(model(1, 4, members=2), model(2, 4))
    all_in_two = dict.fromkeys((A, B, C), group(charter, 2))

    found = assign(view_of(charter, {A: 4, B: 4, C: 4}, all_in_two))

    assert sorted(found.values()) == sorted([FIRST_GROUP, FIRST_GROUP, group(charter, 2)])
    two = {A: FIRST_GROUP, B: group(charter, 2)}
    assert assign(view_of(charter, {A: 4, B: 4}, two)) == two


def test_the_largest_nodes_are_taken_first_and_none_in_vain() -> None:
    charter = mesh_of(model(1, 1), model(2, 7))
    layers = {A: 1, B: 1, C: 2, D: 7}
    places = dict.fromkeys(layers, FIRST_GROUP)

    assert assign(view_of(charter, layers, places)) == places | {D: group(charter, 2)}
    more = {node(1): 5, node(2): 3, node(3): 3, A: 1}
    found = assign(view_of(charter, more, dict.fromkeys(more, FIRST_GROUP)))
    assert [at for at in more if found[at] != FIRST_GROUP] == [node(1), node(2)]


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


def test_what_remains_joins_the_ring_that_is_served_worst() -> None:
    charter = mesh_of(model(1, 4), model(2, 8, replicas=2))
    places = {A: FIRST_GROUP, B: group(charter, 2)}

    found = assign(view_of(charter, {A: 6, B: 8, C: 1}, places))

    assert found[C] == group(charter, 2)


def test_of_two_rings_with_nearly_as_much_room_what_remains_joins_the_one_with_less() -> None:
    charter = mesh_of(model(1, 100), model(2, 100))
    second = group(charter, 2)

    found = assign(view_of(charter, {A: 101, B: 100, C: 1}, {A: FIRST_GROUP, B: second}))

    assert found == {A: FIRST_GROUP, B: second, C: second}


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


def awaiting(view: MeshView, at: NodeId, obstacle: str) -> MeshView:
    return replace(view, states={**view.states, at: replace(view.states[at], obstacle=obstacle)})


def test_a_node_without_weights_that_its_ring_does_not_need_is_free_for_another() -> None:
    charter = mesh_of(model(1, 4), model(2, 4))
    places, followed = {A: FIRST_GROUP, B: FIRST_GROUP}, {A: ring("m1", (A, 0, 4))}
    view = view_of(charter, {A: 4, B: 4}, places, followed)

    found = assign(awaiting(view, B, f"{LACKS}: no plan uses it"))

    assert found == {A: FIRST_GROUP, B: group(charter, 2)}


def test_a_node_that_fetches_weights_keeps_its_place_and_no_other_node_takes_it() -> None:
    charter = mesh_of(model(1, 4), model(2, 4))
    places = {A: FIRST_GROUP, B: group(charter, 2), C: FIRST_GROUP}
    view = view_of(charter, {A: 4, B: 4, C: 4}, places)

    assert assign(awaiting(view, B, FETCHES)) == places


def test_excluded_nodes_hold_nothing() -> None:
    charter = mesh_of(model(1, 4), model(2, 4), exclude=(A,))

    assert assign(view_of(charter, {A: 4, B: 4})) == {A: UNASSIGNED, B: FIRST_GROUP}


def test_exclusions_of_a_member_hold_where_the_groups_are_complete_with_them() -> None:
    free = (Yielding("exclude", C, ()),)
    charter = mesh_of(model(1, 4), model(2, 4), exclude=(A,), yields=free)

    assert assign(view_of(charter, {A: 4, B: 4, C: 4})) == {
        A: UNASSIGNED, B: FIRST_GROUP, C: group(charter, 2),
    }  # fmt: skip


@pytest.mark.parametrize("yields", [(), (Yielding("exclude", NODES[1], ()),)])
def test_exclusions_of_a_member_hold_where_they_leave_a_later_replica_without_nodes(
    yields: tuple[Yielding, ...],
) -> None:
    mesh = settled({0: 1600, 1: 1600}, served_model(1, 12, replicas=2))
    first, replica = ids_of(mesh)
    assert mesh.served() == {first, replica}

    mesh.charter = replace(mesh.charter, exclude=(NODES[0],), yields=yields)
    mesh.settle()

    assert spans_of(mesh) == {0: [(1, "0:12")]}
    assert mesh.parts[NODES[1]] == NodeGroups(first)
    assert shortage(mesh.view()).keys() == {replica}


def test_no_later_replica_is_made_of_nodes_that_a_member_excludes() -> None:
    mesh = settled({0: 1600, 1: 1600}, served_model(1, 12, replicas=2))
    replica = ids_of(mesh)[1]
    (there,) = (node for node, part in mesh.parts.items() if part.first == replica)

    mesh.charter = replace(
        mesh.charter, exclude=(there,), yields=(Yielding("exclude", min(NODES), ()),)
    )
    del mesh.followed[there, replica]  # it has restarted
    mesh.settle()

    assert mesh.served() == {FIRST_GROUP}
    view = ring_of(mesh.view(replica))
    assert view
    assert agree(view).plan is None
    assert agree(replace(view, eases=True)).plan


def test_exclusions_of_a_member_yield_for_the_models_that_need_it_alone() -> None:
    free = (Yielding("exclude", C, ()),)
    charter = mesh_of(model(1, 4), model(2, 9), model(3, 4), exclude=(A,), yields=free)
    first, large, last = (group(charter, number) for number in (1, 2, 3))

    found = assign(view_of(charter, {A: 4, B: 4}))

    assert {found[A], found[B]} == {first, last}
    assert shortage(view_of(charter, {A: 4, B: 4}, found)).keys() == {large}
    assert assign(view_of(charter, {A: 4, B: 4}, found)) == found
    nobody = mesh_of(model(2, 9), exclude=(A,), yields=free)
    assert assign(view_of(nobody, {A: 4, B: 4})) == {A: UNASSIGNED, B: FIRST_GROUP}


def test_a_node_that_no_member_excludes_does_not_move_between_rings_of_excluded_ones() -> None:
    mesh = settled({0: 1600, 1: 1600, 2: 200}, served_model(1, 11), served_model(2, 12))
    served = mesh.served()
    assert len(served) == 2
    exclude, yields = (NODES[0], NODES[1]), (Yielding("exclude", NODES[2], ()),)
    models = [replace(each, exclude=exclude, yields=yields) for each in mesh.charter.models]

    mesh.charter = replace(mesh.charter, exclude=exclude, yields=yields, models=tuple(models))
    mesh.settle()

    assert mesh.served() == served


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


def test_a_member_does_not_leave_a_model_without_nodes() -> None:
    free = (Yielding("exclude", C, ()),)
    charter = mesh_of(model(1, 4), model(2, 4), exclude=(A, B), yields=free)

    found = assign(view_of(charter, {A: 4, B: 4}))

    assert found == {A: FIRST_GROUP, B: group(charter, 2)}
    assert assign(view_of(charter, {A: 4, B: 4}, found)) == found  # moves nobody


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


def test_every_ring_is_agreed_on_by_the_nodes_of_its_group() -> None:
    charter = mesh_of(replace(World({A: profile(4)}).charter, replicas=2, quant=Quant.NONE))
    second = groups_of(charter)[1].id
    world = World(
        dict.fromkeys((A, B, C, D), profile(2)), charter=charter, groups={C: second, D: second}
    )
    first_view = ring_of(world.view(A))
    other_view = ring_of(replace(world.view(C), group=second))
    assert first_view
    assert other_view

    first = agree(first_view)
    assert first.plan
    followed = replace(world, followed={A: first.plan, B: first.plan})
    view = ring_of(replace(followed.view(C), group=second))
    assert view
    other = agree(view)

    assert agree(other_view).plan
    assert other.plan
    assert {stage.node for stage in first.plan.stages} == first.alive == {A, B}
    assert {stage.node for stage in other.plan.stages} == {C, D}
    assert other.plan.epoch > first.plan.epoch
    assert ring_of(replace(world.view(C), group=UNASSIGNED)) is None


def test_a_ring_goes_on_without_a_node_that_has_moved() -> None:
    charter = mesh_of(replace(World({A: profile(4)}).charter, replicas=2))
    second = groups_of(charter)[1].id
    world = World(dict.fromkeys((A, B, C), profile(3)), charter=charter)
    view = ring_of(world.view(A))
    assert view
    both = agree(view).plan
    assert both
    gone = both.stages[-1].node

    moved = replace(world, followed=dict.fromkeys((A, B, C), both), groups={gone: second})
    view = ring_of(moved.view(min({A, B, C} - {gone})))
    assert view
    plan = agree(view).plan

    assert plan
    assert plan.rank(gone) is None
    assert plan.epoch > both.epoch


@pytest.mark.parametrize("seed", range(4))
def test_nodes_that_come_and_go_move_little_and_leave_no_model_unserved(seed: int) -> None:
    report = Turnover(seed).run(60)

    assert report.changes == 60
    assert (report.unserved, report.unstable, report.differing) == (0, 0, 0)
    assert report.most <= MOST_MOVES


@pytest.mark.parametrize("seed", range(2))
def test_nodes_with_shares_that_come_and_go_leave_no_model_unserved(seed: int) -> None:
    report = SharedTurnover(seed).run(25)

    assert (report.changes, report.unserved) == (25, 0)
    assert report.most <= MOST_MOVES
    assert report.shares > 1


@pytest.mark.parametrize("seed", [2, 203])
def test_replicas_that_share_nodes_which_come_and_go_settle(seed: int) -> None:
    turnover = SpanTurnover(seed)

    report = turnover.run(25)

    assert (report.changes, report.unserved) == (25, 0)
    assert report.most <= MOST_MOVES
    assert report.spans > 0


def using(view: MeshView, *numbers: int) -> MeshView:
    """View a mesh in which these models were asked for lately, each at another node."""
    keys = {each.shape.name: each.key for each in view.charter.served}
    asked = dict(zip(view.states, (keys[f"m{number}"] for number in numbers), strict=False))
    states = {
        at: replace(state, used=(asked[at],) if at in asked else ())
        for at, state in view.states.items()
    }
    return replace(view, states=states)


def test_a_model_that_is_asked_for_takes_the_place_of_one_that_nobody_uses() -> None:
    charter = mesh_of(model(1, 4), model(2, 4))
    places = {A: FIRST_GROUP, B: FIRST_GROUP}
    second = group(charter, 2)
    layers = {A: 2, B: 2}

    assert assign(view_of(charter, layers, places)) == places
    for used in ((), (1,), (1, 2)):
        assert assign(using(view_of(charter, layers, places), *used)) == places
    moved = assign(using(view_of(charter, layers, places), 2))

    assert moved == {A: second, B: second}
    for later in ((), (2,), (1, 2)):
        assert assign(using(view_of(charter, layers, moved), *later)) == moved
    assert assign(using(view_of(charter, layers, moved), 1)) == places
    assert used_models(using(view_of(charter, layers), 2, 1)) == {
        each.key for each in charter.served
    }


def test_it_takes_no_more_than_it_needs_and_the_last_ring_first() -> None:
    charter = mesh_of(model(1, 2), model(2, 2), model(3, 4), model(4, 9))
    first, second, third, last = groups_of(charter)
    names = [each.charter.shape.name for each in (first, second, third, last)]
    wanted = int(names[-1][1:])
    layers = {A: 9, B: 9, C: 9}
    places = {A: first.id, B: second.id, C: third.id}

    assert assign(using(view_of(charter, layers, places), wanted)) == places | {C: last.id}


def test_it_takes_nodes_of_several_rings_that_nobody_uses() -> None:
    charter = mesh_of(model(1, 2), model(2, 2), model(3, 4))
    second, third = group(charter, 2), group(charter, 3)
    places = {A: FIRST_GROUP, B: second}

    found = assign(using(view_of(charter, {A: 2, B: 2}, places), 3))

    assert found == {A: third, B: third}
    one_is_used = assign(using(view_of(charter, {A: 2, B: 2}, places), 3, 2))
    assert one_is_used == places


def test_a_further_replica_takes_nothing_from_a_model_that_nobody_uses() -> None:
    charter = mesh_of(model(1, 4), model(2, 4, replicas=2))
    places = {A: FIRST_GROUP, B: group(charter, 2)}

    assert assign(using(view_of(charter, {A: 4, B: 4}, places), 2)) == places


def test_what_a_node_used_counts_while_it_lives() -> None:
    charter = mesh_of(model(1, 4), model(2, 4))
    places = {A: FIRST_GROUP, B: UNASSIGNED}
    view = using(view_of(charter, {A: 4, B: 1}, places), 1, 2)
    gone = {**view.states, B: replace(view.states[B], links=(), lifecycle=Lifecycle.LEFT)}

    assert used_models(replace(view, states=gone)) == {charter.key}


# Nodes in several rings; a layer takes 100 bytes of memory, the ends 10.


def test_one_node_serves_what_fits() -> None:
    mesh = shared_mesh({0: 1000}, served_model(0, 3), served_model(1, 3), served_model(2, 3))

    mesh.settle()

    first, *others = (group.id for group in groups_of(mesh.charter))
    part = mesh.parts[NODES[0]]
    assert (part.first, set(part.further)) == (first, set(others))
    assert mesh.served() == {first, *others}


def test_two_models_use_all_of_three_nodes_when_memory_is_short() -> None:
    mesh = shared_mesh({0: 1000, 1: 1000, 2: 1000}, served_model(0, 20), served_model(1, 6))

    mesh.settle()

    first, other = (group.id for group in groups_of(mesh.charter))
    assert mesh.served() == {first, other}
    assert len(mesh.plans[first].stages) == 3
    assert [len(part.further) for part in mesh.parts.values()].count(1) >= 2


def test_both_rings_recover_when_a_node_is_lost() -> None:
    mesh = shared_mesh({0: 1000, 1: 1000, 2: 1000}, served_model(0, 14), served_model(1, 4))
    mesh.settle()
    first, other = (group.id for group in groups_of(mesh.charter))
    assert mesh.served() == {first, other}

    for gone in sorted(mesh.memory):
        left = replace(mesh, memory=dict(mesh.memory), parts=dict(mesh.parts))
        left.lose(gone)
        left.settle()

        assert left.served() == {first, other}, gone


def ids_of(mesh: SharedMesh) -> list[GroupId]:
    return [each.id for each in groups_of(mesh.charter)]


def settled(memory: Mapping[int, int], *models: Charter) -> SharedMesh:
    mesh = shared_mesh(memory, *models)
    mesh.settle()
    return mesh


def test_a_share_is_what_a_ring_leaves_and_at_most_the_whole_model() -> None:
    mesh = settled({0: 700}, served_model(0, 3), served_model(1, 3))

    first, other = ids_of(mesh)
    assert mesh.parts[NODES[0]] == NodeGroups(first, {other: 310})
    assert settled({0: 600}, served_model(0, 3), served_model(1, 3)).served() == {first}


def test_a_ring_is_agreed_on_where_the_mesh_has_its_group() -> None:
    mesh = settled({0: 700}, served_model(0, 3), served_model(1, 3))

    for group in ids_of(mesh):
        view = mesh.view(group)
        ring = ring_of(view)
        assert ring is not None
        assert agree_on_ring(view) == agree(ring)
    assert agree_on_ring(mesh.view(UNASSIGNED)) is None


@pytest.mark.parametrize(("memory", "is_served"), [(310 + 350, True), (310 + 349, False)])
def test_a_share_has_the_workspace_of_its_model_too(memory: int, is_served: bool) -> None:
    mesh = settled({0: memory}, served_model(0, 3), served_model(1, 3, workspace=40))

    first, other = ids_of(mesh)
    assert mesh.served() == ({first, other} if is_served else {first})
    assert mesh.parts[NODES[0]].further == ({other: 350} if is_served else {})
    if is_served:
        offers = [
            agree(view).offers[0] for each in (first, other) if (view := ring_of(mesh.view(each)))
        ]
        assert [(each.memory_bytes, each.reserve_bytes) for each in offers] == [(310, 0), (350, 40)]


def test_a_node_that_refuses_a_ring_has_no_share_of_it() -> None:
    mesh = settled({0: 700, 1: 680}, served_model(0, 3), served_model(1, 3), served_model(2, 3))
    other = next(group for part in mesh.parts.values() for group in part.further)
    (at,) = (node for node, part in mesh.parts.items() if other in part.further)
    view = mesh.view()
    state = view.states[at]
    refused = replace(state, further=(RingMembership(other, obstacle=REFUSES),))
    profile = replace(view.profiles[at], shares=())
    states, profiles = {**view.states, at: refused}, {**view.profiles, at: profile}
    found = group_nodes(replace(view, states=states, profiles=profiles))

    assert found[at].further == {}
    assert [other in part.further for node, part in found.items() if node != at] == [True]
    assert group_nodes(view)[at].further == mesh.parts[at].further


def test_a_node_takes_part_in_its_first_ring_whatever_obstacle_it_tells() -> None:
    state = StateRecord(
        group=GroupId(b"first"),
        obstacle=REFUSES,
        further=(RingMembership(GroupId(b"a"), obstacle=REFUSES), RingMembership(GroupId(b"b"))),
    )

    assert groups_in(state) == (GroupId(b"first"), GroupId(b"b"))


def test_a_share_begins_once_the_ring_serves() -> None:
    mesh = shared_mesh({0: 700}, served_model(0, 3), served_model(1, 3))
    mesh.parts = {NODES[0]: NodeGroups(FIRST_GROUP)}

    assert group_nodes(mesh.view()) == {NODES[0]: NodeGroups(FIRST_GROUP)}
    plan = ring("m0", (NODES[0], 0, 3))
    mesh.followed[NODES[0], FIRST_GROUP] = plan
    loading = mesh.view()
    states = {at: replace(state, is_loaded=False) for at, state in loading.states.items()}
    assert not group_nodes(replace(loading, states=states))[NODES[0]].further
    assert group_nodes(loading)[NODES[0]].further


def test_shares_of_several_nodes_complete_a_group() -> None:
    mesh = settled({0: 700, 1: 700}, served_model(0, 8), served_model(1, 4))

    first, other = ids_of(mesh)
    assert mesh.served() == {first, other}
    assert [(part.first, *part.further) for part in mesh.parts.values()] == [(first, other)] * 2


def test_no_share_is_taken_in_vain() -> None:
    small = replace(served_model(1, 1), entries=(NODES[1],))
    mesh = settled({0: 900, 1: 900}, served_model(0, 10), small)

    first, other = ids_of(mesh)
    assert mesh.served() == {first, other}
    assert [list(part.further) for part in mesh.parts.values()] == [[], [other]]


@pytest.mark.parametrize(("members", "size", "served"), [(3, 640, 2), (2, 640, 1), (2, 720, 2)])
def test_no_share_is_given_to_a_ring_that_may_have_fewer_nodes(
    members: int, size: int, served: int
) -> None:
    other = served_model(1, 3, members=members)
    mesh = settled(dict.fromkeys(range(3), size), served_model(0, 15), other)

    assert len(mesh.served()) == served
    shares = [group for part in mesh.parts.values() for group in part.further]
    assert len(shares) == (members if served == 2 else 0)
    assert bool(shortage(mesh.view())) is (served == 1)


def test_a_share_that_is_not_published_yet_leaves_those_that_are() -> None:
    mesh = shared_mesh({0: 1200}, served_model(0, 3), served_model(1, 3), served_model(2, 3))
    mesh.settle()
    view, at = mesh.view(), NODES[0]
    part, shares = group_nodes(view)[at], view.profiles[at].shares
    first, others = part.first, sorted(part.further)
    assert len(shares) == 2

    # The later one has all that the first ring leaves; the earlier one is still being measured.
    for left in (sum(each.memory_bytes for each in shares), 890):
        only = replace(view.profiles[at], shares=(replace(shares[1], memory_bytes=left),))
        told = group_nodes(replace(view, profiles={at: only}))[at]

        assert told.first == first
        assert told.further == {others[0]: 890 - left, others[1]: left}


def test_a_share_that_is_not_published_yet_is_what_is_left() -> None:
    mesh = shared_mesh({0: 400}, served_model(0, 3), served_model(1, 3))
    other = ids_of(mesh)[1]
    mesh.parts = {NODES[0]: NodeGroups(FIRST_GROUP, {other: 0})}

    assert group_nodes(mesh.view()) == {NODES[0]: NodeGroups(FIRST_GROUP, {other: 310})}


def test_a_share_that_is_not_published_yet_leaves_layers_of_a_ring_that_others_leave() -> None:
    mesh = shared_mesh({0: 700, 1: 350}, served_model(0, 5), served_model(1, 5))
    first, other = ids_of(mesh)
    both = ring("m0", (NODES[0], 0, 3), (NODES[1], 3, 5), epoch=9)
    mesh.parts = {NODES[0]: NodeGroups(first, {other: 0}), NODES[1]: NodeGroups(first)}
    mesh.followed = {(node, first): both for node in mesh.parts}

    sizes = [group_nodes(mesh.view())[NODES[0]].further]
    mesh.parts[NODES[1]] = NodeGroups(other)  # has moved first: the plan is not in force any more
    mesh.followed.pop((NODES[1], first))
    assert not plans_in_force(mesh.view())
    sizes.append(group_nodes(mesh.view())[NODES[0]].further)

    assert sizes == [{other: 390}] * 2  # the first ring has 310


def test_a_node_has_one_ring_of_each_model() -> None:
    mesh = settled({0: 1000}, served_model(0, 2, replicas=2))

    assert mesh.served() == {FIRST_GROUP}
    assert not mesh.parts[NODES[0]].further


def test_a_node_takes_part_in_so_many_rings_only() -> None:
    models = [served_model(number, 1) for number in range(MAX_RINGS + 2)]

    mesh = settled({0: 5000}, *models)

    assert len(mesh.parts[NODES[0]].further) == MAX_RINGS - 1


def test_a_share_that_a_ring_does_not_use_ends_when_others_suffice() -> None:
    mesh = settled({0: 700}, served_model(0, 3), served_model(1, 3))
    first, other = ids_of(mesh)
    mesh.memory[NODES[1]] = 400
    mesh.parts[NODES[1]] = NodeGroups(other)

    assert group_nodes(mesh.view())[NODES[0]].further  # the ring works with it
    of_other = ring_of(replace(mesh.view(), group=other))
    assert of_other is not None
    assert not of_other.ending
    mesh.plans[other] = mesh.followed[NODES[1], other] = ring("m1", (NODES[1], 0, 3), epoch=9)
    assert group_nodes(mesh.view()) == {NODES[0]: NodeGroups(first), NODES[1]: NodeGroups(other)}


def test_a_share_of_a_model_that_is_stopped_ends() -> None:
    mesh = settled({0: 700}, served_model(0, 3), served_model(1, 3))
    mesh.charter = replace(mesh.charter, models=())

    assert has_several(mesh.view())
    assert group_nodes(mesh.view()) == {NODES[0]: NodeGroups(FIRST_GROUP)}


def test_a_node_whose_first_model_is_stopped_has_its_first_share_as_first_group() -> None:
    mesh = settled({0: 700}, served_model(0, 3), served_model(1, 3))
    other = mesh.charter.models[0]
    parts = mesh.parts[NODES[0]]
    mesh.charter = replace(served_model(2, 1), models=(other,))
    mesh.parts[NODES[0]] = NodeGroups(GroupId(b"\7" * 9), parts.further)

    assert group_nodes(mesh.view())[NODES[0]].first == ids_of(mesh)[1]


def test_a_group_that_lost_a_node_keeps_its_shares_until_another_becomes_complete_by_them() -> None:
    mesh = settled({0: 800, 1: 400}, served_model(0, 4), served_model(1, 6))
    first, other = ids_of(mesh)
    assert mesh.served() == {first, other}
    before = mesh.parts[NODES[0]]
    assert list(before.further) == [other]

    mesh.used = tuple(sorted(each.key for each in mesh.charter.served))
    mesh.lose(NODES[1])
    mesh.settle()
    assert (mesh.served(), mesh.parts[NODES[0]]) == ({first}, before)

    new = serve_also(mesh, served_model(2, 3))
    mesh.settle()
    assert mesh.served() == {first, new}


@pytest.mark.parametrize("is_used", [False, True])
def test_a_node_moves_to_a_model_in_use_if_its_shares_are_of_no_use(is_used: bool) -> None:
    mesh = settled({0: 418, 1: 390}, served_model(0, 5), served_model(1, 2))
    first, other = ids_of(mesh)
    assert mesh.served() == {first, other}
    assert [list(part.further) for part in mesh.parts.values()] == [[other], [other]]

    mesh.used = (mesh.charter.models[0].key,) if is_used else ()
    mesh.lose(NODES[1])
    mesh.settle()

    assert mesh.served() == ({other} if is_used else set())
    assert mesh.parts[NODES[0]].first == (other if is_used else first)


def serve_also(mesh: SharedMesh, charter: Charter) -> GroupId:
    models = sorted((*mesh.charter.models, charter), key=lambda each: each.key)
    mesh.charter = replace(mesh.charter, models=tuple(models))
    return next(each.id for each in groups_of(mesh.charter) if each.charter.key == charter.key)


@pytest.mark.parametrize("turns", range(3))
def test_no_ring_gives_nodes_away_for_the_memory_of_shares_that_do_not_end(turns: int) -> None:
    models = served_model(0, 3, members=3), served_model(1, 4, 3), served_model(2, 3, members=3)
    mesh = shared_mesh({0: 262, 1: 254, 2: 182, 3: 614}, *models, served_model(3, 8))
    wide, small, large = (group(mesh.charter, number) for number in (2, 1, 3))
    places = {NODES[0]: wide, NODES[1]: large, NODES[2]: wide}
    mesh.parts = {at: NodeGroups(place) for at, place in places.items()}
    mesh.parts[NODES[3]] = NodeGroups(large, {small: 304})
    mesh.used = tuple(each.key for each in mesh.charter.served if each.shape.name == "m3")
    mesh.turns = Random(turns)

    mesh.settle()

    assert mesh.served() == {wide, large}


def stages(mesh: SharedMesh, number: int) -> int:
    """Return how many nodes the ring of a model has."""
    return len(mesh.plans[group(mesh.charter, number)].stages)


@pytest.mark.parametrize("turns", [None, *range(3)])
def test_a_group_takes_shares_for_as_many_nodes_as_requested(turns: int | None) -> None:
    wide = served_model(0, 12, members=3)
    mesh = shared_mesh(dict.fromkeys(range(4), 1000), wide, served_model(1, 2, replicas=2))
    mesh.turns = None if turns is None else Random(turns)
    mesh.settle()

    assert mesh.served() == set(ids_of(mesh))
    assert stages(mesh, 0) == 3
    for lost in NODES[:2]:
        mesh.lose(lost)
        mesh.settle()
        assert FIRST_GROUP in mesh.served()  # with fewer, if there are no more


def test_a_share_that_is_only_for_a_requested_node_ends_for_another_model() -> None:
    mesh = settled({0: 1000, 1: 320}, served_model(0, 3, members=2), served_model(1, 3))
    first, other = ids_of(mesh)
    assert (mesh.served(), stages(mesh, 0)) == ({first, other}, 2)
    assert first in mesh.parts[NODES[0]].further

    new = serve_also(mesh, served_model(2, 6))
    mesh.settle()

    assert (mesh.served(), stages(mesh, 0)) == ({first, other, new}, 1)


def test_shares_that_no_ring_uses_end_for_requested_nodes() -> None:
    wide, busy = served_model(2, 8, members=2), served_model(1, 4, workspace=150)
    models = served_model(0, 4), busy, wide, served_model(3, 12)
    mesh = shared_mesh({0: 816, 1: 857, 2: 656}, *models)
    places = dict(zip(NODES, (group(mesh.charter, number) for number in (1, 2, 0)), strict=False))
    waiting = group(mesh.charter, 3)
    shares = {NODES[0]: {waiting: 406}, NODES[2]: {waiting: 246}}  # of a ring that lost a node
    mesh.parts = {at: NodeGroups(place, shares.get(at, {})) for at, place in places.items()}
    mesh.used = tuple(sorted((busy.key, wide.key)))

    mesh.settle()

    assert mesh.served() == set(places.values())
    assert stages(mesh, 2) == 2


@pytest.mark.parametrize("turns", [None, *range(3)])
def test_a_ring_whose_share_ended_counts_as_served_no_more(turns: int | None) -> None:
    wide = served_model(0, 7, members=3, workspace=150), served_model(2, 2, members=3)
    mesh = shared_mesh({0: 647, 1: 594, 2: 494}, *wide, served_model(1, 1, 2, members=3))
    mesh.layer_s = dict.fromkeys(NODES[:2], 3 * LAYER_S)
    mesh.turns = None if turns is None else Random(turns)
    mesh.settle()
    mesh.used = tuple(sorted(each.key for each in wide))

    mesh.lose(NODES[2])
    mesh.settle()  # no node plans more than it offers

    assert {group(mesh.charter, number) for number in (0, 2)} <= mesh.served()


def test_a_node_keeps_a_share_that_ended_while_others_moved() -> None:
    memory = {0: 697, 1: 989, 2: 903, 3: 841, 4: 633}
    long = [served_model(number, 8, workspace=40) for number in (2, 3)]
    mesh = settled(memory, served_model(0, 4, 3), served_model(1, 5, 3, workspace=40), *long)
    replica = group(mesh.charter, 1, 1)
    before = mesh.parts[NODES[0]]
    assert (list(before.further), mesh.parts[NODES[3]].first) == ([replica], group(mesh.charter, 3))

    mesh.used = tuple(sorted(each.key for each in mesh.charter.served if each.shape.layers == 8))
    mesh.lose(NODES[3])
    mesh.settle()

    assert mesh.parts[NODES[2]].first == group(mesh.charter, 3)
    assert mesh.parts[NODES[0]] == before


def test_a_share_of_a_replica_ends_for_a_model_that_nobody_serves() -> None:
    mesh = settled({0: 410, 1: 720}, served_model(0, 4, replicas=2), served_model(1, 3))
    first, other, replica = ids_of(mesh)
    assert mesh.served() == {first, other, replica}

    new = serve_also(mesh, served_model(2, 3))
    mesh.settle()

    assert mesh.served() == {first, other, new}


def test_a_share_of_a_model_that_nobody_uses_ends_for_one_that_is_used() -> None:
    mesh = settled({0: 700}, served_model(0, 3), served_model(1, 3))
    first, other = ids_of(mesh)
    new = serve_also(mesh, served_model(2, 3))

    def used(*groups: GroupId) -> set[GroupId]:
        keys = {each.id: each.charter.key for each in groups_of(mesh.charter)}
        mesh.used = tuple(sorted(keys[each] for each in groups))
        mesh.settle()
        return mesh.served()

    assert used() == used(first, other) == {first, other}
    assert used(first, new) == {first, new}
    assert used(other, new) == {other, new}
    assert used(first, other, new) == {other, new}


def test_as_many_shares_end_as_are_in_the_way() -> None:
    mesh = settled({0: 1000}, served_model(0, 3), served_model(1, 3), served_model(2, 3))
    assert len(mesh.served()) == 3
    large = served_model(3, 6)
    new = serve_also(mesh, large)
    mesh.used = tuple(sorted((mesh.charter.key, large.key)))

    mesh.settle()

    assert mesh.served() == {FIRST_GROUP, new}


# Replicas that share nodes. A node with 2000 holds 16 layers, one with 650 holds 6.


def spans_of(mesh: SharedMesh) -> dict[int, list[tuple[int, str]]]:
    """Return the nodes of each replica of the first model that is served, and their layers."""
    numbers = {node: number for number, node in enumerate(NODES)}
    served = mesh.served()
    return {
        each.replica: [(numbers[at.node], str(at.span)) for at in mesh.plans[each.id].stages]
        for each in groups_of(mesh.charter)
        if each.id in served and each.charter.key == mesh.charter.key
    }


def speeds_of(mesh: SharedMesh, **layer_ms: float) -> SharedMesh:
    mesh.layer_s = {NODES["abcde".index(name)]: ms / 1e3 for name, ms in layer_ms.items()}
    return mesh


WHOLE = [(0, "0:12")]


@pytest.mark.parametrize(
    ("memory", "layer_ms", "found"),
    [
        ({0: 2000, 1: 650}, {}, {0: WHOLE, 1: [(1, "0:6"), (0, "6:12")]}),
        ({0: 1600, 1: 650}, {}, {0: WHOLE}),  # 390 are left: three layers
        ({0: 2000, 1: 350}, {}, {0: WHOLE}),  # 9 layers more on the first cost more than they give
        ({0: 2300, 1: 650}, {"b": 80}, {0: WHOLE}),  # so does a node that is too slow
        ({0: 2300, 1: 650}, {"b": 30}, {0: WHOLE, 1: [(1, "0:6"), (0, "6:12")]}),
        (  # all layers are on two nodes each, but for the last three of the second replica
            {0: 950, 1: 650, 2: 950},
            {},
            {0: [(0, "0:6"), (1, "6:12")], 1: [(2, "0:9"), (0, "9:12")]},
        ),
        ({0: 650, 1: 650, 2: 650}, {}, {0: [(0, "0:6"), (1, "6:12")]}),  # nobody has memory left
        ({0: 2000, 1: 650, 2: 650}, {}, {0: WHOLE, 1: [(1, "0:6"), (2, "6:12")]}),  # none is needed
        ({0: 4000}, {}, {0: WHOLE}),  # a ring of the same node adds nothing
    ],
)
def test_a_replica_shares_nodes_where_that_gives_more(
    memory: dict[int, int], layer_ms: dict[str, float], found: dict[int, list[tuple[int, str]]]
) -> None:
    mesh = speeds_of(shared_mesh(memory, served_model(0, 12, 2)), **layer_ms)

    mesh.settle()

    assert spans_of(mesh) == found
    holders = [node for stages in found.values() for node, _ in stages]
    shares = [each for part in mesh.parts.values() for each in part.further]
    assert len(shares) == len(holders) - len(set(holders))


def sharing() -> SharedMesh:
    """A mesh of a node that serves the model alone, and half of it in another ring."""
    mesh = settled({0: 2000, 1: 650}, served_model(0, 12, 2))
    assert spans_of(mesh) == {0: WHOLE, 1: [(1, "0:6"), (0, "6:12")]}
    return mesh


def test_a_share_of_a_replica_has_the_memory_of_its_layers_and_caches() -> None:
    plain = served_model(0, 12, 2, workspace=40)
    shape = replace(plain.shape, kv_bytes_per_token=(4,) * 12)
    mesh = settled({0: 2300, 1: 650}, replace(plain, shape=shape))
    replica = ids_of(mesh)[1]

    assert spans_of(mesh) == {0: WHOLE, 1: [(1, "0:6"), (0, "6:12")]}
    needed = least_memory(shape, Span(6, 12), is_entry=False, sessions=1, reserve=40)
    assert mesh.parts[NODES[0]].further == {replica: needed}


def test_a_better_plan_of_the_first_model_replaces_another() -> None:
    mesh = speeds_of(settled({0: 1600}, served_model(0, 12)), a=30)

    mesh.join(NODES[1], 1600)
    mesh.settle()

    assert spans_of(mesh) == {0: [(1, "0:12")]}  # its nodes have the weights


def test_a_share_of_a_replica_ends_when_its_own_node_is_lost() -> None:
    mesh = sharing()

    mesh.lose(NODES[1])
    mesh.settle()

    assert mesh.parts == {NODES[0]: NodeGroups(FIRST_GROUP)}
    assert spans_of(mesh) == {0: WHOLE}


def test_nodes_of_its_own_take_the_place_of_a_share() -> None:
    mesh = sharing()
    replica = ids_of(mesh)[1]

    mesh.join(NODES[2], 650)
    mesh.settle()

    own = NodeGroups(replica)
    assert mesh.parts == {NODES[0]: NodeGroups(FIRST_GROUP), NODES[1]: own, NODES[2]: own}
    assert spans_of(mesh) == {0: WHOLE, 1: [(1, "0:6"), (2, "6:12")]}


def test_a_share_in_use_serves_until_the_nodes_in_its_place_have_their_weights() -> None:
    mesh = sharing()
    replica = ids_of(mesh)[1]
    before, shared = dict(mesh.parts), spans_of(mesh)
    mesh.bare = {NODES[2]}

    mesh.join(NODES[2], 650)
    mesh.settle()

    assert mesh.parts == {**before, NODES[2]: NodeGroups(replica)}
    assert spans_of(mesh) == shared
    view = ring_of(mesh.view(replica))
    assert view
    fetched = agree(replace(view, states=with_fetched(view.states)))
    assert fetched.plan == mesh.plans[replica]
    assert "waits for weights" in fetched.reason
    assert fetched.best
    assert fetched.best.plan
    assert NODES[2] in [at.node for at in fetched.best.plan.stages]  # and so it fetches them
    mesh.bare = set()
    mesh.settle()
    assert mesh.parts[NODES[0]] == NodeGroups(FIRST_GROUP)
    assert spans_of(mesh) == {0: WHOLE, 1: [(1, "0:6"), (2, "6:12")]}


def test_a_share_whose_ring_is_broken_ends_when_it_is_not_needed() -> None:
    mesh = sharing()
    first, replica = ids_of(mesh)
    mesh.memory[NODES[1]] = 2000
    gone = ring("m0", (NODES[1], 0, 3), (NODES[2], 3, 6), (NODES[0], 6, 12), epoch=9)
    mesh.followed[NODES[1], replica] = mesh.followed[NODES[0], replica] = gone

    assert group_nodes(mesh.view()) == {NODES[0]: NodeGroups(first), NODES[1]: NodeGroups(replica)}


def test_of_two_shares_that_each_suffice_the_one_in_use_stays() -> None:
    for used in (0, 1):
        mesh = shared_mesh(dict.fromkeys(range(3), 950), served_model(0, 12, 2))
        speeds_of(mesh, **{"ab"[used]: 9.0, "ab"[1 - used]: 10.0})
        mesh.settle()
        first, replica = ids_of(mesh)
        kept = dict(mesh.parts)
        size = kept[NODES[used]].further[replica]

        mesh.parts[NODES[1 - used]] = NodeGroups(first, {replica: size})

        assert group_nodes(mesh.view()) == kept


def test_a_node_that_helps_little_leaves_a_share_as_it_is() -> None:
    mesh = sharing()
    before = dict(mesh.parts)

    mesh.join(NODES[2], 200)
    mesh.settle()

    assert {node: mesh.parts[node] for node in before} == before


def test_a_share_that_a_replica_does_not_use_ends() -> None:
    mesh = sharing()
    first, replica = ids_of(mesh)
    mesh.memory[NODES[1]] = 2000
    mesh.followed[NODES[1], replica] = mesh.followed[NODES[0], replica] = ring(
        "m0", (NODES[1], 0, 12), epoch=9
    )

    assert group_nodes(mesh.view()) == {NODES[0]: NodeGroups(first), NODES[1]: NodeGroups(replica)}


def test_the_first_replica_takes_back_a_node_that_shares_its_memory() -> None:
    mesh = settled({0: 2000, 1: 650}, served_model(0, 12, 3))
    first, second, third = ids_of(mesh)
    mesh.parts = {NODES[0]: NodeGroups(second, {third: 600}), NODES[1]: NodeGroups(third)}
    whole, half = (ring("m0", (NODES[0], 0, 12)), ring("m0", (NODES[1], 0, 6), (NODES[0], 6, 12)))
    mesh.followed = {
        (NODES[0], second): whole, (NODES[0], third): half, (NODES[1], third): half
    }  # fmt: skip

    assert group_nodes(mesh.view())[NODES[0]].first == first
    mesh.settle()
    assert spans_of(mesh) == {0: WHOLE, 1: [(1, "0:6"), (0, "6:12")]}


def test_a_share_that_is_not_published_yet_is_found_again() -> None:
    mesh = shared_mesh({0: 2000, 1: 650}, served_model(0, 12, 2))
    first, replica = ids_of(mesh)
    mesh.settle()
    wanted = {NODES[0]: NodeGroups(first, {replica: 600}), NODES[1]: NodeGroups(replica)}
    assert mesh.parts == wanted

    mesh.hidden = {(NODES[0], replica)}
    assert group_nodes(mesh.view()) == wanted
    mesh.parts[NODES[1]] = NodeGroups(first)  # which has not moved yet
    mesh.followed[NODES[1], first] = mesh.followed[NODES[0], first]
    assert group_nodes(mesh.view()) == wanted
    mesh.hidden.clear()
    assert group_nodes(mesh.view()) == wanted


def test_a_node_is_the_entry_of_one_ring_of_a_model() -> None:
    mesh = sharing()
    first, replica = ids_of(mesh)
    views = {each: ring_of(mesh.view(each)) for each in (first, replica)}

    assert [view.charter.entries for view in views.values() if view] == [(), (NODES[1],)]
    mesh.charter = replace(mesh.charter, entries=(NODES[0],))
    view = ring_of(mesh.view(replica))
    assert view
    assert NODES[0] not in view.charter.entries
    assert agree(view).plan is None
    assert NODES[1] not in view.charter.entries


@pytest.mark.parametrize(
    "terms", [{"entries": (NODES[0],)}, {"ends": Ends.CLIENT}, {"exclude": (NODES[2],)}]
)
def test_no_node_is_shared_where_the_terms_forbid_its_ring(terms: dict[str, Any]) -> None:
    mesh = shared_mesh({0: 3000, 1: 3000, 2: 650}, replace(served_model(0, 12, 3), **terms))

    mesh.settle()

    assert 0 in spans_of(mesh)
    assert not any(part.further for part in mesh.parts.values())


@pytest.mark.parametrize("unmeasured", [160, 560])
def test_nodes_that_have_measured_no_layers_change_no_replica(unmeasured: int) -> None:
    for memory, ms, count in (({0: 2000, 1: 550}, 10, 2), ({0: 2000, 1: 650}, 5, 1)):
        mesh = speeds_of(shared_mesh(memory, served_model(0, 12, 2)), b=ms)
        mesh.settle()
        found = spans_of(mesh)
        assert len(found) == count

        mesh = speeds_of(shared_mesh({**memory, 2: unmeasured}, served_model(0, 12, 2)), b=ms)
        mesh.unmeasured = {NODES[2]}
        mesh.settle()

        assert spans_of(mesh) == found


def test_a_share_that_is_not_published_waits_until_the_own_node_has_measured_layers() -> None:
    mesh = sharing()
    replica = ids_of(mesh)[1]
    before, mesh.unmeasured = dict(mesh.parts), {NODES[1]}
    assert group_nodes(mesh.view()) == before  # decided once

    mesh.hidden = {(NODES[0], replica)}
    assert group_nodes(mesh.view())[NODES[0]] == NodeGroups(FIRST_GROUP)
    mesh.unmeasured = set()
    assert group_nodes(mesh.view()) == before


def test_a_longer_ring_counts_only_if_measured_nodes_can_make_it() -> None:
    mesh = shared_mesh({0: 900, 1: 830, 2: 650, 3: 350}, served_model(0, 12, 2))
    speeds_of(mesh, d=100)
    first, replica = ids_of(mesh)
    plan = ring("m0", (NODES[0], 0, 8), (NODES[1], 8, 10), (NODES[3], 10, 12))
    mesh.parts = {at: NodeGroups(first) for at in mesh.memory}
    mesh.followed = {(at, first): plan for at in mesh.memory}
    mesh.unmeasured = {NODES[0]}

    found = group_nodes(mesh.view())

    assert found[NODES[2]] == NodeGroups(replica)
    assert list(found[NODES[1]].further) == [replica]
    assert not found[NODES[0]].further


@pytest.mark.parametrize(("policy", "is_shared"), [("auto", True), ("throughput", False)])
def test_a_replica_must_give_more_than_the_longer_ring_that_the_policy_makes(
    policy: str, *, is_shared: bool
) -> None:
    """Two rings take 90 ms of each slowest node; one of 3 nodes 40 ms, 15 % more is 34.8 ms."""
    charter = replace(served_model(0, 12, 2), policy=policy)
    mesh = shared_mesh({0: 950, 1: 650, 2: 950}, charter)
    first, replica = ids_of(mesh)
    plan = ring("m0", (NODES[0], 0, 6), (NODES[1], 6, 12))
    mesh.parts = {at: NodeGroups(first) for at in mesh.memory}
    mesh.followed = {(at, first): plan for at in mesh.memory}

    found = group_nodes(mesh.view())

    assert found[NODES[2]].first == (replica if is_shared else first)
    assert found[NODES[0]].further == ({replica: 300} if is_shared else {})


def crowd(monkeypatch: pytest.MonkeyPatch, layer_s: float) -> list[int]:
    """Return how many nodes were planned with, where two serve and 30 more hold a layer each."""
    nodes = [NodeId(bytes([number + 1]) * 32) for number in range(32)]
    mesh = SharedMesh(served_model(0, 40, 2), dict.fromkeys(nodes, 150))
    mesh.memory |= dict.fromkeys(nodes[:2], 4500)
    mesh.layer_s = dict.fromkeys(nodes[2:], layer_s)
    plan = ring("m0", (nodes[0], 0, 20), (nodes[1], 20, 40))
    for at in nodes:
        mesh.parts[at], mesh.followed[at, FIRST_GROUP] = NodeGroups(FIRST_GROUP), plan
    planned = list[int]()

    def count(charter: Charter, offers: Sequence[Offer], *others: Any) -> Plan | None:
        planned.append(len(offers))
        return plan_ring(charter, offers, *others)

    monkeypatch.setattr(replica_gain, "plan_ring", count)
    group_nodes(mesh.view())
    return planned


def test_no_ring_is_planned_with_nodes_that_are_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert crowd(monkeypatch, 5.0) == []


def test_few_rings_are_planned_with_many_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = crowd(monkeypatch, 0.05)

    assert planned
    assert len(planned) <= 2 * (30).bit_length()


def test_a_model_that_nobody_uses_slows_no_model_in_use() -> None:
    mesh = shared_mesh({0: 4200, 1: 650}, served_model(0, 12, 2), served_model(1, 12))
    other = mesh.charter.models[0].key
    mesh.used = (other,)

    mesh.settle()

    assert len(mesh.served()) == 2
    assert spans_of(mesh).keys() == {0}
    mesh.used = tuple(sorted((mesh.charter.key, other)))
    mesh.settle()
    assert spans_of(mesh).keys() == {0, 1}
    mesh.used = (other,)
    mesh.settle()
    assert spans_of(mesh).keys() == {0, 1}  # decided once


def test_the_node_that_computes_least_is_shared() -> None:
    for slow, fast in (("a", "b"), ("b", "a")):
        mesh = shared_mesh({0: 950, 1: 950, 2: 950}, served_model(0, 12, 2))
        speeds_of(mesh, **{slow: 10, fast: 9})

        mesh.settle()

        assert spans_of(mesh)[1] == [(2, "0:9"), ("ab".index(fast), "9:12")]


def test_a_node_holds_no_more_than_the_span_that_its_owner_fixed() -> None:
    charter = mesh_of(model(1, 4), model(2, 2))
    view = view_of(charter, {A: 4, B: 4})
    fixed = replace(view.profiles[A], span=Span(0, 3))

    found = assign(replace(view, profiles={**view.profiles, A: fixed}))

    assert found == {A: group(charter, 2), B: FIRST_GROUP}
