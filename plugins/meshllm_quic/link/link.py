"""A link over one QUIC connection."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from meshllm.errors import LinkLost, MeshError, PeerFault
from meshllm.transport.contract import Buffer, Channel, LinkStatistics, measure
from meshllm_quic.wire.lanes import MESSAGE, WINDOW_BYTES, Incoming, Outgoing

_Line = dict[asyncio.Future[bool], tuple[Sequence[Buffer], int]]

BATCH = 4
"""A grant is announced when this part of the window can be given back at once."""


class Wire(Protocol):
    """What a link needs of its connection."""

    def room(self, channel: Channel) -> int:
        """Count the bytes that the connection takes now."""
        ...

    def write(self, channel: Channel, data: Buffer) -> None:
        """Copy bytes to the end of a stream."""
        ...

    def finish(self) -> None:
        """End both streams after what was written."""
        ...

    def grant(self, channel: Channel, offset: int) -> None:
        """Let the other side send up to that byte of a stream."""
        ...

    def transmit_soon(self) -> None:
        """Send in this turn of the loop what was written and granted."""
        ...

    def fail(self, reason: PeerFault) -> None:
        """Close at once, for that reason."""
        ...

    async def wait_gone(self) -> None:
        """Wait until the connection is closed, for a moment at most."""
        ...

    def know(self, *, is_stranger: bool) -> None:
        """Hear whether the other side has still to say who it is."""
        ...

    def describe(self, statistics: LinkStatistics) -> LinkStatistics:
        """Add what the connection knows of the path."""
        ...


class Link:
    """One end; `meshllm.transport.contract.Link` for the application, the rest for the wire."""

    def __init__(self, wire: Wire, address: str) -> None:
        self.address = address
        self.peer_key = b""
        """Proven before anybody sees the link."""
        self.is_taken = False
        self.is_closed = False
        self._wire = wire
        self._loop = asyncio.get_running_loop()
        self._outgoing = {channel: Outgoing() for channel in Channel}  # CONTROL is first
        self._incoming = {channel: Incoming() for channel in Channel}
        self._granted = dict.fromkeys(Channel, 0)
        self._lines: dict[Channel, _Line] = {channel: {} for channel in Channel}
        """Senders without room, in order; the result tells whether the message was sent."""
        self._limit: int | None = None
        self._reader: asyncio.Future[None] | None = None
        self._sending_end: MeshError | None = None  # why nothing more is sent
        self._reading_end: MeshError | None = None  # why nothing more arrives
        self._ended: set[Channel] = set()  # streams of which all has arrived
        self._messages_sent = self._bytes_sent = 0
        self._messages_received = self._bytes_received = 0

    async def send(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> None:
        """Send when there is room, and after all that wait for it."""
        size = measure(message)
        if self._sending_end is not None:
            raise self._lost()
        if self._is_free(channel, size):
            self._admit(channel, message, size)
        elif not await self._stand_in_line(channel, message, size):
            raise self._lost()

    def offer(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> bool:
        """Send when there is room and nobody waits for it."""
        size = measure(message)
        if self._sending_end is not None or not self._is_free(channel, size):
            return False
        self._admit(channel, message, size)
        return True

    async def receive(self) -> tuple[Channel, Buffer]:
        """Wait for the next message, CONTROL first."""
        while not self.is_closed:
            for channel, incoming in self._incoming.items():
                if (message := incoming.pop()) is not None:
                    self._messages_received += 1
                    self._bytes_received += len(message)
                    self._grant(channel)
                    return channel, message
            if self._reading_end is not None:
                raise self._reading_end
            await self._wait()
        raise self._lost()

    async def close(self) -> None:
        """Close when what was sent has left, and wait a moment until it has arrived."""
        if not self.is_closed:
            self.is_closed = True
            for channel, incoming in self._incoming.items():
                incoming.drop()
                self._grant(channel)
            self._stop_sending()
            self._stop_reading(self._lost())
            self.flush()
            self._wire.transmit_soon()
        await self._wire.wait_gone()

    @property
    def statistics(self) -> LinkStatistics:
        """What this side has sent and received."""
        return self._wire.describe(
            LinkStatistics(
                self._messages_sent,
                self._bytes_sent,
                self._messages_received,
                self._bytes_received,
            )
        )

    def limit_unread(self, size: int | None) -> None:
        """Hold a stranger to so many bytes that are not read."""
        self._limit = size
        self._wire.know(is_stranger=size is not None)
        self._check_unread()
        self.grant()

    @property
    def unsent(self) -> int:
        """Bytes that wait for room in the connection."""
        return sum(outgoing.waiting for outgoing in self._outgoing.values())

    def take(self) -> None:
        """Note that the application has the link: now it is to be filled."""
        self.is_taken = True
        self.grant()

    def put_word(self, kind: int, body: bytes, channel: Channel = Channel.CONTROL) -> None:
        """Send a word to the other end of the transport, behind the messages that wait."""
        self._outgoing[channel].put(kind, [body], len(body))
        self.flush()

    def arrived(self, channel: Channel, data: bytes, *, is_last: bool) -> list[tuple[int, bytes]]:
        """Take the next bytes of a stream; return the words that are no messages.

        Raises:
            PeerFault: they break the rules; nothing more is to be fed.
        """
        incoming = self._incoming[channel]
        if is_last:
            self._note_last(channel)
        if self.is_closed:
            incoming.skip(len(data))
            self._grant(channel)
            return []
        incoming.feed(data)
        self._check_unread()
        if incoming.ready:
            self._wake()
        words, incoming.words = incoming.words, []
        self._grant(channel)
        return words

    @property
    def has_all(self) -> bool:
        """Whether everything that the other side will ever send has arrived."""
        return len(self._ended) == len(Channel)

    def flush(self) -> None:
        """Hand over what waits, as far as the connection takes it; CONTROL first."""
        for channel, outgoing in self._outgoing.items():
            if outgoing.waiting:
                for part in outgoing.take(self._wire.room(channel)):
                    self._wire.write(channel, part)
            self._advance(channel)
        if self.is_closed and not self.unsent:
            self._wire.finish()

    def grant(self) -> None:
        """Let the other side send what fits now."""
        for channel in Channel:
            self._grant(channel)

    def end(self, reason: MeshError | None = None) -> None:
        """Send nothing more; receiving ends when all is read, or at once for that reason."""
        for channel in Channel:
            self._outgoing[channel].drop()
            if reason is not None:
                self._incoming[channel].drop()
        self._stop_sending()
        self._stop_reading(reason or self._lost())

    def _note_last(self, channel: Channel) -> None:
        """Take note that the other side has closed, and sent all of a channel."""
        self._ended.add(channel)
        for outgoing in self._outgoing.values():
            outgoing.drop()  # nobody would read it
        self._stop_sending()
        if self.has_all:
            self._stop_reading(self._lost())

    def _stop_sending(self) -> None:
        self._sending_end = self._sending_end or self._lost()
        for line in self._lines.values():
            for place in line:
                if not place.done():
                    place.set_result(False)
            line.clear()

    def _stop_reading(self, reason: MeshError) -> None:
        self._reading_end = self._reading_end or reason
        self._wake()

    def _is_free(self, channel: Channel, size: int) -> bool:
        return not self._lines[channel] and self._outgoing[channel].has_room(size)

    async def _stand_in_line(self, channel: Channel, message: Sequence[Buffer], size: int) -> bool:
        """Wait for room and a turn; tell whether the message was sent."""
        line = self._lines[channel]
        place: asyncio.Future[bool] = self._loop.create_future()
        line[place] = message, size
        try:
            return await place
        except asyncio.CancelledError:
            line.pop(place, None)
            self._advance(channel)  # the next in line may fit where this one did not
            raise

    def _advance(self, channel: Channel) -> None:
        line = self._lines[channel]
        while line:
            place, (message, size) = next(iter(line.items()))
            if not place.cancelled():
                if not self._outgoing[channel].has_room(size):
                    return
                line.pop(place)
                self._admit(channel, message, size)
                place.set_result(True)
            else:
                line.pop(place, None)

    def _admit(self, channel: Channel, message: Sequence[Buffer], size: int) -> None:
        self._messages_sent += 1
        self._bytes_sent += size
        outgoing = self._outgoing[channel]
        was_empty = not outgoing.waiting
        outgoing.put(MESSAGE, message, size)
        if was_empty:
            for part in outgoing.take(self._wire.room(channel)):
                self._wire.write(channel, part)
        if outgoing.waiting:
            outgoing.own()  # the sender may change what has not left
        self._wire.transmit_soon()

    def _grant(self, channel: Channel) -> None:
        """Announce a grant when it is worth a frame, or when a message needs it to be whole."""
        if not self.is_taken:
            return
        window = WINDOW_BYTES if self._limit is None else min(WINDOW_BYTES, self._limit)
        incoming, granted = self._incoming[channel], self._granted[channel]
        limit = max(incoming.read + window, incoming.needed)
        if limit - granted >= window // BATCH or incoming.needed > granted:
            self._granted[channel] = limit
            self._wire.grant(channel, limit)
            self._wire.transmit_soon()

    def _check_unread(self) -> None:
        if self._limit is None:
            return
        unread = sum(incoming.unread for incoming in self._incoming.values())
        if unread > self._limit:
            fault = PeerFault(
                f"`{self.address}` sent {unread} B unread where {self._limit} B are allowed"
            )
            self._wire.fail(fault)

    async def _wait(self) -> None:
        if self._reader is not None:
            raise RuntimeError("two tasks receive from one link")
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _lost(self) -> LinkLost:
        return LinkLost(f"The link to `{self.address}` is closed")
