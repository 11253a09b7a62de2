from dataclasses import replace
from pathlib import Path

import pytest

from meshllm.cli.ring.recorded_load import MAX_REQUESTS, arrivals, load_of, read_load
from meshllm.errors import UserError
from meshllm.scheduler.simulator import Arrival
from meshllm.traces.trace import Finish, TraceLine


def line(at: float, model: str = "builtin", *, tokens: int = 100, **changes: object) -> TraceLine:
    finish: Finish = "stop"
    known = {"cached_tokens": 0, "new_tokens": 20, "finish_reason": finish} | changes
    return TraceLine(
        at,
        model,
        tokens,
        max_tokens=64,
        ttft_ms=1.0,
        total_ms=2.0,
        **known,  # type: ignore[arg-type]
    )


def write(path: Path, lines: list[TraceLine]) -> Path:
    path.write_bytes(b"".join(each.to_json() for each in lines))
    return path


def test_the_load_of_a_model_has_its_rate_lengths_and_cached_share() -> None:
    lines = [
        line(100.0, tokens=50),
        line(104.0, "other", tokens=7),
        line(110.0, tokens=150, cached_tokens=100, new_tokens=40),
    ]

    load = load_of(lines, "builtin")

    assert load is not None
    assert load.rate == pytest.approx(0.2)
    assert load.prompt.values == (50, 150)
    assert load.answer.values == (20, 40)
    assert load.cached == pytest.approx(0.5)
    assert load_of(lines, "absent") is None


def test_many_lengths_are_kept_as_quantiles() -> None:
    load = load_of([line(float(at), tokens=at + 1) for at in range(1001)], "builtin")

    assert load is not None
    assert len(load.prompt.values) == 101
    assert (load.prompt.values[0], load.prompt.values[50], load.prompt.longest) == (1, 501, 1001)


def test_requests_keep_their_times_and_need_prefill_for_their_last_token() -> None:
    lines = [line(7.5, cached_tokens=100), line(8.0, "other"), line(9.5, new_tokens=0)]

    assert arrivals(lines, {"other": 0, "builtin": 1}) == [
        Arrival(0.0, 1, 100, 20, cached=99),
        Arrival(0.5, 0, 100, 20),
        Arrival(2.0, 1, 100, 1),
    ]
    assert len(arrivals(lines, {"other": 0})) == 1


def test_failed_requests_and_those_beyond_the_limit_are_left_out(tmp_path: Path) -> None:
    lines = [line(float(at)) for at in range(MAX_REQUESTS + 1)]
    unread = replace(line(0.0, finish_reason="cancelled"), prompt_tokens=0)
    path = write(tmp_path / "trace.jsonl", [line(0.0, finish_reason="error"), unread, *lines])

    assert read_load(path) == lines[:MAX_REQUESTS]


@pytest.mark.parametrize("times", [[], [1.0], [1.0, 1.0]])
def test_a_trace_without_a_rate_is_refused(tmp_path: Path, times: list[float]) -> None:
    path = write(tmp_path / "trace.jsonl", [line(at) for at in times])

    with pytest.raises(UserError, match="no two requests at different times"):
        read_load(path)
