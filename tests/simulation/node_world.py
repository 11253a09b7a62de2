"""Whole nodes on an unreliable network in virtual time; one seed determines everything.

    python -m tests.simulation.node_world --schedules 1000000 --seed 7 [--rings several]

A schedule starts some nodes, lets others join with tickets, sends requests at random times, and
injects all kinds of faults for a while: nodes are killed, lose power, pause, leave, restart with
their key, are partitioned in one direction or both, get long delays, see their wall clock jump, hit
a bug, hang, run out of memory while they load a span, and are removed. Then all faults end, and
within `schedule.BOUND` every request has ended in the right text or in a `MeshError`, all members
follow one plan, its ring is formed, nothing old is left over, and each node answers a fresh
request. Invariants at all times are in `plans` and `checks`. With ``--rings``, the mesh serves
several models and replicas, see `several`.
"""

import argparse
import asyncio
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from importlib.metadata import entry_points
from multiprocessing import Pool
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from unittest.mock import patch

from meshllm.names import show
from meshllm.protocol.trust.identity import agreement_key
from tests.simulation.machines import Machines, process_here, time_of_day
from tests.simulation.mesh_world import remembered_plans, remembered_signatures
from tests.simulation.schedule import Schedule
from tests.simulation.several import SeveralSchedule, SharedSchedule
from tests.simulation.world import World

NAME = "tests.simulation.node_world"
PART = 50  # schedules between two lines of progress
PARTS = 20  # that a process runs: what it remembers of plans grows, and slows it down
RINGS: Mapping[str, type[Schedule]] = {
    "one": Schedule, "several": SeveralSchedule, "shared": SharedSchedule,
}  # fmt: skip
"""What the mesh serves: one model, several on nodes of their own, or several on the same nodes."""


class Ear(logging.Handler):
    """Adds the logs of nodes to the history; bugs that they caught are failures."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        owner = process_here()
        text = f"{owner.number if owner else '-'}: {record.getMessage()}"
        if record.levelno < logging.ERROR:
            self._world.note(text)
        else:
            self._world.fault(self.format(record))


@contextmanager
def shortcuts() -> Iterator[None]:
    """Skip what takes time and changes nothing: what was computed before, and fsync."""
    with (
        remembered_plans(),
        remembered_signatures(),
        patch("meshllm.transport.registry.entry_points", lru_cache(entry_points)),
        patch("meshllm.protocol.trust.transcript.agreement_key", lru_cache(64)(agreement_key)),
        patch("meshllm.names.show", lru_cache(64)(show)),
        patch("os.fsync", lambda _: None),
        patch("meshllm.node.ring.span_loader.reclaim", lambda: None),
    ):
        yield


def simulate(seed: int, make: Callable[[World, int], Schedule] = Schedule) -> World:
    """Run one schedule; the world records what went wrong."""

    async def run() -> World:
        world = World(seed, Path(home))
        world.loop.set_exception_handler(world.unhandled)
        handler = Ear(world)
        logger = logging.getLogger("meshllm")
        logger.addHandler(handler)
        try:
            with world.plans.watched(), world.members.watched(), patch("time.time", time_of_day):
                await make(world, seed).run()
        finally:
            logger.removeHandler(handler)
        return world

    shared = Path("/dev/shm")  # faster than a disk, where there is one
    parent = shared if os.access(shared, os.W_OK) else None
    with (
        TemporaryDirectory(dir=parent) as home,
        asyncio.Runner(loop_factory=Machines) as runner,
    ):
        return runner.run(run())


def run_some(seeds: Sequence[int], rings: str, level: str) -> list[str]:
    """Run schedules; return a history for each that goes wrong, or of all with debug logs."""
    logging.getLogger("meshllm").propagate = False
    logging.getLogger("meshllm").setLevel(level)
    told = []
    gc.freeze()  # what was imported: collecting it takes longer than what the worlds leave
    with shortcuts():
        for seed in seeds:
            world = simulate(seed, RINGS[rings])
            if world.wrong:
                again = (
                    f"again: python -m {NAME} --rings {rings} --schedules 1 --seed {seed} --show"
                )
                told.append("\n".join([*world.history, f"seed {seed}: {world.wrong}", again]))
            elif level == "DEBUG":
                print("\n".join([*world.history, f"seed {seed}: all is well"]))
    return told


def told(world: World) -> str:
    """Return what is wrong with a world, and its history."""
    return "\n".join([*world.wrong, *world.history])


def main() -> None:
    """Run schedules, and stop at the first that goes wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    parser.add_argument("--rings", choices=RINGS, default="one", help="what the mesh serves")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run them")
    parser.add_argument("--keep-going", action="store_true", help="also after one that goes wrong")
    parser.add_argument("--show", action="store_true", help="print all histories, with debug logs")
    arguments = parser.parse_args()
    start, bad = perf_counter(), 0
    seeds = range(arguments.seed, arguments.seed + arguments.schedules)
    parts = [seeds[at : at + PART] for at in range(0, len(seeds), PART)]
    run = partial(run_some, rings=arguments.rings, level="DEBUG" if arguments.show else "ERROR")
    with Pool(arguments.jobs, maxtasksperchild=PARTS) as pool:
        for done, told in enumerate(pool.imap_unordered(run, parts), start=1):
            for history in told:
                print(history)
            bad += len(told)
            if bad and not arguments.keep_going:
                sys.exit(1)
            count = min(done * PART, len(seeds))
            print(
                f"{count} schedules in {perf_counter() - start:.1f} s: {bad} go wrong", flush=True
            )
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
