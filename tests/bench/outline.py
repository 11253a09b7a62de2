"""An answer by outline against the same amount of text in sequence.

``python -m tests.bench.outline [--model NAME] [--nodes N] [--rtt 0,100] [--acceptance 0.5,0.7]
[--points 6] [--tokens 600] [--rounds 3]``

All ranks run in this process on shaped in-process links; a round trip of 0 is plain loopback. The
outline takes ``--outline-tokens``, then each point an equal share of the tokens, which the other
answer has in one piece. A directive forces the number of points, and a bias the lengths. Drafts
come from an oracle: the texts of the first round, which has none, with a share of wrong tokens,
because a small model says nothing about the drafts of a large one. The texts of all rounds are
compared with those of the first. ``--model builtin`` is the embedded model, others have random
weights.
"""

import asyncio
import math
import re
import statistics
import sys
from argparse import Namespace
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from random import Random
from time import perf_counter

import torch

from meshllm.bench.ring_table import DIMENSIONS, random_model
from meshllm.model.files.source import Source, open_folder, resolve
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.outline.backend import OutlineBackend
from meshllm.outline.directive import Directive
from meshllm.outline.eligibility import OutlineMode
from meshllm.outline.points import Point
from meshllm.request import Answer, Backend, Event, Piece, Request, Sampling, Turn
from meshllm_loopback import LoopbackTransport, TrafficShape
from tests.bench.report import Report, parser_of

BUILTIN = "builtin"
NEVER = -100.0  # the lowest bias of a request
QUESTION = Turn(role="user", content="What is a ring, and how does it answer together?")


@dataclass(frozen=True, slots=True)
class Row:
    """One ring with drafts of one quality; medians over the rounds."""

    rtt_ms: float
    acceptance: float
    sequential_s: float
    outline_s: float
    ratio: float
    """Time in sequence divided by time by outline, in the same round."""
    first_text_s: float
    """Time to the first text of the answer by outline."""
    tokens_per_step: float
    """Of the answer in sequence."""
    tokens_per_point_step: float
    """Of the points."""


class Recorded:
    """Drafts texts that it has seen, each token right with probability ``acceptance``."""

    def __init__(self) -> None:
        self.texts: list[tuple[int, ...]] = []
        self.acceptance: float | None = None
        """None records, and drafts nothing."""

    def begin(self) -> "RecordedDrafter":
        """Start a session."""
        return RecordedDrafter(self.texts, self.acceptance)

    def keep(self, tokens: Sequence[int]) -> None:
        """Remember a finished text if recording."""
        if self.acceptance is None:
            self.texts.append(tuple(tokens))


class RecordedDrafter:
    """Drafts the text that begins like its session."""

    def __init__(self, texts: Sequence[tuple[int, ...]], acceptance: float | None) -> None:
        self._texts = texts
        self._acceptance = acceptance
        self._drafts: list[int] = []
        self._length = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Advance by these tokens of the session; the first ones are its prompt and one more."""
        if not self._length and self._acceptance is not None:
            draw = Random(0)
            text = next((each for each in self._texts if each[: len(tokens)] == tuple(tokens)), ())
            self._drafts = [token ^ (draw.random() >= self._acceptance) for token in text]
        self._length += len(tokens)

    def look(self) -> int | None:
        """Return a constant confidence; None after the end of the text."""
        return 2 if self._length < len(self._drafts) else None

    def draft(self, most: int) -> tuple[int, ...]:
        """Return up to ``most`` drafts."""
        return tuple(self._drafts[self._length : self._length + most])


@dataclass(frozen=True, slots=True)
class Shortened:
    """A ring whose outlines end at a number of tokens."""

    ring: LocalRing
    tokens: int

    def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Answer a request; only outlines have a stop text."""
        if request.stop:
            request = replace(request, max_tokens=self.tokens, stop=())
        return self.ring.generate(request)


@dataclass(frozen=True, slots=True)
class Measured:
    """One answer."""

    answer: Answer
    first_text_s: float
    end_s: float


async def measure(source: Source, rtt: float, options: Namespace) -> list[Row]:
    """Generate both answers in turns on one ring, with drafts of each quality."""
    recorded, runs = Recorded(), dict[float, list[tuple[Measured, Measured]]]()
    ring_options = RingOptions(
        nodes=options.nodes,
        inference=InferenceConfig(threads=options.threads, drafting=recorded),
    )
    shape = TrafficShape(delay_s=rtt / 2e3, bytes_per_s=options.mbit * 1e6 / 8)
    async with open_local_ring(source, ring_options, LoopbackTransport(shape)) as ring:
        await ring.warmed_up()
        first = await _both(ring, options)
        for _ in range(options.rounds):
            for acceptance in options.acceptance:
                recorded.acceptance = acceptance
                both = await _both(ring, options)
                if [each.answer.tokens for each in both] != [each.answer.tokens for each in first]:
                    raise SystemExit(f"a text differs at acceptance {acceptance:g}")
                runs.setdefault(acceptance, []).append(both)
    return [_row(rtt, acceptance, mine) for acceptance, mine in runs.items()]


