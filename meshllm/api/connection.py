"""One connection of an untrusted client: closed if it is idle, slow or does not read."""

import asyncio
from typing import Any

from h11 import IDLE, SEND_RESPONSE, Data, EndOfMessage, Request, Response
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from meshllm.api.failure import INVALID, JSON, Failure, Refused, error_object
from meshllm.node.event_loop import LATE_S

HEADERS_S = 20.0  # s from the connection, or the last response, to the end of the next headers
STALL_S = 30.0  # s in which a client must read what is buffered for it
RENEWALS = 3  # times in a row that a client gets its time again
MAX_OPEN = 512  # connections; more close the one that has been idle longest

_MALFORMED = Refused(
    "The request is not valid HTTP, or its headers are too long", Failure(400, INVALID, None)
)


class ClientTimer:
    """Ends a connection whose client is slow.

    If it fires late, this process was stopped, and has not read or sent anything meanwhile: the
    client gets the time again, up to `RENEWALS` times, as an overloaded process is always late.
    """

    def __init__(self) -> None:
        self._end: asyncio.TimerHandle | None = None

    def start(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, seconds: float
    ) -> None:
        """Give the client some time from now."""
        self.stop()
        self._arm(loop, transport, seconds, RENEWALS)

    def stop(self) -> None:
        """Note that the client was fast enough, or is gone."""
        if self._end is not None:
            self._end.cancel()
            self._end = None

    def _arm(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        seconds: float,
        renewals: int,
    ) -> None:
        def fire() -> None:
            if renewals and loop.time() > due + LATE_S:
                self._arm(loop, transport, seconds, renewals - 1)
            else:
                transport.abort()

        due = loop.time() + seconds
        self._end = loop.call_at(due, fire)


class ApiProtocol(H11Protocol):
    """uvicorn's protocol, which refuses what is not HTTP as the API refuses a request."""

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, unless it has responded already."""
        if self.cycle is not None:  # what its task still sends goes nowhere, without an error
            self.cycle.disconnected = True
        if self.conn.our_state in {IDLE, SEND_RESPONSE}:
            is_head = self.conn.our_state is SEND_RESPONSE and self.scope["method"] == "HEAD"
            body = error_object(_MALFORMED)
            length = str(len(body))
            head = ("content-type", JSON), ("content-length", length), ("connection", "close")
            response = Response(status_code=400, headers=list(head), reason="Bad Request")
            content = () if is_head else (Data(data=body),)
            for event in (response, *content, EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class PublicProtocol(ApiProtocol):
    """The same with deadlines for the client; a closed one cancels its generation."""

    since = 0.0
    """When it was opened, or sent its last response."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._stall, self._headers = ClientTimer(), ClientTimer()

    @property
    def is_idle(self) -> bool:
        """Whether no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Await the first headers; make room for this connection if there are many."""
        super().connection_made(transport)
        self._await_headers()
        self._evict()

    def data_received(self, data: bytes) -> None:
        """Stop waiting once the headers are complete."""
        super().data_received(data)
        if not self.is_idle:
            self._headers.stop()

    def on_response_complete(self) -> None:
        """Await the next headers; a rest of the last body does not count."""
        self._await_headers()
        super().on_response_complete()  # may begin the next request
        if not self.is_idle:
            self._headers.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self.resume_writing()
        self._headers.stop()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Give the client time to read."""
        self._stall.start(self.loop, self.transport, STALL_S)
        super().pause_writing()

    def resume_writing(self) -> None:
        """Note that the client has read; of a whole response, await the next headers."""
        self._stall.stop()
        super().resume_writing()
        if self.is_idle:
            self._await_headers()

    def handle_websocket_upgrade(self, event: Request) -> None:
        """Leave the connection to the protocol of WebSockets, which has no next headers."""
        super().handle_websocket_upgrade(event)
        self._headers.stop()

    def _await_headers(self) -> None:
        self.since = self.loop.time()
        if not self.flow.write_paused:  # else the client still reads the last response
            self._headers.start(self.loop, self.transport, HEADERS_S)

    def _evict(self) -> None:
        """Close the connection that has been idle longest, if there are too many.

        An aborted one stays listed until the next turn of the event loop, and many may be accepted
        in one turn: those do not count, or they would be closed again in place of others.
        """
        listed: set[Any] = self.connections
        there = [each for each in listed if not each.transport.is_closing()]
        idle = [each for each in there if each.is_idle and each is not self]
        if len(there) > MAX_OPEN and idle:
            min(idle, key=lambda each: each.since).transport.abort()


class SocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's protocol for WebSockets, which drops a client that does not read.

    It reads nothing from such a client: each ping would add a pong to what waits.
    """

    is_idle = False
    """Its application ends it when it is idle."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._stall = ClientTimer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stall.stop()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Give the client time to read."""
        self._stall.start(self.loop, self.transport, STALL_S)
        self.transport.pause_reading()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Note that the client has read."""
        self._stall.stop()
        if not self.read_paused:  # else the application has not read the last message
            self.transport.resume_reading()
        super().resume_writing()
