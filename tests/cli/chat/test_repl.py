import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from meshllm.cli.chat.repl import _history

ROOT = Path(__file__).parents[3]
FAKE = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C reaches this process
from tests.builders.fake_ring import main
main()
"""
PROMPT = ">>>"
NO_CPR = {"PROMPT_TOOLKIT_NO_CPR": "1"}  # this terminal does not report the cursor position
PATIENCE = 120.0  # s; a longer wait fails the test


class Terminal:
    """A conversation in a pseudo-terminal."""

    def __init__(self, *words: str, **environ: str) -> None:
        self.fd, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", FAKE, "chat", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "TERM": "xterm",
                "NO_COLOR": "1",
                **NO_CPR,
                **environ,
            },
        )
        self.name = os.ttyname(theirs)
        os.close(theirs)
        self.seen = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)

    def press(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def wait_for(self, text: str) -> str:
        """Read until a text appears; return everything up to it, without escape sequences."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.seen:
            assert time.monotonic() < deadline, f"no {text!r} in {self.seen!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                self.seen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self._read())
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def wait(self) -> int:
        """Read to the end and return the exit code."""
        while select.select([self.fd], [], [], PATIENCE)[0] and (chunk := self._read()):
            self.seen += chunk
        return self.process.wait(PATIENCE)

    def _read(self) -> str:
        try:
            return os.read(self.fd, 65536).decode(errors="replace")
        except OSError:  # the other side has closed
            return ""


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    with Terminal() as terminal:
        terminal.wait_for(PROMPT)
        yield terminal


def test_a_conversation_answers_and_exits(terminal: Terminal) -> None:
    terminal.press("hello there\r")
    terminal.wait_for("You said: hello there\r\n")
    terminal.wait_for(PROMPT)
    terminal.press("/show\r")
    terminal.wait_for("messages")
    turns = terminal.wait_for("\r\n")
    terminal.wait_for(PROMPT)
    terminal.press("\x04")

    assert turns.strip() == "2"
    assert terminal.wait() == 0


def test_a_quiet_conversation_has_no_notes() -> None:
    with Terminal("--quiet", "--max-tokens", "2") as terminal:
        greeted = terminal.wait_for(PROMPT)
        terminal.press("hello there\r")
        terminal.wait_for("You said: hello there\r\n")
        said = terminal.wait_for(PROMPT)
        terminal.press("\x04")

        assert terminal.wait() == 0
    assert "/help" not in greeted
    assert "was cut" not in said


@pytest.mark.parametrize("columns", [40, 24])
def test_the_first_line_breaks_between_words(columns: int) -> None:
    with Terminal(COLUMNS=str(columns)) as terminal:
        greeted = terminal.wait_for(PROMPT)
        terminal.press("\x04")

        assert terminal.wait() == 0
    note, exits, _ = greeted.partition("exits")
    lines = [line.strip() for line in (note + exits).split("\r\n") if line.strip()]
    assert " ".join(lines) == "builtin; /help lists commands, Ctrl-D exits"
    assert len(lines) == 2
    assert max(map(len, lines)) <= columns


def test_a_conversation_notes_that_an_answer_was_cut() -> None:
    with Terminal("--max-tokens", "2") as terminal:
        assert "/help" in terminal.wait_for(PROMPT)
        terminal.press("hello there\r")
        assert terminal.wait_for("was cut after 4 tokens by `max_tokens`")


def test_control_c_stops_the_answer_and_keeps_its_text(terminal: Terminal) -> None:
    terminal.press("loop\r")
    terminal.wait_for("You said: loop on on on")
    terminal.press("\x03")
    terminal.wait_for("stopped")
    terminal.wait_for(PROMPT)
    terminal.press("/show\r")
    terminal.wait_for("messages")
    turns = terminal.wait_for("\r\n")
    terminal.wait_for(PROMPT)
    terminal.press("/bye\r")

    assert turns.strip() == "2"
    assert terminal.wait() == 0
    assert "cancelled 1, open False" in terminal.seen


