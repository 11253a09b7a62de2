"""Dials over real sockets: handshakes, time limits, cancellation."""

import asyncio
import gc
import select
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from meshllm.errors import LinkLost
from meshllm_websocket import WebsocketTransport, dialer

pytestmark = pytest.mark.socket


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


async def test_a_name_is_dialled_at_the_hosts_that_it_is_given() -> None:
    async with answering(b"HTTP/1.1 403 No\r\n\r\n") as address:
        named = address.replace("127.0.0.1", "mesh.invalid")
        with pytest.raises(LinkLost, match=r"`ws://mesh\.invalid:\d+` failed .*HTTP 403"):
            await WebsocketTransport().dial_hosts(named, ["127.0.0.1"])


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 5\r\n\r\nsorry", "handshake: HTTP 502"),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html>", "handshake: HTTP 502"),
        (b"HTTP/1.1 403 No\r\nContent-Length: 9999\r\n\r\n<html>", "handshake: HTTP 403"),
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


async def test_a_connection_that_was_reset_fails_the_dial(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    with socket.create_server(("127.0.0.1", 0)) as server:

        async def connect(hosts: list[str], port: int) -> socket.socket:
            made = socket.create_connection((hosts[0], port))
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
