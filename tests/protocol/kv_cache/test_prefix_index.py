"""Prefix cache eviction: least recently used, over budget, or idle."""

import pytest

from meshllm.names import SessionId
from meshllm.protocol.kv_cache.budget import BLOCK, KvBudget
from meshllm.protocol.kv_cache.prefix_index import (
    MAX_KEPT,
    MAX_STATES,
    RESUME_S,
    Chunk,
    PrefixIndex,
    add_chunk,
    crop_chunks,
    last_chunk_rows,
    prefix_index_for,
)
from tests.builders.rooms import room

A, B, C = (SessionId(name * 16) for name in (b"a", b"b", b"c"))


def shelf_of(blocks: int, most_bytes: int | None = None, idle_s: float = 60.0) -> PrefixIndex:
    return PrefixIndex(KvBudget([room(blocks)]), most_bytes, idle_s=idle_s)


def test_the_most_recently_used_stays() -> None:
    index = shelf_of(2)
    index.put(A, 4, 4, 0.0)
    index.put(B, 4, 4, 1.0)
    index.take(A, 2, 2.0, whole=False)

    assert index.put(C, 6, 6, 3.0) == [B]
    assert index.take(A, 4, 4.0, whole=True)


def test_a_session_has_the_name_of_the_one_that_it_took_over_while_it_is_kept() -> None:
    index = shelf_of(2)
    index.put(B, 4, 4, 0.0, is_lost=True)

    index.name(B, A, 3)
    index.name(C, A, 3)  # not kept
    assert [index.name_of(each, 3) for each in (A, B, C)] == [B, B, C]
    assert index.name_of(A, 4) == A  # they may differ there

    assert index.take(B, 4, 1.0, whole=True)
    assert index.name_of(A, 3) == A
    index.put(B, 4, 4, 2.0, is_lost=True)
    index.name(B, A, 3)
    index.clear()
    assert index.name_of(A, 3) == A


def test_nothing_is_evicted_for_a_session_that_does_not_fit() -> None:
    index = shelf_of(1)
    index.put(A, 10, 10, 0.0)

    assert index.put(B, 11, BLOCK + 1, 1.0) == [B]
    assert index.put(C, 0, 5, 1.0) == [C]
    assert index.take(A, 10, 2.0, whole=False)


def test_the_kept_bytes_can_be_limited() -> None:
    index = shelf_of(9, 2 * BLOCK)
    index.put(A, 1, 1, 0.0)
    index.put(B, 1, 1, 0.0)

    assert index.put(C, 1, 2 * BLOCK + 1, 0.0) == [C]
    assert index.put(C, 1, 1, 0.0) == [A]
    assert index.budget.kept_bytes == 2 * BLOCK


def test_a_limit_of_0_bytes_keeps_nothing() -> None:
    index = shelf_of(9, 0)

    assert not index.keeps
    assert index.put(A, 1, 1, 0.0) == [A]
    assert shelf_of(9).keeps


def test_the_oldest_are_evicted_for_a_running_session() -> None:
    index = shelf_of(4)
    for session in (A, B, C):
        index.put(session, 1, 1, 0.0)
    index.budget.reserve(SessionId(b"x" * 16), 3 * BLOCK)

    assert index.make_room() == [A, B]
    assert index.make_room() == []
    assert index.budget.kept_bytes == BLOCK


def test_the_spared_session_is_not_evicted() -> None:
    index = shelf_of(2)
    index.put(A, 1, 1, 0.0)
    index.put(B, 1, 1, 0.0)
    index.budget.reserve(SessionId(b"x" * 16), 2 * BLOCK)

    assert index.make_room(spare=A) == [B]
    assert index.budget.is_exceeded


def test_the_number_of_kept_sessions_is_limited() -> None:
    index = shelf_of(1 << 20)
    gone = [index.put(SessionId(number.to_bytes(16)), 1, 1, 0.0) for number in range(MAX_KEPT + 1)]

    assert gone == [[]] * MAX_KEPT + [[SessionId(bytes(16))]]


def put_many(index: PrefixIndex, count: int, first: int = 0, *, is_own: bool = False) -> None:
    for number in range(first, first + count):
        index.put(SessionId(number.to_bytes(16)), 1, 1, 0.0, is_own=is_own)


