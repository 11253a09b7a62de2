import asyncio
import threading
from itertools import groupby
from typing import Self

import pytest
import torch

from meshllm.model import device
from meshllm.model.pauses import pause
from meshllm.names import NodeId
from meshllm.node.compute import worker as module
from meshllm.node.compute.worker import (
    LOAD_HANG_S,
    REST_S,
    SHORT_HANG_S,
    SHORTEST_S,
    WATCH_LEAST_S,
    calibrate,
    choose_threads,
    compute_thread,
    thread_counts,
)
from meshllm.node.supervisor import Supervisor
from meshllm.protocol.planning.chunking import RankTimes
from meshllm.protocol.planning.plan import LinkSpeed, Offer
from meshllm.protocol.ring.hang import FIRST_STEPS, TIMES, HangLimits
from meshllm.testing.clock import run_virtual


async def test_functions_run_off_the_loop_in_the_order_given() -> None:
    seen: list[tuple[int, str]] = []

    def note(number: int) -> None:
        seen.append((number, threading.current_thread().name))

    async with compute_thread(1) as worker:
        await asyncio.gather(*(worker.run(note, number) for number in range(9)))

    assert [number for number, _ in seen] == list(range(9))
    assert {name for _, name in seen} == {"compute_0"}


async def test_torch_uses_the_given_threads_and_no_gradients() -> None:
    async with compute_thread(1) as worker:
        assert await worker.run(torch.get_num_threads) == 1
        assert not await worker.run(torch.is_grad_enabled)


async def test_an_error_reaches_the_caller() -> None:
    async with compute_thread() as worker:
        with pytest.raises(ZeroDivisionError):
            await worker.run(lambda: 1 // 0)

        assert await worker.run(lambda: 2) == 2


async def test_onemkl_is_warmed_up_before_anything_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    monkeypatch.setattr("meshllm.node.compute.worker.warm_up_onemkl", lambda: calls.append("warm"))

    async with compute_thread() as worker:
        await worker.run(calls.append, "work")

    assert calls == ["warm", "work"]


async def test_the_number_of_threads_is_measured_and_then_used() -> None:
    before = torch.get_num_threads()
    async with compute_thread(2) as worker:
        chosen = await worker.run(calibrate, 2, 64, torch.float32)

        assert chosen in {1, 2}
        assert await worker.run(torch.get_num_threads) == chosen
    assert torch.get_num_threads() == before


async def test_a_quota_limits_the_threads_that_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "usable_cores", lambda: 1)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        async with compute_thread() as worker:
            assert worker.cores == 1
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


async def test_a_part_of_a_wide_layer_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []

    def ones(rows: int, width: int, *, dtype: torch.dtype) -> torch.Tensor:
        made.append((rows, width))
        return torch.zeros(1, 1, dtype=dtype)

    monkeypatch.setattr(torch, "ones", ones)
    async with compute_thread(1) as worker:
        await worker.run(calibrate, 1, 8192, torch.bfloat16)
        await worker.run(calibrate, 1, 1024, torch.bfloat16)

    wide, _, narrow, _ = made
    assert wide == (4096, 8192)  # 64 MiB, not 512
    assert narrow == (4096, 1024)


@pytest.mark.parametrize(
    ("cores", "counts"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (6, [1, 2, 4, 6]),
        (16, [1, 2, 4, 8, 16]),
        (17, [1, 2, 4, 8, 16, 17]),
    ],
)
def test_powers_of_two_and_all_cores_are_tried(cores: int, counts: list[int]) -> None:
    assert thread_counts(cores) == counts


