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
Callback = Callable[[Any], None]
"""Takes a value or an exception, on the event loop."""


def _ignore(_: Any) -> None:
    """Ignore a phase that this job lacks and another one of the batch has."""


class Batcher(Generic[Job]):
    """Runs jobs in batches on the compute thread, and reports their results until it is closed."""

    def __init__(self, worker: Worker, run: Run[Job], jobs: asyncio.TaskGroup) -> None:
        """Run jobs; a callback that raises ends the group ``jobs`` with its error."""
        self._worker = worker
        self._run = run
        self._jobs = jobs
        self._lock = Lock()
        self._batch: list[tuple[Job, Sequence[Callback]]] = []  # the next one
        self._is_closed = False
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
        self._is_closed = True
        if kind is None and self._last is not None and not self._last.done():
            await self._worker.run(int)  # runs after it

    def submit(self, job: Job, *callbacks: Callback) -> None:
        """Add a job to the next batch; each of ``callbacks`` takes the result of one of its phases.

        A batch has as many phases as any of its jobs has callbacks.
        """
        if self._is_closed:
            return
        with self._lock:
            batch = self._batch
            batch.append((job, callbacks))
        if len(batch) == 1:
            self._last = self._worker.start(self._run_batch, asyncio.get_running_loop(), batch)

    def submit_between(self, function: Callable[[], Any]) -> None:
        """Run a function after all that was submitted before, and before all that follows."""
        with self._lock:
            self._batch = []  # what follows must not join a batch that runs earlier
        self.submit_alone(function)

    def submit_alone(self, function: Callable[[], Any], *callbacks: Callback) -> None:
        """Run a function by itself, after all that was submitted before.

        Jobs that are submitted later may still join a batch that waits before it.
        """
        if not self._is_closed:
            loop = asyncio.get_running_loop()
            self._last = self._worker.start(self._run_alone, loop, function, callbacks)

    def _run_alone(
        self,
        loop: asyncio.AbstractEventLoop,
        function: Callable[[], Any],
        callbacks: Sequence[Callback],
    ) -> None:
        loop.call_soon_threadsafe(self._report, callbacks, [attempt(function)] * len(callbacks))

    def _run_batch(
        self, loop: asyncio.AbstractEventLoop, batch: Sequence[tuple[Job, Sequence[Callback]]]
    ) -> None:
        """Run all jobs of a batch; runs on the compute thread."""
        with self._lock:
            if batch is self._batch:
                self._batch = []
        phases = list(zip_longest(*(callbacks for _, callbacks in batch), fillvalue=_ignore))
        jobs, reported = [job for job, _ in batch], 0
        try:
            for callbacks, results in zip(phases, self._run(jobs), strict=True):
                loop.call_soon_threadsafe(self._report, callbacks, results)
                reported += 1
        except BaseException as error:  # not of a single job: it ends all of them
            errors = [as_exception(error)] * len(jobs)
            for callbacks in phases[reported:]:
                loop.call_soon_threadsafe(self._report, callbacks, errors)

    def _report(self, callbacks: Sequence[Callback], results: Sequence[Any]) -> None:
        for callback, result in zip(callbacks, results, strict=True):
            if not self._is_closed:
                try:
                    callback(result)
                except Exception as error:  # a bug, for the supervisor of all sessions
                    self._is_closed = True
                    self._jobs.create_task(_raise(error))


def attempt(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a function, or the exception it raises, which ends one job only."""
    try:
        return function(*args)
    except BaseException as error:  # for the session of the job; includes Rust panics
        return as_exception(error)


def map_valid(run: Callable[[list[Any]], Sequence[Any]], values: Sequence[Any]) -> list[Any]:
    """Apply ``run`` to all values in one call, except None and exceptions, which stay."""
    good = [value is not None and not isinstance(value, Exception) for value in values]
    given = [value for value, is_good in zip(values, good, strict=True) if is_good]
    results = iter(run(given) if given else ())
    return [
        next(results) if is_good else value for value, is_good in zip(values, good, strict=True)
    ]


async def _raise(error: Exception) -> None:
    raise error
