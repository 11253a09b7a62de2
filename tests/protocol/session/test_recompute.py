"""After a loss, kept positions go round once more, for the lost layers only."""

from collections import deque
from dataclasses import replace
from math import ceil

import pytest

from meshllm.names import Span
from meshllm.protocol.drafting.window import MAX_STEP_ROWS
from meshllm.protocol.kv_cache.budget import BLOCK
from meshllm.protocol.kv_cache.prefix_index import Chunk, PrefixHit
from meshllm.protocol.session.actions import Embed, Progress
from meshllm.protocol.session.entry import Entry
from meshllm.protocol.session.messages import (
    Cancel,
    Data,
    Fault,
    FaultCode,
    Flags,
    Forward,
    Gap,
    Resume,
)
from meshllm.protocol.session.stage import (
    MAX_PENDING,
    MAX_RECOMPUTE_ROWS,
    Adopt,
    Compute,
    Free,
    Keep,
    Stage,
)
from tests.builders import entry as e
from tests.builders import stage as s

LOST = (Span(4, 8),)
CHUNKS = (Chunk(2, is_step=False), Chunk(4, is_step=True))
BASE = replace(e.BASE, length=4, chunks=CHUNKS, lost=LOST)


def recompute_of(pos: int, tokens: tuple[int, ...], *, is_step: bool, gen: int = 0) -> Embed:
    return Embed(gen, pos, tokens, 0, is_step, recomputes=True)


def begun(base: PrefixHit = BASE) -> Entry:
    entry = Entry(e.TASK, e.PACE)
    resume = Resume(e.SESSION, e.EPOCH, base.session, base.length, whole=True, lost=LOST)
    assert entry.open(0.0, base) == [Forward(resume), recompute_of(0, (11, 12), is_step=False)]
    return entry


def test_the_entry_recomputes_in_the_chunks_of_the_first_time() -> None:
    entry = begun()

    assert entry.computed(e.blob(2), 0.1) == [
        e.sent(0, 2, Flags.PREFILL | Flags.RECOMPUTE),
        recompute_of(2, (13, 14), is_step=True),
    ]
    assert entry.computed(e.blob(2), 0.2) == [e.sent(2, 2, Flags.RECOMPUTE)]
    before = entry.lost
    # The window of 2 is full; what follows does not wait for the last of them.
    assert entry.receive(e.back(0, 2), 0.3) == [Progress(2, 5), e.chunk(0, 4, (15,))]
    assert entry.computed(e.blob(1), 0.4) == [e.sent(4, 1, e.LAST_CHUNK)]
    entry.receive(e.back(2, 2), 0.5)
    assert (before, entry.lost, entry.reused) == (LOST, (), 4)


def test_a_gap_during_recomputation_computes_all_layers() -> None:
    entry = begun()
    entry.computed(e.blob(2), 0.1)
    entry.computed(e.blob(2), 0.2)

    actions = entry.receive(Gap(e.SESSION, e.EPOCH, 0, 0), 0.3)

    cancel = Forward(Cancel(e.SESSION, e.EPOCH, 1))
    assert actions == [cancel, e.chunk(1, 0, (11, 12))]
    assert (entry.lost, entry.reused) == ((), 0)


def test_a_second_loss_during_recomputation_keeps_all_positions_and_what_is_lost() -> None:
    entry = begun()
    entry.computed(e.blob(2), 0.1)
    entry.receive(e.back(0, 2), 0.2)

    assert entry.interrupt()
    assert entry.kept == [11, 12, 13, 14]
    assert entry.kept_chunks == [*CHUNKS]
    assert entry.lost == LOST


@pytest.mark.parametrize(("most", "rows"), [(17, [1, 17, 17, 5]), (40, [1, 39])])
def test_steps_are_recomputed_so_many_at_a_time(most: int, rows: list[int]) -> None:
    chunks = (Chunk(1, is_step=False), Chunk(40, is_step=True))
    prompt = tuple(range(41))
    entry = Entry(replace(e.TASK, prompt=prompt, recompute_rows=most), e.PACE)
    entry.open(0.0, replace(BASE, length=40, chunks=chunks))

    sent, end = list[int](), 0
    for each in rows:
        actions, end = entry.computed(e.blob(1), 0.1), end + each
        messages = [each.message for each in actions if isinstance(each, Forward)]
        sent += [each.rows for each in messages if isinstance(each, Data)]
        entry.receive(e.back(end - each, each), 0.2)
    assert sent == rows


STEPS = 24 * MAX_STEP_ROWS + 1
"""Decode steps of an answer that is resumed."""


