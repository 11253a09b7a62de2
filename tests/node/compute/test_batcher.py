"""Jobs that wait for the compute thread run in one batch, and each fails alone."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from threading import Event
from typing import Any

import pytest

from meshllm.model.pauses import pause
from meshllm.names import SessionId
from meshllm.node.compute.batcher import Batcher, attempt, map_valid
from meshllm.node.compute.worker import Worker, compute_thread
from tests.builders.waiting import until

LONGEST_S = 120.0  # s that the compute thread waits for a test
ONE, TWO, THREE = (SessionId(name) for name in (b"one", b"two", b"three"))


class Tracer:
    """Doubles numbers in two phases; negative ones fail."""

    def __init__(self, worker: Worker, jobs: asyncio.TaskGroup) -> None:
        self.batches: list[list[int]] = []
        self.batcher = Batcher(worker, self.run, jobs)
        self.fault: Exception | None = None

    def run(self, jobs: Sequence[int]) -> Iterator[Sequence[Any]]:
        self.batches.append(list(jobs))
        yield [attempt(_double, job) for job in jobs]
        if self.fault:
            raise self.fault
        yield [4 * job for job in jobs]

    def submit(self, number: int, session: SessionId = ONE) -> list[asyncio.Future[int]]:
        """Submit a step, and return the results of its phases."""
        told: list[asyncio.Future[int]] = [asyncio.Future(), asyncio.Future()]
        self.batcher.submit(session, number, *(_settling(future) for future in told))
        return told


@asynccontextmanager
async def recording() -> AsyncIterator[tuple[Worker, Tracer]]:
    """Open a running batcher."""
    async with compute_thread() as worker, asyncio.TaskGroup() as jobs:
        tracer = Tracer(worker, jobs)
        async with tracer.batcher:
            yield worker, tracer


def _double(number: int) -> int:
    if number < 0:
        raise ValueError(f"{number} is negative")
    return 2 * number


def _settling(future: asyncio.Future[int]) -> Any:
    def tell(result: int | Exception) -> None:
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    return tell


def busy(worker: Worker) -> Event:
    """Keep the compute thread busy until the event is set."""
    gate = Event()
    worker.start(gate.wait, LONGEST_S)
    return gate


async def test_waiting_jobs_run_in_one_batch() -> None:
    async with recording() as (worker, tracer):
        gate = busy(worker)
        jobs = [tracer.submit(number) for number in range(5)]
        gate.set()

        assert [[await future for future in futures] for futures in jobs] == [
            [2 * number, 4 * number] for number in range(5)
        ]
        await tracer.submit(7)[1]

    assert tracer.batches == [[0, 1, 2, 3, 4], [7]]


async def test_the_results_of_a_batch_are_reported_together_and_lone_ones_at_once() -> None:
    told = list[str]()

    @contextmanager
    def together() -> Iterator[None]:
        told.append("(")
        yield
        told.append(")")

    def run(names: Sequence[str]) -> Iterator[Sequence[str]]:
        yield list(names)

    async with (
        compute_thread() as worker,
        asyncio.TaskGroup() as group,
        Batcher(worker, run, group, together) as batcher,
    ):
        gate = busy(worker)
        for name in "ab":
            batcher.submit(ONE, name, told.append)
        batcher.submit_alone(TWO, lambda: "c", told.append)
        gate.set()
        await until(lambda: len(told) == 5)
        batcher.submit(ONE, "d", told.append)
        await until(lambda: len(told) == 6)

    assert told == ["(", "a", "b", ")", "c", "d"]


@pytest.mark.parametrize("kind", ["step", "chunk"])
async def test_what_waits_takes_one_turn_at_a_time(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Turns that find nothing to run would take longer than the jobs of many sessions."""
    ran = list[int]()
    async with recording() as (worker, tracer):
        gate, turns = busy(worker), list[object]()
        follow = worker.follow

        def counted(*what: Any) -> Future[Any]:
            turns.append(what)
            return follow(*what)

        monkeypatch.setattr(worker, "follow", counted)
        for number in range(32):
            session = SessionId(bytes([number]))
            if kind == "chunk":
                tracer.batcher.submit_alone(session, partial(ran.append, number), _ignore)
            else:
                tracer.batcher.submit(session, number, ran.append)
        assert len(turns) == 1
        gate.set()
        await until(lambda: len(ran) == 32)

    assert len(turns) <= (1 if kind == "step" else 32)


