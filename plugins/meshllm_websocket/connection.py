"""One WebSocket connection on a socket.

It sends no WebSocket pings: the heartbeats of the ring detect a dead neighbour, and TCP keep-alive
detects a dead machine. Neither is triggered by a process that computes for a while.
"""

import asyncio
import logging
import re
import socket
from contextlib import AbstractContextManager, suppress
from typing import Final, Protocol

from websockets.client import ClientProtocol
from websockets.datastructures import Headers
from websockets.frames import CloseCode
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.server import ServerProtocol

from meshllm.errors import PeerFault
from meshllm.transport.gathering import Gathering
from meshllm.transport.laned_link import LanedLink
from meshllm.transport.lanes import PIECE_BYTES
from meshllm.transport.linger import Linger
from meshllm_websocket.frames import FrameReader, frame
from meshllm_websocket.rate import delivery_rate

BUFFER_BYTES = 256 * 1024
"""Read buffer; fits the cache of a core."""
MAX_OPENING_BYTES = 16 * 1024
"""Longest handshake request or response; proxies add a few lines."""
CLOSE_WAIT_S = 0.5
"""How long `Link.close` waits for the peer's close frame; after that, `Linger` applies."""
KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Detects a dead machine after 60 s; TCP_KEEPALIVE is the macOS name of TCP_KEEPIDLE."""

_STATUS = re.compile(rb"HTTP/1\.[01] ([345][0-9]{2}) ")

SILENT: Final = logging.Logger("meshllm_websocket.silent", logging.CRITICAL + 1)
"""For the library, which would otherwise log the bytes of frames."""


def _refusal(head: memoryview) -> list[Request | Response]:
    """Return a response that refuses, whose body has not arrived as a whole; else nothing."""
    line = _STATUS.match(bytes(head))
    return [Response(int(line[1]), "", Headers())] if line else []


class Handshake(Protocol):
    """The opening handshake of the dialling or the listening side."""

    def begin(self, connection: "WebsocketConnection") -> None:
        """Start on a new connection."""
        ...

    def received(
        self, connection: "WebsocketConnection", message: Request | Response | None
    ) -> None:
        """Handle the peer's request or response; None if it was not HTTP."""
        ...

    def note_authentication(
        self, connection: "WebsocketConnection", *, is_authenticated: bool
    ) -> None:
        """Note whether the peer is authenticated."""
        ...

    def closed(self, connection: "WebsocketConnection") -> None:
        """Note that the connection is closed."""
        ...


