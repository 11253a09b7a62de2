"""Rank 0's side of a generation: chunks out, rows back, tokens once."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshllm.protocol.kv_cache.admission import QUANTUM
from meshllm.protocol.kv_cache.prefix_index import Chunk
from meshllm.protocol.session.actions import (
    Action,
    Closed,
    Done,
    Embed,
    Emit,
    Failed,
    GenerationTask,
    Progress,
    Reserve,
    SampleTokens,
)
from meshllm.protocol.session.codec import MAX_POSITION
from meshllm.protocol.session.entry import NEAR, Entry, EntryState
from meshllm.protocol.session.messages import (
    Cancel,
    Close,
    Data,
    Fault,
    FaultCode,
    Flags,
    Forward,
    Gap,
    JobTimes,
    Malformed,
    RankStats,
    Resume,
    SessionMessage,
)
from meshllm.protocol.session.pace import PrefillPacing
from meshllm.protocol.session.stage import MAX_PENDING
from meshllm.request import FinishReason
from tests.builders.entry import (
    BASE,
    EPOCH,
    LAST_CHUNK,
    NO_FLAGS,
    PACE,
    SESSION,
    TASK,
    back,
    blob,
    chunk,
    sent,
)

TALLIES = (RankStats(JobTimes(10, 2, 1), 1, 100, 5), RankStats(JobTimes(20, 3, 2), 1, 200, 6))
CANCELLED = FinishReason.CANCELLED

LONE_STEP = Flags.NEED_ROW | Flags.COMMITTED
"""Of a step while nothing is in flight before it."""


def decoding() -> Entry:
    """An entry whose first token, 90, was just embedded and sent."""
    entry = Entry(replace(TASK, prompt=(11, 12)), PACE)
    entry.open(0.0)
    entry.computed(blob(2), 0.0)
    entry.receive(back(0, 2, row=blob(1)), 1.0)
    entry.sampled((90,), 1.0)
    entry.computed(blob(1), 1.0)
    return entry


def test_a_prompt_goes_out_in_chunks_without_waiting_up_to_the_window() -> None:
    entry = Entry(TASK, PACE)

    assert entry.open(0.0) == [chunk(0, 0, (11, 12))]
    assert entry.computed(blob(2), 0.1) == [
        sent(0, 2, Flags.PREFILL),
        chunk(0, 2, (13, 14)),
    ]
    assert entry.computed(blob(2), 0.2) == [sent(2, 2, Flags.PREFILL)]


def test_a_chunk_that_came_back_makes_progress_and_room_for_the_last_one() -> None:
    entry = Entry(TASK, PACE)
    entry.open(0.0)
    entry.computed(blob(2), 0.1)
    entry.computed(blob(2), 0.2)

    assert entry.receive(back(0, 2), 0.5) == [Progress(2, 5), chunk(0, 4, (15,))]
    assert entry.computed(blob(1), 0.6) == [sent(4, 1, LAST_CHUNK)]


def test_all_rows_of_a_session_that_is_not_handed_over_say_so() -> None:
    entry = Entry(replace(TASK, prompt=(11, 12, 13), hands_over=False), PACE)
    entry.open(0.0)
    rows = [*entry.computed(blob(2), 0.1), *entry.computed(blob(1), 0.2)]
    entry.receive(back(2, 1, row=blob(1)), 0.3)
    entry.sampled((90,), 0.4)
    rows += entry.computed(blob(1), 0.5)

    assert [each for each in rows if isinstance(each, Forward)] == [
        sent(0, 2, Flags.PREFILL | Flags.NO_HANDOVER),
        sent(2, 1, LAST_CHUNK | Flags.NO_HANDOVER),
        sent(3, 1, LONE_STEP | Flags.NO_HANDOVER),
    ]


def test_a_returned_chunk_confirms_those_before_it() -> None:
    entry = Entry(TASK, PACE)
    entry.open(0.0)
    entry.computed(blob(2), 0.1)
    entry.computed(blob(2), 0.2)

    assert entry.receive(back(2, 2), 0.5) == [Progress(4, 5), chunk(0, 4, (15,))]
    assert entry.receive(back(0, 2), 0.6) == []


def test_the_row_of_the_last_chunk_becomes_the_first_token() -> None:
    entry = Entry(replace(TASK, prompt=(11, 12)), PACE)
    entry.open(0.0)
    entry.computed(blob(2), 0.1)

    assert entry.receive(back(0, 2, row=blob(1)), 0.5) == [
        Progress(2, 2),
        SampleTokens(0, 2, blob(1), (), 5),
    ]
    assert entry.state is EntryState.PREFILL
    assert entry.sampled((90,), 0.6) == [Emit(90), Embed(0, 2, (90,))]


def test_chunks_are_told_once_and_again_after_a_restart() -> None:
    entry = decoding()
    prompt, step = Chunk(2, is_step=False), Chunk(3, is_step=True)

    assert entry.take_chunks() == (prompt, step)
    assert entry.take_chunks() is None
    entry.receive(Gap(SESSION, EPOCH, 0, 0), 1.5)
    assert entry.take_chunks() == (prompt,)


def test_within_the_prompt_only_what_came_back_is_held_by_every_rank() -> None:
    entry = Entry(replace(TASK, prompt=tuple(range(9))), PrefillPacing(chunk=2, window=3))
    entry.open(0.0)
    for _ in range(3):
        entry.computed(blob(2), 0.1)
    assert entry.held == ([], 0)

    entry.receive(back(0, 2), 0.5)
    entry.receive(back(2, 2), 0.6)

    assert entry.held == ([Chunk(2, is_step=False), Chunk(4, is_step=False)], 4)


def test_a_prompt_of_one_token_is_a_last_chunk_too() -> None:
    entry = Entry(replace(TASK, prompt=(11,)), PACE)
    entry.open(0.0)

    assert entry.computed(blob(1), 0.1) == [sent(0, 1, LAST_CHUNK)]
    assert entry.receive(back(0, 1, row=blob(1)), 0.5) == [
        Progress(1, 1),
        SampleTokens(0, 1, blob(1), (), 4),
    ]


def test_a_decode_step_is_one_row_that_comes_back() -> None:
    entry = decoding()

    assert entry.state is EntryState.DECODE
    assert entry.receive(back(2, 1, row=blob(1)), 2.0) == [SampleTokens(0, 3, blob(1), (), 5)]
    assert entry.sampled((91,), 2.0) == [Emit(91), Embed(0, 3, (91,))]
    assert entry.computed(blob(1), 2.0) == [sent(3, 1, LONE_STEP)]


def test_max_tokens_end_the_answer() -> None:
    entry = Entry(replace(TASK, prompt=(11, 12), max_tokens=1), PACE)
    entry.open(0.0)
    entry.computed(blob(2), 0.1)
    entry.receive(back(0, 2, row=blob(1)), 0.5)

    assert entry.sampled((90,), 0.6) == [
        Emit(90),
        Done(FinishReason.LENGTH),
        Forward(Close(SESSION, EPOCH, keep=2)),
    ]


def test_the_context_ends_the_answer() -> None:
    entry = Entry(replace(TASK, prompt=(11, 12), context=3), PACE)
    entry.open(0.0)
    entry.computed(blob(2), 0.1)
    entry.receive(back(0, 2, row=blob(1)), 0.5)

    assert Done(FinishReason.LENGTH) in entry.sampled((90,), 0.6)


def test_a_token_that_stops_the_answer_is_part_of_it_and_nothing_follows() -> None:
    entry = decoding()
    entry.receive(back(2, 1, row=blob(1)), 2.0)

    assert entry.sampled((91,), 2.0, stop=True) == [
        Emit(91),
        Done(FinishReason.STOP),
        Forward(Close(SESSION, EPOCH, keep=3)),
    ]


def test_a_ring_of_one_sends_nothing() -> None:
    entry = Entry(replace(TASK, ring=1, max_tokens=2), PACE)

    assert entry.open(0.0) == [chunk(0, 0, (11, 12))]
    assert entry.computed(None, 0.1) == [Progress(2, 5), chunk(0, 2, (13, 14))]
    assert entry.computed(None, 0.2) == [Progress(4, 5), chunk(0, 4, (15,))]
    assert entry.computed(None, 0.3) == [Progress(5, 5), SampleTokens(0, 5, None, (), 7)]
    assert entry.sampled((90,), 0.4) == [Emit(90), Embed(0, 5, (90,))]
    assert entry.computed(None, 0.5) == [SampleTokens(0, 6, None, (), 7)]
    assert entry.deadline is None
    assert entry.sampled((91,), 0.6) == [Emit(91), Done(FinishReason.LENGTH), Closed(())]


@pytest.mark.parametrize(
    "message",
    [
        back(0, 2, row=blob(1)),
        back(2, 1, gen=1, row=blob(1)),
        replace(back(2, 1, row=blob(1)), epoch=EPOCH - 1),
        Gap(SESSION, EPOCH, 1, 0),
        Cancel(SESSION, EPOCH, 0),
        Close(SESSION, EPOCH, 0, TALLIES),
    ],
    ids=["repeated", "other gen", "other epoch", "gap of other gen", "cancel", "close too soon"],
)
def test_unexpected_messages_are_ignored(message: SessionMessage) -> None:
    entry = decoding()

    assert entry.receive(message, 2.0) == []
    assert entry.receive(back(2, 1, row=blob(1)), 2.0) == [SampleTokens(0, 3, blob(1), (), 5)]


@pytest.mark.parametrize(
    "message",
    [back(2, 1), back(2, 1, row=blob(2)), back(2, 2, row=blob(1))],
    ids=["no row", "two rows", "beyond"],
)
def test_a_malformed_result_ends_the_generation(message: Data) -> None:
    failed, close = decoding().receive(message, 2.0)

    assert isinstance(failed, Failed)
    assert (failed.code, failed.rank, failed.is_seen) == (FaultCode.RULES, 2, True)
    end = message.pos + message.rows
    assert failed.text == f"Unexpected result for positions 2 to {end}"
    assert close == Forward(Close(SESSION, EPOCH))


def test_a_gap_raises_the_gen_and_the_tokens_go_out_again_from_there() -> None:
    entry = decoding()

    assert entry.receive(Gap(SESSION, EPOCH, 0, 1), 2.0) == [
        Forward(Cancel(SESSION, EPOCH, 1)),
        chunk(1, 1, (12, 90)),
    ]
    assert entry.computed(blob(2), 2.1) == [sent(1, 2, LAST_CHUNK, gen=1)]
    assert entry.receive(back(2, 1, row=blob(1)), 2.2) == []
    assert entry.receive(back(1, 2, gen=1, row=blob(1)), 2.3) == [
        SampleTokens(1, 3, blob(1), (), 5)
    ]


def test_a_gap_beyond_what_came_back_does_not_skip_anything() -> None:
    entry = decoding()

    assert Embed(1, 2, (90,)) in entry.receive(Gap(SESSION, EPOCH, 0, 9), 2.0)


def test_a_restart_empties_a_full_window() -> None:
    entry = Entry(TASK, PACE)
    entry.open(0.0)
    entry.computed(blob(2), 0.1)
    entry.computed(blob(2), 0.2)

    assert entry.receive(Gap(SESSION, EPOCH, 0, 0), 0.3) == [
        Forward(Cancel(SESSION, EPOCH, 1)),
        chunk(1, 0, (11, 12)),
    ]


def test_a_restart_waits_for_a_running_embed_and_drops_its_output() -> None:
    entry = Entry(TASK, PACE)
    entry.open(0.0)
    entry.computed(blob(2), 0.1)

    assert entry.receive(Gap(SESSION, EPOCH, 0, 0), 0.2) == [Forward(Cancel(SESSION, EPOCH, 1))]
    assert entry.computed(blob(2), 0.3) == [chunk(1, 0, (11, 12))]


def test_a_restart_leaves_a_running_pick_alone() -> None:
    entry = decoding()
    entry.receive(back(2, 1, row=blob(1)), 2.0)

    assert entry.receive(Gap(SESSION, EPOCH, 0, 2), 2.1) == [Forward(Cancel(SESSION, EPOCH, 1))]
    assert entry.sampled((91,), 2.2) == [Emit(91), chunk(1, 2, (90, 91))]
    assert entry.computed(blob(2), 2.3) == [sent(2, 2, LAST_CHUNK, gen=1)]


def test_progress_is_reported_once() -> None:
    entry = Entry(TASK, PACE)
    entry.open(0.0)
    entry.computed(blob(2), 0.1)
    entry.computed(blob(2), 0.2)
    entry.receive(back(0, 2), 0.3)
    entry.receive(Gap(SESSION, EPOCH, 0, 0), 0.4)
    entry.computed(blob(1), 0.5)
    entry.computed(blob(2), 0.6)

    assert entry.receive(back(0, 2, gen=1), 0.7) == []


def test_patience_runs_only_while_the_ring_has_the_next_move() -> None:
    entry = Entry(replace(TASK, prompt=(11, 12)), PACE)
    deadlines = [entry.deadline]

    entry.open(0.0)
    deadlines.append(entry.deadline)
    entry.computed(blob(2), 1.0)
    deadlines.append(entry.deadline)
    entry.receive(back(0, 2, row=blob(1)), 2.0)
    deadlines.append(entry.deadline)

    assert deadlines == [None, None, 1.0 + PACE.patience_s, None]
    assert entry.expire(1000.0) == []


def test_a_timeout_retries_from_the_last_committed_token() -> None:
    entry = decoding()

    assert entry.expire(10.9) == []
    assert entry.expire(11.0) == [Forward(Cancel(SESSION, EPOCH, 1)), Embed(1, 2, (90,))]
    assert entry.computed(blob(1), 12.0) == [sent(2, 1, LONE_STEP, gen=1)]
    assert entry.deadline == 12.0 + 2 * PACE.patience_s


def test_retries_are_limited() -> None:
    entry = decoding()
    actions: list[Action] = []
    for now in (100.0, 200.0, 300.0):
        actions = entry.expire(now)
        entry.computed(blob(1), now)

    assert actions == [
        Failed(FaultCode.TIMED_OUT, "No progress past position 2 after 2 retries", 0),
        Forward(Close(SESSION, EPOCH)),
    ]


def test_progress_renews_patience() -> None:
    entry = decoding()
    entry.expire(100.0)
    entry.computed(blob(1), 100.0)
    entry.receive(back(2, 1, gen=1, row=blob(1)), 101.0)
    entry.sampled((91,), 101.0)
    entry.computed(blob(1), 101.0)

    assert entry.deadline == 101.0 + PACE.patience_s


@pytest.mark.parametrize("code", [FaultCode.MODEL, FaultCode.RULES])
def test_a_fault_ends_the_generation_and_reports_its_rank(code: FaultCode) -> None:
    fault = Fault(SESSION, EPOCH, code, 2, "no memory")

    assert decoding().receive(fault, 2.0) == [
        Failed(code, "no memory", 2, is_seen=False),
        Forward(Close(SESSION, EPOCH)),
    ]


def prefilling() -> Entry:
    entry = Entry(TASK, PACE)
    entry.open(0.0)
    return entry


@pytest.mark.parametrize("begin", [prefilling, decoding])
def test_an_invalid_message_ends_the_generation_and_is_counted_by_its_link(
    begin: Callable[[], Entry],
) -> None:
    entry = begin()
    message = Malformed(SESSION, EPOCH, "Blob of unknown dtype 99")

    assert entry.receive(replace(message, epoch=EPOCH - 1), 2.0) == []
    assert entry.receive(message, 2.0) == [
        Failed(FaultCode.RULES, "Blob of unknown dtype 99", 2, is_seen=False),
        Forward(Close(SESSION, EPOCH)),
    ]
    assert entry.receive(message, 2.1) == []


def test_a_failure_of_this_rank_ends_the_generation() -> None:
    entry = decoding()

    assert entry.failed(FaultCode.LOST, "rank 1 is gone", 2.0) == [
        Failed(FaultCode.LOST, "rank 1 is gone", 0),
        Forward(Close(SESSION, EPOCH)),
    ]
    assert entry.deadline == 2.0 + PACE.close_s
    assert entry.failed(FaultCode.LOST, "again", 2.1) == []


def test_cancel_ends_it_at_any_time_and_only_once() -> None:
    entry = Entry(TASK, PACE)

    assert entry.finish(CANCELLED, 0.0) == [Done(CANCELLED), Forward(Close(SESSION, EPOCH))]
    assert entry.finish(CANCELLED, 0.0) == []


def test_jobs_that_finish_after_the_end_change_nothing() -> None:
    embedding = decoding()
    embedding.expire(100.0)
    embedding.finish(CANCELLED, 100.0)
    picking = decoding()
    picking.receive(back(2, 1, row=blob(1)), 2.0)
    picking.finish(CANCELLED, 2.0)

    assert embedding.computed(blob(1), 100.1) == []
    assert picking.sampled((91,), 2.1) == []


def test_close_that_comes_back_brings_the_tallies() -> None:
    entry = decoding()
    entry.finish(CANCELLED, 2.0)

    assert entry.receive(back(2, 1, row=blob(1)), 2.1) == []
    assert entry.receive(Close(SESSION, EPOCH, 0, TALLIES), 2.2) == [Closed(TALLIES)]
    assert entry.state is EntryState.CLOSED
    assert entry.deadline is None
    assert entry.receive(Close(SESSION, EPOCH, 0, TALLIES), 2.3) == []


def test_a_close_that_skipped_a_rank_is_ignored() -> None:
    entry = decoding()
    entry.finish(CANCELLED, 2.0)

    assert entry.receive(Close(SESSION, EPOCH, 0, TALLIES[:1]), 2.2) == []


def test_a_lost_close_times_out() -> None:
    entry = decoding()
    entry.finish(CANCELLED, 2.0)

    assert entry.deadline == 2.0 + PACE.close_s
    assert entry.expire(entry.deadline) == [Closed(())]


def test_a_cache_that_cannot_be_cropped_is_recomputed_from_the_start() -> None:
    entry = Entry(replace(TASK, prompt=(11, 12, 13), max_crop=0), PACE)
    entry.open(0.0)
    entry.computed(blob(2), 0.1)
    entry.computed(blob(1), 0.2)
    entry.receive(back(0, 2), 0.3)

    actions = entry.receive(Gap(SESSION, EPOCH, 0, 2), 0.5)

    assert actions == [Forward(Cancel(SESSION, EPOCH, 1)), chunk(1, 0, (11, 12))]


def with_drafts(*drafts: int) -> Entry:
    """An entry whose step with token 90 and these drafts was just sent."""
    entry = Entry(replace(TASK, prompt=(11, 12), max_tokens=9), PACE)
    entry.open(0.0)
    entry.computed(blob(2), 0.0)
    entry.receive(back(0, 2, row=blob(1)), 1.0)
    entry.sampled((90,), 1.0, (drafts,) if drafts else ())
    entry.computed(blob(1 + len(drafts)), 1.0)
    return entry


def test_drafts_follow_the_last_token_and_request_all_rows() -> None:
    entry = Entry(replace(TASK, prompt=(11, 12)), PACE)
    entry.open(0.0)
    entry.computed(blob(2), 0.1)
    entry.receive(back(0, 2, row=blob(1)), 0.5)

    assert entry.sampled((90,), 0.6, ((91, 92),)) == [Emit(90), Embed(0, 2, (90, 91, 92), 2)]
    assert entry.computed(blob(3), 0.7) == [sent(2, 3, LONE_STEP)]
    assert entry.receive(back(2, 3, row=blob(3)), 0.8) == [SampleTokens(0, 3, blob(3), (91, 92), 5)]


def test_drafts_are_committed_once_they_are_accepted() -> None:
    entry = with_drafts(91, 92)
    assert entry.committed == 2
    entry.receive(back(2, 3, row=blob(3)), 2.0)
    assert entry.committed == 3  # of the step that is picked, its first token

    entry.sampled((91, 77), 2.0)

    assert entry.committed == 4


def test_accepted_drafts_are_tokens_and_the_last_row_gives_one_more() -> None:
    entry = with_drafts(91, 92)
    entry.receive(back(2, 3, row=blob(3)), 2.0)

    actions = entry.sampled((91, 92, 93), 2.0)

    assert actions == [Emit(91), Emit(92), Emit(93), Embed(0, 5, (93,))]


def test_a_rejected_draft_raises_the_gen_and_is_overwritten() -> None:
    entry = with_drafts(91, 92)
    entry.receive(back(2, 3, row=blob(3)), 2.0)

    assert entry.sampled((91, 77), 2.0, ((78,),)) == [Emit(91), Emit(77), Embed(1, 4, (77, 78), 1)]
    assert entry.computed(blob(2), 2.1) == [sent(4, 2, LONE_STEP, gen=1)]
    assert entry.receive(back(2, 3, row=blob(3)), 2.2) == []
    assert entry.receive(back(4, 2, gen=1, row=blob(2)), 2.3) == [
        SampleTokens(1, 5, blob(2), (78,), 11)
    ]


def test_a_repeated_result_of_drafts_is_dropped() -> None:
    entry = with_drafts(91, 92)
    entry.receive(back(2, 3, row=blob(3)), 2.0)

    assert entry.receive(back(2, 3, row=blob(3)), 2.1) == []
    entry.sampled((91, 92, 93), 2.2)
    assert entry.receive(back(2, 3, row=blob(3)), 2.3) == []


def test_fewer_rows_than_drafts_are_refused() -> None:
    failed, _ = with_drafts(91, 92).receive(back(2, 3, row=blob(1)), 2.0)

    assert isinstance(failed, Failed)
    assert failed.code is FaultCode.RULES


def test_a_restart_drops_the_drafts() -> None:
    entry = with_drafts(91, 92)

    assert entry.receive(Gap(SESSION, EPOCH, 0, 2), 2.0) == [
        Forward(Cancel(SESSION, EPOCH, 1)),
        Embed(1, 2, (90,)),
    ]
    entry.computed(blob(1), 2.1)
    assert entry.receive(back(2, 3, row=blob(3)), 2.2) == []
    assert entry.receive(back(2, 1, gen=1, row=blob(1)), 2.3) == [
        SampleTokens(1, 3, blob(1), (), 11)
    ]


def test_a_restart_during_a_pick_keeps_its_tokens_and_computes_them_again() -> None:
    entry = with_drafts(91, 92)
    entry.receive(back(2, 3, row=blob(3)), 2.0)

    assert entry.receive(Gap(SESSION, EPOCH, 0, 1), 2.1) == [Forward(Cancel(SESSION, EPOCH, 1))]
    assert entry.sampled((91, 77), 2.2, ((78,),)) == [Emit(91), Emit(77), chunk(1, 1, (12, 90))]
    assert entry.computed(blob(2), 2.3) == [
        sent(1, 2, Flags.PREFILL, gen=1),
        chunk(1, 3, (91, 77)),
    ]


def test_a_stop_within_the_drafts_ends_the_answer_there() -> None:
    entry = with_drafts(91, 92)
    entry.receive(back(2, 3, row=blob(3)), 2.0)

    assert entry.sampled((91,), 2.0, stop=True) == [
        Emit(91),
        Done(FinishReason.STOP),
        Forward(Close(SESSION, EPOCH, keep=3)),
    ]


def test_tokens_up_to_the_limit_end_the_answer() -> None:
    entry = Entry(replace(TASK, ring=1, prompt=(11, 12), max_tokens=4), PACE)
    entry.open(0.0)
    entry.computed(None, 0.1)

    assert entry.sampled((90,), 0.2, ((91, 92),)) == [Emit(90), Embed(0, 2, (90, 91, 92), 2)]
    assert entry.computed(None, 0.3) == [SampleTokens(0, 3, None, (91, 92), 6)]
    assert entry.sampled((91, 92, 93), 0.4)[-2:] == [Done(FinishReason.LENGTH), Closed(())]


def lone(room: int, max_tokens: int = 9999) -> Entry:
    """An entry of a ring of one that has computed its prompt of two tokens."""
    task = replace(TASK, ring=1, prompt=(11, 12), max_tokens=max_tokens, context=9999)
    entry = Entry(task, PACE, room=room)
    entry.open(0.0)
    entry.computed(None, 0.1)
    return entry


def test_more_room_is_requested_before_there_is_none_and_once() -> None:
    entry = lone(room=2 + 2 + NEAR)

    first = entry.sampled((90,), 0.2)
    assert first == [Emit(90), Embed(0, 2, (90,))]
    entry.computed(None, 0.3)
    assert entry.sampled((91,), 0.4) == [Emit(91), Embed(0, 3, (91,))]
    entry.computed(None, 0.5)
    more = 4 + NEAR + QUANTUM
    assert entry.sampled((92,), 0.6) == [Emit(92), Reserve(more), Embed(0, 4, (92,))]
    entry.computed(None, 0.7)
    assert entry.sampled((93,), 0.8) == [Emit(93), Embed(0, 5, (93,))]


def test_no_more_room_is_requested_than_the_answer_may_take() -> None:
    entry = lone(room=4, max_tokens=3)

    assert Reserve(5) in entry.sampled((90,), 0.2)
    assert entry.grown() == []
    entry.computed(None, 0.3)
    assert not any(isinstance(each, Reserve) for each in entry.sampled((91,), 0.4))


def test_an_answer_waits_at_the_last_position_that_has_room() -> None:
    entry = lone(room=3)
    assert entry.sampled((90,), 0.2)[-1] == Embed(0, 2, (90,))
    assert (
        entry.computed(None, 0.3)
        == [Progress(2, 2), SampleTokens(0, 3, None, (), 9999, room=3)][1:]
    )

    assert entry.sampled((91,), 0.4) == [Emit(91)]
    assert entry.deadline is None
    assert entry.grown() == [Embed(0, 3, (91,))]
    assert entry.computed(None, 0.5) == [SampleTokens(0, 4, None, (), 9999, room=3 + QUANTUM)]


def test_drafts_wait_for_room_too() -> None:
    entry = lone(room=4)

    assert Embed(0, 2, (90, 91, 92), 2) not in entry.sampled((90,), 0.2, ((91, 92),))
    assert entry.grown() == [Embed(0, 2, (90, 91, 92), 2)]


def test_one_that_has_ended_needs_no_room() -> None:
    entry = lone(room=3)
    entry.sampled((90,), 0.2)
    entry.finish(CANCELLED, 0.3)

    assert entry.grown() == []


RESUME = Resume(SESSION, EPOCH, BASE.session, BASE.length, whole=True)


def test_a_prompt_starts_after_a_kept_prefix() -> None:
    entry = Entry(TASK, PACE)

    assert entry.open(0.0, BASE) == [Forward(RESUME), chunk(0, 2, (13, 14))]
    assert entry.computed(blob(2), 0.1) == [sent(2, 2, Flags.PREFILL), chunk(0, 4, (15,))]
    entry.computed(blob(1), 0.2)
    assert entry.receive(back(2, 2), 0.3) == [Progress(4, 5)]
    assert entry.reused == 2


def test_a_cache_that_is_taken_over_has_its_room() -> None:
    entry = Entry(TASK, PACE)
    entry.open(0.0, replace(BASE, whole=True, capacity=99))
    part = Entry(TASK, PACE)
    part.open(0.0, replace(BASE, whole=False, capacity=99))

    assert (entry.capacity, part.capacity) == (99, 4)


def test_a_generation_without_a_kept_prefix_reuses_nothing() -> None:
    entry = Entry(TASK, PACE)
    entry.open(0.0)

    assert (entry.reused, entry.lost, entry.kept) == (0, (), [])


def test_a_ring_of_two_sends_resume_and_cancel_to_the_other_rank() -> None:
    entry = Entry(replace(TASK, ring=2), PACE)

    assert entry.open(0.0, BASE)[0] == Forward(RESUME)
    assert entry.missed(0.1)[0] == Forward(Cancel(SESSION, EPOCH, 1))


def test_a_ring_of_one_sends_no_resume() -> None:
    entry = Entry(replace(TASK, ring=1), PACE)

    assert entry.open(0.0, BASE) == [chunk(0, 2, (13, 14))]


def test_a_rank_that_lost_the_prefix_makes_the_entry_restart_at_0() -> None:
    entry = Entry(TASK, PACE)
    entry.open(0.0, BASE)
    entry.computed(blob(2), 0.1)

    actions = entry.receive(Gap(SESSION, EPOCH, 0, 0), 0.3)

    assert actions == [Forward(Cancel(SESSION, EPOCH, 1))]
    assert entry.computed(blob(1), 0.4) == [chunk(1, 0, (11, 12))]
    assert entry.reused == 0


def test_only_positions_that_came_all_round_are_kept() -> None:
    entry = decoding()  # 11, 12 went round; 90 is on its way

    assert entry.finish(CANCELLED, 2.0)[-1] == Forward(Close(SESSION, EPOCH, keep=2))
    assert entry.kept == [11, 12]


def test_unverified_drafts_are_not_kept() -> None:
    entry = with_drafts(91, 92)
    entry.receive(back(2, 3, row=blob(3)), 2.0)

    assert entry.finish(CANCELLED, 2.0)[-1] == Forward(Close(SESSION, EPOCH, keep=3))
    assert entry.kept == [11, 12, 90]


@pytest.mark.parametrize(("max_crop", "keep"), [(None, 2), (40, 2), (0, 0)])
def test_a_row_in_flight_is_kept_if_caches_cannot_be_cropped(
    max_crop: int | None, keep: int
) -> None:
    entry = Entry(replace(TASK, prompt=(11, 12), max_crop=max_crop), PACE)
    entry.open(0.0)
    entry.computed(blob(2), 0.0)
    entry.receive(back(0, 2, row=blob(1)), 1.0)
    entry.sampled((90,), 1.0)

    assert entry.finish(CANCELLED, 2.0)[-1] == Forward(Close(SESSION, EPOCH, keep=keep))


@pytest.mark.parametrize(("drafts", "keep"), [((), 2), ((91,), 0)])
def test_of_rows_in_flight_a_sliding_window_is_cropped_by_one(
    drafts: tuple[int, ...], keep: int
) -> None:
    entry = Entry(replace(TASK, prompt=(11, 12), max_tokens=9, max_crop=40), PACE)
    entry.open(0.0)
    entry.computed(blob(2), 0.0)
    entry.receive(back(0, 2, row=blob(1)), 1.0)
    entry.sampled((90,), 1.0, (drafts,) if drafts else ())

    assert entry.finish(CANCELLED, 2.0)[-1] == Forward(Close(SESSION, EPOCH, keep=keep))


@pytest.mark.parametrize(("max_crop", "keep"), [(None, 2), (40, 0)])
def test_chunks_in_flight_are_too_much_for_a_sliding_window(
    max_crop: int | None, keep: int
) -> None:
    entry = Entry(replace(TASK, max_crop=max_crop), PACE)
    entry.open(0.0)
    entry.computed(blob(2), 0.1)
    entry.computed(blob(2), 0.2)
    entry.receive(back(0, 2), 0.5)

    assert entry.finish(CANCELLED, 2.0)[-1] == Forward(Close(SESSION, EPOCH, keep=keep))


def test_a_failed_generation_keeps_nothing() -> None:
    entry = decoding()

    entry.failed(FaultCode.MODEL, "no memory", 2.0)

    assert entry.kept == []


def test_the_close_says_whether_the_owner_asked() -> None:
    entry = Entry(replace(TASK, is_own=True), PACE)
    entry.open(0.0)

    assert entry.finish(CANCELLED, 2.0)[-1] == Forward(Close(SESSION, EPOCH, is_own=True))


def test_a_cache_that_cannot_be_cropped_makes_the_entry_restart_at_0() -> None:
    entry = Entry(TASK, PACE)
    entry.open(0.0, BASE)

    assert entry.missed(0.1) == [Forward(Cancel(SESSION, EPOCH, 1)), chunk(1, 0, (11, 12))]
    assert entry.reused == 0


def test_a_missed_job_of_a_closed_session_is_ignored() -> None:
    entry = Entry(TASK, PACE)
    entry.open(0.0, BASE)
    entry.finish(CANCELLED, 0.1)

    assert entry.missed(0.2) == []


@pytest.mark.parametrize(("said", "kept"), [(2, [11, 12]), (0, [])])
def test_only_what_every_rank_keeps_is_kept(said: int, kept: list[int]) -> None:
    entry = decoding()
    entry.finish(CANCELLED, 2.0)
    entry.receive(Close(SESSION, EPOCH, said, TALLIES), 2.2)

    assert entry.kept == kept


def test_nothing_is_kept_if_close_is_lost() -> None:
    entry = decoding()
    entry.finish(CANCELLED, 2.0)
    entry.expire(100.0)

    assert entry.kept == []


@pytest.mark.parametrize(("least", "keep"), [(None, 0), (3, 0), (2, 2)])
def test_short_or_unwanted_texts_are_not_kept(least: int | None, keep: int) -> None:
    entry = Entry(replace(TASK, prompt=(11, 12), keep_from=least), PACE)
    entry.open(0.0)
    entry.computed(blob(2), 0.0)
    entry.receive(back(0, 2, row=blob(1)), 1.0)

    assert entry.finish(CANCELLED, 2.0)[-1] == Forward(Close(SESSION, EPOCH, keep=keep))


@pytest.mark.parametrize(("whole", "keep"), [(True, 2), (False, 0)])
def test_a_copy_without_new_tokens_is_not_kept(whole: bool, keep: int) -> None:
    entry = Entry(TASK, PACE)
    entry.open(0.0, replace(BASE, whole=whole))

    assert entry.finish(CANCELLED, 0.1)[-1] == Forward(Close(SESSION, EPOCH, keep=keep))


def test_a_ring_of_one_sends_no_cancel() -> None:
    entry = Entry(replace(TASK, ring=1), PACE)
    entry.open(0.0, BASE)

    assert entry.missed(0.1) == [chunk(1, 0, (11, 12))]


STEPS = ((91, 92), (93, 94, 95), (96, 97))


def flying(*steps: tuple[int, ...], task: GenerationTask = TASK) -> Entry:
    """An entry with token 90 and these drafts in flight: at 2 with the first ones, at 5, at 8."""
    entry = Entry(replace(task, prompt=(11, 12), max_tokens=40), PACE)
    entry.open(0.0)
    entry.computed(blob(2), 0.0)
    entry.receive(back(0, 2, row=blob(1)), 1.0)
    entry.sampled((90,), 1.0, steps or STEPS)
    for number, step in enumerate(steps or STEPS):
        entry.computed(blob(len(step) + (number == 0)), 1.0)
    return entry


def test_draft_steps_follow_one_another_and_request_all_rows() -> None:
    entry = Entry(replace(TASK, prompt=(11, 12), max_tokens=40), PACE)
    entry.open(0.0)
    entry.computed(blob(2), 0.1)
    entry.receive(back(0, 2, row=blob(1)), 0.5)

    assert entry.sampled((90,), 0.6, STEPS) == [Emit(90), Embed(0, 2, (90, 91, 92), 2)]
    assert entry.computed(blob(3), 0.7) == [
        sent(2, 3, LONE_STEP),
        Embed(0, 5, (93, 94, 95), 2),
    ]
    assert entry.computed(blob(3), 0.7) == [sent(5, 3, Flags.NEED_ROW), Embed(0, 8, (96, 97), 1)]
    assert entry.computed(blob(2), 0.7) == [sent(8, 2, Flags.NEED_ROW)]


def test_a_step_that_confirms_the_next_one_leaves_it_in_flight() -> None:
    entry = flying()

    assert entry.receive(back(2, 3, row=blob(3)), 2.0) == [
        SampleTokens(0, 3, blob(3), (91, 92), 42, (93, 94, 95, 96, 97))
    ]
    assert entry.sampled((91, 92, 93), 2.0) == [Emit(91), Emit(92), Emit(93)]
    assert entry.deadline == 2.0 + PACE.patience_s
    assert entry.receive(back(5, 3, row=blob(3)), 2.1) == [
        SampleTokens(0, 6, blob(3), (94, 95), 42, (96, 97))
    ]
    assert entry.sampled((94, 95, 96), 2.1) == [Emit(94), Emit(95), Emit(96)]
    assert entry.receive(back(8, 2, row=blob(2)), 2.2) == [SampleTokens(0, 9, blob(2), (97,), 42)]
    assert entry.sampled((97, 98), 2.2) == [Emit(97), Emit(98), Embed(0, 10, (98,))]


def test_new_drafts_follow_those_in_flight() -> None:
    entry = flying()
    entry.receive(back(2, 3, row=blob(3)), 2.0)

    assert entry.sampled((91, 92, 93), 2.0, ((98, 99),))[-1] == Embed(0, 10, (98, 99), 1)
    assert entry.computed(blob(2), 2.1) == [sent(10, 2, Flags.NEED_ROW)]
    assert entry.receive(back(5, 3, row=blob(3)), 2.2) == [
        SampleTokens(0, 6, blob(3), (94, 95), 42, (96, 97, 98, 99))
    ]


@pytest.mark.parametrize(
    ("said", "pos"), [((77,), 3), ((91, 77), 4), ((91, 92, 77), 5)], ids=["1st", "2nd", "behind"]
)
def test_a_step_that_contradicts_the_next_one_ends_the_flight(
    said: tuple[int, ...], pos: int
) -> None:
    entry = flying()
    entry.receive(back(2, 3, row=blob(3)), 2.0)

    assert entry.sampled(said, 2.0, ((78,), (79, 80))) == [
        *map(Emit, said),
        Forward(Cancel(SESSION, EPOCH, 1)),
        Embed(1, pos, (77, 78), 1),
    ]
    assert entry.receive(back(5, 3, row=blob(3)), 2.1) == []
    assert entry.computed(blob(2), 2.2) == [
        sent(pos, 2, LONE_STEP, gen=1),
        Embed(1, pos + 2, (79, 80), 1),
    ]
    assert entry.receive(back(8, 2, row=blob(2)), 2.3) == []


def test_a_rejection_in_the_second_step_keeps_the_tokens_of_the_first() -> None:
    entry = flying()
    entry.receive(back(2, 3, row=blob(3)), 2.0)
    entry.sampled((91, 92, 93), 2.0)
    entry.receive(back(5, 3, row=blob(3)), 2.1)

    assert entry.sampled((94, 77), 2.1) == [
        Emit(94),
        Emit(77),
        Forward(Cancel(SESSION, EPOCH, 1)),
        Embed(1, 7, (77,)),
    ]


def test_drafts_that_were_not_injected_are_replaced_and_the_gen_stays() -> None:
    entry = Entry(replace(TASK, prompt=(11, 12), max_tokens=40), PACE)
    entry.open(0.0)
    entry.computed(blob(2), 0.1)
    entry.receive(back(0, 2, row=blob(1)), 0.5)
    entry.sampled((90,), 0.6, STEPS)
    entry.computed(blob(3), 0.7)  # the second step is being embedded, the third one waits

    assert entry.receive(back(2, 3, row=blob(3)), 0.8) == []
    assert entry.computed(blob(3), 0.9) == [
        sent(5, 3, Flags.NEED_ROW),
        SampleTokens(0, 3, blob(3), (91, 92), 42, (93, 94, 95)),
    ]
    assert entry.sampled((91, 92, 93), 1.0, ((86, 87),))[-1] == Embed(0, 8, (86, 87), 1)


def test_results_wait_for_the_running_job_and_for_the_next_embed() -> None:
    entry = flying()
    entry.receive(back(2, 3, row=blob(3)), 2.0)

    assert entry.receive(back(5, 3, row=blob(3)), 2.1) == []
    assert entry.sampled((91, 92, 93), 2.2, ((98, 99),))[-1] == Embed(0, 10, (98, 99), 1)
    assert entry.computed(blob(2), 2.3) == [
        sent(10, 2, Flags.NEED_ROW),
        SampleTokens(0, 6, blob(3), (94, 95), 42, (96, 97, 98, 99)),
    ]


def test_steps_are_picked_in_order_and_once() -> None:
    entry = flying()

    assert entry.receive(back(5, 3, row=blob(3)), 2.0) == []
    assert entry.receive(back(5, 3, row=blob(3)), 2.0) == []
    (first,) = entry.receive(back(2, 3, row=blob(3)), 2.1)
    assert isinstance(first, SampleTokens)
    assert first.pos == 3
    assert entry.receive(back(2, 3, row=blob(3)), 2.1) == []
    second = entry.sampled((91, 92, 93), 2.2)[-1]
    assert isinstance(second, SampleTokens)
    assert second.pos == 6
    assert entry.receive(back(5, 3, row=blob(3)), 2.3) == []


@pytest.mark.parametrize("pos", [2, 5], ids=["first", "second"])
def test_fewer_rows_than_a_step_in_flight_has_are_refused(pos: int) -> None:
    failed, _ = flying().receive(back(pos, 3, row=blob(2)), 2.0)

    assert isinstance(failed, Failed)
    assert failed.code is FaultCode.RULES


def test_rows_of_a_step_are_counted_during_a_pick_too() -> None:
    entry = flying()
    entry.receive(back(2, 3, row=blob(3)), 2.0)

    failed, _ = entry.receive(back(5, 3, row=blob(6)), 2.0)

    assert isinstance(failed, Failed)


def test_a_stop_in_a_flight_ends_the_answer_there() -> None:
    entry = flying()
    entry.receive(back(2, 3, row=blob(3)), 2.0)

    assert entry.sampled((91,), 2.0, stop=True) == [
        Emit(91),
        Done(FinishReason.STOP),
        Forward(Close(SESSION, EPOCH, keep=3)),
    ]
    assert entry.receive(back(5, 3, row=blob(3)), 2.1) == []
    assert entry.kept == [11, 12, 90]


def test_a_stop_in_a_confirmed_flight_keeps_what_came_all_round() -> None:
    entry = flying()
    entry.receive(back(2, 3, row=blob(3)), 2.0)

    actions = entry.sampled((91, 92, 93), 2.0, stop=True)

    assert actions[-1] == Forward(Close(SESSION, EPOCH, keep=5))


def test_the_end_in_a_flight_keeps_what_came_all_round() -> None:
    entry = flying()
    entry.receive(back(2, 3, row=blob(3)), 2.0)
    entry.sampled((91, 92, 93), 2.0)

    assert entry.finish(CANCELLED, 2.1)[-1] == Forward(Close(SESSION, EPOCH, keep=5))
    assert entry.kept == [11, 12, 90, 91, 92]


def test_the_end_in_a_flight_keeps_nothing_if_caches_cannot_be_cropped_far() -> None:
    entry = flying(task=replace(TASK, max_crop=32))
    entry.receive(back(2, 3, row=blob(3)), 2.0)
    entry.sampled((91, 92, 93), 2.0)

    assert entry.finish(CANCELLED, 2.1)[-1] == Forward(Close(SESSION, EPOCH))


def test_the_last_token_in_a_flight_ends_the_answer() -> None:
    entry = Entry(replace(TASK, prompt=(11, 12), max_tokens=4), PACE)
    entry.open(0.0)
    entry.computed(blob(2), 0.0)
    entry.receive(back(0, 2, row=blob(1)), 1.0)
    entry.sampled((90,), 1.0, ((91,), (92, 93)))
    entry.computed(blob(2), 1.0)
    entry.computed(blob(2), 1.0)
    entry.receive(back(2, 2, row=blob(2)), 2.0)
    entry.sampled((91, 92), 2.0)
    entry.receive(back(4, 2, row=blob(2)), 2.1)

    assert entry.sampled((93,), 2.1)[-2:] == [
        Done(FinishReason.LENGTH),
        Forward(Close(SESSION, EPOCH, keep=5)),
    ]


def test_a_gap_discards_the_whole_flight() -> None:
    entry = flying()

    assert entry.receive(Gap(SESSION, EPOCH, 0, 2), 2.0) == [
        Forward(Cancel(SESSION, EPOCH, 1)),
        Embed(1, 2, (90,)),
    ]
    assert entry.receive(Gap(SESSION, EPOCH, 0, 2), 2.0) == []  # what the second step met
    assert entry.computed(blob(1), 2.1) == [sent(2, 1, LONE_STEP, gen=1)]
    assert entry.receive(back(2, 1, gen=1, row=blob(1)), 2.2) == [
        SampleTokens(1, 3, blob(1), (), 42)
    ]


def test_a_gap_during_a_pick_keeps_its_tokens_and_no_draft() -> None:
    entry = flying()
    entry.receive(back(2, 3, row=blob(3)), 2.0)
    entry.receive(back(5, 3, row=blob(3)), 2.0)

    assert entry.receive(Gap(SESSION, EPOCH, 0, 5), 2.1) == [Forward(Cancel(SESSION, EPOCH, 1))]
    assert entry.sampled((91, 92, 93), 2.2, ((98, 99),))[-1] == chunk(1, 3, (91, 92))
    assert entry.computed(blob(2), 2.3) == [sent(3, 2, Flags.PREFILL, gen=1), Embed(1, 5, (93,))]


def test_patience_for_a_flight_starts_at_the_last_result() -> None:
    entry = flying()
    entry.receive(back(2, 3, row=blob(3)), 7.0)
    entry.sampled((91, 92, 93), 7.0)

    assert entry.expire(16.9) == []
    assert entry.expire(17.0) == [Forward(Cancel(SESSION, EPOCH, 1)), Embed(1, 5, (93,))]


def test_a_flight_is_limited_by_the_queue_of_a_rank() -> None:
    entry = flying((91,), *((each, each) for each in range(100, 100 + MAX_PENDING)))

    assert entry.receive(back(2, 2, row=blob(2)), 2.0) == [
        SampleTokens(0, 3, blob(2), (91,), 42, tuple(x for x in range(100, 115) for _ in range(2)))
    ]


@pytest.mark.parametrize(("max_crop", "max_drafts"), [(None, MAX_POSITION), (32, 31), (0, 0)])
def test_croppable_positions_limit_the_drafts(max_crop: int | None, max_drafts: int) -> None:
    entry = flying((91,), task=replace(TASK, max_crop=max_crop))

    (pick,) = entry.receive(back(2, 2, row=blob(2)), 2.0)

    assert isinstance(pick, SampleTokens)
    assert pick.max_drafts == max_drafts


def test_in_a_ring_of_one_a_flight_is_one_step() -> None:
    entry = Entry(replace(TASK, ring=1, prompt=(11, 12), max_tokens=40), PACE)
    entry.open(0.0)
    entry.computed(None, 0.1)

    assert entry.sampled((90,), 0.2, STEPS) == [Emit(90), Embed(0, 2, (90, 91, 92), 2)]
    assert entry.computed(None, 0.3) == [SampleTokens(0, 3, None, (91, 92), 42)]
    assert entry.sampled((91, 77), 0.4, STEPS)[-1] == Embed(1, 4, (77, 91, 92), 2)


def test_repeated_results_do_not_renew_the_patience() -> None:
    entry = flying()
    entry.receive(back(8, 2, row=blob(2)), 2.0)
    deadline = entry.deadline

    assert entry.receive(back(8, 2, row=blob(2)), 3.0) == []
    assert entry.deadline == deadline


def test_fewer_tokens_than_accepted_restart_after_the_last_one() -> None:
    entry = flying()
    entry.receive(back(2, 3, row=blob(3)), 2.0)

    assert entry.sampled((91,), 2.0) == [
        Emit(91),
        Forward(Cancel(SESSION, EPOCH, 1)),
        Embed(1, 3, (91,)),
    ]


def test_an_interrupted_session_keeps_what_was_all_round_the_ring() -> None:
    entry = decoding()

    assert entry.interrupt()

    assert entry.state is EntryState.CLOSED
    assert entry.kept == [11, 12]
    assert entry.receive(back(2, 1, row=blob(1)), 2.0) == []
    assert entry.deadline is None


def test_a_prompt_that_is_interrupted_keeps_its_finished_chunks() -> None:
    entry = Entry(TASK, PACE)
    entry.open(0.0)
    entry.computed(blob(2), 0.1)
    entry.receive(back(0, 2), 0.2)

    entry.interrupt()

    assert entry.kept == [11, 12]


def test_an_answer_that_waits_for_its_close_keeps_what_it_asked_to_keep() -> None:
    entry = decoding()
    entry.finish(CANCELLED, 2.0)

    assert not entry.interrupt()

    assert entry.kept == [11, 12]


def test_decode_steps_of_an_earlier_ring_are_computed_as_steps_again() -> None:
    task = replace(TASK, prompt=tuple(range(5 + 20)), given=20, max_tokens=9, ring=1)
    entry = Entry(task, replace(PACE, chunk=4))

    jobs, actions = list[Embed](), entry.open(0.0)
    while isinstance(job := actions[-1], Embed):
        jobs.append(job)
        actions = entry.computed(None, 0.0)

    assert [(job.pos, len(job.tokens)) for job in jobs] == [
        (0, 4),
        (4, 1),
        (5, 17),
        (22, 2),
        (24, 1),
    ]
    assert [job.pos in entry.given_steps for job in jobs] == [False, False, True, True, True]


def test_steps_computed_again_are_not_marked_as_prefill() -> None:
    entry = Entry(replace(TASK, given=2), PACE)
    actions, flags = entry.open(0.0), list[Flags]()
    while actions and isinstance(job := actions[-1], Embed):
        forward, *more = entry.computed(blob(len(job.tokens)), 0.0)
        assert isinstance(forward, Forward)
        assert isinstance(forward.message, Data)
        flags.append(forward.message.flags)
        if not more:
            more = entry.receive(back(job.pos, len(job.tokens)), 0.1)
        actions = more

    assert flags == [Flags.PREFILL, Flags.PREFILL, NO_FLAGS, Flags.NEED_ROW]
