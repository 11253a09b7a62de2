import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

from meshllm.node.supervisor import Supervisor, contained
from tests.builders.waiting import timers_fired

Told = dict[str, Any]


def fail() -> None:
    raise ValueError("a bug")


async def fail_late() -> None:
    fail()


def forget_a_task() -> None:
    asyncio.get_running_loop().create_task(fail_late())  # on purpose


def schedule_more() -> None:
    asyncio.get_running_loop().call_soon(fail)


async def settle() -> None:
    await timers_fired()
    gc.collect()
    await asyncio.sleep(0)


@pytest.fixture
async def told() -> list[Told]:
    """The errors that reach the previous handler."""
    heard: list[Told] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: heard.append(told))
    return heard


@pytest.mark.parametrize(
    "begin",
    [
        lambda: asyncio.get_running_loop().call_soon(fail),
        lambda: asyncio.get_running_loop().call_later(0.0, fail),
        lambda: asyncio.get_running_loop().call_soon(schedule_more),
        forget_a_task,
    ],
    ids=["callback", "timer", "what a callback schedules", "task"],
)
async def test_an_unhandled_error_is_a_failure_and_passed_on(
    told: list[Told], begin: Callable[[], object]
) -> None:
    with Supervisor() as supervisor:
        with supervisor.scope():
            begin()

        await settle()

        assert str(supervisor.failed.exception()) == "a bug"
    assert [str(each["exception"]) for each in told] == ["a bug"]


async def test_an_error_outside_of_the_scope_is_passed_on_only(told: list[Told]) -> None:
    with Supervisor() as supervisor:
        asyncio.get_running_loop().call_soon(fail)

        await settle()

        assert not supervisor.failed.done()
    assert len(told) == 1


async def test_the_error_of_a_transport_or_an_unawaited_future_ends_nothing(
    told: list[Told],
) -> None:
    with Supervisor() as supervisor:
        with supervisor.scope():
            loop = asyncio.get_running_loop()
            loop.create_future().set_exception(ValueError("nobody asks"))
            loop.call_exception_handler({"message": "lost", "exception": ValueError("a link")})

            await settle()

        assert not supervisor.failed.done()
    assert len(told) == 2


@pytest.mark.parametrize("order", ["the first", "the second"])
async def test_programs_on_one_loop_end_in_any_order(told: list[Told], order: str) -> None:
    loop = asyncio.get_running_loop()
    around = loop.get_exception_handler()
    first, second = Supervisor(), Supervisor()
    first.__enter__()
    second.__enter__()
    gone, stays = (first, second) if order == "the first" else (second, first)

    gone.__exit__()
    with gone.scope():
        loop.call_soon(fail)
    await settle()
    with stays.scope():
        loop.call_soon(fail)
    await settle()
    error = stays.failed.exception()
    stays.__exit__()

    assert str(error) == "a bug"
    assert gone.failed.cancelled()
    assert len(told) == 2
    assert loop.get_exception_handler() is around


async def test_a_handler_set_meanwhile_stays(told: list[Told]) -> None:
    loop = asyncio.get_running_loop()

    def later(_: asyncio.AbstractEventLoop, told: Told) -> None: ...

    with Supervisor():
        loop.set_exception_handler(later)

    assert loop.get_exception_handler() is later


async def test_without_another_handler_the_loop_logs_the_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Supervisor() as supervisor:
        with supervisor.scope():
            asyncio.get_running_loop().call_soon(fail)
        await settle()

    assert "a bug" in caplog.text


def test_a_bug_in_a_job_is_logged_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    reported = list[Exception]()

    with contained("bug in a job", reported.append):
        fail()
    with contained("bug in another"):
        fail()

    assert [str(each) for each in reported] == ["a bug"]
    assert [each.getMessage() for each in caplog.records] == ["bug in a job", "bug in another"]
    assert all(each.exc_info for each in caplog.records)


def test_a_cancelled_job_is_not_a_bug(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(asyncio.CancelledError), contained("bug in a job"):
        raise asyncio.CancelledError

    assert not caplog.records
