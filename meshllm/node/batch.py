"""Jobs of several sessions that are done together; knows nothing about what they compute.

A job that comes while the compute thread is busy waits with the others, and one turn takes all of
them: what a step costs is reading the weights, which is then done once for all.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Any, Generic, TypeVar

from meshllm.node.worker import Worker

Job = TypeVar("Job")
Run = Callable[[Sequence[Job]], Iterator[Sequence[Any]]]
"""Does jobs; yields what became of each, a value or an exception, once for each phase."""


class Batch(Generic[Job]):
    """Runs jobs in turns on the compute thread."""

    def __init__(self, worker: Worker, phases: int, run: Run[Job]) -> None:
        self._worker = worker
        self._phases = phases
        self._run = run
        self._lock = Lock()
        self._waiting: list[tuple[Job, list[asyncio.Future[Any]]]] = []

    def submit(self, job: Job) -> list["asyncio.Future[Any]"]:
        """Add a job to the next turn; return a future for each phase of it."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(self._phases)]
        with self._lock:
            is_first = not self._waiting
            self._waiting.append((job, futures))
        if is_first:
            self._worker.start(self._turn, loop)
        return futures

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Do all that waits; runs on the compute thread."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        phases = list(zip(*(futures for _, futures in waiting), strict=True))
        told = 0
        try:
            for futures, results in zip(
                phases, self._run([job for job, _ in waiting]), strict=True
            ):
                loop.call_soon_threadsafe(_tell, futures, results)
                told += 1
        except Exception as error:  # of no job in particular: all of them end with it
            for futures in phases[told:]:
                loop.call_soon_threadsafe(_tell, futures, [error] * len(futures))


def attempt(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns, or the exception that it raises: the end of one job only."""
    try:
        return function(*args)
    except Exception as error:  # whoever waits for the job gets it
        return error


def through(run: Callable[[list[Any]], Sequence[Any]], values: Sequence[Any]) -> list[Any]:
    """Let the values through ``run`` together, but for None and exceptions, which stay."""
    good = [value is not None and not isinstance(value, Exception) for value in values]
    given = [value for value, is_good in zip(values, good, strict=True) if is_good]
    results = iter(run(given) if given else ())
    return [
        next(results) if is_good else value for value, is_good in zip(values, good, strict=True)
    ]


def _tell(futures: Sequence["asyncio.Future[Any]"], results: Sequence[Any]) -> None:
    for future, result in zip(futures, results, strict=True):
        if future.done():  # nobody waits for it any more
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