async def _both(ring: LocalRing, options: Namespace) -> tuple[Measured, Measured]:
    """Return the answer in sequence, and the one by outline."""
    points = [Point(number, f"Part {number}") for number in range(1, options.points + 1)]
    forced = Directive("forced", re.compile(""), "its parts", read=lambda _, __: points)
    short = Shortened(ring, options.outline_tokens)
    outline = OutlineBackend(short, OutlineMode.ON, directives=[forced])
    request = Request(
        turns=(QUESTION,),
        sampling=Sampling(temperature=options.temperature, seed=1),
        logit_bias=tuple((token, NEVER) for token in ring.text.end_tokens),
    )
    whole = replace(request, max_tokens=options.outline_tokens + options.tokens)
    _forget(ring)
    in_sequence = await _timed(ring, replace(request, max_tokens=options.tokens))
    _forget(ring)
    return in_sequence, await _timed(outline, whole)


def _forget(ring: LocalRing) -> None:
    """Empty the prefix cache of the entry: every answer starts like the first one."""
    ring.entry._prefixes.expire(math.inf)


async def _timed(backend: Backend, request: Request) -> Measured:
    begin, first_s = perf_counter(), 0.0
    async with aclosing(backend.generate(request)) as events:
        async for event in events:
            if isinstance(event, Piece) and event.text:
                first_s = first_s or perf_counter() - begin
            if isinstance(event, Answer):
                return Measured(event, first_s, perf_counter() - begin)
    raise AssertionError


def _row(rtt: float, acceptance: float, runs: Sequence[tuple[Measured, Measured]]) -> Row:
    median = statistics.median
    return Row(
        rtt,
        acceptance,
        sequential_s=median(one.end_s for one, _ in runs),
        outline_s=median(other.end_s for _, other in runs),
        ratio=median(one.end_s / other.end_s for one, other in runs),
        first_text_s=median(other.first_text_s for _, other in runs),
        tokens_per_step=median(one.answer.tokens_per_step for one, _ in runs),
        tokens_per_point_step=median(other.answer.tokens_per_step for _, other in runs),
    )


@contextmanager
def model_of(name: str) -> Iterator[Source]:
    """Open the embedded model, or one of random weights."""
    if name == BUILTIN:
        yield resolve(BUILTIN)
        return
    with random_model(name, torch.bfloat16) as folder:
        yield open_folder(name, folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = parser_of("outline", __doc__)
    parser.add_argument("--model", default=BUILTIN, choices=(BUILTIN, *DIMENSIONS))
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rtt", type=numbers, default=(0.0, 100.0), help="in ms, with commas")
    parser.add_argument("--mbit", type=float, default=1000, help="Mbit/s")
    parser.add_argument("--acceptance", type=numbers, default=(0.5, 0.7), help="of drafts")
    parser.add_argument("--points", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=600, help="of the answer")
    parser.add_argument(
        "--outline-tokens", type=int, default=48, help="of the outline, in addition"
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of all ranks; by default as a node chooses")
    options = parser.parse_args(arguments)
    report, rows = Report(options), list[Row]()
    with model_of(options.model) as source:
        for rtt in options.rtt:
            rows += asyncio.run(measure(source, rtt, options))
    report.say(
        f"{options.model}, a ring of {options.nodes}; {options.points} points of"
        f" {options.tokens} tokens in total"
    )
    report.say(lay_out(rows))
    about = {name: getattr(options, name) for name in ("model", "nodes", "points", "tokens")}
    report.write(rows, **about)
    return 0


def numbers(text: str) -> tuple[float, ...]:
    """Parse `0.5,0.7`."""
    return tuple(float(word) for word in text.split(",") if word)


def lay_out(rows: Sequence[Row]) -> str:
    """Format the rows as a table."""
    line = "{:>7} {:>10} {:>11} {:>11} {:>11} {:>11} {:>12} {:>8}".format
    names = "RTT ms", "acceptance", "tokens/step", "of a point", "sequence s", "outline s"
    lines = [line(*names, "first text s", "sooner")]
    for row in rows:
        steps = f"{row.tokens_per_step:.2f}", f"{row.tokens_per_point_step:.2f}"
        times = f"{row.sequential_s:.1f}", f"{row.outline_s:.1f}", f"{row.first_text_s:.1f}"
        kind = f"{row.rtt_ms:g}", f"{row.acceptance:g}"
        lines.append(line(*kind, *steps, *times, f"{row.ratio:.2f}x"))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
