import errno
import io
import json
import os
from contextlib import redirect_stderr
from dataclasses import replace
from math import inf, nan

import pytest

from meshllm.cli.terminal import render
from meshllm.errors import UserError
from tests.builders.fake_ring import answer_of


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal with colours."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def test_numbers_are_aligned_right_and_words_left() -> None:
    rows = [("ring of 1", 12.345, 9, None), ("two", 0.5, 1234, -1)]

    assert render.table(("name", "ms", "count", "gap"), rows).splitlines() == [
        "name          ms  count  gap",
        "ring of 1  12.35      9    -",
        "two         0.50   1234   -1",
    ]


def test_wide_characters_take_two_columns() -> None:
    assert render.table(("name", "n"), [("書斎", 1), ("ที่", 20)]).splitlines() == [
        "name   n",
        "書斎   1",
        "ที่     20",
    ]
    assert render.cut("書斎の机", 8) == "書斎の机"
    assert render.cut("書斎の机", 7) == "書斎の…"


def test_a_table_escapes_names_that_others_chose() -> None:
    assert render.table(("a\x1b[2J", "n"), [("b\nc", 1)]).splitlines() == [
        "a\\x1b[2J  n",
        "b\\nc      1",
    ]


def test_meanings_are_wrapped_beside_their_names(
    monkeypatch: pytest.MonkeyPatch, terminal: Terminal
) -> None:
    rows = [("/set NAME", "change a setting of the next answers"), ("/x", "")]
    whole = render.explained(rows)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "30")

    assert whole == "/set NAME  change a setting of the next answers\n/x"
    assert render.explained(rows) == (
        "/set NAME  change a setting of\n           the next answers\n/x"
    )


def test_json_has_null_for_what_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"a": nan, "b": [inf, {"c": -inf, "d": (1.5, nan)}], "e": 2, "f": None}

    render.dump(found)

    [line] = capsys.readouterr().out.splitlines()
    told = json.loads(line, parse_constant=pytest.fail)
    assert told == {
        "schema": 1, "a": None, "b": [None, {"c": None, "d": [1.5, None]}], "e": 2, "f": None
    }  # fmt: skip


def test_a_table_may_have_no_rows() -> None:
    assert render.table(("a", "b"), []) == "a  b"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (9.6 * 2**20, "9.6 MiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_bytes_are_written_as_people_read_them(count: float, text: str) -> None:
    assert render.bytes_of(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (True, "true"), (0.0, "0"), (0.25, "0.25"), ("x", "x"), (3, "3")],
)
def test_settings_are_written_plainly(value: object, text: str) -> None:
    assert render.plain(value) == text


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    told = render.statistics(replace(answer_of("Hi", 1), ms_per_token=0.0, tokens_per_second=0.0))

    assert told == "2 prompt tokens, 1 generated, finish reason: stop\nfirst token 20.0 ms"


def test_a_prompt_of_one_token_is_counted_as_one() -> None:
    told = render.statistics(replace(answer_of("Hi", 1), prompt_tokens=1))

    assert told.startswith("1 prompt token, 1 generated,")


def test_tokens_per_step_are_shown() -> None:
    assert "tokens per step" not in render.statistics(answer_of("Hi", 2))
    told = render.statistics(replace(answer_of("Hi", 2), tokens_per_step=2.54))

    assert "250.0 tokens/s, 2.5 tokens per step" in told


def test_cached_prompt_tokens_are_shown() -> None:
    told = render.statistics(replace(answer_of("Hi", 2), cached_tokens=1))

    assert told.startswith("2 prompt tokens (1 cached), 2 generated")


def test_json_carries_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    render.dump({"model": "Grüße"})

    assert json.loads(capsys.readouterr().out) == {"schema": 1, "model": "Grüße"}


def test_a_terminal_sees_colour(terminal: Terminal) -> None:
    with redirect_stderr(terminal):
        render.error(UserError("no", hint="yes"))

    assert terminal.getvalue() == "\x1b[1;31merror:\x1b[0m no\n\x1b[36mhint:\x1b[0m yes\n"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colour_can_be_turned_off(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)

    with redirect_stderr(terminal):
        render.error(UserError("no"))

    assert terminal.getvalue() == "error: no\n"