@pytest.mark.parametrize(
    ("rounds", "threads"),
    [
        ([{1: 8.0, 2: 4.0, 4: 2.0, 8: 1.0}], 8),
        ([{1: 8.0, 2: 4.0, 4: 2.0, 8: 20.0}], 4),  # another program uses one of the cores
        ([{1: 3.0, 2: 2.0, 4: 1.0, 8: 1.05}], 8),
        ([{1: 3.0, 2: 2.0, 4: 1.0, 8: 1.06}], 4),
        ([{1: 1.0, 2: 1.0, 4: 1.0}], 1),  # several threads save nothing
        ([{1: 15.8, 2: 15.9, 4: 15.9}], 1),
        ([{1: 1.0, 2: 0.97, 4: 0.96}], 4),  # one thread saturates the memory
        ([{1: 1.0, 2: 0.9, 4: 1.02}], 2),
        ([{1: 2.0, 2: 1.0, 4: 1.0}], 4),
        ([{1: 9.0, 2: 1.0}, {1: 1.0, 2: 9.0}], 1),  # the shortest of each
        ([{1: 2.0, 2: 9.0}, {1: 2.0, 2: 1.0}], 2),
        ([{1: 0.0}], 1),
    ],
)
def test_the_most_threads_that_are_about_as_fast_as_any_are_chosen(
    rounds: list[dict[int, float]], threads: int
) -> None:
    assert choose_threads(rounds) == threads


