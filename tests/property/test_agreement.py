"""Agreement: equal records give equal plans, in any order of events."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import PeerFault
from meshllm.names import NodeId, Span
from meshllm.protocol.agreement.advice import advise
from meshllm.protocol.agreement.agreement import Agreement, agree
from meshllm.protocol.agreement.candidates import MeshView
from meshllm.protocol.membership.records import Profile
from meshllm.protocol.planning.plan import MAX_EPOCH, Ends, Plan, PlanStage
from meshllm.protocol.planning.policies import POLICIES
from tests.builders.offers import A, B, C, D
from tests.builders.snapshots import World, charter, profile, weights
from tests.property import strategies

pytestmark = pytest.mark.property
_ = strategies.nodes  # their module loads the profile of hypothesis
LAYERS = 4
NODES = [A, B, C, D]
some = st.frozensets(st.sampled_from(NODES), max_size=2)
pairs = st.sampled_from([frozenset(pair) for pair in combinations(NODES, 2)])


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Profiles of various memory and speed, few with other weights or a fixed span."""
    span = draw(st.sampled_from([None, None, None, Span(0, 2), Span(2, 4), Span(1, 3), Span(2, 6)]))
    found = profile(draw(st.integers(0, 5)), ms=draw(st.integers(1, 4)), span=span)
    same = weights()
    others = weights(changed={1: b"x" * 16}), weights(changed={2: bytes(16)}), ()
    return replace(found, weights=draw(st.sampled_from([same, same, same, *others])))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Up to four nodes, some of which are not linked."""
    agreed = replace(
        charter(LAYERS),
        policy=draw(st.sampled_from(sorted(POLICIES))),
        members=draw(st.sampled_from([None, None, 1, 2, 3])),
        ends=draw(st.sampled_from([Ends.ENTRY, Ends.ENTRY, Ends.ENTRY, Ends.CLIENT])),
        exclude=tuple(sorted(draw(st.frozensets(st.sampled_from(NODES), max_size=1)))),
        prefer=tuple(sorted(draw(some))),
        entries=tuple(sorted(draw(st.sampled_from([frozenset[NodeId](), frozenset(NODES[:2])])))),
    )
    return World(
        draw(st.dictionaries(st.sampled_from(NODES), profiles(), min_size=1)),
        agreed,
        draw(st.dictionaries(pairs, st.sampled_from([0.0, 0.3, 8.0]))),
        draw(st.frozensets(pairs, max_size=3)),
        busy=draw(some),
    )


Change = tuple[str, Any]
changes: st.SearchStrategy[Change] = st.one_of(
    st.tuples(st.just("busy"), some),
    st.tuples(st.just("gone"), some),
    st.tuples(st.just("cut"), st.frozensets(pairs, max_size=4)),
    st.tuples(st.just("restart"), st.tuples(st.sampled_from(NODES), profiles())),
    st.tuples(st.just("policy"), st.sampled_from(sorted(POLICIES))),
    st.tuples(st.just("exclude"), some),
)


def change(world: World, event: Change) -> World:
    """Apply one event."""
    match event:
        case "restart", (node, found):
            followed = {at: plan for at, plan in world.followed.items() if at != node}
            return replace(world, profiles={**world.profiles, node: found}, followed=followed)
        case "policy", policy:
            return replace(world, charter=replace(world.charter, policy=policy))
        case "exclude", nodes:
            return replace(world, charter=replace(world.charter, exclude=tuple(sorted(nodes))))
        case field, value:
            return replace(world, **{field: value})
    raise AssertionError(event)


def everyone(world: World) -> dict[NodeId, Agreement]:
    """Return the agreement of every living node."""
    return {node: world.agree(node) for node in world.profiles if node not in world.gone}


@given(worlds(), st.data())
def test_nodes_with_equal_records_agree_in_any_order(world: World, data: st.DataObject) -> None:
    agreements = everyone(world)

    for agreement in agreements.values():
        for other in agreement.alive:
            assert agreements[other] == agreement
    me = data.draw(st.sampled_from(sorted(world.profiles)))
    view = world.view(me)
    order = data.draw(st.permutations(sorted(world.profiles)))
    shuffled = MeshView(
        me,
        view.charter,
        view.author,
        {node: view.profiles[node] for node in order},
        {node: view.states[node] for node in order},
    )
    assert agree(shuffled) == agree(view)


@given(worlds())
def test_a_ring_tiles_the_layers_over_linked_nodes_that_hold_them(world: World) -> None:
    agreement = world.agree(min(world.profiles))
    if agreement.plan is None:
        assert agreement.reason
        return

    stages = agreement.plan.stages
    assert agreement.plan.layers == LAYERS
    for rank, (at, after) in enumerate(zip(stages, (*stages[1:], stages[0]), strict=True)):
        assert at.node in agreement.alive - set(agreement.refused)
        assert frozenset({at.node, after.node}) not in world.cut
        assert len(at.span) * 100 <= world.profiles[at.node].memory_bytes
        wanted = world.profiles[at.node].span
        assert wanted in {None, at.span}
        assert at.span or (rank == 0 and agreement.plan.ends is Ends.CLIENT)
    assert len(stages) <= (world.charter.members or LAYERS) + (agreement.plan.ends is Ends.CLIENT)


@given(worlds())
def test_every_living_node_is_named_once(world: World) -> None:
    agreement = world.agree(min(world.profiles))
    if agreement.plan is None:
        return

    stages = [stage.node for stage in agreement.plan.stages]
    standbys = [standby.node for standby in agreement.standbys]
    assert sorted([*stages, *standbys, *agreement.refused]) == sorted(agreement.alive)


@given(worlds(), st.lists(changes, max_size=6))
def test_no_plan_flaps_and_no_epoch_goes_back(world: World, events: list[Change]) -> None:
    for event in [("busy", world.busy), *events]:
        world = change(world, event)
        before = world
        newest = max((plan.epoch for plan in world.followed.values()), default=0)
        for agreement in everyone(before).values():
            plans = [before.followed[at] for at in agreement.alive if at in before.followed]
            highest = max(plans, key=lambda plan: (plan.epoch, plan.digest), default=None)
            assert agreement.plan in {None, highest} or agreement.plan.epoch == newest + 1
            world = world.follow(agreement)
        for node, agreement in everyone(world).items():
            if agreement.plan:
                assert world.agree(node).plan == world.followed[node] == agreement.plan


@given(worlds(), st.lists(changes, max_size=4), st.data())
def test_nodes_that_follow_one_by_one_converge(
    world: World, events: list[Change], data: st.DataObject
) -> None:
    for event in events:
        world = change(world, event)
        for _ in range(2):  # twice, for nodes that agreed before another changed its plan
            for node in data.draw(st.permutations(sorted(set(world.profiles) - set(world.gone)))):
                if (plan := world.agree(node).plan) is not None:
                    world = replace(world, followed={**world.followed, node: plan})

        for agreement in everyone(world).values():
            plans = {world.followed.get(at) for at in agreement.alive}
            assert agreement.plan is None or plans == {agreement.plan}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan that can be decoded, as a member may claim to follow it."""
    nodes = draw(st.permutations([*NODES, NodeId(b"x" * 32)]))
    cuts = sorted(
        draw(st.frozensets(st.integers(1, LAYERS - 1)))
        | {draw(st.sampled_from([LAYERS, LAYERS, 9]))}
    )
    tiles = [Span(*ends) for ends in zip([0, *cuts], cuts, strict=False)]
    ends = draw(st.sampled_from(Ends))
    stages = [Span(0, 0)] * (ends is Ends.CLIENT) + tiles
    return Plan(
        draw(st.sampled_from([1, 7, MAX_EPOCH - 1, MAX_EPOCH])),
        draw(st.sampled_from(["tiny", "tiny", "tiny", "other"])),
        ends,
        tuple(map(PlanStage, nodes[: len(stages)], stages)),
    )


