"""What is kept: the latest, within the room, and not for ever."""

from meshllm.names import SessionId
from meshllm.protocol.shelf import MAX_KEPT, MAX_STATES, ROUNDING, Shelf, shelf_for

A, B, C = (SessionId(name * 16) for name in (b"a", b"b", b"c"))


def test_what_was_used_last_stays() -> None:
    shelf = Shelf(10 + 2 * ROUNDING)
    shelf.put(A, 4, 0.0)
    shelf.put(B, 4, 1.0)
    shelf.take(A, 2, 2.0, whole=False)

    assert shelf.put(C, 6, 3.0) == [B]
    assert shelf.take(A, 4, 4.0, whole=True)


def test_nothing_goes_for_what_has_no_room_itself() -> None:
    shelf = Shelf(10 + ROUNDING)
    shelf.put(A, 10, 0.0)

    assert shelf.put(B, 11, 1.0) == [B]
    assert shelf.put(C, 0, 1.0) == [C]
    assert shelf.take(A, 10, 2.0, whole=False)


def test_there_is_a_most_of_sessions_however_short() -> None:
    shelf = Shelf(1 << 30)
    gone = [shelf.put(SessionId(number.to_bytes(16)), 1, 0.0) for number in range(MAX_KEPT + 1)]

    assert gone == [[]] * MAX_KEPT + [[SessionId(bytes(16))]]


def test_a_session_that_is_asked_for_lives_longer() -> None:
    shelf = Shelf(1000, idle_s=60.0)
    shelf.put(A, 1, 0.0)
    shelf.put(B, 1, 10.0)
    shelf.take(A, 1, 30.0, whole=False)

    assert shelf.deadline == 70.0
    assert shelf.expire(70.0) == [B]
    assert shelf.expire(90.0) == [A]
    assert shelf.deadline is None


def test_no_more_is_given_than_is_there() -> None:
    shelf = Shelf(10 + ROUNDING)
    shelf.put(A, 4, 0.0)

    assert not shelf.take(A, 5, 0.0, whole=True)
    assert not shelf.take(B, 1, 0.0, whole=True)
    assert shelf.take(A, 4, 0.0, whole=True)
    assert not shelf.take(A, 4, 0.0, whole=True)


def test_states_are_few() -> None:
    for slack, most in ((0, MAX_STATES), (32, MAX_KEPT), (None, MAX_KEPT)):
        shelf = shelf_for(1 << 30, slack)
        gone = [shelf.put(SessionId(number.to_bytes(16)), 1, 0.0) for number in range(most + 1)]
        assert sum(map(len, gone)) == 1
