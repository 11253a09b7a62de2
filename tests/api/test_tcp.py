import asyncio
import json
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from meshllm.api import connection, respond, tcp
from meshllm.api.access.accounts import Accounts, KeyLimits
from meshllm.api.connection import PublicProtocol
from meshllm.api.tcp import ApiServer, ApiServerOptions, open_api_server, read_keys
from meshllm.api.v1.chat_socket import PATH, PROTOCOL
from meshllm.errors import UserError
from meshllm.node.requests.request_json import REQUEST_BYTES
from meshllm.request import Piece
from tests.builders.certificates import certificate
from tests.builders.fake_node import FakeNode
from tests.builders.fake_ring import answer_of
from tests.builders.waiting import timers_fired, until

pytestmark = pytest.mark.socket

LOCAL = ApiServerOptions("127.0.0.1", 0)
CHAT = "/chat/completions"
BODY = {"model": "builtin", "messages": [{"role": "user", "content": "hi"}]}
KEY = "0123456789abcdef"
LONG = 40 << 20
"""More bytes than Linux buffers for a connection by default."""


@asynccontextmanager
async def serving(
    accounts: Accounts, node: FakeNode, options: ApiServerOptions = LOCAL
) -> AsyncIterator[ApiServer]:
    with open_api_server(options, accounts) as api_server:
        task = asyncio.ensure_future(api_server.serve(node))
        try:
            yield api_server
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def connect(api_server: ApiServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*api_server.bound.getsockname()[:2])


async def closed(reader: asyncio.StreamReader) -> bool:
    """Wait until the server has closed a connection."""
    await size_of(reader)
    return True


async def size_of(reader: asyncio.StreamReader) -> int:
    """Return how much comes until the server has closed a connection."""
    size = 0
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            size += len(data)
    return size


async def test_it_answers_on_loopback_without_a_key(
    api_server: FakeNode, accounts: Accounts
) -> None:
    async with (
        serving(accounts, api_server) as open_one,
        httpx2.AsyncClient(timeout=None) as client,
    ):
        said = await client.post(f"{open_one.url}{CHAT}", json=BODY)

    assert said.json()["choices"][0]["message"]["content"] == "hello"
    assert "server" not in said.headers


@pytest.mark.parametrize("path", ["/mesh/status", "/mesh/remove", "/metrics", "/v1/../mesh/status"])
async def test_the_owners_routes_are_not_served(
    api_server: FakeNode, accounts: Accounts, path: str
) -> None:
    async with serving(accounts, api_server) as open_one:
        reader, writer = await connect(open_one)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        said = await reader.readline()
        writer.close()

    assert said.startswith(b"HTTP/1.1 404 ")


HIDDEN = b"GET /mesh/status HTTP/1.1\r\nhost: localhost\r\n\r\n"
SMUGGLED = {
    "both lengths": b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"content-length: 0\r\ncontent-length: 64\r\n\r\n",
    "a list of lengths": b"content-length: 0, 64\r\n\r\n",
    "a negative length": b"content-length: -1\r\n\r\n",
    "a signed length": b"content-length: +0\r\n\r\n",
    "a hidden encoding": b"transfer-encoding: xchunked\r\n\r\n",
    "two encodings": b"transfer-encoding: identity, chunked\r\n\r\n0\r\n\r\n",
    "space before the colon": b"content-length : 64\r\n\r\n",
    "a folded line": b"x: y\r\n content-length: 64\r\n\r\n",
    "a bare line feed": b"x: y\ncontent-length: 0\r\n\r\n",
    "a bad chunk": b"transfer-encoding: chunked\r\n\r\n-1\r\n\r\n",
    "a chunk extension": b"transfer-encoding: chunked\r\n\r\n0;\nx\r\n\r\n",
}


