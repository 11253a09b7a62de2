"""The client side of a stream, against an echo server of the same library."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request, Response

from meshllm_quic.relay import relay_stream
from meshllm_quic.relay.relay_stream import (
    MAX_BACKOFF_S,
    MAX_PACKET_BYTES,
    MAX_WAITING,
    RelayStream,
    SendQueue,
    backoff_s,
    stream_uri,
)
from tests.builders.waiting import until

pytestmark = pytest.mark.socket

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore proxies of the environment, and shorten the backoff."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "ws_proxy", "wss_proxy", "socks_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(relay_stream, "BACKOFF_S", 0.01)


async def echo(connection: ServerConnection) -> None:
    async for message in connection:
        await connection.send(message)


@asynccontextmanager
async def serving(
    handler: Callable[[ServerConnection], object] = echo, port: int = 0
) -> AsyncIterator[tuple[Server, int]]:
    server = serve(handler, HOST, port, compression=None, close_timeout=1)  # type: ignore[arg-type]  # what it returns is not read
    async with server as running:
        yield running, running.sockets[0].getsockname()[1]


class Ours:
    """A stream, its received packets, and `is_open` at each change."""

    def __init__(self, uri: str) -> None:
        self.stream = RelayStream(uri, self._receive, self._change, bytes)
        self.heard: asyncio.Queue[bytes] = asyncio.Queue()
        self.changes: asyncio.Queue[bool] = asyncio.Queue()

    def _receive(self, packet: bytes) -> None:
        self.heard.put_nowait(packet)

    def _change(self) -> None:
        self.changes.put_nowait(self.stream.is_open)

    async def echoed(self, packet: bytes) -> bytes:
        self.stream.send([packet])
        return await self.heard.get()


@asynccontextmanager
async def running(uri: str) -> AsyncIterator[Ours]:
    ours = Ours(uri)
    task = asyncio.create_task(ours.stream.run())
    yield ours
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("uri", "wanted"),
    [
        (stream_uri("203.0.113.1", 8790), "ws://203.0.113.1:8790/relay"),
        (stream_uri("2001:db8::1", 8790), "ws://[2001:db8::1]:8790/relay"),
        (stream_uri("example.org", 443, is_secure=True), "wss://example.org:443/relay"),
    ],
)
def test_a_relay_has_one_stream(uri: str, wanted: str) -> None:
    assert uri == wanted


async def test_packets_go_both_ways_in_order() -> None:
    async with serving() as (_, port), running(stream_uri(HOST, port)) as ours:
        assert await ours.changes.get()

        ours.stream.send([b"one", b"two"])
        ours.stream.send([b"three"])

        assert [await ours.heard.get() for _ in range(3)] == [b"one", b"two", b"three"]
        assert ours.stream.last_error is None


async def test_redirects_are_not_followed() -> None:
    asked: list[str] = []
    referred: asyncio.Queue[None] = asyncio.Queue()

    def note(_: ServerConnection, request: Request) -> None:
        asked.append(request.path)

    async with serve(echo, HOST, 0, process_request=note) as inner:
        inside = f"ws://{HOST}:{inner.sockets[0].getsockname()[1]}/inside"

        def refer(connection: ServerConnection, _: Request) -> Response:
            response = connection.respond(HTTPStatus.FOUND, "")
            response.headers["Location"] = inside
            referred.put_nowait(None)
            return response

        async with serve(echo, HOST, 0, process_request=refer) as outer:
            port = outer.sockets[0].getsockname()[1]
            async with running(stream_uri(HOST, port)) as ours:
                await referred.get()
                await referred.get()  # the first connection has ended

                assert "302" in (ours.stream.last_error or "")

    assert asked == []


async def test_text_messages_are_ignored() -> None:
    async def talk(connection: ServerConnection) -> None:
        await connection.send("text")
        await connection.send(b"packet")
        await connection.wait_closed()

    async with serving(talk) as (_, port), running(stream_uri(HOST, port)) as ours:
        assert await ours.heard.get() == b"packet"


async def test_an_oversized_packet_ends_the_stream() -> None:
    async def flood(connection: ServerConnection) -> None:
        await connection.send(bytes(MAX_PACKET_BYTES))
        await connection.send(bytes(MAX_PACKET_BYTES + 1))
        await connection.wait_closed()

    async with serving(flood) as (_, port), running(stream_uri(HOST, port)) as ours:
        assert [await ours.changes.get() for _ in range(2)] == [True, False]
        assert ours.heard.get_nowait() == bytes(MAX_PACKET_BYTES)
        assert ours.heard.empty()


async def test_packets_sent_before_the_connection_are_dropped() -> None:
    async with serving() as (_, port), running(stream_uri(HOST, port)) as ours:
        ours.stream.send([b"early"])
        await ours.changes.get()

        assert await ours.echoed(b"in time") == b"in time"


async def test_a_closed_stream_reconnects() -> None:
    async def twice(connection: ServerConnection) -> None:
        await connection.send(await connection.recv())

    async with serving(twice) as (_, port), running(stream_uri(HOST, port)) as ours:
        assert await ours.changes.get()
        assert await ours.echoed(b"one") == b"one"

        assert [await ours.changes.get() for _ in range(2)] == [False, True]
        assert await ours.echoed(b"two") == b"two"


async def test_no_callback_after_cancellation() -> None:
    async with serving() as (_, port):
        async with running(stream_uri(HOST, port)) as ours:
            assert await ours.changes.get()

        assert not ours.stream.is_open
        assert ours.changes.empty()


async def test_an_aborted_connection_reconnects() -> None:
    async def cut(connection: ServerConnection) -> None:
        connection.transport.abort()
        await connection.wait_closed()

    async with serving(cut) as (_, port), running(stream_uri(HOST, port)) as ours:
        assert [await ours.changes.get() for _ in range(4)] == [True, False, True, False]


async def test_a_stream_waits_for_the_relay_to_start() -> None:
    async with serving() as (_, port):
        pass

    async with running(stream_uri(HOST, port)) as ours:
        await until(lambda: ours.stream.last_error)
        assert not ours.stream.is_open
        assert ours.stream.last_error == "connection refused"
        async with serving(port=port):
            assert await ours.changes.get()
            assert await ours.echoed(b"one") == b"one"


async def test_a_rejected_stream_is_retried() -> None:
    asked: asyncio.Queue[str] = asyncio.Queue()

    def refuse(connection: ServerConnection, request: Request) -> Response:
        asked.put_nowait(request.path)
        return connection.respond(HTTPStatus.NOT_FOUND, "no relay\n")

    async with serve(echo, HOST, 0, process_request=refuse) as server:
        port = server.sockets[0].getsockname()[1]
        async with running(stream_uri(HOST, port)) as ours:
            assert [await asked.get() for _ in range(4)] == ["/relay"] * 4

            assert "404" in str(ours.stream.last_error)
            assert ours.changes.empty()


def test_backoff_doubles_to_a_limit_with_jitter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_stream, "BACKOFF_S", 1.0)

    assert [backoff_s(tries, 128) for tries in range(4)] == [1.0, 2.0, 4.0, 8.0]
    assert backoff_s(1000, 128) == MAX_BACKOFF_S
    assert [backoff_s(1, chance) for chance in (0, 64, 192)] == [1.0, 1.5, 2.5]


async def test_a_missing_proxy_library_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("socks_proxy", "socks5h://127.0.0.1:9")

    async with running("ws://relay.invalid:1/relay") as ours:
        await until(lambda: ours.stream.last_error)

        assert not ours.stream.is_open


async def test_a_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n"))
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await join((reader, writer), await asyncio.open_connection(HOST, port))

    async with serving() as (_, port), await asyncio.start_server(proxy, HOST, 0) as proxy_server:
        monkeypatch.setenv(
            "http_proxy", f"http://{HOST}:{proxy_server.sockets[0].getsockname()[1]}"
        )
        monkeypatch.setenv("no_proxy", "")
        async with running("ws://relay.invalid:80/relay") as ours:
            await ours.changes.get()

            assert await ours.echoed(b"one") == b"one"

    assert asked == [b"CONNECT relay.invalid:80 HTTP/1.1\r\n"]


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def join(one: Ends, other: Ends) -> None:
    """Carry bytes between two connections until one of them ends."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(4096):
                writer.write(data)
        writer.close()

    await asyncio.gather(copy(one[0], other[1]), copy(other[0], one[1]))


