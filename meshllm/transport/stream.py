"""Links over any byte stream of asyncio: what a transport needs besides connecting.

A piece on the stream is its head, one byte of kind and four of the number that `FIRST` and `BACK`
carry, and its body, whose length follows from the message under way (`meshllm.transport.lanes`).
A listener begins with a credit of 0, which tells the side that dials that it was accepted::

    server = await loop.create_unix_server(listener.accept, path)
    ...
    _, wire = await loop.create_unix_connection(lambda: StreamWire(address), path)
    return await wire.accepted()
"""

import asyncio
from typing import Self

from meshllm.errors import LinkLost, PeerFault
from meshllm.transport.contract import Channel
from meshllm.transport.laned_link import LanedLink
from meshllm.transport.lanes import BACK, FIRST, NEXT, NUMBER_BYTES, PIECE_BYTES, head

GONE_S = 0.5
"""How long `close` waits for the other side to close too."""
LINGER_S = 5.0
"""A closing stream is cut when the other side takes nothing for so long."""


class StreamWire(asyncio.Protocol):
    """Carries the pieces of one link over one stream."""

    bytes_per_s: float | None = None

    def __init__(self, address: str, listener: "StreamListener | None" = None) -> None:
        self.is_writable = True
        self.link = LanedLink(self, address)
        self._address = address
        self._listener = listener
        self._stream: asyncio.Transport
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._heard = asyncio.Event()  # something arrived, or the stream ended
        self._is_accepted = False
        self._head = b""  # what arrived of a head that is not whole
        self._body = 0  # bytes of the body under way that are still to come
        self._size = dict.fromkeys(Channel, 0)  # bytes of messages still to begin

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin; a listener yields the link."""
        assert isinstance(transport, asyncio.Transport)
        self._stream = transport
        transport.set_write_buffer_limits(high=PIECE_BYTES)
        if self._listener is None:
            return
        self.write(head(BACK, 0), b"")
        if not self._listener.arrive(self):
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read the pieces that arrived; close the link when the peer breaks the rules."""
        self._is_accepted = True
        self._heard.set()
        data = self._head + data
        try:
            self._head = data[self._read(memoryview(data)) :]
        except PeerFault as fault:
            self.link.end(PeerFault(f"`{self._address}` broke the rules: {fault}"))
            self._stream.abort()

    def eof_received(self) -> bool:
        """End the link; closes the stream when what was written has left."""
        self.link.end()
        return False

    def pause_writing(self) -> None:
        """Stop taking pieces from the link."""
        self.is_writable = False

    def resume_writing(self) -> None:
        """Take pieces again."""
        self.is_writable = True
        self.link.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the link."""
        self.is_writable = False
        self.link.end()
        self._gone.set_result(None)
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
        """Send one piece."""
        self._stream.writelines((head, body))

    def say_goodbye(self) -> None:
        """Close this direction, so that the other side reads what was sent."""
        if not self._stream.is_closing():
            self._stream.write_eof()

    async def wait_gone(self) -> None:
        """Wait for the other side to close too, and cut the stream if it takes too long."""
        if not self._gone.done():
            asyncio.get_running_loop().call_later(LINGER_S, self._stream.abort)
        await asyncio.wait([self._gone], timeout=GONE_S)

    def know(self, *, is_stranger: bool) -> None:
        """Do nothing: a stream does not count strangers."""

    def _read(self, data: memoryview) -> int:
        """Pass on whole heads and what is there of bodies; return how many bytes were used."""
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
        """Begin a piece; return the length of its body."""
        channel = Channel(kind & 1)
        if kind & ~1 == FIRST:
            self._size[channel] = number
        size = min(PIECE_BYTES, self._size[channel]) if kind & ~1 in (FIRST, NEXT) else 0
        self.link.begin(kind, number, size)
        self._size[channel] -= size
        return size


class StreamListener:
    """Yields a link for each stream that arrives."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self._arrivals: asyncio.Queue[StreamWire | None] = asyncio.Queue()  # None: closed
        self._is_closed = False

    @property
    def address(self) -> str:
        """Where others most likely reach this listener."""
        return self.addresses[0]

    def accept(self) -> StreamWire:
        """Make the protocol of a stream that arrives, for a server of asyncio."""
        return StreamWire(self.address, self)

    def arrive(self, wire: StreamWire) -> bool:
        """Queue the link of a new stream; refuse it if the listener was closed meanwhile."""
        if not self._is_closed:
            self._arrivals.put_nowait(wire)
        return not self._is_closed

    def links(self) -> Self:
        """Yield the links, also to several tasks."""
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> LanedLink:
        wire = await self._arrivals.get()
        if wire is None:
            self._arrivals.put_nowait(None)  # for the task that asks next
            raise StopAsyncIteration
        return wire.link

    async def close(self) -> None:
        """Stop yielding, and close the links that nobody took."""
        self._is_closed = True
        while not self._arrivals.empty():
            if (wire := self._arrivals.get_nowait()) is not None:
                await wire.link.close()
        self._arrivals.put_nowait(None)
