"""Prefix cache eviction: least recently used, over budget, or idle."""

from meshllm.names import SessionId
from meshllm.protocol.kv_cache.budget import BLOCK, KvBudget
from meshllm.protocol.kv_cache.prefix_index import MAX_KEPT, MAX_STATES, Shelf, shelf_for
from tests.protocol.kv_cache.test_budget import room

A, B, C = (SessionId(name * 16) for name in (b"a", b"b", b"c"))


def shelf_of(blocks: int, most_bytes: int | None = None, idle_s: float = 60.0) -> Shelf:
    return Shelf(KvBudget([room(blocks)]), most_bytes, idle_s=idle_s)


def test_the_most_recently_used_stays() -> None:
    shelf = shelf_of(2)
    shelf.put(A, 4, 4, 0.0)
    shelf.put(B, 4, 4, 1.0)
    shelf.take(A, 2, 2.0, whole=False)

    assert shelf.put(C, 6, 6, 3.0) == [B]
    assert shelf.take(A, 4, 4.0, whole=True)


def test_nothing_is_evicted_for_a_session_that_does_not_fit() -> None:
    shelf = shelf_of(1)
    shelf.put(A, 10, 10, 0.0)

    assert shelf.put(B, 11, BLOCK + 1, 1.0) == [B]
    assert shelf.put(C, 0, 5, 1.0) == [C]
    assert shelf.take(A, 10, 2.0, whole=False)


def test_the_kept_bytes_can_be_limited() -> None:
    shelf = shelf_of(9, 2 * BLOCK)
    shelf.put(A, 1, 1, 0.0)
    shelf.put(B, 1, 1, 0.0)

    assert shelf.put(C, 1, 2 * BLOCK + 1, 0.0) == [C]
    assert shelf.put(C, 1, 1, 0.0) == [A]
    assert shelf.budget.kept_bytes == 2 * BLOCK


def test_a_limit_of_0_bytes_keeps_nothing() -> None:
    shelf = shelf_of(9, 0)

    assert not shelf.keeps
    assert shelf.put(A, 1, 1, 0.0) == [A]
    assert shelf_of(9).keeps


def test_the_oldest_are_evicted_for_a_running_session() -> None:
    shelf = shelf_of(4)
    for session in (A, B, C):
        shelf.put(session, 1, 1, 0.0)
    shelf.budget.reserve(SessionId(b"x" * 16), 3 * BLOCK)

    assert shelf.make_room() == [A, B]
    assert shelf.make_room() == []
    assert shelf.budget.kept_bytes == BLOCK


def test_the_spared_session_is_not_evicted() -> None:
    shelf = shelf_of(2)
    shelf.put(A, 1, 1, 0.0)
    shelf.put(B, 1, 1, 0.0)
    shelf.budget.reserve(SessionId(b"x" * 16), 2 * BLOCK)

    assert shelf.make_room(spare=A) == [B]
    assert shelf.budget.is_over


def test_the_number_of_kept_sessions_is_limited() -> None:
    shelf = shelf_of(1 << 20)
    gone = [shelf.put(SessionId(number.to_bytes(16)), 1, 1, 0.0) for number in range(MAX_KEPT + 1)]

    assert gone == [[]] * MAX_KEPT + [[SessionId(bytes(16))]]


def test_use_postpones_the_eviction() -> None:
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


def test_no_more_positions_are_returned_than_are_kept() -> None:
    shelf = shelf_of(1)
    shelf.put(A, 4, 9, 0.0)

    assert not shelf.take(A, 5, 0.0, whole=True)
    assert not shelf.take(B, 1, 0.0, whole=True)
    assert shelf.take(A, 4, 0.0, whole=True) == 9
    assert not shelf.take(A, 4, 0.0, whole=True)
    assert shelf.budget.kept_bytes == 0


def test_fewer_recurrent_states_are_kept() -> None:
    for slack, most in ((0, MAX_STATES), (32, MAX_KEPT), (None, MAX_KEPT)):
        shelf = shelf_for(KvBudget([room(1 << 20)]), None, slack)
        gone = [shelf.put(SessionId(number.to_bytes(16)), 1, 1, 0.0) for number in range(most + 1)]
        assert sum(map(len, gone)) == 1


def test_a_smaller_budget_evicts_the_least_recently_used() -> None:
    shelf = shelf_of(3)
    for number, session in enumerate((A, B)):
        shelf.put(session, 1, 1, float(number))

    assert shelf.move(KvBudget([room(1)])) == [A]
    assert shelf.budget.kept_bytes == KvBudget([room(1)]).rooms[0].cost(256).held
    assert shelf.take(B, 1, 2.0, whole=True)
