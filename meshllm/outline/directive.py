"""Directives: how a model is asked to outline an answer and to expand one point, by task.

The first of `DIRECTIVES` that matches the question is used. It is appended to the question, so that
an outline shares the cache of everything before it; a point continues the text of the outline. The
texts are short, as every point has its own to prefill.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshllm.outline.points import Point, read_points

NONE = "NONE"
"""What a model writes instead of an outline if the answer should not be split."""

_OUTLINE = """

First write only an outline: {points}, as a numbered list of 2 to {most} lines like
1. Title
Use at most 5 words each. The points are written out later, independently."""

_UNLESS = """
If the answer is short, code or mathematics, or its parts build on each other, write only {none}."""

_EXPAND = """\
Write only point {number}, "{title}", in at most {words} words, without heading and conclusion."""


@dataclass(frozen=True, slots=True)
class Directive:
    """How to outline and expand the answers of one kind of task."""

    name: str
    matches: re.Pattern[str]
    """Found in a question of the task."""
    points: str
    """What a point of such an answer is."""
    read: Callable[[str, int], Sequence[Point]] = read_points
    """Returns the points of an outline, at most this many."""
    outline_text: str = _OUTLINE
    """Asks for an outline, see the placeholders of the default."""
    expand_text: str = _EXPAND
    """Asks for one point, likewise."""

    def outline(self, most: int, *, may_decline: bool) -> str:
        """Return the text that asks for an outline of at most ``most`` points."""
        unless = _UNLESS.format(none=NONE) if may_decline else ""
        return self.outline_text.format(points=self.points, most=most) + unless

    def expand(self, point: Point, words: int) -> str:
        """Return the text that asks for one point of the outline before it."""
        return self.expand_text.format(number=point.number, title=point.title, words=words)


DIRECTIVES = (
    Directive(
        "comparison",
        re.compile(
            r"\b(?:compare|comparison|differences?|versus|vs\.?|pros and cons)\b", re.IGNORECASE
        ),
        "the aspects to compare, each for all sides",
    ),
    Directive(
        "instructions",
        re.compile(
            r"\b(?:how (?:do|can|to)|guide|tutorial|instructions|checklist)\b", re.IGNORECASE
        ),
        "the parts of the task, each complete in itself",
    ),
    Directive("general", re.compile(""), "its main points"),
)


def directive_for(question: str, directives: Sequence[Directive] = DIRECTIVES) -> Directive:
    """Return the first directive that matches a question; the last one matches any."""
    found = (each for each in directives[:-1] if each.matches.search(question))
    return next(found, directives[-1])