def test_messages_have_the_width_of_their_own_terminal(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(terminal, "fileno", lambda: 7)
    widths = {7: 12}  # stdout is wider
    monkeypatch.setattr(
        os, "get_terminal_size", lambda at: os.terminal_size((widths.get(at, 80), 9))
    )

    with redirect_stderr(terminal):
        render.Status(terminal).show("書斎の机 is loaded")
        shown = terminal.getvalue()
        render.Status(terminal).show("書斎の机 is loaded", ", 3 s")
        told = render.wrapped("two words here")

    assert shown == "\r\x1b[K\x1b[2m書斎の机 i…\x1b[0m"
    assert terminal.getvalue() == f"{shown}\r\x1b[K\x1b[2m書斎…, 3 s\x1b[0m"
    assert told == "two words \nhere"


def test_a_status_line_is_replaced_and_erased(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "9")

    with render.Status(terminal) as status:
        status.show("one")
        status.show("two is too long")

    assert terminal.getvalue() == "\r\x1b[Kone\r\x1b[Ktwo is …\r\x1b[K"


@pytest.mark.parametrize(("encoding", "has_bullets"), [("latin-1", False), ("utf-8", True)])
def test_markdown_is_rendered_on_terminals_with_its_characters(
    monkeypatch: pytest.MonkeyPatch, encoding: str, has_bullets: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace")
    monkeypatch.setattr(stdout, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdout", stdout)

    with render.answering(markdown=True) as write:
        write("- one\n")

    assert isinstance(stdout.buffer, io.BytesIO)
    text = stdout.buffer.getvalue().decode(encoding)
    assert ("•" in text, "\\u2022" in text) == (has_bullets, False)


def test_reasoning_stays_above_the_answer(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    with render.Status(terminal) as status:
        status.show("one")
        status.reason("I\x1b[31m")
        status.show("two")
        status.reason(" think")
        status.clear()

    assert terminal.getvalue() == "\r\x1b[Kone\r\x1b[KI\\x1b[31m think\n\n"


def test_a_pipe_gets_no_reasoning() -> None:
    pipe = io.StringIO()

    with render.Status(pipe) as status:
        status.reason("I think")

    assert pipe.getvalue() == ""


def test_no_progress_is_shown_behind_the_text_of_an_answer(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    with render.Status(terminal) as status:
        status.give_way("")
        status.show("one")
        status.give_way("text")
        status.show("two")

    assert terminal.getvalue() == "\r\x1b[Kone\r\x1b[K"


def test_a_terminal_that_is_gone_ends_nothing(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    discarded = list[object]()
    monkeypatch.setattr(render, "discard", discarded.append)

    def fail(_: str) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with render.Status(terminal) as status:
        status.show("one")
        terminal.write = fail  # type: ignore[method-assign]
        status.show("two")
        status.reason("Hm.")

    assert set(discarded) == {terminal}


def test_notes_are_written_behind_the_status_line(capsys: pytest.CaptureFixture[str]) -> None:
    with render.Status(io.StringIO()) as status:
        status.notes.append("attic is gone; 0.6 s")
        assert capsys.readouterr().err == ""
    assert capsys.readouterr().err == "attic is gone; 0.6 s\n"


def test_a_pipe_gets_no_status_line() -> None:
    pipe = io.StringIO()

    with render.Status(pipe) as status:
        status.show("loading")

    assert pipe.getvalue() == ""


def test_a_dumb_terminal_gets_no_status_line(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")

    with render.Status(terminal) as status:
        status.show("loading")

    assert terminal.getvalue() == ""


def test_the_name_of_a_hop_does_not_control_the_terminal() -> None:
    answer = answer_of("hi", 3)
    hop = replace(answer.hops[0], node="\x1b[2J\nfox")

    shown = render.statistics(replace(answer, hops=(hop,)))

    assert r" \x1b[2J\nfox " in shown
    assert "\x1b" not in shown


def test_the_name_of_a_folder_is_cut_at_its_start() -> None:
    names = map(render.cut_model, ("/a/b", "/home/models/llama-3", "a-model-of-many-letters"))

    assert list(names) == ["/a/b", "…/models/llama-3", "a-model-of-many…"]
