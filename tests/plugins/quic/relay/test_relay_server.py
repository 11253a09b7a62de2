"""A relay server on loopback sockets; its decisions are tested in `test_relay.py`."""

import asyncio
import errno
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Self

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import (
    ConnectionClosed,
    ConnectionClosedError,
    InvalidHandshake,
    InvalidStatus,
)

from meshllm_quic.net.network import Address, Receive, Refused, Socket
from meshllm_quic.net.udp import UdpNetwork
from meshllm_quic.relay import relay_server
from meshllm_quic.relay.registration import Action, Registration, SendToRelay
from meshllm_quic.relay.relay import Refusal, Relay
from meshllm_quic.relay.relay_limiter import ConnectionLimiter
from meshllm_quic.relay.relay_metrics import CONTENT_TYPE
from meshllm_quic.relay.relay_server import RelayServer, open_relay, runs
from meshllm_quic.relay.relay_stream import MAX_PACKET_BYTES, MAX_WAITING
from meshllm_quic.wire.packets import (
    TAG_BYTES,
    AddressReply,
    AddressRequest,
    Packet,
    Relayed,
    UnknownTag,
    decode,
)
from tests.builders.waiting import until

pytestmark = pytest.mark.socket

HOST = "127.0.0.1"
NONCE = b"nonce567"
QUIC = b"\x40" + bytes(1199)
A, B = ("192.0.2.1", 1), ("192.0.2.2", 2)


@asynccontextmanager
async def relaying(
    limiter: ConnectionLimiter | None = None, host: str = HOST, *, keeps_local: bool = False
) -> AsyncIterator[RelayServer]:
    """Run a relay on a port that is free for both UDP and TCP."""
    async with AsyncExitStack() as stack:
        server = None
        for _ in range(5):
            with suppress(OSError):
                network = UdpNetwork(keeps_local=keeps_local)
                opening = open_relay(network, host, 0, limiter=limiter)
                server = await stack.enter_async_context(opening)
                break
        assert server is not None
        yield server


class Udp:
    """A client's socket."""

    def __init__(self, host: str = HOST) -> None:
        """The relay is asked at ``host``."""
        self.host = host
        self.heard: asyncio.Queue[tuple[bytes, Address]] = asyncio.Queue()

    def receive(self, batch: Sequence[tuple[bytes, Address]]) -> None:
        for each in batch:
            self.heard.put_nowait(each)

    async def __aenter__(self) -> Self:
        self.socket = await UdpNetwork().open(HOST, 0, self.receive)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.socket.close()

    async def ask(self, packet: Packet, port: int) -> tuple[Packet, Address]:
        """Send a packet, and wait for the next received one."""
        self.socket.send([packet.encode()], (self.host, port))
        data, source = await self.heard.get()
        return decode(data), source


class Client:
    """A node at the other end of a stream or of a socket."""

    def __init__(self, seed: int, server: RelayServer) -> None:
        key = Ed25519PrivateKey.from_private_bytes(seed.to_bytes(32))
        node = key.public_key().public_bytes_raw()
        self.tag = node[:TAG_BYTES]
        self.port = server.udp.port
        self.registration = Registration((HOST, self.port), node, key.sign)

    async def register(self, way: Udp | ClientConnection) -> None:
        now = asyncio.get_running_loop().time()
        actions: list[Action] = self.registration.start(now)
        while not self.registration.is_registered:
            (packet,) = (each.packet for each in actions if isinstance(each, SendToRelay))
            actions = self.registration.receive(await self._ask(way, packet), now)

    async def _ask(self, way: Udp | ClientConnection, packet: Packet) -> Packet:
        if isinstance(way, Udp):
            return (await way.ask(packet, self.port))[0]
        await way.send(packet.encode())
        return decode(await way.recv(decode=False))


def stream(server: RelayServer, path: str = "/relay", **headers: str) -> connect:
    return connect(
        f"ws://{HOST}:{server.udp.port}{path}",
        compression=None,
        open_timeout=None,
        close_timeout=1,
        additional_headers={name.replace("_", "-"): value for name, value in headers.items()},
    )


