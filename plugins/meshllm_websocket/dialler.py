"""How a link is dialled."""

import asyncio
import os
import socket
import ssl
from contextlib import ExitStack

from websockets.client import ClientProtocol
from websockets.http11 import Request, Response

from meshllm.errors import LinkLost
from meshllm.transport.laned_link import LanedLink
from meshllm_websocket.address import parse
from meshllm_websocket.connection import SILENT, Connection

OPEN_S = 10.0
"""For the connection and the opening handshake."""
ATTEMPT_S = 0.25
"""Before another address of the same name is tried beside the first, RFC 8305 section 5."""


class Dialler:
    """Shakes hands as the side that asks."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._uri = parse(address)
        self._loop = asyncio.get_running_loop()
        self._refusal: asyncio.Future[str] = self._loop.create_future()  # empty: it is open
        self._connection: Connection | None = None

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
                raise LinkLost(f"Nobody listens at `{self._address}`: {_why(error)}") from error
            if refusal:
                raise LinkLost(f"`{self._address}` {refusal}")
            failed.pop_all()
        return connection.link

    async def _connect(self) -> Connection:
        uri = self._uri
        context = ssl.create_default_context() if uri.secure else None
        machine = ClientProtocol(uri, logger=SILENT)
        _, connection = await self._loop.create_connection(
            lambda: Connection(machine, self, self._address),
            uri.host,
            uri.port,
            ssl=context,
            happy_eyeballs_delay=ATTEMPT_S,
        )
        return connection

    def _abort(self) -> None:
        if self._connection is not None:
            self._connection.abort()

    def begin(self, connection: Connection) -> None:
        """Send the request."""
        assert isinstance(connection.machine, ClientProtocol)
        self._connection = connection
        connection.machine.send_request(connection.machine.connect())
        connection.transmit()

    def heard(self, connection: Connection, word: Request | Response | None) -> None:
        """Take the answer."""
        if connection.is_open:
            self._decide("")
        elif isinstance(word, Response):
            self._decide(f"answered {word.status_code} and opened no link")
        else:
            self._decide("does not open links")

    def know(self, connection: Connection, *, is_stranger: bool) -> None:
        """Count nobody: who is dialled was chosen."""

    def gone(self, connection: Connection) -> None:
        """Give up, unless it was open."""
        self._decide("closed the connection before a link was open")

    def _decide(self, refusal: str) -> None:
        if not self._refusal.done():
            self._refusal.set_result(refusal)


def _why(error: OSError) -> str:
    """Say what went wrong without the address, which is known."""
    if error.errno is None or isinstance(error, socket.gaierror | ssl.SSLError):
        return str(error.strerror or error)
    return os.strerror(error.errno).lower()
