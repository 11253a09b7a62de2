"""The points of an outline, read from what a model wrote; any text can be read."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

MAX_TITLE_CHARS = 120
MAX_OUTLINE_CHARS = 16 * 1024  # of a text that is read; an outline has a few hundred

_POINT = re.compile(r"[ \t*_#>-]{0,8}([0-9]{1,2})[.):][ \t*_]{0,8}(?=[^ \t*_])(.*)")
_ENDS = " \t*_#:-"
_DEPENDS = re.compile(
    r"\b(?:then|next|finally|afterwards|steps?|points? \d|the above|previous|conclusion|proof)\b"
    r"|[=`$\\{}]",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Point:
    """One point of an outline."""

    number: int
    title: str

    @property
    def heading(self) -> str:
        """The point as a line of the outline."""
        return f"{self.number}. {self.title}"


def read_points(text: str, most: int) -> list[Point]:
    """Return the points that are numbered 1, 2, ..., at most ``most``; skip all other lines."""
    points: list[Point] = []
    for line in text[:MAX_OUTLINE_CHARS].splitlines():
        point = _read(line)
        if point and point.number == len(points) + 1 <= most:
            points.append(point)
    return points


def declines(text: str) -> bool:
    """Return whether a text, of which more may come, begins with another line than a point."""
    first, newline, _ = text[:MAX_OUTLINE_CHARS].lstrip().partition("\n")
    return bool(newline) and _read(first) is None


def is_independent(points: Sequence[Point]) -> bool:
    """Return whether no title refers to another point, or has signs of code or mathematics."""
    return not any(_DEPENDS.search(each.title) for each in points)


def _read(line: str) -> Point | None:
    found = _POINT.match(line)
    if found is None:
        return None
    printable = "".join(each if each.isprintable() else " " for each in found[2])
    title = " ".join(printable.split())[:MAX_TITLE_CHARS].strip(_ENDS)
    return Point(int(found[1]), title) if title else None
