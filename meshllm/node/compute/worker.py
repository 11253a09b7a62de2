"""The compute thread.

All nodes of a process share one worker: two pools of OpenMP threads on the same cores stall each
other at every barrier, and the nodes of one machine share its memory bus anyway. With one core per
node they may have a worker each.

What takes long, such as loading a further model, pauses between its parts: the steps that wait then
run in the middle of it, see `pauses`. Steps stay in order; nothing else runs in a pause.

Loading and requests leave memory of the heap that is free, cycles that nothing uses, and code of
libraries that ran once. All of it is returned to the system once the thread is idle.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, ParamSpec, TypeVar
from weakref import ref

import torch

from meshllm.model.device import default_threads
from meshllm.model.kernels.jit import jit_available
from meshllm.model.pauses import pausing
from meshllm.model.shape import reclaim
from meshllm.model.split.onemkl import warm_up_onemkl
from meshllm.node.compute.warm_up_budget import WarmUpBudget
from meshllm.node.timer import loop_time
from meshllm.protocol.ring.hang import HangLimits

SHORT_HANG_S = 60.0  # s; limit of what sessions run, unless `expected` says more exactly
LOAD_HANG_S = 3600.0  # s; limit of anything else: loading 100 GB from a slow disk takes half of it
WATCH_S = 1.0  # s between two looks at the running function,
WATCH_LEAST_S = 0.05  # or less, if it reaches its limit before
LATE_S = 0.5  # s by which a look is late only if this process was stopped, not if it is busy
REST_S = 5.0
"""s without computation before unused memory is returned to the system."""
SHORTEST_S = 0.001  # s of a wait; a shorter one may end, by rounding, before its time
TRIAL_BYTES = 64 << 20  # of the matrix of `calibrate`
TRIAL_ROUNDS = 3  # in each of which all numbers of threads have a trial
PRODUCTS = 20  # of a trial at most
TRIALS_S = 0.25  # s of all trials; of wide layers one takes longer than a time slice, a few ms
NEAR_BEST = 1.05  # times the shortest time, up to which more threads are chosen

P = ParamSpec("P")
T = TypeVar("T")


def as_exception(error: BaseException) -> Exception:
    """Return an error as an `Exception`, which a panic of Rust code (tokenizers) is not."""
    if isinstance(error, Exception):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class _Step:
    """What was submitted by `start`, and waits."""

    work: Callable[[], Any]
    outcome: Future[Any]

    def cancel(self, turn: Future[None]) -> None:
        """Cancel it if its turn will not come; it may have run in a pause."""
        if turn.cancelled():
            self.outcome.cancel()


class Worker:
    """Runs functions one at a time, off the event loop, in the order of submission.

    Only steps may run earlier, in a pause of something long.
    """

    def __init__(self, executor: Executor, cores: int = 1) -> None:
        self.cores = cores
        """Threads that torch uses at most, unless a number is configured."""
        self.warm_up_budget = WarmUpBudget(cores)
        """Of the warm-ups of all rings."""
        self._executor = executor
        self._steps = deque[_Step]()
        self._latest: Callable[[], Future[Any] | None] = lambda: None
        self._last_used = 0.0  # loop time when a function was last submitted or running
        self._idle_lock = asyncio.Lock()
        self._has_worked = asyncio.Event()  # since memory was reclaimed
        self._running: tuple[float, float] | None = None  # start and limit of the running function
        self._excused = 0.0, 0.0  # the start of a function, and seconds to add to its limit
        self._wakes_at = inf  # when `sleep` returns; later if this process is stopped

    def start(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Submit a step: a function that reports its outcome by itself, exceptions included."""
        self.note_use()
        return self.follow(function, *args)

    def follow(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Submit a step that follows another one; the compute thread may do so, too."""
        step = _Step(partial(function, *args), Future())
        self._steps.append(step)
        self._latest = ref(step.outcome)
        self._executor.submit(self._run_step).add_done_callback(step.cancel)
        return step.outcome

    async def run_step(self, function: Callable[..., T], *args: Any) -> T:
        """Wait for the result of a step, such as what a request needs before it is computed."""
        return await asyncio.wrap_future(self.start(function, *args))

    def _run_step(self) -> None:
        """Run the step that has waited longest, unless all have run in pauses."""
        if not self._steps:
            return
        step = self._steps.popleft()
        if not step.outcome.set_running_or_notify_cancel():
            return
        try:
            result = self._timed(SHORT_HANG_S, step.work)
        except Exception as error:  # handed to the caller
            step.outcome.set_exception(error)
        else:
            step.outcome.set_result(result)

    def _pause(self) -> None:
        """Run the steps that wait now in the middle of the running function."""
        running, begin = self._running, self._now()
        for _ in range(2 * len(self._steps)):  # of a ring, those of a batch and of a chunk
            self._run_step()
        if running:
            self._running = running[0], running[1] + self._now() - begin

    def _pausable(self, function: Callable[..., T], *args: Any) -> T:
        with pausing(self._pause):
            return self._timed(LOAD_HANG_S, function, *args)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Wait for the result of a function.

        If cancelled, a function that has begun still runs to its end.
        """
        work = partial(function, *args, **kwargs)
        self.note_use()
        future = self._executor.submit(self._pausable, work)
        self._latest = ref(future)  # weak: its result may be model weights
        result = await asyncio.wrap_future(future)
        self.note_use()  # `_latest` may be a step that ran, and ended, in a pause of it
        return result

    @contextmanager
    def expected(
        self, limits: HangLimits, rows: int, before: int, *, is_step: bool
    ) -> Iterator[None]:
        """Limit the running function by the rows that it computes; used on the compute thread."""
        begin = self._now()
        self._running = begin, begin + limits.begin(rows, before, is_step=is_step)
        yield
        took_s = self._now() - begin - self._stopped_s(begin)
        limits.ended(rows, before, max(0.0, took_s), is_step=is_step)

    @property
    def hung_s(self) -> float:
        """How long the running function has run, if that exceeds its limit; 0 otherwise.

        A thread cannot be stopped.
        """
        running, left_s = self._running, self.hangs_in_s
        is_late = running is not None and left_s is not None and left_s <= 0
        return self._now() - running[0] if running and is_late else 0.0

    @property
    def hangs_in_s(self) -> float | None:
        """Seconds until the running function exceeds its limit; None if none runs."""
        if (running := self._running) is None:
            return None
        return running[1] + self._excused_s(running[0]) - self._now()

    async def sleep(self) -> None:
        """Sleep for `WATCH_S`, or until the running function reaches its limit.

        If that takes longer, the limit is later by that time. If it takes much longer, this process
        was stopped: then also by what the function may not have had of the sleep before. Where the
        event loop is always a little late, as much as it sleeps, a hang is still noticed.
        """
        hangs_in_s = self.hangs_in_s
        sleep_s = WATCH_S if hangs_in_s is None else min(WATCH_S, max(WATCH_LEAST_S, hangs_in_s))
        self._wakes_at = until = self._now() + sleep_s
        try:
            await asyncio.sleep(sleep_s)
            late_s = max(0.0, self._now() - until)
            self.extend_for_suspension(late_s + (min(late_s, sleep_s) if late_s > LATE_S else 0.0))
        finally:
            self._wakes_at = inf

    def allow(self, seconds: float) -> None:
        """Extend the limit of the running function by that of more work; on the compute thread."""
        if running := self._running:
            self._running = running[0], running[1] + seconds

    def extend_for_suspension(self, seconds: float) -> None:
        """Extend the limit of the running function by a time in which this process was stopped."""
        if running := self._running:
            self._excused = running[0], seconds + self._excused_s(running[0])

    def _excused_s(self, begin: float) -> float:
        """Return by how much the limit of a function was extended."""
        excused, seconds = self._excused
        return seconds if excused == begin else 0.0

    def _stopped_s(self, begin: float) -> float:
        """Return for how long this process was stopped since a function began, noticed or not."""
        unnoticed_s = max(0.0, self._now() - self._wakes_at)
        return unnoticed_s + self._excused_s(begin)

    def _timed(self, hang_s: float, function: Callable[..., T], *args: Any) -> T:
        begin = self._now()
        self._running = begin, begin + hang_s
        try:
            return function(*args)
        except BaseException as error:  # goes to the caller: an `Exception` as it is
            if (known := as_exception(error)) is error:
                raise
            raise known from error
        finally:
            self._running = None

    async def run_when_idle(self, idle_s: float, function: Callable[..., T], *args: Any) -> T:
        """Wait for the result of a low-priority function.

        It runs after ``idle_s`` seconds in which nothing else ran; one such function at a time.
        """
        loop = asyncio.get_running_loop()
        async with self._idle_lock:
            await self._until_idle(idle_s)
            return await loop.run_in_executor(self._executor, self._pausable, function, *args)

    async def reclaim_after_work(self) -> None:
        """Return unused memory to the system whenever nothing has run for `REST_S` after work.

        Low-priority functions do not count as work, see `reclaim_later`.
        """
        while True:
            await self._has_worked.wait()
            await self._until_idle(REST_S)
            self._has_worked.clear()
            await self.run_when_idle(0, reclaim)

    def reclaim_later(self) -> None:
        """Return unused memory to the system once idle, as after work."""
        self._has_worked.set()

    async def _until_idle(self, idle_s: float) -> None:
        while (left := self._last_busy(loop_time()) + idle_s - loop_time()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(max(left, SHORTEST_S))

    def note_use(self) -> None:
        """Note that this thread is not idle."""
        self._last_used = loop_time()
        self._has_worked.set()

    @staticmethod
    def _now() -> float:
        return time.monotonic()

    def _last_busy(self, now: float) -> float:
        """Return when something was last seen running, in loop time."""
        if (latest := self._latest()) and not latest.done():
            self._last_used = now
        return self._last_used


@asynccontextmanager
async def compute_thread(threads: int = 1) -> AsyncIterator[Worker]:
    """Start the compute thread; ``threads`` is the initial number of cores that torch uses in it.

    On exit, wait for the running function, off the event loop, and drop those not yet begun.
    """

    def begin() -> None:
        jit_available()  # else torch must not compile kernels, either
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        warm_up_onemkl()

    executor = ThreadPoolExecutor(1, thread_name_prefix="compute", initializer=begin)
    before = torch.get_num_threads()  # torch applies what a thread sets to later threads
    worker = Worker(executor, default_threads())
    reclaiming = asyncio.create_task(worker.reclaim_after_work())
    reclaiming.add_done_callback(_raise_error)
    try:
        yield worker
    finally:
        reclaiming.cancel()
        executor.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(executor.shutdown)
        await asyncio.wait([reclaiming])
        torch.set_num_threads(before)


def _raise_error(task: asyncio.Task[None]) -> None:
    """Report a bug to the event loop, where it ends the node, see `Supervisor`."""
    if not task.cancelled():
        task.result()


def calibrate(cores: int, width: int, dtype: torch.dtype) -> int:
    """Choose from `thread_counts` for layers of this width, and return the number.

    Threads meet at a barrier after every matrix: if another program uses one of the cores, all of
    them wait for it, and a token takes ten times as long. Whether one does is what this measures,
    so it is measured at every start, and never stored. Run on the compute thread.
    """
    rows = min(4 * width, TRIAL_BYTES // (width * dtype.itemsize))
    weight, row = torch.ones(rows, width, dtype=dtype), torch.ones(1, width, dtype=dtype)
    counts = thread_counts(cores)
    trial_s = TRIALS_S / (TRIAL_ROUNDS * len(counts))

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        row @ weight.T  # starts or ends threads
        begin, took_s, products = time.perf_counter(), 0.0, 0
        while products < PRODUCTS and took_s < trial_s:
            row @ weight.T
            took_s, products = time.perf_counter() - begin, products + 1
        return took_s / products

    rounds = [{threads: seconds(threads) for threads in counts} for _ in range(TRIAL_ROUNDS)]
    best = choose_threads(rounds)
    torch.set_num_threads(best)
    return best


def thread_counts(cores: int) -> list[int]:
    """Return the numbers of threads to try: the powers of two below ``cores``, and all cores."""
    return [*(1 << power for power in range((cores - 1).bit_length())), cores]


def choose_threads(rounds: Sequence[Mapping[int, float]]) -> int:
    """Return the most threads that are about as fast as any number of them, and faster than one.

    Each round has seconds by number of threads, of which the shortest count. A few threads may
    saturate the memory that a row is read from, while a prompt is bound by arithmetic. Several are
    slower than one if other programs use the cores, or if the matrix is too small for them.
    """
    shortest_s = {threads: min(each[threads] for each in rounds) for threads in rounds[0]}
    most_s = NEAR_BEST * min(shortest_s.values())
    able = (threads for threads, seconds in shortest_s.items() if seconds <= most_s)
    return max(threads for threads in able if threads == 1 or shortest_s[threads] < shortest_s[1])
