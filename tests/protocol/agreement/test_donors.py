"""Where a group takes nodes from, and in which order."""

from meshllm.names import FIRST_GROUP
from meshllm.protocol.agreement.grouping import assign, shortage
from meshllm.protocol.agreement.groups import groups_of, used_models
from meshllm.protocol.weights.holders import LACKS
from tests.builders.model_groups import LAYER, awaiting, group, mesh_of, model, ring, using, view_of
from tests.builders.offers import A, B, C


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


def test_a_node_without_weights_that_its_ring_does_not_need_is_free_for_another() -> None:
    charter = mesh_of(model(1, 4), model(2, 4))
    places, followed = {A: FIRST_GROUP, B: FIRST_GROUP}, {A: ring("m1", (A, 0, 4))}
    view = view_of(charter, {A: 4, B: 4}, places, followed)

    found = assign(awaiting(view, B, f"{LACKS}: no plan uses it"))

    assert found == {A: FIRST_GROUP, B: group(charter, 2)}


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