@pytest.mark.parametrize("headers", SMUGGLED.values(), ids=SMUGGLED)
async def test_a_request_inside_another_reaches_no_route_of_the_owner(
    api_server: FakeNode, accounts: Accounts, headers: bytes
) -> None:
    async with serving(accounts, api_server) as open_one:
        reader, writer = await connect(open_one)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n" + headers + HIDDEN
        )
        writer.write_eof()
        said = await reader.read()
        writer.close()

    lines = said.replace(b"HTTP/1.1", b"\nHTTP/1.1").splitlines()
    statuses = [int(line.split()[1]) for line in lines if line.startswith(b"HTTP/1.1")]
    assert statuses
    assert set(statuses) <= {400, 404, 411, 413, 415, 422, 501}
    assert b'"mesh"' not in said


async def test_pipelined_requests_are_answered_in_order_each_by_its_own_route(
    api_server: FakeNode, accounts: Accounts
) -> None:
    async with serving(accounts, api_server) as open_one:
        reader, writer = await connect(open_one)
        models = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
        last = models.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
        writer.write(models + HIDDEN + models.replace(b"localhost", b"page.example") + last)
        said = await reader.read()
        writer.close()

    lines = said.replace(b"HTTP/1.1", b"\nHTTP/1.1").splitlines()  # a body ends without one
    statuses = [int(line.split()[1]) for line in lines if line.startswith(b"HTTP/1.1")]
    assert statuses == [200, 404, 421, 200]


async def test_tls_is_served(api_server: FakeNode, accounts: Accounts, tmp_path: Path) -> None:
    cert = certificate(tmp_path)
    options = replace(LOCAL, tls_cert=cert, tls_key=cert)
    context = ssl.create_default_context(cafile=str(cert))
    async with (
        serving(accounts, api_server, options) as open_one,
        httpx2.AsyncClient(verify=context, timeout=None) as client,
    ):
        url = open_one.url
        said = await client.get(f"{url}/models")

    assert url.startswith("https://127.0.0.1:")
    assert said.status_code == 200


async def test_a_connection_without_a_handshake_is_closed(
    api_server: FakeNode, accounts: Accounts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEADERS_S", 0.05)
    cert = certificate(tmp_path)
    async with serving(
        accounts, api_server, replace(LOCAL, tls_cert=cert, tls_key=cert)
    ) as open_one:
        reader, writer = await connect(open_one)

        assert await closed(reader)
        writer.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_other_addresses_need_a_key(accounts: Accounts, host: str) -> None:
    with (
        pytest.raises(UserError, match="needs a key") as raised,
        open_api_server(ApiServerOptions(host, 0), accounts),
    ):
        pass

    assert raised.value.hint == "create one with `meshllm key create NAME`"


def test_a_stored_key_or_a_file_of_keys_will_do(accounts: Accounts, tmp_path: Path) -> None:
    path = _file(tmp_path, KEY)
    with open_api_server(ApiServerOptions("0.0.0.0", 0, key_file=path), accounts) as api_server:
        assert (api_server.policy.needs_key, api_server.policy.file_keys) == (True, (KEY,))
        assert (api_server.is_readable, api_server.url.startswith("http://127.0.0.1:")) == (
            True,
            True,
        )

    accounts.create("old", KeyLimits(expires_s=1), 0)
    with (
        pytest.raises(UserError, match="needs a key"),
        open_api_server(ApiServerOptions("::", 0), accounts),
    ):
        pass
    accounts.create("laptop", KeyLimits(), 0)
    with open_api_server(ApiServerOptions("::", 0), accounts) as api_server:
        assert (api_server.policy.needs_key, api_server.url.startswith("http://[::1]:")) == (
            True,
            True,
        )


def test_loopback_needs_a_key_on_request(accounts: Accounts, tmp_path: Path) -> None:
    accounts.create("laptop", KeyLimits(), 0)
    for options in (
        replace(LOCAL, require_key=True),
        replace(LOCAL, key_file=_file(tmp_path, KEY)),
    ):
        with open_api_server(options, accounts) as api_server:
            assert (api_server.policy.needs_key, api_server.is_readable) == (True, False)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("# none\n\n", "has 0 keys"),
        ("short", "does not have 16 to 256 characters"),
        ("x" * 257, "does not have 16 to 256 characters"),
        (f"{KEY}\n" * 1025, "has 1025 keys"),
        ("é" * 20, "Cannot read the key file"),
    ],
    ids=["none", "short", "long", "many", "text"],
)
def test_an_invalid_key_file_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(UserError, match=told) as raised:
        read_keys(_file(tmp_path, text))

    assert raised.value.hint


