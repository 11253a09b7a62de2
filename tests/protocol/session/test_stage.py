"""Stages: crop on write, one computation per session, and a clean end."""

from dataclasses import replace

import pytest

from meshllm.names import SessionId, Span
from meshllm.protocol.kv_cache.budget import BLOCK
from meshllm.protocol.kv_cache.prefix_index import RESUME_S
from meshllm.protocol.session.codec import size
from meshllm.protocol.session.messages import (
    Cancel,
    Close,
    Fault,
    FaultCode,
    Flags,
    Forward,
    Gap,
    JobTimes,
    Logits,
    Malformed,
    RankStats,
    Resume,
    SessionMessage,
)
from meshllm.protocol.session.pace import PrefillPacing
from meshllm.protocol.session.stage import (
    MAX_CLOSED,
    MAX_PENDING,
    Action,
    Adopt,
    Compute,
    Free,
    Keep,
    Stage,
    Withdraw,
)
from tests.builders.stage import (
    EPOCH,
    NO_FLAGS,
    ONE,
    SPENT,
    THREE,
    TWO,
    blob,
    compute,
    data,
    shelf_of,
)

NO_TALLY = RankStats(JobTimes(0, 0, 0), 0, 0, 0)


def middle() -> Stage:
    return Stage(1, 3, epoch=EPOCH, max_sessions=2, idle_s=60.0)


def filled(kv_len: int) -> Stage:
    """A middle rank that holds this number of rows of session ONE."""
    stage = middle()
    stage.receive(data(0, rows=kv_len, flags=Flags.PREFILL), 0.0)
    stage.computed(ONE, blob(kv_len), 0.0, SPENT)
    return stage


def test_data_is_computed_at_its_position() -> None:
    assert filled(4).receive(data(4, rows=2), 1.0) == [compute(4, 2, 2)]


def test_output_is_forwarded_under_the_same_header() -> None:
    stage = filled(4)
    stage.receive(data(4), 1.0)
    out = replace(blob(1), digest=blob(2).digest)

    actions = stage.computed(ONE, out, 1.1, SPENT)

    assert actions == [Forward(replace(data(4), blob=out))]
    assert not Forward(data(4)).control


MALFORMED = Malformed(ONE, EPOCH, "Message with 0 rows")
INVALID = Forward(
    Fault(
        *(ONE, EPOCH, FaultCode.RULES, 1),
        "The previous rank sent an invalid message: Message with 0 rows",
    )
)


def test_an_invalid_message_ends_its_session_and_no_other() -> None:
    stage = filled(4)
    stage.receive(data(0, session=TWO), 0.5)

    assert stage.receive(MALFORMED, 1.0) == [Free(ONE), INVALID]
    assert stage.receive(data(4), 1.1) == []
    assert stage.computed(TWO, blob(1), 1.2, SPENT) == [Forward(data(0, session=TWO))]
    assert stage.receive(data(1, session=TWO), 1.3) == [compute(1, 1, 1, TWO)]


def test_an_invalid_message_is_reported_once_and_passes_the_close_on() -> None:
    stage = middle()

    assert stage.receive(MALFORMED, 1.0) == [INVALID]  # it may be the first one of its session
    assert stage.receive(MALFORMED, 1.1) == []
    assert stage.receive(data(0), 1.2) == []
    closed = Forward(Close(ONE, EPOCH, 0, (NO_TALLY,)))
    assert stage.receive(Close(ONE, EPOCH, 4), 1.3) == [closed]


def test_an_invalid_message_of_an_older_epoch_is_dropped() -> None:
    assert filled(4).receive(replace(MALFORMED, epoch=EPOCH - 1), 1.0) == []


def test_an_invalid_close_frees_the_cache_here_and_on_the_following_ranks() -> None:
    stage, following = filled(4), Stage(2, 3, epoch=EPOCH)
    following.receive(data(0), 0.5)

    freed, close = stage.receive(replace(MALFORMED, is_close=True), 1.0)

    assert freed == Free(ONE)
    assert isinstance(close, Forward)
    assert isinstance(close.message, Close)
    assert (close.message.keep, len(close.message.tallies)) == (0, 1)
    assert following.receive(close.message, 1.1)[:2] == [Withdraw(ONE), Free(ONE)]


def narrow(rows: int) -> Stage:
    """A middle rank where so many rows may run or wait."""
    return Stage(1, 3, epoch=EPOCH, max_waiting=len(blob(rows).payload))


def too_many(waiting: int, most: int, session: SessionId = ONE) -> Forward:
    text = (
        f"{len(blob(waiting).payload)} bytes of rows would wait; the limit is"
        f" {len(blob(most).payload)}"
    )
    return Forward(Fault(session, EPOCH, FaultCode.BUSY, 1, text))


def test_rows_that_arrive_faster_than_they_run_end_their_session() -> None:
    stage = narrow(6)
    stage.receive(data(0, 4, session=ONE), 0.0)
    stage.receive(data(0, 1, session=TWO), 0.1)

    assert stage.receive(data(1, 1, session=TWO), 0.2) == []  # waits
    refused = stage.receive(data(2, 1, session=TWO), 0.3)
    assert refused == [Withdraw(TWO), Free(TWO), too_many(7, 6, TWO)]
    stage.computed(TWO, blob(1), 0.4, SPENT)

    assert stage.receive(data(4, 2), 0.5) == []
    assert stage.computed(ONE, blob(4), 0.6, SPENT)[1:] == [compute(4, 2, 2)]


