"""Messages on two ordered streams, with credit.

Theory of operation. Each channel is one stream of words. A word is its kind, one byte, the length
of its body, four, and the body; most are messages, the others are between the two ends themselves.
There is no stream for each message: a channel keeps the order of its messages, so a message that
came early would wait for the one before it all the same, and one more stream costs more frames.

The reader grants each byte of a stream. It lets a stream run `WINDOW_BYTES` ahead of what the
application has read, and to the end of the message under way: so a message longer than the window
passes, and what is held is at most the window and one message. Memory is taken for what arrived,
never for what a head announces.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from struct import Struct

from meshllm.errors import PeerFault
from meshllm.transport.contract import MAX_MESSAGE_BYTES, Buffer

HEAD = Struct("!BI")
MESSAGE, HELLO, OFFER, ANSWER = range(4)
"""Kinds of word. HELLO is empty, and opens a stream; OFFER and ANSWER are of `offer`."""
MAX_WORD_BYTES = 512
"""Of a word that is no message."""
WINDOW_BYTES = 8 * 1024 * 1024
"""100 ms at 600 Mbit/s; two prefill chunks of 256 rows of 8192 bf16 values."""
HOLD_BYTES = 1024 * 1024
"""What a channel takes of its senders before they wait; one longer message passes alone."""


class Outgoing:
    """What was sent on one channel and has not yet left."""

    def __init__(self) -> None:
        self._queue: deque[list[memoryview]] = deque()
        self.waiting = 0
        """Bytes."""

    def has_room(self, size: int) -> bool:
        """Tell whether a message of that size may be put now."""
        return not self.waiting or self.waiting + size <= HOLD_BYTES

    def put(self, kind: int, parts: Sequence[Buffer], size: int) -> None:
        """Queue a word; its parts may not change before `own`."""
        views = [memoryview(part).cast("B") for part in parts]
        self._queue.append([memoryview(HEAD.pack(kind, size)), *views])
        self.waiting += HEAD.size + size

    def own(self) -> None:
        """Copy what has not left of the word that was put last."""
        if self._queue and len(self._queue[-1]) > 0:
            self._queue[-1] = [memoryview(b"".join(self._queue[-1]))]

    def take(self, room: int) -> Iterator[memoryview]:
        """Take up to ``room`` bytes, in order."""
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
        """Forget it."""
        self._queue.clear()
        self.waiting = 0


@dataclass(slots=True)
class Incoming:
    """What arrived on one channel."""

    ready: deque[Buffer] = field(default_factory=deque)
    """Messages nobody has read."""
    words: list[tuple[int, bytes]] = field(default_factory=list)
    """Kind and body of the others; whoever feeds clears them."""
    unread: int = 0
    """Bytes of the messages in ``ready``, and of the one under way."""
    read: int = 0
    """Bytes of the stream that nobody has to read any more."""
    arrived: int = 0
    """Bytes of the stream."""
    _head: bytes = b""
    _kind: int = MESSAGE
    _size: int = 0
    _body: bytearray | None = None

    @property
    def needed(self) -> int:
        """Up to which byte of the stream the message under way goes."""
        missing = self._size - len(self._body) if self._body is not None else 0
        return self.arrived + missing

    def feed(self, data: bytes) -> None:
        """Take what comes next; raise `PeerFault` for what may not come."""
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
        """Take the message to be read next."""
        if not self.ready:
            return None
        message = self.ready.popleft()
        self.unread -= len(message)
        self.read += HEAD.size + len(message)
        return message

    def skip(self, size: int) -> None:
        """Take what comes next and forget it."""
        self.arrived += size
        self.read = self.arrived

    def drop(self) -> None:
        """Forget what is not read; whatever comes is to be skipped."""
        self.ready.clear()
        self.words.clear()
        self._body = None
        self.unread = 0
        self.read = self.arrived

    def _begin(self, view: memoryview) -> memoryview:
        """Read a head; return what follows it, or its body where that is all there."""
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
        if self._kind > ANSWER or size > (MAX_WORD_BYTES if self._kind else MAX_MESSAGE_BYTES):
            raise PeerFault(f"A word of kind {self._kind} with {size} B")
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
            self.words.append((self._kind, bytes(body)))
            self.read += HEAD.size + len(body)
