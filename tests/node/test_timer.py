import asyncio
from contextvars import ContextVar

from meshllm.node.timer import AFTER_ERROR_S, DeadlineTimer
from meshllm.testing.clock import run_virtual


class SameHostDetector:
    """Something with a deadline, in loop time."""

    def __init__(self, deadline: float | None) -> None:
        self.deadline = deadline
        self.expired: list[float] = []
        self.alarm = DeadlineTimer(lambda: self.deadline, self.expire)

    def expire(self) -> None:
        now = asyncio.get_running_loop().time()
        if self.deadline is not None and now >= self.deadline:
            self.expired.append(now)
            self.deadline = None


def test_a_deadline_that_passes_expires_once() -> None:
    async def scenario() -> list[float]:
        machine = SameHostDetector(2.0)
        async with machine.alarm:
            await asyncio.sleep(10)
        return machine.expired

    assert run_virtual(scenario()) == [2.0]


def test_an_extended_deadline_expires_at_the_new_time() -> None:
    async def scenario() -> list[float]:
        machine = SameHostDetector(2.0)
        async with machine.alarm:
            await asyncio.sleep(1)
            machine.deadline = 5.0
            machine.alarm.reset()
            await asyncio.sleep(10)
        return machine.expired

    assert run_virtual(scenario()) == [5.0]


def test_an_earlier_deadline_is_kept() -> None:
    async def scenario() -> list[float]:
        machine = SameHostDetector(9.0)
        async with machine.alarm:
            machine.deadline = 1.5
            machine.alarm.reset()
            await asyncio.sleep(10)
        return machine.expired

    assert run_virtual(scenario()) == [1.5]


def test_the_earliest_of_several_deadlines_is_kept() -> None:
    async def scenario() -> list[float]:
        machine, deadlines = SameHostDetector(6.0), [4.0, 2.0, None, 9.0]
        async with machine.alarm:
            for deadline in deadlines:
                machine.alarm.fire_by(deadline)
            machine.deadline = 2.0
            await asyncio.sleep(10)
        return machine.expired

    assert run_virtual(scenario()) == [2.0]


def test_nothing_expires_after_the_end_or_without_a_deadline() -> None:
    async def scenario() -> list[float]:
        machine = SameHostDetector(None)
        async with machine.alarm:
            await asyncio.sleep(1)
            machine.deadline = 3.0
            machine.alarm.reset()
        await asyncio.sleep(10)
        return machine.expired

    assert run_virtual(scenario()) == []


def test_an_error_does_not_stop_an_alarm_and_is_reported_in_its_context() -> None:
    where = ContextVar("where", default="elsewhere")

    async def scenario() -> tuple[int, list[str]]:
        told, calls = list[str](), list[float]()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(
            lambda _, context: told.append(context["handle"]._context.get(where))
        )

        def expire() -> None:
            calls.append(loop.time())
            raise ValueError

        where.set("here")
        alarm = DeadlineTimer(lambda: 1.0 + len(calls) if len(calls) < 3 else None, expire)
        where.set("elsewhere")
        async with alarm:
            await asyncio.sleep(10)
        return len(calls), told

    assert run_virtual(scenario()) == (3, ["here"] * 3)


def test_an_alarm_pauses_after_an_error_if_its_deadline_is_past() -> None:
    async def scenario() -> list[float]:
        loop, calls = asyncio.get_running_loop(), list[float]()
        loop.set_exception_handler(lambda *_: None)

        def expire() -> None:
            calls.append(loop.time())
            assert len(calls) < 50  # else a busy loop
            raise ValueError

        async with DeadlineTimer(lambda: 1.0, expire):
            await asyncio.sleep(1.0 + 3 * AFTER_ERROR_S)
        return calls

    assert len(run_virtual(scenario())) == 4
