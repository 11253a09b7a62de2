"""Markdown that is rendered while it is written.

Theory of operation
-------------------
A block, such as a paragraph or fenced code, is shown as it arrives, wrapped like any text. When it
is complete it is replaced, in one write, by its rendering; what has no markup stays. A block that
is higher than the terminal stays too, since its first lines cannot be erased.

The renderer decodes character references, which could smuggle in escape sequences: control
characters are escaped after rendering, too.
"""

import os
import re
from io import StringIO

from meshllm.cli.terminal.wrap import Wrap, width_of

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_MARKUP = re.compile(r"[*_`#|~\[\\]|^ {0,3}(?:[-+>]|\d+[.)]|={3,}|-{3,})", re.MULTILINE)
_UP, _ERASE = "\x1b[{}A", "\r\x1b[J"


class MarkdownStream:
    """Takes pieces of Markdown, and returns what to write to a terminal of this size."""

    def __init__(self, columns: int, rows: int) -> None:
        self._columns, self._rows = columns, rows
        self._begin()

    def _begin(self) -> None:
        self._wrap = Wrap(self._columns - 1)  # the last column is for the space after a word
        self._block: list[str] = []
        self._shown: list[str] = []
        self._line = self._fence = ""

    def feed(self, piece: str) -> str:
        """Take a piece; return what to write."""
        return "".join(map(self._take, piece))

    def flush(self) -> str:
        """Return what to write at the end of the answer."""
        rest = self._wrap.flush()
        self._shown.append(rest)
        return rest + self._replaced("")

    def _take(self, char: str) -> str:
        shown = self._wrap.feed(char)
        self._block.append(char)
        self._shown.append(shown)
        if char != "\n":
            self._line += char
            return shown
        line, self._line = self._line, ""
        return shown + self._replaced("\n\n") if self._is_end(line) else shown

    def _is_end(self, line: str) -> bool:
        """Return whether a line ends a block: a closing fence, or an empty line outside of code."""
        fence = _FENCE.match(line)
        if not self._fence:
            self._fence = fence[1] if fence else ""
            return not self._fence and not line.strip()
        is_closed = fence is not None and fence[1].startswith(self._fence)
        return is_closed and not line.strip().strip(self._fence[0])

    def _replaced(self, end: str) -> str:
        """Return what replaces the block by its rendering; nothing if it stays as it is."""
        block, shown = "".join(self._block), "".join(self._shown)
        self._begin()
        heights = (-(-width_of(line.expandtabs()) // self._columns) for line in shown.split("\n"))
        up = sum(max(1, height) for height in heights) - 1
        if not _MARKUP.search(block) or up >= self._rows:
            return ""
        return (_UP.format(up) if up else "") + _ERASE + _render(block, self._columns - 1) + end


def _render(block: str, columns: int) -> str:
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.segment import Segment, Segments

    from meshllm.log import escape_answer

    console = Console(
        file=StringIO(),
        width=columns,
        force_terminal=True,
        no_color=bool(os.environ.get("NO_COLOR")),
        highlight=False,
    )
    rendered = console.render(Markdown(block, code_theme="ansi_dark", hyperlinks=False))
    safe = [Segment(escape_answer(each.text), each.style) for each in rendered if not each.control]
    with console.capture() as captured:
        console.print(Segments(safe), end="")
    return captured.get().strip("\n")
