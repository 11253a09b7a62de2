"""Hostile input to a listener, byte by byte: it stays up, and its log stays quiet."""

import asyncio
import gc
import logging
import random
import tracemalloc
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count

import pytest
from websockets.datastructures import Headers
from websockets.frames import Frame, Opcode
from websockets.http11 import Request

from meshllm.errors import LinkLost, PeerFault
from meshllm.testing.links import read
from meshllm.transport.contract import (
    MAX_MESSAGE_BYTES,
    Channel,
    HasPeerHost,
    Listener,
    ReservesHandshakeSlots,
    SupportsUnreadLimit,
)
from meshllm.transport.half_open import Limits
from meshllm.transport.laned_link import LanedLink
from meshllm.transport.lanes import BACK, CREDIT, FIRST, NEXT, PIECE_BYTES
from meshllm_websocket import WebsocketTransport, listener
from meshllm_websocket.frames import MAX_CONTROL, MAX_FRAME_BYTES
from meshllm_websocket.listener import LIMITS, forwarded_for
from tests.builders.waiting import timers_fired, until

pytestmark = pytest.mark.socket

REQUEST = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
MEMORY_BYTES = 8 << 20  # of 100 connections that are not yet closed, each 256 KiB at most
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No input of an unauthenticated peer logs a warning or a traceback."""
    caplog.set_level(logging.DEBUG, "meshllm")
    yield
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []
    assert "Traceback" not in caplog.text


@asynccontextmanager
async def listening() -> AsyncIterator[Listener]:
    """Listen, and check afterwards that a well-behaved node can still connect."""
    transport = WebsocketTransport()
    async with transport.listen("ws://127.0.0.1:0") as place:
        yield place
        link, behind = await asyncio.gather(
            transport.dial(place.address), anext(aiter(place.links()))
        )
        await link.send([b"well"])
        assert await read(behind) == (Channel.DATA, b"well")
        await asyncio.gather(link.close(), behind.close())


def port_of(place: Listener) -> int:
    return int(place.address.rpartition(":")[2])


@asynccontextmanager
async def connected(place: Listener) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(place))
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@asynccontextmanager
async def stranger(place: Listener) -> AsyncIterator[tuple[Streams, LanedLink]]:
    """Complete the handshake, and accept the link at the listener."""
    async with connected(place) as (reader, writer):
        writer.write(REQUEST)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        link = await anext(aiter(place.links()))
        assert isinstance(link, LanedLink)
        yield (reader, writer), link
        await link.close()


def binary(payload: bytes) -> bytes:
    return Frame(Opcode.BINARY, payload).serialize(mask=True)


def piece(kind: int, number: int | None, body: bytes = b"") -> bytes:
    return binary(bytes([kind]) + (b"" if number is None else number.to_bytes(4, "big")) + body)


def whole(size: int) -> bytes:
    """Encode a valid message of that size."""
    frames = piece(FIRST, size, bytes(min(size, PIECE_BYTES)))
    for start in range(PIECE_BYTES, size, PIECE_BYTES):
        frames += piece(NEXT, None, bytes(min(size - start, PIECE_BYTES)))
    return frames


async def all_of(reader: asyncio.StreamReader) -> bytes:
    with suppress(ConnectionError):
        return await reader.read()
    return b""


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (REQUEST.replace(b"Host", b"Origin: http://page.example\r\nHost"), b"403 Forbidden"),
        (b"GET / HTTP/1.1\r\nOrigin: null\r\n\r\n", b"403 Forbidden"),
        (b"GET /favicon.ico HTTP/1.1\r\nHost: x\r\n\r\n", b"404 Not Found"),
        (REQUEST.replace(b"GET", b"POST"), b"404 Not Found"),
        (REQUEST.replace(b": 13", b": 12"), b"404 Not Found"),
        (REQUEST.replace(b"Sec-WebSocket-Key", b"X"), b"404 Not Found"),
        (REQUEST.replace(b"HTTP/1.1", b"HTTP/9.9"), b"400 Bad Request"),
        (REQUEST + b"early", b"400 Bad Request"),
        (b"\r\n\r\n", b"400 Bad Request"),
        (b"\x16\x03\x01\x02" * 20 + b"\r\n\r\n", b"400 Bad Request"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000, b"400 Bad Request"),
    ],
)
async def test_an_invalid_request_gets_a_short_error_response(
    request_: bytes, status: bytes
) -> None:
    async with listening() as place, connected(place) as (reader, writer):
        writer.write(request_)

        answer = await all_of(reader)

        no = b"HTTP/1.1 " + status + b"\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        assert answer == no or (not answer and len(request_) > 16_384)


@pytest.mark.parametrize(
    "stream",
    [
        Frame(Opcode.TEXT, b"\x02hello").serialize(mask=True),
        Frame(Opcode.BINARY, b"\x02hello", fin=False).serialize(mask=True),
        Frame(Opcode.CONT, b"\x02hello").serialize(mask=True) * 1000,
        Frame(Opcode.BINARY, b"\x02hello").serialize(mask=False),
        binary(bytes(MAX_FRAME_BYTES + 1)),
        b"\x82\xff" + b"\xff" * 100,
        b"\x89\xfe" + bytes(200),
        b"\x8b\x80" + bytes(40),
        Frame(Opcode.CLOSE, b"\x00\x01").serialize(mask=True),
        piece(FIRST, MAX_MESSAGE_BYTES + 1, bytes(PIECE_BYTES)),
        piece(NEXT, None, b"of nothing"),
        piece(BACK, 1),
        piece(BACK, 1, b"more"),
        piece(BACK, 0) * 2,
        Frame(Opcode.PING, b"").serialize(mask=True) * (MAX_CONTROL + 1),
        piece(FIRST, 9, b"short"),
        piece(7, 1),
        random.Random(0).randbytes(1000),
    ],
    ids=map(str, count()),  # masks differ from process to process
)
async def test_a_protocol_violation_closes_the_link(stream: bytes) -> None:
    async with listening() as place, stranger(place) as ((reader, writer), link):
        writer.write(stream)

        for _ in range(2):
            with pytest.raises(PeerFault, match=r"Protocol violation by `127\.0\.0\.1:\d+`: "):
                await link.receive()
        with pytest.raises(LinkLost):
            await link.send([b"?"])
        await all_of(reader)


async def test_exceeding_the_credit_closes_the_link() -> None:
    async with listening() as place, stranger(place) as ((reader, writer), link):
        for _ in range(2):
            writer.write(whole(CREDIT // 2 + 1))
        await all_of(reader)

        with pytest.raises(PeerFault, match="unread"):
            await link.receive()


async def test_unread_bytes_of_an_unauthenticated_peer_are_limited() -> None:
    async with listening() as place, stranger(place) as ((reader, writer), link):
        assert isinstance(link, SupportsUnreadLimit)
        link.limit_unread(1000)
        writer.write(piece(FIRST, MAX_MESSAGE_BYTES, bytes(PIECE_BYTES)))
        await all_of(reader)

        with pytest.raises(PeerFault, match="exceed the limit of 1000 B"):
            await link.receive()


async def test_what_came_before_the_limit_counts() -> None:
    async with listening() as place, stranger(place) as ((_, writer), link):
        writer.write(piece(FIRST, MAX_MESSAGE_BYTES, bytes(PIECE_BYTES)))
        await until(lambda: link._incoming.unread > 1000)
        link.limit_unread(1000)

        with pytest.raises(PeerFault, match="exceed the limit of 1000 B"):
            await link.receive()
        assert link._incoming._lane.body is None
        await link.close()


async def test_nothing_is_read_before_the_link_is_accepted() -> None:
    async with listening() as place, connected(place) as (reader, writer):
        writer.write(REQUEST)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(whole(CREDIT // 2))  # the kernel has the beginning of it when this returns
        await timers_fired()

        link = await anext(aiter(place.links()))
        assert isinstance(link, LanedLink)
        assert link._incoming.pop() is None
        assert len((await link.receive())[1]) == CREDIT // 2
        await link.close()


async def test_a_flood_of_pings_closes_the_link() -> None:
    ping = Frame(Opcode.PING, bytes(125)).serialize(mask=True)
    async with listening() as place, stranger(place) as ((_reader, writer), link):
        writer.write(ping * MAX_CONTROL + piece(FIRST, 0) + ping * MAX_CONTROL)
        assert (await link.receive())[1] == b""

        writer.write(ping)

        with pytest.raises(PeerFault, match="control frames in a row"):
            await link.receive()


async def test_half_open_connections_of_a_host_make_room_for_another() -> None:
    async with listening() as place:
        waiting = [connected(place) for _ in range(LIMITS.host)]
        opened = [await one.__aenter__() for one in waiting]
        async with stranger(place):
            assert await all_of(opened[0][0]) == b""
            assert not opened[1][0].at_eof()
        for one in waiting:
            await one.__aexit__(None, None, None)


def forwarded(*clients: str) -> bytes:
    lines = b"".join(b"X-Forwarded-For: " + client.encode() + b"\r\n" for client in clients)
    return REQUEST.replace(b"Host", lines + b"Host")


async def proxied(place: Listener, stack: AsyncExitStack, clients: Iterable[str]) -> list[Streams]:
    """Complete the handshakes of clients behind a proxy on this machine."""
    opened = []
    for client in clients:
        opened.append(await stack.enter_async_context(connected(place)))
        opened[-1][1].write(forwarded("203.0.113.9", f"forged, {client}"))
        await opened[-1][0].readuntil(b"\r\n\r\n")
    return opened


async def test_clients_of_a_proxy_do_not_take_the_places_of_each_other() -> None:
    clients = [f"2001:db8:{number}::1" for number in range(1, LIMITS.host + 2)]
    async with listening() as place, AsyncExitStack() as stack:
        opened = await proxied(place, stack, clients)
        links = [await anext(aiter(place.links())) for _ in clients]
        for link in links:
            assert isinstance(link, SupportsUnreadLimit)
            link.limit_unread(1000)
        await proxied(place, stack, ["2001:db8::1"])  # an end before it would have been read
        later = await anext(aiter(place.links()))

        assert [link.peer_host for link in links if isinstance(link, HasPeerHost)] == clients
        assert not any(reader.at_eof() for reader, _ in opened)
        await asyncio.gather(*(link.close() for link in (*links, later)))


async def test_one_client_of_a_proxy_takes_places_of_its_own() -> None:
    async with listening() as place, AsyncExitStack() as stack:
        opened = await proxied(place, stack, ["2001:db8::1"] * (LIMITS.host + 1))

        assert await all_of(opened[0][0]) == b""
        assert not opened[1][0].at_eof()
        for _ in range(LIMITS.host):
            await (await anext(aiter(place.links()))).close()


@pytest.mark.parametrize(
    ("host", "said", "client"),
    [
        ("127.0.0.1", "192.0.2.7", "192.0.2.7"),
        ("::1", "192.0.2.7, 2001:db8::7", "2001:db8::7"),
        ("192.0.2.1", "192.0.2.7", ""),
        ("127.0.0.1", "192.0.2.7:5000", ""),
        ("127.0.0.1", "unknown", ""),
        ("", "192.0.2.7", ""),
    ],
)
def test_only_a_proxy_of_this_machine_names_its_client(host: str, said: str, client: str) -> None:
    request = Request("/", Headers({"X-Forwarded-For": said}))

    assert forwarded_for(host, request) == client
    assert forwarded_for(host, Request("/", Headers())) == ""


@pytest.mark.parametrize("hosts", [[], ["127.0.0.2"]])
async def test_strangers_take_the_place_of_a_peer_only_if_its_host_is_not_known(
    hosts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "LIMITS", Limits(total=8, host=8, network=3))
    async with listening() as place:
        assert isinstance(place, ReservesHandshakeSlots)
        place.reserve(hosts)
        opened = []
        for number in range(2, 7):
            here = f"127.0.0.{number}", 0
            opened.append(
                await asyncio.open_connection("127.0.0.1", port_of(place), local_addr=here)
            )

        assert await all_of(opened[1][0]) == b""  # the oldest stranger, or the next one
        if hosts:
            assert not opened[0][0].at_eof()
        else:
            assert await all_of(opened[0][0]) == b""
        for _, writer in opened:
            writer.close()


async def test_unauthenticated_links_of_a_host_make_room_for_another() -> None:
    transport = WebsocketTransport()
    async with listening() as place:
        silent, taken = [], []
        for _ in range(LIMITS.host + 1):
            silent.append(await transport.dial(place.address))
            taken.append(await anext(aiter(place.links())))
            assert isinstance(taken[-1], SupportsUnreadLimit)
            taken[-1].limit_unread(1000)

        with pytest.raises(LinkLost):
            await silent[0].receive()
        assert isinstance(taken[1], SupportsUnreadLimit)
        taken[1].limit_unread(None)  # authenticated: it is not dropped
        for _ in range(2):
            silent.append(await transport.dial(place.address))
            taken.append(await anext(aiter(place.links())))
            await taken[-1].send([b"hello"])
            assert await silent[-1].receive()
        await taken[1].send([b"still there"])
        assert bytes((await silent[1].receive())[1]) == b"still there"
        await asyncio.gather(*(link.close() for link in (*silent, *taken)))


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_ten_thousand_connections_leave_room_and_memory() -> None:
    await survive_connections(100)


async def test_connections_that_close_before_they_are_accepted_are_forgotten() -> None:
    await survive_connections(2)


async def survive_connections(hundreds: int) -> None:
    """Open and close connections that nobody accepts; then let another one in."""
    transport = WebsocketTransport()
    tracemalloc.start()
    async with transport.listen("ws://127.0.0.1:0") as place:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(hundreds):
            opened = [connected(place) for _ in range(100)]
            for each in opened:
                (_, writer) = await each.__aenter__()
                writer.write(REQUEST)
            for each in opened:
                await each.__aexit__(None, None, None)
        gc.collect()  # of the strangers themselves
        assert tracemalloc.get_traced_memory()[0] - before < MEMORY_BYTES
        await (await transport.dial(place.address)).close()
    tracemalloc.stop()


async def test_an_incomplete_request_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "OPEN_S", 0.05)
    async with listening() as place, connected(place) as (reader, writer):
        writer.write(REQUEST[:-4])

        assert await all_of(reader) == b""


async def test_closing_a_listener_closes_waiting_connections() -> None:
    async with WebsocketTransport().listen("127.0.0.1:0") as place:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(place))
        writer.write(REQUEST)
        await reader.readuntil(b"\r\n\r\n")

    assert await all_of(reader) == b""
    writer.close()


@pytest.mark.parametrize("seed", range(5))
async def test_garbage_raises_one_typed_error(seed: int) -> None:
    draw = random.Random(seed)
    good = [whole(100), piece(FIRST | 1, 0), Frame(Opcode.PING, b"").serialize(mask=True)]
    async with listening() as place:
        for _ in range(20):
            async with stranger(place) as ((reader, writer), link):
                stream = bytearray(b"".join(draw.choices(good, k=20)))
                for _ in range(draw.randrange(1, 4)):
                    stream[draw.randrange(len(stream))] ^= 1 << draw.randrange(8)
                writer.write(stream)
                writer.write_eof()
                with pytest.raises((PeerFault, LinkLost)):
                    await drain(link)
                await all_of(reader)


async def drain(link: LanedLink) -> None:
    while True:
        await link.receive()
