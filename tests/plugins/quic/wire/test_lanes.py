"""Messages on a stream: memory is allocated for received bytes, not for announced ones."""

import tracemalloc

import pytest

from meshllm.errors import PeerFault
from meshllm.transport.contract import MAX_MESSAGE_BYTES
from meshllm_quic.wire.lanes import (
    HEAD,
    HOLD_BYTES,
    MAX_RECORD_BYTES,
    MESSAGE,
    OFFER,
    IncomingRecords,
    OutgoingRecords,
)


def test_a_message_is_reassembled_from_any_chunks() -> None:
    stream = HEAD.pack(MESSAGE, 7) + b"message" + HEAD.pack(MESSAGE, 0) + HEAD.pack(MESSAGE, 2)
    incoming = IncomingRecords()

    for byte in stream + b"ok":
        incoming.feed(bytes([byte]))

    assert [incoming.pop() for _ in range(4)] == [b"message", b"", b"ok", None]
    assert incoming.read == incoming.arrived == len(stream) + 2


def test_an_announced_message_allocates_no_memory() -> None:
    incoming = IncomingRecords()
    tracemalloc.start()

    incoming.feed(HEAD.pack(MESSAGE, MAX_MESSAGE_BYTES) + b"begin")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert incoming.unread == MAX_MESSAGE_BYTES
    assert incoming.needed == HEAD.size + MAX_MESSAGE_BYTES
    assert peak < 100_000


@pytest.mark.parametrize(
    ("kind", "size"), [(MESSAGE, MAX_MESSAGE_BYTES + 1), (OFFER, MAX_RECORD_BYTES + 1), (4, 0)]
)
def test_an_invalid_record_is_rejected(kind: int, size: int) -> None:
    with pytest.raises(PeerFault, match=f"kind {kind}, {size} B"):
        IncomingRecords().feed(HEAD.pack(kind, size))


def test_the_longest_record_is_read() -> None:
    incoming, body = IncomingRecords(), bytes(MAX_RECORD_BYTES)

    incoming.feed(HEAD.pack(OFFER, MAX_RECORD_BYTES) + body)

    assert incoming.records == [(OFFER, body)]
    assert (incoming.unread, incoming.read) == (0, incoming.arrived)


def test_messages_wait_for_room_but_one_alone_never_does() -> None:
    outgoing, size = OutgoingRecords(), 1000
    assert outgoing.has_room(2 * HOLD_BYTES)

    outgoing.put(MESSAGE, [bytes(size)], size)

    rest = HOLD_BYTES - HEAD.size - size
    assert outgoing.waiting == HEAD.size + size
    assert outgoing.has_room(rest)
    assert not outgoing.has_room(rest + 1)

    outgoing.drop()

    assert outgoing.waiting == 0
    assert outgoing.has_room(2 * HOLD_BYTES)
    assert [*outgoing.take(100)] == []


def test_what_is_dropped_or_skipped_counts_as_read() -> None:
    incoming = IncomingRecords()
    incoming.feed(HEAD.pack(MESSAGE, 3) + b"one" + HEAD.pack(OFFER, 1) + b"x")
    incoming.feed(HEAD.pack(MESSAGE, 50) + b"begin")

    incoming.drop()
    arrived = incoming.arrived
    assert (incoming.unread, incoming.read, incoming.needed) == (0, arrived, arrived)
    for size in (45, 7):
        incoming.skip(size)

    assert (incoming.pop(), incoming.records) == (None, [])
    assert incoming.arrived == incoming.read == incoming.needed == arrived + 45 + 7
