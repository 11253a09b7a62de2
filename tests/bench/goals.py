"""What the engine should reach beside its peers, and whether the rows of a table reach it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshllm.bench.ring_table import TRANSFORMERS
from meshllm.names import Quant

MESHLLM, LLAMA = "meshllm", "llama.cpp"
LIMIT = "the limit"
"""Of the memory bandwidth."""


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant in one task."""

    threads: int
    task: str
    width: str
    name: str
    ms: float
    """Lower quartile: of the prompt, or of a step."""
    tokens_per_second: float
    of_transformers: float | None
    """Speed against transformers in bfloat16."""
    of_llama: float | None
    """Speed against llama.cpp with the same width."""
    of_limit: float | None
    """Fraction of the memory bandwidth limit, of a step of one session."""


@dataclass(frozen=True, slots=True)
class Goal:
    """The least ratio of a speed to that of something else in the same run."""

    task: str
    """Its name, or the first word of it."""
    width: str
    against: str
    """A contestant, the limit of the memory bandwidth, or another width."""
    least: float


GOALS = (
    Goal("decode 1", Quant.NONE, LLAMA, 1.0),
    Goal("decode 1", Quant.INT8, LLAMA, 1.3),
    Goal("decode 1", Quant.INT4, LLAMA, 1.0),
    Goal("decode 1", Quant.INT4, Quant.INT8, 1.0),
    Goal("decode 1", Quant.NONE, LIMIT, 0.75),
    Goal("decode 1", Quant.INT8, LIMIT, 0.75),
    Goal("decode 1", Quant.INT4, LIMIT, 0.6),
    Goal("decode 8", Quant.NONE, LLAMA, 1.3),
    Goal("decode 8", Quant.INT8, LLAMA, 2.0),
    Goal("prefill", Quant.NONE, LLAMA, 1.0),
    Goal("prefill", Quant.INT8, LLAMA, 1.0),
    Goal("prefill", Quant.INT4, LLAMA, 1.0),
    Goal("prefill", Quant.NONE, TRANSFORMERS, 1.0),
    Goal("prefill", Quant.INT8, TRANSFORMERS, 1.0),
    Goal("prefill", Quant.INT4, Quant.INT8, 0.9),
)
RINGS_LEAST = 1.2
"""The same of a ring of processes against llama.cpp over RPC, in each width."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A goal in one task with so many threads."""

    threads: int
    task: str
    width: str
    against: str
    ratio: float
    least: float

    @property
    def is_met(self) -> bool:
        """Whether the ratio is at least the goal, before it is rounded."""
        return self.ratio >= self.least

    def __str__(self) -> str:
        verdict = "met" if self.is_met else "missed"
        what = f"{self.threads:7} {self.task:<14} {self.width:<6}"
        return f"{what} {self.ratio:6.3f} of {self.against:<14} goal {self.least:.2f}  {verdict}"


def authorize(rows: Iterable[Row]) -> Iterator[Verdict]:
    """Hold the rows of the engine against the goals; yield none for what was not measured."""
    own = {(row.threads, row.task, row.width): row for row in rows if row.name == MESHLLM}
    for goal in GOALS:
        for (threads, task, width), row in own.items():
            if goal.width != width or goal.task not in (task, task.split()[0]):
                continue
            ratios = {
                LLAMA: row.of_llama,
                TRANSFORMERS: row.of_transformers,
                LIMIT: row.of_limit,
            }
            if other := own.get((threads, task, goal.against)):
                ratios[goal.against] = other.ms / row.ms
            if (ratio := ratios.get(goal.against)) is not None:
                yield Verdict(threads, task, width, goal.against, ratio, goal.least)
