"""How fast the engine computes: ``python -m tests.bench.engine [--model NAME] [--threads N]``.

A model of published dimensions and random weights is run by transformers' own forward in a loop as
``generate`` has it, by one shard and by two. In every round each takes one step, in any order, so
that a busy machine slows all of them; what is compared are the medians over rounds of ratios inside
a round. So is the fraction of the limit: the time that a probe of the memory takes, in the same
round and with the same threads, for as many bytes as the weights have. The logits of every step are
compared bit for bit.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from meshllm.model.parity import divide
from meshllm.model.shard import Shard
from meshllm.model.skeleton import quiet
from meshllm.model.source import open_folder
from meshllm.testing.table1 import DIMENSIONS, TRANSFORMERS, random_model

CONTEXT = 128  # tokens before the first one that is decoded
DECODE_ROWS = (1, 8, 32)
"""Of a decode step: one token, and drafts that are checked at once."""
FEWEST = 3  # rounds
PROBE_BYTES = 256 << 20  # eight times the last cache of a large core complex

Forward = Callable[[Tensor], Tensor]
Begin = Callable[[], Forward]
"""Start a generation: token ids [1, T] to the logits [1, T or 1, V] behind them."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a step is."""

    rows: int
    context: int = 0
    """Tokens before it; without any, every round begins a generation."""

    @property
    def name(self) -> str:
        """Name it as in the table."""
        return f"{'decode' if self.context else 'prefill'} {self.rows}"


