"""TTFT of chat turns with a prefix cache: ``python -m tests.bench.chat [--turns 10]``.

Every turn appends tokens to the previous answer. One ring has a prefix cache (kept), one has none
(plain); in each round both run the same chat, and right before each turn the cached ring also
answers a new prompt with the length of one turn (fresh). Target: the last turn takes at most 1.2
times as long as that prompt. Its tokens attend to all earlier ones, which takes longer the longer
the chat is. All ranks of a ring run in this process, with one compute thread.
"""

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random

import torch

from meshllm.bench.ring_table import DIMENSIONS, random_model
from meshllm.model.files.source import Source, open_folder
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import RingOptions, open_local_ring
from tests.bench.asking import ask
from tests.bench.report import Report, counts, parser_of

TOKENS = 8
"""Length of an answer."""


@dataclass(frozen=True, slots=True)
class Row:
    """One turn on one ring; medians over the rounds, in milliseconds to the first token."""

    nodes: int
    turn: int
    prompt_tokens: int
    cached_tokens: int
    kept_ms: float
    plain_ms: float
    """Time in the ring without a prefix cache."""
    fresh_ms: float
    """Time of a new prompt as long as a turn, without context."""
    speedup: float
    """Plain divided by kept."""
    of_fresh: float
    """Kept divided by fresh."""


async def measure(source: Source, nodes: int, options: argparse.Namespace) -> list[Row]:
    """Run the same chat on both rings in turns."""
    random = Random(0)
    figures: dict[int, list[tuple[float, float, float]]] = {}
    sizes: dict[int, tuple[int, int]] = {}
    async with AsyncExitStack() as stack:
        kept, plain = [
            await stack.enter_async_context(
                open_local_ring(
                    source,
                    RingOptions(
                        nodes=nodes,
                        inference=InferenceConfig(
                            threads=1, speculation=False, prefix_bytes=budget
                        ),
                    ),
                )
            )
            for budget in (None, 0)
        ]
        for _ in range(options.rounds):
            text: list[int] = []
            for turn in range(1, options.turns + 1):
                text += _draw(random, options.tokens)
                _, slow = await ask(plain, text, TOKENS)
                _, fresh = await ask(kept, _draw(random, options.tokens), TOKENS)
                answer, fast = await ask(kept, text, TOKENS)
                figures.setdefault(turn, []).append((fast.ttft_s, slow.ttft_s, fresh.ttft_s))
                sizes[turn] = len(text), fast.reused
                text += answer
    return [_row(nodes, turn, *sizes[turn], mine) for turn, mine in figures.items()]


def _row(
    nodes: int, turn: int, prompt: int, cached: int, figures: Sequence[tuple[float, float, float]]
) -> Row:
    fast, slow, fresh = (statistics.median(each) * 1e3 for each in zip(*figures, strict=True))
    speedup = statistics.median(slow / fast for fast, slow, _ in figures)
    of_fresh = statistics.median(fast / fresh for fast, _, fresh in figures)
    return Row(nodes, turn, prompt, cached, fast, slow, fresh, speedup, of_fresh)


def _draw(random: Random, count: int) -> list[int]:
    return [random.randrange(3, 500) for _ in range(count)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = parser_of("chat", __doc__)
    parser.add_argument("--model", default="qwen3-0.6b", choices=DIMENSIONS)
    parser.add_argument("--nodes", type=counts, default=(1, 2), help="rings, with commas")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64, help="that a turn adds")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    report = Report(options, threads=1)
    rows: list[Row] = []
    with random_model(options.model, torch.bfloat16) as folder:
        source = open_folder(options.model, folder)
        for nodes in options.nodes:
            rows += asyncio.run(measure(source, nodes, options))
    report.say(f"{options.model}, {options.tokens} tokens a turn; milliseconds to the first token")
    report.say(lay_out(rows))
    report.write(rows, model=options.model, tokens=options.tokens)
    return 0


def lay_out(rows: Sequence[Row]) -> str:
    """Format the rows as a table."""
    line = "{:>5} {:>5} {:>7} {:>7} {:>9} {:>9} {:>9} {:>9} {:>9}".format
    names = "nodes", "turn", "prompt", "cached", "kept", "plain", "fresh", "speed-up", "of fresh"
    lines = [line(*names)]
    for row in rows:
        counted = row.nodes, row.turn, row.prompt_tokens, row.cached_tokens
        times = (f"{each:.0f}" for each in (row.kept_ms, row.plain_ms, row.fresh_ms))
        lines.append(line(*counted, *times, f"{row.speedup:.1f}x", f"{row.of_fresh:.2f}x"))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
