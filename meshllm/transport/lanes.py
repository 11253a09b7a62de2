"""Two multiplexed channels with credit-based flow control over one ordered stream.

Theory of operation. A message is split into pieces of `PIECE_BYTES`, the last one shorter. A piece
starts with one byte, its kind with the channel in the lowest bit; in the first piece of a message
the length of the message follows. CONTROL pieces have priority, which bounds head-of-line blocking:
CONTROL waits for at most one piece of DATA, never for a whole message.

Each channel has its own credit. A message costs its length plus `MESSAGE_COST`; the receiver
returns that credit once the application has read the message. A message can be sent if the credit
covers it, or if at most half of the credit is in use, so a message longer than the credit passes
alone. The receiver returns credit in batches of a quarter; it withholds less than half, so no
sender waits forever. Per channel it buffers at most the credit, or half of it and one message; a
peer that sends more violates the protocol.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshllm.errors import PeerFault
from meshllm.transport.contract import MAX_MESSAGE_BYTES, Buffer, Channel

PIECE_BYTES = 256 * 1024
"""2 ms at 1 Gbit/s: the longest time that CONTROL waits for DATA."""
CREDIT = 9 * 1024 * 1024
"""Two prefill chunks of 256 rows of 8192 bf16 values, and 1 MiB for smaller messages."""
MESSAGE_COST = 256
"""Charged per message for its overhead, so that empty messages are not free."""

NEXT, FIRST, BACK = 0, 2, 4
"""Kinds of piece: continuation, first of a message, credit; the last two carry a number."""
NUMBER_BYTES = 4


class Outgoing:
    """Messages accepted by `send` and not yet written; the caller writes the pieces."""

    def __init__(self) -> None:
        self._lanes = {channel: _Sending() for channel in Channel}  # CONTROL has priority
        self._credits: deque[bytes] = deque()
        self._is_accepted = False  # a credit of 0 arrived
        self.unsent = 0
        """Message bytes that are not yet written."""

    def has_credit(self, channel: Channel, size: int) -> bool:
        """Return whether a message of this size can be sent now."""
        out = self._lanes[channel].out
        return out + size + MESSAGE_COST <= CREDIT or 2 * out <= CREDIT

    def put(self, channel: Channel, parts: Sequence[Buffer], size: int) -> None:
        """Queue a message that has credit; its parts must not change before `copy_unsent`."""
        lane = self._lanes[channel]
        lane.out += size + MESSAGE_COST
        lane.queue.append(_Message([memoryview(part).cast("B") for part in parts], size, size))
        self.unsent += size

    def copy_unsent(self, channel: Channel) -> None:
        """Copy the unwritten rest of the message that was queued last."""
        if queue := self._lanes[channel].queue:
            queue[-1].parts = [memoryview(b"".join(queue[-1].parts))]

    def queue_credit(self, channel: Channel, credit: int) -> None:
        """Queue credit that is returned to the peer."""
        self._credits.append(head(BACK | channel, credit))

    def receive_credit(self, channel: Channel, credit: int) -> None:
        """Receive returned credit; raise `PeerFault` if it exceeds the credit in use.

        Credit of less than a message is a fault, too, since a peer could send it without end; only
        a credit of 0 may come once, see `meshllm.transport.stream`.
        """
        lane = self._lanes[channel]
        if credit < MESSAGE_COST:
            self._refuse_small(credit)
        if credit > lane.out:
            raise PeerFault(f"Returned credit {credit} B exceeds the {lane.out} B in use")
        lane.out -= credit

    def _refuse_small(self, credit: int) -> None:
        if credit or self._is_accepted:
            raise PeerFault(f"Returned credit {credit} B is less than that of any message")
        self._is_accepted = True

    def next_piece(self) -> tuple[bytes, memoryview | bytes] | None:
        """Return header and body of the next piece to write; None if nothing is queued."""
        if self._credits:
            return self._credits.popleft(), b""
        for channel, lane in self._lanes.items():
            if lane.queue:
                message = lane.queue[0]
                is_first = message.left == message.size
                body = message.cut()
                self.unsent -= len(body)
                if not message.left:
                    lane.queue.popleft()
                if is_first:
                    return head(FIRST | channel, message.size), body
                return bytes((NEXT | channel,)), body
        return None

    def drop(self) -> None:
        """Discard everything that is not yet written."""
        self._credits.clear()
        self.unsent = 0
        for lane in self._lanes.values():
            lane.queue.clear()


@dataclass(slots=True)
class _Message:
    parts: list[memoryview]
    """Not yet written."""
    size: int
    left: int
    """Bytes in ``parts``."""

    def cut(self) -> memoryview | bytes:
        """Return the body of the next piece."""
        bodies, missing = [], min(PIECE_BYTES, self.left)
        self.left -= missing
        while missing:
            body = self.parts[0][:missing]
            missing -= len(body)
            bodies.append(body)
            if len(body) < len(self.parts[0]):
                self.parts[0] = self.parts[0][len(body) :]
            else:
                del self.parts[0]
        return bodies[0] if len(bodies) == 1 else b"".join(bodies)


@dataclass(slots=True)
class _Sending:
    queue: deque[_Message] = field(default_factory=deque)
    out: int = 0
    """Credit in use: the cost of messages whose credit was not returned."""


class Incoming:
    """Messages received and not yet read, within the credit granted to the peer."""

    def __init__(self) -> None:
        self._lanes = {channel: _Receiving() for channel in Channel}
        self._lane = _Receiving()  # of the current piece
        self.limit: int | None = None
        """Limit of unread bytes for an unauthenticated peer; None: only the credit limits."""

    @property
    def unread(self) -> int:
        """Cost of messages, complete or partial, that were not read."""
        return sum(lane.held - lane.read for lane in self._lanes.values())

    def begin(self, kind: int, number: int, size: int) -> bool:
        """Start a piece with a body of ``size`` bytes; return whether it was an empty message.

        Raises:
            PeerFault: the piece is invalid, or exceeds the credit or the limit.
        """
        self._lane = self._lanes[Channel(kind & 1)]
        if kind & ~1 == FIRST:
            self._lane.begin(number)
            if self.limit is not None and (unread := self.unread) > self.limit:
                raise PeerFault(f"{unread} B unread exceed the limit of {self.limit} B")
        elif not self._lane.missing:
            raise PeerFault(f"Piece of kind {kind} outside a message")
        if kind > FIRST | 1 or size != min(PIECE_BYTES, self._lane.missing):
            raise PeerFault(f"Invalid piece: kind {kind}, {size} B, {self._lane.missing} B missing")
        return size == 0 and self._lane.fill(b"")

    def fill(self, part: memoryview | bytes) -> bool:
        """Receive the next part of the body; return whether the message is complete."""
        return self._lane.fill(part)

    def pop(self) -> tuple[Channel, Buffer] | None:
        """Return the next message to read, CONTROL first; None if there is none."""
        for channel, lane in self._lanes.items():
            if lane.queue:
                message = lane.queue.popleft()
                lane.read += len(message) + MESSAGE_COST
                return channel, message
        return None

    def credit_due(self, channel: Channel) -> int:
        """Take the credit to return now; 0 until the batch is large enough."""
        lane = self._lanes[channel]
        if 4 * lane.read < CREDIT:
            return 0
        due, lane.read = lane.read, 0
        lane.held -= due
        return due

    def drop(self) -> None:
        """Discard unread messages."""
        self._lanes = {channel: _Receiving() for channel in Channel}
        self._lane = _Receiving()


@dataclass(slots=True)
class _Receiving:
    queue: deque[Buffer] = field(default_factory=deque)
    size: int = 0
    """Length of the current message."""
    missing: int = 0
    """Bytes of it that have not arrived."""
    body: bytearray | None = None
    """What has arrived of it, which grows: a peer takes no more memory than it has sent. None if it
    arrives in one part."""
    held: int = 0
    """Cost of messages, complete or partial, whose credit was not returned."""
    read: int = 0
    """Cost of read messages whose credit was not returned; included in ``held``."""

    def begin(self, size: int) -> None:
        """Start a message; raise `PeerFault` if it is not allowed now."""
        if self.missing:
            raise PeerFault(f"New message with {self.missing} B of the previous one missing")
        before, self.held = self.held, self.held + size + MESSAGE_COST
        if size > MAX_MESSAGE_BYTES or (self.held > CREDIT and 2 * before > CREDIT):
            raise PeerFault(f"Message of {size} B with {before} B unread exceeds the credit")
        self.size = self.missing = size

    def fill(self, part: memoryview | bytes) -> bool:
        """Add a part; return whether the message is complete."""
        if len(part) == self.size:
            self.queue.append(bytes(part))
            self.missing = 0
            return True
        if self.body is None:
            self.body = bytearray()
        self.body += part
        self.missing -= len(part)
        if self.missing:
            return False
        self.queue.append(memoryview(self.body))
        self.body = None
        return True


def head(kind: int, number: int) -> bytes:
    """Encode the head of a piece that carries a number."""
    return bytes((kind,)) + number.to_bytes(NUMBER_BYTES, "big")