def test_what_waits_to_be_sent_leaves_less_room_for_rows() -> None:
    queued = len(blob(2).payload)
    most = len(blob(6).payload)
    stage = Stage(1, 3, epoch=EPOCH, max_waiting=most, queued=lambda: queued)
    stage.receive(data(0, 3, session=ONE), 0.0)

    assert stage.receive(data(0, 2, session=TWO), 0.1) == [Free(TWO), too_many(7, 6, TWO)]
    assert stage.receive(data(3, 1, session=ONE), 0.2) == []  # the other session goes on


def test_rows_that_are_computed_or_outdated_wait_no_more() -> None:
    stage = narrow(4)
    for pos in range(0, 12, 4):
        stage.receive(data(pos, 4), 0.0)
        stage.computed(ONE, blob(4), 0.1, SPENT)
    stage.receive(data(12, 1), 0.2)
    stage.receive(data(13, 3), 0.3)

    assert stage.receive(data(13, 3, gen=1), 0.4) == [Withdraw(ONE)]


@pytest.mark.parametrize("answer", ["computed", "missed", "failed"])
def test_rows_that_run_after_their_session_ended_count_until_they_are_answered(
    answer: str,
) -> None:
    stage = narrow(4)
    stage.receive(data(0, 3), 0.0)
    stage.receive(Close(ONE, EPOCH), 0.1)

    assert too_many(5, 4, TWO) in stage.receive(data(0, 2, session=TWO), 0.2)

    match answer:
        case "computed":
            stage.computed(ONE, blob(3), 0.3, SPENT)
        case "missed":
            stage.missed(ONE)
        case _:
            stage.failed(ONE, FaultCode.MODEL, "no memory")
    three = SessionId(b"3" * 16)
    assert stage.receive(data(0, 4, session=three), 0.4) == [
        replace(compute(0, 4, 4), session=three)
    ]


def test_a_name_is_not_used_again_while_rows_of_its_last_session_run() -> None:
    stage = Stage(1, 3, epoch=EPOCH, span=Span(1, 2))
    stage.receive(data(0, 1), 0.0)
    stage.receive(Close(ONE, EPOCH), 0.1)
    for number in range(MAX_CLOSED):  # it is not remembered as closed any more
        stage.receive(Close(SessionId(number.to_bytes(16, "big")), EPOCH), 0.2)

    assert stage.receive(data(0, 1), 0.3) == []
    stage.receive(Resume(ONE, EPOCH, TWO, 4, whole=True, lost=(Span(1, 2),)), 0.4)
    assert stage.committed == {}
    stage.computed(ONE, blob(1), 0.5, SPENT)
    assert stage.receive(data(0, 1), 0.6) == [compute(0, 1, 1)]


def test_a_prompt_is_committed_once_it_is_computed() -> None:
    stage = filled(4)

    assert stage.committed == {ONE: 4}


def test_a_confined_session_is_not_handed_over_and_others_are() -> None:
    stage = filled(4)
    stage.receive(data(0, rows=4, flags=Flags.PREFILL | Flags.NO_HANDOVER, session=TWO), 0.0)
    stage.computed(TWO, blob(4), 0.0, SPENT)

    assert stage.committed == {ONE: 4}


@pytest.mark.parametrize("at", [0, 1])
def test_a_session_stays_confined_if_any_message_says_so(at: int) -> None:
    stage, flags = middle(), [Flags.PREFILL] * 3
    flags[at] |= Flags.NO_HANDOVER
    for pos, each in enumerate(flags):
        stage.receive(data(pos, flags=each), 0.0)
        stage.computed(ONE, blob(1), 0.0, SPENT)

    assert stage.committed == {}


@pytest.mark.parametrize(("flags", "committed"), [(NO_FLAGS, {TWO: 4}), (Flags.NO_HANDOVER, {})])
def test_a_session_that_continues_another_is_handed_over_once_its_data_allow_it(
    flags: Flags, committed: dict[SessionId, int]
) -> None:
    stage = Stage(1, 3, epoch=EPOCH, index=shelf_of(8))
    stage.receive(data(0, rows=4, flags=Flags.PREFILL), 0.0)
    stage.computed(ONE, blob(4), 0.0, SPENT)
    stage.receive(Close(ONE, EPOCH, keep=4), 0.1)

    stage.receive(Resume(TWO, EPOCH, ONE, 4, whole=True), 0.2)
    assert stage.committed == {}
    assert stage.receive(data(4, flags=flags, session=TWO), 0.3)
    assert stage.committed == committed


def step(stage: Stage, pos: int, rows: int = 1, gen: int = 0, flags: Flags = NO_FLAGS) -> int:
    """Compute a decode step; return how many positions are committed."""
    stage.receive(data(pos, rows, gen, flags), 1.0)
    stage.computed(ONE, blob(rows), 1.1, SPENT)
    return stage.committed[ONE]


