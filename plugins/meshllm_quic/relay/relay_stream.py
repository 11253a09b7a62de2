"""Fallback to a relay where UDP is blocked: packets over a WebSocket.

Each binary message is one packet. As with UDP, packets are dropped if the queue is full or the
connection is down: QUIC retransmits.
"""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from secrets import token_bytes

from websockets.asyncio.client import connect
from websockets.asyncio.connection import Connection
from websockets.exceptions import ConnectionClosed, WebSocketException

PATH = "/relay"
MAX_PACKET_BYTES = 2048  # a relayed datagram has 1225 bytes; the rest is reserved
MAX_WAITING = 64
"""Packets queued for a connection that is not writable: one batch, 80 KB."""
CLOSE_S = 1.0
"""Timeout of the closing handshake."""
BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0

logger = logging.getLogger(__name__)


def stream_uri(host: str, port: int, *, is_secure: bool = False) -> str:
    """Return the URI of a relay's stream; a secure one is behind a proxy that terminates TLS."""
    scheme = "wss" if is_secure else "ws"
    return f"{scheme}://[{host}]:{port}{PATH}" if ":" in host else f"{scheme}://{host}:{port}{PATH}"


def backoff_s(tries: int, chance: int) -> float:
    """Return the exponential backoff in seconds after ``tries``, with jitter from a random byte.

    The jitter spreads the reconnects of all clients after a relay has restarted.
    """
    return min(BACKOFF_S * 2.0 ** min(tries, 16), MAX_BACKOFF_S) * (0.5 + chance / 256)


class SendQueue:
    """Bounded send queue of one connection."""

    def __init__(self) -> None:
        self.lost = 0
        """Packets dropped because the queue was full."""
        self._packets: asyncio.Queue[bytes] = asyncio.Queue(MAX_WAITING)

    def put(self, packets: Sequence[bytes]) -> None:
        """Add packets; those that do not fit are dropped."""
        for packet in packets:
            try:
                self._packets.put_nowait(packet)
            except asyncio.QueueFull:
                self.lost += 1

    async def send(self, connection: Connection) -> None:
        """Send queued packets in order until the connection is closed."""
        with suppress(ConnectionClosed):
            while True:
                await connection.send(await self._packets.get())


async def carry(
    connection: Connection, waiting: SendQueue, receive: Callable[[bytes], None]
) -> None:
    """Carry packets both ways until either side closes the connection.

    If cancelled, queued packets are lost; the caller closes the connection.
    """
    async with asyncio.TaskGroup() as group:
        sending = group.create_task(waiting.send(connection))
        with suppress(ConnectionClosed):
            async for message in connection:
                if isinstance(message, bytes):
                    receive(message)
        sending.cancel()


class _ConnectNoRedirect(connect):
    """Connect without redirects: a relay must not direct clients into their own network."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        """Follow no redirect."""
        return exc


class RelayStream:
    """Client side of a stream, which reconnects with backoff."""

    def __init__(
        self,
        uri: str,
        receive: Callable[[bytes], None],
        changed: Callable[[], None],
        random: Callable[[int], bytes] = token_bytes,
    ) -> None:
        """Prepare a stream; `receive` gets each packet, `changed` is called if `is_open` changes.

        Neither is called after `run` is cancelled.
        """
        self.uri = uri
        self.is_open = False
        self.last_error: str | None = None
        """The last reason why it is not open; None if open."""
        self._receive = receive
        self._changed = changed
        self._random = random
        self._waiting = SendQueue()

    def send(self, packets: Sequence[bytes]) -> None:
        """Queue packets for the relay; never blocks."""
        if self.is_open:
            self._waiting.put(packets)

    async def run(self) -> None:
        """Keep the stream open until cancelled.

        The proxies of the environment (``https_proxy`` and others) are used, as in `websockets`.
        """
        tries = 0
        while True:
            try:
                await self._open()
                tries = 0
                self.last_error = "the relay closed the stream"
            except (OSError, WebSocketException, ImportError) as error:  # no python-socks
                self.last_error = _reason(error)
            logger.debug("stream to `%s` is closed: %s", self.uri, self.last_error)
            await asyncio.sleep(backoff_s(tries, self._random(1)[0]))
            tries += 1

    async def _open(self) -> None:
        """Run one connection to its end."""
        async with _ConnectNoRedirect(
            self.uri,
            compression=None,
            user_agent_header=None,
            max_size=MAX_PACKET_BYTES,
            close_timeout=CLOSE_S,
        ) as connection:
            self.last_error = None
            self.is_open = True
            self._changed()
            try:
                await carry(connection, self._waiting, self._receive)
            finally:
                self.is_open = False
            self._changed()


def _reason(error: Exception) -> str:
    """Return why no stream opened; asyncio puts the address and its own words into an OSError."""
    match error:
        case ssl.SSLError() | socket.gaierror():  # also OSErrors, with numbers of their own
            pass
        case OSError(errno=int(code)) if code > 0:
            return os.strerror(code).lower()
    return str(error) or type(error).__name__
