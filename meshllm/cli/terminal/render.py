"""What the terminal shows: answer on stdout, talk on stderr."""

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self, TextIO

from meshllm.cli.terminal.wrap import Wrap
from meshllm.errors import MeshError
from meshllm.request import Answer, HopReport

PER_TOKEN = "per token, times in ms"
"""What stands above a table of hops."""

LONGEST = 16
"""Characters of a name in a table."""

SCHEMA = 1
"""Version of every ``--json`` object; a field may be added without changing it."""

_BROKEN_PIPE = 141  # what a shell reports for a command that SIGPIPE ended
_DIM, _RED, _CYAN, _PLAIN = "\x1b[2m", "\x1b[1;31m", "\x1b[36m", "\x1b[0m"


def out(text: str, end: str = "\n") -> None:
    """Write data to stdout at once; leave quietly when its reader has gone."""
    try:
        sys.stdout.write(text + end)
        sys.stdout.flush()
    except OSError as failure:
        # Python flushes stdout once more at exit; that must find a door that is open.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(failure, BrokenPipeError):
            raise SystemExit(_BROKEN_PIPE) from None
        raise MeshError(f"Standard output cannot be written: {failure.strerror}") from None


@contextmanager
def answering() -> Iterator[Callable[[str], None]]:
    """Yield what writes the pieces of an answer to stdout; end its last line.

    A terminal gets whole words and no control characters, anything else the very bytes.
    """
    # The last column is left to the space behind a word, which would begin a line of its own.
    wrap = Wrap(shutil.get_terminal_size().columns - 1) if sys.stdout.isatty() else None
    is_begun = False

    def write(piece: str) -> None:
        nonlocal is_begun
        is_begun = True
        out(wrap.feed(safe(piece)) if wrap else piece, end="")

    try:
        yield write
    finally:
        if is_begun:
            out(wrap.flush() if wrap else "")


def talk(text: str, end: str = "\n") -> None:
    """Write to stderr, where everything goes that is not the answer."""
    print(text, end=end, file=sys.stderr, flush=True)


def dump(fields: Mapping[str, object]) -> None:
    """Write one JSON object with its schema version."""
    out(json.dumps({"schema": SCHEMA, **fields}, indent=2 if sys.stdout.isatty() else None))


def dim(text: str) -> str:
    """Set talk back a little."""
    return _paint(text, _DIM)


def error(failure: MeshError) -> None:
    """Say what happened and what to do about it; as a line of the log where that is JSON."""
    from meshllm.log import is_json

    if is_json():
        logging.getLogger("meshllm").error("%s", failure, extra={"hint": failure.hint})
        return
    talk(f"{_paint('error:', _RED)} {safe(str(failure))}")
    if failure.hint:
        talk(f"{_paint('hint:', _CYAN)} {safe(failure.hint)}")


def safe(text: str) -> str:
    """Make text of strangers harmless to a terminal."""
    from meshllm.log import escape

    return escape(text)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Align columns: numbers to the right, words to the left."""
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [all(map(_is_number, column[1:])) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    )


def cut(text: str, most: int = LONGEST) -> str:
    """Shorten a text so that one can see that it was."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def plain(value: object) -> str:
    """Write a setting as a file or a person would."""
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
    """Write a number of bytes as people read it, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def statistics(answer: Answer) -> str:
    """Tell how fast an answer came, and where the time went."""
    cached = f" ({answer.cached_tokens} known)" if answer.cached_tokens else ""
    lines = [
        f"{answer.prompt_tokens} tokens read{cached}, {len(answer.tokens)} written,"
        f" ended by {answer.finish_reason}",
    ]
    if not answer.ms_per_token:  # the steps after the first token are what is measured
        return "\n".join([*lines, f"first token {answer.ttft_ms:.1f} ms"])
    lines.append(
        f"first token {answer.ttft_ms:.1f} ms, then {answer.ms_per_token:.2f} ms per token,"
        f" {answer.tokens_per_second:.1f} tokens/s"
    )
    if answer.tokens_per_step > 1:
        lines[-1] += f", {answer.tokens_per_step:.1f} tokens a trip"
    header = ("rank", "node", "layers", "compute", "serialise", "queue", "wire", "bytes")
    rows = [
        (hop.rank, hop.node, str(hop.span), *parts(hop), round(hop.bytes_per_token))
        for hop in answer.hops
    ]
    return "\n".join([*lines, f"{PER_TOKEN}:", table(header, rows)])


def parts(hop: HopReport) -> tuple[float, float, float, float]:
    """Return what a hop takes of a token, in ms: compute, serialise, queue, wire."""
    return hop.compute_ms, hop.serialise_ms, hop.queue_ms, hop.wire_ms


@dataclass(slots=True)
class Status:
    """One line on a terminal's stderr that goes away again; nothing anywhere else."""

    stream: TextIO
    shown: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def show(self, text: str) -> None:
        """Replace the line."""
        if not self.stream.isatty() or os.environ.get("TERM") == "dumb":
            return
        width = shutil.get_terminal_size().columns - 1  # a wrapped line could not be erased
        self.stream.write(f"\r\x1b[K{dim(text[:width])}")
        self.stream.flush()
        self.shown = True

    def clear(self) -> None:
        """Take the line away."""
        if self.shown:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
            self.shown = False


def _paint(text: str, colour: str) -> str:
    colourful = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    return f"{colour}{text}{_PLAIN}" if colourful and os.environ.get("TERM") != "dumb" else text


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else plain(value)


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).replace("-", "", 1).isdecimal() or text == "-"