async def get(server: RelayServer, path: str) -> tuple[str, str]:
    """Fetch a page; return its head and its body."""
    reader, writer = await asyncio.open_connection(HOST, server.udp.port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return head, body


async def until_streams(server: RelayServer, count: int) -> None:
    await until(lambda: f"meshllm_relay_streams {count}\n" in server.metrics)


async def test_both_ports_report_the_observed_address() -> None:
    async with relaying() as server, Udp() as client:
        ours = (HOST, client.socket.port)

        told = [
            await client.ask(AddressRequest(NONCE), socket.port)
            for socket in (server.udp, server.observer)
        ]

        assert told == [
            (AddressReply(NONCE, ours), (HOST, server.udp.port)),
            (AddressReply(NONCE, ours), (HOST, server.observer.port)),
        ]


async def test_the_observer_port_answers_only_address_requests() -> None:
    async with relaying() as server, Udp() as client:
        node = Client(1, server)
        (send,) = node.registration.start(0.0)
        assert isinstance(send, SendToRelay)

        for datagram in (send.packet.encode(), b"", QUIC, UnknownTag(node.tag).encode()):
            client.socket.send([datagram], (HOST, server.observer.port))
        packet, _ = await client.ask(AddressRequest(NONCE), server.observer.port)

        assert isinstance(packet, AddressReply)


async def test_datagrams_are_forwarded_between_clients() -> None:
    async with relaying() as server, Udp() as one, Udp() as other:
        a, b = Client(1, server), Client(2, server)
        await a.register(one)
        await b.register(other)
        datagram = Relayed(b.tag, a.tag, QUIC).encode()

        one.socket.send([datagram] * 3, (HOST, server.udp.port))
        heard = [await other.heard.get() for _ in range(3)]

        assert heard == [(datagram, (HOST, server.udp.port))] * 3
        assert a.registration.observed == (HOST, one.socket.port)
        assert a.registration.observer == (HOST, server.observer.port)


async def test_datagrams_are_forwarded_between_a_stream_and_udp() -> None:
    async with relaying() as server, Udp() as one, stream(server) as other:
        a, b = Client(1, server), Client(2, server)
        await a.register(one)
        await b.register(other)

        there, back = (Relayed(b.tag, a.tag, QUIC).encode(), Relayed(a.tag, b.tag, QUIC).encode())
        one.socket.send([there], (HOST, server.udp.port))
        await other.send(back)

        assert await other.recv() == there
        assert await one.heard.get() == (back, (HOST, server.udp.port))
        assert b.registration.observed is None


async def test_each_stream_is_a_separate_client() -> None:
    async with relaying() as server, stream(server) as one, stream(server) as other:
        a, b = Client(1, server), Client(2, server)
        await a.register(one)
        await b.register(other)

        await other.send(Relayed(b.tag, a.tag, QUIC).encode())

        assert decode(await other.recv(decode=False)) == UnknownTag(a.tag)
        assert server.statistics.refused == {Refusal.SENDER: 1}


@pytest.mark.skipif(sys.platform != "linux", reason="binds all of 127.0.0.0/8")
async def test_a_node_hears_a_relay_from_the_address_at_which_it_registered() -> None:
    async with AsyncExitStack() as stack:
        opening = relaying(host="0.0.0.0", keeps_local=True)
        server = await stack.enter_async_context(opening)
        one, other = [await stack.enter_async_context(Udp(at)) for at in (HOST, "127.0.0.2")]
        a, b = Client(1, server), Client(2, server)
        await a.register(one)
        await b.register(other)

        one.socket.send([Relayed(b.tag, a.tag, QUIC).encode()], (HOST, server.udp.port))

        assert (await other.heard.get())[1] == ("127.0.0.2", server.udp.port)


async def test_a_stream_that_is_closed_is_forgotten() -> None:
    async with relaying() as server, Udp() as one:
        a, b = Client(1, server), Client(2, server)
        await a.register(one)
        async with stream(server) as other:
            await b.register(other)
        await until_streams(server, 0)

        one.socket.send([Relayed(b.tag, a.tag, QUIC).encode()], (HOST, server.udp.port))
        packet, _ = await one.ask(AddressRequest(NONCE), server.udp.port)

        assert isinstance(packet, AddressReply)
        assert server.statistics.forwarded == 1


async def test_a_client_that_does_not_read_loses_datagrams_and_fills_no_memory() -> None:
    async with relaying() as server, Udp() as one, stream(server) as other:
        a, b = Client(1, server), Client(2, server)
        await a.register(one)
        await b.register(other)
        other.transport.pause_reading()
        datagram = Relayed(b.tag, a.tag, QUIC).encode()
        batch = [(datagram, (HOST, one.socket.port))] * MAX_WAITING

        while "meshllm_relay_lost_total 0\n" in server.metrics:
            server.relay._registrations[a.tag].rate.left = 1e9
            server.relay._total.left = 1e9
            server.receive(batch)
            await asyncio.sleep(0)

        held = server._streams[server.relay._registrations[b.tag].address]
        assert held._packets.qsize() <= MAX_WAITING
        other.transport.resume_reading()
        assert await other.recv() == datagram


async def test_a_stream_without_a_registered_node_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_server, "UNREGISTERED_S", 0.0)
    async with relaying() as server, stream(server) as idle:
        with pytest.raises(ConnectionClosed):
            await idle.recv()