def test_what_comes_before_a_step_is_committed_if_the_entry_says_so() -> None:
    stage = filled(4)

    assert step(stage, 4, 3) == 4
    assert step(stage, 7, 3) == 4
    assert step(stage, 10, 3, flags=Flags.COMMITTED) == 10
    assert step(stage, 12, 2, gen=1, flags=Flags.COMMITTED) == 12


def test_what_comes_before_more_steps_than_are_in_flight_is_committed() -> None:
    stage = filled(4)

    committed = [step(stage, 4 + 2 * at, 2) for at in range(MAX_PENDING + 3)]

    assert committed == [*[4] * MAX_PENDING, 6, 8, 10]


def test_a_new_gen_counts_its_own_steps() -> None:
    stage = filled(4)
    for at in range(MAX_PENDING):
        step(stage, 4 + at)

    committed = [step(stage, 20 + at, gen=1) for at in range(MAX_PENDING + 2)]

    assert committed == [*[4] * MAX_PENDING, 21, 22]


def test_rows_of_an_older_gen_that_were_running_settle_nothing() -> None:
    stage = filled(4)
    stage.receive(data(4, 3), 1.0)
    stage.receive(Cancel(ONE, EPOCH, 1), 1.05)
    stage.computed(ONE, blob(3), 1.1, SPENT)
    assert stage.committed == {ONE: 4}

    committed = [step(stage, 5 + at, gen=1) for at in range(MAX_PENDING + 1)]

    assert committed == [*[4] * MAX_PENDING, 6]


def test_rows_that_are_written_again_are_not_committed() -> None:
    stage = filled(4)

    assert step(stage, 2, gen=1) == 2


ASKS = Flags.NEED_ROW | Flags.HELP


@pytest.mark.parametrize(
    ("rank", "flags", "helps"),
    [
        (2, ASKS, 7),
        (1, ASKS, None),
        (2, Flags.NEED_ROW, None),
        (2, Flags.HELP, None),
        (2, ASKS | Flags.PREFILL, None),
        (2, ASKS | Flags.COMMITTED | Flags(1 << 6), 7),
    ],
    ids=["asked", "not the last rank", "not asked", "for no row", "for a prompt", "later version"],
)
def test_the_last_rank_sends_logits_only_on_request(
    rank: int, flags: Flags, helps: int | None
) -> None:
    stage = Stage(rank, 3, epoch=EPOCH)

    (action,) = stage.receive(data(0, gen=7, flags=flags), 0.0)

    assert isinstance(action, Compute)
    assert action.helps == helps
    assert stage.epoch == EPOCH


def test_logits_are_forwarded_while_the_step_is_wanted() -> None:
    stage, logits = filled(4), Logits(ONE, EPOCH, 1, 4, blob(1))

    assert stage.helped(logits) == [Forward(logits)]
    same_gen = replace(logits, gen=0)
    assert stage.helped(same_gen) == [Forward(same_gen)]
    assert not Forward(logits).control
    stage.receive(Cancel(ONE, EPOCH, 2), 1.0)
    assert stage.helped(logits) == []
    assert middle().helped(logits) == []


def test_logits_are_dropped_by_a_stage() -> None:
    assert filled(4).receive(Logits(ONE, EPOCH, 0, 4, blob(1)), 1.0) == []


def test_no_logits_for_steps_of_several_rows() -> None:
    (action,) = Stage(2, 3, epoch=EPOCH).receive(data(0, rows=2, flags=ASKS), 0.0)

    assert isinstance(action, Compute)
    assert action.helps is None


def test_a_write_below_the_end_crops_the_cache() -> None:
    stage = filled(6)

    assert stage.receive(data(2, gen=1), 1.0) == [compute(2, 1, 1)]
    stage.computed(ONE, blob(1), 1.0, SPENT)
    assert stage.receive(data(4, gen=1), 1.0) == [Forward(Gap(ONE, EPOCH, 1, 3))]


@pytest.mark.parametrize("stage", [middle(), filled(3)], ids=["unknown", "known"])
def test_a_write_beyond_the_end_is_answered_by_a_gap(stage: Stage) -> None:
    kv_len = 3 if stage.deadline else 0

    assert stage.receive(data(4), 1.0) == [Forward(Gap(ONE, EPOCH, 0, kv_len))]


def test_a_write_beyond_the_end_begins_no_session() -> None:
    stage = middle()

    assert stage.receive(data(1), 1.0) == [Forward(Gap(ONE, EPOCH, 0, 0))]
    assert stage.deadline is None


def test_older_data_is_dropped() -> None:
    stage = filled(4)
    stage.receive(Cancel(ONE, EPOCH, 2), 1.0)

    assert stage.receive(data(4, gen=1), 1.0) == []
    assert stage.receive(replace(data(4, gen=2), epoch=EPOCH - 1), 1.0) == []
    assert stage.receive(data(4, gen=2), 1.0) == [compute(4, 1, 1)]


def test_data_of_a_newer_epoch_is_refused() -> None:
    newer = replace(data(0), epoch=EPOCH + 1)

    assert middle().receive(newer, 0.0) == [
        Forward(Fault(ONE, EPOCH + 1, FaultCode.EPOCH, 1, "Rank 1 is at epoch 5, not 6"))
    ]


