"""The first request finds all steps recorded, and waits for at most one warm-up step."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import chain, count
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast
from weakref import ref

import pytest
import torch

from meshllm.model.files.source import Source
from meshllm.model.kernels import jit
from meshllm.model.steps.runner import Runner
from meshllm.node.compute import warm_up
from meshllm.node.compute.warm_up import WarmUp
from meshllm.node.compute.warm_up_budget import SAVED_S, WarmUpBudget
from meshllm.node.compute.worker import REST_S, Worker, compute_thread
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import RingOptions, open_local_ring
from meshllm.request import Sampling
from meshllm.testing.clock import run_virtual
from meshllm.testing.models import tiny_model
from tests.builders.waiting import timers_fired

QUIET_S = 0.05


class FakeRunner:
    """A runner that notes its steps."""

    def __init__(self, steps: int, error: Exception | None = None) -> None:
        self.done, self._steps, self._error = 0, steps, error

    def warm_up_steps(self) -> Iterator[None]:
        for _ in range(self._steps):
            yield
            self.done += 1
        if self._error:
            raise self._error


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "QUIET_S", QUIET_S)
    monkeypatch.setattr("meshllm.node.ring.runtime.WarmUp", WarmUp)  # see `tests/conftest.py`


@pytest.fixture
def tiny(tmp_path: Path) -> Source:
    return tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16)


@asynccontextmanager
async def begin(*runners: FakeRunner) -> AsyncIterator[tuple[WarmUp, Worker]]:
    async with compute_thread() as worker:
        ranks = [(worker, cast("Runner", runner)) for runner in runners]
        yield WarmUp(ranks, asyncio.Event()), worker


async def test_all_runners_run_all_of_their_steps() -> None:
    runners = FakeRunner(3), FakeRunner(0), FakeRunner(5)

    async with begin(*runners) as (whole, _):
        await whole.run()

    assert whole._done.is_set()
    assert [each.done for each in runners] == [3, 0, 5]


class NotedWarmUpBudget(WarmUpBudget):
    """Notes how long each step has to wait, and lets it run at once."""

    def __init__(self) -> None:
        super().__init__(1)
        self.waits: list[float] = []

    def wait_s(self, now: float) -> float:
        self.waits.append(super().wait_s(now))
        return 0.0


async def test_a_ring_that_forms_later_has_no_minute_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = count()
    clock = SimpleNamespace(monotonic=lambda: 0.0, thread_time=lambda: float(next(used)))
    monkeypatch.setattr(warm_up, "time", clock)
    async with begin(FakeRunner(1)) as (first, worker):
        worker.warm_up_budget = budget = NotedWarmUpBudget()
        budget.spend(SAVED_S - 2, 0.0)
        await first.run()
        later = FakeRunner(2)
        await WarmUp([(worker, cast("Runner", later))], asyncio.Event()).run()

    # Of the first ring two, as the end is found by one more; then each took a core-second.
    assert budget.waits == pytest.approx([0, 0, 0, 60, 120])
    assert later.done == 2


async def test_a_step_counts_that_is_running_when_the_warm_up_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go_on, spent = Event(), Event(), list[float]()

    class Slow(FakeRunner):
        def warm_up_steps(self) -> Iterator[None]:
            begun.set()
            go_on.wait()
            yield

    async with begin(Slow(1)) as (whole, worker):
        monkeypatch.setattr(worker.warm_up_budget, "spend", lambda core_s, _: spent.append(core_s))
        task = asyncio.create_task(whole.run())
        await asyncio.to_thread(begun.wait)
        task.cancel()
        await asyncio.wait([task])
        go_on.set()
        await worker.run(int)

    assert len(spent) == 1


async def test_no_step_runs_while_another_job_does() -> None:
    runner, gate = FakeRunner(3), Event()

    async with begin(runner) as (whole, worker):
        held = worker.start(gate.wait)
        task = asyncio.create_task(whole.run())
        await timers_fired()
        after = worker.start(lambda: runner.done)  # the warm-up waits already
        gate.set()
        await task

    assert held.result()
    assert after.result() == 0
    assert runner.done == 3


def test_no_step_runs_between_jobs_that_follow_one_another() -> None:
    runner = FakeRunner(3)

    async def scenario() -> None:
        async with begin(runner) as (whole, worker):
            task = asyncio.create_task(whole.run())
            for _ in range(20):
                await worker.run(int)
                await asyncio.sleep(QUIET_S / 2)
            assert runner.done == 0
            await task

    run_virtual(scenario())
    assert runner.done == 3


class PacedWarmUpBudget(WarmUpBudget):
    """Lets a step run every 10 ms: in virtual time it takes none."""

    def wait_s(self, now: float) -> float:
        return 0.01


def test_a_request_waits_for_one_step_at_most() -> None:
    runner, after = FakeRunner(10**9), list[int]()

    async def scenario() -> None:
        async with begin(runner) as (whole, worker):
            worker.warm_up_budget = PacedWarmUpBudget(1)
            task = asyncio.create_task(whole.run())
            await asyncio.sleep(4 * QUIET_S)
            begun = runner.done
            for _ in range(20):  # as a request does before it is a session
                await worker.run(int)
                after.append(runner.done - begun)
                await asyncio.sleep(QUIET_S / 2)
            task.cancel()
            await asyncio.wait([task])

        assert begun > 0
        assert task.cancelled()
        assert not whole._done.is_set()

    run_virtual(scenario())
    assert max(after) <= 1


async def test_results_are_released() -> None:
    class Weights:
        pass

    async with compute_thread() as worker:
        held = ref(await worker.run(Weights))
        await asyncio.sleep(0)

        assert held() is None


def test_what_is_left_by_a_warm_up_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = list[int]()
    runner = FakeRunner(20)
    monkeypatch.setattr("meshllm.node.compute.worker.reclaim", lambda: freed.append(runner.done))

    async def scenario() -> None:
        async with begin(runner, runner) as (whole, _):
            await whole.run()
            await asyncio.sleep(3 * REST_S)

    run_virtual(scenario())
    assert freed == [40]  # once for a thread


async def test_an_error_in_one_runner_does_not_stop_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runners = FakeRunner(1, ValueError("strange code")), FakeRunner(1)

    with caplog.at_level(logging.WARNING):
        async with begin(*runners) as (whole, _):
            await whole.run()

    assert whole._done.is_set()
    assert "ValueError: strange code" in caplog.text
    assert runners[1].done == 1


async def test_a_bug_in_one_runner_does_not_stop_the_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runners, reclaimed = (FakeRunner(1, EOFError("ours")), FakeRunner(1)), list[None]()
    monkeypatch.setattr(Worker, "reclaim_later", lambda _: reclaimed.append(None))

    async with begin(*runners) as (whole, _):
        await whole.run()

    assert whole._done.is_set()
    assert runners[1].done == 1
    assert len(reclaimed) == len(runners)
    assert "bug in a warm-up" in caplog.text


@pytest.mark.skipif(not jit.jit_available(), reason="no memory becomes executable here")
@pytest.mark.parametrize("own_threads", [False, True])
@pytest.mark.parametrize("nodes", [1, 2])
async def test_a_warm_ring_records_nothing_for_its_first_request(
    tiny: Source, monkeypatch: pytest.MonkeyPatch, nodes: int, own_threads: bool
) -> None:
    options = RingOptions(
        nodes=nodes, own_threads=own_threads, inference=InferenceConfig(threads=1)
    )

    async def answer(*, is_warm: bool) -> tuple[list[int], int]:
        monkeypatch.setattr(warm_up, "QUIET_S", QUIET_S if is_warm else 99.0)
        async with open_local_ring(tiny, options) as ring:
            runners = [*ring.entry.runners, *chain(*(stage.runners for stage in ring.stages))]
            if not all(runner.is_row_invariant for runner in runners):
                pytest.skip("this processor adds in another order")
            if is_warm:
                await ring.warmed_up()
            before = sum(runner.prepared for runner in runners)
            tokens = [token async for token in ring.tokens([5, 6, 7] * 6, Sampling(), 60)]
            return tokens, sum(runner.prepared for runner in runners) - before

    warm, prepared = await answer(is_warm=True)
    plain, late = await answer(is_warm=False)

    assert warm == plain
    assert prepared == 0
    assert late > 0


@pytest.mark.parametrize("options", [{"exact": True}, {"speculation": False}])
async def test_a_ring_without_drafts_needs_no_warm_up(
    tiny: Source, options: dict[str, Any]
) -> None:
    async with open_local_ring(
        tiny, RingOptions(nodes=2, inference=InferenceConfig(threads=1, **options))
    ) as ring:
        before = ring.entry._runners.prepared
        await ring.warmed_up()

        assert ring.entry._runners.prepared == before
