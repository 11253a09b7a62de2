"""Warm-up: idle ranks record their steps before a request needs them.

The first steps of each number of rows take up to three times as long, since they are recorded and
tried. So a rank runs them with dummy rows, one at a time, each after a second without other
computation: a request waits for at most one of them on each rank. Other programs of the machine
cannot be seen waiting, so the steps of all rings together take a minute of the machine, and then a
second of one core per minute, see `WarmUpBudget`.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence

import torch

from meshllm.model.split.structure import PROBE_ERRORS
from meshllm.model.steps.runner import Runner
from meshllm.node.compute.warm_up_budget import WarmUpBudget
from meshllm.node.compute.worker import Worker
from meshllm.node.supervisor import contained

QUIET_S = 1.0
"""s without other computation before each step."""

logger = logging.getLogger(__name__)


class WarmUp:
    """Warms up runners, each on its compute thread."""

    def __init__(self, ranks: Sequence[tuple[Worker, Runner]], done: asyncio.Event) -> None:
        """Begin nothing yet; `run` sets ``done`` at its end."""
        self._ranks = ranks
        self._done = done

    async def run(self) -> None:
        """Run every warm-up step, which may take as long as requests keep the ranks busy."""
        for worker, runner in self._ranks:
            with contained("bug in a warm-up"):
                await _warm_up(worker, runner)
        self._done.set()
        for worker, _ in self._ranks:
            worker.reclaim_later()


async def _warm_up(worker: Worker, runner: Runner) -> None:
    steps, budget, is_done = runner.warm_up_steps(), worker.warm_up_budget, False
    try:
        while not is_done:
            await asyncio.sleep(budget.wait_s(time.monotonic()))
            is_done = await worker.run_when_idle(QUIET_S, _step, steps, budget)
    except (MemoryError, *PROBE_ERRORS) as error:  # recorded on first use, or never
        logger.warning("warm-up ended: %s: %s", type(error).__name__, error)
        logger.debug("traceback of the warm-up", exc_info=error)


def _step(steps: Iterator[None], budget: WarmUpBudget) -> bool:
    """Run the next step, and count it even if it was given up; return whether none is left."""
    begin = time.thread_time()
    is_done = next(steps, steps) is steps
    core_s = (time.thread_time() - begin) * torch.get_num_threads()
    budget.spend(core_s, time.monotonic())
    return is_done
