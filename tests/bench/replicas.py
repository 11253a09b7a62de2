"""What a replica adds: tokens per second of many conversations, and hits of the prefix cache.

    python -m tests.bench.replicas --chats 64

Whole nodes with the toy model of the simulation, in virtual time: rings of two nodes, 100 ms round
trip between any two, one door. Each chat has three turns, one behind the other; all chats run at
the same time. One ring is compared with two replicas.
"""

import argparse
import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from meshllm.request import Answer, Request, Sampling, Turn
from tests.simulation.machines import Machines
from tests.simulation.node_world import shortcuts
from tests.simulation.world import World

ROUND_TRIP_S = 0.1
LAYERS = 60  # for which each node has room: for its half of the model, and many caches
TURNS, NEW, TOKENS = 3, 12, 16  # of a chat; letters of a question; tokens of an answer
JOB_S = 0.01  # s of the compute thread for a batch
FORM_S = 60.0  # s of virtual time


@dataclass
class Load:
    """The answers to all chats."""

    answers: list[tuple[float, int]] = field(default_factory=list)
    """When each was complete, from the beginning, and its tokens."""
    prompt: int = 0
    cached: int = 0
    """Of the tokens of the prompts."""

    @property
    def rate(self) -> float:
        """Tokens per second until no more chats wait than the rings can take at once."""
        busy = self.answers[: len(self.answers) * 3 // 4]
        return sum(tokens for _, tokens in busy) / busy[-1][0]

    @property
    def hits(self) -> float:
        return self.cached / self.prompt


def measure(replicas: int, chats: int, seed: int = 0) -> Load:
    """Run all chats in a mesh with so many rings."""
    with (
        shortcuts(),
        TemporaryDirectory() as home,
        asyncio.Runner(loop_factory=Machines) as runner,
    ):
        return runner.run(_measure(Path(home), seed, replicas, chats))


async def _measure(home: Path, seed: int, replicas: int, chats: int) -> Load:
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
    load, begin = Load(), world.loop.time()
    door = world.running[0]
    jobs = [
        world.loop.create_task(
            _chat(world, load, begin, number), context=door.process.context.copy()
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
    known = (len(node.ring_member.serving_entries()) for node in nodes)
    return len(nodes) == len(world.running) and min(known) >= replicas


async def _chat(world: World, load: Load, begin: float, number: int) -> None:
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


def main() -> None:
    """Compare one ring with two."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--chats", type=int, default=64, help="at the same time")
    arguments = parser.parse_args()
    logging.getLogger("meshllm").setLevel("ERROR")
    one, two = (measure(replicas, arguments.chats) for replicas in (1, 2))
    for name, load in (("one ring", one), ("two replicas", two)):
        print(f"{name:<13} {load.rate:7.1f} tokens/s, {load.hits:.0%} of later prompts cached")
    print(f"gain {two.rate / one.rate:.2f}, hits {two.hits / one.hits:.0%} of one ring's")


if __name__ == "__main__":
    main()
