"""The best chunk sizes of a prompt, with round numbers."""

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest

from meshllm.errors import UserError
from meshllm.names import SessionId, Span
from meshllm.protocol.kv_cache.admission import MAX_SESSIONS, MIN_SESSIONS
from meshllm.protocol.planning.chunking import (
    ALONE_STALL_S,
    COPY_ROWS,
    DEFAULT_MAX_ROWS,
    MIN_ROWS,
    SIZES,
    STALL_S,
    RankTimes,
    RingTimes,
    default_pace,
    ring_times,
)
from meshllm.protocol.planning.plan import Ends, Links, LinkSpeed, Offer, Plan, PlanStage
from meshllm.protocol.session.blob import seal, session_key
from meshllm.protocol.session.codec import MAX_ROWS, encode
from meshllm.protocol.session.messages import Data, DType, Flags
from meshllm.protocol.session.pace import PrefillPacing
from meshllm.protocol.session.stage import MAX_PENDING
from tests.builders.offers import A, B, apart, model, offer

PAIR = Plan(1, "tiny", Ends.ENTRY, (PlanStage(A, Span(0, 2)), PlanStage(B, Span(2, 4))))
NO_TIME = LinkSpeed(0.0)
STEEP = ((1, 1e-5), (1000, 1e-2))
"""Ten microseconds per row, whatever the number of rows."""
REAL = ((1, 2e-3), (32, 4e-3), (256, 2.9e-2), (1024, 0.17))
FLAT = ((1, 1e-2), (1000, 2e-2))
"""The same time for any number of rows, as if only the weights had to be read."""


def ring(
    *layers: float,
    table: tuple[tuple[int, float], ...] = STEEP,
    wire: LinkSpeed = NO_TIME,
    row_bytes: int = 0,
) -> RingTimes:
    """Make a ring of ranks with this number of layers each."""
    ranks = tuple(RankTimes(Offer(A, 0, table, 0.0), count, wire) for count in layers)
    return RingTimes(ranks, 0.0, row_bytes, header_bytes=0)


def test_attention_time_grows_with_the_rows_before() -> None:
    # Per row: 0.1 ms, and 0.2 us for each of those before it, which are half of 1000 on average.
    table = ((100, 100 * (1e-4 + 2e-7 * 50)), (1000, 1000 * (1e-4 + 2e-7 * 500)))
    rank = RankTimes(Offer(A, 0, table, 0.0), 2.0, LinkSpeed(0.0))

    assert rank.compute_s(100) == pytest.approx(2 * 100 * (1e-4 + 2e-7 * 50))
    assert rank.compute_s(400) == pytest.approx(2 * 400 * (1e-4 + 2e-7 * 200))
    assert rank.compute_s(100, 3000) == pytest.approx(
        2 * (100 * (1e-4 + 2e-7 * 3050) + 2e-7 * COPY_ROWS * 3000)
    )
    assert rank.compute_s(4000) == pytest.approx(2 * 4000 * (1e-4 + 2e-7 * 2000))


@pytest.mark.parametrize("table", [FLAT, ((1, 1e-3),)])
def test_attention_costs_nothing_if_more_rows_are_not_slower(
    table: tuple[tuple[int, float], ...],
) -> None:
    rank = RankTimes(Offer(A, 0, table, 0.0), 1.0, LinkSpeed(0.0))

    assert rank.compute_s(100, 10_000) == rank.compute_s(100)


def test_ranks_work_on_different_chunks_at_once() -> None:
    times = ring(1, 2, wire=LinkSpeed(0.001))

    whole, parts = (times.first_token_s(1000, times.pace(chunk)) for chunk in (1000, 250))

    # The second rank takes 20 us for each row and bounds the ring; the first one begins.
    assert whole == pytest.approx(0.010 + 0.001 + 0.020 + 0.001)
    assert parts == pytest.approx(0.0025 + 0.001 + 0.020 + 0.001)


def test_the_rest_of_a_prompt_is_a_short_chunk() -> None:
    times = ring(1)

    seconds = [times.first_token_s(1000, times.pace(chunk)) for chunk in (300, 1000)]

    assert seconds == pytest.approx([0.010, 0.010])


def test_a_link_carries_one_chunk_after_the_other() -> None:
    # 1 ms for a chunk of 100 rows on a rank, 10 ms on the link to the second one.
    times = ring(1, 1, wire=LinkSpeed(0.0, 1e6), row_bytes=100)

    seconds = times.first_token_s(400, times.pace(100))

    assert seconds == pytest.approx(0.001 + 4 * 0.010 + 0.001 + 0.0001)


