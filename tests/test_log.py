"""Log records on stderr, and their format."""

import asyncio
import errno
import json
import logging
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshllm.log import ACCEPT_SILENCE_S, escape, escape_answer, event, is_json, setup

logger = logging.getLogger("meshllm.node")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("meshllm")
    handlers, level = root.handlers[:], ours.level
    yield
    root.handlers[:] = handlers
    ours.setLevel(level)


@pytest.mark.parametrize(("verbosity", "lines"), [(0, 1), (1, 2), (2, 3), (7, 3)])
def test_each_v_shows_one_level_more(
    verbosity: int, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    setup(verbosity)

    logger.warning("disk is full")
    logger.info("joined")
    logger.debug("> Activation")

    assert len(capsys.readouterr().err.splitlines()) == lines


def test_other_libraries_keep_to_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    setup(2)

    logging.getLogger("elsewhere").info("news")

    assert capsys.readouterr().err == ""


def test_a_second_setup_does_not_duplicate_records(capsys: pytest.CaptureFixture[str]) -> None:
    setup(1)
    setup(1)

    logger.info("joined %s", "ring 7")

    captured = capsys.readouterr()
    assert captured.err.endswith(" info meshllm.node joined ring 7\n")
    assert captured.err.count("joined") == 1
    assert captured.out == ""


def test_a_record_from_a_peer_cannot_forge_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup(0)

    logger.warning("peer says %s", "hi\n12:00:00 error meshllm.node \x1b[31mfire")

    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("peer says hi")
    assert second == "    12:00:00 error meshllm.node \\x1b[31mfire"


def test_an_event_is_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    setup(1)

    event("ring", epoch=3, policy="fastest", hurt=False, lost=None)

    assert capsys.readouterr().err.endswith(
        ' info meshllm.events.ring epoch=3 policy="fastest" hurt=false lost=null\n'
    )


def test_json_has_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup(1, json=True)

    event("ring", epoch=3)
    logger.info("left\nat %d", 9)

    ring, left = map(json.loads, capsys.readouterr().err.splitlines())
    assert ring.pop("time").endswith("+00:00")
    assert ring == {"level": "info", "logger": "meshllm.events.ring", "fields": {"epoch": 3}}
    assert left["message"] == "left\nat 9"


def test_json_has_the_hint_of_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    setup(0, json=True)

    logger.error("full", extra={"hint": "make room"})
    logger.error("full", extra={"hint": None})

    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["message"], first["hint"]) == ("full", "make room")
    assert "hint" not in second


def test_is_json_follows_the_last_setup() -> None:
    setup(0)
    assert not is_json()

    setup(0, json=True)
    assert is_json()


def test_json_keeps_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    setup(0, json=True)

    try:
        int("nine")
    except ValueError:
        logger.exception("a bug")

    message = json.loads(capsys.readouterr().err)["message"]
    assert message.startswith("a bug\nTraceback")
    assert message.endswith("ValueError: invalid literal for int() with base 10: 'nine'")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\rb\x00\x7f", "a\\x0db\\x00\\x7f"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202eabc\u2066\u2069", "\\u202eabc\\u2066\\u2069"),
        ("\ud800", "\\ud800"),
        ("tab\tline\nå 你好 👩‍👩‍👧 e\u0301", "tab\tline\nå 你好 👩‍👩‍👧 e\u0301"),
    ],
)
def test_what_a_terminal_would_obey_becomes_visible(text: str, shown: str) -> None:
    assert escape_answer(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31m\u202e", "\\x1b[31m\\u202e"),
        ("desk\u200b\u200f\u2060", "desk\\u200b\\u200f\\u2060"),
        ("de\xadsk\ufeff\ufe0f", "de\\xadsk\\ufeff\\ufe0f"),
        ("\U000e0041\u3164", "\\U000e0041\\u3164"),
        ("one\u2028two\n\tå 你好", "one\\u2028two\n\tå 你好"),
    ],
)
def test_what_nobody_sees_in_a_name_becomes_visible(text: str, shown: str) -> None:
    assert escape(text) == shown


def test_a_log_shows_invisible_characters(capsys: pytest.CaptureFixture[str]) -> None:
    setup(0)

    logger.warning("lost %s", "de\u200bsk")

    assert capsys.readouterr().err.endswith("lost de\\u200bsk\n")


@settings(deadline=None)
@given(st.lists(st.text(), max_size=5))
def test_pieces_are_escaped_as_the_whole_is(pieces: list[str]) -> None:
    whole = escape_answer("".join(pieces))

    assert "".join(map(escape_answer, pieces)) == whole
    assert all(c in "\n\t" or c.isprintable() or ord(c) > 0x9F for c in whole)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_lack_of_files_is_one_line_a_minute(
    capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    setup(0, json=as_json)
    loop = asyncio.new_event_loop()
    error = OSError(errno.EMFILE, "Too many open files")
    context = {"message": "socket.accept() out of system resource", "exception": error}

    for _ in range(1000):  # as the loop does for each attempt
        loop.call_exception_handler(context)
    retry = {"message": "Exception in callback X._start_serving(<function>)"}
    closed = ValueError("Invalid file descriptor: -1")
    loop.call_exception_handler({**retry, "exception": closed})
    (line,) = capsys.readouterr().err.splitlines()
    loop.call_exception_handler({"message": "Exception in callback f()", "exception": error})
    loop.close()

    assert "connections wait: Too many open files; raise the limit of open files" in line
    assert "Exception in callback f()" in capsys.readouterr().err


async def test_writing_to_a_socket_that_its_peer_closed_writes_no_line(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    setup(0)
    ours, theirs = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=ours)
    theirs.close()

    for _ in range(9):  # before the loop can tell of the loss
        writer.write(b"x")

    assert any("socket.send()" in each.message for each in caplog.records)
    assert capsys.readouterr().err == ""
    writer.transport.abort()


def test_the_lack_of_files_is_repeated_after_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    setup(0)
    fields = {"name": "asyncio", "levelname": "ERROR", "levelno": logging.ERROR}
    for created in (100.0, 100.0 + ACCEPT_SILENCE_S / 2, 100.0 + ACCEPT_SILENCE_S):
        record = {**fields, "msg": "socket.accept() out of system resource", "created": created}
        logging.getLogger("asyncio").handle(logging.makeLogRecord(record))

    assert len(capsys.readouterr().err.splitlines()) == 2