def broken(text: str) -> Forward:
    return Forward(Fault(ONE, EPOCH, FaultCode.RULES, 1, text))


def test_a_step_of_too_many_rows_ends_its_session() -> None:
    fault = broken("Step of 18 rows; the limit is 17")

    assert middle().receive(data(0, rows=17), 0.0) == [compute(0, 17, 17)]
    assert middle().receive(data(0, rows=18), 0.0) == [fault]
    assert filled(2).receive(data(2, rows=18), 1.0) == [Free(ONE), fault]
    assert middle().receive(data(0, rows=18, flags=Flags.PREFILL), 0.0)


def test_one_computation_runs_and_the_others_are_queued_in_order() -> None:
    stage = middle()
    first, second = data(0, rows=2), data(2, rows=3)

    assert len(stage.receive(first, 0.0)) == 1
    assert stage.receive(second, 0.0) == []
    assert stage.computed(ONE, blob(2), 0.1, SPENT) == [
        Forward(first),
        compute(2, 3, 3),
    ]


def test_sessions_do_not_wait_for_each_other() -> None:
    stage = middle()
    stage.receive(data(0), 0.0)

    assert stage.receive(data(0, session=TWO), 0.0) == [compute(0, 1, 1, session=TWO)]


def test_rows_of_an_ended_session_that_did_not_begin_take_no_room() -> None:
    stage = narrow(4)
    stage.receive(data(0, 3), 0.0)

    assert stage.receive(Close(ONE, EPOCH), 0.1)[0] == Withdraw(ONE)
    assert stage.withdrawn(ONE) == []
    assert stage.waiting_bytes == 0
    assert stage.receive(data(0, 4, session=TWO), 0.2) == [compute(0, 4, 4, session=TWO)]


def test_rows_of_an_older_gen_that_did_not_begin_are_replaced_at_once() -> None:
    stage = narrow(4)
    stage.receive(data(0, 2), 0.0)

    assert stage.receive(data(0, 2, gen=1), 0.1) == [Withdraw(ONE)]
    assert stage.withdrawn(ONE) == [compute(0, 2, 2)]
    assert stage.withdrawn(TWO) == []


def test_waiting_data_with_a_gap_before_it_is_refused_when_its_turn_comes() -> None:
    stage = middle()
    stage.receive(data(0, rows=2), 0.0)
    stage.receive(data(3), 0.0)

    assert stage.computed(ONE, blob(2), 0.1, SPENT) == [
        Forward(data(0, rows=2)),
        Forward(Gap(ONE, EPOCH, 0, 2)),
    ]


def test_a_full_queue_ends_its_session() -> None:
    stage = middle()
    for pos in range(MAX_PENDING + 1):
        stage.receive(data(pos), 0.0)

    assert stage.receive(data(MAX_PENDING + 1), 0.0) == [
        Withdraw(ONE),
        Free(ONE),
        broken("Data at position 17 while 16 others are queued"),
    ]


def test_cancel_wins_over_waiting_data_and_goes_on() -> None:
    stage = middle()
    cancel = Cancel(ONE, EPOCH, 1)
    stage.receive(data(0, rows=2), 0.0)
    stage.receive(data(2), 0.0)

    assert stage.receive(cancel, 0.0) == [Withdraw(ONE), Forward(cancel)]
    assert stage.computed(ONE, blob(2), 0.1, SPENT) == []  # they had begun
    assert stage.receive(data(3, gen=1), 0.2) == [Forward(Gap(ONE, EPOCH, 1, 2))]


def test_a_newer_gen_drops_waiting_data_of_the_older() -> None:
    stage = middle()
    stage.receive(data(0, rows=2), 0.0)
    stage.receive(data(2), 0.0)
    stage.receive(data(0, gen=1), 0.0)

    assert stage.computed(ONE, blob(2), 0.1, SPENT) == [compute(0, 1, 1)]


def test_an_older_cancel_changes_nothing() -> None:
    stage = filled(2)
    stage.receive(Cancel(ONE, EPOCH, 3), 0.0)
    stage.receive(Cancel(ONE, EPOCH, 1), 0.0)

    assert stage.receive(data(2, gen=2), 0.0) == []


@pytest.mark.parametrize(
    "message",
    [
        Gap(ONE, EPOCH, 0, 7),
        Fault(ONE, EPOCH, FaultCode.MODEL, 1, "no memory"),
        Cancel(ONE, EPOCH, 4),
    ],
)
def test_control_messages_are_passed_on(message: SessionMessage) -> None:
    assert middle().receive(message, 0.0) == [Forward(message)]
    assert Forward(message).control


@pytest.mark.parametrize(
    ("flags", "keep"),
    [
        (Flags.PREFILL, 0),
        (Flags.PREFILL | Flags.NEED_ROW, 1),
        (Flags.NEED_ROW, 3),
    ],
    ids=["chunk", "last chunk", "decode"],
)
def test_the_last_rank_keeps_only_the_rows_that_are_needed(flags: Flags, keep: int) -> None:
    stage = Stage(2, 3, epoch=EPOCH)

    is_step = not flags & Flags.PREFILL
    expected = Compute(ONE, 0, 3, keep, blob(3), is_step=is_step)
    assert stage.receive(data(0, rows=3, flags=flags), 0.0) == [expected]


