"""Waits of tests on a real event loop: for what happens, not for a time.

Neither has a bound of its own: what never happens ends at the timeout of pytest.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshllm.node.compute.batcher import Batcher
    from meshllm.node.ring.local_ring import LocalRing

POLL_S = 0.001
TURNS = 3  # of the event loop: what is ready, the timers that were due, and what they woke


async def until(holds: Callable[[], object]) -> None:
    """Return once a condition holds that has no event."""
    while not holds():  # noqa: ASYNC110  # another thread or process makes it hold
        await asyncio.sleep(POLL_S)


async def at_rest(ring: "LocalRing") -> None:
    """Return once no rank of a ring in this process has a job that waits or runs."""
    batchers: list[Batcher[Any]] = [ring.entry._samples, *(each._steps for each in ring.stages)]
    await until(lambda: not any(each._has_turn or each._alone for each in batchers))


async def timers_fired() -> None:
    """Return once what is ready has run, and the timers that are due now have fired."""
    for _ in range(TURNS):
        await asyncio.sleep(0)
