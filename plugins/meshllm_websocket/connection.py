"""One WebSocket connection on a socket.

It sends no WebSocket pings: the heartbeats of the ring detect a dead neighbour, and TCP keep-alive
detects a dead machine. Neither is triggered by a process that computes for a while.
"""

import asyncio
import logging
import socket
from contextlib import suppress
from typing import Final, Protocol

from websockets.client import ClientProtocol
from websockets.frames import CloseCode
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.server import ServerProtocol

from meshllm.errors import PeerFault
from meshllm.transport.laned_link import LanedLink
from meshllm.transport.lanes import PIECE_BYTES
from meshllm_websocket.frames import FrameReader, frame
from meshllm_websocket.rate import delivery_rate

BUFFER_BYTES = 256 * 1024
"""Read buffer; fits the cache of a core."""
MAX_OPENING_BYTES = 16 * 1024
"""Longest handshake request or response; proxies add a few lines."""
GONE_S = 0.5
"""How long `Link.close` waits for the peer's close frame; after that, `LINGER_S` applies."""
LINGER_S = 5.0
"""A closing connection is aborted if the peer accepts no data for this long."""
KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Detects a dead machine after 60 s; TCP_KEEPALIVE is the macOS name of TCP_KEEPIDLE."""

SILENT: Final = logging.Logger("meshllm_websocket.silent", logging.CRITICAL + 1)
"""For the library, which would otherwise log the bytes of frames."""


class Opening(Protocol):
    """The opening handshake of the dialling or the listening side."""

    def begin(self, connection: "Connection") -> None:
        """Start on a new connection."""
        ...

    def heard(self, connection: "Connection", word: Request | Response | None) -> None:
        """Handle the peer's request or response; None if it was not HTTP."""
        ...

    def know(self, connection: "Connection", *, is_stranger: bool) -> None:
        """Note whether the peer is authenticated."""
        ...

    def gone(self, connection: "Connection") -> None:
        """Note that the connection is closed."""
        ...


