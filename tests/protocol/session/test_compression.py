"""When activations are sent as int8 or packed, and that a session never changes."""

from dataclasses import dataclass

import pytest

from meshllm.names import SessionId, WireMode
from meshllm.protocol.session.compression import MAX_CHOSEN, PACKED, SHARE, Compression

MBIT = 1e6 / 8
ROW = 2048  # bytes of 1024 bfloat16 values
CHUNK = 256 * ROW


@dataclass
class Known:
    """Measurements of a link."""

    round_trip_us: int = 20_000
    bytes_per_s: float | None = 10 * MBIT


class Rank:
    """A rank with a link to the next one."""

    def __init__(self, mode: WireMode, way: Known | None) -> None:
        self.way = way
        self.compression = Compression(mode)

    @property
    def rate(self) -> float | None:
        return self.way.bytes_per_s if self.way else None

    def note(self, compute_us: int, size: int, *, is_step: bool) -> None:
        self.compression.note(compute_us, size, self.rate, is_step=is_step)

    def is_int8(self, session: SessionId) -> bool:
        round_trip_us = self.way.round_trip_us if self.way else 0
        return self.compression.is_int8(session, round_trip_us, self.rate)


def session(number: int) -> SessionId:
    return SessionId(number.to_bytes(16, "big"))


def chooses_int8(rank: Rank, number: int = 0) -> bool:
    return rank.is_int8(session(number))


def worked(way: Known | None, *, step_s: float = 0.0, chunk_s: float = 0.0) -> Rank:
    """Return a rank after a few jobs that took this long; 0 means none."""
    rank = Rank(WireMode.AUTO, way)
    for _ in range(3):
        if step_s:
            rank.note(round(step_s * 1e6), ROW, is_step=True)
        if chunk_s:
            rank.note(round(chunk_s * 1e6), CHUNK, is_step=False)
    return rank


@pytest.mark.parametrize(
    ("mode", "is_int8"), [(WireMode.EXACT, False), (WireMode.PLAIN, False), (WireMode.INT8, True)]
)
def test_an_explicit_mode_needs_no_measurement(mode: WireMode, is_int8: bool) -> None:
    assert chooses_int8(Rank(mode, None)) is is_int8


@pytest.mark.parametrize(
    ("round_trip_s", "mbit", "step_s", "is_int8"),
    [
        (0.020, 10, 0.005, False),  # 1.6 ms of 16.6
        (0.001, 10, 0.005, True),  # 1.6 ms of 7.1
        (0.001, 10, 0.007, False),  # 1.6 ms of 9.1
        (0.020, 1, 0.020, True),  # 16 ms of 46
        (0.020, 100, 0.001, False),
    ],
)
def test_int8_is_chosen_if_bytes_take_a_fifth_of_a_hop(
    round_trip_s: float, mbit: float, step_s: float, is_int8: bool
) -> None:
    way = Known(round(round_trip_s * 1e6), mbit * MBIT)

    assert chooses_int8(worked(way, step_s=step_s)) is is_int8


@pytest.mark.parametrize(
    ("mbit", "chunk_s", "is_int8"),
    [(10, 0.5, True), (10, 2.0, False), (100, 0.5, False), (100, 0.1, True), (1000, 0.1, False)],
)
def test_prefill_chunks_can_decide_for_int8(mbit: float, chunk_s: float, is_int8: bool) -> None:
    rank = worked(Known(bytes_per_s=mbit * MBIT), step_s=0.05, chunk_s=chunk_s)

    assert chooses_int8(rank) is is_int8


def test_the_threshold_is_the_documented_share() -> None:
    bytes_s = ROW / (10 * MBIT)
    hop_s = bytes_s / SHARE

    assert chooses_int8(worked(Known(2, 10 * MBIT), step_s=hop_s - bytes_s - 2e-5))
    assert not chooses_int8(worked(Known(2, 10 * MBIT), step_s=hop_s - bytes_s + 2e-5))


@pytest.mark.parametrize(
    "way", [None, Known(round_trip_us=0), Known(bytes_per_s=None), Known(bytes_per_s=float("inf"))]
)
def test_rows_are_exact_if_the_link_is_unmeasured(way: Known | None) -> None:
    assert not chooses_int8(worked(way, step_s=0.001, chunk_s=0.1))


def test_the_rate_known_during_prefill_is_remembered() -> None:
    way = Known(bytes_per_s=None)
    rank = Rank(WireMode.AUTO, way)
    rank.note(100_000, CHUNK, is_step=False)
    way.bytes_per_s = 10 * MBIT
    rank.note(100_000, CHUNK, is_step=False)
    way.bytes_per_s = None

    assert chooses_int8(rank)


def test_the_first_session_is_exact_and_later_ones_may_be_int8() -> None:
    way = Known()
    rank = Rank(WireMode.AUTO, way)

    first = chooses_int8(rank, 1)
    rank.note(100_000, CHUNK, is_step=False)

    assert (first, chooses_int8(rank, 2)) == (False, True)


def test_the_choice_for_a_session_never_changes() -> None:
    way = Known()
    rank = worked(way, chunk_s=0.1)
    slow = rank.is_int8(session(1))
    way.bytes_per_s = 1000 * MBIT
    fast = rank.is_int8(session(2))

    again = [rank.is_int8(session(number)) for number in (1, 2)]

    assert (slow, fast) == (True, False)
    assert again == [True, False]


def test_old_sessions_are_forgotten() -> None:
    way = Known()
    rank = worked(way, chunk_s=0.1)
    for number in range(MAX_CHOSEN + 1):
        rank.is_int8(session(number))
    way.bytes_per_s = 1000 * MBIT

    assert chooses_int8(rank, 1)
    assert not chooses_int8(rank, 0)


def test_older_jobs_decay() -> None:
    rank = worked(Known(), chunk_s=2.0)
    for _ in range(20):
        rank.note(500_000, CHUNK, is_step=False)

    assert chooses_int8(rank)


def test_auto_accounts_for_packing() -> None:
    bytes_s = CHUNK / (10 * MBIT)
    plain_s, packed_s = (part * bytes_s * (1 / SHARE - 1) for part in (1, PACKED))

    assert not chooses_int8(worked(Known(2), chunk_s=(plain_s + packed_s) / 2))
    assert chooses_int8(worked(Known(2), chunk_s=packed_s * 0.99))


@pytest.mark.parametrize(
    ("mode", "rate", "is_packed"),
    [
        (WireMode.EXACT, 10 * MBIT, True),
        (WireMode.EXACT, 10_000 * MBIT, False),
        (WireMode.EXACT, None, False),
        (WireMode.PLAIN, 10 * MBIT, False),
    ],
)
def test_exact_rows_are_compressed_on_links_that_are_known_to_be_slow(
    mode: WireMode, rate: float | None, is_packed: bool
) -> None:
    compression = Compression(mode)

    compression.note(1000, CHUNK, rate, is_step=False)

    assert compression.packs(CHUNK) is is_packed


def test_a_decode_step_does_not_change_the_known_rate() -> None:
    compression = Compression(WireMode.EXACT)

    compression.note(1000, CHUNK, 10 * MBIT, is_step=False)
    compression.note(1000, ROW, 10_000 * MBIT, is_step=True)

    assert compression.packs(CHUNK)
