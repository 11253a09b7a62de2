"""Whole nodes that serve two models and replicas, under all kinds of faults."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest

from meshllm.names import GroupId
from meshllm.node.agreement.further_rings import SecondaryRings
from tests.simulation.node_world import shortcuts, simulate, told
from tests.simulation.several import SeveralSchedule, SharedSchedule, SpanSchedule

BLOCK = 5  # schedules
FOUND = (144,)  # a node whose compute thread hung offered layers of another model
BLOCKS = [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 40))]


@pytest.fixture(autouse=True)
def _fast() -> Iterator[None]:
    with shortcuts():
        yield


@pytest.mark.parametrize("block", BLOCKS)
def test_every_ring_recovers_from_every_fault(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        world = simulate(seed, SeveralSchedule)

        assert not world.wrong, f"seed {seed}: {told(world)}"


@pytest.mark.parametrize("block", BLOCKS)
def test_nodes_in_both_rings_recover_from_every_fault(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        world = simulate(seed, SharedSchedule)

        assert not world.wrong, f"seed {seed}: {told(world)}"


@pytest.mark.parametrize("block", BLOCKS)
def test_replicas_that_share_nodes_recover_from_every_fault(block: int) -> None:
    begin, begun = SecondaryRings._begin, list[GroupId]()

    def count(rings: SecondaryRings, group: GroupId, memory: int) -> None:
        begun.append(group)
        begin(rings, group, memory)

    with patch.object(SecondaryRings, "_begin", count):
        for seed in range(block * BLOCK, (block + 1) * BLOCK):
            world = simulate(seed, SpanSchedule)

            assert not world.wrong, f"seed {seed}: {told(world)}"

    assert begun


@pytest.mark.parametrize("seed", FOUND)
def test_seeds_of_fixed_bugs_still_pass(seed: int) -> None:
    world = simulate(seed, SeveralSchedule)

    assert not world.wrong, told(world)


@pytest.mark.parametrize(
    ("target", "broken", "fault"),
    [
        ("meshllm.node.agreement.planner.group_nodes", lambda _: {}, "is in 00, not "),
        ("meshllm.protocol.agreement.grouping.ring_of", lambda view: view, "replica 0: "),
    ],
    ids=["nobody moves", "rings of the first model only"],
)
def test_broken_nodes_are_found(target: str, broken: Callable[[Any], object], fault: str) -> None:
    with patch(target, broken):
        worlds = (simulate(seed, SeveralSchedule) for seed in range(2, 9))
        found = next(world.wrong for world in worlds if world.wrong)

    assert fault in found[0]


def test_a_node_that_begins_no_further_ring_is_found() -> None:
    with patch("meshllm.node.agreement.further_rings.SecondaryRings._begin", lambda *_: None):
        worlds = (simulate(seed, SharedSchedule) for seed in range(1, 40))
        found = next(world.wrong for world in worlds if world.wrong)

    assert ", not " in found[0]
