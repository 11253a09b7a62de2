"""The load of a model: how often requests arrive, and how long prompts and answers are."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import takewhile
from math import exp, log
from statistics import NormalDist

from meshllm.errors import UserError
from meshllm.scheduler.simulator import Arrival

MAX_TOKENS = 1 << 20  # of a prompt or an answer
LEAST = 50
MAX_LONGER = 4

_POINTS = 100  # of a distribution, by which its mean is taken
_LAST = 0.999  # quantile that counts as the longest
_NORMAL = NormalDist()
_STREAMS = 1 << 32  # random sequences of one seed, that of each model is its own
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens, by its quantiles."""

    values: tuple[int, ...]
    """All equally likely, in ascending order; two or more are interpolated."""
    mean: float = field(init=False)

    def __post_init__(self) -> None:
        if not self.values or list(self.values) != sorted(self.values):
            raise UserError("Lengths must be one or more numbers in ascending order")
        if not 1 <= self.values[0] <= self.values[-1] <= MAX_TOKENS:
            raise UserError(f"A length is outside of 1 to {MAX_TOKENS} tokens")
        points = (self.quantile((at + 0.5) / _POINTS) for at in range(_POINTS))
        object.__setattr__(self, "mean", sum(points) / _POINTS)

    @classmethod
    def lognormal(cls, median: float, p90: float) -> "Lengths":
        """Make a log-normal distribution, cut at its quantile 0.999."""
        if not 1 <= median <= p90 <= MAX_TOKENS:
            raise UserError(f"Invalid lengths: median {median:g}, 90th percentile {p90:g}")
        width = log(p90 / median) / _NORMAL.inv_cdf(0.9)
        shares = [(at + 0.5) / _POINTS for at in range(_POINTS)] + [_LAST]
        lengths = (median * exp(width * _NORMAL.inv_cdf(share)) for share in shares)
        return cls(tuple(min(MAX_TOKENS, max(1, round(length))) for length in lengths))

    @property
    def longest(self) -> int:
        """Largest length."""
        return self.values[-1]

    def quantile(self, share: float) -> int:
        """Return the length at a share from 0 to 1."""
        place = share * (len(self.values) - 1)
        low = min(int(place), len(self.values) - 1)
        high = min(low + 1, len(self.values) - 1)
        return round(self.values[low] + (self.values[high] - self.values[low]) * (place - low))


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """The requests for one model."""

    rate: float
    """Requests per second, independent of each other (Poisson)."""
    prompt: Lengths
    answer: Lengths
    cached: float = 0.0
    """Fraction of the prompt tokens that a prefix cache holds, below 1."""

    @property
    def context(self) -> int:
        """Tokens of the longest session."""
        return self.prompt.longest + self.answer.longest

    def arrivals(self, model: int, seed: int) -> Iterator[Arrival]:
        """Yield requests without end; the same for the same seed on every machine."""
        draws = _draws(seed * _STREAMS + model)
        at_s = 0.0
        for pause, prompt, answer in zip(draws, draws, draws, strict=True):
            at_s -= log(1 - pause) / self.rate
            tokens = self.prompt.quantile(prompt)
            cached = int(tokens * self.cached)
            yield Arrival(at_s, model, tokens, self.answer.quantile(answer), cached)


def sample(loads: Sequence[ModelLoad], requests: int, seed: int = 1) -> list[Arrival]:
    """Draw about this many requests for all models, in order of time.

    If a model would get fewer than `LEAST`, it is up to `MAX_LONGER` times as many, because what
    happens to a rare model counts too.
    """
    rates = [load.rate for load in loads]
    usual_s = requests / sum(rates)
    end_s = min(max(usual_s, LEAST / min(rates)), MAX_LONGER * usual_s)
    streams = (
        takewhile(lambda each: each.at_s <= end_s, load.arrivals(model, seed))
        for model, load in enumerate(loads)
    )
    return list(merge(*streams))


def _draws(seed: int) -> Iterator[float]:
    """Yield numbers from 0 to below 1: SplitMix64 (Steele, Lea and Flood, 2014)."""
    state = seed
    while True:
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK
        yield ((mixed ^ mixed >> 31) >> 11) / (1 << 53)
