"""Pieces and credit of one side against those of the other."""

import random
from sys import getsizeof

import pytest

from meshllm.errors import PeerFault
from meshllm.transport import lanes
from meshllm.transport.contract import MAX_MESSAGE_BYTES, Channel
from meshllm.transport.lanes import (
    BACK,
    CREDIT,
    FIRST,
    MESSAGE_COST,
    NEXT,
    PIECE_BYTES,
    Incoming,
    Outgoing,
)

CONTROL, DATA = Channel
HALF = CREDIT // 2


def carry(outgoing: Outgoing, incoming: Incoming, pieces: int = 10_000) -> int:
    """Transfer pieces; return their number."""
    for count in range(pieces):
        if (piece := outgoing.next_piece()) is None:
            return count
        head, body = piece
        incoming.begin(head[0], int.from_bytes(head[1:], "big"), len(body))
        if body:
            incoming.fill(body)
    return pieces


def put(outgoing: Outgoing, message: bytes, channel: Channel = DATA) -> None:
    outgoing.put(channel, [message], len(message))
    outgoing.copy_unsent(channel)


def hold(incoming: Incoming, cost: int) -> None:
    """Receive a message of that cost."""
    outgoing = Outgoing()
    put(outgoing, bytes(cost - MESSAGE_COST))
    carry(outgoing, incoming)


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 1])
def test_a_message_is_reassembled(size: int) -> None:
    outgoing, incoming = Outgoing(), Incoming()
    message = random.Random(size).randbytes(size)

    put(outgoing, message)
    pieces = carry(outgoing, incoming)

    assert pieces == max(1, -(-size // PIECE_BYTES))
    arrived = incoming.pop()
    assert arrived is not None
    assert (arrived[0], bytes(arrived[1])) == (DATA, message)
    assert incoming.pop() is None


def test_pieces_may_span_parts() -> None:
    outgoing, incoming = Outgoing(), Incoming()
    parts = [b"", b"head", bytes(PIECE_BYTES), b"", b"middle" * 50_000, b"tail"]

    outgoing.put(DATA, parts, sum(map(len, parts)))
    carry(outgoing, incoming)

    arrived = incoming.pop()
    assert arrived is not None
    assert bytes(arrived[1]) == b"".join(parts)


def test_callers_may_reuse_their_buffers() -> None:
    outgoing, incoming = Outgoing(), Incoming()
    part = bytearray(b"a" * 2 * PIECE_BYTES)

    outgoing.put(DATA, [part], len(part))
    carry(outgoing, incoming, pieces=1)
    outgoing.copy_unsent(DATA)
    part[:] = b"b" * len(part)
    carry(outgoing, incoming)

    arrived = incoming.pop()
    assert arrived is not None
    assert bytes(arrived[1]) == b"a" * len(part)


def test_control_is_sent_between_pieces_of_data() -> None:
    outgoing, incoming = Outgoing(), Incoming()
    put(outgoing, bytes(3 * PIECE_BYTES))
    carry(outgoing, incoming, pieces=1)

    put(outgoing, b"now", CONTROL)
    carry(outgoing, incoming, pieces=1)

    assert incoming.pop() == (CONTROL, b"now")
    assert outgoing.unsent == 2 * PIECE_BYTES


def test_channels_have_separate_credit() -> None:
    outgoing = Outgoing()
    put(outgoing, bytes(HALF))
    put(outgoing, bytes(HALF - 2 * MESSAGE_COST))

    assert not outgoing.has_credit(DATA, 0)
    assert outgoing.has_credit(CONTROL, MAX_MESSAGE_BYTES)


def test_a_message_longer_than_the_credit_passes_if_half_of_it_is_free() -> None:
    outgoing = Outgoing()
    put(outgoing, bytes(HALF))
    assert not outgoing.has_credit(DATA, MAX_MESSAGE_BYTES)

    outgoing.receive_credit(DATA, MESSAGE_COST)

    assert outgoing.has_credit(DATA, MAX_MESSAGE_BYTES)


def test_credit_of_no_message_is_a_fault_but_for_one_of_nothing() -> None:
    outgoing = Outgoing()
    put(outgoing, bytes(HALF))
    with pytest.raises(PeerFault, match="255 B is less than that of any message"):
        outgoing.receive_credit(DATA, MESSAGE_COST - 1)

    outgoing.receive_credit(DATA, 0)

    with pytest.raises(PeerFault, match="0 B is less than that of any message"):
        outgoing.receive_credit(DATA, 0)


@pytest.mark.parametrize("seed", range(10))
def test_senders_never_deadlock_and_buffers_stay_within_the_credit(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    credit = 8192
    monkeypatch.setattr(lanes, "CREDIT", credit)
    draw = random.Random(seed)
    outgoing, incoming = Outgoing(), Incoming()
    unread = size = 0
    for _ in range(1000):
        if outgoing.has_credit(DATA, size):
            put(outgoing, bytes(size))
            carry(outgoing, incoming)
            unread += size
            size = draw.choice([0, 100, 1000, credit // 2, credit, 2 * credit])
        else:
            arrived = incoming.pop()
            assert arrived is not None, f"{size} B are blocked although all was read"
            unread -= len(arrived[1])
            if due := incoming.credit_due(DATA):
                outgoing.receive_credit(DATA, due)
        assert unread <= credit // 2 + 2 * credit


def test_sending_beyond_the_credit_is_a_fault() -> None:
    incoming = Incoming()
    hold(incoming, HALF + 1)

    with pytest.raises(PeerFault, match="unread"):
        hold(incoming, HALF)


def test_empty_messages_are_not_free() -> None:
    incoming = Incoming()

    for _ in range(CREDIT // MESSAGE_COST):
        incoming.begin(FIRST | DATA, 0, 0)

    with pytest.raises(PeerFault, match="unread"):
        incoming.begin(FIRST | DATA, 0, 0)


def test_announced_bytes_count_towards_the_unread_limit() -> None:
    incoming = Incoming()
    incoming.limit = 1000
    incoming.begin(FIRST, 100, 100)
    incoming.fill(bytes(100))
    incoming.pop()

    with pytest.raises(PeerFault, match="exceed the limit of 1000 B"):
        incoming.begin(FIRST, 5000, 5000)


@pytest.mark.parametrize(
    ("kind", "number", "size"),
    [
        (NEXT, 0, 5),
        (NEXT, 0, 0),
        (FIRST, 10, 9),
        (FIRST, 10, 11),
        (FIRST, 0, 1),
        (FIRST, PIECE_BYTES + 1, 1),
        (FIRST, MAX_MESSAGE_BYTES + 1, PIECE_BYTES),
        (BACK, 1, 1),
        (6, 1, 0),
        (255, 1, 1),
    ],
)
def test_an_invalid_piece_is_a_fault(kind: int, number: int, size: int) -> None:
    with pytest.raises(PeerFault):
        Incoming().begin(kind, number, size)


def test_a_message_inside_another_is_a_fault() -> None:
    incoming = Incoming()
    incoming.begin(FIRST, 2 * PIECE_BYTES, PIECE_BYTES)
    incoming.fill(bytes(PIECE_BYTES))

    with pytest.raises(PeerFault, match=f"{PIECE_BYTES} B of the previous one missing"):
        incoming.begin(FIRST, 1, 1)


def test_returning_more_credit_than_in_use_is_a_fault() -> None:
    outgoing = Outgoing()
    put(outgoing, b"four")

    with pytest.raises(PeerFault, match="Returned credit"):
        outgoing.receive_credit(DATA, 5 + MESSAGE_COST)


def test_a_message_takes_no_more_memory_than_has_arrived() -> None:
    incoming = Incoming()
    incoming.begin(FIRST | DATA, MAX_MESSAGE_BYTES, PIECE_BYTES)

    incoming.fill(bytes(1000))

    body = incoming._lane.body
    assert body is not None
    assert getsizeof(body) < 4000
