"""What goes to stderr: one handler, event loggers, text made safe."""

import json
import logging
import re
import sys
from datetime import UTC, datetime

Field = str | int | float | bool | None
"""What an event may carry; never prompt text, never keys."""

# What a terminal obeys instead of showing: C0 without \t and \n, DEL, C1, the bidirectional
# overrides and isolates (CVE-2021-42574), and lone surrogates, which no encoding can write.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


def setup(verbosity: int, *, json: bool = False) -> None:
    """Send log records to stderr: warnings, with 1 also news, with 2 every message.

    A second call replaces the first. Other libraries keep to warnings.
    """
    handler = _Handler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if json else _TextFormatter())
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    logging.getLogger("meshllm").setLevel(_LEVELS[min(verbosity, len(_LEVELS) - 1)])


def event(subject: str, /, **fields: Field) -> None:
    """Tell tools what happened: fields only, on the logger ``meshllm.events.<subject>``."""
    logging.getLogger(f"meshllm.events.{subject}").info(_Fields(fields))


def is_json() -> bool:
    """Tell whether `setup` chose JSON."""
    return any(isinstance(each.formatter, _JsonFormatter) for each in logging.getLogger().handlers)


def escape(text: str) -> str:
    r"""Make control characters visible as ``\x1b`` or ``\u202e``; keep newline, tab and the rest.

    Works character by character, so pieces of a text may be escaped one at a time.
    """
    return _UNSAFE.sub(_visible, text)


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]  # not subscriptable in 3.11
    """Ours, so that `setup` replaces no one else's; a line of progress makes way for a record."""

    def format(self, record: logging.LogRecord) -> str:
        return ("\r\x1b[K" if self.stream.isatty() else "") + super().format(record)


class _Fields(dict[str, Field]):
    """An event as a log message."""

    def __str__(self) -> str:
        return " ".join(f"{name}={json.dumps(value)}" for name, value in self.items())


class _TextFormatter(logging.Formatter):
    """``12:03:04 info meshllm.node joined``; further lines are indented, so none can be forged."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).astimezone()
        body = escape(super().format(record)).replace("\n", "\n    ")
        return f"{time:%H:%M:%S} {record.levelname.lower()} {record.name} {body}"


class _JsonFormatter(logging.Formatter):
    """One JSON object a line; an event has ``fields`` in place of ``message``.

    What was logged with ``extra={"hint": ...}`` has that too.
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
