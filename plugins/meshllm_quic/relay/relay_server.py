"""The relay server: UDP, packets over WebSocket, metrics, and an observer port.

One port number serves UDP datagrams and, over TCP, ``/relay`` (packets as binary messages),
``/metrics`` and ``/healthz``. A second UDP port, the next number if it is free, answers only
`AddressRequest`: a client of both learns whether its NAT uses a new mapping per destination.
"""

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from http import HTTPStatus
from itertools import count

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request, Response

from meshllm.errors import PeerFault
from meshllm_quic.net.address import RELAY_PORT
from meshllm_quic.net.network import Address, DatagramNetwork, Socket
from meshllm_quic.relay import relay_stream
from meshllm_quic.relay.relay import Outgoing, Relay, RelayLimits, Statistics
from meshllm_quic.relay.relay_limiter import ConnectionLimiter, CountedConnection, stream_source
from meshllm_quic.relay.relay_metrics import CONTENT_TYPE, exposition
from meshllm_quic.relay.relay_stream import CLOSE_S, MAX_PACKET_BYTES, SendQueue, carry
from meshllm_quic.wire.packets import AddressReply, AddressRequest, Packet, decode

OPEN_S = 5.0
"""Timeout of a stream's opening handshake."""

UNREGISTERED_S = 10.0
"""How long a stream may be open without a registered node."""

Batch = Sequence[tuple[bytes, Address]]


class RelayServer:
    """A running relay; created by `open_relay`."""

    def __init__(self, relay: Relay, limiter: ConnectionLimiter) -> None:
        self.relay = relay
        self.udp: Socket
        self.observer: Socket
        self.limiter = limiter
        self._clock = asyncio.get_running_loop().time
        self._streams: dict[Address, SendQueue] = {}
        self._numbers = count(1)
        self._lost = 0  # packets lost by streams that are closed

    @property
    def statistics(self) -> Statistics:
        """Current counters of the relay."""
        self.relay.expire(self._clock())
        return self.relay.statistics

    @property
    def metrics(self) -> str:
        """The counters in the Prometheus text format."""
        lost = self._lost + sum(each.lost for each in self._streams.values())
        return exposition(self.statistics, streams=len(self._streams), lost=lost)

    def receive(self, batch: Batch) -> None:
        """Handle UDP datagrams, except from port 0, which is not answerable and marks streams."""
        self._take([(data, source) for data, source in batch if source[1]])

    def observe(self, batch: Batch) -> None:
        """Handle datagrams of the observer port."""
        for data, source in batch:
            packet = _read(data)
            if isinstance(packet, AddressRequest) and source[1]:
                self.observer.send([AddressReply(packet.nonce, source).encode()], source)

    def guard(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer plain HTTP requests; accept a stream unless its host exceeds the limit."""
        assert isinstance(connection, CountedConnection)
        if (status := connection.apply_forwarded_for(request)) is not None:
            return connection.respond(status, f"{status.phrase}\n")
        match request.path:
            case relay_stream.PATH:
                return None
            case "/healthz":
                return connection.respond(HTTPStatus.OK, "ok\n")
            case "/metrics":
                response = connection.respond(HTTPStatus.OK, self.metrics)
                del response.headers["Content-Type"]
                response.headers["Content-Type"] = CONTENT_TYPE
                return response
            case _:
                return connection.respond(HTTPStatus.NOT_FOUND, "Not Found\n")

    async def stream(self, connection: ServerConnection) -> None:
        """Carry the packets of one stream until it is closed, or nobody is registered on it.

        A bug ends the stream at once; websockets logs it.
        """
        assert isinstance(connection, CountedConnection)
        source = stream_source(connection.host, next(self._numbers))
        waiting = self._streams[source] = SendQueue()
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch(connection, source))
                await carry(connection, waiting, lambda data: self._take([(data, source)]))
                watching.cancel()
        finally:
            del self._streams[source]
            self._lost += waiting.lost

    async def _watch(self, connection: CountedConnection, source: Address) -> None:
        while True:
            await asyncio.sleep(UNREGISTERED_S)
            if self.relay.is_registered(source, self._clock()):
                self.limiter.use(connection)
            else:
                await connection.close()

    def _take(self, batch: Batch) -> None:
        now = self._clock()
        outgoing: Outgoing = []
        for data, source in batch:
            packet = _read(data)
            if packet is not None:
                outgoing += self.relay.receive(packet, source, len(data), now)
        for datagrams, to in runs(outgoing):
            if to[1]:
                self.udp.send(datagrams, to)
            elif to in self._streams:
                self._streams[to].put(datagrams)


def runs(outgoing: Outgoing) -> list[tuple[list[bytes], Address]]:
    """Group datagrams by destination into runs for one `Socket.send`, each in order."""
    latest: dict[Address, list[bytes]] = {}
    gathered: list[tuple[list[bytes], Address]] = []
    for datagram, to in outgoing:
        run = latest.get(to)
        if run is None or not len(datagram) <= len(run[0]) == len(run[-1]):
            run = latest[to] = []
            gathered.append((run, to))
        run.append(datagram)
    return gathered


@asynccontextmanager
async def open_relay(
    network: DatagramNetwork,
    host: str | None = None,
    port: int = RELAY_PORT,
    *,
    allow: Callable[[bytes], bool] = lambda _: True,
    limits: RelayLimits | None = None,
    limiter: ConnectionLimiter | None = None,
) -> AsyncIterator[RelayServer]:
    """Run a relay inside the context; host None binds all IPv4 and IPv6 addresses.

    Raises:
        OSError: the UDP or TCP port is in use, or the host is not one of this machine.
    """
    server = RelayServer(Relay(allow, limits=limits), limiter or ConnectionLimiter())
    async with AsyncExitStack() as stack:
        server.udp = await network.open(host, port, server.receive)
        stack.callback(server.udp.close)
        server.observer = await _open_observer(network, host, server)
        stack.callback(server.observer.close)
        server.relay.observer_port = server.observer.port
        await stack.enter_async_context(await _listen(server, host))
        yield server


async def _open_observer(network: DatagramNetwork, host: str | None, server: RelayServer) -> Socket:
    """Open the next port, which a firewall rule can name, or else any free one."""
    following = (server.udp.port + 1) % 65536
    try:
        return await network.open(host, following, server.observe)
    except OSError:
        return await network.open(host, 0, server.observe)


async def _listen(server: RelayServer, host: str | None) -> Server:
    """Listen for streams on the TCP port of the same number as the UDP port."""
    listen = partial(
        serve,
        server.stream,
        port=server.udp.port,
        origins=[None],  # refuses web pages in browsers
        compression=None,
        process_request=server.guard,
        server_header=None,
        open_timeout=OPEN_S,
        close_timeout=CLOSE_S,
        max_size=MAX_PACKET_BYTES,
        create_connection=partial(CountedConnection, server.limiter),  # type: ignore[arg-type]  # a wrapper may be given
    )
    try:
        return await listen(host)
    except OSError as error:
        if host is not None or error.errno != errno.EADDRNOTAVAIL:
            raise
        return await listen("0.0.0.0")  # no IPv6 on this machine


def _read(datagram: bytes) -> Packet | None:
    try:
        return decode(datagram)
    except PeerFault:
        return None