@dataclass(slots=True)
class Rounds:
    """What was measured of a task, one value per round."""

    ms: dict[str, list[float]]
    """By contestant."""
    same: dict[str, bool]
    """Whether all logits were those of the first contestant."""
    gb_per_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant at one task over all rounds."""

    task: str
    name: str
    ms: float
    """Median."""
    best_ms: float
    tokens_per_second: float
    ratio: float
    """Speed against the first contestant in the same round, median."""
    fraction: float | None
    """Of the speed that memory allows, for one decoded token; median."""
    same: bool
    """Whether every bit was that of the first contestant."""


def whole_stock(folder: Path) -> Begin:
    """Run the stock model with the arguments that ``generate`` gives it."""
    with quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()

    def begin() -> Forward:
        cache = DynamicCache(config=model.config)

        def forward(ids: Tensor) -> Tensor:
            start, count = cache.get_seq_length(), ids.shape[1]
            logits: Tensor = model(
                input_ids=ids,
                attention_mask=torch.ones(1, start + count, dtype=torch.int64),
                position_ids=torch.arange(start, start + count)[None],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1 if start == 0 else 0,
            ).logits
            return logits

        return forward

    return begin


def parts(folder: Path, count: int) -> Begin:
    """Run the same model in ``count`` shards, one after the other."""
    source = open_folder(folder.name, folder)
    shards = [
        Shard.load(source, part.span, embed=part.embed, head=part.head)
        for part in divide(source.config.num_hidden_layers, count)
    ]

    def begin() -> Forward:
        caches = [shard.new_cache() for shard in shards]

        def forward(ids: Tensor) -> Tensor:
            rows = 1 if caches[0].length == 0 else None
            for shard, cache in zip(shards, caches, strict=True):
                ids = shard.forward(ids, cache, rows=rows)
            return ids

        return forward

    return begin


def read_memory(memory: Tensor) -> float:
    """Read all of it once; return GB/s."""
    begin = time.perf_counter()
    memory.sum()
    return memory.nbytes / (time.perf_counter() - begin) / 1e9


def measure(contestants: Mapping[str, Begin], task: Task, rounds: int) -> Rounds:
    """Let all contestants take the steps of a task in turn, after a round that does not count."""
    result = Rounds({name: [] for name in contestants}, dict.fromkeys(contestants, True))
    memory = torch.ones(PROBE_BYTES // 8, dtype=torch.int64)
    generations = _begin(contestants, task.context)
    for number in range(1 + max(FEWEST, min(rounds, rounds * 32 // task.rows))):
        if not task.context:
            generations = _begin(contestants, 0)
        ids = torch.randint(3, 500, (1, task.rows))
        logits = {}
        for name in random.sample(list(generations), len(generations)):
            begin = time.perf_counter()
            logits[name] = generations[name](ids)  # [1, 1 or T, V]
            if number:
                result.ms[name].append((time.perf_counter() - begin) * 1e3)
        first, *_ = contestants
        for name in contestants:
            result.same[name] &= torch.equal(logits[first], logits[name])
        if number:
            result.gb_per_s.append(read_memory(memory))
    return result


def summarise(task: Task, rounds: Rounds, token_bytes: int) -> list[Row]:
    """Take medians; a token that is decoded reads ``token_bytes``."""
    theirs, *_ = rounds.ms.values()
    limits = [token_bytes / speed / 1e6 for speed in rounds.gb_per_s]  # ms
    alone = task.name == "decode 1"
    return [
        Row(
            task.name,
            name,
            ms=statistics.median(ours),
            best_ms=min(ours),
            tokens_per_second=task.rows * 1e3 / statistics.median(ours),
            ratio=_median_ratio(theirs, ours),
            fraction=_median_ratio(limits, ours) if alone else None,
            same=rounds.same[name],
        )
        for name, ours in rounds.ms.items()
    ]


def _begin(contestants: Mapping[str, Begin], context: int) -> dict[str, Forward]:
    """Start generations that have the same ``context``."""
    generations = {name: begin() for name, begin in contestants.items()}
    if context:
        ids = torch.randint(3, 500, (1, context))
        for forward in generations.values():
            forward(ids)
    return generations


def _median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def _bytes_per_token(folder: Path) -> int:
    """Count what one token reads: all weights, but not a look-up table that is no head."""
    with quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    total = sum(parameter.nbytes for parameter in model.parameters())
    table = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is table
    return int(total if tied else total - table.nbytes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.engine", description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b", choices=DIMENSIONS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=24, help="of one token; fewer of more")
    parser.add_argument("--prompts", default="32,256,1024", help="lengths, separated by commas")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    tasks = [Task(int(length)) for length in options.prompts.split(",") if length]
    tasks += [Task(rows, CONTEXT) for rows in DECODE_ROWS]
    rows: list[Row] = []
    speeds: list[float] = []
    with random_model(options.model, torch.bfloat16) as folder, torch.inference_mode():
        contestants = {
            TRANSFORMERS: whole_stock(folder),
            "one shard": parts(folder, 1),
            "two shards": parts(folder, 2),
        }
        token_bytes = _bytes_per_token(folder)
        for task in tasks:
            rounds = measure(contestants, task, options.rounds)
            rows += summarise(task, rounds, token_bytes)
            speeds += rounds.gb_per_s
    speed = statistics.median(speeds)
    if options.json:
        about = {"model": options.model, "threads": options.threads, "gb_per_s": speed}
        print(json.dumps(about | {"rows": [asdict(row) for row in rows]}))
    else:
        print(f"{options.model}, bfloat16, {options.threads} threads; memory {speed:.1f} GB/s")
        print(_table(rows))
    return 0 if all(row.same for row in rows) else 1


def _table(rows: Sequence[Row]) -> str:
    line = "{:<13} {:<13} {:>8} {:>8} {:>9} {:>7} {:>9} {:>6}".format
    lines = [line("task", "by", "ms", "best", "tokens/s", "ratio", "of limit", "bits")]
    for row in rows:
        fraction = "" if row.fraction is None else f"{row.fraction:.2f}"
        figures = f"{row.ms:.1f}", f"{row.best_ms:.1f}", f"{row.tokens_per_second:.1f}"
        bits = "same" if row.same else "other"
        lines.append(line(row.task, row.name, *figures, f"{row.ratio:.2f}x", fraction, bits))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
