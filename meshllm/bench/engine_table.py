"""How fast engines compute, each step beside transformers'.

In every round each contestant takes one step, in any order, so that a busy machine slows all of
them; what is compared are the medians over rounds of ratios inside a round. So is the fraction of
the limit: the time that a probe of the memory takes, in the same round and with the same threads,
for as many bytes as the weights have.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshllm.bench.engines import Contestant, Forward, Task, line_up
from meshllm.bench.ring_table import random_model
from meshllm.model.device import CPU, fetch
from meshllm.names import Quant

PROMPTS = (32, 256, 1024)
"""Tokens that are read at once."""
SESSIONS = (1, 2, 4, 8, 16, 32)
"""That go on by one token each, in one step."""
OFTEN = 4  # times as many rounds of a short step
LONG = 512  # rows of a step that is no short one
PROBE_BYTES = 256 << 20  # eight times the last cache of a large core complex
PROBE_BYTES_OF_GPU = 1 << 30  # or to begin would be most of it


@dataclass(frozen=True, slots=True)
class Case:
    """What to measure."""

    model: str
    quants: tuple[Quant, ...]
    rounds: int
    """Of the longest steps; up to four times as many of short ones."""
    threads: int | None
    """As many as torch wants when None."""
    device: str = "cpu"
    """Where everyone computes: ``cpu`` or ``cuda:N``."""


TASKS = (
    *(Task("prefill", tokens) for tokens in PROMPTS),
    *(Task("decode", sessions) for sessions in SESSIONS),
)


@dataclass(slots=True)
class Rounds:
    """What was measured of a task, one value per round."""

    ms: dict[str, list[float]]
    """By contestant."""
    same: dict[str, bool]
    """Whether all logits were those of transformers, of those who are to give the same."""
    gb_per_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant at one task over all rounds."""

    task: str
    name: str
    megabytes: float
    """That a step reads."""
    ms: float
    """Median."""
    best_ms: float
    tokens_per_second: float
    ratio: float
    """Speed against transformers in the same round, median."""
    fraction: float | None
    """Of the speed that memory allows, where tokens are decoded; median."""
    same: bool | None
    """Whether every bit was that of transformers; None where it need not be."""


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of all tasks."""

    gb_per_s: float
    """What the probe of the memory read, median."""
    rows: tuple[Row, ...]


def measure(case: Case, told: Callable[[str], None]) -> Table:
    """Make the model, and let all contestants do every task."""
    with random_model(case.model, torch.bfloat16) as folder, _computing(case.threads):
        device = torch.device(case.device)
        contestants = line_up(folder, case.quants, told, device)
        rows: list[Row] = []
        speeds: list[float] = []
        for task in TASKS:
            able = [each for each in contestants if each.takes(task)]
            rounds = take_turns(able, task, _repeats(task, case.rounds), told, device)
            rows += summarise(able, task, rounds)
            speeds += rounds.gb_per_s
    return Table(statistics.median(speeds), tuple(rows))


def take_turns(
    contestants: Sequence[Contestant],
    task: Task,
    rounds: int,
    told: Callable[[str], None],
    device: torch.device = CPU,
) -> Rounds:
    """Let all contestants take the same steps in turn, after a round that does not count."""
    first = contestants[0].name
    exact = [each.name for each in contestants if task.kind in each.exact]
    result = Rounds({each.name: [] for each in contestants}, dict.fromkeys(exact, True))
    size = PROBE_BYTES if device == CPU else PROBE_BYTES_OF_GPU
    memory = torch.ones(size // 8, dtype=torch.int64, device=device)
    steps: dict[str, Forward] = {}
    first_round = 1 if task.rows > LONG else 0  # the longest have tried theirs in shorter ones
    for number in range(first_round, rounds + 1):
        told(f"{task.name}, round {number} of {rounds}" if number else f"{task.name}, warming up")
        if task.kind == "prefill" or not steps:
            steps = {each.name: each.begin(task) for each in contestants}
        ids = torch.randint(3, 500, task.shape)
        logits = {}
        for name in random.sample(list(steps), len(steps)):
            begin = time.perf_counter()
            logits[name] = steps[name](ids)
            if number:
                result.ms[name].append((time.perf_counter() - begin) * 1e3)
        for name in exact:
            result.same[name] &= torch.equal(logits[first], logits[name])
        if number:
            result.gb_per_s.append(read_memory(memory))
    return result


def read_memory(memory: Tensor) -> float:
    """Read all of it once; return GB/s."""
    begin = time.perf_counter()
    fetch(memory.sum())
    return memory.nbytes / (time.perf_counter() - begin) / 1e9


def summarise(contestants: Sequence[Contestant], task: Task, rounds: Rounds) -> list[Row]:
    """Take medians."""
    theirs = rounds.ms[contestants[0].name]

    def row(one: Contestant) -> Row:
        ours = rounds.ms[one.name]
        limits = [one.bytes / speed / 1e6 for speed in rounds.gb_per_s]  # ms
        return Row(
            task.name,
            one.name,
            megabytes=one.bytes / 1e6,
            ms=statistics.median(ours),
            best_ms=min(ours),
            tokens_per_second=task.rows * 1e3 / statistics.median(ours),
            ratio=_median_ratio(theirs, ours),
            fraction=_median_ratio(limits, ours) if task.kind == "decode" else None,
            same=rounds.same.get(one.name),
        )

    return [row(one) for one in contestants]


def _repeats(task: Task, rounds: int) -> int:
    """Tell how often the step is measured."""
    return rounds * max(1, min(OFTEN, LONG // task.rows))


def _median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


@contextmanager
def _computing(threads: int | None) -> Iterator[None]:
    """Let torch use so many threads, and make no gradients."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(before)
