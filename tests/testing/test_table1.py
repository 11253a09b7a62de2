import pytest

from meshllm.errors import UserError
from meshllm.testing.table1 import TRANSFORMERS, Case, Run, measure, table


def test_every_contestant_gets_a_row() -> None:
    told: list[str] = []

    rows = measure(Case("tiny", (1, 2), 8, 4, rounds=2, threads=1), told.append)

    assert [row.name for row in rows] == [TRANSFORMERS, "ring of 1", "ring of 2"]
    assert all(row.ttft_ms > 0 and row.ms_per_token > 0 for row in rows)
    assert told[2:] == ["warming up", "round 1 of 2", "round 2 of 2"]


@pytest.mark.socket
def test_a_ring_of_processes_is_measured_beside_transformers() -> None:
    case = Case("tiny", (2,), 16, 4, rounds=1, threads=1, processes=True)

    plain, ring = measure(case, lambda _: None)

    assert (plain.name, ring.name) == (TRANSFORMERS, "ring of 2")
    assert ring.ms_per_token > 0
    assert (plain.hop_ms, ring.hop_ms > 0) == (0.0, True)


def test_ratios_are_medians_of_pairs() -> None:
    plain = [Run(10, 100), Run(10, 200), Run(10, 100)]
    mine = [Run(20, 50), Run(20, 100), Run(20, 100)]

    first, one = table({TRANSFORMERS: plain, "ring of 1": mine})

    assert (first.decode_ratio, first.decode_ratio_one, first.ttft_ratio) == (1.0, 0.5, 1.0)
    assert (one.decode_ratio, one.decode_ratio_one, one.ttft_ratio) == (2.0, 1.0, 2.0)
    assert (one.ttft_ms, one.ms_per_token, one.tokens_per_second) == (20, 100, 10)


def test_unknown_dimensions_are_refused() -> None:
    with pytest.raises(UserError, match="no dimensions for `gpt-9`"):
        measure(Case("gpt-9", (1,), 8, 4, rounds=1, threads=1), lambda _: None)
