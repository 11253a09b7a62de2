"""The one thread that computes.

All nodes of a process share one worker: two pools of OpenMP threads on the same cores stall each
other at every barrier, and the nodes of one machine have one memory bus anyway. With one core for
each node they may have a worker each.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar
from weakref import ref

import torch

HANG_S = 300.0  # s that a step or a chunk of a prompt may take; the first may compile kernels
LOAD_HANG_S = 3600.0  # s that anything else may take: 100 GB from a slow disk take half of it
HANG_TIMES = 10  # of the longest so far, where that is more
TRIALS = 20  # matrices; long enough to meet another program's time slice, a few ms

P = ParamSpec("P")
T = TypeVar("T")


def as_exception(error: BaseException) -> Exception:
    """Return an error that a supervisor catches: a panic of Rust code (tokenizers) is none."""
    if isinstance(error, Exception):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


class Worker:
    """Runs functions one after the other, off the event loop, in the order they were given."""

    def __init__(self, executor: Executor, cores: int = 1) -> None:
        self.cores = cores
        """What torch would use by itself."""
        self._executor = executor
        self._latest: Callable[[], Future[Any] | None] = lambda: None
        self._asked = 0.0  # when a function was, or was seen at work; in the time of the event loop
        self._spare = asyncio.Lock()
        self._at_work: tuple[float, float] | None = None  # since when, and until when it is usual
        self._longest_s: dict[float, float] = {}  # by the least limit

    def start(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Let a function run that tells by itself what became of it, exceptions included."""
        return self._submit(HANG_S, function, *args)

    def _submit(self, hang_s: float, function: Callable[..., T], *args: Any) -> Future[T]:
        self._asked = asyncio.get_running_loop().time()
        future = self._executor.submit(self._timed, hang_s, function, *args)
        self._latest = ref(future)  # what it gave may be the weights of a model, and let go
        return future

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Wait for the result of a function.

        If cancelled, the function still runs to its end when it has begun.
        """
        work = partial(function, *args, **kwargs)
        return await asyncio.wrap_future(self._submit(LOAD_HANG_S, work))

    @property
    def hung_s(self) -> float:
        """Since when the function at work hangs, in seconds; 0 while it takes a usual time.

        What is usual follows what functions took before. No thread can be made to stop.
        """
        at_work = self._at_work
        if at_work is None or time.monotonic() < at_work[1]:
            return 0.0
        return time.monotonic() - at_work[0]

    def _timed(self, hang_s: float, function: Callable[..., T], *args: Any) -> T:
        begin, longest_s = time.monotonic(), self._longest_s.get(hang_s, 0.0)
        self._at_work = begin, begin + max(hang_s, HANG_TIMES * longest_s)
        try:
            return function(*args)
        except Exception:
            raise
        except BaseException as error:
            raise as_exception(error) from error
        finally:
            self._at_work = None
            self._longest_s[hang_s] = max(longest_s, time.monotonic() - begin)

    async def spare(self, quiet_s: float, function: Callable[..., T], *args: Any) -> T:
        """Wait for the result of a function that nobody waits for.

        It runs when nothing else did for ``quiet_s`` seconds; one such function at a time.
        """
        loop = asyncio.get_running_loop()
        async with self._spare:
            while (left := self._busy_until(loop.time()) + quiet_s - loop.time()) > 0:  # noqa: ASYNC110
                await asyncio.sleep(left)
            return await loop.run_in_executor(
                self._executor, self._timed, LOAD_HANG_S, function, *args
            )

    def _busy_until(self, now: float) -> float:
        """Say when something ran last, as far as that was seen."""
        if (latest := self._latest()) and not latest.done():
            self._asked = now
        return self._asked


@asynccontextmanager
async def compute_thread(threads: int = 1) -> AsyncIterator[Worker]:
    """Start the compute thread; ``threads`` is the number of cores torch may use in it, at first.

    Leaving waits for what runs, off the event loop, and drops what has not begun.
    """

    def begin() -> None:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)

    executor = ThreadPoolExecutor(1, thread_name_prefix="compute", initializer=begin)
    before = torch.get_num_threads()  # what a thread sets, torch gives to threads to come
    try:
        yield Worker(executor, before)
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(executor.shutdown)
        torch.set_num_threads(before)


def calibrate(cores: int, width: int, dtype: torch.dtype) -> int:
    """Choose between one core and ``cores`` for layers of this width, and return how many.

    Threads meet at a barrier after every matrix: where another program has one of the cores, all
    of them wait for it, and a token takes ten times as long. Run on the compute thread.
    """
    weight, row = torch.ones(4 * width, width, dtype=dtype), torch.ones(1, width, dtype=dtype)

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        row @ weight.T
        begin = time.perf_counter()
        for _ in range(TRIALS):
            row @ weight.T
        return time.perf_counter() - begin

    best = min({1, cores}, key=lambda threads: min(seconds(threads) for _ in range(3)))
    torch.set_num_threads(best)
    return best