def test_a_failed_computation_frees_the_session_and_reports_a_fault() -> None:
    stage = filled(2)
    stage.receive(data(2), 1.0)

    actions = stage.failed(ONE, FaultCode.MODEL, "no memory")

    assert actions == [Free(ONE), Forward(Fault(ONE, EPOCH, FaultCode.MODEL, 1, "no memory"))]
    assert stage.receive(data(2), 1.1) == []


def test_an_answer_without_a_job_is_ignored() -> None:
    stage = filled(2)

    assert stage.computed(ONE, blob(1), 0.0, SPENT) == []
    assert stage.computed(TWO, blob(1), 0.0, SPENT) == []
    assert stage.failed(ONE, FaultCode.MODEL, "late") == []
    assert stage.failed(TWO, FaultCode.MODEL, "late") == []


def test_close_frees_the_session_and_carries_the_tally_of_its_decode_steps() -> None:
    stage = Stage(2, 3, epoch=EPOCH)
    stage.round_trip_us = 450
    stage.receive(data(0, rows=2, flags=Flags.PREFILL), 0.0)
    stage.computed(ONE, None, 0.0, JobTimes(1000, 2000, 3000))
    for pos in (2, 3):
        stage.receive(data(pos, flags=Flags.NEED_ROW), 0.0)
        stage.computed(ONE, blob(1), 0.0, SPENT)

    actions = stage.receive(Close(ONE, EPOCH, 0, (NO_TALLY,)), 1.0)

    tally = RankStats(JobTimes(20, 6, 2), steps=2, bytes_sent=2 * size(data(2)), round_trip_us=450)
    assert actions == [Free(ONE), Forward(Close(ONE, EPOCH, 0, (NO_TALLY, tally)))]


def test_a_repeated_close_frees_nothing_and_reports_the_same() -> None:
    stage = filled(2)
    stage.receive(data(2), 0.0)
    stage.computed(ONE, blob(1), 0.0, SPENT)

    first, second = stage.receive(Close(ONE, EPOCH), 1.0), stage.receive(Close(ONE, EPOCH), 1.0)

    assert first == [Free(ONE), *second]


def test_close_of_an_unknown_session_is_passed_on_and_remembered() -> None:
    stage = middle()

    assert stage.receive(Close(ONE, EPOCH), 0.0) == [Forward(Close(ONE, EPOCH, 0, (NO_TALLY,)))]
    assert stage.receive(data(0), 0.0) == []


def test_close_wins_over_a_running_computation() -> None:
    stage = middle()
    stage.receive(data(0), 0.0)
    stage.receive(Close(ONE, EPOCH), 0.0)

    assert stage.computed(ONE, blob(1), 0.1, SPENT) == []
    assert stage.receive(data(0), 0.2) == []


def test_a_close_that_skipped_a_rank_keeps_nothing() -> None:
    skipped = Close(ONE, EPOCH, 2, (NO_TALLY, NO_TALLY))

    assert filled(2).receive(skipped, 1.0) == [Free(ONE), Forward(replace(skipped, keep=0))]


def test_only_so_many_closed_sessions_are_remembered() -> None:
    stage = middle()
    for number in range(MAX_CLOSED + 1):
        stage.receive(Close(SessionId(number.to_bytes(16, "big")), EPOCH), 0.0)

    forgotten, remembered = SessionId(bytes(16)), SessionId((1).to_bytes(16, "big"))

    assert stage.receive(data(0, session=forgotten), 0.0) != []
    assert stage.receive(data(0, session=remembered), 0.0) == []


def test_one_session_too_many_is_refused() -> None:
    stage = filled(2)
    stage.receive(data(0, session=TWO), 0.0)
    three = SessionId(b"3" * 16)

    assert stage.receive(data(0, session=three), 0.0) == [
        Forward(Fault(three, EPOCH, FaultCode.BUSY, 1, "The limit of 2 sessions is reached"))
    ]


def test_an_idle_session_is_freed_and_can_come_back() -> None:
    stage = filled(2)

    deadline = stage.deadline

    assert deadline == 60.0
    assert stage.expire(59.0) == []
    assert stage.expire(60.0) == [Free(ONE)]
    assert stage.deadline is None
    assert stage.receive(data(2), 61.0) == [Forward(Gap(ONE, EPOCH, 0, 0))]
    assert stage.receive(data(0, gen=1), 61.0) == [compute(0, 1, 1)]


def test_a_session_is_not_idle_while_its_entry_waits_for_a_slow_rank() -> None:
    stage, pace = Stage(1, 3, epoch=EPOCH), PrefillPacing()
    stage.receive(data(0), 0.0)
    stage.computed(ONE, blob(1), 0.0, SPENT)
    latest = max(MAX_PENDING - 1, 1 << pace.retries) * pace.patience_s

    assert stage.expire(latest) == []
    assert stage.receive(data(1), latest) == [compute(1, 1, 1)]


def test_a_session_that_only_meets_gaps_is_idle() -> None:
    stage = filled(2)

    assert stage.receive(data(5), 50.0) == [Forward(Gap(ONE, EPOCH, 0, 2))]

    assert stage.deadline == 60.0
    assert stage.expire(60.0) == [Free(ONE)]


