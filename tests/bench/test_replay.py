import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from meshllm.bench.replay import LoadFigures, Percentiles, Sample, TraceReplay
from meshllm.bench.targets import TargetAnswer
from meshllm.errors import Busy
from meshllm.request import Request, Sampling
from meshllm.testing.clock import run_virtual
from meshllm.traces.trace import TraceLine

LINE = TraceLine(
    0.0, "m", 20, 16, 3, 8, 10.0, 30.0, "length", {"temperature": 0.5, "top_k": 9.0, "new": 1.0}
)


@dataclass
class Slow:
    """Answers after two seconds, the first token after one; refuses some requests."""

    refused: frozenset[int] = frozenset()
    begun: list[float] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    async def ask(self, request: Request, begun: Callable[[], None]) -> TargetAnswer:
        number = len(self.requests)
        self.requests.append(request)
        self.begun.append(asyncio.get_running_loop().time())
        if number in self.refused:
            raise Busy("The queue is full")
        await asyncio.sleep(1.0)
        begun()
        await asyncio.sleep(1.0)
        begun()
        return TargetAnswer(len(request.ids), 10, request.expected_tokens)


def at(*times: float) -> list[TraceLine]:
    return [replace(LINE, at=each) for each in times]


def test_requests_are_sent_at_their_times_answered_or_not() -> None:
    target = Slow()

    run_virtual(TraceReplay(at(0.0, 1.0, 6.0), target, speed=2.0).run())

    assert target.begun == [0.0, 0.5, 3.0]


def test_a_request_has_length_and_sampling_of_its_line() -> None:
    target = Slow()

    run_virtual(TraceReplay(at(0.0, 1.0), target).run())

    first, second = target.requests
    assert (len(first.ids), first.max_tokens, first.ignores_end) == (20, 3, True)
    assert first.model == "m"
    assert first.sampling == Sampling(temperature=0.5, top_k=9, seed=0)
    assert type(first.sampling.top_k) is int
    assert second.sampling.seed == 1


def test_two_replays_share_no_prompt() -> None:
    one, other = Slow(), Slow()
    for target in (one, other):
        run_virtual(TraceReplay(at(0.0), target).run())

    assert one.requests[0].ids[:16] != other.requests[0].ids[:16]


def test_the_figures_are_beside_those_of_the_trace() -> None:
    seen: list[str] = []

    found = run_virtual(TraceReplay(at(0.0, 1.0), Slow(), report=seen.append).run())

    assert found.trace == LoadFigures(
        40, 6, 6 / 1.03, 0.8, Percentiles(10.0, 10.0, 10.0), Percentiles(10.0, 10.0, 10.0)
    )
    assert found.replay == LoadFigures(
        40, 6, 2.0, 0.5, Percentiles(1000.0, 1000.0, 1000.0), Percentiles(500.0, 500.0, 500.0)
    )
    assert seen == ["1 of 2 requests", "2 of 2 requests"]


def test_only_what_both_answered_is_compared() -> None:
    lines = [
        *at(0.0, 1.0),
        replace(LINE, at=2.0, finish_reason="cancelled"),
        replace(LINE, at=3.0, prompt_tokens=0),
    ]

    found = run_virtual(TraceReplay(lines, Slow(frozenset({1}))).run())

    assert (found.requests, found.compared) == (3, 1)
    assert found.errors == {"The queue is full": 1}
    assert found.trace.prompt_tokens == found.replay.prompt_tokens == 20


def test_an_error_of_ours_ends_the_replay() -> None:
    class Broken:
        async def ask(self, request: Request, begun: Callable[[], None]) -> TargetAnswer:
            raise AssertionError(request)

    with pytest.raises(ExceptionGroup):
        run_virtual(TraceReplay(at(0.0), Broken()).run())


def test_a_trace_without_answers_has_no_figures() -> None:
    found = run_virtual(TraceReplay([], Slow()).run())

    assert found.trace == found.replay == LoadFigures(0, 0, 0.0, 0.0, None, None)


def test_percentiles_are_by_nearest_rank() -> None:
    assert Percentiles.of([5.0]) == Percentiles(5.0, 5.0, 5.0)
    assert Percentiles.of(map(float, range(1, 101))) == Percentiles(50.0, 90.0, 99.0)


def test_one_token_has_no_time_per_token() -> None:
    assert Sample(0.0, 30.0, 10.0, 4, 0, 1).token_ms is None