async def order_of(*jobs: tuple[str, SessionId]) -> list[str]:
    """Submit jobs while the thread is busy, and return the order in which they run.

    "step", "chunk" and "change" are kinds; each is told with its place.
    """
    ran: list[str] = []

    def run(names: Sequence[str]) -> Iterator[Sequence[None]]:
        ran.append("+".join(names))
        yield [None] * len(names)

    async with (
        compute_thread() as worker,
        asyncio.TaskGroup() as group,
        Batcher(worker, run, group) as batcher,
    ):
        gate = busy(worker)
        for place, (kind, session) in enumerate(jobs):
            name = f"{kind}{place}"
            if kind == "step":
                batcher.submit(session, name, _ignore)
            else:
                submit = batcher.submit_alone if kind == "chunk" else batcher.submit_brief
                submit(session, partial(ran.append, name))
        gate.set()
        await _counted(ran, len(jobs))
    return ran


async def _counted(ran: list[str], jobs: int) -> None:
    """Wait until as many jobs have run."""
    await until(lambda: ran and "+".join(ran).count("+") + 1 >= jobs)


def _ignore(_: object) -> None:
    pass


async def test_steps_and_chunks_take_turns() -> None:
    """A running session waits for one chunk, however many prompts are behind it."""
    ran: list[str] = []

    async with compute_thread() as worker, asyncio.TaskGroup() as group:

        def run(names: Sequence[str]) -> Iterator[Sequence[None]]:
            ran.append("+".join(names))
            yield [None] * len(names)

        async with Batcher(worker, run, group) as batcher:
            left = 3
            is_done = asyncio.Event()

            def again(_: object) -> None:  # as a session does: its next step follows its last
                nonlocal left
                left -= 1
                if left:
                    batcher.submit(ONE, "step", again)
                    gates[3 - left].set()
                else:
                    is_done.set()

            gates = [busy(worker), Event(), Event()]
            batcher.submit(ONE, "step", again)
            for number in range(4):
                batcher.submit_alone(TWO, partial(_wait, ran, f"chunk{number}", gates, number))
            gates[0].set()
            await is_done.wait()
            await _counted(ran, 7)

    assert ran == ["step", "chunk0", "step", "chunk1", "step", "chunk2", "chunk3"]


def _wait(ran: list[str], name: str, gates: list[Event], number: int) -> None:
    """Run a chunk that lasts until the next step waits."""
    if number + 1 < len(gates):
        assert gates[number + 1].wait(LONGEST_S)
    ran.append(name)


async def test_the_step_that_follows_a_chunk_joins_the_next_batch() -> None:
    """The first token of a prompt does not wait for the prompts behind it."""
    seen: list[list[list[int]]] = []
    async with recording() as (_, tracer):
        batcher, gate = tracer.batcher, Event()
        begun, ended = asyncio.Event(), asyncio.Event()
        begin = partial(asyncio.get_running_loop().call_soon_threadsafe, begun.set)
        batcher.submit_alone(
            ONE,
            lambda: (begin(), gate.wait(LONGEST_S)),
            lambda _: batcher.submit(ONE, 1, lambda _: None),
        )
        await begun.wait()
        batcher.submit(THREE, 7, lambda _: None)
        batcher.submit_alone(TWO, lambda: seen.append(list(tracer.batches)), lambda _: ended.set())
        gate.set()
        await ended.wait()

    assert seen == [[[7, 1]]]


async def chunks_of(*jobs: tuple[SessionId, int]) -> list[int]:
    """Submit chunks with rows left while the thread is busy; return the order of their places."""
    ran: list[int] = []
    async with recording() as (worker, tracer):
        gate, done = busy(worker), asyncio.Event()
        for place, (session, left) in enumerate(jobs):
            told = partial(_tell, done, ran, len(jobs))
            tracer.batcher.submit_alone(session, partial(ran.append, place), told, left=left)
        gate.set()
        await done.wait()
    return ran


def _tell(done: asyncio.Event, ran: list[int], most: int, _: object) -> None:
    if len(ran) == most:
        done.set()