def test_others_do_not_push_out_the_share_of_the_owner() -> None:
    index, half = shelf_of(1 << 20), MAX_KEPT // 2
    index.put(A, 1, 1, 0.0, is_own=True)
    put_many(index, half, is_own=True)  # one more than its share
    put_many(index, 2 * MAX_KEPT, first=half)

    assert not index.holds(A)
    assert all(index.holds(SessionId(number.to_bytes(16))) for number in range(half))
    assert index.holds(SessionId((half + 2 * MAX_KEPT - 1).to_bytes(16)))


def test_the_sessions_of_the_owner_may_take_all_memory() -> None:
    index = shelf_of(4)
    index.put(B, 1, 1, 0.0, is_own=True)
    index.put(A, 1, 3 * BLOCK, 0.0, is_own=True)

    assert index.put(C, 1, 1, 0.0) == [C]
    assert index.holds(A)
    assert index.holds(B)


def test_the_owner_evicts_its_own_sessions_in_their_order() -> None:
    index = shelf_of(3)
    for session in (A, B, C):
        index.put(session, 1, 1, 0.0, is_own=True)
    index.take(A, 1, 1.0, whole=False)

    assert index.put(SessionId(b"d" * 16), 1, 1, 2.0, is_own=True) == [B]


def test_a_running_session_takes_the_share_of_the_owner_last() -> None:
    index = shelf_of(4)
    index.put(A, 1, 1, 0.0, is_own=True)
    index.put(B, 1, 1, 0.0)
    index.put(C, 1, 1, 0.0)
    index.budget.reserve(SessionId(b"x" * 16), 2 * BLOCK)

    assert index.make_room() == [B]
    assert index.free(BLOCK) == [C]
    assert index.free(2 * BLOCK) == [A]
    assert index.free(2 * BLOCK) == []


def test_kept_sessions_make_room_for_an_urgent_loan() -> None:
    index, taken = shelf_of(4), list[str]()
    assert index.budget.lend(2 * BLOCK, lambda: taken.append("all"), is_urgent=True)

    assert index.put(A, 1, 1, 0.0) == []
    assert index.put(B, 1, BLOCK + 1, 1.0) == [A]
    index.budget.reserve(SessionId(b"x" * 16), BLOCK)
    assert index.make_room() == [B]
    assert not taken
    index.budget.reserve(SessionId(b"x" * 16), 3 * BLOCK)
    assert taken == ["all"]


def test_an_owner_that_is_not_the_entry_any_more_has_no_share() -> None:
    index = shelf_of(2)
    index.put(A, 1, 1, 0.0, is_own=True)
    index.put(B, 1, 1, 0.0)
    index.clear_ownership()

    assert index.put(C, 1, 1, 0.0) == [A]


def test_sessions_of_a_lost_ring_are_not_limited_in_bytes_until_they_should_have_gone_on() -> None:
    index = shelf_of(9, BLOCK, idle_s=1000.0)
    index.put(A, 1, 1, 0.0)

    assert index.put(B, 1, 2 * BLOCK, 1.0, is_lost=True) == []
    assert index.put(C, 1, 1, 2.0, is_lost=True) == []
    assert index.make_room() == []
    assert index.deadline == 1.0 + RESUME_S
    assert index.expire(1.0 + RESUME_S) == [B]
    assert index.expire(2.0 + RESUME_S) == [A]
    assert index.deadline == 2.0 + RESUME_S + 1000.0
    assert index.budget.kept_bytes == BLOCK


def test_sessions_of_a_lost_ring_are_evicted_last() -> None:
    index = shelf_of(3)
    for session in (A, B):
        index.put(session, 1, 1, 0.0, is_lost=True)
    index.put(C, 1, 1, 1.0, is_own=True)

    assert index.move(KvBudget([room(1)])) == [C, A]
    assert index.holds(B)


def test_copies_do_not_postpone_when_a_session_of_a_lost_ring_should_have_gone_on() -> None:
    index = shelf_of(9, 0)
    index.put(A, 1, 1, 0.0, is_lost=True)

    assert index.take(A, 1, 50.0, whole=False)
    assert index.expire(RESUME_S) == [A]
    assert index.deadline is None


