"""Whole nodes under all kinds of faults; a failure prints its seed.

That these tests can fail is shown in `test_node_mutants`.
"""

import asyncio
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from meshllm.request import Request, Sampling
from tests.simulation import toy
from tests.simulation.machines import Machines, Process
from tests.simulation.node_world import shortcuts, simulate
from tests.simulation.world import World

BLOCK = 15  # schedules, in parts that run in parallel
IN_GATE = 12  # blocks: 180 schedules, which take a minute of one core
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
    102186,  # a suspended peer takes a restarted node for its former self, long after another did
)


@pytest.fixture(autouse=True)
def _fast() -> Iterator[None]:
    with shortcuts():
        yield


def told(world: World) -> str:
    return "\n".join([*world.wrong, *world.history])


@pytest.mark.parametrize("block", BLOCKS)
def test_the_mesh_recovers_from_every_fault(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        world = simulate(seed)

        assert not world.wrong, f"seed {seed}: {told(world)}"


@pytest.mark.parametrize("seed", FOUND)
def test_seeds_of_fixed_bugs_still_pass(seed: int) -> None:
    world = simulate(seed)

    assert not world.wrong, told(world)


@pytest.mark.parametrize(("seed", "what"), [(5, "answered"), (35, "has a ticket"), (2, "removes")])
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