def test_a_key_file_has_comments_and_is_private(tmp_path: Path) -> None:
    path = _file(tmp_path, f"# of the office\n{KEY}  # laptop\n")
    assert read_keys(path) == (KEY,)

    path.chmod(0o640)
    with pytest.raises(UserError, match="Other users can read") as raised:
        read_keys(path)
    assert raised.value.hint == f"`chmod 600 {path}`"


def test_a_key_file_is_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "MAX_KEY_FILE_BYTES", len(KEY) + 1)

    assert read_keys(_file(tmp_path, f"{KEY}\n")) == (KEY,)
    with pytest.raises(UserError, match=f"has more than {len(KEY) + 1} bytes"):
        read_keys(_file(tmp_path, f"{KEY}\n\n"))


def test_what_cannot_be_opened_is_said(accounts: Accounts, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(UserError, match="address already in use"),
            open_api_server(ApiServerOptions("127.0.0.1", port), accounts),
        ):
            pass
    for options, told in (
        (ApiServerOptions("no.such.invalid", 0), "Cannot listen on `no.such.invalid:0`"),
        (ApiServerOptions("192.0.2.1", 0), "Cannot listen on `192.0.2.1:0`"),
        (ApiServerOptions("a..b", 0), "Invalid host `a..b`"),
        (ApiServerOptions("x" * 64, 0), "Invalid host `x"),
        (replace(LOCAL, tls_key=tmp_path), "needs `--tls-cert`"),
        (
            replace(LOCAL, tls_cert=tmp_path / "none.pem"),
            r"Cannot use the certificate .*: no such file or directory$",
        ),
        (replace(LOCAL, tls_cert=_file(tmp_path, "no PEM")), "Cannot use the certificate"),
        (replace(LOCAL, key_file=tmp_path / "none"), r"key file `.*`: no such file or directory$"),
    ):
        with pytest.raises(UserError, match=told) as raised, open_api_server(options, accounts):
            pass
        assert raised.value.hint


