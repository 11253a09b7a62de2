"""Replays a trace as load, with made-up prompts, and compares the figures with the trace's.

Requests are sent at the times of the trace, divided by the speed, whether or not earlier ones are
answered (open loop): a slow target gets a queue, as it would from its users.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from secrets import token_bytes
from typing import Any

from meshllm.bench.targets import Target
from meshllm.errors import MeshError
from meshllm.request import Request, Sampling
from meshllm.traces.prompts import MadeUpPrompts
from meshllm.traces.trace import TraceLine

SALT_BYTES = 16
_DEFAULTS = {each.name: each.default for each in fields(Sampling)}


@dataclass(frozen=True, slots=True)
class Sample:
    """The figures of one answered request."""

    begin_s: float
    total_ms: float
    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int

    @property
    def token_ms(self) -> float | None:
        """Mean time of every token after the first; None with fewer than two."""
        later = self.new_tokens - 1
        return (self.total_ms - self.ttft_ms) / later if later > 0 else None


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Nearest-rank percentiles."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Percentiles | None":
        """Return those of some values; None without one."""
        found = sorted(values)
        if not found:
            return None
        return cls(*(found[-(-len(found) * percent // 100) - 1] for percent in (50, 90, 99)))


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """The figures of many requests."""

    prompt_tokens: int
    new_tokens: int
    tokens_per_second: float
    """Generated, from the first request to the last answer."""
    hit_rate: float
    """The part of all prompt tokens that the prefix cache had."""
    ttft_ms: Percentiles | None
    token_ms: Percentiles | None
    """Of the mean times per token of the requests."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "LoadFigures":
        """Summarise the figures of requests."""
        prompt = sum(each.prompt_tokens for each in samples)
        new = sum(each.new_tokens for each in samples)
        begin = min((each.begin_s for each in samples), default=0.0)
        end = max((each.begin_s + each.total_ms / 1e3 for each in samples), default=0.0)
        return cls(
            prompt_tokens=prompt,
            new_tokens=new,
            tokens_per_second=new / (end - begin) if end > begin else 0.0,
            hit_rate=sum(each.cached_tokens for each in samples) / prompt if prompt else 0.0,
            ttft_ms=Percentiles.of(each.ttft_ms for each in samples),
            token_ms=Percentiles.of(each.token_ms for each in samples if each.token_ms is not None),
        )


@dataclass(frozen=True, slots=True)
class ReplayComparison:
    """A replay beside its trace; both sides have the requests that both answered."""

    requests: int
    """Of the trace."""
    compared: int
    errors: dict[str, int]
    """Requests that the replay did not answer, by the reason."""
    trace: LoadFigures
    replay: LoadFigures


@dataclass(slots=True)
class TraceReplay:
    """One replay of a trace."""

    lines: Sequence[TraceLine]
    """In the order of their times; those whose prompt was not read are left out. ``model`` is the
    name by which to ask the target."""
    target: Target
    speed: float = 1.0
    report: Callable[[str], None] = lambda _: None
    prompts: MadeUpPrompts = field(default_factory=lambda: MadeUpPrompts(token_bytes(SALT_BYTES)))
    """Those of each replay differ, so that none finds the prompts of an earlier one in a cache."""
    _samples: dict[int, Sample] = field(default_factory=dict)
    """By the place of the line."""
    _errors: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.lines = [each for each in self.lines if each.prompt_tokens]

    async def run(self) -> ReplayComparison:
        """Send all requests at their times, and wait for all answers."""
        begin = _now()
        async with asyncio.TaskGroup() as group:
            for number, line in enumerate(self.lines):
                await asyncio.sleep(begin + (line.at - self.lines[0].at) / self.speed - _now())
                group.create_task(self._ask(number, line))
        pairs = [
            (recorded, self._samples[number])
            for number, line in enumerate(self.lines)
            if number in self._samples and (recorded := _recorded(line))
        ]
        return ReplayComparison(
            requests=len(self.lines),
            compared=len(pairs),
            errors=dict(self._errors),
            trace=LoadFigures.of([recorded for recorded, _ in pairs]),
            replay=LoadFigures.of([sample for _, sample in pairs]),
        )

    async def _ask(self, number: int, line: TraceLine) -> None:
        prompt = self.prompts.prompt(line, number)
        stamps: list[float] = []
        begin = _now()
        try:
            reply = await self.target.ask(
                _request(line, prompt, number), lambda: stamps.append(_now())
            )
        except MeshError as error:
            self._errors[str(error)] += 1
        else:
            end = _now()
            first = stamps[0] if stamps else end
            self.prompts.answered(line, prompt, reply.tokens)
            self._samples[number] = Sample(
                begin, (end - begin) * 1e3, (first - begin) * 1e3,
                reply.prompt_tokens, reply.cached_tokens, reply.new_tokens,
            )  # fmt: skip
        done = len(self._samples) + self._errors.total()
        self.report(f"{done} of {len(self.lines)} requests")


def _recorded(line: TraceLine) -> Sample | None:
    """Return the figures of a line; None if it was not answered."""
    if line.finish_reason not in {"stop", "length"} or line.ttft_ms is None:
        return None
    return Sample(
        line.at, line.total_ms, line.ttft_ms,
        line.prompt_tokens, line.cached_tokens, line.new_tokens,
    )  # fmt: skip


def _request(line: TraceLine, prompt: tuple[int, ...], number: int) -> Request:
    given: dict[str, Any] = {
        name: int(value) if isinstance(_DEFAULTS[name], int) else value
        for name, value in line.sampling.items()
        if name in _DEFAULTS
    }
    sampling = Sampling(**{**given, "seed": number})
    most = max(1, line.new_tokens)
    return Request(
        ids=prompt, sampling=sampling, max_tokens=most, model=line.model, ignores_end=True
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
