"""The process of an engine: started again, and stopped with its children."""

import asyncio
import ctypes
import errno
import itertools
import sys
from pathlib import Path

import pytest

from meshllm.node.provider import EngineProcess, process
from tests.builders.engine_children import is_running, written_pid
from tests.builders.waiting import until

pytestmark = pytest.mark.socket

PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "FIRST_RESTART_S", 0.05)


async def test_a_command_that_cannot_be_run_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    running = asyncio.ensure_future(EngineProcess(["/nonexistent/engine"]).run())
    try:
        await until(lambda: caplog.text.count("No such file") >= 2)
    finally:
        running.cancel()
        await asyncio.wait([running])


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "too many"), RuntimeError("too many"), OSError("too many")]
)
async def test_a_restart_that_the_system_refuses_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    engine, told = EngineProcess(["true"]), list[str]()

    def refuse() -> int:
        raise error

    monkeypatch.setattr(process, "_free_port", refuse)

    assert await engine._run_once(told.append) == "too many"
    assert told == ["cannot be started"]
    assert engine.pid is None


async def test_each_start_has_another_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_free_port", itertools.count(7001).__next__)
    told: asyncio.Queue[str] = asyncio.Queue()
    engine = EngineProcess(["true"])
    running = asyncio.ensure_future(engine.run(lambda _: told.put_nowait(engine.url)))
    try:
        async with asyncio.timeout(60):
            first, second = await told.get(), await told.get()
    finally:
        running.cancel()
        await asyncio.wait([running])

    assert first != second


@pytest.mark.parametrize("has_crashed", [True, False])
async def test_no_child_of_an_engine_outlives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_crashed: bool
) -> None:
    monkeypatch.setattr(process, "STOP_S", 0.5)
    monkeypatch.setattr(process, "FIRST_RESTART_S", 60.0)
    told = tmp_path / "pid"
    engine = _with_stubborn_child(told, "" if has_crashed else "wait")
    running = asyncio.ensure_future(engine.run())
    await until(lambda: written_pid(told))
    if not has_crashed:
        running.cancel()
        await asyncio.wait([running])
        assert not is_running(written_pid(told))
    await until(lambda: not is_running(written_pid(told)))
    running.cancel()
    await asyncio.wait([running])


async def test_a_child_that_outlives_its_engine_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "STOP_S", 3600.0)
    monkeypatch.setattr(process, "FIRST_RESTART_S", 3600.0)
    told, ended = tmp_path / "pid", asyncio.Event()
    engine = _with_stubborn_child(told)
    running = asyncio.ensure_future(engine.run(lambda _: ended.set()))
    await ended.wait()
    assert engine.pid is None
    engine.kill()
    await until(lambda: not is_running(written_pid(told)))
    running.cancel()
    await asyncio.wait([running])


async def test_the_first_process_of_a_container_takes_in_orphans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux lets another process than the first take in orphans")
    monkeypatch.setattr(process, "STOP_S", 3600.0)
    control = ctypes.CDLL(None).prctl
    control(PR_SET_CHILD_SUBREAPER, 1)
    try:
        async with asyncio.timeout(60):
            told = await EngineProcess(["sh", "-c", "sleep 600 &"])._run_once(lambda _: None)
    finally:
        control(PR_SET_CHILD_SUBREAPER, 0)

    assert told == "code 0"


def _with_stubborn_child(told: Path, last: str = "") -> EngineProcess:
    """An engine whose child writes its process id and ignores SIGTERM; ``last`` ends it."""
    child = "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    child += " print(os.getpid(), file=open(sys.argv[1], 'w')); time.sleep(600)"
    command = f'{sys.executable} -c "$0" "$1" & while [ ! -s "$1" ]; do sleep 0.01; done; {last}'
    return EngineProcess(["sh", "-c", command, child, str(told)])