def test_control_c_at_an_empty_prompt_says_how_to_exit(terminal: Terminal) -> None:
    terminal.press("\x03")

    assert terminal.wait_for("exit with Ctrl-D or /exit")
    terminal.wait_for(PROMPT)


def test_a_line_that_is_not_utf8_is_refused(terminal: Terminal) -> None:
    os.write(terminal.fd, b"caf\xe9\r")
    terminal.wait_for("The line is not UTF-8 at character 3")
    terminal.wait_for(PROMPT)
    terminal.press("hello\r")

    assert terminal.wait_for("You said: hello\r\n")


def test_control_z_suspends_and_types_nothing(terminal: Terminal) -> None:
    terminal.press("\x1a")  # nothing could resume this process group, so the system goes on at once
    terminal.wait_for(PROMPT)
    terminal.press("hello\r")

    assert terminal.wait_for("You said: hello\r\n")


@pytest.mark.parametrize("word", ["exit", "quit", "/exit", "/quit", "/bye", " EXIT "])
def test_common_words_exit(terminal: Terminal, word: str) -> None:
    terminal.press(f"{word}\r")

    assert terminal.wait() == 0


def test_the_last_question_is_asked_again_or_edited(terminal: Terminal) -> None:
    terminal.press("one two\r")
    terminal.wait_for("You said: one two\r\n")
    terminal.wait_for(PROMPT)
    terminal.press("/regenerate\r")
    terminal.wait_for("You said: one two\r\n")
    terminal.wait_for(PROMPT)
    terminal.press("/edit\r")
    terminal.wait_for(f"{PROMPT} one two")
    terminal.press(" three\r")
    terminal.wait_for("You said: one two three\r\n")
    terminal.wait_for(PROMPT)
    terminal.press("/edit four\r")
    terminal.wait_for("You said: four\r\n")
    terminal.wait_for(PROMPT)
    terminal.press("/show\r")
    terminal.wait_for("messages")

    assert terminal.wait_for("\r\n").strip() == "2"


def test_an_edit_that_is_stopped_keeps_the_answer(terminal: Terminal) -> None:
    terminal.press("one\r")
    terminal.wait_for("You said: one\r\n")
    terminal.wait_for(PROMPT)
    terminal.press("/edit\r")
    terminal.wait_for(f"{PROMPT} one")
    terminal.press("\x03")
    terminal.wait_for(PROMPT)
    terminal.press("/show\r")
    terminal.wait_for("messages")

    assert terminal.wait_for("\r\n").strip() == "2"


def test_an_edit_that_is_stopped_before_its_answer_keeps_the_last_one(terminal: Terminal) -> None:
    terminal.press("one\r")
    terminal.wait_for("You said: one\r\n")
    terminal.wait_for(PROMPT)
    terminal.press("/edit silence\r")
    terminal.wait_for("prefill")
    terminal.press("\x03")
    terminal.wait_for("stopped")
    terminal.wait_for(PROMPT)
    terminal.press("/show\r")
    terminal.wait_for("messages")

    assert terminal.wait_for("\r\n").strip() == "2"


def test_an_answer_is_copied_to_the_clipboard_of_the_terminal(terminal: Terminal) -> None:
    terminal.press("hello\r")
    terminal.wait_for("You said: hello\r\n")
    terminal.wait_for(PROMPT)
    terminal.press("/copy\r")

    assert terminal.wait_for(f"\x1b]52;c;{b64encode(b'You said: hello').decode()}\x07")


def test_a_long_line_is_not_shown_as_several(terminal: Terminal) -> None:
    terminal.press(f"{'x' * 100}yz")

    shown = terminal.wait_for("yz")

    assert shown.count("x") == 100
    assert "..." not in shown


def test_quotes_and_alt_enter_make_several_lines(terminal: Terminal) -> None:
    terminal.press('"""one\r')
    terminal.wait_for("...")
    terminal.press('two"""\r')
    terminal.wait_for("You said: one two\r\n")
    terminal.wait_for(PROMPT)
    terminal.press("three\x1b\rfour\r")

    assert terminal.wait_for("You said: three four\r\n")


