import asyncio
import threading

import pytest
import torch

from meshllm.node.compute import worker as module
from meshllm.node.compute.worker import HANG_S, HANG_TIMES, LOAD_HANG_S, calibrate, compute_thread


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


async def test_the_number_of_threads_is_measured_and_then_used() -> None:
    before = torch.get_num_threads()
    async with compute_thread(2) as worker:
        chosen = await worker.run(calibrate, 2, 64, torch.float32)

        assert chosen in {1, 2}
        assert await worker.run(torch.get_num_threads) == chosen
    assert torch.get_num_threads() == before


class Clock:
    """A clock that jobs advance."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


async def test_a_function_over_its_limit_hangs_until_it_ends(clock: Clock) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        go_on.wait()

    async with compute_thread() as worker:
        assert worker.hung_s == 0
        future = worker.start(hang)
        await asyncio.to_thread(begun.wait)
        assert worker.hung_s == 0
        clock.now += HANG_S
        assert worker.hung_s == HANG_S
        go_on.set()
        await asyncio.wrap_future(future)
        assert worker.hung_s == 0


@pytest.mark.parametrize("took_s", [1.0, HANG_S])
async def test_the_limit_follows_the_longest_run(clock: Clock, took_s: float) -> None:
    def take(seconds: float) -> float:
        clock.now += seconds
        return worker.hung_s

    usual_s = max(HANG_S, HANG_TIMES * took_s)
    async with compute_thread() as worker:
        await asyncio.wrap_future(worker.start(take, took_s))
        assert await asyncio.wrap_future(worker.start(take, usual_s - 1)) == 0
        assert await asyncio.wrap_future(worker.start(take, HANG_TIMES * usual_s)) > 0


async def test_loading_may_take_longer(clock: Clock) -> None:
    def take(seconds: float) -> float:
        clock.now += seconds
        return worker.hung_s

    async with compute_thread() as worker:
        assert await worker.run(take, LOAD_HANG_S - 1) == 0
        assert await worker.run_when_idle(0, take, LOAD_HANG_S - 1) == 0
        assert await asyncio.wrap_future(worker.start(take, HANG_S)) == HANG_S


async def test_a_panic_on_the_compute_thread_is_an_error_that_can_be_caught() -> None:
    class Panic(BaseException):
        pass

    def panic() -> None:
        raise Panic("index out of bounds")

    async with module.compute_thread() as worker:
        with pytest.raises(RuntimeError, match="Panic: index out of bounds"):
            await worker.run(panic)
        assert await worker.run(int) == 0