async def test_a_bug_of_the_look_at_registrations_ends_its_stream_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(relay_server, "UNREGISTERED_S", 0.0)
    monkeypatch.setattr(Relay, "is_registered", failing)
    async with relaying() as server, stream(server) as connection:
        with pytest.raises(ConnectionClosedError):
            await connection.recv()

    assert "ZeroDivisionError" in caplog.text


async def test_a_stream_with_a_registered_node_is_kept() -> None:
    async with relaying() as server, stream(server) as used:
        await Client(1, server).register(used)
        (source,) = server._streams

        assert server.relay.is_registered(source, asyncio.get_running_loop().time())


async def test_an_oversized_packet_ends_a_server_stream() -> None:
    async with relaying() as server, stream(server) as client:
        await client.send(bytes(MAX_PACKET_BYTES + 1))

        with pytest.raises(ConnectionClosed):
            await client.recv()


async def test_a_datagram_cannot_impersonate_a_stream() -> None:
    async with relaying() as server, stream(server) as client:
        await client.send(AddressRequest(NONCE).encode())
        told = decode(await client.recv(decode=False))
        assert isinstance(told, AddressReply)

        server.receive([(AddressRequest(b"forged!!").encode(), told.address)])
        await client.send(AddressRequest(NONCE).encode())

        assert decode(await client.recv(decode=False)) == told


async def test_garbage_does_not_end_a_stream() -> None:
    async with relaying() as server, stream(server) as client:
        for garbage in (b"", b"\xff" * 9, QUIC, "text"):
            await client.send(garbage)
        await client.send(AddressRequest(NONCE).encode())

        assert isinstance(decode(await client.recv(decode=False)), AddressReply)


async def test_browsers_cannot_open_a_stream() -> None:
    async with relaying() as server:
        with pytest.raises(InvalidStatus, match="403"):
            await stream(server, Origin="https://example.org")


async def test_streams_are_served_only_at_their_path() -> None:
    async with relaying() as server:
        with pytest.raises(InvalidStatus, match="404"):
            await stream(server, "/")


async def test_streams_per_host_are_limited() -> None:
    async with relaying(ConnectionLimiter(most_of_host=2)) as server:
        async with stream(server), stream(server):
            with pytest.raises((InvalidHandshake, OSError)):
                await stream(server)
        await until_streams(server, 0)
        async with stream(server) as client:
            await client.send(AddressRequest(NONCE).encode())
            assert isinstance(decode(await client.recv(decode=False)), AddressReply)


async def test_a_stream_takes_the_place_of_one_of_a_crowded_network() -> None:
    async with (
        relaying(ConnectionLimiter(most=2)) as server,
        stream(server, X_Forwarded_For="192.0.2.1") as first,
        stream(server, X_Forwarded_For="192.0.2.2"),
        stream(server, X_Forwarded_For="198.51.100.1") as newcomer,
    ):
        with pytest.raises(ConnectionClosed):
            await first.recv()
        await newcomer.send(AddressRequest(NONCE).encode())
        assert isinstance(decode(await newcomer.recv(decode=False)), AddressReply)


async def test_silent_connections_count_too() -> None:
    async with relaying(ConnectionLimiter(most_of_host=1)) as server:
        _, writer = await asyncio.open_connection(HOST, server.udp.port)
        await until(lambda: server.limiter._hosts)

        with pytest.raises((InvalidHandshake, OSError)):
            await stream(server)
        writer.close()
        await writer.wait_closed()


async def test_a_local_proxy_names_its_clients() -> None:
    async with relaying(ConnectionLimiter(most_of_host=1)) as server:
        one, other = "192.0.2.1", "192.0.2.2"
        async with stream(server, X_Forwarded_For=f"bogus, {one}") as client:
            async with stream(server, X_Forwarded_For=other):
                await client.send(AddressRequest(NONCE).encode())
                told = decode(await client.recv(decode=False))
            with pytest.raises(InvalidStatus, match="429"):
                await stream(server, X_Forwarded_For=f"::ffff:{one}")

        assert isinstance(told, AddressReply)
        assert told.address[0].startswith("2002:c000:201::")


