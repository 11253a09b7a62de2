"""Quality of answers by outline where points are independent.

``python -m tests.bench.outline_quality [--group 4] [--cases N]``

The held-out cases of one question are put to the embedded model in three ways: each alone, several
as a numbered list in one request, and the same list by outline. The embedded model cannot write an
outline, so a directive reads the points from the list and asks each question as it is. An answer to
a list passes if the expected words are anywhere in it, one by outline if they are in its point.
"""

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass

from meshllm.model.files.source import resolve
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import RingOptions, open_local_ring
from meshllm.outline.backend import OutlineBackend
from meshllm.outline.directive import Directive
from meshllm.outline.eligibility import OutlineMode
from meshllm.outline.points import Point
from meshllm.request import Answer, Backend, Request, Turn
from tests.builtin.score import MAX_TOKENS, Case, load, passes

EACH = "each alone"
LIST = "as a list"
OUTLINE = "by outline"


@dataclass(frozen=True, slots=True)
class Row:
    """One way to ask."""

    way: str
    passed: int
    asked: int


async def measure(cases: Sequence[Case], size: int) -> list[Row]:
    """Ask all cases in each way."""
    passed = dict.fromkeys((EACH, LIST, OUTLINE), 0)
    options = RingOptions(inference=InferenceConfig(threads=1))
    async with open_local_ring(resolve("builtin"), options) as ring:
        for case in cases:
            passed[EACH] += passes(case, await _answer(ring, case.turns[0], MAX_TOKENS))
        for start in range(0, len(cases), size):
            group = cases[start : start + size]
            text, most = listed(group), (MAX_TOKENS + 40) * len(group)
            whole = await _answer(ring, text, most)
            passed[LIST] += sum(passes(case, whole) for case in group)
            outline = OutlineBackend(ring, OutlineMode.ON, directives=[directive(group)])
            bodies = parts(await _answer(outline, text, most), len(group))
            passed[OUTLINE] += sum(map(passes, group, bodies))
    return [Row(way, count, len(cases)) for way, count in passed.items()]


def listed(group: Sequence[Case]) -> str:
    """Return the questions of cases as one."""
    lines = (f"{place}. {case.turns[0]}" for place, case in enumerate(group, start=1))
    return "Answer each of these:\n" + "\n".join(lines)


def directive(group: Sequence[Case]) -> Directive:
    """Return a directive whose points are the questions."""
    points = [Point(place, case.turns[0]) for place, case in enumerate(group, start=1)]
    return Directive(
        "list",
        re.compile(""),
        points="the questions",
        read=lambda _, __: points,
        outline_text="",
        expand_text="{title}",
    )


def parts(text: str, count: int) -> list[str]:
    """Split an answer by outline into the texts of its points, behind their headings."""
    starts = [text.find(f"\n\n{number}. ") if number > 1 else 0 for number in range(1, count + 1)]
    ends = [*starts[1:], len(text)]
    bodies = (text[start:end].lstrip("\n") for start, end in zip(starts, ends, strict=True))
    return [body.partition("\n\n")[2] for body in bodies]


async def _answer(backend: Backend, text: str, tokens: int) -> str:
    request = Request(turns=(Turn(role="user", content=text),), max_tokens=tokens)
    async with aclosing(backend.generate(request)) as events:
        async for event in events:
            if isinstance(event, Answer):
                return event.text
    raise AssertionError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.outline_quality")
    parser.add_argument("--group", type=int, default=4, help="questions of a list, 2 to 8")
    parser.add_argument("--cases", type=int, help="ask the first few only")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    single = [case for case in load() if len(case.turns) == 1][: options.cases]
    cases = single[: len(single) // options.group * options.group]
    rows = asyncio.run(measure(cases, options.group))
    print(json.dumps([asdict(row) for row in rows]) if options.json else lay_out(rows))
    return 0


def lay_out(rows: Sequence[Row]) -> str:
    """Format the rows as a table."""
    lines = (f"{row.way:<12}{row.passed:>4} of {row.asked}" for row in rows)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
