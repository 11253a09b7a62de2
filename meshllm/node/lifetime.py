"""The lifetime of a node: its parts and callbacks, and the error that ends it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import copy_context
from typing import TypeVarTuple

from meshllm.errors import MeshError

Ts = TypeVarTuple("Ts")


class Lifetime:
    """Owns the background tasks and the timers of a node; create it in its supervisor's scope."""

    def __init__(self) -> None:
        self.stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the node is to end: with the error that ended it, or without one."""
        self._tasks = asyncio.TaskGroup()
        self._context = copy_context()  # of the supervisor, for callbacks from other contexts
        self._is_ending = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Let tasks and callbacks run inside the context; wait for the tasks at its end."""
        async with self._tasks:
            try:
                yield
            finally:
                self._is_ending = True

    def spawn(self, part: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Run a part in the background; a `MeshError` in it stops the node with that error."""
        return self._tasks.create_task(self._guarded(part))

    @property
    def is_stopped(self) -> bool:
        """Whether the node is to end, or ends already."""
        return self._is_ending or self.stopped.done()

    def call_later(self, delay_s: float, callback: Callable[[*Ts], None], *args: *Ts) -> None:
        """Schedule a callback, unless the node ends before; an error in it ends the node."""

        def call() -> None:
            if not self._is_ending:
                callback(*args)

        asyncio.get_running_loop().call_later(delay_s, call, context=self._context)

    def stop(self, error: BaseException | None = None) -> None:
        """Let the node end, unless it does so already."""
        if self.stopped.done():
            return
        if error is None:
            self.stopped.set_result(None)
        else:
            self.stopped.set_exception(error)

    def ended(self, running: asyncio.Future[None]) -> None:
        """Pass a bug that ended the node on to `stopped`."""
        if not running.cancelled() and (error := running.exception()):
            self.stop(error)

    async def _guarded(self, part: Callable[[], Awaitable[None]]) -> None:
        try:
            await part()
        except MeshError as error:
            self.stop(error)