@pytest.mark.parametrize(
    ("times", "sessions"),
    [
        (ring(1, table=STEEP), MIN_SESSIONS),  # a row more takes as long as the first
        (ring(1, table=FLAT), 16),  # 32 are two steps
        (ring(1, table=((1, 0.010), (8, 0.011), (16, 0.018), (32, 0.019))), 12),
        (ring(1, 1, table=STEEP), MIN_SESSIONS),
        (ring(1, 1, table=STEEP, wire=LinkSpeed(0.05)), MAX_SESSIONS),  # many are on their way
        (ring(1, 1, table=FLAT, wire=LinkSpeed(0.0, 1e3), row_bytes=1000), MIN_SESSIONS),
        (ring(1, 1, table=FLAT), MAX_SESSIONS),  # two steps at a time
    ],
)
def test_a_ring_runs_as_many_sessions_as_make_it_faster(times: RingTimes, sessions: int) -> None:
    assert times.best_sessions == sessions


def test_a_slow_head_keeps_the_first_rank_busy() -> None:
    times = ring(1, 1, table=STEEP, wire=LinkSpeed(0.05))

    assert replace(times, head_s=0.5).best_sessions == MIN_SESSIONS


def test_message_sizes_match_the_codec() -> None:
    session = SessionId(b"s" * 16)
    blob = seal(session_key(session), DType.BFLOAT16, (1, 1, 4), bytes(8))
    parts = encode(Data(session, 1, 0, 9, 1, Flags.NEED_ROW, blob))

    times = ring_times(PAIR, [offer(A, 4), offer(B, 4)], Links(), model(4))

    assert times.message_bytes(1) == sum(map(len, parts))


def test_more_chunks_are_in_flight_on_links_with_latency() -> None:
    # A chunk of 100 rows takes 1 ms on each of 3 ranks; a link takes 0, 1 or 100 ms.
    paces = [ring(1, 1, 1, wire=LinkSpeed(way_s)).pace(100) for way_s in (0.0, 0.001, 0.1)]

    assert [pace.window for pace in paces] == [3, 6, MAX_PENDING]
    assert ring(1).pace(100).window == 1


