"""Messages on two streams, without QUIC."""

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import LinkLost, MeshError, PeerFault
from meshllm.transport.contract import MAX_MESSAGE_BYTES, Buffer, Channel, LinkStatistics
from meshllm_quic.link.link import QuicLink
from meshllm_quic.wire.lanes import (
    ANSWER,
    HEAD,
    HELLO,
    HOLD_BYTES,
    MAX_RECORD_BYTES,
    MESSAGE,
    OFFER,
    WINDOW_BYTES,
    IncomingRecords,
    OutgoingRecords,
)

DATA, CONTROL = Channel.DATA, Channel.CONTROL


def word(body: bytes, kind: int = MESSAGE) -> bytes:
    return HEAD.pack(kind, len(body)) + body


class Pipe:
    """A connection that records the calls of its link."""

    peer_host = "192.0.2.7"

    def __init__(self) -> None:
        self.rooms = dict.fromkeys(Channel, 1 << 30)
        self.written: dict[Channel, bytearray] = {channel: bytearray() for channel in Channel}
        self.granted: dict[Channel, int] = {}
        self.fault: MeshError | None = None
        self.is_finished = False
        self.known: list[bool] = []

    def room(self, channel: Channel) -> int:
        return self.rooms[channel]

    def write(self, channel: Channel, data: Buffer) -> None:
        self.rooms[channel] -= len(data)
        self.written[channel] += data

    def finish(self) -> None:
        self.is_finished = True

    def grant(self, channel: Channel, offset: int) -> None:
        self.granted[channel] = offset

    def transmit_soon(self) -> None: ...

    def fail(self, reason: PeerFault) -> None:
        self.fault = reason

    async def wait_closed(self) -> None: ...

    def note_authentication(self, *, is_authenticated: bool) -> None:
        self.known.append(is_authenticated)

    def describe(self, statistics: LinkStatistics) -> LinkStatistics:
        return statistics


def linked() -> tuple[Pipe, QuicLink]:
    pipe = Pipe()
    link = QuicLink(pipe, "there")
    link.start_granting()
    return pipe, link


@given(
    bodies=st.lists(st.binary(max_size=40), max_size=8),
    cuts=st.lists(st.integers(1, 30), min_size=1, max_size=20),
)
def test_messages_are_reassembled_from_any_chunks(bodies: list[bytes], cuts: list[int]) -> None:
    stream, incoming, place = b"".join(map(word, bodies)), IncomingRecords(), 0

    while place < len(stream):
        size = cuts[place % len(cuts)]
        incoming.feed(stream[place : place + size])
        place += size

    assert [bytes(message) for message in incoming.ready] == bodies
    assert incoming.unread == sum(map(len, bodies))
    assert incoming.needed == incoming.arrived == len(stream)


@given(data=st.binary(max_size=200))
def test_any_bytes_are_decoded_or_rejected(data: bytes) -> None:
    incoming = IncomingRecords()
    with contextlib.suppress(PeerFault):
        incoming.feed(data)


@pytest.mark.parametrize(
    "head",
    [
        HEAD.pack(MESSAGE, MAX_MESSAGE_BYTES + 1),
        HEAD.pack(MESSAGE, 0xFFFFFFFF),
        HEAD.pack(OFFER, MAX_RECORD_BYTES + 1),
        HEAD.pack(ANSWER + 1, 0),
        HEAD.pack(255, 5),
    ],
)
def test_an_invalid_record_is_rejected_at_its_header(head: bytes) -> None:
    with pytest.raises(PeerFault, match="Invalid record: kind"):
        IncomingRecords().feed(head)


def test_transport_records_are_not_messages() -> None:
    incoming = IncomingRecords()

    incoming.feed(word(b"", HELLO) + word(b"m") + word(b"here", OFFER))

    assert incoming.records == [(HELLO, b""), (OFFER, b"here")]
    assert incoming.pop() == b"m"
    assert incoming.pop() is None
    assert incoming.read == incoming.arrived


