"""Frames are compatible with the library's, complete or in any chunks."""

import random
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode
from websockets.protocol import Protocol, Side

from meshllm.errors import PeerFault
from meshllm.transport.lanes import BACK, FIRST, NEXT, PIECE_BYTES
from meshllm_websocket.frames import HEAD_BYTES, MAX_FRAME_BYTES, FrameReader, frame

SIZES = [0, 1, 120, 121, 125, 126, 65530, 65531, 65536, PIECE_BYTES]


class Heap:
    """Collects received pieces."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int, bytes]] = []

    def begin(self, kind: int, number: int, size: int) -> None:
        self.pieces.append((kind, number, b""))

    def fill(self, part: memoryview | bytes) -> None:
        kind, number, body = self.pieces.pop()
        self.pieces.append((kind, number, body + bytes(part)))


def read_in_parts(reader: FrameReader, data: bytes, sizes: list[int]) -> None:
    """Feed the reader like a socket, with unconsumed bytes again."""
    kept = b""
    for size in [*sizes, len(data)]:
        part, data = data[:size], data[size:]
        kept += part
        kept = kept[reader.read(memoryview(kept)) :]
    assert kept == b""


def library(opcode: Opcode, payload: bytes, *, is_masked: bool = True, fin: bool = True) -> bytes:
    return Frame(opcode, payload, fin).serialize(mask=is_masked)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_masked", [True, False])
def test_the_library_reads_our_frames(size: int, is_masked: bool) -> None:
    head, body = b"\x02" + size.to_bytes(4, "big"), random.Random(size).randbytes(size)
    side = Side.SERVER if is_masked else Side.CLIENT
    machine = Protocol(side, max_size=MAX_FRAME_BYTES)

    for part in frame(head, memoryview(body), is_masked=is_masked):
        machine.receive_data(part)

    (read,) = machine.events_received()
    assert isinstance(read, Frame)
    assert (read.opcode, bytes(read.data)) == (Opcode.BINARY, head + body)


@given(st.lists(st.integers(1, 5000), max_size=20), st.booleans())
def test_we_read_the_frames_of_the_library(sizes: list[int], is_masked: bool) -> None:
    draw = random.Random(len(sizes))
    pieces = [
        (FIRST, 700, draw.randbytes(700)),
        (NEXT | 1, 0, draw.randbytes(3)),
        (BACK, 70000, b""),
        (FIRST | 1, 0, b""),
        (NEXT, 0, draw.randbytes(70000)),
    ]
    ping, heap = library(Opcode.PING, b"?", is_masked=is_masked), Heap()
    stream = ping
    for kind, number, body in pieces:
        head = bytes([kind]) + (number.to_bytes(4, "big") if kind >= FIRST else b"")
        stream += library(Opcode.BINARY, head + body, is_masked=is_masked)
    reader = FrameReader(heap, is_masked=is_masked)

    read_in_parts(reader, stream + ping, sizes)

    assert heap.pieces == pieces
    assert reader.control_frames == [ping, ping]


@pytest.mark.parametrize(
    "stream",
    [
        library(Opcode.TEXT, b"\x02hello"),
        library(Opcode.CONT, b"\x02hello"),
        library(Opcode.BINARY, b"\x02hello", fin=False),
        library(Opcode.BINARY, b"\x02hello", is_masked=False),
        library(Opcode.BINARY, b""),
        library(Opcode.BINARY, bytes([FIRST, 0])),
        library(Opcode.BINARY, bytes(MAX_FRAME_BYTES + 1))[: 14 + HEAD_BYTES],
        b"\x82\xff" + b"\xff" * 20,
        b"\xc2\x85" + bytes(20),
        b"\x89\xfe" + bytes(20),
        b"\x83\x80" + bytes(20),
        b"GET / HTTP/1.1\r\n",
    ],
    ids=map(str, count()),  # masks differ from process to process
)
def test_unsupported_frames_are_a_fault(stream: bytes) -> None:
    with pytest.raises(PeerFault):
        FrameReader(Heap(), is_masked=True).read(memoryview(stream))


@given(st.binary(max_size=300), st.booleans())
def test_garbage_is_a_fault_or_incomplete(garbage: bytes, is_masked: bool) -> None:
    try:
        used = FrameReader(Heap(), is_masked=is_masked).read(memoryview(garbage))
    except PeerFault:
        return
    assert len(garbage) - used < 140  # at most one control frame is buffered