def test_the_first_address_that_this_machine_has_is_bound(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(*_: object, **__: object) -> list[object]:
        return [(socket.AF_INET, 1, 6, "", (each, 0)) for each in hosts]

    hosts = ["192.0.2.254", "127.0.0.1"]
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with open_api_server(ApiServerOptions("localhost", 0), accounts) as api_server:
        assert api_server.url.startswith("http://127.0.0.1:")

    hosts = ["192.0.2.254", "192.0.2.253"]
    with (
        pytest.raises(UserError, match="assign requested address"),
        open_api_server(ApiServerOptions("localhost", 0), accounts),
    ):
        pass


async def test_a_connection_without_headers_is_closed(
    api_server: FakeNode, accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEADERS_S", 0.05)
    async with serving(accounts, api_server) as open_one:
        for start in (b"", b"GET /v1/models HT", b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"):
            reader, writer = await connect(open_one)
            writer.write(start)

            assert await closed(reader)
            writer.close()


@pytest.fixture
async def arrived(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[bytes]:
    """What the server has read."""
    arrived, receive = asyncio.Queue[bytes](), PublicProtocol.data_received

    def note(protocol: PublicProtocol, data: bytes) -> None:
        receive(protocol, data)
        arrived.put_nowait(data)

    monkeypatch.setattr(PublicProtocol, "data_received", note)
    return arrived


async def test_a_rest_of_headers_after_a_response_counts_too(
    api_server: FakeNode,
    accounts: Accounts,
    advance: Callable[[float], None],
    arrived: asyncio.Queue[bytes],
) -> None:
    async with serving(accounts, api_server) as open_one:
        reader, writer = await connect(open_one)
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\nGET ")
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert length
        await reader.readexactly(int(length[1]))
        writer.write(b"/v1")  # it ends uvicorn's own, shorter deadline
        while not (await arrived.get()).endswith(b"/v1"):
            pass

        advance(connection.HEADERS_S)

        assert await closed(reader)
        writer.close()
    assert head.startswith(b"HTTP/1.1 200 ")


async def test_headers_have_their_time_again_after_this_process_was_stopped(
    api_server: FakeNode,
    accounts: Accounts,
    advance: Callable[[float], None],
    arrived: asyncio.Queue[bytes],
) -> None:
    async with serving(accounts, api_server) as open_one:
        reader, writer = await connect(open_one)
        writer.write(b"GET /v1/models HTTP/1.1\r\n")
        await arrived.get()
        advance(1.5 * connection.HEADERS_S)
        await timers_fired()
        writer.write(b"host: localhost\r\n\r\n")

        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_request_in_progress_is_not_idle(
    api_server: FakeNode, accounts: Accounts, advance: Callable[[float], None]
) -> None:
    api_server.waits_at = 1
    async with (
        serving(accounts, api_server) as open_one,
        httpx2.AsyncClient(timeout=None) as client,
    ):
        asking = asyncio.ensure_future(client.post(f"{open_one.url}{CHAT}", json=BODY))
        await api_server.begun.wait()
        advance(connection.HEADERS_S)
        asyncio.get_running_loop().call_later(0, api_server.go.set)

        assert (await asking).status_code == 200


async def test_a_client_that_does_not_read_is_dropped(
    api_server: FakeNode,
    accounts: Accounts,
    monkeypatch: pytest.MonkeyPatch,
    advance: Callable[[float], None],
) -> None:
    stalled, pause = asyncio.Event(), PublicProtocol.pause_writing

    def note(protocol: PublicProtocol) -> None:
        pause(protocol)
        stalled.set()

    monkeypatch.setattr(PublicProtocol, "pause_writing", note)
    api_server.said = Piece("x" * LONG), answer_of("x", 1)
    body = b'{"model":"builtin","stream":true,"messages":[{"role":"user","content":"hi"}]}'
    head = f"POST /v1{CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    async with serving(accounts, api_server) as open_one:
        reader, writer = await connect(open_one)
        writer.write(head.encode() + body)
        await stalled.wait()
        advance(connection.STALL_S)
        await api_server.closed.wait()
        received = await size_of(reader)
        writer.close()

    assert received < LONG


async def test_a_client_that_reads_steadily_has_as_long_as_it_takes(
    api_server: FakeNode,
    accounts: Accounts,
    monkeypatch: pytest.MonkeyPatch,
    advance: Callable[[float], None],
) -> None:
    is_paused = has_read = False
    pause, resume = PublicProtocol.pause_writing, PublicProtocol.resume_writing

    def paused(protocol: PublicProtocol) -> None:
        nonlocal is_paused
        is_paused = True
        pause(protocol)

    def resumed(protocol: PublicProtocol) -> None:
        nonlocal is_paused, has_read
        is_paused, has_read = False, True
        resume(protocol)

    def has_written() -> bool:
        return has_read or not is_paused

    monkeypatch.setattr(PublicProtocol, "pause_writing", paused)
    monkeypatch.setattr(PublicProtocol, "resume_writing", resumed)
    api_server.said = Piece("x" * LONG), answer_of("x" * LONG, 1)
    body = json.dumps(BODY)
    head = f"POST /v1{CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    async with serving(accounts, api_server) as open_one:
        reader, writer = await connect(open_one)
        writer.write(f"{head}connection: close\r\n\r\n{body}".encode())
        for _ in range(4):
            await reader.readexactly(LONG // 5)
            await until(has_written)  # the next piece is sent
            has_read = False
            advance(connection.STALL_S * 0.3)
        received = LONG // 5 * 4 + await size_of(reader)
        writer.close()

    assert received > LONG


async def test_many_idle_connections_make_room(
    api_server: FakeNode, accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_OPEN", 3)
    async with serving(accounts, api_server) as open_one:
        idle = [await connect(open_one) for _ in range(3)]
        async with httpx2.AsyncClient(timeout=None) as client:
            said = await client.get(f"{open_one.url}/models")

        assert said.status_code == 200
        assert await closed(idle[0][0])
        for _, writer in idle:
            writer.close()


async def test_connections_that_are_accepted_at_once_make_room_for_others(
    api_server: FakeNode, accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("connection", "tcp"):
        monkeypatch.setattr(f"meshllm.api.{module}.MAX_OPEN", 3)
    async with serving(accounts, api_server) as open_one:
        place = open_one.bound.getsockname()[:2]
        idle = [socket.create_connection(place) for _ in range(12)]  # the event loop waits
        ends = [await asyncio.open_connection(sock=each) for each in idle[:9]]
        assert all([await closed(reader) for reader, _ in ends])
        async with httpx2.AsyncClient(timeout=None) as client:
            said = await client.get(f"{open_one.url}/models")

        assert said.status_code == 200
        for _, writer in ends:
            writer.close()
        for each in idle[9:]:
            each.close()


@pytest.mark.parametrize("closing", [b"connection: close\r\n", b""])
async def test_a_client_that_reads_behind_a_body_that_is_too_large_sees_why(
    api_server: FakeNode, accounts: Accounts, closing: bytes
) -> None:
    size = 8 * REQUEST_BYTES
    async with serving(accounts, api_server) as open_one:
        reader, writer = await connect(open_one)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        writer.write(head + closing + b"content-length: %d\r\n\r\n" % size)
        for _ in range(size >> 16):
            writer.write(bytes(1 << 16))
            await writer.drain()
        said = await reader.readline()
        writer.close()

    assert said.startswith(b"HTTP/1.1 413 ")


async def test_what_is_read_of_a_refused_body_is_bounded(
    api_server: FakeNode, accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(respond, "DRAIN_BYTES", 2 * REQUEST_BYTES)
    async with serving(accounts, api_server) as open_one:
        reader, writer = await connect(open_one)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n" % (1 << 40))
        with suppress(ConnectionError):
            while True:  # until the server closes the connection
                writer.write(bytes(1 << 16))
                await writer.drain()

    assert await closed(reader)


LAST = b"host: localhost\r\nconnection: close\r\n"
JSON = json.dumps(BODY).encode()
PIECES = b"".join(b"1\r\n%c\r\n" % each for each in JSON)
FORMS = {
    "no content type": b"content-length: %d\r\n\r\n%s" % (len(JSON), JSON),
    "another content type": b"content-type: text/plain\r\ncontent-length: %d\r\n\r\n%s"
    % (len(JSON), JSON),
    "one chunk": b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(JSON), JSON),
    "chunks of a byte": b"transfer-encoding: chunked\r\n\r\n%s0\r\n\r\n" % PIECES,
}


async def exchange(api_server: ApiServer, sent: bytes) -> bytes:
    """Send bytes, and return what comes until the server closes the connection."""
    reader, writer = await connect(api_server)
    writer.write(sent)
    said = await reader.read()
    writer.close()
    return said


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
async def test_a_body_may_come_in_any_form(
    api_server: FakeNode, accounts: Accounts, form: bytes
) -> None:
    async with serving(accounts, api_server) as open_one:
        said = await exchange(open_one, b"POST /v1/chat/completions HTTP/1.1\r\n" + LAST + form)

    assert said.startswith(b"HTTP/1.1 200 ")
    assert b'"content":"hello"' in said


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_of_http_1_0_reads_to_the_end_of_the_connection(
    api_server: FakeNode, accounts: Accounts, is_streamed: bool
) -> None:
    body = json.dumps(BODY | {"stream": is_streamed}).encode()
    head = b"POST /v1/chat/completions HTTP/1.0\r\nhost: localhost\r\n"
    async with serving(accounts, api_server) as open_one:
        said = await exchange(open_one, head + b"content-length: %d\r\n\r\n%s" % (len(body), body))

    headers, _, rest = said.partition(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in headers.lower()
    assert rest.endswith(b"data: [DONE]\n\n") if is_streamed else json.loads(rest)["choices"]


async def test_a_client_may_ask_before_it_sends_a_body(
    api_server: FakeNode, accounts: Accounts
) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nexpect: 100-continue\r\n" + LAST
    async with serving(accounts, api_server) as open_one:
        reader, writer = await connect(open_one)
        writer.write(head + b"content-length: %d\r\n\r\n" % len(JSON))
        told = await reader.readuntil(b"\r\n\r\n")
        writer.write(JSON)
        said = await reader.read()
        writer.close()

    assert told.startswith(b"HTTP/1.1 100 ")
    assert said.startswith(b"HTTP/1.1 200 ")


async def test_a_body_that_is_too_large_is_refused_before_it_is_sent(
    api_server: FakeNode, accounts: Accounts
) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\n"
    async with serving(accounts, api_server) as open_one:
        reader, writer = await connect(open_one)
        writer.write(head + b"content-length: %d\r\n\r\n" % (REQUEST_BYTES + 1))
        said = await reader.readuntil(b"\r\n\r\n")
        writer.close()

    assert said.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/v1/models/builtin"])
async def test_head_is_answered_as_get_without_a_body(
    api_server: FakeNode, accounts: Accounts, path: str
) -> None:
    request = f"{{}} {path} HTTP/1.1\r\n".encode() + LAST + b"\r\n"
    async with serving(accounts, api_server) as open_one:
        whole = await exchange(open_one, request.replace(b"{}", b"GET"))
        head = await exchange(open_one, request.replace(b"{}", b"HEAD"))

    length = re.search(rb"content-length: \d+", whole)
    assert length
    assert head.startswith(b"HTTP/1.1 200 ")
    assert length[0] in head
    assert head.endswith(b"\r\n\r\n")


async def test_the_events_of_the_page_have_an_end_for_head(
    api_server: FakeNode, accounts: Accounts
) -> None:
    async with serving(accounts, api_server) as open_one:
        said = await exchange(open_one, b"HEAD /page/events HTTP/1.1\r\n" + LAST + b"\r\n")

    assert said.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nupgrade: h2c\r\n" + LAST + b"\r\n",
    ],
)
async def test_what_is_not_http_writes_no_log(
    api_server: FakeNode, accounts: Accounts, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    async with serving(accounts, api_server) as open_one:
        said = await exchange(open_one, sent)

    assert said.startswith(b"HTTP/1.1 ")
    assert caplog.records == []


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost/v1/models", "localhost", 200),
        ("HTTPS://LOCALHOST:7780/v1/models?limit=1", "localhost", 200),
        ("http://127.0.0.1/v1/models/%62uiltin", "localhost", 200),
        ("http://localhost", "localhost", 200),
        ("http://localhost?x=/", "localhost", 200),
        ("http://localhost/health", "page.example", 200),  # the Host is ignored
        ("http://page.example/v1/models", "localhost", 421),
        ("http://page.example:80/v1/models", "localhost", 421),
        ("http://localhost:x@page.example/v1/models", "localhost", 404),
        ("http://localhost/mesh/status", "localhost", 404),
        ("http:///v1/models", "localhost", 404),
        ("http:/v1/models", "localhost", 404),
        ("ftp://localhost/v1/models", "localhost", 404),
        ("/http://localhost/v1/models", "localhost", 404),
        ("localhost:80", "localhost", 404),
    ],
)
async def test_the_target_of_a_request_may_be_a_whole_url(
    api_server: FakeNode, accounts: Accounts, target: str, host: str, status: int
) -> None:
    lines = f"GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
    async with serving(accounts, api_server) as open_one:
        said = await exchange(open_one, lines.encode())

    assert said.startswith(f"HTTP/1.1 {status} ".encode())


async def test_a_page_is_refused_whatever_host_it_puts_before_the_path(
    api_server: FakeNode, accounts: Accounts
) -> None:
    head = b"GET http://localhost/v1/models HTTP/1.1\r\norigin: http://page.example\r\n"
    async with serving(accounts, api_server) as open_one:
        said = await exchange(open_one, head + b"host: page.example\r\nconnection: close\r\n\r\n")

    assert said.startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize(
    "sent", [b"GET /\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nx\r\n\r\n"]
)
async def test_what_is_not_http_is_refused_as_a_request_is(
    api_server: FakeNode, accounts: Accounts, sent: bytes
) -> None:
    async with serving(accounts, api_server) as open_one:
        said = await exchange(open_one, sent)

    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"\r\ncontent-type: application/json" in head.lower()
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    assert "HTTP" in error["message"]


async def test_a_malformed_rest_of_a_body_that_was_refused_closes_the_connection(
    api_server: FakeNode, accounts: Accounts, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST /v1/nothing HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    async with serving(accounts, api_server) as open_one:
        reader, writer = await connect(open_one)
        writer.write(head)
        said = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"no chunk\r\n")
        assert await closed(reader)
        writer.close()

    assert said.startswith(b"HTTP/1.1 404 ")
    assert caplog.records == []


@pytest.mark.parametrize(
    ("head", "has_body"),
    [
        ("POST /v1/models HTTP/1.1\r\nhost: localhost", True),
        ("POST /v1/models HTTP/1.1\r\nhost: page.example", True),
        ("HEAD /v1/models HTTP/1.1\r\nhost: localhost", False),
    ],
)
async def test_a_malformed_body_is_refused_although_its_request_is_answered_meanwhile(
    api_server: FakeNode,
    accounts: Accounts,
    caplog: pytest.LogCaptureFixture,
    head: str,
    *,
    has_body: bool,
) -> None:
    sent = f"{head}\r\ntransfer-encoding: chunked\r\n\r\nno chunk\r\n"
    async with serving(accounts, api_server) as open_one:
        said = await exchange(open_one, sent.encode())
        await asyncio.sleep(0)  # the task of the request ends

    start, _, body = said.partition(b"\r\n\r\n")
    assert start.startswith(b"HTTP/1.1 400 ")
    assert bool(body) is has_body
    assert caplog.records == []


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [("localhost", "page.example", 101), ("page.example", "localhost", 421)],
)
async def test_the_host_of_a_whole_url_counts_for_a_websocket_too(
    api_server: FakeNode, accounts: Accounts, target: str, host: str, status: int
) -> None:
    lines = (
        f"GET http://{target}{PATH} HTTP/1.1",
        *(f"Host: {host}", "upgrade: websocket", "connection: upgrade"),
        *("sec-websocket-version: 13", "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA=="),
        f"sec-websocket-protocol: {PROTOCOL}",
    )
    async with serving(accounts, api_server) as open_one:
        reader, writer = await connect(open_one)
        writer.write("\r\n".join((*lines, "", "")).encode())
        said = await reader.readline()
        writer.close()

    assert said.startswith(f"HTTP/1.1 {status} ".encode())


async def test_endless_headers_are_refused(api_server: FakeNode, accounts: Accounts) -> None:
    async with serving(accounts, api_server) as open_one:
        reader, writer = await connect(open_one)
        writer.write(b"GET / HTTP/1.1\r\nx: " + b"x" * (10 << 20))

        said = await reader.readline()
        writer.transport.abort()

    assert said.startswith(b"HTTP/1.1 400 ")


def _file(folder: Path, text: str) -> Path:
    path = folder / "keys"
    path.write_text(text, "utf-8")
    path.chmod(0o600)
    return path