class WebsocketConnection(asyncio.BufferedProtocol):
    """Sends and receives the pieces of one link; the `Wire` of that link."""

    def __init__(
        self, machine: ClientProtocol | ServerProtocol, handshake: Handshake, address: str = ""
    ) -> None:
        self.machine = machine
        self.address = address
        self.is_writable = True
        self.socket: asyncio.Transport
        self._gathering: Gathering
        self.link: LanedLink
        self._handshake = handshake
        self._is_client = isinstance(machine, ClientProtocol)
        self._loop = asyncio.get_running_loop()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._buffer = memoryview(bytearray(MAX_OPENING_BYTES))
        self._kept = 0  # unconsumed bytes at the start of the buffer
        self._reader: FrameReader
        self._pending_control = b""  # control frames that wait for room in the socket
        self._is_closing = False
        self._linger: Linger

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
        self._gathering = Gathering(transport.write)
        self._linger = Linger(self._left, transport.abort)
        host, port, *_ = transport.get_extra_info("peername") or ("", 0)  # it has been reset
        self.address = self.address or f"{host}:{port}"
        self.link = LanedLink(self, self.address)
        self.link.peer_host = host
        self._reader = FrameReader(self.link, is_masked=not self._is_client)
        transport.set_write_buffer_limits(high=PIECE_BYTES)
        _prepare(transport.get_extra_info("socket"))
        self._handshake.begin(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the free part of the buffer."""
        return self._buffer[self._kept :]

    def buffer_updated(self, nbytes: int) -> None:
        """Consume received bytes, and keep an incomplete frame header in the buffer."""
        data = self._buffer[: self._kept + nbytes]
        used = 0 if self.is_open else self._open(data)
        if self._is_closing:
            used = len(data)
        elif self.is_open:
            used += self._read(data[used:])
        self._kept = len(data) - used
        if used and self._kept:
            self._buffer[: self._kept] = data[used:]

    def transmit(self) -> None:
        """Write the pending output of the library."""
        data = b"".join(self.machine.data_to_send())
        if self.is_writable:
            self.socket.write(data)
        elif data:
            self._pending_control = data  # one pong may answer many pings, RFC 6455 section 5.5.3

    def write(self, head: bytes, body: memoryview | bytes) -> None:
        """Send one piece as one frame."""
        for part in frame(head, body, is_masked=self._is_client):
            self._gathering.write(part)

    def together(self) -> AbstractContextManager[None]:
        """Write the frames that are sent inside the context at its end."""
        return self._gathering.together()

    def send_close(self) -> None:
        """Send a close frame."""
        if self.machine.state is State.OPEN:
            self.machine.send_close(CloseCode.NORMAL_CLOSURE)
            self.transmit()

    def refuse(self, response: bytes) -> None:
        """Write a final response and close the socket."""
        self.socket.write(response)
        self._close()

    def abort(self) -> None:
        """Close the socket immediately."""
        self.link.end()
        self.socket.abort()

    async def wait_closed(self) -> None:
        """Wait up to `CLOSE_WAIT_S` until the socket is closed; after that, a timer closes it."""
        if not self._closed.done():
            self._linger.start()
        await asyncio.wait([self._closed], timeout=CLOSE_WAIT_S)

    def note_authentication(self, *, is_authenticated: bool) -> None:
        """Pass on whether the peer is authenticated."""
        self._handshake.note_authentication(self, is_authenticated=is_authenticated)

    def pause_writing(self) -> None:
        """Stop the link from writing."""
        self.is_writable = False

    def resume_writing(self) -> None:
        """Let the link write again."""
        self.is_writable = True
        self.socket.write(self._pending_control)
        self._pending_control = b""
        self.link.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the link."""
        self.is_writable = False
        self._buffer = memoryview(b"")  # at once: this object is in a reference cycle
        self._handshake.closed(self)
        self.link.end()
        self._closed.set_result(None)
        self._linger.cancel()

    def _open(self, data: memoryview) -> int:
        """Handle handshake bytes; return how many were consumed."""
        end = bytes(data).find(b"\r\n\r\n") + 4
        if end < 4 and len(data) < MAX_OPENING_BYTES:
            return 0
        messages: list[Request | Response] = []
        if end >= 4 and (self._is_client or end == len(data)):  # a client waits for us
            messages = self._feed(data[:end]) or self._feed(data[end:]) or _refusal(data[:end])
        self._handshake.received(self, messages[0] if messages else None)
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
            self._close(self._fault(fault))
            return len(data)
        if self._reader.control_frames:
            self._handle_control_frames(b"".join(self._reader.control_frames))
            self._reader.control_frames.clear()
        return used

    def _handle_control_frames(self, control_frames: bytes) -> None:
        self._feed(control_frames)
        self.transmit()
        if self.machine.parser_exc is not None:
            self._close(self._fault(self.machine.parser_exc))
        elif self.machine.close_rcvd is not None:
            self._close()

    def _fault(self, why: Exception) -> PeerFault:
        return PeerFault(f"Protocol violation by `{self.address}`: {why}")

    def _close(self, reason: PeerFault | None = None) -> None:
        """Close the socket once written data is flushed."""
        if not self._is_closing:
            self._is_closing = True
            self.link.end(reason)
            self.socket.close()
            self._linger.start()

    def _left(self) -> int:
        return self.link.unsent + self.socket.get_write_buffer_size()

    def _feed(self, data: memoryview | bytes) -> list[Request | Response]:
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
