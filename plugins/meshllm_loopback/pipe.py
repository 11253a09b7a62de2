"""One direction of a loopback link.

Each channel has a bounded queue of messages that were sent and not yet read, in flight or arrived:
at most `QUEUE_BYTES` and `QUEUE_MESSAGES`; a larger message is accepted when the queue is empty.
Senders without room wait in FIFO order and are admitted by the call that frees room. A sender that
is cancelled while it waits has not sent its message.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from meshllm.errors import LinkLost
from meshllm.transport.contract import Channel
from meshllm.transport.waiting import ReadTurn, SendTurns
from meshllm_loopback.shaper import Shaper

QUEUE_BYTES = 8 * 1024 * 1024
"""A prefill chunk of 256 rows of 8192 bf16 values, twice."""
QUEUE_MESSAGES = 256


@dataclass(slots=True)
class _Lane:
    """One channel of one direction."""

    queue: deque[bytes] = field(default_factory=deque)
    """Sent and not yet read; the first ``arrived`` of them can be read."""
    arrived: int = 0
    size: int = 0
    """Bytes in ``queue``."""

    def has_room(self, size: int) -> bool:
        fits = len(self.queue) < QUEUE_MESSAGES and self.size + size <= QUEUE_BYTES
        return fits or not self.queue


class Pipe:
    """One direction of a link."""

    def __init__(self, address: str, shaper: Shaper | None) -> None:
        self._address = address
        self._shaper = shaper
        self._loop = asyncio.get_running_loop()
        self._lanes = {channel: _Lane() for channel in Channel}  # CONTROL is read first
        self._senders = {
            channel: SendTurns(lane.has_room, partial(self._admit, channel))
            for channel, lane in self._lanes.items()
        }
        self._reader = ReadTurn()
        self._sealed = False  # the sender can no longer put
        self._ended = False  # the receiver knows that nothing follows
        self._dropped = False  # the receiver has closed
        self.messages_in = self.bytes_in = self.messages_out = self.bytes_out = 0

    @property
    def bytes_per_s(self) -> float | None:
        """Rate at which messages leave; None without a limit."""
        return self._shaper.bytes_per_s if self._shaper else None

    async def put(self, channel: Channel, message: bytes) -> None:
        """Send a message; wait for room, after all senders that already wait."""
        if self._sealed or not await self._senders[channel].send(message, len(message)):
            raise self._lost()

    def offer(self, channel: Channel, message: bytes) -> bool:
        """Send a message if there is room and no sender waits; return whether it was sent."""
        return not self._sealed and self._senders[channel].offer(message, len(message))

    async def get(self) -> tuple[Channel, bytes]:
        """Wait for the next message; CONTROL is delivered before DATA."""
        while not self._dropped:
            for channel, lane in self._lanes.items():
                if lane.arrived:
                    return channel, self._take(channel)
            if self._ended and not any(lane.queue for lane in self._lanes.values()):
                break
            await self._reader.wait()
        raise self._lost()

    def seal(self) -> None:
        """Reject further messages; waiting senders have not sent theirs."""
        self._sealed = True
        for senders in self._senders.values():
            senders.end()

    def end(self) -> None:
        """Tell the receiver that nothing follows the messages in flight."""
        self._ended = True
        self._reader.wake()

    def drop(self) -> None:
        """Stop receiving; unread messages and those in flight are discarded."""
        self._dropped = True
        self._reader.wake()

    def after_the_last(self, action: Callable[[], None]) -> None:
        """Run the action at the time at which a message sent now would arrive."""
        self._at_arrival(Channel.DATA, 0, action)

    def _admit(self, channel: Channel, message: bytes, size: int) -> None:
        lane = self._lanes[channel]
        self.messages_in += 1
        self.bytes_in += size
        lane.queue.append(message)
        lane.size += size
        self._at_arrival(channel, size, partial(self._arrive, lane))

    def _at_arrival(self, channel: Channel, size: int, action: Callable[[], None]) -> None:
        if self._shaper is None:
            action()
        else:
            now = self._loop.time()
            self._loop.call_at(self._shaper.arrival(channel, size, now), action)

    def _arrive(self, lane: _Lane) -> None:
        # A count, not the message: timers of the same instant fire in any order.
        lane.arrived += 1
        self._reader.wake()

    def _take(self, channel: Channel) -> bytes:
        lane = self._lanes[channel]
        message = lane.queue.popleft()
        lane.arrived -= 1
        lane.size -= len(message)
        self.messages_out += 1
        self.bytes_out += len(message)
        self._senders[channel].advance()
        return message

    def _lost(self) -> LinkLost:
        return LinkLost(f"The link to `{self._address}` is closed")