async def test_the_prompt_with_the_fewest_rows_left_is_first() -> None:
    assert await chunks_of((ONE, 300), (TWO, 200), (THREE, 200)) == [1, 2, 0]


async def test_short_prompts_do_not_starve_a_long_one() -> None:
    short = [(SessionId(bytes([number] * 16)), 10) for number in range(10, 15)]

    ran = await chunks_of((ONE, 9000), *short, (TWO, 8000))

    assert ran == [1, 2, 3, 0, 4, 5, 6]


async def test_chunks_of_one_prompt_stay_in_order() -> None:
    assert await chunks_of((ONE, 300), (TWO, 200), (ONE, 100)) == [1, 0, 2]


async def test_steps_of_other_sessions_overtake_chunks() -> None:
    jobs = ("chunk", ONE), ("chunk", ONE), ("step", TWO), ("step", THREE)

    assert await order_of(*jobs) == ["step2+step3", "chunk0", "chunk1"]


async def test_the_jobs_of_one_session_stay_in_order() -> None:
    jobs = ("step", ONE), ("chunk", ONE), ("step", ONE), ("step", TWO), ("change", ONE)

    assert await order_of(*jobs) == ["step0+step3", "chunk1", "step2", "change4"]


async def test_a_change_runs_before_steps_of_its_session_that_follow() -> None:
    jobs = ("step", ONE), ("change", TWO), ("step", TWO), ("step", ONE)

    assert await order_of(*jobs) == ["change1", "step0+step2+step3"]


async def test_changes_stay_in_order_and_take_no_turn() -> None:
    jobs = ("change", ONE), ("change", TWO), ("chunk", TWO), ("change", THREE), ("step", ONE)

    assert await order_of(*jobs) == ["change0", "change1", "step4", "chunk2", "change3"]


async def test_jobs_that_have_not_begun_can_be_withdrawn() -> None:
    ran = list[str]()

    def run(names: Sequence[str]) -> Iterator[Sequence[None]]:
        ran.append("+".join(names))
        yield [None] * len(names)

    async with (
        compute_thread() as worker,
        asyncio.TaskGroup() as group,
        Batcher(worker, run, group) as batcher,
    ):
        gate = busy(worker)
        for session in (ONE, TWO):
            batcher.submit(session, f"step{session[0]}", _ignore)
            batcher.submit_alone(session, partial(ran.append, f"chunk{session[0]}"), _ignore)
            batcher.submit_brief(session, partial(ran.append, f"change{session[0]}"))

        assert batcher.withdraw(ONE)
        assert not batcher.withdraw(ONE)
        gate.set()
        await _counted(ran, 4)

    left = f"step{TWO[0]}", f"chunk{TWO[0]}", f"change{TWO[0]}", f"change{ONE[0]}"
    assert sorted(ran) == sorted(left)


async def test_jobs_of_one_batch_may_have_fewer_phases_than_others() -> None:
    async with recording() as (worker, tracer):
        gate, short = busy(worker), asyncio.Future[int]()
        tracer.batcher.submit(ONE, 1, _settling(short))
        whole = tracer.submit(2)
        gate.set()

        assert [await future for future in (short, *whole)] == [2, 4, 8]

    assert tracer.batches == [[1, 2]]


async def test_a_job_that_fails_fails_alone() -> None:
    async with recording() as (worker, tracer):
        gate = busy(worker)
        good, bad = tracer.submit(3), tracer.submit(-1)
        gate.set()

        with pytest.raises(ValueError, match="-1 is negative"):
            await bad[0]
        assert await good[1] == 12
        await bad[1]


async def test_a_failed_batch_fails_its_jobs_and_no_later_ones() -> None:
    async with recording() as (_, tracer):
        tracer.fault = KeyError("a bug")
        first, second = tracer.submit(1)
        assert await first == 2
        with pytest.raises(KeyError, match="a bug"):
            await second

        tracer.fault = None
        assert await tracer.submit(2)[1] == 8


async def test_a_callback_that_raises_ends_the_task_group_and_all_reports() -> None:
    def fail(_: object) -> None:
        raise KeyError("a bug")

    heard: list[int] = []

    async def work() -> None:
        async with recording() as (worker, tracer):
            gate = busy(worker)
            tracer.batcher.submit(ONE, 1, heard.append, fail)
            tracer.batcher.submit(ONE, 2, heard.append, fail)
            gate.set()
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        await work()

    assert [str(error) for error in caught.value.exceptions] == ["'a bug'"]
    assert heard == [2, 4]


