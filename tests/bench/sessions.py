"""Throughput of concurrent sessions on one ring (continuous batching).

``python -m tests.bench.sessions [--model NAME] [--nodes N] [--rtt MS] [--sessions 1,2,4,8,16]
[--prompt TOKENS]``

All ranks run in this process on shaped in-process links with one compute thread and without
speculative decoding. Each session has its own prompt, and its text is compared with that of a run
alone. All ask at once: the time to the first token is the mean, and the pause the longest between
two tokens of a session. Fairness is the longest time per token of a session divided by the
shortest.
"""

import asyncio
import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from time import perf_counter

import torch

from meshllm.bench.ring_table import DIMENSIONS, random_model
from meshllm.model.files.source import Source, open_folder
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.request import Sampling
from meshllm_loopback import LoopbackTransport, TrafficShape
from tests.bench.report import Report, counts, parser_of


@dataclass(frozen=True, slots=True)
class Row:
    """One number of concurrent sessions; medians over the rounds."""

    sessions: int
    tokens_per_second: float
    """Total of all sessions, without the first token of each."""
    ratio: float
    """Relative to one session in the same round."""
    fairness: float
    first_s: float
    """Mean time to the first token."""
    pause_s: float
    """The longest time between two tokens of a session."""


async def measure(source: Source, options: Namespace) -> list[Row]:
    """Generate one text and many at once, in turns, on one ring."""
    shape = TrafficShape(delay_s=options.rtt / 2e3, bytes_per_s=options.mbit * 1e6 / 8)
    sizes: tuple[int, ...] = options.sessions
    runs: dict[int, list[Row]] = {count: [] for count in sizes}
    ring_options = RingOptions(
        nodes=options.nodes, inference=InferenceConfig(threads=1, speculation=False, prefix_bytes=0)
    )
    async with open_local_ring(source, ring_options, LoopbackTransport(shape)) as ring:
        texts: dict[int, list[int]] = {}
        for round_ in range(options.rounds + 1):
            for count in sizes:
                asked = [_ask(ring, number, options) for number in range(count)]
                answers = await asyncio.gather(*asked)
                for number, answer in enumerate(answers):
                    if texts.setdefault(number, answer.text) != answer.text:
                        raise SystemExit(f"text of session {number} of {count} differs")
                if round_:  # the first round is warm-up
                    runs[count].append(_row(answers))
    ones = runs[sizes[0]]
    return [_median(rows, ones) for rows in runs.values()]


@dataclass(frozen=True, slots=True)
class _Answer:
    text: list[int]
    first_s: float
    stamps: list[float]
    """When each token came."""

    @property
    def token_s(self) -> float:
        return (self.stamps[-1] - self.stamps[0]) / (len(self.stamps) - 1)


def _row(answers: Sequence[_Answer]) -> Row:
    times = [each.token_s for each in answers]
    return Row(
        len(answers),
        sum(1 / seconds for seconds in times),
        1.0,
        max(times) / min(times),
        statistics.fmean(each.first_s for each in answers),
        max(later - earlier for each in answers for earlier, later in pairwise(each.stamps)),
    )


def _median(rows: Sequence[Row], ones: Sequence[Row]) -> Row:
    """Return the medians of all rounds, relative to one session in the same round."""
    pairs = zip(rows, ones, strict=True)
    ratio = statistics.median(row.tokens_per_second / one.tokens_per_second for row, one in pairs)
    columns = [statistics.median(column) for column in zip(*map(astuple, rows), strict=True)]
    return replace(Row(rows[0].sessions, *columns[1:]), ratio=ratio)


async def _ask(ring: LocalRing, number: int, options: Namespace) -> _Answer:
    """Return a text, and when its tokens came."""
    prompt = [(11 * number + 7 * place + 3) % 500 for place in range(options.prompt)]
    begin, stamps, text = perf_counter(), list[float](), list[int]()
    async for token in ring.tokens(prompt, Sampling(), options.tokens):
        stamps.append(perf_counter())
        text.append(token)
    return _Answer(text, stamps[0] - begin, stamps)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = parser_of("sessions", __doc__)
    parser.add_argument("--model", default="qwen3-0.6b", choices=DIMENSIONS)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rtt", type=float, default=100, help="milliseconds")
    parser.add_argument("--mbit", type=float, default=1000, help="Mbit/s")
    parser.add_argument(
        "--sessions",
        default=(1, 2, 4, 8, 16),
        type=counts,
        help="numbers of concurrent sessions; the first is the baseline",
    )
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    report = Report(options, threads=1)
    with random_model(options.model, torch.bfloat16) as folder:
        rows = asyncio.run(measure(open_folder(options.model, folder), options))
    about = {name: getattr(options, name) for name in ("model", "nodes", "rtt", "mbit", "tokens")}
    report.say(f"{options.model}, a ring of {options.nodes}, round trips of {options.rtt:g} ms")
    report.say(lay_out(rows))
    report.write(rows, **about)
    return 0


def lay_out(rows: Sequence[Row]) -> str:
    """Format the rows as a table."""
    line = "{:>8} {:>10} {:>10} {:>10} {:>14} {:>8}".format
    lines = [line("sessions", "tokens/s", "against 1", "fairness", "first token s", "pause s")]
    for row in rows:
        rate, ratio = f"{row.tokens_per_second:.1f}", f"{row.ratio:.2f}x"
        times = f"{row.first_s:.2f}", f"{row.pause_s:.2f}"
        lines.append(line(row.sessions, rate, ratio, f"{row.fairness:.2f}", *times))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
