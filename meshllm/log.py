"""Logging to stderr: one handler, structured events, and escaping of untrusted text."""

import json
import logging
import re
import sys
from datetime import UTC, datetime

Field = str | int | float | bool | None
"""The value of an event field; never prompt text or keys."""

# Control characters of terminals: C0 without \t and \n, DEL, C1, the bidirectional overrides
# and isolates (CVE-2021-42574); and lone surrogates, which cannot be encoded.
_CONTROL = "\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
# What makes two names look alike, or a line look like another: characters of category Cf, line
# separators, fillers, variation selectors. Answers need some of them: emoji, Persian, Hebrew.
_INVISIBLE = (
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028\u2029\u2060-\u2065"
    "\u206a-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_UNSAFE = re.compile(f"[{_CONTROL}]")
_UNCLEAR = re.compile(f"[{_CONTROL}{_INVISIBLE}]")
ACCEPT_SILENCE_S = 60.0  # s between two lines that say that connections wait
_CLOSED = "socket.send() raised exception."  # asyncio, of the fifth write to a closed socket
_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


def setup(verbosity: int, *, json: bool = False) -> None:
    """Send log records to stderr: warnings; with 1 also info, with 2 also debug records.

    A second call replaces the first. The level of other libraries' loggers stays at WARNING.
    """
    handler = _Handler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if json else _TextFormatter())
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    logging.getLogger("meshllm").setLevel(_LEVELS[min(verbosity, len(_LEVELS) - 1)])


def event(subject: str, /, **fields: Field) -> None:
    """Log a structured event, fields only, to the logger ``meshllm.events.<subject>``."""
    logging.getLogger(f"meshllm.events.{subject}").info(_Fields(fields))


def is_json() -> bool:
    """Return whether `setup` chose JSON."""
    return any(isinstance(each.formatter, _JsonFormatter) for each in logging.getLogger().handlers)


def escape(text: str) -> str:
    r"""Replace control and invisible characters by ``\x1b`` or ``\u200b``; keep newline and tab."""
    return _UNCLEAR.sub(_visible, text)


def escape_answer(text: str) -> str:
    """Replace control characters of terminals only.

    Each character is escaped on its own, so a text may be escaped in pieces.
    """
    return _UNSAFE.sub(_visible, text)


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]  # not subscriptable in 3.11
    """A class of its own, so `setup` replaces no other handler; clears a progress line first.

    asyncio reports each of thousands of attempts to accept a connection while no file can be
    opened, and retries of closed sockets: one line a minute is shown.
    """

    _silent_until = 0.0

    def handle(self, record: logging.LogRecord) -> bool:
        if record.name == "asyncio":
            text = record.getMessage()
            is_retry = text.startswith("Exception in callback") and "._start_serving(" in text
            if is_retry and record.exc_info and isinstance(record.exc_info[1], ValueError):
                return False
            if text == _CLOSED:  # by a peer; what writes there notices it, too
                return False
            if text.startswith("socket.accept() out of system resource"):
                if record.created < self._silent_until:
                    return False
                self._silent_until = record.created + ACCEPT_SILENCE_S
                record = _not_accepting(record)
        return bool(super().handle(record))

    def format(self, record: logging.LogRecord) -> str:
        return ("\r\x1b[K" if self.stream.isatty() else "") + super().format(record)


def _not_accepting(record: logging.LogRecord) -> logging.LogRecord:
    """Return the report of asyncio, with a traceback, as a line for users."""
    error = record.exc_info[1] if record.exc_info else None
    reason = error.strerror if isinstance(error, OSError) else "out of resources"
    text = f"connections wait: {reason}; raise the limit of open files (`ulimit -n`)"
    changed = {"name": "meshllm", "msg": text, "args": (), "exc_info": None, "exc_text": None}
    return logging.makeLogRecord(record.__dict__ | changed)


class _Fields(dict[str, Field]):
    """An event as a log message."""

    def __str__(self) -> str:
        return " ".join(f"{name}={json.dumps(value)}" for name, value in self.items())


class _TextFormatter(logging.Formatter):
    """``12:03:04 info meshllm.node joined``; later lines are indented against log forging."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).astimezone()
        body = escape(super().format(record)).replace("\n", "\n    ")
        return f"{time:%H:%M:%S} {record.levelname.lower()} {record.name} {body}"


class _JsonFormatter(logging.Formatter):
    """One JSON object per line; an event has ``fields`` instead of ``message``.

    A record logged with ``extra={"hint": ...}`` also has ``hint``.
    """

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        entry: dict[str, object] = {
            "time": time,
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if isinstance(record.msg, _Fields):
            entry["fields"] = record.msg
        else:
            entry["message"] = super().format(record)
        if hint := getattr(record, "hint", None):
            entry["hint"] = hint
        return json.dumps(entry)
