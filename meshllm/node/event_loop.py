"""The event loop of a node: after a suspension it reads its sockets before overdue timers fire.

After a stop of the process (Ctrl-Z, SIGSTOP, a suspended virtual machine), `asyncio` calls the
timers that are overdue before it reads what its sockets received meanwhile, and peers or clients
that sent in time would be dropped: the call that waits for sockets is interrupted, and returns
nothing once its time has passed. This loop looks at its sockets again.

A timeout of a task, see `asyncio.timeout`, still wins over what its task awaits;
`awake_timeout` does not.
"""

import asyncio
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

LATE_S = 1.0  # s by which a timer is late only if this process was stopped, or hung

T = TypeVar("T")


class OffLoop(Protocol):
    """Runs blocking work in a thread, as `asyncio.to_thread`; a simulation may replace it."""

    def __call__(self, function: Callable[..., T], /, *args: Any) -> Awaitable[T]:
        """Return an awaitable of the result; if cancelled, the function still runs to its end."""
        ...


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `asyncio.run` does."""
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        return runner.run(main)


@asynccontextmanager
async def awake_timeout(seconds: float) -> AsyncIterator[None]:
    """Raise `TimeoutError` after a time in which this process was not stopped.

    After a stop the time begins again, so that what somebody else sent meanwhile is read.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def fire(due: float) -> None:
        if loop.time() > due + LATE_S:
            arm()
        else:
            limit.reschedule(loop.time())

    def arm() -> None:
        nonlocal timer
        due = loop.time() + seconds
        timer = loop.call_at(due, fire, due)

    async with asyncio.timeout(None) as limit:
        arm()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()


def _new_loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(_LookingTwice())


class _LookingTwice(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(timeout) or (super().select(0) if timeout else [])
