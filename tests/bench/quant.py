"""How fast quantised weights are: ``python -m tests.bench.quant [--model NAME] [--threads N]``.

A model of published dimensions and random weights is run by transformers' own forward in a loop as
``generate`` has it, in bfloat16, and by one shard with plain, int8 and int4 weights: one step of
each in turn, so that a busy machine slows all of them. Beside them, in every round, stands a probe
of the memory: the time that reading as many bytes as the weights have would take is the limit of a
decoded token. Where others use the machine, set ``OMP_WAIT_POLICY=passive``: else threads that wait
for each other burn whole slices of time.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from meshllm.model.quant import quantise
from meshllm.model.shard import Shard
from meshllm.model.source import open_folder
from meshllm.names import Quant, Span
from meshllm.testing.table1 import DIMENSIONS, TRANSFORMERS, random_model
from tests.bench.engine import PROBE_BYTES, Begin, Forward, read_memory, whole_stock

CONTEXT = 128  # tokens before the first one that is decoded
SHARES = {1: 1.0, 8: 0.3, 256: 0.1}
"""Tokens of a step, and how many of the rounds: decoding, a draft that is checked, a prompt."""

Times = defaultdict[int, defaultdict[str, list[float]]]
"""Milliseconds by task and contestant."""


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant at one task over all rounds."""

    task: str
    name: str
    ms: float
    """Median."""
    best_ms: float
    ratio: float
    """Speed against transformers in the same round, median."""
    best_ratio: float
    """The same of the fastest step of each."""
    megabytes: float
    """That a token reads."""
    fraction: float | None
    """Of the speed that memory allows; for one decoded token, median of the rounds."""
    best_fraction: float | None
    """The same of the fastest token and the fastest probe."""


class Contestant:
    """One shard with all layers, its weights held in one way."""

    def __init__(self, folder: Path, kind: Quant) -> None:
        source = open_folder(folder.name, folder)
        span = Span(0, source.config.num_hidden_layers)
        plain = kind is Quant.NONE
        self.shard = Shard.load(source, span, embed=True, head=True, packed=plain)
        linears = [m for m in self.shard.model.modules() if isinstance(m, nn.Linear)]
        self.plain_bytes = sum(linear.weight.nbytes for linear in linears)
        """What one token reads: every matrix, but no look-up table."""
        report = quantise(self.shard.model, kind)
        self.bytes = self.plain_bytes - report.plain_bytes + report.bytes

    def begin(self) -> Forward:
        """Start a generation."""
        cache = self.shard.new_cache()

        def forward(ids: Tensor) -> Tensor:
            rows = 1 if cache.length == 0 else None
            return self.shard.forward(ids, cache, rows=rows)

        return forward


def run(folder: Path, kinds: Sequence[Quant], rounds: int) -> list[Row]:
    """Measure every task in turn."""
    mine = {str(kind): Contestant(folder, kind) for kind in kinds}
    sizes = {name: one.bytes for name, one in mine.items()}
    sizes[TRANSFORMERS] = next(iter(mine.values())).plain_bytes
    begins = {TRANSFORMERS: whole_stock(folder)} | {n: one.begin for n, one in mine.items()}
    memory = torch.ones(PROBE_BYTES // 8, dtype=torch.int64)
    times: Times = defaultdict(lambda: defaultdict(list))
    speeds = []  # GB/s
    with torch.inference_mode():
        for tokens, share in SHARES.items():
            generations = _begin(begins, CONTEXT)
            for _ in range(max(2, int(rounds * share))):
                if tokens > CONTEXT:
                    generations = _begin(begins)
                for name, milliseconds in _take_turns(generations, tokens).items():
                    times[tokens][name].append(milliseconds)
                speeds.append(read_memory(memory))
    return _reduce(times, sizes, speeds)


def _begin(begins: dict[str, Begin], context: int = 0) -> dict[str, Forward]:
    """Start a generation of everyone, with some tokens before the first that is measured."""
    generations = {name: begin() for name, begin in begins.items()}
    if context:
        _take_turns(generations, context)
    return generations


def _take_turns(generations: dict[str, Forward], tokens: int) -> dict[str, float]:
    """Let everyone read the same random tokens; return the milliseconds of each."""
    ids = torch.randint(3, 500, (1, tokens))
    times = {}
    for name in random.sample(list(generations), len(generations)):
        begin = time.perf_counter()
        generations[name](ids)
        times[name] = (time.perf_counter() - begin) * 1e3
    return times


def _reduce(times: Times, sizes: dict[str, int], speeds: Sequence[float]) -> list[Row]:
    rows = []
    for tokens, runs in times.items():
        for name, mine in runs.items():
            limits = [sizes[name] / speed / 1e6 for speed in speeds[: len(mine)]]  # ms
            pairs = zip(limits, mine, strict=True)
            ratios = zip(runs[TRANSFORMERS], mine, strict=True)
            fraction = statistics.median(limit / ms for limit, ms in pairs)
            rows.append(
                Row(
                    task=f"{'prefill' if tokens > CONTEXT else 'decode'} {tokens}",
                    name=name,
                    ms=statistics.median(mine),
                    best_ms=min(mine),
                    ratio=statistics.median(theirs / ours for theirs, ours in ratios),
                    best_ratio=min(runs[TRANSFORMERS]) / min(mine),
                    megabytes=sizes[name] / 1e6,
                    fraction=fraction if tokens == 1 else None,
                    best_fraction=min(limits) / min(mine) if tokens == 1 else None,
                )
            )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.quant", description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b", choices=DIMENSIONS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=40, help="of one token; fewer of more")
    parser.add_argument("--kinds", default="none,int8,int4", help="separated by commas")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    kinds = [Quant(kind) for kind in options.kinds.split(",")]
    with random_model(options.model, torch.bfloat16) as folder:
        rows = run(folder, kinds, options.rounds)
    if options.json:
        about = {"model": options.model, "threads": options.threads}
        print(json.dumps(about | {"rows": [asdict(row) for row in rows]}))
        return 0
    print(f"{options.model}, {options.threads} threads")
    print(_table(rows))
    return 0


def _table(rows: Sequence[Row]) -> str:
    line = "{:<12} {:<13} {:>6} {:>8} {:>8} {:>7} {:>7} {:>9} {:>7}".format
    lines = [line("task", "by", "MB", "ms", "best", "ratio", "best", "of limit", "best")]
    for row in rows:
        shares = [
            "" if share is None else f"{share:.2f}" for share in (row.fraction, row.best_fraction)
        ]
        times = f"{row.ms:.1f}", f"{row.best_ms:.1f}"
        ratios = f"{row.ratio:.2f}x", f"{row.best_ratio:.2f}x"
        lines.append(line(row.task, row.name, f"{row.megabytes:.0f}", *times, *ratios, *shares))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
