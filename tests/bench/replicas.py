"""What a replica adds: tokens per second of many conversations, and hits of the prefix cache.

    python -m tests.bench.replicas [--chats 64]
    python -m tests.bench.replicas --processes [--random] [--chats 64] [--rounds 3]

Whole nodes with the toy model of the simulation, in virtual time: rings of two nodes, 100 ms round
trip between any two, one API server. Each chat has three turns, one behind the other; all chats run
at the same time. One ring is compared with two replicas.

With ``--processes`` each replica is a process on a core of its own, with the built-in model or,
with ``--random``, with one of 12 random layers, about 100 MB, see `tests.bench.pinned`. The rounds
of one replica and of two take turns, each after a warm-up; the medians are compared. The command
fails if the gain is less than `GAIN`, or the share of hits less than `HITS`.
"""

import asyncio
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from meshllm.request import Answer, Request, Sampling, Turn
from tests.bench import pinned
from tests.bench.pinned import ChatLoad, Cores, PinnedLoad
from tests.bench.report import Report, parser_of
from tests.simulation.machines import Machines
from tests.simulation.node_world import shortcuts
from tests.simulation.world import World

GAIN, HITS = 1.8, 0.9  # of two replicas, at least
NAMES = "one ring", "two replicas"
ROUND_TRIP_S = 0.1
LAYERS = 60  # for which each node has room: for its half of the model, and many caches
TURNS, NEW, TOKENS = 3, 12, 16  # of a chat; letters of a question; tokens of an answer
JOB_S = 0.01  # s of the compute thread for a batch
FORM_S = 60.0  # s of virtual time


def measure(replicas: int, chats: int, seed: int = 0) -> ChatLoad:
    """Run all chats in a mesh with so many rings."""
    with (
        shortcuts(),
        TemporaryDirectory() as home,
        asyncio.Runner(loop_factory=Machines) as runner,
    ):
        return runner.run(_measure(Path(home), seed, replicas, chats))


async def _measure(home: Path, seed: int, replicas: int, chats: int) -> ChatLoad:
    world, count = World(seed, home), 2 * replicas
    world.capacity = dict.fromkeys(range(count), LAYERS)
    world.ring_size, world.replicas = 2, replicas
    for one in range(count):
        for other in range(count):
            world.network.delay_s[one, other] = ROUND_TRIP_S / 2 if one != other else 0.0
    for number in range(count):
        world.start(number)
        world.running[number].worker._seconds = JOB_S
    await _formed(world, replicas)
    load, begin = ChatLoad(), world.loop.time()
    api_server = world.running[0]
    jobs = [
        world.loop.create_task(
            _chat(world, load, begin, number), context=api_server.process.context.copy()
        )
        for number in range(chats)
    ]
    await asyncio.gather(*jobs)
    for number in list(world.running):
        world.crash(number, silently=False)
    await asyncio.sleep(1.0)
    return load


async def _formed(world: World, replicas: int) -> None:
    async with asyncio.timeout(FORM_S):
        while not _is_formed(world, replicas):  # noqa: ASYNC110  # in virtual time
            await asyncio.sleep(0.5)


def _is_formed(world: World, replicas: int) -> bool:
    nodes = world.nodes.values()
    known = (len(node.rings.serving_entries()) for node in nodes)
    return len(nodes) == len(world.running) and min(known) >= replicas


async def _chat(world: World, load: ChatLoad, begin: float, number: int) -> None:
    turns = list[Turn]()
    for turn in range(TURNS):
        letters = "".join(chr(ord("a") + (number * 7 + turn + at) % 26) for at in range(NEW))
        turns.append({"role": "user", "content": letters})
        sampling = Sampling(temperature=0.8, seed=number)
        request = Request(tuple(turns), sampling=sampling, max_tokens=TOKENS, ignores_end=True)
        *_, answer = [event async for event in world.nodes[0].router.generate(request)]
        assert isinstance(answer, Answer)
        load.answers.append((world.loop.time() - begin, answer.completion_tokens))
        if turn:
            load.prompt += answer.prompt_tokens
            load.cached += answer.cached_tokens
        turns.append({"role": "assistant", "content": answer.text})


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare one ring with two."""
    parser = parser_of("replicas", __doc__ and __doc__.splitlines()[0])
    parser.add_argument("--chats", type=int, help="at the same time (64)")
    parser.add_argument("--processes", action="store_true", help="real ones, pinned to cores")
    parser.add_argument("--random", action="store_true", help="a model of 100 MB, with processes")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="of processes")
    options = parser.parse_args(arguments)
    logging.getLogger("meshllm").setLevel("ERROR")
    report = Report(options, threads=1)
    compare = _of_processes if options.processes else _of_simulation
    gain, hits = compare(options, report)
    report.say(f"gain {gain:.2f}, hits {hits:.0%} of one ring's")
    return int(gain < GAIN or hits < HITS)


def _of_simulation(options: Namespace, report: Report) -> tuple[float, float]:
    rings = [measure(replicas, options.chats or 64) for replicas in (1, 2)]
    for name, load in zip(NAMES, rings, strict=True):
        report.say(_line(name, load))
    report.write(rings)
    one, two = rings
    return two.rate / one.rate, two.hits / one.hits


def _of_processes(options: Namespace, report: Report) -> tuple[float, float]:
    cores = Cores.of(2, sorted(os.sched_getaffinity(0)))
    report.say(
        f"replicas on the cores {cores.replicas}, API server and clients on core {cores.api_server}"
        + (", that of the first replica" if cores.api_server in cores.replicas else "")
    )
    loads = list[PinnedLoad]()
    for replicas, name in (*enumerate(NAMES, 1),) * options.rounds:
        load = pinned.measure(replicas, options.chats or 64, cores, is_random=options.random)
        report.say(_line(name, load), f"{'':<13} {load.shares}")
        loads.append(load)
    report.write(loads)
    one, two = loads[::2], loads[1::2]
    pairs = zip(one, two, strict=True)
    same = [before.texts[at] == after.texts[at] for before, after in pairs for at in before.texts]
    report.say(f"{sum(same)} of {len(same)} answers are the same text")
    gain = median(load.rate for load in two) / median(load.rate for load in one)
    return gain, median(load.hits for load in two) / median(load.hits for load in one)


def _line(name: str, load: ChatLoad) -> str:
    return f"{name:<13} {load.rate:7.1f} tokens/s, {load.hits:.0%} of later prompts cached"


if __name__ == "__main__":
    sys.exit(main())
