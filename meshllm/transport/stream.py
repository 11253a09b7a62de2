"""Links over any asyncio byte stream; a transport adds only how to connect.

On the stream a piece is its header (one byte of kind, and the four-byte number of `FIRST` and
`BACK`) and its body, whose length follows from the current message (`meshllm.transport.lanes`).
A listener first sends a credit of 0, which tells the dialling side that it was accepted::

    server = await loop.create_unix_server(listener.accept, path)
    ...
    _, wire = await loop.create_unix_connection(lambda: StreamWire(address), path)
    return await wire.accepted()
"""

import asyncio
from contextlib import AbstractContextManager
from typing import Self

from meshllm.errors import LinkLost, PeerFault
from meshllm.transport.contract import Channel
from meshllm.transport.gathering import Gathering
from meshllm.transport.laned_link import LanedLink
from meshllm.transport.lanes import BACK, FIRST, NEXT, NUMBER_BYTES, PIECE_BYTES, head
from meshllm.transport.linger import Linger

CLOSE_WAIT_S = 0.5
"""How long `close` waits for the peer to close too; after that, `Linger` applies."""


class StreamWire(asyncio.Protocol):
    """Sends and receives the pieces of one link over one stream; the `Wire` of that link."""

    bytes_per_s: float | None = None

    def __init__(self, address: str, listener: "StreamListener | None" = None) -> None:
        self.is_writable = True
        self.link = LanedLink(self, address)
        self._address = address
        self._listener = listener
        self._stream: asyncio.Transport
        self._gathering: Gathering
        self._linger: Linger
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._heard = asyncio.Event()  # data was received, or the stream has ended
        self._is_accepted = False
        self._head = b""  # an incomplete header
        self._body = 0  # bytes missing of the current body
        self._size = dict.fromkeys(Channel, 0)
        """By channel: bytes of the current message in pieces that have not begun."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start; a listener yields the link."""
        assert isinstance(transport, asyncio.Transport)
        self._stream = transport
        self._gathering = Gathering(transport.write)
        self._linger = Linger(self._left, transport.abort)
        transport.set_write_buffer_limits(high=PIECE_BYTES)
        if self._listener is None:
            return
        self.write(head(BACK, 0), b"")
        if not self._listener.arrive(self):
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Decode received pieces; close the link after a protocol violation."""
        self._is_accepted = True
        self._heard.set()
        data = self._head + data
        try:
            self._head = data[self._read(memoryview(data)) :]
        except PeerFault as fault:
            self.link.end(PeerFault(f"Protocol violation by `{self._address}`: {fault}"))
            self._stream.abort()

    def eof_received(self) -> bool:
        """End the link; the stream closes once written data is flushed."""
        self.link.end()
        return False

    def pause_writing(self) -> None:
        """Stop the link from writing."""
        self.is_writable = False

    def resume_writing(self) -> None:
        """Let the link write again."""
        self.is_writable = True
        self.link.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the link."""
        self.is_writable = False
        self.link.end()
        self._closed.set_result(None)
        self._linger.cancel()
        self._heard.set()

    async def accepted(self) -> LanedLink:
        """Wait until the listener has accepted; return the link.

        Raises:
            LinkLost: the listener closed before it accepted.

        If cancelled, no link is left behind.
        """
        try:
            await self._heard.wait()
        except asyncio.CancelledError:
            self._stream.abort()
            raise
        if not self._is_accepted:
            raise LinkLost(f"`{self._address}` closed before it accepted")
        return self.link

    def write(self, head: bytes, body: memoryview | bytes) -> None:
        """Write one piece."""
        self._gathering.write(b"".join((head, body)))

    def together(self) -> AbstractContextManager[None]:
        """Write the pieces that are sent inside the context at its end."""
        return self._gathering.together()

    def send_close(self) -> None:
        """Close this direction, so that the peer still reads what was sent."""
        if not self._stream.is_closing():
            self._stream.write_eof()

    async def wait_closed(self) -> None:
        """Wait up to `CLOSE_WAIT_S` for the peer to close too; then leave it to a timer."""
        if not self._closed.done():
            self._linger.start()
        await asyncio.wait([self._closed], timeout=CLOSE_WAIT_S)

    def note_authentication(self, *, is_authenticated: bool) -> None:
        """Do nothing: a stream does not count unauthenticated peers."""

    def _left(self) -> int:
        return self.link.unsent + self._stream.get_write_buffer_size()

    def _read(self, data: memoryview) -> int:
        """Pass on complete headers and parts of bodies; return how many bytes were consumed."""
        used = 0
        while used < len(data):
            if self._body:
                part = data[used : used + self._body]
                self.link.fill(part)
                self._body -= len(part)
                used += len(part)
                continue
            kind = data[used]
            end = used + (1 if kind & ~1 == NEXT else 1 + NUMBER_BYTES)
            if len(data) < end:
                break
            number = int.from_bytes(data[used + 1 : end], "big")
            used = end
            self._body = self._begin(kind, number)
        return used

    def _begin(self, kind: int, number: int) -> int:
        """Start a piece; return the length of its body."""
        channel = Channel(kind & 1)
        if kind & ~1 == FIRST:
            self._size[channel] = number
        size = min(PIECE_BYTES, self._size[channel]) if kind & ~1 in (FIRST, NEXT) else 0
        self.link.begin(kind, number, size)
        self._size[channel] -= size
        return size


class StreamListener:
    """Yields a link for each incoming stream."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self._arrivals: asyncio.Queue[StreamWire | None] = asyncio.Queue()  # None: closed
        self._is_closed = False

    @property
    def address(self) -> str:
        """The most reachable of `addresses`."""
        return self.addresses[0]

    def accept(self) -> StreamWire:
        """Return the asyncio protocol of a new stream, for an asyncio server."""
        return StreamWire(self.address, self)

    def arrive(self, wire: StreamWire) -> bool:
        """Queue the link of a new stream; return False if the listener is closed."""
        if not self._is_closed:
            self._arrivals.put_nowait(wire)
        return not self._is_closed

    def links(self) -> Self:
        """Iterate over the links; several tasks may do so."""
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> LanedLink:
        wire = await self._arrivals.get()
        if wire is None:
            self._arrivals.put_nowait(None)  # for other tasks that iterate
            raise StopAsyncIteration
        return wire.link

    async def close(self) -> None:
        """Stop yielding, and close links that were not accepted by the application."""
        self._is_closed = True
        while not self._arrivals.empty():
            if (wire := self._arrivals.get_nowait()) is not None:
                await wire.link.close()
        self._arrivals.put_nowait(None)
