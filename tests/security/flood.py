"""A member or client that repeats an attack from a process of its own."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import get_context
from pathlib import Path

from meshllm.errors import MeshError
from tests.processes.fleet import WAIT_S
from tests.security.member import Member, join

PAUSE_S = 0.05  # s before it joins again
SETTLE_S = 1.0  # s of the attack before anybody looks
NICE = 19  # an attacker has a machine of its own, and takes no time of this one's processors
STOP_S = 10.0  # s until its process has ended

Burst = Callable[[Member], Awaitable[None]]

_FORK = get_context("fork")


@contextmanager
def flood(ticket: str, state: Path, burst: Burst) -> Iterator[None]:
    """Send bursts without end; under another key when the link was closed."""
    state.mkdir()
    begun = _FORK.Event()

    async def run() -> None:
        os.nice(NICE)
        for number in count():
            with suppress(MeshError):
                async with join(ticket, state / str(number)) as member:
                    await asyncio.sleep(PAUSE_S)
                    begun.set()
                    while member.links.by_peer:
                        await burst(member)
            await asyncio.sleep(PAUSE_S)

    process = _FORK.Process(target=lambda: asyncio.run(run()))
    process.start()
    try:
        assert begun.wait(WAIT_S), "the attacker cannot join"
        process.join(SETTLE_S)
        yield
    finally:
        process.kill()
        process.join(STOP_S)
