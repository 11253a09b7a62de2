import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshllm.errors import UserError
from meshllm.request import Sampling
from meshllm.traces.trace import TraceLine, read_trace, rotation, sampling_of

LINE = TraceLine(
    at=1_795_003_200.25,
    model="builtin",
    prompt_tokens=40,
    cached_tokens=16,
    new_tokens=3,
    max_tokens=8,
    ttft_ms=12.5,
    total_ms=20.0,
    finish_reason="stop",
    sampling={"temperature": 1.0, "top_k": 9},
    buckets="00000000000000aa 00000000000000bb",
)


def test_a_trace_is_read_in_the_order_of_its_times(tmp_path: Path) -> None:
    later = replace(LINE, at=LINE.at + 1, ttft_ms=None, buckets=None, finish_reason="error")
    path = tmp_path / "trace"
    path.write_bytes(rotation(1.0) + later.to_json() + LINE.to_json())

    assert read_trace(path) == [LINE, later]
    assert (LINE.ids, later.ids) == (["00000000000000aa", "00000000000000bb"], [])


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(json.dumps({**json.loads(LINE.to_json()), "tier": "gold"}), "utf-8")

    assert read_trace(path) == [LINE]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "Invalid JSON"),
        (b"[]", "not an object"),
        (b'{"at": 1}', "missing"),
        (replace(LINE, prompt_tokens=28).to_json(), "2 ids, more than the tokens"),
        (replace(LINE, new_tokens=-1).to_json(), "`new_tokens` is not between"),
        (replace(LINE, prompt_tokens=1 << 40).to_json(), "`prompt_tokens` is not between"),
    ],
)
def test_an_invalid_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(LINE.to_json() + line)

    with pytest.raises(UserError, match=f"Invalid line 2 of the trace .*{message}"):
        read_trace(path)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Cannot read the trace .*/trace`: no such file"):
        read_trace(tmp_path / "trace")


def test_a_seed_is_not_recorded() -> None:
    assert sampling_of(Sampling(temperature=0.5, seed=7)) == {"temperature": 0.5}
