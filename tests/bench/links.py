"""Decode speed of a ring on slow links, relative to the lower bound of its latency.

``python -m tests.bench.links [--model NAME] [--nodes 2,3] [--rtt 1,20,100] [--mbit 10,100,1000]
[--acceptance 0,0.5,0.7,0.85] [--depth 1,8] [--threads 1]``

All ranks run in this process on shaped in-process links and compute in turn, on as many cores as a
node of this machine would use, or on ``--threads``. Without speculative decoding, the lower bound
of a token is the compute time of all ranks plus the one-way delay of each link. With drafts that
are accepted with probability a, a step yields at most 1 / (1 - a) tokens; ``--depth`` is the limit
of steps in flight, of up to 17 tokens each. The drafts come from an oracle: the text of the
previous run with a share of wrong tokens, because random weights say nothing about real drafters.
A ring learns its draft statistics from one acceptance and depth only, and its first round is
warm-up. Every text is compared with that without drafts.
"""

import asyncio
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from meshllm.bench.ring_table import DIMENSIONS, random_model
from meshllm.model.files.source import Source, open_folder
from meshllm.names import WireMode
from meshllm.node.compute.gauge import GenerationTimes
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import RingOptions, open_local_ring
from meshllm.protocol.drafting.drafter import Drafter
from meshllm.protocol.session.speculation import Speculation
from meshllm_loopback import LoopbackTransport, TrafficShape
from tests.bench.asking import ask
from tests.bench.report import Report, parser_of
from tests.builders.oracle import Oracle

PROMPT = [(7 * i + 3) % 500 for i in range(64)]
SILENT = Oracle((), 0.0)
Guesses = tuple[float | None, int]
"""Acceptance of drafts, None without drafts; limit of steps in flight."""
PLAIN: Guesses = None, 1


class Changing:
    """Delegates to an oracle that can be replaced."""

    oracle = SILENT

    def begin(self) -> Drafter:
        """Start a text."""
        return self.oracle.begin()

    def keep(self, tokens: Sequence[int]) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One ring on links of one kind; times per token in milliseconds, medians."""

    nodes: int
    rtt_ms: float
    mbit: float
    acceptance: float | None
    """Acceptance of drafts; None without drafts."""
    depth: int
    """Limit of steps in flight."""
    ms: float
    bound_ms: float
    speedup: float
    """Relative to no drafts in the same round."""
    tokens_per_step: float


async def measure(
    source: Source,
    link: tuple[int, float, float],
    kinds: Sequence[Guesses],
    sizes: tuple[int, int, int | None],
) -> list[Cell]:
    """Measure one ring without drafts and with each kind of drafts, in turns."""
    (nodes, rtt, mbit), (tokens, rounds, threads) = link, sizes
    shape = TrafficShape(delay_s=rtt / 2e3, bytes_per_s=mbit * 1e6 / 8)
    drafting = Changing()
    mode = WireMode.PLAIN  # the bound is for uncompressed bytes
    options = RingOptions(
        nodes=nodes,
        inference=InferenceConfig(threads=threads, drafting=drafting, prefix_bytes=0, wire=mode),
    )
    async with open_local_ring(source, options, LoopbackTransport(shape)) as ring:
        await ring.warmed_up()
        text, _ = await ask(ring, PROMPT, tokens)
        runs: dict[Guesses, list[GenerationTimes]] = {}
        learnt: dict[Guesses, Speculation] = {}
        for round_, kind in product(range(rounds + 1), (PLAIN, *kinds)):
            acceptance, depth = kind
            known = (*PROMPT, *text)
            drafting.oracle = SILENT
            if acceptance is not None:
                drafting.oracle = Oracle(known, acceptance, seed=round_)
            ring.entry._speculation = learnt.setdefault(kind, Speculation(drafting, depth=depth))
            again, measured = await ask(ring, PROMPT, tokens)
            if again != text:
                raise SystemExit(f"text differs at acceptance {acceptance}")
            if round_:  # the first round is warm-up
                runs.setdefault(kind, []).append(measured)
    plain = runs[PLAIN]
    row_bytes = source.config.hidden_size * 2
    way_ms = rtt / 2 + row_bytes * 8 / (mbit * 1e3)
    compute_ms = statistics.median(sum(hop.compute_s for hop in run.hops) for run in plain) * 1e3
    bound_ms = compute_ms + nodes * way_ms
    return [
        Cell(
            *link,
            acceptance,
            depth,
            ms=statistics.median(run.token_s for run in mine) * 1e3,
            bound_ms=bound_ms * (1 - (acceptance or 0)),
            speedup=statistics.median(
                one.token_s / other.token_s for one, other in zip(plain, mine, strict=True)
            ),
            tokens_per_step=statistics.mean(run.tokens_per_step for run in mine),
        )
        for (acceptance, depth), mine in runs.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = parser_of("links", __doc__)
    parser.add_argument("--model", default="qwen3-0.6b", choices=DIMENSIONS)
    parser.add_argument("--nodes", default="2,3", help="rings, separated by commas")
    parser.add_argument("--rtt", default="1,20,100", help="round trips in milliseconds")
    parser.add_argument("--mbit", default="10,100,1000", help="rates in Mbit/s")
    parser.add_argument("--acceptance", default="", help="of drafts, as 0,0.5,0.7,0.85")
    parser.add_argument("--depth", default="1,8", help="steps in flight at most")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--threads", type=int, help="of all ranks; by default as a node would choose"
    )
    options = parser.parse_args(arguments)
    report = Report(options)
    depths = [int(depth) for depth in _numbers(options.depth)]
    guesses = list(product(_numbers(options.acceptance), depths))
    kinds = product(_numbers(options.nodes), _numbers(options.rtt), _numbers(options.mbit))
    cells: list[Cell] = []
    with random_model(options.model, torch.bfloat16) as folder:
        source = open_folder(options.model, folder)
        for nodes, rtt, mbit in kinds:
            sizes = options.tokens, options.rounds, options.threads
            cells += asyncio.run(measure(source, (int(nodes), rtt, mbit), guesses, sizes))
            new = cells[-len(guesses) - 1 :]
            report.say(*_lines(new, is_first=len(new) == len(cells)))
    report.write(cells, model=options.model, tokens=options.tokens)
    return 0


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",") if number]


def _lines(cells: Sequence[Cell], *, is_first: bool) -> Iterator[str]:
    line = "{:>5} {:>7} {:>7} {:>10} {:>5} {:>9} {:>9} {:>9} {:>9} {:>11}".format
    if is_first:
        names = "nodes", "RTT ms", "Mbit/s", "acceptance", "depth", "ms/token", "bound ms"
        yield line(*names, "of bound", "speed-up", "tokens/step")
    for cell in cells:
        acceptance = "none" if cell.acceptance is None else f"{cell.acceptance:g}"
        numbers = f"{cell.ms:.1f}", f"{cell.bound_ms:.1f}", f"{cell.bound_ms / cell.ms:.2f}"
        speeds = f"{cell.speedup:.2f}x", f"{cell.tokens_per_step:.2f}"
        kind = cell.nodes, f"{cell.rtt_ms:g}", f"{cell.mbit:g}", acceptance, cell.depth
        yield line(*kind, *numbers, *speeds)


if __name__ == "__main__":
    sys.exit(main())
