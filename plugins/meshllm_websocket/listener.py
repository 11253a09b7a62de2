"""The listening side: accepts WebSocket handshakes and limits half-open connections."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from ipaddress import ip_address
from typing import Self

from websockets.http11 import Request, Response
from websockets.server import ServerProtocol

from meshllm.transport.contract import Link
from meshllm.transport.half_open import HalfOpen, Limits
from meshllm_websocket.connection import SILENT, WebsocketConnection

OPEN_S = 5.0
"""Timeout of the opening handshake."""
LIMITS = Limits(total=64, host=8, network=16)
"""Connections in the handshake, not yet accepted by the application, or not yet authenticated."""

logger = logging.getLogger(__name__)


class WebsocketListener:
    """Performs handshakes with incoming connections; also the iterator over their links."""

    def __init__(self) -> None:
        self.addresses: tuple[str, ...] = ()
        self._half_open = HalfOpen[WebsocketConnection](LIMITS)
        self._arrivals: dict[WebsocketConnection, None] = {}
        """Open connections that the application has not accepted, in the order of arrival."""
        self._expiries: dict[WebsocketConnection, asyncio.TimerHandle] = {}
        """By open connection: a timer would keep a closed one, and its buffer, in memory."""
        self._arrived = asyncio.Event()
        self._is_closed = False

    @property
    def address(self) -> str:
        """The most reachable of `addresses`."""
        return self.addresses[0]

    def links(self) -> Self:
        """Iterate over the links; several tasks may do so."""
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Link:
        while not self._arrivals:
            if self._is_closed:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        connection = next(iter(self._arrivals))
        del self._arrivals[connection]
        self._half_open.remove(connection)
        connection.socket.resume_reading()
        return connection.link

    def reserve(self, hosts: Sequence[str]) -> None:
        """Keep places for the hosts of known peers."""
        self._half_open.reserve(hosts)

    def accept(self) -> WebsocketConnection:
        """Return the asyncio protocol of a new connection."""
        return WebsocketConnection(ServerProtocol(logger=SILENT), self)

    async def close(self) -> None:
        """Close connections that were not accepted by the application."""
        for connection in self._half_open:
            connection.abort()
            await connection.wait_closed()
        self._arrivals.clear()
        self._is_closed = True
        self._arrived.set()

    def begin(self, connection: WebsocketConnection) -> None:
        """Wait for the handshake request; if too many are half-open, drop another one."""
        self._count(connection)
        loop = asyncio.get_running_loop()
        self._expiries[connection] = loop.call_later(OPEN_S, self._expire, connection)

    def received(self, connection: WebsocketConnection, message: Request | Response | None) -> None:
        """Answer the request; browsers (`Origin`) are refused, and errors reveal no details."""
        machine = connection.machine
        assert isinstance(machine, ServerProtocol)
        if not isinstance(message, Request):
            self._refuse(connection, HTTPStatus.BAD_REQUEST)
        elif "Origin" in message.headers:
            self._refuse(connection, HTTPStatus.FORBIDDEN)
        elif (response := machine.accept(message)).status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            self._refuse(connection, HTTPStatus.NOT_FOUND)
        else:
            if host := forwarded_for(connection.link.peer_host, message):
                self._half_open.remove(connection)
                connection.link.peer_host = host
                self._count(connection)
            machine.send_response(response)
            connection.transmit()
            connection.socket.pause_reading()  # until accepted: bounds the memory
            self._arrivals[connection] = None
            self._arrived.set()

    def note_authentication(
        self, connection: WebsocketConnection, *, is_authenticated: bool
    ) -> None:
        """Count an accepted link as half-open while its peer is unauthenticated."""
        if is_authenticated:
            self._half_open.authenticated(connection)
        elif not connection.socket.is_closing():
            self._count(connection)

    def closed(self, connection: WebsocketConnection) -> None:
        """Stop counting a closed connection, and forget it if nobody has accepted it."""
        self._half_open.remove(connection)
        self._arrivals.pop(connection, None)
        self._expiries.pop(connection).cancel()

    def _expire(self, connection: WebsocketConnection) -> None:
        if not connection.is_open:
            connection.abort()

    def _refuse(self, connection: WebsocketConnection, status: HTTPStatus) -> None:
        logger.debug("refused `%s`: %d", connection.address, status)
        connection.refuse(
            f"HTTP/1.1 {status.value} {status.phrase}\r\n"
            "Connection: close\r\nContent-Length: 0\r\n\r\n".encode()
        )

    def _count(self, connection: WebsocketConnection) -> None:
        if (dropped := self._half_open.add(connection, connection.link.peer_host)) is not None:
            logger.debug("dropped `%s` for `%s`", dropped.address, connection.address)
            dropped.abort()


def forwarded_for(host: str, request: Request) -> str:
    """Return the client that a proxy on this machine names; empty if there is no such proxy."""
    said = request.headers.get_all("X-Forwarded-For")
    with suppress(ValueError):  # a name, or an address with a port
        if said and ip_address(host).is_loopback:
            return str(ip_address(said[-1].rpartition(",")[2].strip()))
    return ""
