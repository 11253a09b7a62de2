"""Steps are recorded before a text waits for them.

The first steps of each number of rows take up to three times as long, as they are recorded and
tried. So ranks do them with rows of no text where nothing else was computed for a second, one at a
time: what comes meanwhile waits for one of them on each rank at most.
"""

import asyncio
import logging
from collections.abc import Sequence

from meshllm.model.steps.runner import Runner
from meshllm.node.compute.worker import Worker

QUIET_S = 1.0
"""s in which nothing else was computed, before each step."""

logger = logging.getLogger(__name__)


class Rehearsal:
    """Of runners, each on its compute thread."""

    def __init__(self, ranks: Sequence[tuple[Worker, Runner]], over: asyncio.Event) -> None:
        """Begin nothing yet; set ``over`` at the end."""
        self._ranks = ranks
        self._over = over

    async def run(self) -> None:
        """Rehearse until nothing is left, which may take as long as texts are written."""
        for worker, runner in self._ranks:
            steps = runner.rehearsal()
            try:
                while await worker.spare(QUIET_S, next, steps, steps) is not steps:
                    pass
            except Exception as error:  # foreign code; steps are recorded when they come, or never
                logger.warning("no rehearsal: %s: %s", type(error).__name__, error)
                logger.debug("its traceback", exc_info=error)
        self._over.set()