def test_a_session_that_computes_is_not_idle() -> None:
    stage = filled(2)
    stage.receive(data(2), 1.0)

    assert stage.deadline is None
    assert stage.expire(1000.0) == []


RESUME = Resume(TWO, EPOCH, ONE, 3, whole=True)


def shelved(blocks: int = 1000, kv_len: int = 4) -> Stage:
    """A middle rank that keeps 4 positions of session ONE."""
    stage = Stage(1, 3, epoch=EPOCH, max_sessions=2, idle_s=60.0, index=shelf_of(blocks))
    stage.receive(data(0, rows=kv_len, flags=Flags.PREFILL), 0.0)
    stage.computed(ONE, blob(kv_len), 0.0, SPENT)
    stage.receive(Close(ONE, EPOCH, keep=4), 0.0)
    return stage


def test_a_closed_session_is_kept_if_there_is_room() -> None:
    stage = Stage(1, 3, epoch=EPOCH, index=shelf_of(1))
    stage.receive(data(0, rows=4, flags=Flags.PREFILL), 0.0)
    stage.computed(ONE, blob(4), 0.0, SPENT)

    first, forward = stage.receive(Close(ONE, EPOCH, keep=4), 1.0)

    assert first == Keep(ONE)
    assert isinstance(forward, Forward)
    assert isinstance(forward.message, Close)
    assert forward.message.keep == 4


def test_a_stage_frees_what_it_keeps_for_others() -> None:
    stage = shelved(blocks=9)
    stage.receive(data(0, rows=BLOCK + 1, flags=Flags.PREFILL, session=TWO), 1.0)

    assert stage.make_room(6 * BLOCK) == []
    assert stage.make_room(7 * BLOCK) == [Free(ONE)]
    assert stage.make_room(9 * BLOCK) == []


def test_a_stage_works_with_less_room_if_its_sessions_fit() -> None:
    stage = shelved(blocks=9)
    stage.receive(data(0, rows=BLOCK + 1, flags=Flags.PREFILL, session=TWO), 1.0)

    assert stage.resize([3 * BLOCK]) == []
    assert stage.resize([2 * BLOCK]) == [Free(ONE)]
    assert stage.resize([2 * BLOCK - 1]) is None
    assert stage.budget.rooms[0].total == 2 * BLOCK


@pytest.mark.parametrize(
    ("most_bytes", "kv_len"), [(BLOCK - 1, 4), (None, 3)], ids=["no room", "rows missing"]
)
def test_a_cache_too_long_or_incomplete_is_freed(most_bytes: int | None, kv_len: int) -> None:
    stage = Stage(1, 3, epoch=EPOCH, index=shelf_of(9, most_bytes))
    stage.receive(data(0, rows=kv_len, flags=Flags.PREFILL), 0.0)
    stage.computed(ONE, blob(kv_len), 0.0, SPENT)

    assert stage.receive(Close(ONE, EPOCH, keep=4), 1.0)[0] == Free(ONE)


def test_without_an_index_no_cache_is_kept() -> None:
    closed = filled(4).receive(Close(ONE, EPOCH, keep=4), 1.0)

    assert closed == [Free(ONE), Forward(Close(ONE, EPOCH, 0, (NO_TALLY,)))]


def test_the_oldest_is_evicted_for_the_newest() -> None:
    stage = shelved(blocks=1)

    assert stage.receive(data(0, rows=2, session=TWO), 1.0) == [
        Free(ONE),
        compute(0, 2, 2, TWO),
    ]
    stage.computed(TWO, blob(2), 1.0, SPENT)
    assert stage.receive(Close(TWO, EPOCH, keep=2), 1.0)[0] == Keep(TWO)


@pytest.mark.parametrize("is_own", [True, False])
def test_the_close_says_whose_cache_others_do_not_push_out(is_own: bool) -> None:
    stage = Stage(1, 3, epoch=EPOCH, index=shelf_of(2))
    ended = list[Action]()
    for session in (ONE, TWO, THREE):
        ended += stage.receive(data(0, rows=2, session=session), 0.0)
        stage.computed(session, blob(2), 0.0, SPENT)
        close = Close(session, EPOCH, keep=2, is_own=is_own and session == ONE)
        ended += (closed := stage.receive(close, 0.0))
        assert closed[-1].message.is_own is close.is_own  # type: ignore[union-attr]

    assert [each for each in ended if isinstance(each, Free)] == [Free(TWO if is_own else ONE)]


def test_a_session_resumes_from_a_kept_prefix() -> None:
    stage = shelved()

    assert stage.receive(RESUME, 1.0) == [Adopt(TWO, ONE, 3, whole=True), Forward(RESUME)]
    assert stage.receive(data(3, session=TWO), 1.0) == [compute(3, 1, 1, TWO)]


@pytest.mark.parametrize(("context", "fits"), [(3, True), (2, False)])
def test_a_session_resumes_within_the_context(context: int, *, fits: bool) -> None:
    stage = Stage(1, 3, epoch=EPOCH, context=context, index=shelved()._index)

    assert (stage.receive(RESUME, 1.0)[0] == Adopt(TWO, ONE, 3, whole=True)) is fits