@given(
    parts=st.lists(st.binary(max_size=30), max_size=5),
    rooms=st.lists(st.integers(1, 20), min_size=1, max_size=10),
)
def test_output_in_chunks_equals_the_input(parts: list[bytes], rooms: list[int]) -> None:
    outgoing, taken, turn = OutgoingRecords(), b"", 0
    body = b"".join(parts)

    outgoing.put(MESSAGE, parts, len(body))
    while outgoing.waiting:
        for part in outgoing.take(rooms[turn % len(rooms)]):
            taken += part
        outgoing.own()
        turn += 1

    assert taken == word(body)


async def test_a_sender_waits_while_the_connection_is_full() -> None:
    pipe, link = linked()
    pipe.rooms[DATA] = 0
    await link.send([bytes(HOLD_BYTES)])

    waiting = asyncio.create_task(link.send([b"late"]))
    await asyncio.sleep(0)
    was_blocked = not waiting.done()
    pipe.rooms[DATA] = 1 << 30
    link.flush()
    await waiting

    assert was_blocked
    assert bytes(pipe.written[DATA]) == word(bytes(HOLD_BYTES)) + word(b"late")


async def test_callers_may_reuse_their_buffers_after_send() -> None:
    pipe, link = linked()
    pipe.rooms[DATA] = 6
    part = bytearray(b"before")

    await link.send([part])
    part[:] = b"after!"
    pipe.rooms[DATA] = 100
    link.flush()

    assert bytes(pipe.written[DATA]) == word(b"before")


async def test_credit_is_granted_in_batches() -> None:
    pipe, link = linked()
    first = pipe.granted[DATA]
    size = WINDOW_BYTES // 4

    link.arrived(DATA, word(bytes(size - 100)), is_last=False)
    await link.receive()
    second = pipe.granted[DATA]
    link.arrived(DATA, word(bytes(200)), is_last=False)
    await link.receive()

    assert first == second == WINDOW_BYTES
    assert pipe.granted[DATA] == WINDOW_BYTES + size - 100 + 200 + 2 * HEAD.size


async def test_a_message_longer_than_the_window_is_granted_whole() -> None:
    pipe, link = linked()
    size = WINDOW_BYTES + 10

    link.arrived(DATA, HEAD.pack(MESSAGE, size), is_last=False)

    assert pipe.granted[DATA] == size + HEAD.size


async def test_no_credit_is_granted_before_the_application_sets_a_limit_or_none() -> None:
    pipe = Pipe()
    link = QuicLink(pipe, "there")

    link.arrived(DATA, word(bytes(60_000)), is_last=False)

    assert pipe.granted == {}


async def test_an_announced_message_counts_towards_the_unread_limit() -> None:
    pipe, link = linked()
    link.limit_unread(1000)

    link.arrived(CONTROL, word(bytes(600)), is_last=False)
    within = pipe.fault
    link.arrived(DATA, HEAD.pack(MESSAGE, 401), is_last=False)

    assert within is None
    assert isinstance(pipe.fault, PeerFault)
    assert "1001 B unread exceed the limit of 1000 B" in str(pipe.fault)


async def test_limits_are_passed_on() -> None:
    pipe, link = linked()

    link.limit_unread(1000)
    link.limit_unread(None)

    assert pipe.known == [False, True]


async def test_bytes_after_close_are_discarded() -> None:
    pipe, link = linked()
    link.arrived(DATA, HEAD.pack(MESSAGE, 100) + bytes(50), is_last=False)

    await link.close()
    link.arrived(DATA, bytes(WINDOW_BYTES), is_last=False)

    assert pipe.is_finished
    assert pipe.granted[DATA] >= 2 * WINDOW_BYTES
    with pytest.raises(LinkLost):
        await link.receive()


async def test_the_last_of_one_stream_leaves_the_other_readable() -> None:
    _pipe, link = linked()
    link.arrived(CONTROL, b"", is_last=True)

    with pytest.raises(LinkLost):
        await link.send([b"?"])
    link.arrived(DATA, word(b"still"), is_last=True)

    assert await link.receive() == (DATA, b"still")
    with pytest.raises(LinkLost):
        await link.receive()


async def test_two_concurrent_readers_of_a_quic_link_raise() -> None:
    _pipe, link = linked()
    first = asyncio.create_task(link.receive())
    await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="two tasks receive"):
        await link.receive()
    first.cancel()
