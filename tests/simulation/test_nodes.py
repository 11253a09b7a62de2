"""Whole nodes under all kinds of faults; a failure prints its seed.

That these tests can fail is shown in `test_node_mutants`.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import count, permutations
from unittest.mock import patch

import pytest

from meshllm.node.agreement.plan_follower import SETTLE_S
from meshllm.node.weights import WeightSupply
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.ring.plan_change import Follow, PlanChange, PlanChangeInput, Prepare
from meshllm.request import Piece, Request, Sampling
from tests.simulation import toy
from tests.simulation.machines import Machines, Process, process_here
from tests.simulation.node_world import shortcuts, simulate, told
from tests.simulation.one_loss import OneLoss
from tests.simulation.schedule import Schedule
from tests.simulation.world import World

BLOCK = 15  # schedules, in parts that run in parallel
IN_GATE = 4  # blocks: 60 schedules, which take 15 s of one core
BLOCKS = [
    *range(IN_GATE),
    *(pytest.param(block, marks=pytest.mark.slow) for block in range(IN_GATE, 60)),
]
FOUND = (
    143,  # a ring accepted links that the other side had given up, in turn without end
    151,  # links for an earlier plan stayed open
    247,  # a removal that was never announced
    367,  # a node that fails late
    392,  # a link for the last plan of a mesh that has none
    106452,  # an outdated plan, followed late by a node that was suspended
    24237,  # a deadline came a rounding error too early, and was never looked at again
    43,  # a node ran out of memory, and offered as much again, as the plan changed at once
    1347,  # a node alone that ran out of memory offered as much for good
    101746,  # a removed node took the dials of a member for links, and planned with it
    102186,  # a suspended peer takes a restarted node for its former self, long after another did
)


@pytest.fixture(autouse=True)
def _fast() -> Iterator[None]:
    with shortcuts():
        yield


@pytest.mark.parametrize("block", BLOCKS)
def test_the_mesh_recovers_from_every_fault(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        world = simulate(seed)

        assert not world.wrong, f"seed {seed}: {told(world)}"


@pytest.mark.parametrize("seed", FOUND)
def test_seeds_of_fixed_bugs_still_pass(seed: int) -> None:
    world = simulate(seed)

    assert not world.wrong, told(world)


@pytest.mark.parametrize(("seed", "what"), [(6, "answered"), (35, "has a ticket"), (2, "removes")])
def test_a_seed_reproduces_a_history(seed: int, what: str) -> None:
    histories = [simulate(seed).history for _ in range(2)]

    assert histories[0] == histories[1]
    assert any(what in line for line in histories[0])


def test_a_paused_process_does_nothing_and_goes_on_where_it_was() -> None:
    async def main() -> list[str]:
        loop, process, done = asyncio.get_running_loop(), Process(0), list[str]()
        assert isinstance(loop, Machines)

        async def work() -> None:
            for number in range(3):
                await asyncio.sleep(1.0)
                done.append(f"{number} at {loop.time():.0f}")

        working = loop.create_task(work(), context=process.context)
        await asyncio.sleep(1.5)
        process.is_paused = True
        await asyncio.sleep(3.0)
        loop.resume(process)
        await working
        return done

    with asyncio.Runner(loop_factory=Machines) as runner:
        assert runner.run(main()) == ["0 at 1", "1 at 4", "2 at 6"]


def test_the_ring_after_a_loss_does_not_wait_until_links_are_settled() -> None:
    schedules = list[OneLoss]()

    def make(world: World, seed: int) -> Schedule:
        schedules.append(OneLoss(world, seed))
        return schedules[-1]

    world = simulate(1, make)

    assert not world.wrong, told(world)
    assert 0 < schedules[0].took_s < SETTLE_S


class OneMove(OneLoss):
    """Requests follow each other while a node leaves, and weights are fetched slowly."""

    change: Callable[[World], None]
    is_slow = False

    async def run(self) -> None:
        world = self.world
        world.capacity = {0: 4, 1: 4, 2: 4}
        world.network.delay_s = dict.fromkeys(permutations(range(3), 2), HOP_S)
        world.ring_size = 2
        for number in (0, 1):
            world.start(number)
        await self._until(lambda: len(self._served()) == 2)
        world.start(2)
        await asyncio.sleep(5.0)
        before, self.is_slow = self._plans(), True
        asking = world.loop.create_task(self._ask_on(), context=world.running[2].process.context)
        world.loop.call_later(1.0, self.change, world)
        await self._until(lambda: len(now := self._plans()) == 1 and now != before)
        await asyncio.sleep(LOAD_S + 3.0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        world.is_over = True
        for number in list(world.running):
            world.crash(number, silently=False)
        await asyncio.sleep(1.0)

    def _plans(self) -> set[Plan | None]:
        return {node.ring_member.plan for node in self.world.nodes.values()}

    async def _ask_on(self) -> None:
        """Ask without a break, and note the longest time without a token."""
        world, last = self.world, self.world.loop.time()
        node = world.nodes[2]
        for seed in count():
            request = Request(raw="abc", sampling=Sampling(0.8, seed=seed), max_tokens=10)
            told = ""
            async for event in node.router.generate(request):
                now = world.loop.time()
                self.took_s, last = max(self.took_s, now - last), now
                told += event.text if isinstance(event, Piece) else ""
            if told != toy.reference(request)[0]:
                world.fault(f"{told!r} is not the answer to {request}")


def leave(world: World) -> None:
    world.leave(0 if world.nodes[0].ring_member.rank else 1)


def moved(change: Callable[[World], None]) -> OneMove:
    """Return what a change of the ring did."""
    schedules = list[OneMove]()

    def make(world: World, seed: int) -> Schedule:
        schedules.append(OneMove(world, seed))
        schedules[-1].change = change
        return schedules[-1]

    here = set[tuple[int, int]]()  # nodes, and parts of the model

    async def obtain(_: WeightSupply, parts: Collection[int]) -> None:
        process = process_here()
        assert process is not None
        wanted = {(process.number, part) for part in parts}
        if schedules[0].is_slow and wanted - here:
            await asyncio.sleep(LOAD_S)
        here.update(wanted)

    with (
        patch(
            "meshllm.node.agreement.planner.takeover", lambda _: None
        ),  # nothing is loaded before
        patch.object(WeightSupply, "obtain", obtain),
    ):
        world = simulate(1, make)

    assert not world.wrong, told(world)
    return schedules[0]


LOAD_S = 5.0
HOP_S = 0.02  # so that answers take some time, and are few
PAUSE_S = 1.0  # of virtual time; links, and rows of a toy model


def test_answers_go_on_while_the_layers_of_a_leaving_node_are_fetched() -> None:
    assert 0 < moved(leave).took_s < PAUSE_S


def test_answers_pause_if_the_next_ring_is_not_prepared() -> None:
    """A mutant: this test of the simulation can fail."""
    with patch.object(PlanChange, "look", follow_at_once):
        assert moved(leave).took_s >= LOAD_S


LOOK = PlanChange.look


def follow_at_once(
    change: PlanChange, plan_change_input: PlanChangeInput, now: float
) -> list[Prepare | Follow]:
    return LOOK(change, replace(plan_change_input, is_whole=False), now)


def test_a_misplaced_or_repeated_layer_changes_the_text() -> None:
    request = Request(raw="abc", sampling=Sampling(), max_tokens=8)
    text = toy.reference(request)[0]
    through = toy._through

    def reversed_(value: int, cache: toy.ToyCache) -> int:
        cache.sums = dict(reversed(cache.sums.items()))
        return through(value, cache)

    def twice(value: int, cache: toy.ToyCache) -> int:
        return through(through(value, cache), cache)

    for wrong in (reversed_, twice):
        with patch.object(toy, "_through", wrong):
            assert toy.reference.__wrapped__(request)[0] != text
