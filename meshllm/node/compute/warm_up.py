"""Warm-up: idle ranks record their steps before a request needs them.

The first steps of each number of rows take up to three times as long, since they are recorded and
tried. So a rank runs them with dummy rows, one at a time, each after a second without other
computation: a request waits for at most one of them on each rank. Other programs of the machine
cannot be seen waiting, so after the first minute the steps take a second of one core per minute.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence

import torch

from meshllm.model.steps.runner import Runner
from meshllm.node.compute.worker import Worker

QUIET_S = 1.0
"""s without other computation before each step."""
FREE_S = 60.0
"""s from the start in which steps follow one another."""
CORE_S_PER_S = 1 / 60
"""Core-seconds of steps per second after that."""

logger = logging.getLogger(__name__)


class WarmUp:
    """Warms up runners, each on its compute thread."""

    def __init__(self, ranks: Sequence[tuple[Worker, Runner]], done: asyncio.Event) -> None:
        """Begin nothing yet; `run` sets ``done`` at its end."""
        self._ranks = ranks
        self._done = done

    async def run(self) -> None:
        """Run every warm-up step, which may take as long as requests keep the ranks busy."""
        begin = time.monotonic()
        for worker, runner in self._ranks:
            steps = runner.warm_up_steps()
            try:
                while True:
                    spent = await worker.run_when_idle(QUIET_S, _step, steps)
                    if spent is None:
                        break
                    await asyncio.sleep(pause_s(time.monotonic() - begin, spent))
            except Exception as error:  # foreign code; steps are recorded on first use, or never
                logger.warning("warm-up ended: %s: %s", type(error).__name__, error)
                logger.debug("traceback of the warm-up", exc_info=error)
        self._done.set()


def pause_s(age_s: float, core_s: float) -> float:
    """Return how long to wait after a step that took ``core_s``, ``age_s`` after the start."""
    return 0.0 if age_s < FREE_S else core_s / CORE_S_PER_S


def _step(steps: Iterator[None]) -> float | None:
    """Run the next step; return the core-seconds that it took, or None if there are no more."""
    begin = time.thread_time()
    if next(steps, steps) is steps:
        return None
    return (time.thread_time() - begin) * torch.get_num_threads()
