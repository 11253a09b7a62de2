import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress

import pytest
import typer

from meshllm.cli.shared.signals import (
    Drain,
    cancelled_by_signals,
    draining,
    unwinding_on_signals,
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_first_signal_starts_leaving(number: signal.Signals) -> None:
    left = asyncio.Event()

    with draining() as drain:
        drain.leave = left.set
        os.kill(os.getpid(), number)
        await left.wait()

    assert drain.is_asked


def test_the_second_signal_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    drain = Drain(None, leave=lambda: None)

    drain()
    assert codes == []
    drain()
    assert codes == [130]


def test_the_second_signal_also_ends_what_would_outlive_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: list[object] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    drain = Drain(None, leave=lambda: None, kill=lambda: ends.append("engine"))

    drain()
    drain()

    assert ends == ["engine", 130]


async def test_a_closed_terminal_starts_leaving_and_never_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = asyncio.Event()
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"exit {code}"))

    with draining() as drain:
        drain.leave = left.set
        for _ in range(2):  # one of the system, and one of a shell
            os.kill(os.getpid(), signal.SIGHUP)
            await left.wait()
            await asyncio.sleep(0)

    assert drain.is_asked


async def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with draining() as drain:
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0)

            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert not drain.is_asked
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_a_signal_before_leave_is_set_ends_the_command() -> None:
    async def command() -> None:
        with draining():
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()

    with pytest.raises(typer.Exit) as left:
        await asyncio.create_task(command())

    assert left.value.exit_code == 130


@pytest.mark.parametrize("handling", [draining, cancelled_by_signals])
async def test_another_cancellation_is_passed_on(
    handling: Callable[[], AbstractContextManager[object]],
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    async def command() -> None:
        with handling():
            await asyncio.Event().wait()

    task = asyncio.create_task(command())
    await asyncio.sleep(0)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert signal.getsignal(signal.SIGTERM) == before


async def test_signal_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)

    with draining():
        assert signal.getsignal(signal.SIGTERM) != before

    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_cancels_a_task_and_raises_in_no_callback(number: signal.Signals) -> None:
    loop = asyncio.get_running_loop()
    taken: list[object] = []
    loop.set_exception_handler(lambda _, context: taken.append(context))

    async def command() -> object:
        try:
            with cancelled_by_signals():
                loop.call_soon(os.kill, os.getpid(), number)
                try:
                    await asyncio.Event().wait()
                finally:  # a closed terminal may send several
                    os.kill(os.getpid(), signal.SIGHUP)
                    await asyncio.sleep(0)
        except SystemExit as left:
            return left.code
        return None

    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)]
    assert await asyncio.create_task(command()) == 128 + number
    assert not taken
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)] == before


async def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with cancelled_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_unwinds_once() -> None:
    before, steps = signal.getsignal(signal.SIGHUP), list[str]()

    def measure() -> None:
        with unwinding_on_signals():
            try:
                os.kill(os.getpid(), signal.SIGHUP)
            finally:  # one of the system, and one of a shell
                os.kill(os.getpid(), signal.SIGHUP)
                steps.append("removed")

    with pytest.raises(SystemExit, match="129"):
        measure()
    assert steps == ["removed"]
    assert signal.getsignal(signal.SIGHUP) is before


@pytest.fixture(
    params=[signal.default_int_handler, signal.SIG_IGN], ids=["foreground", "background"]
)
def interrupt(request: pytest.FixtureRequest) -> Iterator[object]:
    before = signal.signal(signal.SIGINT, request.param)
    yield request.param
    signal.signal(signal.SIGINT, before)


def test_a_signal_during_a_child_task_cancels_the_main_task(interrupt: object) -> None:
    steps = list[str]()

    async def child() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        steps.append("not interrupted")
        await asyncio.Event().wait()

    async def measure() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(child())
        finally:
            steps.append("unwound")

    with pytest.raises(SystemExit, match="143"), unwinding_on_signals():
        asyncio.run(measure())
    assert steps == ["not interrupted", "unwound"]
    assert signal.getsignal(signal.SIGINT) is interrupt


def test_a_signal_that_is_taken_inside_ends_the_command_afterwards(interrupt: object) -> None:
    steps = list[str]()

    async def measure() -> None:
        with suppress(asyncio.CancelledError):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        steps.append("measured")

    with pytest.raises(SystemExit, match="143"), unwinding_on_signals():
        asyncio.run(measure())
    assert steps == ["measured"]
    assert signal.getsignal(signal.SIGINT) is interrupt


def test_a_signal_unwinds_a_background_job_that_ignores_ctrl_c() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit, match="143"), unwinding_on_signals():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, before)


def test_unwinding_respects_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with unwinding_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
