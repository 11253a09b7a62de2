"""`meshllm tui` with the keys and the screen of a terminal, and a fake node."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from meshllm.cli.tui.screen import TuiView
from meshllm.cli.tui.tui import Tui, read_settings
from meshllm.errors import LinkLost, MeshError, TimedOut, UserError
from meshllm.request import Event, Prefilled
from meshllm.status import RingState
from tests.builders.fake_client import FakeClient
from tests.builders.fake_ring import answer_of
from tests.builders.status import node_id, status_of, with_ring
from tests.builders.waiting import until
from tests.cli.conftest import Invoke

ENTER, DOWN, UP, CTRL_C, CTRL_G = "\r", "\x1b[B", "\x1b[A", "\x03", "\x07"


class Terminal:
    """A program with a keyboard."""

    def __init__(self, tui: Tui, keyboard: PipeInput) -> None:
        self.tui = tui
        self._keyboard = keyboard

    def type(self, *keys: str) -> None:
        """Press keys, which the program reads when this test waits."""
        self._keyboard.send_text("".join(keys))

    def message(self, text: str) -> Callable[[], bool]:
        """Return whether the message has a text."""
        return lambda: text in self.tui.screen.message


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    return FakeClient(monkeypatch)


@asynccontextmanager
async def opened(client: FakeClient) -> AsyncGenerator[Terminal, None]:
    """Run the program until the end of the context, or until a key ends it."""
    with create_pipe_input() as keyboard:
        tui = Tui(cast("Any", client), keyboard, DummyOutput())
        running = asyncio.ensure_future(tui.run())
        terminal = Terminal(tui, keyboard)
        try:
            await until(lambda: tui.screen.members)
            yield terminal
            terminal.type("q")
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_the_status_and_the_members_are_shown(client: FakeClient) -> None:
    async with opened(client) as terminal:
        screen = terminal.tui.screen
        assert screen.status == status_of(3)
        assert [each.name for each in screen.members] == ["attic", "desk"]
        assert not any("joined" in line for line in screen.log)  # all were here before
        assert any("ring of 3 serving" in line for line in screen.log)
        text = "".join(text for _, text, *_ in terminal.tui._body())
        assert "policy  auto" in text
        terminal.type("2", DOWN)
        await until(lambda: screen.view is TuiView.MEMBERS)


async def test_a_member_is_removed_once_that_is_confirmed(client: FakeClient) -> None:
    async with opened(client) as terminal:
        terminal.type("2", DOWN, "d", "n", ENTER, "d", CTRL_G, "1")
        await until(lambda: terminal.tui.screen.view is TuiView.RING)
        assert client.posted == []
        terminal.type("2", "d", "y", ENTER)
        await until(terminal.message("desk (desk1bc) was removed"))

    assert client.posted == [(node_id(1),)]


async def test_models_are_served_and_stopped(client: FakeClient) -> None:
    status = status_of(3)
    assert status.model
    client.statuses = [replace(status, models=(status.model,))]
    async with opened(client) as terminal:
        terminal.type("3", "s", "o", "t", "h", "e", "r", ENTER)
        await until(terminal.message("the mesh serves other"))
        terminal.type("d", "y", ENTER)
        await until(terminal.message("is no longer served"))

    assert [kind for kind, _ in client.posted] == ["serve", "stop"]


async def test_an_answer_is_timed(client: FakeClient) -> None:
    client.answers = [answer_of("a", 3)]
    async with opened(client) as terminal:
        terminal.type("t")
        await until(terminal.message("first token 20.0 ms, then 4.00 ms per token"))


async def test_a_ticket_is_printed_outside_of_the_screen(
    client: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = ""
    async with opened(client) as terminal:
        terminal.type("2", "c")
        while "--join" not in printed:
            await asyncio.sleep(0)
            printed += capsys.readouterr().out
        terminal.type(ENTER)
        await until(terminal.message("the ticket admits one machine"))

    assert printed == "meshllm chat --join meshllm1abc\n"
    assert client.posted == [("client", 3600, 1)]


async def test_a_setting_is_written_and_removed(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "config.toml"
    monkeypatch.setattr("meshllm.cli.tui.tui.files", lambda: (path, tmp_path / "meshllm.toml"))
    async with opened(client) as terminal:
        names = [row.name for row in terminal.tui.screen.settings]
        terminal.type("4", DOWN * names.index("memory"), ENTER, "4", "Q", ENTER)
        await until(terminal.message("error: "))
        assert not path.exists()
        terminal.type(ENTER, *"4GiB", ENTER)
        await until(terminal.message("memory = 4GiB"))
        assert path.read_text() == 'memory = "4GiB"\n'
        terminal.type("u")
        await until(terminal.message("removed memory"))
        assert "memory" not in path.read_text()


async def test_an_error_of_the_node_is_shown_and_its_return_noticed(client: FakeClient) -> None:
    async def failing(_: object) -> None:
        raise UserError("The mesh is full", hint="remove one")

    client.serve = failing  # type: ignore[method-assign,assignment]  # as it is called
    async with opened(client) as terminal:
        terminal.type("3", "s", "x", ENTER)
        await until(terminal.message("error: The mesh is full; hint: remove one"))


@pytest.mark.parametrize("error", [LinkLost("It is gone"), TimedOut("It hangs")], ids=repr)
async def test_a_node_that_does_not_answer_is_watched_until_it_does(
    client: FakeClient, error: MeshError
) -> None:
    async with opened(client) as terminal:
        screen, after = terminal.tui.screen, with_ring(status_of(3), state=RingState.FORMING)
        client.statuses = [error]
        await until(lambda: screen.away)
        terminal.type("2", "1")  # it is still said
        header = "".join(text for _, text, *_ in terminal.tui._header())
        assert "no answer from the node" in header
        assert any(str(error) in line for line in screen.log)
        client.statuses = [after]
        await until(lambda: screen.status == after)
        assert not screen.away


async def test_one_action_runs_at_a_time_and_can_be_cancelled(client: FakeClient) -> None:
    begun = asyncio.Event()

    async def waiting(_: object) -> AsyncGenerator[Event, None]:
        begun.set()
        await asyncio.Event().wait()
        yield Prefilled(1, 1)

    client.generate = waiting  # type: ignore[method-assign,assignment]  # as it is called
    async with opened(client) as terminal:
        terminal.type("t")
        await begun.wait()
        terminal.type("t")
        await until(terminal.message("the last action is not done yet"))
        terminal.type(CTRL_G)
        await until(terminal.message("cancelled"))


async def test_a_pasted_answer_is_one_line(client: FakeClient) -> None:
    async with opened(client) as terminal:
        terminal.type("3", "s", "\x1b[200~a\nb\n\x1b[201~", ENTER)
        await until(terminal.message("the mesh serves a b"))


async def test_answers_are_not_remembered(client: FakeClient) -> None:
    async with opened(client) as terminal:
        terminal.type("3", "s", "secret", ENTER)
        await until(terminal.message("the mesh serves secret"))
        terminal.type("s", UP, ENTER)
        await until(terminal.message("nothing was changed"))


async def test_a_bug_in_what_watches_the_node_ends_it(client: FakeClient) -> None:
    client.members = None  # type: ignore[method-assign,assignment]  # cannot be called
    with create_pipe_input() as keyboard:
        tui = Tui(cast("Any", client), keyboard, DummyOutput())
        with pytest.raises(ExceptionGroup) as raised:
            await tui.run()

    assert raised.group_contains(TypeError)


@pytest.mark.parametrize("keys", ["", "2i"], ids=["a view", "a ticket"])
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_ends_it(client: FakeClient, keys: str, number: signal.Signals) -> None:
    async def scenario() -> None:
        with create_pipe_input() as keyboard:
            tui = Tui(cast("Any", client), keyboard, DummyOutput())
            running = asyncio.ensure_future(tui.run())
            await until(lambda: tui._app.is_running and tui.screen.members)
            keyboard.send_text(keys)
            await until(lambda: not keys or tui._app._running_in_terminal)
            os.kill(os.getpid(), number)
            await running

    with pytest.raises(SystemExit) as raised:
        asyncio.run(scenario())
    assert raised.value.code == 128 + number


def test_ctrl_c_ends_it(client: FakeClient) -> None:
    async def scenario() -> None:
        with create_pipe_input() as keyboard:
            keyboard.send_text(f"3s{CTRL_C}")
            await Tui(cast("Any", client), keyboard, DummyOutput()).run()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(scenario())


async def test_without_a_node_it_does_not_begin(client: FakeClient) -> None:
    client.statuses = [LinkLost("No node is running")]

    with pytest.raises(LinkLost), create_pipe_input() as keyboard:
        await Tui(cast("Any", client), keyboard, DummyOutput()).run()


def test_a_pipe_is_refused(meshllm: Invoke) -> None:
    result = meshllm("tui")

    assert result.exit_code == 2
    assert "needs a terminal" in result.stderr


def test_the_ticket_of_the_settings_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHLLM_JOIN", "meshllm1secret")
    monkeypatch.setenv("MESHLLM_TOP_K", "7")

    found = {row.name: row for row in read_settings()}

    assert (found["join"].value, found["join"].given) == ("(hidden)", "")
    assert found["join"].origin == "MESHLLM_JOIN"
    assert replace(found["top_k"], meaning="") == replace(
        found["top_k"], value="7", given="7", origin="MESHLLM_TOP_K", meaning=""
    )
    assert "secret" not in str(found)
