"""Groups that take nodes, and shares of nodes, until they are complete."""

from dataclasses import replace
from random import Random

import pytest

from meshllm.names import FIRST_GROUP, GroupId
from meshllm.protocol.agreement.grouping import assign, group_nodes, ring_of, shortage
from meshllm.protocol.agreement.groups import NodeGroups, groups_of
from meshllm.protocol.membership.records import MAX_RINGS
from tests.builders.model_groups import (
    WHOLE,
    group,
    ids_of,
    mesh_of,
    model,
    ring,
    serve_also,
    settled,
    sharing,
    spans_of,
    speeds_of,
    stages,
    view_of,
)
from tests.builders.offers import A, B, C, D, node
from tests.builders.sharing import LAYER_S, NODES, served_model, shared_mesh


def test_the_largest_nodes_are_taken_first_and_none_in_vain() -> None:
    charter = mesh_of(model(1, 1), model(2, 7))
    layers = {A: 1, B: 1, C: 2, D: 7}
    places = dict.fromkeys(layers, FIRST_GROUP)

    assert assign(view_of(charter, layers, places)) == places | {D: group(charter, 2)}
    more = {node(1): 5, node(2): 3, node(3): 3, A: 1}
    found = assign(view_of(charter, more, dict.fromkeys(more, FIRST_GROUP)))
    assert [at for at in more if found[at] != FIRST_GROUP] == [node(1), node(2)]


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


# Nodes in several rings; a layer takes 100 bytes of memory, the ends 10.


def test_one_node_serves_what_fits() -> None:
    mesh = shared_mesh({0: 1000}, served_model(0, 3), served_model(1, 3), served_model(2, 3))

    mesh.settle()

    first, *others = (group.id for group in groups_of(mesh.charter))
    part = mesh.parts[NODES[0]]
    assert (part.first, set(part.further)) == (first, set(others))
    assert mesh.served() == {first, *others}


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
    without = ring("m1", (NODES[1], 0, 3), epoch=9)
    mesh.plans[other] = mesh.followed[NODES[1], other] = mesh.followed[NODES[0], other] = without
    assert group_nodes(mesh.view()) == {NODES[0]: NodeGroups(first), NODES[1]: NodeGroups(other)}


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


def test_nodes_of_its_own_take_the_place_of_a_share() -> None:
    mesh = sharing()
    replica = ids_of(mesh)[1]

    mesh.join(NODES[2], 650)
    mesh.settle()

    own = NodeGroups(replica)
    assert mesh.parts == {NODES[0]: NodeGroups(FIRST_GROUP), NODES[1]: own, NODES[2]: own}
    assert spans_of(mesh) == {0: WHOLE, 1: [(1, "0:6"), (2, "6:12")]}


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


def test_the_node_that_computes_least_is_shared() -> None:
    for slow, fast in (("a", "b"), ("b", "a")):
        mesh = shared_mesh({0: 950, 1: 950, 2: 950}, served_model(0, 12, 2))
        speeds_of(mesh, **{slow: 10, fast: 9})

        mesh.settle()

        assert spans_of(mesh)[1] == [(2, "0:9"), ("ab".index(fast), "9:12")]
