"""Benchmark of the inference engines, step by step against transformers.

In every round each contestant runs one step, in random order, so that load on the machine slows
all of them; results are medians over rounds of ratios within a round. So is the fraction of the
memory bandwidth limit: the time a probe takes, in the same round and with the same threads, to
read as many bytes as the weights have.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshllm.bench.engines import Engine, EngineTask, Forward, line_up
from meshllm.bench.ring_table import random_model
from meshllm.model.device import CPU, to_host, using_threads
from meshllm.model.pages import huge_zeros
from meshllm.names import Quant

PROMPTS = (32, 256, 1024)
"""Prefill lengths in tokens."""
SESSIONS = (1, 2, 4, 8, 16, 32)
"""Batch sizes of a decode step."""
OFTEN = 4  # factor on the rounds of a short step
LONG = 512  # rows from which a step is long
PROBE_BYTES = 256 << 20  # eight times the last-level cache of a large core complex
PROBE_BYTES_OF_GPU = 1 << 30  # a smaller one would measure the launch overhead


@dataclass(frozen=True, slots=True)
class EngineBenchmark:
    """What to measure."""

    model: str
    quants: tuple[Quant, ...]
    rounds: int
    """Rounds of the longest steps; up to four times as many for short ones."""
    threads: int | None
    """None is as many as `default_threads`."""
    device: str = "cpu"
    """Device of all contestants: ``cpu`` or ``cuda:N``."""


TASKS = (
    *(EngineTask("prefill", tokens) for tokens in PROMPTS),
    *(EngineTask("decode", sessions) for sessions in SESSIONS),
)


@dataclass(slots=True)
class Rounds:
    """Measurements of a task, one value per round."""

    ms: dict[str, list[float]]
    """By contestant."""
    same: dict[str, bool]
    """By exact contestant: whether all logits were bit-identical to transformers'."""
    gb_per_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EngineRow:
    """Results of one contestant in one task."""

    task: str
    name: str
    megabytes: float
    """Read by a step."""
    ms: float
    """Median."""
    best_ms: float
    tokens_per_second: float
    ratio: float
    """Speed against transformers in the same round, median."""
    fraction: float | None
    """Fraction of the memory bandwidth limit in decode, median; None in prefill."""
    same: bool | None
    """Whether the logits were bit-identical to transformers'; None if not required."""


@dataclass(frozen=True, slots=True)
class EngineTable:
    """The results of all tasks."""

    gb_per_s: float
    """Memory bandwidth measured by the probe, median."""
    rows: tuple[EngineRow, ...]


def measure(case: EngineBenchmark, report: Callable[[str], None]) -> EngineTable:
    """Create the model and run every task with all contestants."""
    with (
        random_model(case.model, torch.bfloat16) as folder,
        using_threads(case.threads),
        torch.inference_mode(),
    ):
        device = torch.device(case.device)
        contestants = line_up(folder, case.quants, report, device)
        rows: list[EngineRow] = []
        speeds: list[float] = []
        for task in TASKS:
            able = [each for each in contestants if each.takes(task)]
            rounds = take_turns(able, task, _repeats(task, case.rounds), report, device)
            rows += summarise(able, task, rounds)
            speeds += rounds.gb_per_s
    return EngineTable(statistics.median(speeds), tuple(rows))


def take_turns(
    contestants: Sequence[Engine],
    task: EngineTask,
    rounds: int,
    report: Callable[[str], None],
    device: torch.device = CPU,
) -> Rounds:
    """Run the same steps with all contestants in turn, after a warm-up round."""
    first = contestants[0].name
    exact = [each.name for each in contestants if task.kind in each.exact]
    result = Rounds({each.name: [] for each in contestants}, dict.fromkeys(exact, True))
    memory = probe(device)
    steps: dict[str, Forward] = {}
    first_round = 1 if task.rows > LONG else 0  # long steps are warmed up by the shorter ones
    for number in range(first_round, rounds + 1):
        report(f"{task.name}, round {number} of {rounds}" if number else f"{task.name}, warming up")
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


def probe(device: torch.device = CPU) -> Tensor:
    """Make a tensor that is too large for a cache, in memory that is as fast as that of weights."""
    if device == CPU:
        return huge_zeros(PROBE_BYTES // 8, dtype=torch.int64).fill_(1)
    return torch.ones(PROBE_BYTES_OF_GPU // 8, dtype=torch.int64, device=device)


def read_memory(memory: Tensor) -> float:
    """Read the whole tensor once; return GB/s."""
    begin = time.perf_counter()
    to_host(memory.sum())
    return memory.nbytes / (time.perf_counter() - begin) / 1e9


def summarise(contestants: Sequence[Engine], task: EngineTask, rounds: Rounds) -> list[EngineRow]:
    """Reduce the rounds to medians."""
    theirs = rounds.ms[contestants[0].name]

    def row(one: Engine) -> EngineRow:
        ours = rounds.ms[one.name]
        limits = [one.bytes / speed / 1e6 for speed in rounds.gb_per_s]  # ms
        return EngineRow(
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


def _repeats(task: EngineTask, rounds: int) -> int:
    """Return the number of rounds of a step."""
    return rounds * max(1, min(OFTEN, LONG // task.rows))


def _median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))
