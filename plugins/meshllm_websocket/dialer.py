"""The dialling side: opens a WebSocket connection and performs the handshake."""

import asyncio
import os
import socket
import ssl
from collections.abc import Sequence
from contextlib import ExitStack

from websockets.client import ClientProtocol
from websockets.http11 import Request, Response

from meshllm.errors import LinkLost
from meshllm.transport.laned_link import LanedLink
from meshllm_websocket.address import parse
from meshllm_websocket.connection import SILENT, WebsocketConnection
from meshllm_websocket.happy_eyeballs import connect

OPEN_S = 10.0
"""Timeout of TCP connect, TLS and WebSocket handshake together."""


class WebsocketDialer:
    """Dials one address and performs the client handshake."""

    def __init__(self, address: str, hosts: Sequence[str] = ()) -> None:
        """Dial an address, at one of these hosts if there are any."""
        self._address = address
        self._uri = parse(address)
        self._hosts = hosts or [self._uri.host]
        self._loop = asyncio.get_running_loop()
        self._refusal: asyncio.Future[str] = self._loop.create_future()  # empty: accepted
        self._connection: WebsocketConnection | None = None

    async def dial(self) -> LanedLink:
        """Open a link; raise `LinkLost`."""
        with ExitStack() as failed:
            failed.callback(self._abort)
            try:
                async with asyncio.timeout(OPEN_S):
                    connection = await self._connect()
                    refusal = await self._refusal
            except TimeoutError:
                raise LinkLost(f"No answer from `{self._address}` within {OPEN_S:g} s") from None
            except OSError as error:
                raise LinkLost(f"Cannot connect to `{self._address}`: {_why(error)}") from error
            if refusal:
                raise LinkLost(f"`{self._address}` {refusal}")
            failed.pop_all()
        return connection.link

    async def _connect(self) -> WebsocketConnection:
        uri = self._uri
        context = ssl.create_default_context() if uri.secure else None
        machine = ClientProtocol(uri, logger=SILENT)
        _, connection = await self._loop.create_connection(
            lambda: WebsocketConnection(machine, self, self._address),
            sock=await connect(self._hosts, uri.port),
            ssl=context,
            server_hostname=uri.host if uri.secure else None,
        )
        return connection

    def _abort(self) -> None:
        if self._connection is not None:
            self._connection.abort()

    def begin(self, connection: WebsocketConnection) -> None:
        """Send the handshake request."""
        assert isinstance(connection.machine, ClientProtocol)
        self._connection = connection
        connection.machine.send_request(connection.machine.connect())
        connection.transmit()

    def received(self, connection: WebsocketConnection, message: Request | Response | None) -> None:
        """Handle the handshake response."""
        if connection.is_open:
            self._decide("")
        elif isinstance(message, Response):
            self._decide(f"failed the WebSocket handshake: HTTP {message.status_code}")
        else:
            self._decide("is not a WebSocket server")

    def note_authentication(
        self, connection: WebsocketConnection, *, is_authenticated: bool
    ) -> None:
        """Do nothing: only incoming connections are counted."""

    def closed(self, connection: WebsocketConnection) -> None:
        """Fail the dial, unless the handshake is complete."""
        self._decide("closed the connection during the handshake")

    def _decide(self, refusal: str) -> None:
        if not self._refusal.done():
            self._refusal.set_result(refusal)


def _why(error: OSError) -> str:
    """Describe the error without the address, which the message already contains."""
    if error.errno is None or isinstance(error, socket.gaierror | ssl.SSLError):
        return str(error.strerror or error)
    return os.strerror(error.errno).lower()
