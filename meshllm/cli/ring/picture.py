"""Draws the ring as boxes and arrows in text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.cells import cell_len, set_cell_size

GAP = 9  # columns between two boxes: an arrow below `12.3 ms`
FRAME = 4  # columns of a box without its text: a side and a space, twice
NARROWEST = 13  # minimum columns of a box with truncated text; below it the ring is drawn as a line
WIDEST = 28
ROWS = 5  # rows of a box: top, name, two lines, bottom

_ASCII = str.maketrans("┌┐└┘─│▶◀▼▲█▓▒░·…", "++++-|><v^#%=-:.")


@dataclass(frozen=True, slots=True)
class Box:
    """The texts of one rank."""

    name: str
    layers: str
    compute: str
    """Compute time per token; may be empty."""
    wire: str
    """Time to the next rank; may be empty."""

    @property
    def width(self) -> int:
        """Columns of a box that truncates nothing."""
        return max(map(cell_len, (self.name, self.layers, self.compute))) + FRAME


def picture(boxes: Sequence[Box], columns: int) -> str:
    """Draw a ring in one row, in two rows of opposite direction, or as a line."""
    for rows in (1, 2) if len(boxes) > 2 else (1,):
        count = -(-len(boxes) // rows)
        width = min(max(each.width for each in boxes), WIDEST, (columns + GAP) // count - GAP)
        if width >= min(NARROWEST, max(each.width for each in boxes)):
            return _draw(boxes, rows, count, width)
    return line(boxes, columns)


def line(boxes: Sequence[Box], columns: int) -> str:
    """Draw a ring as ``a 0:4 ─1 ms─▶ b 4:8 ─2 ms─▶ a``, wrapped at ``columns``."""
    words = [f"{each.name} {each.layers} ─{each.wire and f'{each.wire}─'}▶" for each in boxes]
    lines = [""]
    for word in [*words, boxes[0].name]:
        if lines[-1] and cell_len(lines[-1]) + 1 + cell_len(word) > columns:
            lines.append("  ")
        lines[-1] += f" {word}" if lines[-1].strip() else word
    return "\n".join(lines)


def drawable(text: str, encoding: str | None) -> str:
    """Return a drawing unchanged if an encoding can represent it, else in ASCII."""
    try:
        "─▶█".encode(encoding or "ascii")
    except UnicodeEncodeError:
        return text.translate(_ASCII)
    return text


def _draw(boxes: Sequence[Box], rows: int, count: int, width: int) -> str:
    height = ROWS if len(boxes) == 1 else (ROWS + 2) * rows - (2 if rows == 2 else 0)
    canvas = _Canvas(count * (width + GAP) - GAP, height)
    spots = list(_spots(len(boxes), count, width))
    for box, (x, y) in zip(boxes, spots, strict=True):
        canvas.box(x, y, width, box)
    for box, (a, b) in zip(boxes, pairwise(spots), strict=False):
        if a[1] == b[1]:
            canvas.arrow(a, b, width, box.wire)
        else:
            canvas.down(a, width, box.wire)
    if len(boxes) > 1:
        canvas.close(spots[-1], width, boxes[-1].wire)
    return canvas.text()


def _spots(boxes: int, count: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield the top left corner of each box: left to right above, right to left below."""
    for index in range(boxes):
        row, column = divmod(index, count)
        yield (count - 1 - column if row else column) * (width + GAP), row * (ROWS + 2)


class _Canvas:
    """A grid of terminal cells; later writes overwrite earlier ones."""

    def __init__(self, columns: int, rows: int) -> None:
        self.cells = [[" "] * columns for _ in range(rows)]

    def put(self, x: int, y: int, text: str) -> None:
        """Write text: a wide character takes two cells, a combining one extends the last cell."""
        for char in text:
            width = cell_len(char)
            if width == 0:
                self.cells[y][x - 1] += char
                continue
            self.cells[y][x : x + width] = [char, *[""] * (width - 1)]
            x += width

    def text(self) -> str:
        return "\n".join("".join(row).rstrip() for row in self.cells)

    def box(self, x: int, y: int, width: int, box: Box) -> None:
        bar = "─" * (width - 2)
        self.put(x, y, f"┌{bar}┐")
        for row, text in enumerate((box.name, box.layers, box.compute), start=1):
            self.put(x, y + row, f"│ {_cut(text, width - FRAME)} │")
        self.put(x, y + ROWS - 1, f"└{bar}┘")

    def arrow(self, a: tuple[int, int], b: tuple[int, int], width: int, label: str) -> None:
        x = min(a[0], b[0]) + width
        self.put(x, a[1] + 1, label.center(GAP))
        bar = "─" * (GAP - 1)
        self.put(x, a[1] + 2, f"{bar}▶" if a[0] < b[0] else f"◀{bar}")

    def down(self, a: tuple[int, int], width: int, label: str) -> None:
        x, y = a[0] + width // 2, a[1] + ROWS
        self.put(x, y, "│")
        self.put(x - 1 - len(label), y, label)
        self.put(x, y + 1, "▼")

    def close(self, last: tuple[int, int], width: int, label: str) -> None:
        """Draw the arrow from the last box to the first: below one row, or around an empty slot."""
        middle, (x, y) = width // 2, last
        if y == 0:
            self.put(middle, ROWS, "▲")
            self.put(x + middle, ROWS, "│")
            self.put(middle, ROWS + 1, f"└{(label and f' {label} ').center(x - 1, '─')}┘")
            return
        if x > 0:
            self.put(middle, y + 2, f"└{'─' * (x - middle - 1)}")
            for row in range(y, y + 2):
                self.put(middle, row, "│")
        self.put(middle, y - 1, "│")
        self.put(middle, y - 2, "▲")
        self.put(middle + 2, y - 2, label)


def _cut(text: str, width: int) -> str:
    short = text if cell_len(text) <= width else f"{set_cell_size(text, width - 1)}…"
    return set_cell_size(short, width)
