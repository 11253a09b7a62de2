"""A way to a relay where UDP is blocked: packets over a WebSocket.

Each binary message is one packet. As with UDP, what cannot be sent at once is lost, and so is what
is sent while there is no connection: QUIC sends it again.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from secrets import token_bytes

from websockets.asyncio.client import connect
from websockets.asyncio.connection import Connection
from websockets.exceptions import ConnectionClosed, WebSocketException

PATH = "/relay"
MAX_PACKET_BYTES = 2048  # a relayed datagram has 1225; the rest is for what is to come
MAX_WAITING = 64
"""Packets that wait for a connection that takes none: one batch, 80 KB."""
CLOSE_S = 1.0
"""For the other side to agree that it is over."""
PAUSE_S = 1.0
MAX_PAUSE_S = 30.0

logger = logging.getLogger(__name__)


def stream_uri(host: str, port: int, *, is_secure: bool = False) -> str:
    """Name the stream of a relay; a secure one is behind a proxy that holds the certificate."""
    scheme = "wss" if is_secure else "ws"
    return f"{scheme}://[{host}]:{port}{PATH}" if ":" in host else f"{scheme}://{host}:{port}{PATH}"


def pause(tries: int, chance: int) -> float:
    """Tell how many seconds to wait after so many tries in vain, by a random byte.

    Not all clients of a relay that was started anew come in the same moment.
    """
    return min(PAUSE_S * 2.0 ** min(tries, 16), MAX_PAUSE_S) * (0.5 + chance / 256)


class Waiting:
    """Packets on their way to one connection, in a memory that does not grow."""

    def __init__(self) -> None:
        self.lost = 0
        """Packets for which there was no room."""
        self._packets: asyncio.Queue[bytes] = asyncio.Queue(MAX_WAITING)

    def put(self, packets: Sequence[bytes]) -> None:
        """Add packets; the last ones are lost where there is no room for all."""
        for packet in packets:
            try:
                self._packets.put_nowait(packet)
            except asyncio.QueueFull:
                self.lost += 1

    async def send(self, connection: Connection) -> None:
        """Send what is put in, one after another, until the connection is closed."""
        with suppress(ConnectionClosed):
            while True:
                await connection.send(await self._packets.get())


async def carry(connection: Connection, waiting: Waiting, receive: Callable[[bytes], None]) -> None:
    """Carry packets both ways until the connection is closed, by whomever.

    If cancelled, what waits is lost; the connection is left to whoever opened it.
    """
    async with asyncio.TaskGroup() as group:
        sending = group.create_task(waiting.send(connection))
        with suppress(ConnectionClosed):
            async for message in connection:
                if isinstance(message, bytes):
                    receive(message)
        sending.cancel()


class _Straight(connect):
    """A way to the relay alone, which sends nobody on into a network that it cannot see."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        """Follow none."""
        return exc


class RelayStream:
    """Our side of a stream, which is opened again whenever it breaks."""

    def __init__(
        self,
        uri: str,
        receive: Callable[[bytes], None],
        changed: Callable[[], None],
        random: Callable[[int], bytes] = token_bytes,
    ) -> None:
        """Prepare a stream; `receive` takes each packet, `changed` hears of a new `is_open`.

        Neither is called once `run` is cancelled.
        """
        self.uri = uri
        self.is_open = False
        self.trouble: str | None = None
        """Why it is not open, as far as we know."""
        self._receive = receive
        self._changed = changed
        self._random = random
        self._waiting = Waiting()

    def send(self, packets: Sequence[bytes]) -> None:
        """Send packets to the relay; never waits."""
        if self.is_open:
            self._waiting.put(packets)

    async def run(self) -> None:
        """Keep the stream open until this is cancelled.

        The proxies of the environment are used, as `websockets` does: ``https_proxy`` and others.
        """
        tries = 0
        while True:
            try:
                await self._open()
                tries = 0
                self.trouble = "the relay closed the stream"
            except (OSError, WebSocketException, ImportError) as error:  # no python-socks
                self.trouble = str(error) or type(error).__name__
            logger.debug("stream to `%s` is closed: %s", self.uri, self.trouble)
            await asyncio.sleep(pause(tries, self._random(1)[0]))
            tries += 1

    async def _open(self) -> None:
        """Run one connection to its end."""
        async with _Straight(
            self.uri,
            compression=None,
            user_agent_header=None,
            max_size=MAX_PACKET_BYTES,
            close_timeout=CLOSE_S,
        ) as connection:
            self.trouble = None
            self.is_open = True
            self._changed()
            try:
                await carry(connection, self._waiting, self._receive)
            finally:
                self.is_open = False
            self._changed()
