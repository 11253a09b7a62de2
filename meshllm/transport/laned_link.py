"""A link over one ordered stream: two channels, credit-based flow control, back-pressure."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

from meshllm.errors import LinkLost, MeshError, PeerFault
from meshllm.transport.contract import Buffer, Channel, LinkStatistics, checked_size
from meshllm.transport.lanes import BACK, Incoming, Outgoing
from meshllm.transport.waiting import ReadTurn, SendTurns


class Wire(Protocol):
    """What a link needs from its connection."""

    is_writable: bool
    """Whether the write buffer of the socket has room."""

    @property
    def bytes_per_s(self) -> float | None:
        """Delivery rate of the socket; None if unknown."""

    def write(self, head: bytes, body: memoryview | bytes) -> None:
        """Send one piece as one frame."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Return a context at whose end all pieces that were sent inside are written."""
        ...

    def send_close(self) -> None:
        """Send a close frame."""
        ...

    async def wait_closed(self) -> None:
        """Wait until the connection is closed, for a short time at most."""
        ...

    def note_authentication(self, *, is_authenticated: bool) -> None:
        """Note whether the peer is authenticated."""
        ...


class LanedLink:
    """One end of a link: `meshllm.transport.contract.Link`, and callbacks for the connection."""

    def __init__(self, wire: Wire, address: str) -> None:
        self.peer_host = ""
        """The IP address of the peer, see `meshllm.transport.contract.HasPeerHost`."""
        self._wire = wire
        self._address = address
        self._outgoing = Outgoing()
        self._incoming = Incoming()
        self._senders = {
            channel: SendTurns(
                partial(self._outgoing.has_credit, channel), partial(self._admit, channel)
            )
            for channel in Channel
        }
        self._reader = ReadTurn()
        self._end: MeshError | None = None  # why sending and receiving have ended
        self._is_closed = False
        self._messages_sent = self._bytes_sent = 0
        self._messages_received = self._bytes_received = 0

    async def send(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> None:
        """Send a message; wait for credit, after all senders that already wait."""
        size = checked_size(message)
        if self._end is not None or not await self._senders[channel].send(message, size):
            raise self._lost()

    def offer(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> bool:
        """Send a message if there is credit and no sender waits."""
        size = checked_size(message)
        return self._end is None and self._senders[channel].offer(message, size)

    def together(self) -> AbstractContextManager[None]:
        """Write what is offered inside the context at its end."""
        return self._wire.together()

    async def receive(self) -> tuple[Channel, Buffer]:
        """Wait for the next message; return the credit of messages that were read."""
        while not self._is_closed:
            if (arrived := self._incoming.pop()) is not None:
                self._note(*arrived)
                return arrived
            if self._end is not None:
                raise self._end
            await self._reader.wait()
        raise self._lost()

    async def close(self) -> None:
        """Flush sent messages, close, and wait a short time for the peer's close frame."""
        if not self._is_closed:
            self._is_closed = True
            self._incoming.drop()
            self._stop(self._lost())
            self.flush()
        await self._wire.wait_closed()

    @property
    def statistics(self) -> LinkStatistics:
        """Message and byte counts of this side."""
        return LinkStatistics(
            self._messages_sent,
            self._bytes_sent,
            self._messages_received,
            self._bytes_received,
            bytes_per_s=self._wire.bytes_per_s,
        )

    def limit_unread(self, size: int | None) -> None:
        """Limit the unread bytes of an unauthenticated peer; None lifts the limit.

        Those that came before count too: a peer may send before the link is asked for.
        """
        self._incoming.limit = size
        if size is not None and (unread := self._incoming.unread) > size:
            text = f"{unread} B unread exceed the limit of {size} B"
            self.end(PeerFault(f"Protocol violation by `{self._address}`: {text}"))
        self._wire.note_authentication(is_authenticated=size is None)

    @property
    def unsent(self) -> int:
        """Bytes accepted by `send` and not yet written to the socket."""
        return self._outgoing.unsent

    def begin(self, kind: int, number: int, size: int) -> None:
        """Start receiving a piece with a body of ``size`` bytes; raise `PeerFault` if invalid."""
        if self._is_closed or self._end is not None:
            return  # the peer does not know of it yet
        if kind & ~1 == BACK and not size:
            channel = Channel(kind & 1)
            self._outgoing.receive_credit(channel, number)
            self._senders[channel].advance()
        elif self._incoming.begin(kind, number, size):
            self._reader.wake()

    def fill(self, part: memoryview | bytes) -> None:
        """Receive the next part of the body."""
        is_over = self._is_closed or self._end is not None
        if not is_over and self._incoming.fill(part):
            self._reader.wake()

    def flush(self) -> None:
        """Write queued pieces while the socket has room."""
        while self._wire.is_writable:
            if (piece := self._outgoing.next_piece()) is None:
                if self._is_closed:
                    self._wire.send_close()
                return
            self._wire.write(*piece)

    def end(self, reason: PeerFault | None = None) -> None:
        """Stop sending; receiving ends once all is read, or at once if there is a ``reason``."""
        self._outgoing.drop()
        if reason is not None:
            self._incoming.drop()
        self._stop(reason or self._lost())

    def _stop(self, reason: MeshError) -> None:
        self._end = self._end or reason
        for senders in self._senders.values():
            senders.end()
        self._reader.wake()

    def _admit(self, channel: Channel, message: Sequence[Buffer], size: int) -> None:
        self._messages_sent += 1
        self._bytes_sent += size
        self._outgoing.put(channel, message, size)
        self.flush()
        self._outgoing.copy_unsent(channel)  # the caller may reuse its buffers

    def _note(self, channel: Channel, message: Buffer) -> None:
        self._messages_received += 1
        self._bytes_received += len(message)
        if self._end is None and (due := self._incoming.credit_due(channel)):
            self._outgoing.queue_credit(channel, due)
            self.flush()

    def _lost(self) -> LinkLost:
        return LinkLost(f"The link to `{self._address}` is closed")
