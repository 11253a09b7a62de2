"""Output of the commands: data on stdout, messages on stderr."""

import codecs
import errno
import json
import logging
import os
import select
import shutil
import sys
import textwrap
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from math import isfinite
from typing import Self, TextIO

from meshllm.cli.terminal.markdown import MarkdownStream
from meshllm.cli.terminal.streams import discard
from meshllm.cli.terminal.wrap import Wrap, width_of
from meshllm.errors import MeshError
from meshllm.names import counted
from meshllm.request import Answer, HopReport

PER_TOKEN = "per token, times in ms"
"""Title of a table of hops."""

LONGEST = 16
"""Maximum characters of a name in a table."""

SCHEMA = 1
"""Version of every ``--json`` object; adding a field does not change it."""

_NARROWEST = 16  # columns for what a name means
_UNLIMITED = 1 << 20
_BROKEN_PIPE = 141  # what a shell reports for a command killed by SIGPIPE
_FULL = {errno.ENOSPC, errno.EDQUOT}
_DIM, _RED, _CYAN, _PLAIN = "\x1b[2m", "\x1b[1;31m", "\x1b[36m", "\x1b[0m"


def out(text: str, end: str = "\n") -> None:
    """Write data to stdout and flush it; exit silently if its reader has closed the pipe."""
    try:
        put(text + end)
    except BrokenPipeError:
        raise SystemExit(_BROKEN_PIPE) from None
    except OSError as failure:
        raise MeshError(f"Standard output cannot be written: {failure.strerror}") from None


def check_reader() -> None:
    """Exit as `out` does if the reader of stdout has closed the pipe, though nothing is written."""
    try:
        reader = sys.stdout.fileno()
    except (OSError, ValueError):  # it is not a file of the system
        return
    watch = select.poll()
    watch.register(reader, 0)
    if any(event & select.POLLERR for _, event in watch.poll(0)):
        raise SystemExit(_BROKEN_PIPE)


def put(text: str) -> None:
    """Write data to stdout and flush it.

    Raises:
        OSError: its reader has closed the pipe, or the disk is full; later data goes nowhere.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError:
        discard(sys.stdout)
        raise


@contextmanager
def answering(*, markdown: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes pieces of an answer to stdout; end the last line on exit.

    A terminal gets whole words and no control characters, and its ``markdown`` rendered; any other
    output gets the exact bytes.
    """
    wrap = _layout(markdown=markdown) if sys.stdout.isatty() else None
    is_begun = False

    def write(piece: str) -> None:
        nonlocal is_begun
        is_begun = True
        out(wrap.feed(_safe_answer(piece)) if wrap else piece, end="")

    try:
        yield write
    finally:
        if is_begun:
            out(wrap.flush() if wrap else "")


def can_redraw() -> bool:
    """Return whether stdout is a terminal that can be redrawn in place."""
    return sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def _layout(*, markdown: bool) -> Wrap | MarkdownStream:
    columns, rows = shutil.get_terminal_size()
    is_unicode = codecs.lookup(sys.stdout.encoding).name == "utf-8"  # of bullets and boxes
    if markdown and is_unicode and os.environ.get("TERM") != "dumb":
        return MarkdownStream(columns, rows)
    # The last column is reserved for the space after a word, which would start a new line.
    return Wrap(columns - 1)


def print_message(text: str) -> None:
    """Write a message to stderr, if somebody may still read it.

    No answer and no node ends because the reader of its messages has gone, such as `tee`, or a
    terminal that was closed.
    """
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError as failure:
        if failure.errno not in _FULL:  # else there may be space for later ones
            discard(sys.stderr)


def dump(fields: Mapping[str, object]) -> None:
    """Write one JSON object with its schema version, on a terminal in several lines."""
    out(as_json(fields, indent=2 if sys.stdout.isatty() else None))


def as_json(fields: Mapping[str, object], indent: int | None = None) -> str:
    """Lay out one JSON object with its schema version; a number that is not finite is null."""
    found = {"schema": SCHEMA, **{name: _finite(value) for name, value in fields.items()}}
    return json.dumps(found, indent=indent, allow_nan=False)


