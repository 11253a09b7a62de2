"""WebSocket links over real sockets: contract, addresses, handshakes, proxies."""

import asyncio
import errno
import gc
import select
import socket
import ssl
import struct
from asyncio import Server
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from meshllm.errors import LinkLost, UserError
from meshllm.testing.links import read
from meshllm.testing.transports import Terms, check_transport
from meshllm.transport import contract, linger
from meshllm.transport.laned_link import LanedLink
from meshllm.transport.lanes import CREDIT
from meshllm.transport.registry import Registry
from meshllm_websocket import WebsocketTransport, address, connection, dialer
from meshllm_websocket.transport import PORTS
from tests.builders.certificates import certificate
from tests.builders.waiting import timers_fired, until

pytestmark = pytest.mark.socket

ANY = "ws://127.0.0.1:0"


class Local(WebsocketTransport):
    """Listens on a free port of 127.0.0.1 by default."""

    @asynccontextmanager
    async def listen(self, address: str | None = None) -> AsyncIterator[contract.Listener]:
        async with super().listen(address or ANY) as listener:
            yield listener


@asynccontextmanager
async def linked(through: str = "{}") -> AsyncIterator[tuple[LanedLink, LanedLink]]:
    """LanedLink two ends, and close them."""
    transport = WebsocketTransport()
    async with transport.listen(ANY) as listener:
        dialling = asyncio.create_task(transport.dial(through.format(listener.address)))
        ends = await anext(aiter(listener.links())), await dialling
    one, other = (end for end in reversed(ends) if isinstance(end, LanedLink))
    try:
        yield one, other
    finally:
        await asyncio.gather(one.close(), other.close())


def accepted(server: socket.socket) -> list[socket.socket]:
    """Accept all connections that wait at a server."""
    server.settimeout(0)
    connections = []
    with suppress(BlockingIOError):
        while True:
            connections.append(server.accept()[0])
    return connections