def test_a_base_is_taken_once_and_copied_often() -> None:
    stage, copy = shelved(), replace(RESUME, whole=False)

    assert stage.receive(copy, 1.0)[0] == Adopt(TWO, ONE, 3, whole=False)
    stage.receive(Close(TWO, EPOCH), 1.0)
    assert stage.receive(replace(RESUME, session=THREE), 1.0)[0] == Adopt(THREE, ONE, 3, whole=True)
    late = replace(RESUME, session=SessionId(b"4" * 16))
    assert stage.receive(late, 1.0) == [Forward(late)]


@pytest.mark.parametrize(
    "resume",
    [
        replace(RESUME, length=5),
        replace(RESUME, base=THREE),
        replace(RESUME, epoch=EPOCH + 1),
    ],
    ids=["too long", "unknown", "other epoch"],
)
def test_a_resume_that_cannot_be_met_leaves_a_gap(resume: Resume) -> None:
    stage = shelved()

    assert stage.receive(resume, 1.0) == [Forward(resume)]
    assert stage.receive(data(3, session=TWO), 1.0) == [Forward(Gap(TWO, EPOCH, 0, 0))]


@pytest.mark.parametrize(
    ("resume", "freed"),
    [(RESUME, [Free(ONE)]), (replace(RESUME, whole=False), []), (replace(RESUME, base=THREE), [])],
    ids=["whole", "copied", "unknown"],
)
def test_a_resume_behind_its_close_leaves_nothing_that_nobody_knows(
    resume: Resume, freed: list[Free]
) -> None:
    stage = shelved()
    stage.receive(Close(TWO, EPOCH), 1.0)

    assert stage.receive(resume, 1.0) == [*freed, Forward(resume)]
    assert stage._index.holds(ONE) is not bool(freed)


def test_a_session_that_took_over_a_part_has_no_more_of_its_name() -> None:
    stage = shelved()
    stage.receive(RESUME, 1.0)
    stage.receive(data(3, session=TWO), 1.0)
    stage.computed(TWO, None, 1.0, SPENT)
    stage.interrupt(2.0)

    assert stage._index.name_of(ONE, RESUME.length) == TWO
    assert stage._index.name_of(ONE, RESUME.length + 1) == ONE


def test_a_resume_does_not_change_a_running_session() -> None:
    stage = shelved()
    stage.receive(data(0, session=TWO), 1.0)

    assert stage.receive(RESUME, 1.0) == [Forward(RESUME)]


def test_a_full_rank_ignores_a_resume() -> None:
    stage = shelved()
    for name in (b"5", b"6"):
        stage.receive(data(0, session=SessionId(name * 16)), 1.0)

    assert stage.receive(RESUME, 1.0) == [Forward(RESUME)]


def test_an_unused_kept_session_is_evicted() -> None:
    stage = shelved()

    assert stage.deadline == 600.0
    assert stage.expire(599.0) == []
    assert stage.expire(600.0) == [Free(ONE)]
    assert stage.deadline is None


def test_an_idle_resumed_session_is_freed() -> None:
    stage = shelved()
    stage.receive(RESUME, 1.0)

    assert stage.expire(61.0) == [Free(TWO)]


def test_a_session_freed_by_one_rank_is_kept_by_none() -> None:
    stage = Stage(1, 3, epoch=EPOCH, index=shelf_of(9, 0))
    stage.receive(data(0, rows=4, flags=Flags.PREFILL), 0.0)
    stage.computed(ONE, blob(4), 0.0, SPENT)

    assert stage.receive(Close(ONE, EPOCH, keep=4), 1.0)[-1] == Forward(
        Close(ONE, EPOCH, 0, (NO_TALLY,))
    )


def test_rows_without_a_cache_are_requested_again() -> None:
    stage = shelved()
    stage.receive(RESUME, 1.0)
    stage.receive(data(3, session=TWO), 1.0)

    assert stage.missed(TWO) == [Forward(Gap(TWO, EPOCH, 0, 0))]
    assert stage.missed(TWO) == []
    assert stage.receive(data(1, session=TWO), 1.1) == [Forward(Gap(TWO, EPOCH, 0, 0))]
    assert stage.receive(data(0, gen=1, session=TWO), 1.1) == [compute(0, 1, 1, TWO)]


def refusal(actions: list[Action], code: FaultCode = FaultCode.BUSY) -> str:
    """Return why the only session of these actions was refused."""
    *_, forward = actions
    assert isinstance(forward, Forward)
    assert isinstance(forward.message, Fault)
    assert (forward.message.code, forward.message.rank) == (code, 1)
    return forward.message.text


def test_positions_beyond_the_context_end_their_session_and_no_other() -> None:
    stage = Stage(1, 3, epoch=EPOCH, context=8)
    for session in (ONE, TWO):
        stage.receive(data(0, rows=8, session=session), 0.0)
        stage.computed(session, blob(8), 0.0, SPENT)

    refused = stage.receive(data(8), 1.0)

    assert refused[0] == Free(ONE)
    assert refusal(refused, FaultCode.MODEL) == "Positions 8 to 9 exceed the context of 8"
    assert stage.receive(data(0), 1.0) == []
    assert stage.receive(data(4, session=TWO), 1.0) == [compute(4, 1, 1, TWO)]


