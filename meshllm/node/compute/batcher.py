"""Continuous batching: jobs of several sessions run in one pass.

Jobs submitted while the compute thread is busy wait, and the next batch takes all of them: the cost
of a step is reading the weights, which the jobs of a batch share.

Results are passed to callbacks, not to futures: a core idles between two steps, so all code that
runs then is as slow as memory. A future, a task and two more rounds of the event loop would cost a
tenth of a hop.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import zip_longest
from threading import Lock
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from meshllm.node.compute.worker import Worker, as_exception

Job = TypeVar("Job")
Run = Callable[[Sequence[Job]], Iterator[Sequence[Any]]]
"""Runs jobs; yields the result of each, a value or an exception, once per phase."""
Tell = Callable[[Any], None]
"""Takes a value or an exception, on the event loop."""


def _nobody(_: Any) -> None:
    """Ignore a phase that this job lacks and another one of the batch has."""


class Batch(Generic[Job]):
    """Runs jobs in batches on the compute thread, and reports their results until it is closed."""

    def __init__(self, worker: Worker, run: Run[Job], jobs: asyncio.TaskGroup) -> None:
        """Run jobs; a callback that raises ends the group ``jobs`` with its error."""
        self._worker = worker
        self._run = run
        self._jobs = jobs
        self._lock = Lock()
        self._waiting: list[tuple[Job, Sequence[Tell]]] = []
        self._is_left = False
        self._last: Future[object] | None = None  # submitted to the worker

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Report no more results; unless an error is raised, wait until nothing runs."""
        self._is_left = True
        if kind is None and self._last is not None and not self._last.done():
            await self._worker.run(int)  # runs after it

    def submit(self, job: Job, *tells: Tell) -> None:
        """Add a job to the next batch; each of ``tells`` takes the result of one of its phases.

        A batch has as many phases as any of its jobs has callbacks.
        """
        if self._is_left:
            return
        with self._lock:
            is_first = not self._waiting
            self._waiting.append((job, tells))
        if is_first:
            self._last = self._worker.start(self._turn, asyncio.get_running_loop())

    def alone(self, function: Callable[[], Any], *tells: Tell) -> None:
        """Run a function by itself, after all that was submitted before."""
        if not self._is_left:
            loop = asyncio.get_running_loop()
            self._last = self._worker.start(self._alone, loop, function, tells)

    def _alone(
        self, loop: asyncio.AbstractEventLoop, function: Callable[[], Any], tells: Sequence[Tell]
    ) -> None:
        loop.call_soon_threadsafe(self._tell, tells, [attempt(function)] * len(tells))

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run all waiting jobs; runs on the compute thread."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        phases = list(zip_longest(*(tells for _, tells in waiting), fillvalue=_nobody))
        told = 0
        try:
            for tells, results in zip(phases, self._run([job for job, _ in waiting]), strict=True):
                loop.call_soon_threadsafe(self._tell, tells, results)
                told += 1
        except BaseException as error:  # not of a single job: it ends all of them
            for tells in phases[told:]:
                loop.call_soon_threadsafe(self._tell, tells, [as_exception(error)] * len(tells))

    def _tell(self, tells: Sequence[Tell], results: Sequence[Any]) -> None:
        for tell, result in zip(tells, results, strict=True):
            if not self._is_left:
                try:
                    tell(result)
                except Exception as error:  # a bug, for the supervisor of all sessions
                    self._is_left = True
                    self._jobs.create_task(_raise(error))


def attempt(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a function, or the exception it raises, which ends one job only."""
    try:
        return function(*args)
    except BaseException as error:  # for the session of the job; includes Rust panics
        return as_exception(error)


def through(run: Callable[[list[Any]], Sequence[Any]], values: Sequence[Any]) -> list[Any]:
    """Apply ``run`` to all values in one call, except None and exceptions, which stay."""
    good = [value is not None and not isinstance(value, Exception) for value in values]
    given = [value for value, is_good in zip(values, good, strict=True) if is_good]
    results = iter(run(given) if given else ())
    return [
        next(results) if is_good else value for value, is_good in zip(values, good, strict=True)
    ]


async def _raise(error: Exception) -> None:
    raise error
