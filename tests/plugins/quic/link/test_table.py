"""Which connection a datagram belongs to, and what is sent for one that is closed."""

from unittest.mock import Mock

from meshllm_quic.link.table import MAX_CLOSE_REPEATS, MAX_CLOSED, ConnectionTable


def connection() -> Mock:
    return Mock(close_datagram=b"closed")


def test_a_connection_is_found_by_each_of_its_ids() -> None:
    table, one = ConnectionTable(), connection()

    table.add(one, b"1", b"2")
    table.add(one, b"3")
    table.drop(b"2")
    table.drop(b"9")

    assert [table.find(each) for each in (b"1", b"2", b"3")] == [one, None, one]
    assert (list(table), len(table)) == ([one], 1)
    assert one in table
    assert connection() not in table


def test_an_id_that_was_dropped_may_be_that_of_another_connection() -> None:
    table, one, other = ConnectionTable(), connection(), connection()
    table.add(one, b"1")
    table.drop(b"1")
    table.add(other, b"1")

    table.remove(one)

    assert table.find(b"1") is other


def test_a_closed_connection_is_answered_a_few_times_and_with_no_more_than_it_sent() -> None:
    table, one = ConnectionTable(), connection()
    table.add(one, b"1")

    table.remove(one)
    table.remove(one)

    assert one not in table
    assert table.find(b"1") is None
    assert table.close_datagram(b"1", 5) == b""
    answers = [table.close_datagram(b"1", 6) for _ in range(MAX_CLOSE_REPEATS + 1)]
    assert answers == [b"closed"] * MAX_CLOSE_REPEATS + [b""]
    assert table.close_datagram(b"2", 6) is None


def test_only_the_ids_that_were_closed_last_are_kept() -> None:
    table = ConnectionTable()

    for number in range(MAX_CLOSED + 1):
        each = connection()
        table.add(each, number.to_bytes(2))
        table.remove(each)

    assert table.close_datagram(b"\0\0", 100) is None
    assert table.close_datagram(b"\0\1", 100) == b"closed"
