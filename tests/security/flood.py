"""A member or client that repeats an attack from a process of its own."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from meshllm.errors import MeshError
from tests.processes.fleet import WAIT_S
from tests.security.member import Member, join
from tests.security.stranger import FORK, SETTLE_S, running

PAUSE_S = 0.05  # s before it joins again

Burst = Callable[[Member], Awaitable[None]]


@contextmanager
def flood(ticket: str, state: Path, burst: Burst) -> Iterator[None]:
    """Send bursts without end; under another key when the link was closed."""
    state.mkdir()
    begun = FORK.Event()

    async def run() -> None:
        for number in count():
            with suppress(MeshError):
                async with join(ticket, state / str(number)) as member:
                    await asyncio.sleep(PAUSE_S)
                    begun.set()
                    while member.links.by_peer:
                        await burst(member)
            await asyncio.sleep(PAUSE_S)

    with running(run):
        assert begun.wait(WAIT_S), "the attacker cannot join"
        time.sleep(SETTLE_S)
        yield