def resumed(most: int = MAX_STEP_ROWS) -> tuple[Entry, Embed]:
    """An answer of a prompt of one token and so many steps, and its first job."""
    chunks = (Chunk(1, is_step=False), Chunk(STEPS, is_step=True))
    prompt = tuple(range(STEPS + 1))
    task = replace(e.TASK, prompt=prompt, given=STEPS, context=1024, recompute_rows=most)
    entry = Entry(task, replace(e.PACE, chunk=256))
    *_, job = entry.open(0.0, replace(BASE, length=STEPS, chunks=chunks))
    assert isinstance(job, Embed)
    return entry, job


def test_steps_to_recompute_fill_the_queues_of_the_ranks_whatever_the_window() -> None:
    entry, job = resumed()
    jobs, actions = [job], entry.computed(e.blob(1), 0.0)
    while isinstance(following := actions[-1], Embed):
        jobs.append(following)
        actions = entry.computed(e.blob(1), 0.0)

    assert len(jobs) == MAX_PENDING
    assert all(each.is_step and len(each.tokens) == MAX_STEP_ROWS for each in jobs[1:])


@pytest.mark.parametrize("most", [MAX_STEP_ROWS, MAX_RECOMPUTE_ROWS])
@pytest.mark.parametrize("trip", [2, 10])
def test_the_entry_waits_for_the_way_round_the_ring_once_not_after_every_few_rows(
    trip: int, most: int
) -> None:
    """In units of what a rank takes to recompute; the row that gives the next token is the last."""
    entry, first = resumed(most)
    job: Embed | None = first
    flight, sent, passed = deque[tuple[int, Embed]](), 0, 0
    while not (job is None and not flight):
        passed += 1
        if job is not None:
            actions, sent = entry.computed(e.blob(1), passed), sent + 1
            flight.append((passed + trip, job))
            job = next((each for each in actions if isinstance(each, Embed)), None)
        while flight and flight[0][0] <= passed:
            _, gone = flight.popleft()
            for each in entry.receive(e.back(gone.pos, len(gone.tokens)), passed):
                job = each if isinstance(each, Embed) else job

    assert sent == 1 + ceil((STEPS - 1) / most) + 1
    assert passed == sent + trip


PARTS = Chunk(3, is_step=False), Chunk(6, is_step=False), Chunk(12, is_step=True)
PARTLY = replace(BASE, length=12, chunks=PARTS, held=12)
TASK = replace(e.TASK, prompt=tuple(range(13)), context=64)


def asking(base: PrefixHit = PARTLY, ring: int = e.TASK.ring) -> tuple[Entry, Resume]:
    """An entry that has asked how many positions the lost layers hold."""
    entry = Entry(replace(TASK, ring=ring), e.PACE)
    fields = base.session, base.length, base.whole, base.lost, base.held
    asked = Resume(e.SESSION, e.EPOCH, *fields)
    assert entry.open(0.0, base) == [Forward(asked)]
    return entry, asked


@pytest.mark.parametrize(
    ("held", "start", "stop"),
    [(0, 0, 3), (2, 0, 3), (3, 3, 6), (5, 3, 6), (6, 6, 12), (8, 8, 12), (11, 11, 12)],
)
def test_recomputation_starts_behind_what_all_lost_layers_hold(
    held: int, start: int, stop: int
) -> None:
    entry, asked = asking()

    actions = entry.receive(replace(asked, held=held), 0.1)

    tokens = tuple(range(start, stop))
    assert actions == [recompute_of(start, tokens, is_step=start >= 6)]
    assert entry.lost == LOST
    assert entry.receive(replace(asked, held=held), 0.2) == []


def test_no_rank_can_raise_what_the_entry_holds_itself() -> None:
    entry, asked = asking(replace(PARTLY, held=4))

    (job,) = entry.receive(replace(asked, held=12), 0.1)

    assert isinstance(job, Embed)
    assert job.pos == 3


def test_nothing_is_recomputed_if_the_lost_layers_hold_all() -> None:
    entry, asked = asking()

    (job,) = entry.receive(asked, 0.1)

    assert job == Embed(0, 12, (12,), 0, is_step=False)
    assert entry.lost == ()


def test_what_a_ring_of_one_was_handed_over_needs_no_question() -> None:
    entry = Entry(replace(TASK, ring=1), e.PACE)

    assert entry.open(0.0, replace(PARTLY, held=7)) == [
        recompute_of(7, tuple(range(7, 12)), is_step=True)
    ]


def test_an_answer_that_does_not_come_costs_the_patience_and_all_rows() -> None:
    entry, _ = asking()
    due = entry.deadline
    assert due is not None

    cancel, job = entry.expire(due)

    assert cancel == Forward(Cancel(e.SESSION, e.EPOCH, 1))
    assert isinstance(job, Embed)
    assert (job.pos, job.recomputes, entry.lost) == (0, False, ())


