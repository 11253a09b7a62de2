import errno
import io
import os

import pytest

from meshllm.cli.chat import prompt
from meshllm.cli.chat.prompt import read_prompt
from meshllm.errors import UserError


class Folder(io.RawIOBase):
    """Standard input that is a folder."""

    def readable(self) -> bool:
        return True

    def readinto(self, _: object) -> int:
        raise OSError(errno.EISDIR, "Is a directory")


class Terminal(io.TextIOWrapper):
    """Standard input: a terminal, or piped bytes."""

    def __init__(self, data: bytes | None = None) -> None:
        self.source = io.BytesIO(b"typed later" if data is None else data)
        super().__init__(self.source)
        self.is_terminal = data is None

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize(
    ("argument", "piped", "expected"),
    [
        ("hi", None, "hi"),
        ("hi", b"", "hi"),
        (None, b"piped\n", "piped"),
        ("-", b"piped\n", "piped"),
        ("hi", b"piped\n", "piped\n\nhi"),
        ("-", None, "typed later"),
        (None, b"  two\n\nparts \r\n\n", "  two\n\nparts "),
        (None, "Grüße 🦊\n".encode(), "Grüße 🦊"),
        ("Grüße", None, "Grüße"),
    ],
)
def test_a_prompt_is_what_was_piped_then_the_argument(
    argument: str | None, piped: bytes | None, expected: str
) -> None:
    assert read_prompt(argument, Terminal(piped)) == expected


def test_a_pipe_that_says_nothing_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "QUIET_S", 0.0)
    source, sink = os.pipe()
    with open(source) as stdin, open(sink, "wb") as parent:  # noqa: PTH123  # a pipe
        noted = list[str]()

        def note() -> None:
            noted.append("waits")
            parent.write(b"late\n")
            parent.close()

        assert read_prompt("hi", stdin, waits=note) == "late\n\nhi"
    assert noted == ["waits"]


def test_a_terminal_without_an_argument_means_a_conversation() -> None:
    assert read_prompt(None, Terminal()) is None


def test_standard_input_may_be_closed() -> None:
    assert read_prompt("hi", None) == "hi"
    for argument in (None, "-"):  # nobody could type
        with pytest.raises(UserError, match="The prompt is empty"):
            read_prompt(argument, None)


def test_standard_input_may_be_for_writing_only() -> None:
    with open(os.open(os.devnull, os.O_WRONLY)) as stdin:  # noqa: PTH123  # as `nohup` leaves it
        assert read_prompt("hi", stdin) == "hi"
        with pytest.raises(UserError, match="The prompt is empty"):
            read_prompt("-", stdin)


def test_standard_input_that_cannot_be_read_is_an_error() -> None:
    stdin = io.TextIOWrapper(io.BufferedReader(Folder()))

    with pytest.raises(UserError, match="Standard input cannot be read: is a directory"):
        read_prompt("hi", stdin)


@pytest.mark.parametrize(
    ("argument", "piped"), [("", b""), (None, b"\n\n"), ("-", b""), (" ", None)]
)
def test_an_empty_prompt_is_refused(argument: str | None, piped: bytes | None) -> None:
    with pytest.raises(UserError, match="The prompt is empty"):
        read_prompt(argument, Terminal(piped))


def test_piped_text_is_read_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "MAX_PIPED_BYTES", 8)
    endless = Terminal(b"x" * 1000)

    assert read_prompt(None, Terminal(b"x" * 8)) == "x" * 8
    with pytest.raises(UserError, match="Standard input has more than 8 bytes"):
        read_prompt(None, endless)
    assert endless.source.tell() == 9  # the rest was not read


def test_invalid_utf8_is_located() -> None:
    with pytest.raises(UserError, match="byte 0x80 at offset 2"):
        read_prompt(None, Terminal(b"ab\x80"))


def test_an_argument_that_is_not_utf8_is_located() -> None:
    with pytest.raises(UserError, match="The prompt is not UTF-8 at character 3"):
        read_prompt("caf\udce9", Terminal())
