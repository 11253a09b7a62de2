"""Continuous batching and chunked prefill: steps of several sessions, in turn with other jobs.

Steps submitted while the compute thread is busy wait, and the next batch takes all of them: the
cost of a step is reading the weights, which the steps of a batch share. Chunks of prompts run one
by one, those of the prompt with the fewest rows left first: prompts that took turns would all end
late. The oldest chunk is overtaken `MAX_OVERTAKEN` times at most, so that short prompts do not
starve a long one. While both wait they take turns, one batch and one chunk, so that a running
session waits for one chunk at most, and a prompt for one batch per chunk. The jobs of one session
stay in order.

Results are passed to callbacks, not to futures: a core idles between two steps, so all code that
runs then is as slow as memory. A future, a task and two more rounds of the event loop would cost a
tenth of a hop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count, zip_longest
from threading import Lock
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from meshllm.errors import MeshError
from meshllm.names import SessionId
from meshllm.node.compute.worker import Worker, as_exception

logger = logging.getLogger(__name__)

MAX_OVERTAKEN = 3
"""Chunks of shorter prompts that run before the oldest one."""

Job = TypeVar("Job")
Run = Callable[[Sequence[Job]], Iterator[Sequence[Any]]]
"""Runs jobs; yields the result of each, a value or an exception, once per phase."""
Callback = Callable[[Any], None]
"""Takes a value or an exception, on the event loop."""


def _ignore(_: Any) -> None:
    """Ignore a phase that this job lacks and another one of the batch has."""


def _expect(result: Any) -> None:
    """Raise what should not have been raised."""
    if isinstance(result, Exception):
        raise result


@dataclass(frozen=True, slots=True)
class _BatchedJob(Generic[Job]):
    number: int
    session: SessionId
    job: Job
    callbacks: Sequence[Callback]


@dataclass(frozen=True, slots=True)
class _LoneJob:
    number: int
    session: SessionId
    function: Callable[[], Any]
    callbacks: Sequence[Callback]
    left: int
    """Rows that the prompt of a chunk has left, 0 for other jobs."""
    is_brief: bool


class Batcher(Generic[Job]):
    """Runs jobs on the compute thread, and reports their results until it is closed."""

    def __init__(
        self,
        worker: Worker,
        run: Run[Job],
        jobs: asyncio.TaskGroup,
        together: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Run steps with ``run``; a callback that raises ends the group ``jobs`` with its error.

        The results of a batch are reported inside ``together()``, so that the messages that follow
        are sent in one piece.
        """
        self._together = together
        self._worker = worker
        self._run = run
        self._jobs = jobs
        self._lock = Lock()  # guards the next six attributes
        self._steps: list[_BatchedJob[Job]] = []  # waiting, in order of submission
        self._alone = deque[_LoneJob]()  # waiting jobs that run alone
        self._overtaken = 0  # how often others went before the oldest of these
        self._is_chunk_next = False
        self._is_reporting = False  # whether the result of a chunk is being reported
        self._has_turn = False  # whether a turn waits or runs
        self._numbers = count()
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Forget what waits and is not brief, and report no more results.

        Unless an error is raised, wait until nothing runs.
        """
        self._is_closed = True
        with self._lock:
            self._steps.clear()
            self._alone = deque(each for each in self._alone if each.is_brief)
        while kind is None and self._has_turn:
            await self._worker.run_step(int)  # runs after it, in pauses too

    def submit(self, session: SessionId, job: Job, *callbacks: Callback) -> None:
        """Add a step to the next batch; each of ``callbacks`` takes the result of one phase of it.

        A batch has as many phases as any of its steps has callbacks.
        """
        if self._is_closed:
            return
        step = _BatchedJob(next(self._numbers), session, job, callbacks)
        with self._lock:
            self._steps.append(step)
        self._take_turn()

    def submit_alone(
        self, session: SessionId, function: Callable[[], Any], *callbacks: Callback, left: int = 0
    ) -> None:
        """Run a function by itself, such as a chunk of a prompt, in turn with batches.

        Of several, the one with the fewest rows ``left`` runs first.
        """
        number = next(self._numbers)
        self._submit(_LoneJob(number, session, function, callbacks, left, is_brief=False))

    def submit_brief(self, session: SessionId, function: Callable[[], Any]) -> None:
        """Run a function that takes no time worth a turn; it stays in order with `submit_alone`.

        If it raises, that ends the group of the batcher.
        """
        self._submit(_LoneJob(next(self._numbers), session, function, (_expect,), 0, is_brief=True))

    def withdraw(self, session: SessionId) -> bool:
        """Forget the jobs of a session that have not begun and are not brief.

        Their callbacks are not called. Return whether there were any.
        """
        with self._lock:
            before = len(self._steps) + len(self._alone)
            oldest = self._alone[0] if self._alone else None
            self._steps = [each for each in self._steps if each.session != session]
            self._alone = deque(
                each for each in self._alone if each.session != session or each.is_brief
            )
            if not self._alone or self._alone[0] is not oldest:
                self._overtaken = 0
            return len(self._steps) + len(self._alone) < before

    def _submit(self, alone: _LoneJob) -> None:
        if self._is_closed:
            return
        with self._lock:
            self._alone.append(alone)
        self._take_turn()

    def _take_turn(self) -> None:
        """Take a turn on the compute thread, unless there is one that runs what waits."""
        with self._lock:
            starts = not self._has_turn and self._is_ready
            self._has_turn = self._has_turn or starts
        if starts:
            self._worker.start(self._turn, asyncio.get_running_loop())
        else:
            self._worker.note_use()

    @property
    def _is_ready(self) -> bool:
        """Whether something waits, and not for the report of a chunk; the lock is held."""
        return bool(self._steps or self._alone) and not self._is_reporting

    # On the compute thread.

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the brief jobs that wait, or what is next; take a further turn if more waits."""
        with self._lock:
            brief = sum(each.is_brief for each in self._alone)
        for _ in range(max(1, brief)):
            with self._lock:
                batch, alone = self._next()
            self._run_next(loop, batch, alone)
            if alone is None or not alone.is_brief:
                break
        with self._lock:
            goes_on = self._has_turn = self._is_ready
        if goes_on:
            self._worker.follow(self._turn, loop)

    def _run_next(
        self,
        loop: asyncio.AbstractEventLoop,
        batch: Sequence[_BatchedJob[Job]],
        alone: _LoneJob | None,
    ) -> None:
        if batch:
            self._run_batch(loop, batch)
        elif alone:
            results = [attempt(alone.function)] * len(alone.callbacks)
            report = self._report if alone.is_brief else self._report_results
            loop.call_soon_threadsafe(report, alone.callbacks, results)

    def _next(self) -> tuple[Sequence[_BatchedJob[Job]], _LoneJob | None]:
        """Take what runs next: all steps that may run, or one other job."""
        if not self._alone:
            ready, self._steps, self._is_chunk_next = self._steps, [], True
            return ready, None
        first: dict[SessionId, int] = {}  # of the other jobs of a session
        for each in self._alone:
            first.setdefault(each.session, each.number)
        batch: list[_BatchedJob[Job]] = []
        later: list[_BatchedJob[Job]] = []
        for step in self._steps:
            is_free = step.session not in first or step.number < first[step.session]
            (batch if is_free else later).append(step)
        alone = self._next_alone(first)
        if alone and self._may_precede(alone, batch):
            self._overtaken = 0 if alone is self._alone[0] else self._overtaken + 1
            self._alone.remove(alone)
            if not alone.is_brief:
                self._is_chunk_next, self._is_reporting = False, True
            return (), alone
        self._steps, self._is_chunk_next = later, True
        return batch, None

    def _next_alone(self, first: Mapping[SessionId, int]) -> _LoneJob | None:
        """Return the other job that is next; only the ``first`` of a session can be."""
        if not self._alone or self._overtaken >= MAX_OVERTAKEN:
            return self._alone[0] if self._alone else None
        ready = (alone for alone in self._alone if alone.number == first[alone.session])
        return min(ready, key=lambda alone: (alone.left, alone.number))

    def _may_precede(self, alone: _LoneJob, batch: Sequence[_BatchedJob[Job]]) -> bool:
        """Return whether a job runs before the steps that may run; their sessions' go first."""
        return not batch or (
            (self._is_chunk_next or alone.is_brief)
            and all(step.session != alone.session for step in batch)
        )

    def _run_batch(
        self, loop: asyncio.AbstractEventLoop, batch: Sequence[_BatchedJob[Job]]
    ) -> None:
        callbacks_of = (step.callbacks for step in batch)
        phases = list(zip_longest(*callbacks_of, fillvalue=_ignore))
        jobs, reported = [step.job for step in batch], 0
        try:
            for callbacks, results in zip(phases, self._run(jobs), strict=True):
                loop.call_soon_threadsafe(self._report_batch, callbacks, results)
                reported += 1
        except BaseException as error:  # not of a single job: it ends all of them
            errors = [as_exception(error)] * len(jobs)
            for callbacks in phases[reported:]:
                loop.call_soon_threadsafe(self._report_batch, callbacks, errors)

    # On the event loop.

    def _report_results(self, callbacks: Sequence[Callback], results: Sequence[Any]) -> None:
        """Report what a job that is not brief gave, then take the turn that waited for that."""
        self._report(callbacks, results)
        with self._lock:
            self._is_reporting = False
        if not self._is_closed:
            self._take_turn()

    def _report_batch(self, callbacks: Sequence[Callback], results: Sequence[Any]) -> None:
        with self._together() if len(callbacks) > 1 else nullcontext():
            self._report(callbacks, results)

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