def test_a_gap_ends_the_question() -> None:
    entry, asked = asking()

    _, job = entry.receive(Gap(e.SESSION, e.EPOCH, 0, 0), 0.1)

    assert isinstance(job, Embed)
    assert (job.pos, job.recomputes) == (0, False)
    assert entry.receive(asked, 0.2) == []


def stage_of(span: Span, *, keeps: bool = True, held: int = 0) -> Stage:
    """A middle rank; it keeps 4 positions of session ONE, of which all layers hold some."""
    index = s.shelf_of(9)
    if keeps:
        index.put(s.ONE, 4, 4, 0.0)
    return Stage(1, 3, epoch=s.EPOCH, index=index, span=span, held={s.ONE: held}.__getitem__)


@pytest.mark.parametrize(
    ("span", "asked", "told"),
    [
        (Span(4, 8), 4, 3),
        (Span(7, 9), 2, 2),
        (Span(0, 4), 4, 4),
        (Span(8, 9), 4, 4),
        (Span(4, 8), 0, 0),
    ],
    ids=["fewer", "more", "before the lost", "behind them", "not asked"],
)
def test_a_rank_lowers_what_lost_layers_hold_to_its_own(span: Span, asked: int, told: int) -> None:
    stage = stage_of(span, held=3)

    *_, forward = stage.receive(replace(RESUME, held=asked), 1.0)

    assert forward == Forward(replace(RESUME, held=told))


def test_a_rank_begins_with_what_was_handed_over_of_its_layers() -> None:
    index = s.shelf_of(9)
    index.put(s.ONE, 3, 3, 0.0, is_lost=True)
    stage = Stage(1, 3, epoch=s.EPOCH, index=index, span=Span(4, 8))

    assert stage.receive(RESUME, 1.0) == [Adopt(s.TWO, s.ONE, 4, whole=True), Forward(RESUME)]

    assert not index.holds(s.ONE)
    (job,) = stage.receive(recompute(0, 2, blob=True), 1.1)
    assert isinstance(job, Compute)
    assert job.recomputes


def test_what_was_handed_over_is_freed_if_there_is_no_room_for_the_session() -> None:
    index = s.shelf_of(1)
    index.put(s.ONE, 3, 3, 0.0, is_lost=True)
    stage = Stage(1, 3, epoch=s.EPOCH, index=index, span=Span(4, 8), context=4096)
    long = replace(RESUME, length=4 * BLOCK)

    assert stage.receive(long, 1.0) == [Free(s.ONE), Forward(long)]
    assert stage.budget.live_bytes == 0


RESUME = Resume(s.TWO, s.EPOCH, s.ONE, 4, whole=True, lost=LOST)


def recompute(pos: int, rows: int, *, blob: bool) -> Data:
    flags = Flags.RECOMPUTE | Flags.PREFILL
    return Data(s.TWO, s.EPOCH, 0, pos, rows, flags, s.blob(rows) if blob else None)


@pytest.mark.parametrize(
    ("span", "keep"),
    [(Span(0, 4), 2), (Span(2, 6), 2), (Span(4, 8), 0), (Span(8, 12), 0)],
    ids=["before the lost", "with some of them", "all of them", "behind them"],
)
def test_a_rank_sends_rows_only_in_front_of_a_lost_layer(span: Span, keep: int) -> None:
    stage = stage_of(span)
    assert stage.receive(RESUME, 1.0)[0] == Adopt(s.TWO, s.ONE, 4, whole=True)

    (job,) = stage.receive(recompute(0, 2, blob=True), 1.1)
    assert isinstance(job, Compute)
    assert (job.recomputes, job.is_step, job.keep) == (True, False, keep)
    rows = s.blob(2) if keep else None
    sent = replace(recompute(0, 2, blob=True), blob=rows)
    assert stage.computed(s.TWO, rows, 1.2, s.SPENT) == [Forward(sent)]
    (job,) = stage.receive(s.data(4, session=s.TWO), 1.3)
    assert job == s.compute(4, 1, 1, s.TWO)  # kv_len is that of the Resume


def test_a_rank_whose_layers_are_all_new_starts_with_an_empty_cache() -> None:
    stage = stage_of(Span(4, 8), keeps=False)

    assert stage.receive(RESUME, 1.0) == [Forward(RESUME)]
    (job,) = stage.receive(recompute(0, 2, blob=True), 1.1)
    assert isinstance(job, Compute)
    assert job.recomputes
    assert stage.budget.live_bytes > 0


@pytest.mark.parametrize("span", [Span(3, 8), Span(8, 12), Span(0, 0)])
def test_a_rank_that_should_have_kept_layers_asks_for_all_rows(span: Span) -> None:
    stage = stage_of(span, keeps=False)
    stage.receive(RESUME, 1.0)

    gap = Forward(Gap(s.TWO, s.EPOCH, 0, 0))
    assert stage.receive(recompute(0, 2, blob=True), 1.1) == [gap]
    assert stage.receive(s.data(4, session=s.TWO), 1.2) == [gap]


