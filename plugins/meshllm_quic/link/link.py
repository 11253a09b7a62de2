"""A link over one QUIC connection."""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from meshllm.errors import LinkLost, MeshError, PeerFault
from meshllm.transport.contract import Buffer, Channel, LinkStatistics, checked_size
from meshllm.transport.waiting import ReadTurn, SendTurns
from meshllm_quic.wire.lanes import MESSAGE, WINDOW_BYTES, IncomingRecords, OutgoingRecords

BATCH = 4
"""A grant is announced once it adds at least 1/BATCH of the window."""


class QuicWire(Protocol):
    """What a link needs from its connection."""

    def room(self, channel: Channel) -> int:
        """Return how many bytes the connection accepts now."""
        ...

    def write(self, channel: Channel, data: Buffer) -> None:
        """Append a copy of the bytes to a stream."""
        ...

    def finish(self) -> None:
        """Send FIN on both streams after the written data."""
        ...

    def grant(self, channel: Channel, offset: int) -> None:
        """Raise the flow-control limit of a stream to ``offset``."""
        ...

    def transmit_soon(self) -> None:
        """Send written data and grants in this iteration of the event loop."""
        ...

    def fail(self, reason: PeerFault) -> None:
        """Close the connection immediately, for this reason."""
        ...

    async def wait_closed(self) -> None:
        """Wait until the connection is closed, for a short time at most."""
        ...

    def note_authentication(self, *, is_authenticated: bool) -> None:
        """Note whether the peer is authenticated."""
        ...

    @property
    def peer_host(self) -> str:
        """The host that the peer's packets come from; empty if they are relayed."""

    def describe(self, statistics: LinkStatistics) -> LinkStatistics:
        """Add the path statistics of the connection."""
        ...


class QuicLink:
    """One end of a link: `meshllm.transport.contract.Link`, and callbacks for the connection."""

    def __init__(self, wire: QuicWire, address: str) -> None:
        self.address = address
        self.peer_key = b""
        """Ed25519 key of the peer, authenticated by TLS before the link is handed out."""
        self.is_closed = False
        self._wire = wire
        self._outgoing = {channel: OutgoingRecords() for channel in Channel}  # CONTROL is first
        self._incoming = {channel: IncomingRecords() for channel in Channel}
        self._granted = dict.fromkeys(Channel, 0)
        self._is_granting = False
        self._senders = {
            channel: SendTurns(self._outgoing[channel].has_room, partial(self._admit, channel))
            for channel in Channel
        }
        self._limit: int | None = None
        self._reader = ReadTurn()
        self._sending_end: MeshError | None = None  # why sending has ended
        self._reading_end: MeshError | None = None  # why receiving has ended
        self._ended: set[Channel] = set()  # streams received up to their FIN
        self._messages_sent = self._bytes_sent = 0
        self._messages_received = self._bytes_received = 0

    @property
    def peer_host(self) -> str:
        """The IP address of the peer now, see `meshllm.transport.contract.HasPeerHost`."""
        return self._wire.peer_host

    async def send(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> None:
        """Send a message; wait for room, after all senders that already wait."""
        size = checked_size(message)
        if self._sending_end is not None or not await self._senders[channel].send(message, size):
            raise self._lost()

    def offer(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> bool:
        """Send a message if there is room and no sender waits."""
        size = checked_size(message)
        return self._sending_end is None and self._senders[channel].offer(message, size)

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
            await self._reader.wait()
        raise self._lost()

    async def close(self) -> None:
        """Flush sent messages, close, and wait a short time until they are acknowledged."""
        if not self.is_closed:
            self.is_closed = self._is_granting = True
            for channel, incoming in self._incoming.items():
                incoming.drop()
                self._grant(channel)
            self._stop_sending()
            self._stop_reading(self._lost())
            self.flush()
            self._wire.transmit_soon()
        await self._wire.wait_closed()

    @property
    def statistics(self) -> LinkStatistics:
        """Message and byte counts of this side, and path statistics."""
        return self._wire.describe(
            LinkStatistics(
                self._messages_sent,
                self._bytes_sent,
                self._messages_received,
                self._bytes_received,
            )
        )

    def limit_unread(self, size: int | None) -> None:
        """Limit the unread bytes of an unauthenticated peer; None lifts the limit."""
        self._limit = size
        self._wire.note_authentication(is_authenticated=size is None)
        self._check_unread()
        self.start_granting()

    @property
    def unsent(self) -> int:
        """Bytes queued until the connection has room."""
        return sum(outgoing.waiting for outgoing in self._outgoing.values())

    def start_granting(self) -> None:
        """Grant credit, which never decreases, once the application has set a limit or none.

        Until then the peer has the window of an unauthenticated one.
        """
        self._is_granting = True
        for channel in Channel:
            self._grant(channel)

    def put_record(self, kind: int, body: bytes, channel: Channel = Channel.CONTROL) -> None:
        """Send a record to the peer's transport, after the queued messages."""
        self._outgoing[channel].put(kind, [body], len(body))
        self.flush()

    def arrived(self, channel: Channel, data: bytes, *, is_last: bool) -> list[tuple[int, bytes]]:
        """Receive the next bytes of a stream; return the records that are not messages.

        Raises:
            PeerFault: the bytes are invalid; pass no more.
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
            self._reader.wake()
        records, incoming.records = incoming.records, []
        self._grant(channel)
        return records

    @property
    def has_all(self) -> bool:
        """Whether both streams were received up to their FIN."""
        return len(self._ended) == len(Channel)

    def flush(self) -> None:
        """Pass queued bytes to the connection while it has room; CONTROL first."""
        for channel, outgoing in self._outgoing.items():
            if outgoing.waiting:
                for part in outgoing.take(self._wire.room(channel)):
                    self._wire.write(channel, part)
            self._senders[channel].advance()
        if self.is_closed and not self.unsent:
            self._wire.finish()

    def end(self, reason: MeshError | None = None) -> None:
        """Stop sending; receiving ends once all is read, or at once if there is a ``reason``."""
        for channel in Channel:
            self._outgoing[channel].drop()
            if reason is not None:
                self._incoming[channel].drop()
        self._stop_sending()
        self._stop_reading(reason or self._lost())

    def _note_last(self, channel: Channel) -> None:
        """Handle the FIN of a stream: the peer has closed the link."""
        self._ended.add(channel)
        for outgoing in self._outgoing.values():
            outgoing.drop()  # the peer would not read it
        self._stop_sending()
        if self.has_all:
            self._stop_reading(self._lost())

    def _stop_sending(self) -> None:
        self._sending_end = self._sending_end or self._lost()
        for senders in self._senders.values():
            senders.end()

    def _stop_reading(self, reason: MeshError) -> None:
        self._reading_end = self._reading_end or reason
        self._reader.wake()

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
            outgoing.own()  # the caller may reuse its buffers
        self._wire.transmit_soon()

    def _grant(self, channel: Channel) -> None:
        """Raise the limit if that is worth a frame, or if the current message needs it."""
        if not self._is_granting:
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
            why = f"{unread} B unread exceed the limit of {self._limit} B"
            self._wire.fail(PeerFault(f"Protocol violation by `{self.address}`: {why}"))

    def _lost(self) -> LinkLost:
        return LinkLost(f"The link to `{self.address}` is closed")
