"""Meshes on an unreliable network: living nodes agree in the end; seeds are printed.

The mutants at the end show that these tests can fail.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest

from meshllm.names import NodeId
from meshllm.protocol.agreement.agreement import Agreement, agree
from meshllm.protocol.agreement.candidates import MeshView
from meshllm.protocol.membership.charter import Amendments, Charter, OverridableTerm, in_force
from meshllm.protocol.membership.link_table import BEAT, SILENCE
from meshllm.protocol.membership.records import StateRecord
from meshllm.protocol.session.messages import DType
from tests.simulation.mesh_schedule import Schedule
from tests.simulation.mesh_world import (
    CONFIG,
    SHAPE,
    Node,
    World,
    disagreement,
    remembered_plans,
    remembered_signatures,
)

BLOCK = 100  # schedules, in parts that run in parallel
BLOCKS = [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 19))]
ON_THE_WAY = 0.3  # s: messages sent before, gossip after, and the interval between two rounds


@pytest.fixture(autouse=True)
def _fast() -> Iterator[None]:
    with remembered_plans(), remembered_signatures():
        yield


class Followers:
    """How a node handles plans: it agrees, and follows at once."""

    def __init__(self) -> None:
        self.agreements: dict[Node, Agreement] = {}

    def view(self, node: Node) -> MeshView | None:
        mesh = node.mesh
        if mesh.charter is None or mesh.author is None:
            return None
        return MeshView(
            mesh.me, mesh.charter, mesh.author, mesh.profiles, mesh.states, mesh.removals.keys()
        )

    def __call__(self, world: World, node: Node) -> None:
        state = node.mesh.states.get(node.id)
        if (view := self.view(node)) is None or state is None:
            return
        self.agreements[node] = agree(view, self.agreements.get(node))
        plan = self.agreements[node].plan
        followed = plan.encode() if plan else state.followed
        if followed != state.followed:
            told = replace(state, followed=followed)
            world.act(node, node.mesh.publish(state=told, now=world.now))


def settled(nodes: int) -> World:
    world = World(nodes)
    for number in range(nodes):
        world.start(number)
    world.run(10)
    assert disagreement(world) is None
    return world


@pytest.mark.parametrize("block", BLOCKS)
def test_all_living_nodes_come_to_know_the_same(block: int) -> None:
    seeds = range(block * BLOCK, (block + 1) * BLOCK)

    wrong = {seed: text for seed in seeds if (text := Schedule(seed).run())}

    assert not wrong, f"seeds that go wrong: {wrong}"


@pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(8, 40), marks=pytest.mark.slow)], ids=str
)
def test_all_living_nodes_come_to_follow_the_same_plan(seeds: range) -> None:
    for seed in seeds:
        followers = Followers()
        schedule = Schedule(seed, followers)
        world = schedule.world
        world.at(0.5, partial(start_with_charter, world))

        wrong = schedule.run()
        world.run(5)
        told = [followed(node) for node in world.members]
        world.run(20)

        assert not wrong, f"seed {seed}: {wrong}"
        found = followers.agreements
        plans = {found[node].plan for node in world.members if node.mesh.charter}
        assert len(plans) <= 1, f"seed {seed}: {plans}"
        assert [followed(node) for node in world.members] == told, f"seed {seed}: plans flap"
        for plan in plans - {None}:
            assert plan is not None
            here = {node.id for node in world.members}
            assert {at.node for at in plan.stages} <= here, f"seed {seed}: a dead node in {plan}"
            assert set(told) == {plan.encode()}, f"seed {seed}: not the agreed plan is followed"


def start_with_charter(world: World) -> None:
    if 0 not in world.nodes:
        world.start(0)
    world.charter(world.nodes[0])


def toy_charter() -> Charter:
    return Charter(1, SHAPE, DType.FLOAT32, CONFIG)


def followed(node: Node) -> bytes:
    return node.mesh.states[node.id].followed


@pytest.mark.parametrize("nodes", [2, 5])
def test_a_node_that_falls_silent_is_gone_within_the_silence(nodes: int) -> None:
    world = settled(nodes)
    victim = world.nodes[1]

    world.crash(victim, silently=True)
    world.run(SILENCE + ON_THE_WAY)

    assert all(victim.id not in node.mesh.alive for node in world.living)


def test_a_node_whose_streams_close_is_gone_at_once() -> None:
    world = settled(5)
    victim = world.nodes[1]

    world.crash(victim, silently=False)
    world.run(ON_THE_WAY)

    assert all(victim.id not in node.mesh.alive for node in world.living)


def test_a_pause_shorter_than_the_silence_does_no_harm() -> None:
    world = settled(3)

    world.pause(world.nodes[1], SILENCE - 2 * BEAT)
    for _ in range(60):
        world.run(0.1)

        assert all(len(node.mesh.alive) == 3 for node in world.living)


@pytest.mark.parametrize("phase", range(8))
@pytest.mark.parametrize("stopped_s", [2.0, 2.8, 3.3, 6.0])
def test_a_node_that_was_stopped_blames_no_peer_and_is_gone_for_the_others(
    stopped_s: float, phase: int
) -> None:
    world = settled(3)
    world.run(phase * BEAT / 8)
    node, *others = world.nodes[1], world.nodes[0], world.nodes[2]
    slowest = max(us for at in world.living for _, us in at.mesh.links.round_trips())
    is_long = stopped_s > SILENCE + BEAT

    world.pause(node, stopped_s)
    world.run(min(stopped_s, SILENCE + ON_THE_WAY))
    seen = {node.id in other.mesh.alive for other in others}
    for _ in range(60):
        world.run(0.1)

        assert node.mesh.silent == frozenset()
        measured = (us for at in world.living for _, us in at.mesh.links.round_trips())
        assert max(measured) <= 2 * slowest

    assert seen == {False} if is_long else seen
    assert is_long or stopped_s > SILENCE - BEAT or seen == {True}
    assert disagreement(world) is None


@pytest.mark.parametrize("phase", range(4))
@pytest.mark.parametrize("stopped_s", [3.2, 20.0])
def test_nodes_that_were_stopped_together_keep_their_link(stopped_s: float, phase: int) -> None:
    world = settled(3)
    world.run(phase * BEAT / 4)
    one, two, other = world.nodes.values()
    since = one.mesh.links[two.id].since, two.mesh.links[one.id].since

    for node in (one, two):
        world.pause(node, stopped_s)
    world.run(stopped_s - 0.01)
    is_gone = other.mesh.alive == {other.id}
    world.run(10)

    assert (one.mesh.links[two.id].since, two.mesh.links[one.id].since) == since
    assert is_gone or stopped_s < SILENCE + BEAT
    assert disagreement(world) is None


def test_the_loss_of_one_link_leaves_all_alive() -> None:
    world = settled(3)

    world.network.loss[0, 1] = world.network.loss[1, 0] = 1.0
    world.run(10)

    assert all(len(node.mesh.alive) == 3 for node in world.living)
    assert world.nodes[1].id not in world.nodes[0].mesh.links


def test_a_partition_of_an_hour_heals() -> None:
    world = settled(4)
    ways = {(a, b): 1.0 for a in range(4) for b in range(4) if (a < 2) != (b < 2)}

    with patch.object(world, "_remember"):
        world.network.loss |= ways
        world.run(3600)
        parted = [len(node.mesh.alive) for node in world.living]
        world.network.loss.clear()
        world.run(60)

    assert parted == [2, 2, 2, 2]
    assert disagreement(world) is None


def newest(amendments: Mapping[NodeId, Amendments]) -> dict[NodeId, Amendments]:
    """Last writer wins for the whole charter, as if it were one register."""
    last = max(amendments, key=lambda node: (amendments[node].version, node), default=None)
    return {last: amendments[last]} if last else {}


def test_a_partition_merges_the_charter_terms_of_both_halves() -> None:
    world = settled(4)
    world.act(world.nodes[0], world.nodes[0].mesh.publish(charter=toy_charter(), now=world.now))
    world.run(2)

    world.network.loss |= {(a, b): 1.0 for a in range(4) for b in range(4) if (a < 2) != (b < 2)}
    for number, changes in ((1, {"members": 3}), (2, {"policy": "throughput"})):
        mesh = world.nodes[number].mesh
        assert mesh.charter is not None
        wanted = replace(mesh.charter, **changes)
        world.act(world.nodes[number], mesh.publish(charter=wanted, now=world.now))
    world.run(5)
    world.network.loss.clear()
    world.run(60)

    yields = (OverridableTerm("members", world.nodes[1].id, toy_charter().members),)
    wanted = replace(toy_charter(), members=3, policy="throughput", yields=yields)
    assert [node.mesh.charter for node in world.living] == [wanted] * 4
    assert disagreement(world) is None


@pytest.mark.parametrize(
    ("target", "broken", "first"),
    [
        ("meshllm.protocol.membership.mesh.summarise", lambda _: (), 2),
        ("meshllm.protocol.membership.gossip.Item.precedence", (0, 0, 0, 0, b"", b""), 0),
        ("meshllm.protocol.membership.sync.GossipState._adopt_count", lambda *_: None, 28),
        ("meshllm.protocol.membership.link_table.SILENCE", 1e9, 3),
        ("meshllm.protocol.membership.dial_schedule.DialSchedule.want", lambda *_: None, 129),
        (
            "meshllm.protocol.membership.charter.in_force",
            lambda at, _=None: in_force(newest(at)),
            39,
        ),
    ],
    ids=["no summaries", "no order", "no recount", "no silence", "no dials", "no merging"],
)
def test_a_broken_machine_is_found(target: str, broken: object, first: int) -> None:
    """The first seed is the first that finds it."""
    with patch(target, broken), patch("tests.simulation.mesh_schedule.BOUND", 30):
        assert any(Schedule(seed).run() for seed in range(first, first + 160))


def test_a_state_is_gossiped_to_the_last_field() -> None:
    world = settled(2)
    node, other = world.nodes[0], world.nodes[1]

    told = StateRecord(node.mesh.states[node.id].lifecycle, is_loaded=True, may_change=False)
    world.act(node, node.mesh.publish(state=told, now=world.now))
    world.run(1)

    assert replace(other.mesh.states[node.id], links=()) == told
