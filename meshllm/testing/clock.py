"""An event loop whose time jumps to the next timer.

A simulation of a slow network then runs as fast as it computes, and the same each time. Time moves
only when nothing else can happen: no callback is ready, and no function given to `run_in_executor`
or to the compute thread is still running, so work in a thread takes no virtual time. Which of two
threads ends first is still the machine's choice; `InlineExecutor` takes that choice away. Bytes
under way between real sockets are not seen: they would be overtaken by every timeout.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar, TypeVarTuple
from unittest.mock import patch

from meshllm.node.compute import worker

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

STALL_S = 2.0  # s; a thread of its own that calls back is given so long, in real time


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a clock that starts at 0 and never waits.

    Raises:
        RuntimeError: every task waits, and nothing is left that could wake one.
    """
    pool = patch.object(worker, "ThreadPoolExecutor", _HoldingPool)
    with pool, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class InlineExecutor(Executor):
    """Runs each function at once in the thread that asks: one order, no concurrency."""

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run the function and return its outcome."""
        future: Future[T] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # as every executor: it belongs to whoever asks for it
            future.set_exception(error)
        return future


class _HoldingPool(ThreadPoolExecutor):
    """The compute thread, whose work takes no virtual time: it stands still until that ends.

    Also where nobody waits for it any more, or hears of it by other ways than a future.
    """

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.hold()
        future = super().submit(function, *args, **kwargs)
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.release))
        return future


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a time of its own, in seconds from 0."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        """Tell the virtual time."""
        return self._clock.now

    def run_in_executor(
        self,
        executor: Executor | None,
        func: Callable[[*Ts], T],
        *args: *Ts,
    ) -> asyncio.Future[T]:
        """Run the function in a thread; time stands still until it ends or is cancelled."""
        future = super().run_in_executor(executor, func, *args)
        self.hold()
        future.add_done_callback(self.release)
        return future

    def hold(self) -> None:
        """Let time stand still until `release`, as often as this was called."""
        self._clock.held += 1

    def release(self, _: object = None) -> None:
        """Let time go on."""
        self._clock.held -= 1

    async def shutdown_default_executor(self, *timeout: float) -> None:
        """Wait until its threads have ended; since Python 3.12 with a timeout, which must wait."""
        self.hold()
        await super().shutdown_default_executor(*timeout)
        self.release()


class _Clock(selectors.DefaultSelector):
    """Where an event loop waits: instead of waiting, time moves on."""

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
            raise RuntimeError("every task waits, and nothing is left that could wake one")
        self.now += timeout
        return events
