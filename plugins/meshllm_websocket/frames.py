"""Encoder and decoder of RFC 6455 binary frames with few copies.

The `websockets` library copies a frame four times when sending and four times when receiving,
which halves the throughput of large messages (``python -m tests.bench.transports``). So binary
frames are encoded and decoded here; control frames are passed to the library.
"""

import os
from struct import Struct
from typing import Protocol

from websockets.speedups import apply_mask

from meshllm.errors import PeerFault
from meshllm.transport.lanes import FIRST, NUMBER_BYTES, PIECE_BYTES

HEAD_BYTES = 1 + NUMBER_BYTES
MAX_FRAME_BYTES = HEAD_BYTES + PIECE_BYTES
MAX_CONTROL = 16
"""Control frames between two pieces. Nodes send no pings, proxies one in several seconds."""
JOIN_BYTES = 16 * 1024
"""Frames up to this size are copied into one buffer, for a single write."""

_BINARY = 0x82  # FIN and opcode 2: an unfragmented binary message
_MASKED = 0x80
_SHORT, _MEDIUM, _LONG = Struct("!BB"), Struct("!BBH"), Struct("!BBQ")


def frame(head: bytes, body: memoryview | bytes, *, is_masked: bool) -> list[bytes]:
    """Encode one piece as a frame, in one or two buffers; both are copies."""
    size = len(head) + len(body)
    if size < 126:
        start = _SHORT.pack(_BINARY, size | (_MASKED if is_masked else 0))
    elif size < 65536:
        start = _MEDIUM.pack(_BINARY, 126 | (_MASKED if is_masked else 0), size)
    else:
        start = _LONG.pack(_BINARY, 127 | (_MASKED if is_masked else 0), size)
    if is_masked:
        mask = os.urandom(4)
        start += mask
        head, body = apply_mask(head, mask), apply_mask(body, _rotated(mask, len(head)))
        if size > JOIN_BYTES:
            return [start + head, body]
    return [b"".join((start, head, body))]


class Pieces(Protocol):
    """Receiver of decoded pieces."""

    def begin(self, kind: int, number: int, size: int) -> None:
        """Start receiving a piece with a body of ``size`` bytes; raise `PeerFault` if invalid."""
        ...

    def fill(self, part: memoryview | bytes) -> None:
        """Receive the next part of the body."""
        ...


class FrameReader:
    """Incremental frame decoder; passes the body of a piece on as its bytes arrive."""

    def __init__(self, pieces: Pieces, *, is_masked: bool) -> None:
        self._pieces = pieces
        self._mask_bytes = 4 if is_masked else 0
        self._mask = b""  # rotated so that it applies to the next byte
        self._left = 0  # bytes missing of the current body
        self._controls = 0  # control frames since the last piece
        self.control_frames: list[bytes] = []
        """Complete control frames, for the library."""

    def read(self, data: memoryview) -> int:
        """Decode received bytes; return how many were consumed. Pass the rest again with more.

        Raises:
            PeerFault: the frame header is invalid or unsupported.
        """
        position = 0
        while position < len(data):
            if self._left:
                position += self._fill(data[position : position + self._left])
            elif used := self._open(data[position:]):
                position += used
            else:
                break
        return position

    def _fill(self, part: memoryview) -> int:
        size = len(part)
        self._left -= size
        if self._mask_bytes:
            mask, self._mask = self._mask, _rotated(self._mask, size)
            self._pieces.fill(apply_mask(part, mask))
        else:
            self._pieces.fill(part)
        return size

    def _open(self, data: memoryview) -> int:
        """Decode a frame header; return its length, or 0 if it is incomplete."""
        if len(data) < 2:
            return 0
        size, start = data[1] & 0x7F, 2
        if data[0] != _BINARY or data[1] >> 7 != bool(self._mask_bytes):
            return self._read_control_frame(data)
        if size > 125:
            start += 2 if size == 126 else 8
            size = int.from_bytes(data[2:start], "big")
        if len(data) < start + self._mask_bytes + min(size, HEAD_BYTES):
            return 0
        return self._begin(data[start:], size) + start

    def _begin(self, data: memoryview, size: int) -> int:
        """Decode the mask and the header of the piece; return their length."""
        if not 0 < size <= MAX_FRAME_BYTES:
            raise PeerFault(f"Invalid frame length {size} B")
        mask, start = bytes(data[: self._mask_bytes]), self._mask_bytes
        head: memoryview | bytes = data[start : start + min(size, HEAD_BYTES)]
        if mask:
            head = apply_mask(head, mask)
        kind, length = head[0], HEAD_BYTES if head[0] >= FIRST else 1
        if length > size:
            raise PeerFault(f"Truncated piece: kind {kind}, {size} B")
        self._left, self._controls = size - length, 0
        self._mask = _rotated(mask, length)
        self._pieces.begin(kind, int.from_bytes(head[1:length], "big"), self._left)
        return start + length

    def _read_control_frame(self, data: memoryview) -> int:
        """Collect a complete control frame; the library checks its mask and opcode."""
        size, is_control = data[1] & 0x7F, data[0] & 0x88 == 0x88
        whole = 2 + size + (4 if data[1] & _MASKED else 0)
        if not is_control or size > 125:
            raise PeerFault(f"Unexpected frame: first byte {data[0]:#04x}")
        if len(data) < whole:
            return 0
        self._controls += 1
        if self._controls > MAX_CONTROL:
            raise PeerFault(f"More than {MAX_CONTROL} control frames in a row")
        self.control_frames.append(bytes(data[:whole]))
        return whole


def _rotated(mask: bytes, by: int) -> bytes:
    """Rotate a mask so that it applies ``by`` bytes further on."""
    by %= 4
    return mask[by:] + mask[:by]
