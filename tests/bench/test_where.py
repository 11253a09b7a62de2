from dataclasses import astuple

import pytest

from meshllm.names import Span
from meshllm.request import Answer, FinishReason, HopReport
from tests.bench.where import Row, hashing_ms, lay_out, sealing_ms, split


def _answer(ranks: int) -> Answer:
    wire_ms = 1.0 if ranks > 1 else 0.0
    hops = [
        HopReport(rank, "node", Span(rank, rank + 1), 10.0, 0.5, 0.25, wire_ms, 2048.0)
        for rank in range(ranks)
    ]
    return Answer("", (1, 2), 3, FinishReason.LENGTH, 9.0, 13.0 * ranks, 1.0, 1.0, tuple(hops))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_parts_sum_up_to_the_token(ranks: int) -> None:
    row = split(_answer(ranks), 0.01, 0.02, 0.1)

    assert sum(astuple(row.parts)) == pytest.approx(row.ms_per_token)
    assert row.hop_ms == 3.0


def test_parts_measured_apart_are_subtracted_from_their_whole() -> None:
    parts = split(_answer(2), hashing_ms=0.01, sealing_ms=0.02, waking_ms=0.1).parts

    assert astuple(parts) == pytest.approx((20.0, 0.98, 0.5, 0.02, 0.04, 0.2, 1.86, 2.4))


def test_a_ring_of_one_sends_nothing() -> None:
    parts = split(_answer(1), hashing_ms=0.01, sealing_ms=0.02, waking_ms=0.1).parts

    assert (parts.hash, parts.encrypt, parts.wire) == (0.0, 0.0, 0.0)
    assert parts.wake == 0.1


def test_parts_measured_apart_take_time() -> None:
    assert hashing_ms(2048) > 0
    assert sealing_ms(2048) > 0


def test_every_part_has_a_line() -> None:
    rows: list[Row] = [split(_answer(ranks), 0.01, 0.02, 0.1) for ranks in (1, 2)]

    lines = [line.split() for line in lay_out(rows).splitlines()]

    assert lines[1] == ["compute", "in", "place", "10.000", "20.000"]
    assert lines[5] == ["encrypt", "apart", "0.000", "0.040"]
    assert lines[-2] == ["ms", "per", "token", "13.000", "26.000"]