async def test_an_invalid_forwarded_for_is_rejected() -> None:
    async with relaying() as server:
        with pytest.raises(InvalidStatus, match="400"):
            await stream(server, X_Forwarded_For="unknown")


async def test_the_health_check_succeeds() -> None:
    async with relaying() as server:
        head, body = await get(server, "/healthz")

        assert head.startswith("HTTP/1.1 200 ")
        assert body == "ok\n"


async def test_metrics_are_served() -> None:
    async with relaying() as server, Udp() as one:
        await Client(1, server).register(one)

        head, body = await get(server, "/metrics")

        assert f"Content-Type: {CONTENT_TYPE}" in head
        assert "\nmeshllm_relay_registered 1\n" in body


async def test_an_unknown_page_is_not_found() -> None:
    async with relaying() as server:
        head, _ = await get(server, "/etc/passwd")

        assert head.startswith("HTTP/1.1 404 ")


async def test_a_port_in_use_is_an_error_and_leaves_nothing_open() -> None:
    async with relaying() as server:
        port = server.udp.port

        with pytest.raises(OSError, match="in use") as caught:
            async with open_relay(UdpNetwork(), HOST, port):
                pass

        assert caught.value.errno == errno.EADDRINUSE


class FakeNetwork:
    """A network in which the port after the first is never free."""

    def __init__(self) -> None:
        self.sockets: list[FakeSocket] = []

    async def open(
        self, host: str | None, port: int, receive: Receive, refused: Refused | None = None
    ) -> Socket:
        if self.sockets and port:
            raise OSError(errno.EADDRINUSE, "in use")
        if not port:
            port = 40_000
        self.sockets.append(FakeSocket(port))
        return self.sockets[-1]

    async def resolve(self, host: str, port: int) -> Sequence[Address]:
        raise NotImplementedError


class FakeSocket:
    def __init__(self, port: int) -> None:
        self.port = port
        self.sent: list[Address] = []
        self.is_closed = False

    def hosts(self) -> Sequence[str]:
        return [HOST]

    def send(self, datagrams: Sequence[bytes], to: Address) -> None:
        self.sent.append(to)

    def close(self) -> None:
        self.is_closed = True


async def free_port() -> int:
    server = await asyncio.start_server(lambda *_: None, HOST, 0)
    async with server:
        port: int = server.sockets[0].getsockname()[1]
    return port


async def test_the_observer_falls_back_to_any_port() -> None:
    network = FakeNetwork()

    async with open_relay(network, HOST, await free_port()) as server:
        assert server.relay.observer_port == server.observer.port == 40_000

    assert [each.is_closed for each in network.sockets] == [True, True]


@pytest.mark.parametrize(
    ("host", "code", "tried"),
    [
        (None, errno.EADDRNOTAVAIL, [None, "0.0.0.0"]),
        (None, errno.EADDRINUSE, [None]),
        (HOST, errno.EADDRNOTAVAIL, [HOST]),
    ],
)
async def test_a_relay_listens_without_ipv6(
    monkeypatch: pytest.MonkeyPatch, host: str | None, code: int, tried: list[str | None]
) -> None:
    hosts: list[str | None] = []

    async def refuse(_: object, host: str | None, **options: object) -> None:
        hosts.append(host)
        raise OSError(code, "refused")

    monkeypatch.setattr(relay_server, "serve", refuse)
    network = FakeNetwork()

    with pytest.raises(OSError, match="refused"):
        async with open_relay(network, host, 1):
            pass

    assert hosts == tried
    assert [each.is_closed for each in network.sockets] == [True, True]


async def test_datagrams_from_port_zero_are_ignored() -> None:
    network = FakeNetwork()
    ask = AddressRequest(NONCE).encode()

    async with open_relay(network, HOST, await free_port()) as server:
        server.receive([(ask, (HOST, 0)), (ask, A)])
        server.observe([(ask, (HOST, 0)), (ask, B)])

    assert [each.sent for each in network.sockets] == [[A], [B]]


def test_datagrams_to_one_address_form_one_run() -> None:
    outgoing = [(b"one", A), (b"two", A), (b"1", B), (b"3", A), (b"four", A), (b"five", A)]

    assert runs(outgoing) == [
        ([b"one", b"two", b"3"], A),
        ([b"1"], B),
        ([b"four", b"five"], A),
    ]


def test_a_shorter_datagram_ends_a_run() -> None:
    assert runs([(b"22", A), (b"1", A), (b"1", A)]) == [([b"22", b"1"], A), ([b"1"], A)]
    assert runs([]) == []