def map_valid(
    run: Callable[[list[Any]], Sequence[Any]],
    values: Sequence[Any],
    reset: Callable[[Any], None] = lambda _: None,
) -> list[Any]:
    """Apply ``run`` to all values in one call, except None and exceptions, which stay.

    If it raises, as when the cache of one session cannot grow, it is applied to each value by
    itself, after ``reset`` has undone what the first call did for it.
    """
    results, places, given = list(values), list[int](), list[Any]()
    for place, value in enumerate(values):
        if value is not None and not isinstance(value, Exception):
            places.append(place)
            given.append(value)
    for place, result in zip(places, _run_all(run, given, reset), strict=True):
        results[place] = result
    return results


def _run_all(
    run: Callable[[list[Any]], Sequence[Any]], values: list[Any], reset: Callable[[Any], None]
) -> Sequence[Any]:
    if len(values) < 2:
        return run(values) if values else ()
    try:
        return run(values)
    except (MeshError, RuntimeError, MemoryError) as error:  # the last two: out of memory
        logger.warning("%d jobs are run one by one: %s", len(values), error)

    def run_one(value: Any) -> Any:
        reset(value)
        (result,) = run([value])
        return result

    return [attempt(run_one, value) for value in values]


async def _raise(error: Exception) -> None:
    raise error