class Clock:
    """A clock that jobs advance."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now


class TimedMatrix:
    """A matrix whose products take as long as the number of threads makes them."""

    def __init__(self, clock: Clock, seconds: dict[int, float]) -> None:
        self.used = list[int]()
        self.seconds = seconds
        self._clock = clock

    @property
    def T(self) -> Self:
        return self

    def __matmul__(self, other: object) -> None:
        self.used.append(torch.get_num_threads())
        self._clock.now += self.seconds[self.used[-1]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: 3e-3, 2: 1.6e-3, 4: 1e-3, 6: 10e-3}, 4),
        ({1: 3e-6, 2: 4e-6, 4: 5e-6, 6: 6e-6}, 1),
        ({1: 0.1, 2: 0.05, 4: 0.03, 6: 0.02}, 6),
    ],
    ids=["a busy core", "a narrow layer", "a slow machine"],
)
async def test_numbers_of_threads_take_turns_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, seconds: dict[int, float], chosen: int
) -> None:
    matrix = TimedMatrix(clock, seconds)
    begin = clock.now
    async with compute_thread(1) as worker:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "ones", lambda *_, **__: matrix)
            assert await worker.run(calibrate, 6, 64, torch.float32) == chosen
        assert await worker.run(torch.get_num_threads) == chosen

    assert [threads for threads, _ in groupby(matrix.used)] == [1, 2, 4, 6] * module.TRIAL_ROUNDS
    unbounded_s = module.TRIAL_ROUNDS * 2 * sum(seconds.values())  # first and last of each trial
    assert clock.now - begin <= module.TRIALS_S + unbounded_s
    assert len(matrix.used) <= 4 * module.TRIAL_ROUNDS * (1 + module.PRODUCTS)


async def test_a_function_over_its_limit_hangs_until_it_ends(clock: Clock) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        go_on.wait()

    async with compute_thread() as worker:
        assert (worker.hung_s, worker.hangs_in_s) == (0, None)
        future = worker.start(hang)
        await asyncio.to_thread(begun.wait)
        assert (worker.hung_s, worker.hangs_in_s) == (0, SHORT_HANG_S)
        clock.now += SHORT_HANG_S
        assert worker.hung_s == SHORT_HANG_S
        worker.extend_for_suspension(4.0)
        worker.extend_for_suspension(5.0)
        assert (worker.hung_s, worker.hangs_in_s) == (0, 9.0)
        clock.now += 9.0
        assert worker.hung_s == SHORT_HANG_S + 9.0
        go_on.set()
        await asyncio.wrap_future(future)
        assert (worker.hung_s, worker.hangs_in_s) == (0, None)
        worker.extend_for_suspension(5.0)


def planned() -> HangLimits:
    """Limits of a rank whose steps take 10 s."""
    limits = HangLimits()
    offer = Offer(NodeId(b"a"), 0, ((1, 10.0),), 0.0)
    limits.plan(RankTimes(offer, 1.0, LinkSpeed(0.0)))
    for _ in range(FIRST_STEPS):
        limits.begin(1, 0, is_step=True)
    return limits


async def test_the_limit_of_a_step_is_a_multiple_of_its_planned_time(clock: Clock) -> None:
    limits = planned()

    def take(seconds: float) -> float:
        with worker.expected(limits, 1, 0, is_step=True):
            clock.now += seconds
            return worker.hung_s

    async with compute_thread() as worker:
        assert await asyncio.wrap_future(worker.start(take, 10.0 * TIMES - 1)) == 0
    limits = planned()
    async with compute_thread() as worker:
        assert await asyncio.wrap_future(worker.start(take, 10.0 * TIMES)) == 10.0 * TIMES
        longer = 2 * 10.0 * TIMES  # the last one took four times as long as planned
        assert await asyncio.wrap_future(worker.start(take, longer)) == 0


async def test_a_function_has_the_rest_of_its_time_after_this_process_was_stopped(
    clock: Clock,
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait()

    async with compute_thread() as worker:
        future = worker.start(work)
        await asyncio.to_thread(begun.wait)
        clock.now += SHORT_HANG_S - WATCH_LEAST_S
        watching = asyncio.ensure_future(worker.sleep())
        await asyncio.sleep(0)
        clock.now += 60.0  # at the begin of the sleep, so that the function did not run in it
        await watching

        awake_s, left_s = worker.hung_s, worker.hangs_in_s
        clock.now += 2 * WATCH_LEAST_S
        later_s = worker.hung_s
        go_on.set()
        await asyncio.wrap_future(future)

    assert left_s == pytest.approx(WATCH_LEAST_S)
    assert later_s > awake_s == 0


async def test_a_hang_is_noticed_by_an_event_loop_that_is_always_late(clock: Clock) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        go_on.wait()

    async with compute_thread() as worker:
        future = worker.start(hang)
        await asyncio.to_thread(begun.wait)
        clock.now += SHORT_HANG_S - WATCH_LEAST_S
        for _ in range(3):
            watching = asyncio.ensure_future(worker.sleep())
            await asyncio.sleep(0)
            clock.now += 3 * WATCH_LEAST_S
            await watching
        hung_s = worker.hung_s
        go_on.set()
        await asyncio.wrap_future(future)

    assert hung_s > 0


@pytest.mark.parametrize("is_noticed", [True, False])
async def test_a_job_in_which_this_process_was_stopped_raises_no_limits(
    clock: Clock, *, is_noticed: bool
) -> None:
    limits, begun, go_on = planned(), threading.Event(), threading.Event()

    def take() -> None:
        with worker.expected(limits, 1, 0, is_step=True):
            begun.set()
            go_on.wait()

    async with compute_thread() as worker:
        future = worker.start(take)
        await asyncio.to_thread(begun.wait)
        watching = asyncio.ensure_future(worker.sleep())
        await asyncio.sleep(0)
        clock.now += 1000.0
        if is_noticed:
            await watching
        go_on.set()
        await asyncio.wrap_future(future)
        watching.cancel()

    assert limits.begin(1, 0, is_step=True) == 10.0 * TIMES


async def test_a_time_is_excused_only_for_what_ran_in_it(clock: Clock) -> None:
    def take(seconds: float) -> float:
        worker.extend_for_suspension(1.0)
        clock.now += seconds
        return worker.hung_s

    async with compute_thread() as worker:
        assert await asyncio.wrap_future(worker.start(take, SHORT_HANG_S + 0.5)) == 0
        clock.now += 1.0
        assert await asyncio.wrap_future(worker.start(take, SHORT_HANG_S + 1.5)) > 0


async def test_loading_may_take_longer(clock: Clock) -> None:
    def take(seconds: float) -> float:
        clock.now += seconds
        return worker.hung_s

    async with compute_thread() as worker:
        assert await worker.run(take, LOAD_HANG_S - 1) == 0
        assert await worker.run_when_idle(0, take, LOAD_HANG_S - 1) == 0
        assert await asyncio.wrap_future(worker.start(take, SHORT_HANG_S)) == SHORT_HANG_S


def test_unused_memory_is_returned_once_after_each_stretch_of_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    freed = list[tuple[float, str]]()

    async def scenario() -> None:
        now = asyncio.get_running_loop().time
        monkeypatch.setattr(
            module, "reclaim", lambda: freed.append((now(), threading.current_thread().name))
        )
        async with compute_thread() as worker:
            await asyncio.sleep(20 * REST_S)
            assert not freed
            for _ in range(20):
                await worker.run_step(int)
                await asyncio.sleep(0.9 * REST_S)
                await worker.run(int)
                await asyncio.sleep(0.9 * REST_S)
            last = now() - 0.9 * REST_S
            assert not freed
            await asyncio.sleep(20 * REST_S)
            assert [by for _, by in freed] == ["compute_0"]
            assert freed[0][0] == pytest.approx(last + REST_S, abs=0.01)
            await worker.run_when_idle(0, int)
            await asyncio.sleep(20 * REST_S)
            assert len(freed) == 1
            worker.reclaim_later()
            await asyncio.sleep(SHORTEST_S)
            assert len(freed) == 2

    run_virtual(scenario())


def test_a_bug_in_reclaiming_memory_ends_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise LookupError("a bug")

    async def scenario() -> None:
        monkeypatch.setattr(module, "reclaim", fail)
        with Supervisor() as supervisor:
            with supervisor.scope():
                thread = compute_thread()
                worker = await thread.__aenter__()
            await worker.run(int)
            with pytest.raises(LookupError, match="a bug"):
                await asyncio.wait_for(supervisor.failed, 2 * REST_S)
            await thread.__aexit__(None, None, None)

    run_virtual(scenario())


async def test_a_panic_on_the_compute_thread_is_an_error_that_can_be_caught() -> None:
    class Panic(BaseException):
        pass

    def panic() -> None:
        raise Panic("index out of bounds")

    async with module.compute_thread() as worker:
        with pytest.raises(RuntimeError, match="Panic: index out of bounds"):
            await worker.run(panic)
        assert await worker.run(int) == 0


@pytest.mark.parametrize("is_urgent", [True, False])
async def test_steps_run_in_the_pauses_of_a_long_function_in_their_order(is_urgent: bool) -> None:
    seen: list[str] = []
    begun, submitted = threading.Event(), threading.Event()

    def load() -> None:
        seen.append("load")
        begun.set()
        submitted.wait()
        pause()
        seen.append("loaded")

    def step(name: str) -> str:
        seen.append(name)
        pause()  # in a step it does nothing
        return name

    async with compute_thread() as worker:
        whole = worker.run(load) if is_urgent else worker.run_when_idle(0, load)
        loading = asyncio.ensure_future(whole)
        await asyncio.to_thread(begun.wait)
        steps = [worker.start(step, name) for name in ("one", "two")]
        after = asyncio.ensure_future(worker.run(seen.append, "run"))
        await asyncio.sleep(0)
        last = worker.start(step, "three")
        submitted.set()
        await asyncio.gather(loading, after)

        assert [each.result() for each in (*steps, last)] == ["one", "two", "three"]
        assert seen == ["load", "one", "two", "three", "loaded", "run"]
        assert await asyncio.wrap_future(worker.start(step, "four")) == "four"


async def test_an_error_of_a_step_in_a_pause_is_its_own() -> None:
    begun, submitted = threading.Event(), threading.Event()

    def load() -> str:
        begun.set()
        submitted.wait()
        pause()
        return "loaded"

    async with compute_thread() as worker:
        loading = asyncio.ensure_future(worker.run(load))
        await asyncio.to_thread(begun.wait)
        failing, given_up, step = (worker.start(lambda: 1 // 0) for _ in range(3))
        assert given_up.cancel()
        submitted.set()

        assert await loading == "loaded"
        assert given_up.cancelled()
        for each in (failing, step):
            with pytest.raises(ZeroDivisionError):
                each.result()


async def test_steps_in_pauses_do_not_shorten_the_limit_of_what_pauses(clock: Clock) -> None:
    begun, submitted = threading.Event(), threading.Event()
    limits: list[float | None] = []

    def load() -> None:
        begun.set()
        submitted.wait()
        pause()
        limits.append(worker.hangs_in_s)

    def step() -> None:
        limits.append(worker.hangs_in_s)
        clock.now += 20

    async with compute_thread() as worker:
        loading = asyncio.ensure_future(worker.run(load))
        await asyncio.to_thread(begun.wait)
        worker.start(step)
        submitted.set()
        await loading

    assert limits == [SHORT_HANG_S, LOAD_HANG_S]


async def test_a_step_that_never_began_is_cancelled_at_the_end() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        go_on.wait()

    async with compute_thread() as worker:
        running = worker.start(hang)
        await asyncio.to_thread(begun.wait)
        waiting = worker.start(int)
        asyncio.get_running_loop().call_soon(go_on.set)

    assert running.result() is None
    assert waiting.cancelled()