class Connection(asyncio.BufferedProtocol):
    """Sends and receives the pieces of one link; the `Wire` of that link."""

    def __init__(
        self, machine: ClientProtocol | ServerProtocol, opening: Opening, address: str = ""
    ) -> None:
        self.machine = machine
        self.address = address
        self.is_writable = True
        self.socket: asyncio.Transport
        self.link: LanedLink
        self._opening = opening
        self._is_client = isinstance(machine, ClientProtocol)
        self._loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._buffer = memoryview(bytearray(MAX_OPENING_BYTES))
        self._kept = 0  # unconsumed bytes at the start of the buffer
        self._reader: FrameReader
        self._late = b""  # control frames that wait for room in the socket
        self._is_leaving = False
        self._last_call: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """Whether the handshake is complete."""
        return self.machine.state is not State.CONNECTING

    @property
    def bytes_per_s(self) -> float | None:
        """Delivery rate of the socket; None if the kernel does not report it."""
        return delivery_rate(self.socket.get_extra_info("socket"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the opening handshake."""
        assert isinstance(transport, asyncio.Transport)
        self.socket = transport
        self.address = self.address or "{}:{}".format(*transport.get_extra_info("peername")[:2])
        self.link = LanedLink(self, self.address)
        self._reader = FrameReader(self.link, is_masked=not self._is_client)
        transport.set_write_buffer_limits(high=PIECE_BYTES)
        _prepare(transport.get_extra_info("socket"))
        self._opening.begin(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the free part of the buffer."""
        return self._buffer[self._kept :]

    def buffer_updated(self, nbytes: int) -> None:
        """Consume received bytes, and keep an incomplete frame header in the buffer."""
        data = self._buffer[: self._kept + nbytes]
        used = 0 if self.is_open else self._open(data)
        if self._is_leaving:
            used = len(data)
        elif self.is_open:
            used += self._read(data[used:])
        self._kept = len(data) - used
        if used and self._kept:
            self._buffer[: self._kept] = data[used:]

    def transmit(self) -> None:
        """Write the pending output of the library."""
        words = b"".join(self.machine.data_to_send())
        if self.is_writable:
            self.socket.write(words)
        elif words:
            self._late = words  # one pong may answer many pings, RFC 6455 section 5.5.3

    def write(self, head: bytes, body: memoryview | bytes) -> None:
        """Send one piece as one frame."""
        for part in frame(head, body, is_masked=self._is_client):
            self.socket.write(part)

    def say_goodbye(self) -> None:
        """Send a close frame."""
        if self.machine.state is State.OPEN:
            self.machine.send_close(CloseCode.NORMAL_CLOSURE)
            self.transmit()

    def refuse(self, words: bytes) -> None:
        """Write a final response and close the socket."""
        self.socket.write(words)
        self._leave()

    def abort(self) -> None:
        """Close the socket immediately."""
        self.link.end()
        self.socket.abort()

    async def wait_gone(self) -> None:
        """Wait up to `GONE_S` until the socket is closed; after that, a timer closes it."""
        self._linger()
        await asyncio.wait([self._gone], timeout=GONE_S)

    def know(self, *, is_stranger: bool) -> None:
        """Pass on whether the peer is authenticated."""
        self._opening.know(self, is_stranger=is_stranger)

    def pause_writing(self) -> None:
        """Stop the link from writing."""
        self.is_writable = False

    def resume_writing(self) -> None:
        """Let the link write again."""
        self.is_writable = True
        self.socket.write(self._late)
        self._late = b""
        self.link.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the link."""
        self.is_writable = False
        self._opening.gone(self)
        self.link.end()
        self._gone.set_result(None)
        if self._last_call is not None:
            self._last_call.cancel()

    def _open(self, data: memoryview) -> int:
        """Handle handshake bytes; return how many were consumed."""
        end = bytes(data).find(b"\r\n\r\n") + 4
        if end < 4 and len(data) < MAX_OPENING_BYTES:
            return 0
        words: list[Request | Response] = []
        if end >= 4 and (self._is_client or end == len(data)):  # a client waits for us
            words = self._tell(data[:end]) or self._tell(data[end:])
        self._opening.heard(self, words[0] if words else None)
        if not self.is_open:
            return len(data)
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        return end

    def _read(self, data: memoryview) -> int:
        try:
            used = self._reader.read(data)
        except PeerFault as fault:
            self.machine.fail(CloseCode.POLICY_VIOLATION)
            self.transmit()
            self._leave(self._fault(fault))
            return len(data)
        if self._reader.others:
            self._obey(b"".join(self._reader.others))
            self._reader.others.clear()
        return used

    def _obey(self, control_frames: bytes) -> None:
        self._tell(control_frames)
        self.transmit()
        if self.machine.parser_exc is not None:
            self._leave(self._fault(self.machine.parser_exc))
        elif self.machine.close_rcvd is not None:
            self._leave()

    def _fault(self, why: Exception) -> PeerFault:
        return PeerFault(f"Protocol violation by `{self.address}`: {why}")

    def _leave(self, reason: PeerFault | None = None) -> None:
        """Close the socket once written data is flushed."""
        if not self._is_leaving:
            self._is_leaving = True
            self.link.end(reason)
            self.socket.close()
            self._linger()

    def _linger(self) -> None:
        """Abort the connection if the peer accepts no more of the remaining data."""
        if self._last_call is None and not self._gone.done():
            self._call(before=-1)

    def _call(self, before: int) -> None:
        left = self.link.unsent + self.socket.get_write_buffer_size()
        if left == before:
            self.socket.abort()
        else:
            self._last_call = self._loop.call_later(LINGER_S, self._call, left)

    def _tell(self, data: memoryview | bytes) -> list[Request | Response]:
        """Pass bytes to the library; return the requests and responses it parsed."""
        self.machine.receive_data(bytes(data))
        events = self.machine.events_received()
        return [event for event in events if isinstance(event, Request | Response)]


def _prepare(sock: socket.socket) -> None:
    with suppress(OSError):  # macOS refuses if the peer has already closed
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE.items():
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
