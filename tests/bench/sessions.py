"""Throughput of concurrent sessions on one ring (continuous batching).

``python -m tests.bench.sessions [--model NAME] [--nodes N] [--rtt MS] [--sessions 1,2,4,8,16]``

All ranks run in this process on shaped in-process links with one compute thread and without
speculative decoding. Each session has its own prompt, and its text is compared with that of a run
alone. Fairness is the longest time per token of a session divided by the shortest.
"""

import asyncio
import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from meshllm.bench.ring_table import DIMENSIONS, random_model
from meshllm.model.files.source import Source, open_folder
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.request import Sampling
from meshllm_loopback import LoopbackTransport, Shape
from tests.bench.report import Report, counts, parser_of

PROMPT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Row:
    """One number of concurrent sessions; medians over the rounds."""

    sessions: int
    tokens_per_second: float
    """Total of all sessions, without the first token of each."""
    ratio: float
    """Relative to one session in the same round."""
    fairness: float


async def measure(source: Source, options: Namespace) -> list[Row]:
    """Generate one text and many at once, in turns, on one ring."""
    shape = Shape(delay_s=options.rtt / 2e3, bytes_per_s=options.mbit * 1e6 / 8)
    sizes: tuple[int, ...] = options.sessions
    runs: dict[int, list[tuple[float, float]]] = {count: [] for count in sizes}
    ring_options = RingOptions(
        nodes=options.nodes, inference=InferenceConfig(threads=1, speculation=False, prefix_bytes=0)
    )
    async with open_local_ring(source, ring_options, LoopbackTransport(shape)) as ring:
        texts: dict[int, list[int]] = {}
        for round_ in range(options.rounds + 1):
            for count in sizes:
                asked = [_ask(ring, number, options.tokens) for number in range(count)]
                answers = await asyncio.gather(*asked)
                for number, (text, _) in enumerate(answers):
                    if texts.setdefault(number, text) != text:
                        raise SystemExit(f"text of session {number} of {count} differs")
                if round_:  # the first round is warm-up
                    times = [seconds for _, seconds in answers]
                    rate = sum(1 / seconds for seconds in times)
                    runs[count].append((rate, max(times) / min(times)))
    return [
        Row(
            count,
            statistics.median(rate for rate, _ in mine),
            statistics.median(
                rate / one for (rate, _), (one, _) in zip(mine, runs[sizes[0]], strict=True)
            ),
            statistics.median(fairness for _, fairness in mine),
        )
        for count, mine in runs.items()
    ]


async def _ask(ring: LocalRing, number: int, tokens: int) -> tuple[list[int], float]:
    """Return a text and its mean seconds per token."""
    prompt = [(11 * number + 7 * place + 3) % 500 for place in range(PROMPT_TOKENS)]
    stamps, text = [], []
    async for token in ring.tokens(prompt, Sampling(), tokens):
        stamps.append(perf_counter())
        text.append(token)
    return text, (stamps[-1] - stamps[0]) / (len(stamps) - 1)


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
    line = "{:>8} {:>10} {:>10} {:>10}".format
    lines = [line("sessions", "tokens/s", "against 1", "fairness")]
    for row in rows:
        rate, ratio = f"{row.tokens_per_second:.1f}", f"{row.ratio:.2f}x"
        lines.append(line(row.sessions, rate, ratio, f"{row.fairness:.2f}"))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
