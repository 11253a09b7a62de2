"""How long the owner of a node waits for an answer, alone and during an attack."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from statistics import median

from meshllm.api.unix import SOCKET
from meshllm.cli.shared.client import NodeClient
from meshllm.request import Request
from tests.processes.fleet import Node
from tests.security.attack import Outcome

PROMPT = "What is a ring?"
RUNS = 5
FACTOR = 2.0  # most that the owner may wait, times what it waits alone


def owner_s(owner: Node) -> float:
    """Return the median time of a few answers to the owner, on the socket of the node."""

    async def answer() -> None:
        request = Request(turns=({"role": "user", "content": PROMPT},))
        async for _ in NodeClient(owner.state / SOCKET).generate(request):
            pass

    return median_s(lambda: asyncio.run(answer()))


def median_s(answer: Callable[[], object]) -> float:
    """Return the median time of a few answers."""
    times = []
    for _ in range(RUNS):
        begin = time.monotonic()
        answer()
        times.append(time.monotonic() - begin)
    return median(times)


def slowed(
    owner: Node,
    attack: Callable[[], AbstractContextManager[object]],
    during: Callable[[], Outcome] | None = None,
) -> Outcome:
    """Measure the owner's answers alone, then while an attack runs, and what else is done then."""
    alone = alone_s(owner)
    with attack():
        done = during() if during else None
        crowded = owner_s(owner)
    return compared(done, alone, crowded)


def alone_s(owner: Node) -> float:
    """Return `owner_s` before an attack."""
    owner_s(owner)  # the first answers trace and measure
    return owner_s(owner)


def compared(done: Outcome | None, alone: float, crowded: float) -> Outcome:
    """Add to an outcome how long the owner waited, before and during the attack."""
    effect, held = f"owner's answer {alone:.2f} s -> {crowded:.2f} s", crowded <= FACTOR * alone
    if done is None:
        return Outcome(effect, f"{FACTOR:g} times", held=held)
    bound = f"{done.bound}, {FACTOR:g} times"
    return Outcome(f"{done.effect}, {effect}", bound, held=done.held and held)
