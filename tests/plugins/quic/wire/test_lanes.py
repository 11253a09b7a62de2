"""Messages on a stream: memory is allocated for received bytes, not for announced ones."""

import tracemalloc

import pytest

from meshllm.errors import PeerFault
from meshllm.transport.contract import MAX_MESSAGE_BYTES
from meshllm_quic.wire.lanes import HEAD, MAX_RECORD_BYTES, MESSAGE, OFFER, IncomingRecords


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