def test_use_postpones_the_eviction() -> None:
    index = shelf_of(9)
    index.put(A, 1, 1, 0.0)
    index.put(B, 1, 1, 10.0)
    index.take(A, 1, 30.0, whole=False)

    assert index.deadline == 70.0
    assert index.expire(70.0) == [B]
    assert index.expire(90.0) == [A]
    assert index.budget.kept_bytes == 0
    assert index.expire(900.0) == []


def test_nothing_kept_has_no_deadline() -> None:
    assert shelf_of(9).deadline is None


def test_no_more_positions_are_returned_than_are_kept() -> None:
    index = shelf_of(1)
    index.put(A, 4, 9, 0.0)

    assert not index.take(A, 5, 0.0, whole=True)
    assert not index.take(B, 1, 0.0, whole=True)
    assert index.take(A, 4, 0.0, whole=True) == 9
    assert not index.take(A, 4, 0.0, whole=True)
    assert index.budget.kept_bytes == 0


def test_fewer_recurrent_states_are_kept() -> None:
    for max_crop, most in ((0, MAX_STATES), (32, MAX_KEPT), (None, MAX_KEPT)):
        index = prefix_index_for(KvBudget([room(1 << 20)]), None, max_crop)
        gone = [index.put(SessionId(number.to_bytes(16)), 1, 1, 0.0) for number in range(most + 1)]
        assert sum(map(len, gone)) == 1


def test_a_model_keeps_as_much_as_is_configured() -> None:
    for most_bytes, resumes in ((0, False), (BLOCK, True)):
        index = prefix_index_for(KvBudget([room(9)]), most_bytes, None, resumes=resumes)

        assert (index.keeps, index.resumes) == (most_bytes > 0, resumes)
        assert index.put(A, 1, BLOCK + 1, 0.0) == [A]


def test_a_smaller_budget_evicts_the_least_recently_used() -> None:
    index = shelf_of(3)
    for number, session in enumerate((A, B)):
        index.put(session, 1, 1, float(number))

    assert index.move(KvBudget([room(1)])) == [A]
    assert not index.holds(A)
    assert index.holds(B)
    assert index.budget.kept_bytes == KvBudget([room(1)]).rooms[0].cost(256).held
    assert index.take(B, 1, 2.0, whole=True)


def test_all_sessions_can_be_evicted() -> None:
    index = shelf_of(9)
    index.put(A, 4, 4, 0.0)
    index.put(B, 4, 4, 0.0)

    index.clear()
    assert not index.holds(A)
    assert index.budget.kept_bytes == 0


def test_chunks_tell_how_positions_were_computed() -> None:
    chunks = add_chunk([], 0, 8, is_step=False)
    chunks = add_chunk(chunks, 8, 12, is_step=False)
    for stop in (13, 14):
        chunks = add_chunk(chunks, stop - 1, stop, is_step=True)

    prompt = [Chunk(8, is_step=False), Chunk(12, is_step=False)]
    assert chunks == [*prompt, Chunk(14, is_step=True)]
    assert crop_chunks(chunks, 12) == prompt
    assert crop_chunks(chunks, 9) == [Chunk(8, is_step=False), Chunk(9, is_step=False)]
    assert crop_chunks(chunks, 0) == []


def test_rows_that_replace_others_replace_their_chunks() -> None:
    chunks = [Chunk(8, is_step=False), Chunk(14, is_step=True)]

    assert add_chunk(chunks, 10, 11, is_step=True) == [chunks[0], Chunk(11, is_step=True)]
    assert add_chunk(chunks, 0, 3, is_step=False) == [Chunk(3, is_step=False)]


@pytest.mark.parametrize(
    ("chunks", "rows"),
    [
        ((), None),
        ((Chunk(5, is_step=False),), 5),
        ((Chunk(5, is_step=False), Chunk(12, is_step=False)), 7),
        ((Chunk(5, is_step=False), Chunk(6, is_step=False)), 5),
        ((Chunk(9, is_step=True), Chunk(12, is_step=False)), 3),
        ((Chunk(5, is_step=False), Chunk(12, is_step=True)), None),
        (tuple(Chunk(stop, is_step=False) for stop in (9, 12, 15)), 3),
        (tuple(Chunk(stop, is_step=False) for stop in (9, 12, 13)), 3),
    ],
)
def test_the_last_chunks_tell_the_pace_of_a_prompt(
    chunks: tuple[Chunk, ...], rows: int | None
) -> None:
    assert last_chunk_rows(chunks) == rows
