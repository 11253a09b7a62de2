"""The agreement of one node, kept up to date off the event loop.

Planning takes up to a second where there are many nodes, and tokens and beats pass through the
event loop meanwhile. What is planned with is a snapshot, the latest one when the work begins. A
result is dropped when what it was made of has changed meanwhile, but not twice in a row: a mesh
whose records change faster than they are planned with has an agreement all the same.
"""

import asyncio
from collections.abc import Callable

from meshllm.node.offloop import OffLoop
from meshllm.protocol.agreement.advice import advise
from meshllm.protocol.agreement.agreement import Agreement, agree
from meshllm.protocol.agreement.candidates import View

QUIET_S = 0.5  # s without a new agreement until advice is computed for one


class Planner:
    """Computes the agreement, and advice for it, whenever that is stirred."""

    def __init__(
        self, view: Callable[[], View | None], agreed: Callable[[], None], run: OffLoop
    ) -> None:
        """Take a snapshot from ``view``, which has none before there is a charter.

        ``agreed`` is called after `agreement` was set.
        """
        self.agreement: Agreement | None = None
        """The latest."""
        self.advice = ""
        """What would make the ring faster; of the latest agreement, or the one before it."""
        self._view = view
        self._agreed = agreed
        self._off_loop = run
        self._stirred = asyncio.Event()
        self._news = asyncio.Event()

    def stir(self) -> None:
        """Plan anew: what it is planned with may have changed."""
        self._stirred.set()

    async def run(self) -> None:
        """Plan until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._plan())
            group.create_task(self._advise())

    async def _plan(self) -> None:
        was_dropped = False
        while True:
            await self._stirred.wait()
            self._stirred.clear()
            if (view := self._view()) is None:
                continue
            agreement = await self._off_loop(agree, view, self.agreement)
            was_dropped = not was_dropped and self._stirred.is_set() and self._view() != view
            if not was_dropped:
                self.agreement = agreement
                self._news.set()
                self._agreed()

    async def _advise(self) -> None:
        advised: Agreement | None = None
        while True:
            await self._news.wait()
            self._news.clear()
            await asyncio.sleep(QUIET_S)
            agreement = self.agreement
            if agreement is not None and agreement != advised and not self._news.is_set():
                self.advice, advised = await self._off_loop(advise, agreement), agreement
