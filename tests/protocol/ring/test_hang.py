"""How long jobs may take before their node counts as hung."""

import pytest

from meshllm.names import NodeId
from meshllm.protocol.planning.chunking import RankTimes, RingTimes
from meshllm.protocol.planning.plan import LinkSpeed, Offer
from meshllm.protocol.ring.hang import (
    FIRST_S,
    FIRST_STEPS,
    HANG_S,
    MAX_SLOW,
    TELLING_S,
    TIMES,
    HangLimits,
    result_limit_s,
)

LAYERS, STEP_S, CHUNK_S, CHUNK = 4.0, 0.5, 8.0, 256
HEAD_S = 0.25


@pytest.fixture
def limits() -> HangLimits:
    """Limits of a rank that has run steps of one row, and a chunk."""
    table = ((1, STEP_S / LAYERS), (CHUNK // 2, 0.4 * CHUNK_S / LAYERS), (CHUNK, CHUNK_S / LAYERS))
    limits = HangLimits()
    limits.plan(RankTimes(Offer(NodeId(b"a"), 0, table, 0.0), LAYERS, LinkSpeed(0.0)), HEAD_S)
    for _ in range(FIRST_STEPS):
        limits.begin(1, 0, is_step=True)
    limits.begin(CHUNK, 0, is_step=False)
    return limits


def test_the_limit_is_a_multiple_of_the_planned_time(limits: HangLimits) -> None:
    assert limits.begin(1, 0, is_step=True) == max(HANG_S, TIMES * (STEP_S + HEAD_S))
    assert limits.begin(CHUNK, 0, is_step=False) == TIMES * CHUNK_S
    assert limits.begin(CHUNK, 4096, is_step=False) > TIMES * CHUNK_S


def test_a_result_may_wait_for_as_many_slow_jobs_as_are_ahead_of_it() -> None:
    ranks = [
        RankTimes(Offer(NodeId(b"a"), 0, ((1, step_s),), 0.0), LAYERS, LinkSpeed(0.0))
        for step_s in (1e-6, STEP_S)
    ]
    limits = [result_limit_s(RingTimes((ranks[0], rank), 0.0, 8), 1, 0, 6) for rank in ranks]

    assert limits == [FIRST_S + HANG_S, FIRST_S + 6 * TIMES * MAX_SLOW * LAYERS * STEP_S]


def test_no_job_has_less_than_the_time_of_a_silent_node(limits: HangLimits) -> None:
    limits.plan(RankTimes(Offer(NodeId(b"a"), 0, ((1, 1e-6),), 0.0), 1.0, LinkSpeed(0.0)))

    assert limits.begin(1, 0, is_step=True) == HANG_S


def test_the_first_jobs_of_a_kind_may_take_longer(limits: HangLimits) -> None:
    first = [limits.begin(5, 0, is_step=True) >= FIRST_S for _ in range(FIRST_STEPS + 1)]

    assert first == [True] * FIRST_STEPS + [False]
    limits = HangLimits()
    limits.plan(RankTimes(Offer(NodeId(b"a"), 0, ((1, 1e-6),), 0.0), 1.0, LinkSpeed(0.0)))
    chunks = [limits.begin(CHUNK, 0, is_step=False) for _ in range(2)]
    assert chunks == [FIRST_S + HANG_S, HANG_S]
    assert HangLimits().begin(1, 0, is_step=True) == FIRST_S


def test_without_times_every_job_may_take_longer() -> None:
    limits = HangLimits()
    for _ in range(2 * FIRST_STEPS):
        assert limits.begin(1, 0, is_step=True) == FIRST_S
        limits.ended(1, 0, 50.0, is_step=True)


def test_the_limit_rises_on_a_machine_that_is_slower_than_planned(limits: HangLimits) -> None:
    limits.ended(CHUNK, 0, 3 * CHUNK_S, is_step=False)
    limits.ended(CHUNK, 0, CHUNK_S, is_step=False)

    assert limits.begin(CHUNK, 0, is_step=False) == 3 * TIMES * CHUNK_S


def test_a_hang_does_not_raise_it_beyond_measure(limits: HangLimits) -> None:
    limits.ended(1, 0, 3600.0, is_step=True)

    assert limits.begin(CHUNK, 0, is_step=False) == MAX_SLOW * TIMES * CHUNK_S


def test_a_rank_without_layers_that_takes_long_does_not_count_as_slow(limits: HangLimits) -> None:
    limits.plan(RankTimes(Offer(NodeId(b"a"), 0, ((1, STEP_S),), 0.0), 0.0, LinkSpeed(0.0)))

    limits.ended(CHUNK, 0, 2 * TELLING_S, is_step=False)

    assert limits.begin(CHUNK, 0, is_step=False) == HANG_S


def test_short_jobs_say_nothing(limits: HangLimits) -> None:
    limits.ended(1, 0, TELLING_S - 0.1, is_step=True)
    assert limits.begin(CHUNK, 0, is_step=False) == TIMES * CHUNK_S

    limits.ended(1, 0, TELLING_S, is_step=True)
    slowness = TELLING_S / (STEP_S + HEAD_S)
    assert limits.begin(CHUNK, 0, is_step=False) == pytest.approx(slowness * TIMES * CHUNK_S)