def test_the_window_keeps_the_ranks_busy() -> None:
    times = ring(1, 1, wire=LinkSpeed(0.003))

    # 8 ms until a chunk of 1 ms is back: with two in flight it would be 8 ms for two of them.
    assert times.pace(100).window == 8
    busy = times.first_token_s(3200, times.pace(100))
    assert busy == pytest.approx(0.032 + 0.001 + 2 * 0.003)
    assert times.first_token_s(3200, PrefillPacing(chunk=100, window=2)) > 0.120


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("layers", [(4.0,), (2.0, 2.0), (1.0, 2.0, 1.0), (20.0, 30.0)])
@pytest.mark.parametrize("table", [STEEP, FLAT, REAL])
def test_the_longest_chunk_that_is_nearly_best_is_chosen(
    table: tuple[tuple[int, float], ...], layers: tuple[float, ...], others: int
) -> None:
    times, limit_s = (
        ring(*layers, table=table, wire=LinkSpeed(0.001)),
        STALL_S if others else ALONE_STALL_S,
    )
    for prompt in (10, 64, 100, 500, 2000):
        sizes = {*(size for size in SIZES if size < prompt), prompt}
        seconds = {
            size: times.first_token_s(prompt, times.pace(size))
            for size in sizes
            if size <= MIN_ROWS
            or max(rank.compute_s(size, (prompt - size) // 2) for rank in times.ranks) <= limit_s
        }

        chosen = times.best_pace(prompt, others)

        assert chosen == times.pace(chosen.chunk)
        near = 1.03 * min(seconds.values())
        assert chosen.chunk == max(size for size in seconds if seconds[size] <= near)


def test_a_single_node_takes_a_prompt_whole() -> None:
    assert ring(1).best_pace(3000) == PrefillPacing(chunk=3000, window=1)


def test_equal_ranks_share_a_prompt() -> None:
    times = ring(1, 1)

    pace = times.best_pace(2000)

    assert pace.chunk < 200
    assert times.first_token_s(2000, pace) < 0.55 * times.first_token_s(2000, times.pace(2000))


def test_chunks_gain_nothing_if_reading_weights_dominates() -> None:
    assert ring(1, 1, table=FLAT).best_pace(500).chunk == 500


def test_a_chunk_stalls_other_sessions_for_a_second_and_new_ones_for_four() -> None:
    times = ring(200)  # 2 ms for each row

    assert 384 < STALL_S / 2e-3 < 512
    assert 1536 < ALONE_STALL_S / 2e-3 < 2048
    assert [times.best_pace(2500, others).chunk for others in (0, 1, 5)] == [1536, 384, 384]
    assert ring(1e6).best_pace(2000).chunk == MIN_ROWS


def test_chunks_of_a_longer_prompt_are_shorter_next_to_other_sessions() -> None:
    # Per row: 1 ms, and 1 us for each of those before it.
    table = ((100, 100 * (1e-3 + 1e-6 * 50)), (1000, 1000 * (1e-3 + 1e-6 * 500)))

    paces = [ring(1, table=table).best_pace(prompt, 1) for prompt in (600, 4000, 10_000)]

    assert [pace.chunk for pace in paces] == [600, 256, 128]


def test_only_the_beginning_of_a_very_long_prompt_is_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []

    def first_token_s(_: RingTimes, prompt: int, __: PrefillPacing) -> float:
        tried.append(prompt)
        return 1.0

    monkeypatch.setattr(RingTimes, "first_token_s", first_token_s)

    pace = ring(1, 1).best_pace(10**6)

    assert (pace.chunk, set(tried)) == (MAX_ROWS, {8192})


def test_chunks_respect_the_row_limit() -> None:
    assert ring(1e-3).best_pace(10**6).chunk == MAX_ROWS
    assert ring(1e-3).best_pace(10**6, most=1000).chunk == 1000
    assert ring(1).best_pace(40, most=30).chunk == 30


def test_layers_and_wires_follow_the_plan() -> None:
    offers = [offer(B, 4, ms=3), offer(A, 4, ms=2, head_ms=5)]
    shape = model(sizes=(80, 80, 80, 160))

    times = ring_times(PAIR, offers, apart({(A, B): 7}, others=1), shape)

    assert [rank.layers for rank in times.ranks] == pytest.approx([1.6, 2.4])
    assert [rank.offer.node for rank in times.ranks] == [A, B]
    assert [rank.speed.latency_s for rank in times.ranks] == [0.007, 0.007]
    assert (times.head_s, times.row_bytes) == (0.005, 8)


def test_a_single_node_has_no_hop() -> None:
    plan = Plan(1, "tiny", Ends.ENTRY, (PlanStage(A, Span(0, 4)),))

    times = ring_times(plan, [offer(A, 4)], apart({}, others=10), model(4))

    assert (times.wire_s(0, 100), times.ranks[0].speed.bytes_per_s) == (0.0, inf)


def test_a_plan_with_a_missing_offer_is_refused() -> None:
    with pytest.raises(UserError, match="`mjrgeyt` is in the plan but made no offer"):
        ring_times(PAIR, [offer(A, 4)], Links(), model(4))


def test_step_time_depends_on_the_rows() -> None:
    times = ring_times(PAIR, [offer(A, 4, ms=2, head_ms=5), offer(B, 4, ms=2)], Links(), model(4))

    assert times.step_s(1) == pytest.approx(0.005 + 4 * 0.002)
    assert times.step_s(256) == pytest.approx(10 * (0.005 + 4 * 0.002))


def test_without_times_more_ranks_get_shorter_chunks() -> None:
    chunks = [[default_pace(prompt, n).chunk for n in (1, 2, 3, 8)] for prompt in (40, 500, 2000)]

    assert chunks == [[40, 40, 40, 40], [256, 128, 128, 64], [256, 256, 256, 128]]
    assert [default_pace(2000, n).window for n in (1, 3, 64)] == [1, 3, MAX_PENDING]
    assert default_pace(10**6, 2).chunk == DEFAULT_MAX_ROWS
    assert default_pace(2000, 2, most=100).chunk == 100


def test_longer_prompts_never_get_shorter_chunks_without_times() -> None:
    chunks = [default_pace(prompt, 3).chunk for prompt in range(1, 5000)]

    assert all(a <= b for a, b in pairwise(chunks))


def test_a_chunk_in_the_middle_of_a_very_long_prompt_stalls_for_no_longer() -> None:
    times = ring(1, table=REAL)
    (rank,) = times.ranks

    assert times.best_pace(32_000, others=1).chunk == 384
    assert rank.compute_s(384, 16_000) < STALL_S < rank.compute_s(512, 16_000)