def is_closed(connection: socket.socket) -> bool:
    """Return whether the other side has closed a connection, and close this side, too."""
    connection.settimeout(0)
    with connection, suppress(ConnectionResetError):
        try:
            while connection.recv(1024):
                pass
        except BlockingIOError:
            return False
    return True


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """Answer each connection with the same bytes, and close it."""

    async def answer_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(answer_one, "127.0.0.1", 0) as server:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def proxy(
    backend: str, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Forward requests like a reverse proxy; yield its port, and the request lines it received."""
    seen: list[bytes] = []
    port = int(backend.rpartition(":")[2])

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        line, rest = head.split(b"\r\n", 1)
        seen.append(line)
        behind, before = await asyncio.open_connection("127.0.0.1", port)
        before.write(line + b"\r\nX-Forwarded-For: 192.0.2.7\r\n" + rest)
        await asyncio.gather(pump(reader, before), pump(behind, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls) as server:
        yield server.sockets[0].getsockname()[1], seen


async def test_websocket_implements_the_contract() -> None:
    await check_transport(Local, Terms(settle_s=0.05, deadline_s=120.0))


async def test_a_message_is_sent_within_the_call_that_offers_it() -> None:
    async with linked() as (one, other):
        assert isinstance(one, contract.ImmediateSender)
        assert isinstance(other, contract.Located)
        assert one.peer_host == other.peer_host == "127.0.0.1"
        assert one.offer([b"now"])
        assert one.statistics.messages_sent == 1
        assert await other.receive() == (contract.Channel.DATA, b"now")


def test_it_is_found_by_its_entry_point() -> None:
    transport = Registry.discover().load("websocket")

    assert transport.schemes == ("ws", "wss")
    assert isinstance(transport, contract.Transport)


async def test_a_slow_reader_bounds_the_memory_of_both_sides() -> None:
    async with linked() as (one, other):
        sender = asyncio.create_task(flood(one))
        await until(lambda: held(other) > CREDIT - 2 * CHUNK_BYTES)  # there is no room for more
        await timers_fired()

        assert not sender.done()
        assert one.statistics.bytes_sent <= CREDIT
        assert sum(map(held, (one, other))) <= CREDIT
        for _ in range(200):
            await other.receive()
        assert CREDIT < one.statistics.bytes_sent <= 200 * CHUNK_BYTES + CREDIT
        sender.cancel()


CHUNK_BYTES = 64 * 1024


async def flood(link: LanedLink) -> None:
    while True:
        await link.send([bytes(CHUNK_BYTES)])


def held(link: LanedLink) -> int:
    """Bytes of messages that one end buffers."""
    lanes = link._incoming._lanes.values()
    return link.unsent + sum(len(message) for lane in lanes for message in lane.queue)


async def test_control_overtakes_a_long_message() -> None:
    async with linked() as (one, other):
        sending = asyncio.create_task(one.send([bytes(64 * 1024 * 1024)]))
        await asyncio.sleep(0)
        await one.send([b"now"], contract.Channel.CONTROL)

        assert await read(other) == (contract.Channel.CONTROL, b"now")
        await sending
        assert len((await other.receive())[1]) == 64 * 1024 * 1024


async def test_nodelay_and_keep_alive_are_set() -> None:
    async with linked() as ends:
        for end in ends:
            assert isinstance(end._wire, connection.WebsocketConnection)
            sock = end._wire.socket.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


async def test_close_does_not_wait_for_a_silent_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CLOSE_WAIT_S", 0.05)
    monkeypatch.setattr(linger, "STALL_S", 0.05)
    async with linked() as (one, other):
        assert isinstance(other._wire, connection.WebsocketConnection)
        other._wire.socket.pause_reading()
        sending = asyncio.create_task(flood(one))
        await until(lambda: one.unsent)

        await one.close()
        assert isinstance(one._wire, connection.WebsocketConnection)
        await one._wire._closed

        with pytest.raises(LinkLost):
            await sending
        other._wire.socket.resume_reading()


async def test_a_peer_that_reads_little_by_little_delays_the_end_only_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = count(1_000_000, -1)
    monkeypatch.setattr(connection, "CLOSE_WAIT_S", 0.05)
    monkeypatch.setattr(linger, "STALL_S", 0.02)
    monkeypatch.setattr(linger, "MOST_S", 0.1)
    async with linked() as (one, other):
        assert isinstance(other._wire, connection.WebsocketConnection)
        assert isinstance(one._wire, connection.WebsocketConnection)
        other._wire.socket.pause_reading()
        monkeypatch.setattr(type(one), "unsent", property(lambda _: next(left)))

        await one.close()
        try:
            async with asyncio.timeout(120.0):
                await asyncio.shield(one._wire._closed)
        finally:
            other._wire.socket.resume_reading()


async def test_two_default_listeners_use_different_ports() -> None:
    transport = WebsocketTransport()
    async with transport.listen() as one, transport.listen() as other:
        for listener in (one, other):
            assert listener.address == listener.addresses[0]
            assert address.parse(listener.address).port in PORTS
            hosts = [ip_address(address.parse(place).host) for place in listener.addresses]
            assert not any(host.is_unspecified for host in hosts)
            assert hosts == sorted(hosts, key=lambda host: host.is_loopback)
            assert hosts[-1].is_loopback
        assert not set(one.addresses) & set(other.addresses)
        link = await transport.dial(other.addresses[-1])
        await link.close()


async def test_no_free_port_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = WebsocketTransport()
    async with transport.listen() as listener:
        taken = address.parse(listener.address).port
        monkeypatch.setattr("meshllm_websocket.transport.PORTS", range(taken, taken + 1))

        with pytest.raises(UserError, match=f"No free port from {taken} to {taken}"):
            await transport.listen().__aenter__()


async def test_a_port_in_use_is_one_line_with_a_hint() -> None:
    async with Local().listen() as listener:
        with pytest.raises(UserError) as caught:
            async with WebsocketTransport().listen(listener.address):
                pass

    assert str(caught.value) == f"Cannot listen on `{listener.address}`: address already in use"
    assert caught.value.hint == "choose another port, or an address of this machine"


async def test_a_machine_without_ipv6_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    create = loop.create_server

    async def without_ipv6(make: Any, hosts: list[str], port: int, backlog: int) -> Server:
        if "::" in hosts:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return await create(make, hosts, port, backlog=backlog)

    monkeypatch.setattr(loop, "create_server", without_ipv6)
    with socket.create_server(("", 0)) as taken:
        free = taken.getsockname()[1]
    monkeypatch.setattr("meshllm_websocket.transport.PORTS", range(free, free + 1))
    async with WebsocketTransport().listen() as listener:
        assert not any("[" in place for place in listener.addresses)


def test_a_wildcard_keeps_its_path() -> None:
    places = address.reachable([("0.0.0.0", 7700), ("::", 7701)], "/mesh")

    assert "ws://127.0.0.1:7700/mesh" in places
    assert all(place.endswith("/mesh") for place in places)


def test_without_interfaces_the_bound_address_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.net_if_addrs", dict)

    assert address.reachable([("0.0.0.0", 7700)]) == ("ws://0.0.0.0:7700",)


@pytest.mark.parametrize(
    ("text", "host", "port", "resource"),
    [
        ("ws://10.0.0.7:7700", "10.0.0.7", 7700, "/"),
        ("10.0.0.7:7700", "10.0.0.7", 7700, "/"),
        ("node.example:1", "node.example", 1, "/"),
        ("[fd00::2]:7700", "fd00::2", 7700, "/"),
        ("wss://mesh.example/a/b?c=d", "mesh.example", 443, "/a/b?c=d"),
        ("ws://mesh.example", "mesh.example", 80, "/"),
    ],
)
def test_addresses_are_parsed(text: str, host: str, port: int, resource: str) -> None:
    uri = address.parse(text)

    assert (uri.host, uri.port, uri.resource_name) == (host, port, resource)
    assert uri.secure is text.startswith("wss")


@pytest.mark.parametrize(
    "text",
    [
        "", "7700", "host", "host:", ":7700", "host:port", "host:99999", "host:1/path", "ws://",
        "ws://[::1:7700", "http://host:1", "ws://user@host:1", "ws://user:message@host:1",
        "ws://host:1/#x", "ws://ho st:1", "ws://host:1/a\r\nb", "ws://höst:1", "tcp:host:1",
        "ws://a..b:1", f"ws://{'a' * 64}:1",
    ],
)  # fmt: skip
async def test_invalid_websocket_addresses_are_rejected(text: str) -> None:
    with pytest.raises(UserError, match="Invalid WebSocket address"):
        await WebsocketTransport().dial(text)


async def test_listening_with_tls_is_rejected() -> None:
    with pytest.raises(UserError, match="TLS is not supported"):
        await WebsocketTransport().listen("wss://127.0.0.1:0").__aenter__()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 5\r\n\r\nsorry", "handshake: HTTP 502"),
        (b"HTTP/1.1 200 OK\r\n\r\nhello", "is not a WebSocket server"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "handshake: HTTP 101"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "is not a WebSocket server"),
        (b"x" * 20_000, "is not a WebSocket server"),
        (b"", "closed the connection"),
    ],
)
async def test_a_failed_handshake_is_a_lost_link(answer: bytes, reason: str) -> None:
    async with answering(answer) as place:
        with pytest.raises(LinkLost, match=reason):
            await WebsocketTransport().dial(place)


async def test_a_dial_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialer, "OPEN_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]

        with pytest.raises(LinkLost, match=r"No answer from `127\.0\.0\.1:\d+` within 0\.05 s"):
            await WebsocketTransport().dial(f"127.0.0.1:{port}")


async def test_a_dial_leaves_no_socket_wherever_it_is_cancelled() -> None:
    closed: dict[int, list[bool]] = {}
    gc.disable()  # it would close what nothing refers to
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            at = f"127.0.0.1:{server.getsockname()[1]}"
            for turns in range(12):
                dialling = asyncio.create_task(WebsocketTransport().dial(at))
                for _ in range(turns):
                    await asyncio.sleep(0)
                dialling.cancel()
                await asyncio.wait([dialling])
                for _ in range(3):  # an aborted transport closes its socket in a later turn
                    await asyncio.sleep(0)
                closed[turns] = [is_closed(each) for each in accepted(server)]
    finally:
        gc.enable()

    assert sum(map(len, closed.values())) > 5
    assert all(map(all, closed.values())), closed


async def test_a_cancelled_dial_leaves_no_link() -> None:
    asked, has_closed = asyncio.Event(), asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        with suppress(ConnectionError):
            await reader.read()
        writer.close()
        has_closed.set()

    async with await asyncio.start_server(wait, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        dialling = asyncio.create_task(WebsocketTransport().dial(f"127.0.0.1:{port}"))
        await asked.wait()
        dialling.cancel()
        await has_closed.wait()

    assert dialling.cancelled()


async def test_a_reverse_proxy_is_transparent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")  # the environment is not used
    transport = WebsocketTransport()
    async with (
        transport.listen(ANY) as listener,
        proxy(listener.address) as (port, seen),
    ):
        link = await transport.dial(f"ws://127.0.0.1:{port}/mesh/one?a=b")
        behind = await anext(aiter(listener.links()))
        await link.send([bytes(1_000_000)])

        assert len((await behind.receive())[1]) == 1_000_000
        assert seen == [b"GET /mesh/one?a=b HTTP/1.1"]
        await asyncio.gather(link.close(), behind.close())


async def test_a_reverse_proxy_can_terminate_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(file)
    transport = WebsocketTransport()
    async with (
        transport.listen(ANY) as listener,
        proxy(listener.address, tls) as (port, _),
    ):
        with pytest.raises(LinkLost, match="certificate verify failed"):
            await transport.dial(f"wss://127.0.0.1:{port}")

        monkeypatch.setenv("SSL_CERT_FILE", str(file))
        link = await transport.dial(f"wss://127.0.0.1:{port}")
        behind = await anext(aiter(listener.links()))
        await behind.send([bytes(1_000_000)])

        assert len((await link.receive())[1]) == 1_000_000
        await asyncio.gather(link.close(), behind.close())


async def test_two_concurrent_readers_of_a_websocket_link_raise() -> None:
    async with linked() as (one, _):
        reading = asyncio.create_task(one.receive())
        await asyncio.sleep(0)

        with pytest.raises(RuntimeError, match="two tasks"):
            await one.receive()
        reading.cancel()


async def test_a_connection_that_was_reset_fails_the_dial(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    with socket.create_server(("127.0.0.1", 0)) as server:

        async def connect(host: str, port: int) -> socket.socket:
            made = socket.create_connection((host, port))
            peer, _ = server.accept()
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()  # by a reset
            made.setblocking(False)
            while select.select([made], [], [], 1) != ([made], [], []):
                pass
            return made

        monkeypatch.setattr(dialer, "connect", connect)
        port = server.getsockname()[1]
        with pytest.raises(LinkLost, match=r"closed the connection|reset by peer|not connected"):
            await WebsocketTransport().dial(f"ws://127.0.0.1:{port}")
    assert failed == []