async def test_a_change_that_raises_ends_the_task_group() -> None:
    async def work() -> None:
        async with recording() as (_, tracer):
            tracer.batcher.submit_brief(ONE, lambda: 1 // 0)
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        await work()

    assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError]


async def test_a_closed_batcher_reports_nothing_and_runs_nothing() -> None:
    heard: list[int] = []
    async with recording() as (worker, tracer):
        gate = busy(worker)
        tracer.batcher.submit(ONE, 1, heard.append, heard.append)
        tracer.batcher.submit_alone(TWO, lambda: heard.append(2), heard.append)
        asyncio.get_running_loop().call_soon(gate.set)
    await asyncio.sleep(0)
    tracer.batcher.submit(ONE, 2, heard.append, heard.append)

    assert not tracer.batches
    assert not heard


async def test_a_batcher_without_jobs_waits_for_no_others() -> None:
    async with recording() as (worker, tracer):
        await tracer.submit(1)[1]
        await worker.run(int)  # the batch has ended, too
        gate = busy(worker)
        worker.start(gate.set)  # never before the gate is open
        async with asyncio.timeout(60):
            await tracer.batcher.__aexit__(None, None, None)
        assert not gate.is_set()
        gate.set()


async def test_a_batcher_ends_in_a_pause_of_what_runs() -> None:
    async with recording() as (worker, tracer):
        begun, gate = Event(), Event()

        def load() -> None:
            begun.set()
            while not gate.is_set():
                pause()

        loading = asyncio.ensure_future(worker.run(load))
        await asyncio.to_thread(begun.wait)
        tracer.submit(1)
        async with asyncio.timeout(60):
            await tracer.batcher.__aexit__(None, None, None)
        gate.set()
        await loading
        assert not tracer.batches


async def test_a_job_may_come_before_the_batcher_is_entered() -> None:
    async with compute_thread() as worker, asyncio.TaskGroup() as jobs:
        tracer = Tracer(worker, jobs)
        futures = tracer.submit(1)

        assert [await future for future in futures] == [2, 4]


async def test_a_function_runs_by_itself() -> None:
    order: list[str] = []
    told: list[object] = []
    async with recording() as (worker, tracer):
        gate = busy(worker)
        tracer.batcher.submit_alone(TWO, lambda: order.append("first"))
        tracer.batcher.submit_alone(TWO, lambda: order.append("second"), told.append)
        tracer.batcher.submit_alone(TWO, lambda: 1 // 0, told.append)
        gate.set()
        await until(lambda: len(told) >= 2)
    tracer.batcher.submit_alone(TWO, lambda: order.append("late"))

    assert order == ["first", "second"]
    assert told[0] is None
    assert isinstance(told[1], ZeroDivisionError)


async def test_no_job_is_lost_between_the_threads() -> None:
    async with recording() as (_, tracer):

        async def ask(number: int) -> None:
            for _ in range(50):
                first, second = tracer.submit(number, SessionId(bytes([number])))
                if number % 2:
                    tracer.batcher.submit_alone(SessionId(bytes([number])), int)
                assert (await first, await second) == (2 * number, 4 * number)

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(ask(number))

    assert sum(map(len, tracer.batches)) == 8 * 50


def test_a_value_that_fails_leaves_the_others() -> None:
    undone = list[int]()

    def run(values: list[int]) -> list[int]:
        if 3 in values:
            raise RuntimeError("out of memory")
        return [value + 1 for value in values]

    first, failed, last = map_valid(run, [1, 3, 2], undone.append)

    assert (first, str(failed), last) == (2, "out of memory", 3)
    assert undone == [1, 3, 2]
    with pytest.raises(RuntimeError, match="out of memory"):
        map_valid(run, [3], undone.append)


def test_valid_values_are_mapped_together_and_failures_stay() -> None:
    error, seen = ValueError("x"), []

    def run(values: list[int]) -> list[int]:
        seen.append(values)
        return [value + 1 for value in values]

    assert map_valid(run, [1, error, None, 2]) == [2, error, None, 3]
    assert map_valid(run, [None, error]) == [None, error]
    assert seen == [[1, 2]]
