"""An event loop with a virtual clock that jumps to the next timer.

A simulation of a slow network then runs as fast as the CPU allows, and deterministically. The
clock advances only when nothing else can happen: no callback is ready, and no function given to
`run_in_executor` or to the compute thread is running, so work in a thread takes no virtual time.
The order in which two threads finish is not deterministic; `InlineExecutor` makes it so. Bytes in
flight between real sockets do not hold the clock: every timeout would fire before they arrive.
"""

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar, TypeVarTuple
from unittest.mock import patch

from meshllm.node.compute import worker

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

STALL_S = 60.0  # s of real time to wait for a callback of a thread unknown to the loop


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a virtual clock that starts at 0.

    Raises:
        RuntimeError: deadlock, every task waits and nothing can wake one.
    """
    pool = patch.object(worker, "ThreadPoolExecutor", _HoldingPool)
    with pool, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class InlineExecutor(Executor):
    """Runs each function immediately in the calling thread: one order, no concurrency."""

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run the function; return its result as a finished future."""
        future: Future[T] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # as in every executor: raised by `Future.result`
            future.set_exception(error)
        return future


class _HoldingPool(ThreadPoolExecutor):
    """The executor of the compute thread; virtual time is held while it runs a function.

    Also for a function whose future was cancelled, or that reports by a callback.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._loop = loop

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        loop = self._loop
        self._hold()
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    result = function(*args, **kwargs)
                except BaseException as error:  # as in every executor: raised by `Future.result`
                    future.set_exception(error)
                else:
                    future.set_result(result)

        def ended(running: Future[None]) -> None:
            if running.cancelled():  # by `shutdown`, before it began
                future.cancel()
            # After all callbacks of the future: one of them tells the loop about the result.
            loop.call_soon_threadsafe(loop.release)

        try:
            running = super().submit(run)
        except RuntimeError:  # it was shut down
            loop.call_soon_threadsafe(loop.release)
            raise
        running.add_done_callback(ended)
        return future

    def _hold(self) -> None:
        if threading.current_thread() in self._threads:  # what runs here holds the clock until then
            self._loop.call_soon_threadsafe(self._loop.hold)
        else:
            self._loop.hold()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a virtual clock, in seconds from 0."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        """Return the virtual time."""
        return self._clock.now

    def run_in_executor(
        self,
        executor: Executor | None,
        func: Callable[[*Ts], T],
        *args: *Ts,
    ) -> asyncio.Future[T]:
        """Run the function in a thread; hold the clock until it ends or is cancelled."""
        future = super().run_in_executor(executor, func, *args)
        self.hold()
        future.add_done_callback(self.release)
        return future

    def suspend(self, seconds: float) -> None:
        """Let time pass as if the process was suspended: what is due in it happens late."""
        self._clock.now += seconds

    def hold(self) -> None:
        """Hold the clock until `release`; calls nest."""
        self._clock.held += 1

    def release(self, _: object = None) -> None:
        """Undo one `hold`."""
        self._clock.held -= 1

    async def shutdown_default_executor(self, *timeout: float) -> None:
        """Wait for its threads; the timeout of Python 3.12 is on the clock, which is held."""
        self.hold()
        await super().shutdown_default_executor(*timeout)
        self.release()


class _Clock(selectors.DefaultSelector):
    """A selector that advances the virtual time instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.held = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.held:
            return super().select(0 if timeout == 0 else None)
        events = super().select(STALL_S if timeout is None else 0)
        if events or timeout == 0:
            return events
        if timeout is None:
            raise RuntimeError("deadlock: every task waits, and nothing can wake one")
        self.now += timeout
        return events
