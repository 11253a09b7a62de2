"""Jobs of several sessions that are done together.

A job that comes while the compute thread is busy waits with the others, and one turn takes all of
them: what a step costs is reading the weights, which is then done once for all.

Who waits for a job is called, not woken: between two steps a core has rested, and all that runs
then is as slow as memory. A future, a task and two more rounds of the event loop would be a tenth
of a hop.
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
"""Does jobs; yields what became of each, a value or an exception, once for each phase."""
Tell = Callable[[Any], None]
"""Hears of a value or an exception, on the event loop."""


def _nobody(_: Any) -> None:
    """Hear of a phase that a job does not have, and another one of the turn does."""


class Batch(Generic[Job]):
    """Runs jobs in turns on the compute thread, and tells of them until it is left."""

    def __init__(self, worker: Worker, run: Run[Job], jobs: asyncio.TaskGroup) -> None:
        """Run jobs; who fails at hearing of one ends the group ``jobs`` with that error."""
        self._worker = worker
        self._run = run
        self._jobs = jobs
        self._lock = Lock()
        self._waiting: list[tuple[Job, Sequence[Tell]]] = []
        self._is_left = False
        self._last: Future[object] | None = None  # that was given to the worker

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Tell nobody any more; unless something failed, wait until nothing runs."""
        self._is_left = True
        if kind is None and self._last is not None and not self._last.done():
            await self._worker.run(int)  # behind it

    def submit(self, job: Job, *tells: Tell) -> None:
        """Add a job to the next turn; each of ``tells`` hears what became of one phase of it.

        There are as many phases as any job of the turn has tells.
        """
        if self._is_left:
            return
        with self._lock:
            is_first = not self._waiting
            self._waiting.append((job, tells))
        if is_first:
            self._last = self._worker.start(self._turn, asyncio.get_running_loop())

    def alone(self, function: Callable[[], Any], *tells: Tell) -> None:
        """Give a function a turn of its own, behind all that was submitted before."""
        if not self._is_left:
            loop = asyncio.get_running_loop()
            self._last = self._worker.start(self._alone, loop, function, tells)

    def _alone(
        self, loop: asyncio.AbstractEventLoop, function: Callable[[], Any], tells: Sequence[Tell]
    ) -> None:
        loop.call_soon_threadsafe(self._tell, tells, [attempt(function)] * len(tells))

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Do all that waits; runs on the compute thread."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        phases = list(zip_longest(*(tells for _, tells in waiting), fillvalue=_nobody))
        told = 0
        try:
            for tells, results in zip(phases, self._run([job for job, _ in waiting]), strict=True):
                loop.call_soon_threadsafe(self._tell, tells, results)
                told += 1
        except BaseException as error:  # of no job in particular: all of them end with it
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
    """Return what a function returns, or the exception that it raises: the end of one job only."""
    try:
        return function(*args)
    except BaseException as error:  # the session of the job gets it, panics of Rust code too
        return as_exception(error)


def through(run: Callable[[list[Any]], Sequence[Any]], values: Sequence[Any]) -> list[Any]:
    """Let the values through ``run`` together, but for None and exceptions, which stay."""
    good = [value is not None and not isinstance(value, Exception) for value in values]
    given = [value for value, is_good in zip(values, good, strict=True) if is_good]
    results = iter(run(given) if given else ())
    return [
        next(results) if is_good else value for value, is_good in zip(values, good, strict=True)
    ]


async def _raise(error: Exception) -> None:
    raise error
