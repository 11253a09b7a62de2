"""Message framing and flow control on two ordered QUIC streams.

Theory of operation. Each channel is one stream of records. A record is its kind (1 byte), the
length of its body (4 bytes) and the body; most are messages, the others are between the transports
of both ends. There is no stream per message: a channel keeps the order of its messages, so a
message that arrives early would wait for its predecessor anyway, and a stream costs more frames.

The receiver grants flow-control credit per stream: `WINDOW_BYTES` beyond what the application has
read, and at least up to the end of the current message. So a message longer than the window passes,
and a stream buffers at most the window and one message. Memory is allocated for received bytes,
never for an announced length.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from struct import Struct

from meshllm.errors import PeerFault
from meshllm.transport.contract import MAX_MESSAGE_BYTES, Buffer

HEAD = Struct("!BI")
MESSAGE, HELLO, OFFER, ANSWER = range(4)
"""Kinds of record. HELLO is empty and opens a stream; for OFFER and ANSWER see `offer`."""
MAX_RECORD_BYTES = 512
"""Longest body of a record that is not a message."""
WINDOW_BYTES = 8 * 1024 * 1024
"""100 ms at 600 Mbit/s; two prefill chunks of 256 rows of 8192 bf16 values."""
HOLD_BYTES = 1024 * 1024
"""Send buffer of a channel before senders wait; one longer message passes alone."""


class OutgoingRecords:
    """Records of one channel that QUIC has not yet accepted."""

    def __init__(self) -> None:
        self._queue: deque[list[memoryview]] = deque()
        self.waiting = 0
        """Queued bytes."""

    def has_room(self, size: int) -> bool:
        """Return whether a message of this size can be queued now."""
        return not self.waiting or self.waiting + size <= HOLD_BYTES

    def put(self, kind: int, parts: Sequence[Buffer], size: int) -> None:
        """Queue a record; its parts must not change before `own`."""
        views = [memoryview(part).cast("B") for part in parts]
        self._queue.append([memoryview(HEAD.pack(kind, size)), *views])
        self.waiting += HEAD.size + size

    def own(self) -> None:
        """Copy the unsent rest of the record that was queued last."""
        if self._queue and len(self._queue[-1]) > 0:
            self._queue[-1] = [memoryview(b"".join(self._queue[-1]))]

    def take(self, room: int) -> Iterator[memoryview]:
        """Yield and remove up to ``room`` bytes, in order."""
        while room > 0 and self._queue:
            parts = self._queue[0]
            part = parts[0][:room]
            if len(part) < len(parts[0]):
                parts[0] = parts[0][len(part) :]
            else:
                del parts[0]
            if not parts:
                self._queue.popleft()
            room -= len(part)
            self.waiting -= len(part)
            if len(part):
                yield part

    def drop(self) -> None:
        """Discard all queued records."""
        self._queue.clear()
        self.waiting = 0


@dataclass(slots=True)
class IncomingRecords:
    """Record decoder and receive buffer of one channel."""

    ready: deque[Buffer] = field(default_factory=deque)
    """Complete messages that the application has not read."""
    records: list[tuple[int, bytes]] = field(default_factory=list)
    """Kind and body of the other records; the caller of `feed` clears them."""
    unread: int = 0
    """Bytes of the messages in ``ready`` and of the current one."""
    read: int = 0
    """Bytes of the stream that are consumed."""
    arrived: int = 0
    """Bytes of the stream that were received."""
    _head: bytes = b""
    _kind: int = MESSAGE
    _size: int = 0
    _body: bytearray | None = None

    @property
    def needed(self) -> int:
        """Stream offset of the end of the current message."""
        missing = self._size - len(self._body) if self._body is not None else 0
        return self.arrived + missing

    def feed(self, data: bytes) -> None:
        """Decode the next bytes; raise `PeerFault` if they are invalid."""
        self.arrived += len(data)
        view = memoryview(data)
        while view:
            if self._body is None:
                view = self._begin(view)
            else:
                part = view[: self._size - len(self._body)]
                self._body += part
                view = view[len(part) :]
                if len(self._body) == self._size:
                    body, self._body = self._body, None
                    self._complete(memoryview(body))

    def pop(self) -> Buffer | None:
        """Return the next message; None if there is none."""
        if not self.ready:
            return None
        message = self.ready.popleft()
        self.unread -= len(message)
        self.read += HEAD.size + len(message)
        return message

    def skip(self, size: int) -> None:
        """Discard the next ``size`` bytes."""
        self.arrived += size
        self.read = self.arrived

    def drop(self) -> None:
        """Discard unread messages; pass later bytes to `skip`."""
        self.ready.clear()
        self.records.clear()
        self._body = None
        self.unread = 0
        self.read = self.arrived

    def _begin(self, view: memoryview) -> memoryview:
        """Decode a record header; return what follows it, or its body if that is complete."""
        if self._head or len(view) < HEAD.size:
            wanted = HEAD.size - len(self._head)
            self._head += view[:wanted]
            view = view[wanted:]
            if len(self._head) < HEAD.size:
                return view
            self._kind, size = HEAD.unpack(self._head)
            self._head = b""
        else:
            self._kind, size = HEAD.unpack_from(view)
            view = view[HEAD.size :]
        if self._kind > ANSWER or size > (MAX_RECORD_BYTES if self._kind else MAX_MESSAGE_BYTES):
            raise PeerFault(f"Invalid record: kind {self._kind}, {size} B")
        if self._kind == MESSAGE:
            self.unread += size
        if len(view) >= size:
            self._complete(bytes(view[:size]))
            return view[size:]
        self._size, self._body = size, bytearray()
        return view

    def _complete(self, body: memoryview | bytes) -> None:
        if self._kind == MESSAGE:
            self.ready.append(body)
        else:
            self.records.append((self._kind, bytes(body)))
            self.read += HEAD.size + len(body)
