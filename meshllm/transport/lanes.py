"""Messages in pieces, with credit, over one ordered stream.

Theory of operation. A message travels in pieces of `PIECE_BYTES`, the last of them shorter. A piece
begins with its kind, one byte, the channel in its lowest bit; the first piece of a message goes on
with the length of the message. The pieces of CONTROL go first, so that CONTROL waits for one piece
of DATA and never for a whole message.

Each channel has its own credit. A message costs its length and `MESSAGE_COST`, and the cost comes
back when the application at the other side has read it. It may leave when the credit covers it, or
when no more than half the credit is out: so a message longer than the credit passes alone. The
reader gives back in batches of a quarter; what it has not yet given back is less than half, hence
nobody waits for ever. It holds at most the credit, or half of it and one message, of each channel;
who sends more than that breaks the rules.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshllm.errors import PeerFault
from meshllm.transport.contract import MAX_MESSAGE_BYTES, Buffer, Channel

PIECE_BYTES = 256 * 1024
"""2 ms at 1 Gbit/s: how long CONTROL may wait for DATA."""
CREDIT = 9 * 1024 * 1024
"""Two prefill chunks of 256 rows of 8192 bf16 values, and what is sent beside them."""
MESSAGE_COST = 256
"""What a message occupies besides its bytes, so that empty ones are not free."""

NEXT, FIRST, BACK = 0, 2, 4
"""Kinds of piece: more of a message, a new message, credit; the last two go on with a number."""
NUMBER_BYTES = 4


class Outgoing:
    """What was sent and has not yet left; the caller writes the pieces."""

    def __init__(self) -> None:
        self._lanes = {channel: _Sending() for channel in Channel}  # CONTROL is looked at first
        self._credits: deque[bytes] = deque()
        self.unsent = 0
        """Bytes of the messages that have not left."""

    def has_credit(self, channel: Channel, size: int) -> bool:
        """Tell whether a message of that size may be sent now."""
        out = self._lanes[channel].out
        return out + size + MESSAGE_COST <= CREDIT or 2 * out <= CREDIT

    def put(self, channel: Channel, parts: Sequence[Buffer], size: int) -> None:
        """Queue a message that has credit; its parts may not change before `own`."""
        lane = self._lanes[channel]
        lane.out += size + MESSAGE_COST
        lane.queue.append(_Message([memoryview(part).cast("B") for part in parts], size, size))
        self.unsent += size

    def own(self, channel: Channel) -> None:
        """Copy what has not left of the message that was queued last."""
        if queue := self._lanes[channel].queue:
            queue[-1].parts = [memoryview(b"".join(queue[-1].parts))]

    def give_back(self, channel: Channel, credit: int) -> None:
        """Queue credit for the other side."""
        self._credits.append(head(BACK | channel, credit))

    def take_back(self, channel: Channel, credit: int) -> None:
        """Take credit from the other side; raise `PeerFault` for more than is out."""
        lane = self._lanes[channel]
        if credit > lane.out:
            raise PeerFault(f"{credit} B of credit came back where {lane.out} B were out")
        lane.out -= credit

    def next_piece(self) -> tuple[bytes, memoryview | bytes] | None:
        """Take the head and the body of the piece that leaves next; None when nothing waits."""
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
        """Forget what has not left."""
        self._credits.clear()
        self.unsent = 0
        for lane in self._lanes.values():
            lane.queue.clear()


@dataclass(slots=True)
class _Message:
    parts: list[memoryview]
    """What has not left."""
    size: int
    left: int
    """Bytes in ``parts``."""

    def cut(self) -> memoryview | bytes:
        """Take the body of the next piece."""
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
    """Cost of the messages for which no credit came back."""


class Incoming:
    """What arrived and is not yet read, within the credit of the other side."""

    def __init__(self) -> None:
        self._lanes = {channel: _Receiving() for channel in Channel}
        self._lane = _Receiving()  # of the piece under way
        self.limit: int | None = None
        """Bytes that the other side may leave unread; None when the credit alone decides."""

    def begin(self, kind: int, number: int, size: int) -> bool:
        """Prepare for a piece with a body of ``size`` bytes; tell whether it was an empty message.

        Raises:
            PeerFault: there may be no such piece now.
        """
        self._lane = self._lanes[Channel(kind & 1)]
        if kind & ~1 == FIRST:
            self._lane.begin(number)
            unread = sum(lane.held - lane.read for lane in self._lanes.values())
            if self.limit is not None and unread > self.limit:
                raise PeerFault(f"{unread} B are unread where {self.limit} B are allowed")
        elif not self._lane.missing:
            raise PeerFault(f"A piece of kind {kind} where no message is under way")
        if kind > FIRST | 1 or size != min(PIECE_BYTES, self._lane.missing):
            raise PeerFault(f"A piece of kind {kind} with {size} B, {self._lane.missing} B missing")
        return size == 0 and self._lane.fill(b"")

    def fill(self, part: memoryview | bytes) -> bool:
        """Take the next part of the body; tell whether the message is complete."""
        return self._lane.fill(part)

    def pop(self) -> tuple[Channel, Buffer] | None:
        """Take the message to be read next, CONTROL first; None when there is none."""
        for channel, lane in self._lanes.items():
            if lane.queue:
                message = lane.queue.popleft()
                lane.read += len(message) + MESSAGE_COST
                return channel, message
        return None

    def credit_due(self, channel: Channel) -> int:
        """Take the credit that is now to be given back; 0 while the batch is small."""
        lane = self._lanes[channel]
        if 4 * lane.read < CREDIT:
            return 0
        due, lane.read = lane.read, 0
        lane.held -= due
        return due

    def drop(self) -> None:
        """Forget what is not read."""
        self._lanes = {channel: _Receiving() for channel in Channel}


@dataclass(slots=True)
class _Receiving:
    queue: deque[Buffer] = field(default_factory=deque)
    size: int = 0
    """Of the message under way."""
    missing: int = 0
    """Bytes of it that are still to come."""
    body: memoryview | None = None
    """It, unless it arrives in one part."""
    held: int = 0
    """Cost of what arrived or is under way, and was not given back."""
    read: int = 0
    """Cost of what was read and not given back; a part of ``held``."""

    def begin(self, size: int) -> None:
        """Begin a message; raise `PeerFault` when it may not begin."""
        if self.missing:
            raise PeerFault(f"A message began with {self.missing} B of another missing")
        before, self.held = self.held, self.held + size + MESSAGE_COST
        if size > MAX_MESSAGE_BYTES or (self.held > CREDIT and 2 * before > CREDIT):
            raise PeerFault(f"A message of {size} B with {before} B unread")
        self.size = self.missing = size

    def fill(self, part: memoryview | bytes) -> bool:
        """Add a part; tell whether the message is complete."""
        if len(part) == self.size:
            self.queue.append(bytes(part))
            self.missing = 0
            return True
        if self.body is None:
            self.body = memoryview(bytearray(self.size))
        start = self.size - self.missing
        self.body[start : start + len(part)] = part
        self.missing -= len(part)
        if self.missing:
            return False
        self.queue.append(self.body)
        self.body = None
        return True


def head(kind: int, number: int) -> bytes:
    """Encode the head of a piece that carries a number."""
    return bytes((kind,)) + number.to_bytes(NUMBER_BYTES, "big")
