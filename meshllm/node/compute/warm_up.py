"""Warm-up: idle ranks record their steps before a request needs them.

The first steps of each number of rows take up to three times as long, since they are recorded and
tried. So a rank runs them with dummy rows, one at a time, each after a second without other
computation: a request waits for at most one of them on each rank.
"""

import asyncio
import logging
from collections.abc import Sequence

from meshllm.model.steps.runner import Runner
from meshllm.node.compute.worker import Worker

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
            steps = runner.warm_up_steps()
            try:
                while await worker.run_when_idle(QUIET_S, next, steps, steps) is not steps:
                    pass
            except Exception as error:  # foreign code; steps are recorded on first use, or never
                logger.warning("warm-up ended: %s: %s", type(error).__name__, error)
                logger.debug("traceback of the warm-up", exc_info=error)
        self._done.set()