def test_pasted_lines_are_one_message(terminal: Terminal) -> None:
    terminal.press("\x1b[200~one\ntwo\nthree\x1b[201~\r")

    assert terminal.wait_for("You said: one two three\r\n")


def test_tab_completes_commands_and_settings(terminal: Terminal) -> None:
    terminal.press("/se\t")
    terminal.wait_for("/set")
    terminal.press(" temp\t 0.5\r")

    assert terminal.wait_for("temperature = 0.5")


def test_an_error_leaves_the_conversation_open(terminal: Terminal) -> None:
    terminal.press("/nonsense\r")
    terminal.wait_for("error: Unknown command `/nonsense`")
    terminal.wait_for(PROMPT)
    terminal.press("hi\r")

    assert terminal.wait_for("You said: hi\r\n")


def test_the_history_file_is_private(terminal: Terminal, home: Path) -> None:
    terminal.press("hello\r")
    terminal.wait_for("You said: hello\r\n")
    terminal.wait_for(PROMPT)
    terminal.press("/bye\r")
    terminal.wait()

    history = home / "state" / "meshllm" / "history"
    assert "+hello\n" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("line", ["", "loop\r"])
def test_sigterm_restores_the_terminal(line: str) -> None:
    with Terminal() as terminal:
        tty = os.open(terminal.name, os.O_RDWR | os.O_NOCTTY)
        terminal.wait_for(PROMPT)
        terminal.press(line)
        if line:
            terminal.wait_for(" on on")
        busy = termios.tcgetattr(tty)[3]
        terminal.process.terminate()
        code = terminal.process.wait(PATIENCE)
        after = termios.tcgetattr(tty)[3]
        os.close(tty)

    assert code == 143
    assert not busy & termios.ECHO
    assert after & termios.ECHO
    assert after & termios.ICANON


def test_a_line_that_cannot_be_written_stays_in_memory(home: Path) -> None:
    history = _history()
    history.append_string("one")
    file = home / "state" / "meshllm" / "history"
    file.unlink()
    file.mkdir()

    history.append_string("two")

    assert history.get_strings() == ["one", "two"]


def test_markdown_is_rendered_unless_plain() -> None:
    with Terminal() as terminal:
        terminal.wait_for(PROMPT)
        terminal.press("say *this*\r")
        terminal.wait_for("say *this*")
        assert "say this" in terminal.wait_for("say this")
    with Terminal("--plain") as terminal:
        terminal.wait_for(PROMPT)
        terminal.press("say *this*\r")
        terminal.wait_for("say *this*")
        assert "say this" not in terminal.wait_for(PROMPT)


def test_history_can_be_turned_off(home: Path) -> None:
    with Terminal(MESHLLM_HISTORY="0") as terminal:
        terminal.wait_for(PROMPT)
        terminal.press("/bye\r")

        assert terminal.wait() == 0

    assert not (home / "state").exists()


def test_the_prompt_appears_before_the_ring_forms(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with Terminal(WAITS_FOR=str(go)) as terminal:
        terminal.wait_for(PROMPT)
        terminal.press("early\r")

        terminal.wait_for("loading builtin")
        go.touch()
        terminal.wait_for("You said: early\r\n")


def test_exit_does_not_wait_for_the_ring(tmp_path: Path) -> None:
    with Terminal(WAITS_FOR=str(tmp_path / "never")) as terminal:
        terminal.wait_for(PROMPT)
        terminal.press("\x04")

        assert terminal.wait() == 0


def test_a_ring_that_does_not_form_ends_the_conversation() -> None:
    with Terminal("--model", "missing") as terminal:
        code = terminal.wait()

    assert code == 4
    assert "error: There is no model `missing`\r\n" in terminal.seen


def test_json_needs_a_prompt() -> None:
    with Terminal("--json") as terminal:
        code = terminal.wait()

    assert code == 2
    assert "`--json` and `--raw` need a prompt" in terminal.seen
