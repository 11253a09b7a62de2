"""Which node takes part in which ring: filling groups, what they lack, and plans of each."""

from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from meshllm.names import FIRST_GROUP, GroupId, Quant, Span
from meshllm.protocol.agreement.agreement import agree
from meshllm.protocol.agreement.filling import GroupAssigner
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
    groups_of,
    plans_in_force,
)
from meshllm.protocol.membership.charter import OverridableTerm
from meshllm.protocol.membership.records import RingMembership
from meshllm.protocol.planning.plan import Ends
from meshllm.protocol.planning.problem import least_memory
from meshllm.protocol.weights.holders import FETCHES, with_fetched
from tests.bench.turnover import SharedTurnover, SpanTurnover, Turnover
from tests.builders.model_groups import (
    WHOLE,
    awaiting,
    group,
    ids_of,
    mesh_of,
    model,
    ring,
    settled,
    sharing,
    spans_of,
    speeds_of,
    view_of,
)
from tests.builders.offers import A, B, C, D
from tests.builders.sharing import NODES, served_model, shared_mesh
from tests.builders.snapshots import World, profile


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

    def take(self: GroupAssigner, number: int, *, strict: bool) -> None:
        if strict and not number:
            self.place[NODES[0]] = other if self.place[NODES[0]] == first else first
            fills.append(self.place[NODES[0]])
            assert len(fills) < 9, "it goes on without end"

    monkeypatch.setattr(GroupAssigner, "fill", take)
    grouped = group_nodes(mesh.view())

    assert grouped[NODES[0]].first == fills[-1]


def test_a_node_that_fetches_weights_keeps_its_place_and_no_other_node_takes_it() -> None:
    charter = mesh_of(model(1, 4), model(2, 4))
    places = {A: FIRST_GROUP, B: group(charter, 2), C: FIRST_GROUP}
    view = view_of(charter, {A: 4, B: 4, C: 4}, places)

    assert assign(awaiting(view, B, FETCHES)) == places


def test_exclusions_of_a_member_hold_where_the_groups_are_complete_with_them() -> None:
    free = (OverridableTerm("exclude", C, ()),)
    charter = mesh_of(model(1, 4), model(2, 4), exclude=(A,), yields=free)

    assert assign(view_of(charter, {A: 4, B: 4, C: 4})) == {
        A: UNASSIGNED, B: FIRST_GROUP, C: group(charter, 2),
    }  # fmt: skip


@pytest.mark.parametrize("yields", [(), (OverridableTerm("exclude", NODES[1], ()),)])
def test_exclusions_of_a_member_hold_where_they_leave_a_later_replica_without_nodes(
    yields: tuple[OverridableTerm, ...],
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
        mesh.charter, exclude=(there,), yields=(OverridableTerm("exclude", min(NODES), ()),)
    )
    del mesh.followed[there, replica]  # it has restarted
    mesh.settle()

    assert mesh.served() == {FIRST_GROUP}
    view = ring_of(mesh.view(replica))
    assert view
    assert agree(view).plan is None
    assert agree(replace(view, eases=True)).plan


def test_exclusions_of_a_member_yield_for_the_models_that_need_it_alone() -> None:
    free = (OverridableTerm("exclude", C, ()),)
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
    exclude, yields = (NODES[0], NODES[1]), (OverridableTerm("exclude", NODES[2], ()),)
    models = [replace(each, exclude=exclude, yields=yields) for each in mesh.charter.models]

    mesh.charter = replace(mesh.charter, exclude=exclude, yields=yields, models=tuple(models))
    mesh.settle()

    assert mesh.served() == served


def test_a_member_does_not_leave_a_model_without_nodes() -> None:
    free = (OverridableTerm("exclude", C, ()),)
    charter = mesh_of(model(1, 4), model(2, 4), exclude=(A, B), yields=free)

    found = assign(view_of(charter, {A: 4, B: 4}))

    assert found == {A: FIRST_GROUP, B: group(charter, 2)}
    assert assign(view_of(charter, {A: 4, B: 4}, found)) == found  # moves nobody


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


@pytest.mark.no_cover
@pytest.mark.parametrize(("seed", "nodes"), [(2, 50), (19, 50), (0, 6), (1, 6), (2, 6), (3, 2)])
def test_nodes_that_come_and_go_move_little_and_leave_no_model_unserved(
    seed: int, nodes: int
) -> None:
    report = Turnover(seed, nodes).run(40)

    assert len(report.joins) + len(report.leaves) == report.changes == 40
    assert report.broken() == []
    assert report.layers > 0  # somebody had to move
    assert abs(fmean(report.nodes) - nodes) < 5


@pytest.mark.no_cover
@pytest.mark.parametrize("seed", range(2))
def test_nodes_with_shares_that_come_and_go_leave_no_model_unserved(seed: int) -> None:
    report = SharedTurnover(seed).run(25)

    assert (report.changes, report.unserved) == (25, 0)
    assert report.broken() == []
    assert report.shares > 1


@pytest.mark.parametrize(
    "seed",
    [
        2,  # the only test in which nodes that no ring uses complete a replica, as coverage shows
        pytest.param(203, marks=pytest.mark.no_cover),
    ],
)
def test_replicas_that_share_nodes_which_come_and_go_settle(seed: int) -> None:
    turnover = SpanTurnover(seed)

    report = turnover.run(25)

    assert (report.changes, report.unserved) == (25, 0)
    assert report.broken() == []
    assert report.spans > 0


# Nodes in several rings; a layer takes 100 bytes of memory, the ends 10.


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


def test_a_share_is_what_a_ring_leaves_and_at_most_the_whole_model() -> None:
    mesh = settled({0: 700}, served_model(0, 3), served_model(1, 3))

    first, other = ids_of(mesh)
    assert mesh.parts[NODES[0]] == NodeGroups(first, {other: 310})
    assert settled({0: 600}, served_model(0, 3), served_model(1, 3)).served() == {first}


def test_a_ring_is_agreed_on_where_the_mesh_has_its_group() -> None:
    mesh = settled({0: 700}, served_model(0, 3), served_model(1, 3))

    for each in ids_of(mesh):
        view = mesh.view(each)
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


# Replicas that share nodes. A node with 2000 holds 16 layers, one with 650 holds 6.


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


def test_a_share_that_is_not_published_waits_until_the_own_node_has_measured_layers() -> None:
    mesh = sharing()
    replica = ids_of(mesh)[1]
    before, mesh.unmeasured = dict(mesh.parts), {NODES[1]}
    assert group_nodes(mesh.view()) == before  # decided once

    mesh.hidden = {(NODES[0], replica)}
    assert group_nodes(mesh.view())[NODES[0]] == NodeGroups(FIRST_GROUP)
    mesh.unmeasured = set()
    assert group_nodes(mesh.view()) == before
