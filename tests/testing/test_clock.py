"""The virtual clock: when it jumps, and when it must not."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from meshllm.testing import clock
from meshllm.testing.clock import InlineExecutor, VirtualLoop, run_virtual

LONGEST_S = 120.0  # s of a thread's wait for an event loop


def test_an_hour_takes_no_time_and_sleepers_wake_in_order() -> None:
    woken: list[tuple[float, float]] = []

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append((seconds, asyncio.get_running_loop().time()))

    async def main() -> None:
        await asyncio.gather(*map(sleep, (3600.0, 0.5, 60.0)))

    run_virtual(main())  # the timeout of this test is shorter

    assert woken == [(0.5, 0.5), (60.0, 60.0), (3600.0, 3600.0)]


def test_a_timeout_passes_at_its_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 1000


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once an event loop has nothing to do but wait."""
    idle, select = threading.Event(), clock._Clock.select

    def note(self: clock._Clock, timeout: float | None = None) -> Any:
        if timeout != 0:
            idle.set()
        return select(self, timeout)

    monkeypatch.setattr(clock._Clock, "select", note)
    return idle


def test_time_is_held_while_a_thread_computes(idle: threading.Event) -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        alarm = loop.call_later(10, pytest.fail, "time went on")
        with ThreadPoolExecutor(1) as executor:
            await loop.run_in_executor(executor, idle.wait, LONGEST_S)
        alarm.cancel()
        return loop.time()

    assert run_virtual(main()) == 0


def test_time_is_held_until_a_result_of_the_compute_thread_has_arrived() -> None:
    begin, passed = threading.Event(), threading.Event()

    async def main() -> float:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def arrive(_: object) -> None:
            passed.wait(0.05)  # the thread is interrupted before it tells the loop
            loop.call_soon_threadsafe(arrived.set)

        loop.call_later(10, passed.set)
        with clock._HoldingPool(1) as executor:
            executor.submit(begin.wait).add_done_callback(arrive)
            begin.set()
            await arrived.wait()
        return loop.time()

    assert run_virtual(main()) == 0


def test_a_function_that_is_cancelled_before_it_begins_does_not_hold_time() -> None:
    begin = threading.Event()

    async def main() -> float:
        with clock._HoldingPool(1) as executor:
            executor.submit(begin.wait)
            waiting = executor.submit(pytest.fail, "it ran")
            assert waiting.cancel()
            begin.set()
            await asyncio.sleep(5)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 5


def test_a_function_that_is_dropped_at_the_end_does_not_hold_time() -> None:
    begin = threading.Event()

    async def main() -> float:
        executor = clock._HoldingPool(1)
        running, waiting = executor.submit(begin.wait), executor.submit(pytest.fail, "it ran")
        executor.shutdown(wait=False, cancel_futures=True)
        begin.set()
        assert await asyncio.wrap_future(running)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wrap_future(waiting)
        async with asyncio.timeout(10):
            await asyncio.sleep(5)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 5


def test_an_error_of_the_compute_thread_is_raised_where_it_is_awaited() -> None:
    async def main() -> None:
        with clock._HoldingPool(1) as executor:
            await asyncio.wrap_future(executor.submit(int, "x"))

    with pytest.raises(ValueError, match="invalid literal"):
        run_virtual(main())


def test_time_advances_after_the_wait_for_a_thread_is_cancelled() -> None:
    release = threading.Event()

    async def main(executor: ThreadPoolExecutor) -> float:
        loop = asyncio.get_running_loop()
        loop.run_in_executor(executor, release.wait).cancel()
        await asyncio.sleep(5)
        release.set()
        return loop.time()

    with ThreadPoolExecutor(1) as executor:
        assert run_virtual(main(executor)) == 5


def test_the_threads_of_the_loop_itself_are_waited_for(idle: threading.Event) -> None:
    async def main() -> float:
        await asyncio.to_thread(idle.wait, LONGEST_S)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 0


def test_another_thread_can_wake_a_task(idle: threading.Event) -> None:
    async def main() -> str:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()

        def wake() -> None:
            assert idle.wait(LONGEST_S)
            loop.call_soon_threadsafe(answer.set_result, "here")

        threading.Thread(target=wake).start()
        return await answer

    assert run_virtual(main()) == "here"


def test_a_deadlock_is_an_error_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "STALL_S", 0.01)

    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="nothing can wake one"):
        run_virtual(main())


def test_an_inline_executor_runs_in_the_calling_thread() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(InlineExecutor(), threading.get_ident)

    assert run_virtual(main()) == threading.get_ident()


def test_an_inline_executor_returns_what_was_raised() -> None:
    future = InlineExecutor().submit(int, "seven")

    with pytest.raises(ValueError, match="seven"):
        future.result()


def test_what_is_due_in_a_suspension_happens_afterwards() -> None:
    async def scenario() -> list[float]:
        loop, fired = asyncio.get_running_loop(), list[float]()
        assert isinstance(loop, VirtualLoop)
        for delay in (1.0, 2.0, 7.0):
            loop.call_later(delay, lambda: fired.append(loop.time()))
        loop.suspend(5.0)
        await asyncio.sleep(5.0)
        return fired

    assert run_virtual(scenario()) == [5.0, 5.0, 7.0]
