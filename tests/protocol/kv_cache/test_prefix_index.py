"""What is kept: the latest, within the room, and only for a while."""

from meshllm.names import SessionId
from meshllm.protocol.kv_cache.budget import BLOCK, KvBudget
from meshllm.protocol.kv_cache.prefix_index import MAX_KEPT, MAX_STATES, Shelf, shelf_for
from tests.protocol.kv_cache.test_budget import room

A, B, C = (SessionId(name * 16) for name in (b"a", b"b", b"c"))


def shelf_of(blocks: int, most_bytes: int | None = None, idle_s: float = 60.0) -> Shelf:
    return Shelf(KvBudget([room(blocks)]), most_bytes, idle_s=idle_s)


def test_what_was_used_last_stays() -> None:
    shelf = shelf_of(2)
    shelf.put(A, 4, 4, 0.0)
    shelf.put(B, 4, 4, 1.0)
    shelf.take(A, 2, 2.0, whole=False)

    assert shelf.put(C, 6, 6, 3.0) == [B]
    assert shelf.take(A, 4, 4.0, whole=True)


def test_nothing_goes_for_what_has_no_room_itself() -> None:
    shelf = shelf_of(1)
    shelf.put(A, 10, 10, 0.0)

    assert shelf.put(B, 11, BLOCK + 1, 1.0) == [B]
    assert shelf.put(C, 0, 5, 1.0) == [C]
    assert shelf.take(A, 10, 2.0, whole=False)


def test_an_owner_may_bind_what_is_kept() -> None:
    shelf = shelf_of(9, 2 * BLOCK)
    shelf.put(A, 1, 1, 0.0)
    shelf.put(B, 1, 1, 0.0)

    assert shelf.put(C, 1, 2 * BLOCK + 1, 0.0) == [C]
    assert shelf.put(C, 1, 1, 0.0) == [A]
    assert shelf.budget.kept_bytes == 2 * BLOCK


def test_a_shelf_of_nothing_keeps_nothing() -> None:
    shelf = shelf_of(9, 0)

    assert not shelf.keeps
    assert shelf.put(A, 1, 1, 0.0) == [A]
    assert shelf_of(9).keeps


def test_the_oldest_are_evicted_for_a_session() -> None:
    shelf = shelf_of(4)
    for session in (A, B, C):
        shelf.put(session, 1, 1, 0.0)
    shelf.budget.reserve(SessionId(b"x" * 16), 3 * BLOCK)

    assert shelf.make_room() == [A, B]
    assert shelf.make_room() == []
    assert shelf.budget.kept_bytes == BLOCK


def test_what_is_about_to_be_used_is_spared() -> None:
    shelf = shelf_of(2)
    shelf.put(A, 1, 1, 0.0)
    shelf.put(B, 1, 1, 0.0)
    shelf.budget.reserve(SessionId(b"x" * 16), 2 * BLOCK)

    assert shelf.make_room(spare=A) == [B]
    assert shelf.budget.is_over


def test_there_is_a_most_of_sessions_however_short() -> None:
    shelf = shelf_of(1 << 20)
    gone = [shelf.put(SessionId(number.to_bytes(16)), 1, 1, 0.0) for number in range(MAX_KEPT + 1)]

    assert gone == [[]] * MAX_KEPT + [[SessionId(bytes(16))]]


def test_a_session_that_is_asked_for_lives_longer() -> None:
    shelf = shelf_of(9)
    shelf.put(A, 1, 1, 0.0)
    shelf.put(B, 1, 1, 10.0)
    shelf.take(A, 1, 30.0, whole=False)

    assert shelf.deadline == 70.0
    assert shelf.expire(70.0) == [B]
    assert shelf.expire(90.0) == [A]
    assert shelf.budget.kept_bytes == 0
    assert shelf.expire(900.0) == []


def test_nothing_kept_has_no_deadline() -> None:
    assert shelf_of(9).deadline is None


def test_no_more_is_given_than_is_there() -> None:
    shelf = shelf_of(1)
    shelf.put(A, 4, 9, 0.0)

    assert not shelf.take(A, 5, 0.0, whole=True)
    assert not shelf.take(B, 1, 0.0, whole=True)
    assert shelf.take(A, 4, 0.0, whole=True) == 9
    assert not shelf.take(A, 4, 0.0, whole=True)
    assert shelf.budget.kept_bytes == 0


def test_states_are_few() -> None:
    for slack, most in ((0, MAX_STATES), (32, MAX_KEPT), (None, MAX_KEPT)):
        shelf = shelf_for(KvBudget([room(1 << 20)]), None, slack)
        gone = [shelf.put(SessionId(number.to_bytes(16)), 1, 1, 0.0) for number in range(most + 1)]
        assert sum(map(len, gone)) == 1
