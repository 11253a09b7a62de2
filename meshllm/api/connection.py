"""One HTTP connection of an untrusted client: closed if it is idle, slow or does not read."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 20.0  # s from the connection, or the last response, to the end of the next headers
STALL_S = 30.0  # s in which a client must read what is buffered for it
MAX_OPEN = 512  # connections; more close the one that has been idle longest


class PublicProtocol(H11Protocol):
    """uvicorn's protocol with deadlines for the client; a closed one cancels its generation."""

    since = 0.0
    """When it was opened, or sent its last response."""
    _headers: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Await the first headers; make room for this connection if there are many."""
        super().connection_made(transport)
        self._await_headers()
        if len(self.connections) > MAX_OPEN:
            self._evict()

    def data_received(self, data: bytes) -> None:
        """Stop waiting once the headers are complete."""
        super().data_received(data)
        if not self.is_idle:
            self._cancel()

    def on_response_complete(self) -> None:
        """Await the next headers; a rest of the last body does not count."""
        self._await_headers()
        super().on_response_complete()  # may begin the next request
        if not self.is_idle:
            self._cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._cancel()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Give the client time to read."""
        self._stall = self.loop.call_later(STALL_S, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        """Note that the client has read."""
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        super().resume_writing()

    def _await_headers(self) -> None:
        self._cancel()
        self.since = self.loop.time()
        self._headers = self.loop.call_later(HEADERS_S, self.transport.abort)

    def _cancel(self) -> None:
        if self._headers is not None:
            self._headers.cancel()
            self._headers = None

    def _evict(self) -> None:
        connections: set[Any] = self.connections
        idle = [each for each in connections if each.is_idle and each is not self]
        if idle:
            min(idle, key=lambda each: each.since).transport.abort()