@given(plans(), st.sampled_from(Ends), st.sampled_from(sorted(POLICIES)), some)
def test_no_plan_that_a_member_claims_to_follow_stops_the_others(
    claim: Plan, ends: Ends, policy: str, gone: frozenset[NodeId]
) -> None:
    agreed = replace(charter(LAYERS), ends=ends, policy=policy)
    world = World({node: profile(LAYERS) for node in NODES}, agreed, followed={B: claim}, gone=gone)

    agreements = everyone(world)

    for agreement in agreements.values():
        assert all(agreements[other] == agreement for other in agreement.alive)


@given(worlds(), st.lists(changes, max_size=3))
def test_reused_work_never_changes_the_result(world: World, events: list[Change]) -> None:
    me = min(world.profiles)
    before = None
    for event in events:
        world = change(world, event)
        before = agree(world.view(me), before)

        assert before == agree(world.view(me))


@given(worlds(), st.lists(changes, max_size=2))
def test_there_is_advice_in_one_line_for_every_ring(world: World, events: list[Change]) -> None:
    for event in events:
        world = change(world, event)
    agreement = world.follow(world.agree(min(world.profiles))).agree(min(world.profiles))
    advice = advise(agreement)

    assert advice or not (agreement.plan or agreement.offers or agreement.refused)
    assert "\n" not in advice


@given(st.binary(max_size=200), st.booleans())
def test_only_encoded_plans_are_decoded(tail: bytes, begins: bool) -> None:
    data = b"meshllm plan 1\n" * begins + tail
    try:
        plan = Plan.decode(data)
    except PeerFault:
        return

    assert plan.encode() == data
