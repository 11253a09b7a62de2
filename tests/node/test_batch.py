"""Jobs that wait for the compute thread are done together, and each has its own end."""

import asyncio
from collections.abc import Iterator, Sequence
from threading import Event
from typing import Any

import pytest

from meshllm.node.batch import Batch, attempt, through
from meshllm.node.worker import Worker, compute_thread


class Recorder:
    """Doubles numbers in two phases; what is negative fails."""

    def __init__(self, worker: Worker) -> None:
        self.turns: list[list[int]] = []
        self.batch = Batch(worker, 2, self.run)
        self.fault: Exception | None = None

    def run(self, jobs: Sequence[int]) -> Iterator[Sequence[Any]]:
        self.turns.append(list(jobs))
        yield [attempt(_double, job) for job in jobs]
        if self.fault:
            raise self.fault
        yield [4 * job for job in jobs]


def _double(number: int) -> int:
    if number < 0:
        raise ValueError(f"{number} is negative")
    return 2 * number


def busy(worker: Worker) -> Event:
    """Keep the compute thread busy until the event is set."""
    gate = Event()

    def wait() -> None:
        gate.wait(10)

    worker.start(wait)
    return gate


async def test_what_waits_is_done_in_one_turn() -> None:
    async with compute_thread() as worker:
        recorder, gate = Recorder(worker), busy(worker)
        jobs = [recorder.batch.submit(number) for number in range(5)]
        gate.set()

        assert [[await future for future in futures] for futures in jobs] == [
            [2 * number, 4 * number] for number in range(5)
        ]
        await recorder.batch.submit(7)[1]

    assert recorder.turns == [[0, 1, 2, 3, 4], [7]]


async def test_a_job_that_fails_fails_alone() -> None:
    async with compute_thread() as worker:
        recorder, gate = Recorder(worker), busy(worker)
        good, bad = recorder.batch.submit(3), recorder.batch.submit(-1)
        gate.set()

        with pytest.raises(ValueError, match="-1 is negative"):
            await bad[0]
        assert await good[1] == 12
        await bad[1]


async def test_a_turn_that_fails_ends_all_that_are_in_it_and_none_behind() -> None:
    async with compute_thread() as worker:
        recorder = Recorder(worker)
        recorder.fault = KeyError("a bug")
        first, second = recorder.batch.submit(1)
        assert await first == 2
        with pytest.raises(KeyError, match="a bug"):
            await second

        recorder.fault = None
        assert await recorder.batch.submit(2)[1] == 8


async def test_nobody_need_wait_for_a_job() -> None:
    async with compute_thread() as worker:
        recorder = Recorder(worker)
        for future in recorder.batch.submit(-1):
            future.cancel()

        assert await recorder.batch.submit(2)[1] == 8


async def test_no_job_is_lost_between_the_threads() -> None:
    async with compute_thread() as worker:
        recorder = Recorder(worker)

        async def ask(number: int) -> None:
            for _ in range(200):
                first, second = recorder.batch.submit(number)
                assert (await first, await second) == (2 * number, 4 * number)

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(ask(number))

    assert sum(map(len, recorder.turns)) == 8 * 200


def test_values_go_through_together_and_what_failed_stays() -> None:
    error, seen = ValueError("x"), []

    def run(values: list[int]) -> list[int]:
        seen.append(values)
        return [value + 1 for value in values]

    assert through(run, [1, error, None, 2]) == [2, error, None, 3]
    assert through(run, [None, error]) == [None, error]
    assert seen == [[1, 2]]
