"""How rows leave: what `auto` is told, and that a session never changes."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from meshllm.names import SessionId, WireMode
from meshllm.node.outgoing import MAX_CHOSEN, PACKED, SHARE, Outgoing, settle
from meshllm.protocol.messages import DType
from meshllm.testing.models import tiny_model

MBIT = 1e6 / 8
ROW = 2048  # bytes of 1024 bfloat16 values
CHUNK = 256 * ROW


@dataclass
class Known:
    """What is known of a link."""

    round_trip_us: int = 20_000
    bytes_per_s: float | None = 10 * MBIT


def session(number: int) -> SessionId:
    return SessionId(number.to_bytes(16, "big"))


def chooses_int8(outgoing: Outgoing, number: int = 0) -> bool:
    return outgoing.lane(session(number)).is_int8


def worked(way: Known | None, *, step_s: float = 0.0, chunk_s: float = 0.0) -> Outgoing:
    """Return a rank behind a few jobs that took so long; 0 is no such job."""
    outgoing = Outgoing(WireMode.AUTO, way)
    for _ in range(3):
        if step_s:
            outgoing.note(round(step_s * 1e6), ROW, is_step=True)
        if chunk_s:
            outgoing.note(round(chunk_s * 1e6), CHUNK, is_step=False)
    return outgoing


@pytest.mark.parametrize(
    ("mode", "is_int8"), [(WireMode.EXACT, False), (WireMode.PLAIN, False), (WireMode.INT8, True)]
)
def test_what_was_asked_for_needs_no_knowledge(mode: WireMode, is_int8: bool) -> None:
    assert chooses_int8(Outgoing(mode, None)) is is_int8


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
def test_a_step_is_rounded_where_bytes_take_a_fifth_of_its_hop(
    round_trip_s: float, mbit: float, step_s: float, is_int8: bool
) -> None:
    way = Known(round(round_trip_s * 1e6), mbit * MBIT)

    assert chooses_int8(worked(way, step_s=step_s)) is is_int8


@pytest.mark.parametrize(
    ("mbit", "chunk_s", "is_int8"),
    [(10, 0.5, True), (10, 2.0, False), (100, 0.5, False), (100, 0.1, True), (1000, 0.1, False)],
)
def test_many_rows_that_share_a_way_are_asked_too(
    mbit: float, chunk_s: float, is_int8: bool
) -> None:
    outgoing = worked(Known(bytes_per_s=mbit * MBIT), step_s=0.05, chunk_s=chunk_s)

    assert chooses_int8(outgoing) is is_int8


def test_the_share_is_the_one_that_is_written_down() -> None:
    bytes_s = ROW / (10 * MBIT)
    hop_s = bytes_s / SHARE

    assert chooses_int8(worked(Known(2, 10 * MBIT), step_s=hop_s - bytes_s - 2e-5))
    assert not chooses_int8(worked(Known(2, 10 * MBIT), step_s=hop_s - bytes_s + 2e-5))


@pytest.mark.parametrize(
    "way", [None, Known(round_trip_us=0), Known(bytes_per_s=None), Known(bytes_per_s=float("inf"))]
)
def test_rows_are_exact_where_the_link_is_not_known(way: Known | None) -> None:
    assert not chooses_int8(worked(way, step_s=0.001, chunk_s=0.1))


def test_a_rate_that_was_known_while_rows_were_many_is_remembered() -> None:
    way = Known(bytes_per_s=None)
    outgoing = Outgoing(WireMode.AUTO, way)
    outgoing.note(100_000, CHUNK, is_step=False)
    way.bytes_per_s = 10 * MBIT
    outgoing.note(100_000, CHUNK, is_step=False)
    way.bytes_per_s = None

    assert chooses_int8(outgoing)


def test_the_first_session_is_exact_and_a_later_one_need_not_be() -> None:
    way = Known()
    outgoing = Outgoing(WireMode.AUTO, way)

    first = chooses_int8(outgoing, 1)
    outgoing.note(100_000, CHUNK, is_step=False)

    assert (first, chooses_int8(outgoing, 2)) == (False, True)


def test_a_session_travels_to_its_end_as_it_began() -> None:
    way = Known()
    outgoing = worked(way, chunk_s=0.1)
    slow = outgoing.lane(session(1)).is_int8
    way.bytes_per_s = 1000 * MBIT
    fast = outgoing.lane(session(2)).is_int8

    again = [outgoing.lane(session(number)).is_int8 for number in (1, 2)]

    assert (slow, fast) == (True, False)
    assert again == [True, False]


def test_old_sessions_are_forgotten() -> None:
    way = Known()
    outgoing = worked(way, chunk_s=0.1)
    for number in range(MAX_CHOSEN + 1):
        outgoing.lane(session(number))
    way.bytes_per_s = 1000 * MBIT

    assert chooses_int8(outgoing, 1)
    assert not chooses_int8(outgoing, 0)


def test_older_jobs_fade() -> None:
    outgoing = worked(Known(), chunk_s=2.0)
    for _ in range(20):
        outgoing.note(500_000, CHUNK, is_step=False)

    assert chooses_int8(outgoing)


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        (WireMode.EXACT, DType.BFLOAT16),
        (WireMode.PLAIN, DType.BFLOAT16),
        (WireMode.INT8, DType.BFLOAT16_INT8),
    ],
)
def test_a_lane_seals_as_it_was_chosen(mode: WireMode, dtype: DType) -> None:
    lane = Outgoing(mode, None).lane(session(1))

    assert lane.seal(torch.ones(1, 2, 64).bfloat16(), 5, is_step=True).dtype is dtype


def sent_as(outgoing: Outgoing, rows: int, *, is_step: bool = False) -> DType:
    return (
        outgoing.lane(session(1))
        .seal(torch.ones(1, rows, 1024).bfloat16(), 5, is_step=is_step)
        .dtype
    )


@pytest.mark.parametrize(
    ("mbit", "rows", "is_packed"),
    [
        (1000, 256, False),
        (200, 256, False),  # 7.0 ms saved for 4.5 ms of work
        (100, 256, True),  # 14 ms
        (100, 1, False),
        (10, 1, False),  # 0.55 ms saved for 0.32 ms of work
        (10, 4, True),
        (5, 1, True),
    ],
)
def test_exact_rows_are_packed_where_that_saves_twice_what_it_takes(
    mbit: float, rows: int, *, is_packed: bool
) -> None:
    outgoing = Outgoing(WireMode.EXACT, Known(bytes_per_s=mbit * MBIT))

    assert sent_as(outgoing, rows) is (DType.BFLOAT16_PACKED if is_packed else DType.BFLOAT16)


@pytest.mark.parametrize("way", [None, Known(bytes_per_s=None), Known(bytes_per_s=float("inf"))])
@pytest.mark.parametrize("mode", [WireMode.EXACT, WireMode.AUTO])
def test_nothing_is_packed_where_the_rate_is_not_known(mode: WireMode, way: Known | None) -> None:
    assert sent_as(Outgoing(mode, way), 256) is DType.BFLOAT16


@pytest.mark.parametrize("mode", [WireMode.PLAIN, WireMode.INT8])
def test_who_asks_for_plain_or_8_bits_gets_nothing_packed(mode: WireMode) -> None:
    outgoing = Outgoing(mode, Known(bytes_per_s=MBIT))

    assert sent_as(outgoing, 256) is not DType.BFLOAT16_PACKED


def test_steps_go_by_the_rate_at_which_a_prompt_left() -> None:
    way = Known(bytes_per_s=MBIT)
    outgoing = Outgoing(WireMode.EXACT, way)

    before = sent_as(outgoing, 1, is_step=True)
    sent_as(outgoing, 256)
    way.bytes_per_s = 1000 * MBIT
    behind = sent_as(outgoing, 1, is_step=True)

    assert (before, behind) == (DType.BFLOAT16, DType.BFLOAT16_PACKED)
    assert sent_as(outgoing, 256) is DType.BFLOAT16


def test_auto_packs_a_session_that_it_does_not_round() -> None:
    way = Known()
    outgoing = Outgoing(WireMode.AUTO, way)

    assert sent_as(outgoing, 256) is DType.BFLOAT16_PACKED
    assert not outgoing.lane(session(1)).is_int8


def test_auto_reckons_with_what_packed_rows_take() -> None:
    bytes_s = CHUNK / (10 * MBIT)
    plain_s, packed_s = (part * bytes_s * (1 / SHARE - 1) for part in (1, PACKED))

    assert not chooses_int8(worked(Known(2), chunk_s=(plain_s + packed_s) / 2))
    assert chooses_int8(worked(Known(2), chunk_s=packed_s * 0.99))


@pytest.mark.parametrize(
    ("name", "mode"), [("qwen3", WireMode.AUTO), ("qwen3_moe", WireMode.EXACT)]
)
def test_a_mixture_of_experts_is_rounded_by_nobody_but_its_user(
    tmp_path: Path, name: str, mode: WireMode
) -> None:
    config = tiny_model(tmp_path, name).config

    assert settle(WireMode.AUTO, config, torch.float32) is mode
    assert settle(WireMode.INT8, config, torch.float32) is WireMode.INT8
    assert settle(WireMode.EXACT, config, torch.float32) is WireMode.EXACT