def test_rows_of_an_unknown_session_allocate_nothing() -> None:
    stage = Stage(1, 3, epoch=EPOCH, context=8)

    refused = stage.receive(data(1 << 23), 1.0)

    assert len(refused) == 1
    assert "of 8" in refusal(refused, FaultCode.MODEL)


def test_a_session_that_outgrows_the_budget_ends_before_its_rows_are_computed() -> None:
    stage = Stage(1, 3, epoch=EPOCH, index=shelf_of(3))
    for session in (ONE, TWO):
        stage.receive(data(0, rows=BLOCK, flags=Flags.PREFILL, session=session), 0.0)
        stage.computed(session, blob(BLOCK), 0.0, SPENT)
    stage.receive(data(BLOCK), 1.0)
    stage.computed(ONE, blob(1), 1.0, SPENT)

    refused = stage.receive(data(BLOCK, session=TWO), 1.0)

    assert refused[0] == Free(TWO)
    assert refusal(refused) == (
        "No room for the cache of 257 positions: 256 fit next to 1 other sessions"
    )
    assert stage.receive(data(BLOCK + 1), 1.0) == [compute(BLOCK + 1, 1, 1)]


def test_an_ended_or_idle_session_releases_its_bytes() -> None:
    index = shelf_of(2, 0)
    stage = Stage(1, 3, epoch=EPOCH, idle_s=60.0, index=index)
    for session in (ONE, TWO):
        stage.receive(data(0, session=session), 0.0)
        stage.computed(session, blob(1), 0.0, SPENT)

    stage.receive(Close(ONE, EPOCH), 1.0)
    assert index.budget.live_bytes == BLOCK
    stage.expire(60.0)
    assert index.budget.live_bytes == 0


def test_the_kept_cache_is_taken_over_if_a_copy_does_not_fit() -> None:
    stage, copy = shelved(blocks=1), replace(RESUME, whole=False)

    assert stage.receive(copy, 1.0) == [Adopt(TWO, ONE, 3, whole=True), Forward(copy)]


@pytest.mark.parametrize("whole", [True, False])
def test_an_unavailable_kept_cache_causes_a_gap(*, whole: bool) -> None:
    stage = Stage(1, 3, epoch=EPOCH, index=shelf_of(2))
    stage.receive(data(0, rows=2 * BLOCK, flags=Flags.PREFILL), 0.0)
    stage.computed(ONE, blob(2 * BLOCK), 0.0, SPENT)
    stage.receive(Close(ONE, EPOCH, keep=4), 0.0)
    # Nothing of it is evicted for one that took its room by other means.
    stage._index.budget.reserve(THREE, BLOCK)
    resume = replace(RESUME, whole=whole)

    assert stage.receive(resume, 1.0) == [Free(ONE), Forward(resume)]
    assert stage.receive(data(3, session=TWO), 1.0) == [Forward(Gap(TWO, EPOCH, 0, 0))]


def test_a_copy_that_does_not_fit_is_not_made() -> None:
    stage, copy = shelved(blocks=1), replace(RESUME, whole=False)
    stage._index.budget.reserve(THREE, BLOCK)

    assert stage.receive(copy, 1.0) == [Forward(copy)]


def test_a_lost_ring_leaves_the_caches_of_its_sessions() -> None:
    stage = shelved()
    stage.receive(data(0, rows=3, session=TWO, flags=Flags.PREFILL), 1.0)
    stage.computed(TWO, blob(3), 1.0, SPENT)
    stage.receive(data(3, session=TWO), 1.0)  # runs
    stage.receive(data(0, rows=2, session=THREE, flags=Flags.PREFILL), 1.0)  # never computed

    assert stage.interrupt(2.0) == [Keep(TWO), Free(THREE)]

    later = Stage(1, 3, epoch=EPOCH + 1, index=stage._index)
    resume = Resume(SessionId(b"4" * 16), EPOCH + 1, TWO, 3, whole=True)
    assert later.receive(resume, 3.0)[0] == Adopt(resume.session, TWO, 3, whole=True)
    assert stage.budget.live_bytes == later.budget.live_bytes


def test_a_lost_ring_without_a_prefix_cache_keeps_what_goes_on_in_the_next_ring() -> None:
    stage = Stage(1, 3, epoch=EPOCH, index=shelf_of(9, 0))
    stage.receive(data(0, rows=3, flags=Flags.PREFILL), 1.0)
    stage.computed(ONE, blob(3), 1.0, SPENT)

    assert stage.interrupt(2.0) == [Keep(ONE)]
    assert stage.deadline == 2.0 + RESUME_S
    assert stage.expire(2.0 + RESUME_S) == [Free(ONE)]


def test_a_lost_ring_frees_everything_if_no_session_can_be_resumed() -> None:
    index = shelf_of(9, 0)
    index.resumes = False
    stage = Stage(1, 3, epoch=EPOCH, index=index)
    stage.receive(data(0, rows=3, flags=Flags.PREFILL), 1.0)
    stage.computed(ONE, blob(3), 1.0, SPENT)

    assert stage.interrupt(2.0) == [Free(ONE)]
    assert stage.budget.live_bytes == 0