def certificate(folder: Path) -> Path:
    """Write a key and a certificate for the loopback address, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "relay")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(HOST))]), False)
        .sign(key, hashes.SHA256())
    )
    path = folder / "relay.pem"
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.write_bytes(secret + made.public_bytes(serialization.Encoding.PEM))
    return path


async def test_a_relay_behind_a_proxy_with_a_certificate_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)

    async def unwrap(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await join((reader, writer), await asyncio.open_connection(HOST, port))

    async with (
        serving() as (_, port),
        await asyncio.start_server(unwrap, HOST, 0, ssl=context) as proxy_server,
        running(stream_uri(HOST, proxy_server.sockets[0].getsockname()[1], is_secure=True)) as ours,
    ):
        await ours.changes.get()

        assert await ours.echoed(b"one") == b"one"


async def test_an_untrusted_certificate_is_an_error(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate(tmp_path))

    async with await asyncio.start_server(lambda *_: None, HOST, 0, ssl=context) as proxy_server:
        uri = stream_uri(HOST, proxy_server.sockets[0].getsockname()[1], is_secure=True)
        async with running(uri) as ours:
            await until(lambda: ours.stream.last_error)

            assert ours.stream.last_error is not None
            assert "certificate" in ours.stream.last_error
            assert not ours.stream.is_open


async def test_no_more_waits_than_there_is_room_for() -> None:
    waiting = SendQueue()

    waiting.put([b"packet"] * (MAX_WAITING + 3))

    assert waiting.lost == 3