def test_a_resume_beyond_the_context_takes_no_room() -> None:
    index = s.shelf_of(2)
    index.put(s.ONE, 4, 4, 0.0)
    stage = Stage(1, 3, epoch=s.EPOCH, index=index, span=Span(4, 8), context=BLOCK)
    resume = replace(RESUME, base=s.THREE, length=BLOCK + 1)

    assert stage.receive(resume, 1.0) == [Forward(resume)]

    assert (stage.budget.live_bytes, index.holds(s.ONE)) == (0, True)
    gap = Forward(Gap(s.TWO, s.EPOCH, 0, 0))
    assert stage.receive(recompute(0, 2, blob=True), 1.1) == [gap]


def test_recomputation_beyond_the_resumed_positions_breaks_the_rules() -> None:
    stage = stage_of(Span(4, 8))
    stage.receive(RESUME, 1.0)

    kept, fault = stage.receive(recompute(3, 2, blob=True), 1.1)
    assert isinstance(kept, Keep | Free)
    assert isinstance(fault, Forward)
    assert isinstance(fault.message, Fault)
    assert fault.message.code is FaultCode.RULES
    assert stage.budget.live_bytes == 0


@pytest.mark.parametrize(
    ("rows", "is_refused"), [(MAX_RECOMPUTE_ROWS, False), (MAX_RECOMPUTE_ROWS + 1, True)]
)
def test_the_steps_to_recompute_are_limited(rows: int, *, is_refused: bool) -> None:
    index = s.shelf_of(2 * MAX_RECOMPUTE_ROWS)
    stage = Stage(1, 3, epoch=s.EPOCH, index=index, span=Span(4, 8))
    stage.receive(replace(RESUME, length=rows), 1.0)

    *_, last = stage.receive(Data(s.TWO, s.EPOCH, 0, 0, rows, Flags.RECOMPUTE, s.blob(rows)), 1.1)

    if is_refused:
        assert isinstance(last, Forward)
        text = f"Step of {rows} rows; the limit is {MAX_RECOMPUTE_ROWS}"
        assert last.message == Fault(s.TWO, s.EPOCH, FaultCode.RULES, 1, text)
    else:
        assert isinstance(last, Compute)
        assert (last.rows, last.is_step, last.recomputes) == (rows, True, True)


def test_rows_of_positions_to_recompute_are_optional() -> None:
    stage = stage_of(Span(8, 12))
    stage.receive(RESUME, 1.0)

    (job,) = stage.receive(recompute(0, 4, blob=False), 1.1)
    assert isinstance(job, Compute)
    assert job.blob is None


def test_a_lost_cache_that_cannot_be_recomputed_is_a_gap() -> None:
    stage = stage_of(Span(4, 8))
    stage.receive(RESUME, 1.0)
    stage.receive(recompute(0, 2, blob=True), 1.1)

    assert stage.missed(s.TWO) == [Forward(Gap(s.TWO, s.EPOCH, 0, 0))]


def test_what_is_on_the_way_when_a_cache_is_missed_is_a_gap_too() -> None:
    stage, gap = stage_of(Span(4, 8)), Forward(Gap(s.TWO, s.EPOCH, 0, 0))
    stage.receive(RESUME, 1.0)
    stage.receive(recompute(0, 1, blob=True), 1.1)
    assert stage.receive(recompute(1, 1, blob=True), 1.1) == []  # queued

    assert stage.missed(s.TWO) == [gap]

    assert stage.receive(recompute(2, 2, blob=True), 1.2) == [gap]
    again = s.data(0, rows=4, gen=1, session=s.TWO, flags=Flags.PREFILL)
    (job,) = stage.receive(again, 1.3)
    assert isinstance(job, Compute)
    assert (job.pos, job.rows, job.recomputes) == (0, 4, False)


def test_a_rank_without_room_for_new_layers_leaves_a_gap() -> None:
    stage = Stage(1, 3, epoch=s.EPOCH, index=s.shelf_of(0), span=Span(4, 8))

    assert stage.receive(RESUME, 1.0) == [Forward(RESUME)]
    gap = Forward(Gap(s.TWO, s.EPOCH, 0, 0))
    assert stage.receive(recompute(0, 2, blob=True), 1.1) == [gap]


@pytest.mark.parametrize("ring", [1, 2])
def test_an_entry_is_alone_in_a_ring_of_one(ring: int) -> None:
    entry = Entry(replace(e.TASK, ring=ring), e.PACE)

    assert entry.is_alone is (ring == 1)
