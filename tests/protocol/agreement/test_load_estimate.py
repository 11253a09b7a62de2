"""When a client is told to ask again for a model that loads."""

import pytest

from meshllm.protocol.agreement.load_estimate import MAX_S, MIN_S, PastModelLoad, retry_s

MINUTE = PastModelLoad(10_000, 60.0)


@pytest.mark.parametrize(
    ("loading_s", "span_bytes", "last", "told_s"),
    [
        (30.0, 10_000, MINUTE, 30),
        (30.0, 20_000, MINUTE, 90),
        (30.2, 10_000, MINUTE, 30),
        (30.0, 10_000, None, 30),
        (90.0, 10_000, MINUTE, 90),
        (30.0, 0, MINUTE, 30),
        (0.0, 0, None, MIN_S),
        (59.9, 10_000, MINUTE, MIN_S),
        (30.0, 1 << 50, MINUTE, MAX_S),
        (1e9, 0, None, MAX_S),
    ],
    ids=[
        "as the last one", "twice as large", "rounded up", "no load is known", "it takes longer",
        "no plan is known", "at once", "soon", "huge", "in vain",
    ],
)  # fmt: skip
def test_a_load_takes_as_long_as_the_last_one_else_the_wait_doubles(
    loading_s: float, span_bytes: int, last: PastModelLoad | None, told_s: int
) -> None:
    assert retry_s(loading_s, loading_s, span_bytes, last) == told_s


def test_the_time_without_a_plan_is_not_subtracted() -> None:
    assert retry_s(300.0, 0.0, 10_000, MINUTE) == 60
    assert retry_s(300.0, 61.0, 10_000, MINUTE) == 300
