import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from meshllm.cli.ring import watch
from meshllm.errors import LinkLost, NotAuthorised
from meshllm.status import MeshStatus, from_json, to_json
from tests.builders.fake_client import FakeClient
from tests.builders.status import status_of, waiting, with_link
from tests.cli.conftest import Invoke


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    monkeypatch.setattr(watch, "DEBOUNCE_S", 0)
    monkeypatch.setattr(watch, "REFRESH_S", 0.01)
    return FakeClient(monkeypatch)


def test_the_group_names_its_commands(meshllm: Invoke) -> None:
    text = meshllm("ring", "--help").stdout

    for name in ("status", "plan", "ticket", "members", "remove", "trace"):
        assert f"\n  {name} " in text


def test_status_shows_the_ring(meshllm: Invoke, node: FakeClient) -> None:
    result = meshllm("ring", "status", "--state", "here")

    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("ring    serving\n")
    assert node.path == Path.cwd() / "here" / "api.sock"


def test_status_in_a_pipe_has_whole_addresses(
    meshllm: Invoke, node: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")

    assert "ws://192.168.1.11:7700\n" in meshllm("ring", "status").stdout


def test_status_as_json_is_the_report_of_the_node(meshllm: Invoke, node: FakeClient) -> None:
    told = json.loads(meshllm("ring", "status", "--json").stdout)

    assert told == {"schema": 1, **to_json(status_of(3))}
    assert from_json(MeshStatus, told) == status_of(3)


def test_status_without_a_node_fails(meshllm: Invoke, node: FakeClient) -> None:
    node.statuses = [LinkLost("No node is running", hint="start one with `meshllm node`")]

    result = meshllm("ring", "status")

    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.endswith("hint: start one with `meshllm node`\n")


def test_a_watched_pipe_gets_a_line_for_each_change(meshllm: Invoke, node: FakeClient) -> None:
    later = replace(with_link(status_of(2), 1, heard_s=0.9, bytes_sent=1), since_s=755.0)
    node.statuses = [waiting("alone"), status_of(2), later, NotAuthorised("No access")]

    result = meshllm("ring", "status", "--watch", "--json")

    told = [json.loads(each) for each in result.stdout.splitlines()]
    assert [(each["schema"], each["ring"]["state"]) for each in told] == [
        (1, "waiting"),
        (1, "serving"),
    ]
    assert (result.exit_code, result.stderr) == (5, "error: No access\n")


def test_a_watched_pipe_gets_text_without_control_characters(
    meshllm: Invoke, node: FakeClient
) -> None:
    node.statuses = [waiting("alone"), status_of(2), NotAuthorised("No access")]

    result = meshllm("ring", "status", "--watch")

    assert result.stdout.count("\nmodel   ") == 2
    assert "\n\nring    serving\n" in result.stdout
    assert "\x1b" not in result.stdout


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """The master and slave descriptors of a pseudo-terminal."""
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)


_WATCH = """
import pytest
from meshllm.cli.app import main
from tests.builders.fake_client import FakeClient
FakeClient(pytest.MonkeyPatch())
main()
"""


def test_a_terminal_that_cannot_be_redrawn_gets_the_text(terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    words = [sys.executable, "-c", _WATCH, "ring", "status", "--watch"]
    environment = {**os.environ, "TERM": "dumb", "COLUMNS": "80", "PYTHONIOENCODING": "utf-8"}

    with subprocess.Popen(
        words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        shown = _read_until(ours, b"advice")
        process.send_signal(signal.SIGINT)
        shown += _read_until(ours, None)

    assert process.returncode == 130, shown.decode(errors="replace")
    assert shown.startswith(b"ring    serving")
    assert b"\x1b" not in shown


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_watched_terminal_is_redrawn_in_place_and_restored(
    terminal: tuple[int, int], number: signal.Signals, code: int
) -> None:
    ours, theirs = terminal
    words = [sys.executable, "-c", _WATCH, "ring", "status", "--watch"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
    environment["PYTHONIOENCODING"] = "utf-8"

    with subprocess.Popen(
        words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        shown = _read_until(ours, b"advice")
        assert b"advice" in shown, shown.decode(errors="replace")  # else it ended by itself
        process.send_signal(number)
        shown += _read_until(ours, None)

    assert process.returncode == code, shown.decode(errors="replace")
    assert shown.startswith(b"\x1b[?1049h")
    assert b"\x1b[?1049l" in shown
    assert "───▶".encode() in shown
    assert b"\x1b[2J" not in shown  # it would flicker
    assert b"Traceback" not in shown


def _read_until(terminal: int, wanted: bytes | None) -> bytes:
    """Read until a text is shown; None means until the other end is closed."""
    shown = b""
    deadline = time.monotonic() + 120
    while (wanted is None or wanted not in shown) and time.monotonic() < deadline:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # Linux: the other end is closed
            chunk = b""
        if not chunk:
            break
        shown += chunk
    return shown
