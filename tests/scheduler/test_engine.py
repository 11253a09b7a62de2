import pytest

from meshllm.protocol.planning.plan import LinkSpeed
from meshllm.scheduler.engine import Period
from tests.builders.replicas import STEP_S, engine


@pytest.mark.parametrize("slope", [0.0, 1e-6])
def test_steps_and_seconds_are_inverse(slope: float) -> None:
    period = Period(0.01, slope)

    seconds = period.seconds(70, cached=900, sessions=3)

    assert period.steps(seconds, cached=900, sessions=3) == pytest.approx(70)
    one_by_one = sum(0.01 + slope * (900 + 3 * step) for step in range(70))
    assert seconds == pytest.approx(one_by_one, rel=0.01)


def test_sessions_share_the_weights_that_one_engine_reads() -> None:
    assert engine().decode(1, 0).base == pytest.approx(STEP_S)
    assert engine().decode(5, 0).base == pytest.approx(STEP_S * 1.04)


def test_cached_tokens_take_time() -> None:
    period = engine(cached_s=1e-6).decode(2, 1000)

    assert period.seconds(1, 1000, 2) == pytest.approx(STEP_S * 1.01 + 1001e-6)


def test_one_session_waits_for_every_rank_and_wire() -> None:
    period = engine(4, LinkSpeed(0.020)).decode(1, 0)

    assert period.base == pytest.approx(STEP_S + 4 * 0.020)


def test_sessions_fill_a_ring_until_its_ranks_are_busy() -> None:
    ring = engine(4, LinkSpeed(0.020))

    few, many = ring.decode(4, 0).base, ring.decode(128, 0).base

    assert few == pytest.approx(STEP_S + 4 * 0.020)  # one in each place, none waits
    assert many < 1.6 * few  # 32 times as many tokens


def test_sessions_on_fast_wires_wait_for_each_other() -> None:
    ring = engine(4)

    assert ring.decode(4, 0).base == pytest.approx(STEP_S)
    assert ring.decode(8, 0).base == pytest.approx(STEP_S * 1.01)  # 4 batches of 2


def test_ranks_on_one_machine_slow_each_other_down_while_they_compute_at_once() -> None:
    alone, shared = engine(2), engine(2, contention=1.5)

    assert shared.decode(1, 0) == alone.decode(1, 0)
    assert alone.decode(2, 0).base == pytest.approx(STEP_S)
    assert shared.decode(2, 0).base == pytest.approx(1.5 * STEP_S)
    assert engine(contention=1.5).decode(8, 0) == engine().decode(8, 0)


def test_ranks_that_wait_for_links_slow_each_other_down_by_the_time_that_they_compute() -> None:
    wire = LinkSpeed(STEP_S / 2)  # two ranks are busy for a quarter of a trip each

    assert engine(2, wire).decode(2, 0).base == pytest.approx(2 * STEP_S)
    shared = engine(2, wire, contention=1.6).decode(2, 0).base
    assert shared == pytest.approx(2 * STEP_S + STEP_S * 0.6 / 3)


def test_a_narrow_link_bounds_the_sessions() -> None:
    narrow = engine(2, LinkSpeed(0.0, bytes_per_s=1000.0))  # a row of 8 bytes takes 8 ms

    assert narrow.decode(64, 0).base == pytest.approx(64 * 0.008)


def test_a_narrow_link_has_the_rows_of_steps_and_chunks_to_carry() -> None:
    narrow = engine(2, LinkSpeed(0.0, bytes_per_s=1000.0), cached_s=1e-6)

    period, rate = narrow.mixed(64, 1000, narrow.prefill(64))

    assert period == pytest.approx((2 * 64 * 0.008, 0.0))  # however many tokens are cached
    assert rate == pytest.approx(1 / period.base)


def test_a_prompt_pays_for_each_chunk_on_the_slowest_rank_and_drains_through_the_others() -> None:
    chunk_s = STEP_S * (1 + 63 / 100)
    one, four = engine().prefill(256), engine(4, LinkSpeed(0.020)).prefill(256)

    assert (one.chunks, four.chunks) == (4, 4)
    assert one.interval_s == pytest.approx(chunk_s)
    assert one.drain_s == 0
    assert four.interval_s == pytest.approx(chunk_s / 4)
    assert four.drain_s == pytest.approx(chunk_s * 3 / 4 + 4 * 0.020)


def test_a_step_waits_for_a_chunk_and_a_chunk_for_a_step() -> None:
    alone = engine()
    prefill = alone.prefill(64)

    period, rate = alone.mixed(1, 0, prefill)

    assert period.base == pytest.approx(STEP_S + prefill.interval_s)
    assert rate == pytest.approx(1 / period.base)


def test_an_engine_that_merges_them_reads_the_weights_once() -> None:
    merging = engine(merging=True)

    period, rate = merging.mixed(10, 0, merging.prefill(64))

    assert period.base == pytest.approx(STEP_S * (1 + 73 / 100), rel=0.01)
    assert rate == pytest.approx(1 / period.base)


def test_a_longer_cache_slows_an_engine_that_merges() -> None:
    merging = engine(merging=True, cached_s=1e-6)

    period, rate = merging.mixed(10, 1000, merging.prefill(64))

    assert period.slope > 0
    assert 1 / rate == pytest.approx(period.base + 1000 * period.slope)


def test_chunks_get_what_steps_leave_of_a_ring() -> None:
    ring = engine(4, LinkSpeed(0.020))
    prefill = ring.prefill(640)

    _, few = ring.mixed(1, 0, prefill)
    _, many = ring.mixed(8, 0, prefill)

    assert many < few < 1 / prefill.interval_s
    assert few > 0.9 / prefill.interval_s