def _finite(value: object) -> object:
    """Return a value in which null stands for NaN and infinity, which JSON lacks."""
    match value:
        case float():
            return value if isfinite(value) else None
        case dict():
            return {name: _finite(each) for name, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
        case _:
            return value


def wrapped(text: str) -> str:
    """Break a message for a terminal between words, where a terminal would break it anywhere."""
    if not sys.stderr.isatty():
        return text
    wrap = Wrap(_columns())
    return wrap.feed(text) + wrap.flush()


def copy(text: str) -> bool:
    """Send a text to the clipboard of the terminal by OSC 52; return False if there is none."""
    if not sys.stderr.isatty():
        return False
    sys.stderr.write(f"\x1b]52;c;{b64encode(text.encode()).decode()}\a")
    sys.stderr.flush()
    return True


def dim(text: str) -> str:
    """Dim a message."""
    return _paint(text, _DIM)


def error(failure: MeshError) -> None:
    """Write an error and its hint to stderr; as a log record if the log is JSON."""
    from meshllm.log import is_json

    if is_json():
        logging.getLogger("meshllm").error("%s", failure, extra={"hint": failure.hint})
        return
    print_message(f"{_paint('error:', _RED)} {safe(str(failure))}")
    if failure.hint:
        print_message(f"{_paint('hint:', _CYAN)} {safe(failure.hint)}")


def safe(text: str) -> str:
    """Escape control and invisible characters in untrusted text."""
    from meshllm.log import escape

    return escape(text)


def one_line(text: str) -> str:
    """Escape line ends and tabs, too: an untrusted text takes one line."""
    return safe(text).replace("\n", "\\n").replace("\t", "\\t")


def _safe_answer(text: str) -> str:
    from meshllm.log import escape_answer

    return escape_answer(text)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Lay out rows in columns, numbers aligned right and words left, as wide as they are shown.

    Untrusted texts are escaped, and each takes one line.
    """
    cells = [[_cell(value) for value in row] for row in (header, *rows)]
    widths = [max(map(width_of, column)) for column in zip(*cells, strict=True)]
    right = [all(map(_is_number, column[1:])) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            f"{' ' * (width - width_of(cell))}{cell}"
            if is_number
            else f"{cell}{' ' * (width - width_of(cell))}"
            for cell, width, is_number in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    )


def explained(rows: Sequence[tuple[str, str]]) -> str:
    """Lay out names and what each means, which is wrapped beside them on a terminal."""
    inset = max(width_of(name) for name, _ in rows) + 2
    room = _columns() - inset if sys.stderr.isatty() else _UNLIMITED
    lines = []
    for name, meaning in rows:
        first, *rest = textwrap.wrap(meaning, max(room, _NARROWEST)) or [""]
        lines.append(f"{name}{' ' * (inset - width_of(name))}{first}".rstrip())
        lines += [f"{' ' * inset}{each}" for each in rest]
    return "\n".join(lines)


def cut(text: str, most: int = LONGEST) -> str:
    """Truncate a text to this many columns, with an ellipsis."""
    if width_of(text) <= most:
        return text
    ends = accumulate(map(width_of, text))
    return f"{''.join(char for char, end in zip(text, ends, strict=True) if end < most)}…"


def cut_model(name: str) -> str:
    """Truncate the name of a model; that of a folder at its start, as its end says which it is."""
    if not name.startswith("/") or width_of(name) <= LONGEST:
        return cut(name)
    return cut(name[::-1])[::-1]


def plain(value: object) -> str:
    """Format the value of a setting."""
    match value:
        case None:
            return "-"
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
        case _:
            return str(value)


def bytes_of(count: float) -> str:
    """Format a number of bytes in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def statistics(answer: Answer) -> str:
    """Format token counts, timings, and a table of hops."""
    cached = f" ({answer.cached_tokens} cached)" if answer.cached_tokens else ""
    lines = [
        f"{counted(answer.prompt_tokens, 'prompt token')}{cached},"
        f" {answer.completion_tokens} generated,"
        f" finish reason: {answer.finish_reason}",
    ]
    if not answer.ms_per_token:  # only steps after the first token are timed
        return "\n".join([*lines, f"first token {answer.ttft_ms:.1f} ms"])
    lines.append(
        f"first token {answer.ttft_ms:.1f} ms, then {answer.ms_per_token:.2f} ms per token,"
        f" {answer.tokens_per_second:.1f} tokens/s"
    )
    if answer.tokens_per_step > 1:
        lines[-1] += f", {answer.tokens_per_step:.1f} tokens per step"
    header = ("rank", "node", "layers", "compute", "serialise", "queue", "wire", "bytes")
    rows = [
        (hop.rank, one_line(hop.node), str(hop.span), *parts(hop), round(hop.bytes_per_token))
        for hop in answer.hops
    ]
    return "\n".join([*lines, f"{PER_TOKEN}:", table(header, rows)])


def parts(hop: HopReport) -> tuple[float, float, float, float]:
    """Return the ms per token of a hop: compute, serialise, queue, wire."""
    return hop.compute_ms, hop.serialise_ms, hop.queue_ms, hop.wire_ms


@dataclass(slots=True)
class Status:
    """A temporary progress line on stderr; shows nothing unless stderr is a terminal."""

    stream: TextIO
    shown: bool = False
    is_reasoning: bool = False
    """The line is one of reasoning, which stays."""
    notes: list[str] = field(default_factory=list)
    """Lines to write at the end, so that they do not interrupt an answer."""
    is_quiet: bool = False
    """Write no notes."""
    has_text: bool = False
    """An answer has begun: progress would overwrite its last line."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
        for note in () if self.is_quiet else self.notes:
            print_message(dim(note))

    def show(self, text: str, end: str = "") -> None:
        """Show a text in place of the current line; ``end`` of it also if it does not fit."""
        if self.has_text or not self.stream.isatty() or os.environ.get("TERM") == "dumb":
            return
        width = _columns() - 1  # a wrapped line cannot be erased
        self.shown = True
        self._write(f"\r\x1b[K{dim(cut(text, width - width_of(end)) + end)}")

    def reason(self, text: str) -> None:
        """Write reasoning, which stays above the answer."""
        if not self.stream.isatty():
            return
        if not self.is_reasoning:
            self.clear()
        self.is_reasoning = self.has_text = True
        self._write(dim(_safe_answer(text)))

    def give_way(self, text: str) -> None:
        """Erase the line for text of an answer; show no progress from its first text on."""
        self.clear()
        self.has_text = self.has_text or bool(text)

    def clear(self) -> None:
        """Erase the line; end one of reasoning."""
        if self.is_reasoning:
            self.is_reasoning = False
            self._write("\n\n")
        if self.shown:
            self.shown = False
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        """Write, unless the terminal has gone, see `print_message`."""
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError as failure:
            if failure.errno not in _FULL:
                discard(self.stream)


def _columns() -> int:
    """Return the width of the terminal at stderr; stdout may be a file, which has none."""
    columns = 0
    with suppress(OSError):
        if "COLUMNS" not in os.environ:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
    return columns or shutil.get_terminal_size().columns


def _paint(text: str, colour: str) -> str:
    colourful = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    return f"{colour}{text}{_PLAIN}" if colourful and os.environ.get("TERM") != "dumb" else text


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else one_line(plain(value))


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).replace("-", "", 1).isdecimal() or text == "-"
