"""Chats over a WebSocket, at a real API server with the client of `websockets`."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
from starlette.types import Message
from starlette.websockets import WebSocket
from websockets.asyncio import client
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus

from meshllm import strict_json
from meshllm.api import connection
from meshllm.api.access.accounts import Accounts, KeyLimits
from meshllm.api.access.gate import KEY_PROTOCOL
from meshllm.api.generation.service import Service
from meshllm.api.respond import SHORT_BYTES
from meshllm.api.tcp import ApiServerOptions, open_api_server
from meshllm.api.v1 import chat_socket
from meshllm.api.v1.chat_socket import MAX_CHATS, MAX_ID_CHARS, PATH, PROTOCOL
from meshllm.node.requests import held_bytes
from meshllm.node.requests.request_json import REQUEST_BYTES
from meshllm.request import Logprob, Piece, TokenLogprobs, ToolCallDelta
from tests.builders.fake_node import FakeNode
from tests.builders.fake_ring import answer_of
from tests.builders.waiting import timers_fired

pytestmark = pytest.mark.socket

BODY = {"model": "builtin", "messages": [{"role": "user", "content": "Hi"}], "seed": 7}

connect = partial(client.connect, open_timeout=None, ping_interval=None)


@pytest.fixture
def accounts(tmp_path: Path) -> Iterator[Accounts]:
    with Accounts.open(tmp_path / "accounts") as accounts:
        yield accounts


@asynccontextmanager
async def serving(
    node: FakeNode, accounts: Accounts, *, needs_key: bool = False
) -> AsyncIterator[str]:
    """Serve a node on TCP; yield the address of its WebSocket."""
    options = ApiServerOptions("127.0.0.1", 0, require_key=needs_key)
    with open_api_server(options, accounts) as opened:
        task = asyncio.ensure_future(opened.serve(node))
        try:
            yield f"ws{opened.url.removeprefix('http').removesuffix('/v1')}{PATH}"
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@pytest.fixture
async def address(api_server: FakeNode, accounts: Accounts) -> AsyncIterator[str]:
    async with serving(api_server, accounts) as address, asyncio.timeout(60):
        yield address


@pytest.fixture
async def socket(address: str) -> AsyncIterator[ClientConnection]:
    async with connect(address) as socket:
        yield socket


async def send(socket: ClientConnection, **message: Any) -> None:
    await socket.send(json.dumps(message))


async def ask(socket: ClientConnection, ask: str = "a", **fields: Any) -> None:
    await send(socket, type="ask", id=ask, request={**BODY, **fields})


async def received(socket: ClientConnection) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await socket.recv())
    return found


async def until_end(socket: ClientConnection) -> list[dict[str, Any]]:
    """Return the messages up to the end of one ask."""
    found = [await received(socket)]
    while found[-1]["type"] in ("progress", "piece"):
        found.append(await received(socket))
    return found


async def until_closed(socket: ClientConnection) -> list[str | bytes]:
    found: list[str | bytes] = []
    with suppress(ConnectionClosed):
        while True:
            found.append(await socket.recv())
    return found


async def test_an_answer_comes_in_pieces(socket: ClientConnection, api_server: FakeNode) -> None:
    await ask(socket, temperature=0.5)

    progress, *pieces, done = await until_end(socket)

    assert progress == {"type": "progress", "id": "a", "done": 2, "total": 2}
    assert [each["text"] for each in pieces] == ["hello", " w\u2028rld"]
    assert {each["id"] for each in (*pieces, done)} == {"a"}
    assert (done["type"], done["finish_reason"], done["seed"]) == ("done", "stop", 7)
    assert done["usage"]["completion_tokens"] == 5
    assert (done["model"], done["system_fingerprint"]) == ("builtin", "fp_0123456789ab")
    assert api_server.requests[0].sampling.temperature == 0.5


async def test_what_a_piece_has_beside_its_text_is_sent(
    socket: ClientConnection, api_server: FakeNode
) -> None:
    yes = Logprob(1, "yes", tuple(b"yes"), -0.5)
    calls = (ToolCallDelta(0, "look", "{}"),)
    api_server.said = (
        Piece("", reasoning="because"),
        Piece("yes", logprobs=(TokenLogprobs(yes, (yes,)),)),
        Piece("", calls=calls),
        Piece(""),
        answer_of("yes", 3),
    )
    await ask(socket, logprobs=True)

    _, thought, scored, called, _ = await until_end(socket)

    assert (thought["reasoning"], thought["text"]) == ("because", "")
    assert scored["logprobs"][0]["token"] == "yes"
    assert called["tool_calls"][0]["function"]["name"] == "look"


async def test_asks_follow_each_other_on_one_connection(
    socket: ClientConnection, api_server: FakeNode, accounts: Accounts
) -> None:
    for name in ("a", "b", "a"):
        await ask(socket, name)
        assert {each["id"] for each in await until_end(socket)} == {name}

    assert [used.requests for _, used in accounts.usage("model")] == [3]


async def test_an_ask_has_ended_when_its_end_is_told(
    socket: ClientConnection, accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, begun, go = Accounts.record, asyncio.Event(), threading.Event()
    begin = partial(asyncio.get_running_loop().call_soon_threadsafe, begun.set)

    def slow(*arguments: Any) -> None:
        begin()
        go.wait()
        record(*arguments)

    monkeypatch.setattr(Accounts, "record", slow)
    await ask(socket)
    telling = asyncio.ensure_future(until_end(socket))
    try:
        await begun.wait()
        await (await socket.ping())  # what was sent before has been read
        await timers_fired()
        assert not telling.done()
    finally:
        go.set()
    end = (await telling)[-1]

    assert end["type"] == "done"
    assert [used.requests for _, used in accounts.usage("model")] == [1]


async def test_asks_run_side_by_side(socket: ClientConnection, api_server: FakeNode) -> None:
    api_server.waits_at = 3
    await ask(socket, "a")
    await ask(socket, "b")

    ids = {(await received(socket))["id"] for _ in range(6)}
    api_server.go.set()
    ends = [await received(socket), await received(socket)]

    assert ids == {"a", "b"}
    assert sorted((each["id"], each["type"]) for each in ends) == [("a", "done"), ("b", "done")]


@pytest.mark.parametrize("waits_at", [0, 1, 2, 3])
async def test_a_cancelled_ask_ends_on_the_node(
    socket: ClientConnection, api_server: FakeNode, waits_at: int
) -> None:
    api_server.waits_at = waits_at
    await ask(socket)
    await api_server.begun.wait()

    await send(socket, type="cancel", id="a")
    end = (await until_end(socket))[-1]

    assert end == {"type": "cancelled", "id": "a"}
    assert api_server.closed.is_set()
    api_server.waits_at = None
    await ask(socket)
    assert (await until_end(socket))[-1]["type"] == "done"


async def test_a_cancel_that_comes_too_late_changes_nothing(socket: ClientConnection) -> None:
    await ask(socket)
    await until_end(socket)
    await send(socket, type="cancel", id="a")

    await ask(socket, "b")

    assert {each["id"] for each in await until_end(socket)} == {"b"}


@pytest.mark.parametrize("is_abrupt", [False, True])
@pytest.mark.parametrize("waits_at", [0, 1, 2, 3])
async def test_a_client_that_leaves_cancels_in_any_phase(
    address: str, api_server: FakeNode, waits_at: int, is_abrupt: bool
) -> None:
    api_server.waits_at = waits_at
    async with connect(address) as socket:
        await ask(socket)
        await api_server.begun.wait()
        if is_abrupt:
            socket.transport.abort()

    await api_server.closed.wait()


@pytest.mark.parametrize(
    "message",
    [
        b"{}",
        "",
        "hi",
        "[]",
        "{}",
        '{"type": "shout", "id": "a"}',
        '{"type": ["ask"], "id": "a"}',
        '{"type": "ask", "id": "a"}',
        '{"type": "ask", "id": "a", "request": []}',
        '{"type": "ask", "id": "", "request": {}}',
        '{"type": "cancel", "id": 1}',
        '{"type": "cancel", "id": "%s"}' % ("x" * (MAX_ID_CHARS + 1)),
        '{"type": "cancel", "id": "a", "more": 1}',
        '{"type": "ask", "id": "\\ud800", "request": {}}',
        '{"a":' * 10_000,
    ],
    ids=range(15),
)
async def test_what_is_not_a_message_ends_the_connection(
    socket: ClientConnection, api_server: FakeNode, message: str | bytes
) -> None:
    await socket.send(message)

    error = await received(socket)
    await socket.wait_closed()

    assert (error["type"], error["id"]) == ("error", None)
    assert error["error"]["type"] == "invalid_request_error"
    assert socket.close_code == 1008
    assert api_server.requests == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"model": "gpt"}, "model"),
        ({"planet": "mars"}, "planet"),
        ({"messages": []}, "messages"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
async def test_an_invalid_request_is_refused_by_name(
    socket: ClientConnection, api_server: FakeNode, fields: dict[str, Any], param: str
) -> None:
    await ask(socket, **fields)
    (error,) = await until_end(socket)

    assert (error["type"], error["id"], error["error"]["param"]) == ("error", "a", param)
    assert api_server.requests == []
    await ask(socket)
    assert (await until_end(socket))[-1]["type"] == "done"


async def test_an_error_of_the_mesh_ends_the_ask_only(
    socket: ClientConnection, api_server: FakeNode
) -> None:
    api_server.fails_at = 2
    await ask(socket)

    *_, error = await until_end(socket)

    assert (error["error"]["message"], error["retry_after_s"]) == ("It broke; mend it", None)
    api_server.fails_at = None
    await ask(socket)
    assert (await until_end(socket))[-1]["type"] == "done"


async def test_a_long_message_is_read_off_the_loop(
    socket: ClientConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[int]()

    def parse(data: bytes) -> object:
        threads.append(get_ident())
        return strict_json.parse(data)

    monkeypatch.setattr("meshllm.api.respond.parse", parse)

    await ask(socket, messages=[{"role": "user", "content": "x" * SHORT_BYTES}])
    end = (await until_end(socket))[-1]

    assert end["type"] == "done"
    assert len(threads) == 1
    assert threads != [get_ident()]


async def test_asks_in_progress_are_bounded(socket: ClientConnection, api_server: FakeNode) -> None:
    api_server.waits_at = 0
    for place in range(MAX_CHATS):
        await ask(socket, str(place))
    await ask(socket, "0")
    await ask(socket, "more")

    repeated, many = [await received(socket), await received(socket)]

    assert (repeated["id"], "in progress" in repeated["error"]["message"]) == ("0", True)
    assert (many["id"], many["error"]["code"]) == ("more", "rate_limit_exceeded")
    assert many["retry_after_s"] > 0
    assert len(api_server.requests) == MAX_CHATS


async def test_a_message_that_is_too_long_ends_the_connection(
    socket: ClientConnection, api_server: FakeNode
) -> None:
    with suppress(ConnectionClosed):
        await socket.send(" " * (REQUEST_BYTES + 1))

    await socket.wait_closed()

    assert socket.close_code == 1009
    assert api_server.requests == []


async def test_an_invalid_message_ends_the_answers_in_progress(
    socket: ClientConnection, api_server: FakeNode
) -> None:
    api_server.said = (*(Piece("x") for _ in range(10_000)), answer_of("x", 1))
    await ask(socket)
    await api_server.begun.wait()

    await socket.send("what?")
    *_, last = await until_closed(socket)

    assert json.loads(last)["type"] == "error"
    assert (socket.close_code, api_server.closed.is_set()) == (1008, True)


async def test_a_key_is_needed_where_the_api_needs_one(
    api_server: FakeNode, accounts: Accounts
) -> None:
    key = accounts.create("laptop", KeyLimits(), 0)
    async with serving(api_server, accounts, needs_key=True) as address, asyncio.timeout(60):
        for wrong in ({}, {"authorization": "Bearer nope"}):
            with pytest.raises(InvalidStatus) as refused:
                await connect(address, additional_headers=wrong)
            assert refused.value.response.status_code == 401
        for name, value in (("authorization", f"Bearer {key}"), ("x-api-key", key)):
            async with connect(address, additional_headers={name: value}) as socket:
                await ask(socket)
                assert (await until_end(socket))[-1]["type"] == "done"
        offered = [PROTOCOL, KEY_PROTOCOL + key]
        async with connect(address, subprotocols=offered) as socket:  # type: ignore[arg-type]
            assert socket.subprotocol == PROTOCOL
            await ask(socket)
            assert (await until_end(socket))[-1]["type"] == "done"

    assert [(name, used.requests) for name, used in accounts.usage("key")] == [("laptop", 3)]


async def test_a_revoked_key_ends_with_its_next_ask(
    api_server: FakeNode, accounts: Accounts
) -> None:
    key = accounts.create("guest", KeyLimits(), 0)
    async with (
        serving(api_server, accounts) as address,
        asyncio.timeout(60),
        connect(address, additional_headers={"authorization": f"Bearer {key}"}) as socket,
    ):
        await ask(socket)
        assert (await until_end(socket))[-1]["type"] == "done"
        accounts.revoke("guest", 1)
        await ask(socket)
        (error,) = await until_end(socket)

    assert error["error"]["code"] == "invalid_api_key"
    assert "revoked" in error["error"]["message"]
    assert len(api_server.requests) == 1


async def test_the_limits_of_a_key_apply(api_server: FakeNode, accounts: Accounts) -> None:
    api_server.waits_at = 0
    limits = KeyLimits(concurrency=1, deadline_s=3600, max_reasoning=9)
    key = accounts.create("guest", limits, 0)
    headers = {"authorization": f"Bearer {key}"}
    async with (
        serving(api_server, accounts) as address,
        asyncio.timeout(60),
        connect(address, additional_headers=headers) as socket,
    ):
        await ask(socket, "a")
        await api_server.begun.wait()
        await ask(socket, "b")
        (error,) = await until_end(socket)

    assert (error["id"], error["error"]["code"]) == ("b", "rate_limit_exceeded")
    (asked,) = api_server.requests
    assert (asked.deadline_ms, asked.max_reasoning) == (3_600_000, 9)


async def test_a_long_message_that_cannot_wait_is_refused_alone(
    api_server: FakeNode, accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_bytes, "MAX_HELD_BYTES", SHORT_BYTES)
    async with (
        serving(api_server, accounts) as address,
        asyncio.timeout(60),
        connect(address) as socket,
    ):
        await ask(socket, "a", user="x" * SHORT_BYTES)
        error = await received(socket)
        await ask(socket, "b")
        *_, done = await until_end(socket)

    assert (error["id"], error["error"]["code"]) == (None, "rate_limit_exceeded")
    assert (done["id"], done["type"]) == ("b", "done")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "evil.example"}, 421),
    ],
)
async def test_a_web_page_of_another_site_cannot_connect(
    address: str, api_server: FakeNode, headers: dict[str, str], status: int
) -> None:
    where = address.removeprefix("ws://").partition("/")[0]
    sent = {"host": where, **headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
    head = (
        f"GET {PATH} HTTP/1.1\r\n{lines}connection: Upgrade\r\nupgrade: websocket\r\n"
        "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    host, _, port = where.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode())

    reply = await reader.read()

    writer.close()
    await writer.wait_closed()
    assert reply.startswith(f"HTTP/1.1 {status} ".encode())


async def test_the_page_of_this_server_can_connect(address: str) -> None:
    own = f"http://{address.removeprefix('ws://').partition('/')[0]}"
    async with connect(address, additional_headers={"origin": own}) as socket:
        await ask(socket)
        assert (await until_end(socket))[-1]["type"] == "done"


async def test_connections_are_bounded(
    api_server: FakeNode, accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_socket, "MAX_SOCKETS", 1)
    async with serving(api_server, accounts) as address, asyncio.timeout(60), connect(address):
        with pytest.raises(InvalidStatus) as refused:
            await connect(address)

    assert refused.value.response.status_code == 503
    assert refused.value.response.headers["retry-after"] == "2"


async def test_a_key_cannot_take_the_connections_of_others(
    api_server: FakeNode, accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_socket, "MAX_OF_KEY", 1)
    keys = [accounts.create(name, KeyLimits(), 0) for name in "ab"]
    headers = [{"authorization": f"Bearer {key}"} for key in keys]
    async with (
        serving(api_server, accounts, needs_key=True) as address,
        asyncio.timeout(60),
        connect(address, additional_headers=headers[0]),
    ):
        with pytest.raises(InvalidStatus):
            await connect(address, additional_headers=headers[0])
        async with connect(address, additional_headers=headers[1]) as other:
            await ask(other)
            assert (await until_end(other))[-1]["type"] == "done"


@pytest.mark.parametrize("fails_at", [None, 0], ids=["pieces", "errors"])
async def test_answers_to_a_client_that_left_end_quietly(
    api_server: FakeNode, fails_at: int | None
) -> None:
    """Two answers find at the same time that the client has left."""
    queue, has_left = asyncio.Queue[Message](), False

    async def sent(_: Message) -> None:
        if has_left:
            raise OSError

    socket = WebSocket({"type": "websocket", "headers": []}, queue.get, sent)
    queue.put_nowait({"type": "websocket.connect"})
    await socket.accept()
    api_server.waits_at, api_server.fails_at = 0, fails_at
    for name in "ab":
        text = json.dumps({"type": "ask", "id": name, "request": BODY})
        queue.put_nowait({"type": "websocket.receive", "text": text})
    running = asyncio.ensure_future(chat_socket._ChatSocket(Service(api_server), socket).run())
    await api_server.begun.wait()
    await timers_fired()
    has_left = True
    api_server.go.set()
    await timers_fired()
    queue.put_nowait({"type": "websocket.disconnect", "code": 1006})
    await running

    assert len(api_server.requests) == 2


async def test_a_client_that_does_not_read_is_dropped(
    api_server: FakeNode, accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "STALL_S", 0.05)
    api_server.said = (*(Piece("x" * (1 << 20)) for _ in range(64)), answer_of("x", 1))
    async with (
        serving(api_server, accounts) as address,
        asyncio.timeout(60),
        connect(address, max_queue=1, max_size=None) as socket,
    ):
        await ask(socket)
        await api_server.closed.wait()
        read = await until_closed(socket)

    assert len(read) < 64


@asynccontextmanager
async def answered_after(
    seconds: float,
    api_server: FakeNode,
    accounts: Accounts,
    monkeypatch: pytest.MonkeyPatch,
    advance: Callable[[float], None],
) -> AsyncIterator[ClientConnection]:
    """Open a connection that may be idle for an hour, and whose first answer takes some time."""
    monkeypatch.setattr(chat_socket, "IDLE_S", 3600.0)
    api_server.waits_at = 1
    async with serving(api_server, accounts) as address, connect(address) as socket:
        await ask(socket)
        await api_server.begun.wait()
        advance(seconds)
        asyncio.get_running_loop().call_later(0, api_server.go.set)
        assert (await until_end(socket))[-1]["type"] == "done"
        yield socket


async def test_an_idle_connection_ends(
    api_server: FakeNode,
    accounts: Accounts,
    monkeypatch: pytest.MonkeyPatch,
    advance: Callable[[float], None],
) -> None:
    async with answered_after(3600, api_server, accounts, monkeypatch, advance) as socket:
        advance(1800)
        await timers_fired()
        await ask(socket)
        assert (await until_end(socket))[-1]["type"] == "done"
        advance(3600)
        await socket.wait_closed()

    assert socket.close_code == 1001


async def test_a_connection_is_idle_since_its_last_answer(
    api_server: FakeNode,
    accounts: Accounts,
    monkeypatch: pytest.MonkeyPatch,
    advance: Callable[[float], None],
) -> None:
    async with answered_after(3500, api_server, accounts, monkeypatch, advance) as socket:
        advance(200)
        await timers_fired()
        await ask(socket)
        assert (await until_end(socket))[-1]["type"] == "done"


async def test_the_headers_of_the_upgrade_have_arrived(
    api_server: FakeNode, accounts: Accounts, advance: Callable[[float], None]
) -> None:
    async with serving(api_server, accounts) as address, connect(address) as socket:
        advance(connection.HEADERS_S)
        await timers_fired()
        await ask(socket)

        assert (await until_end(socket))[-1]["type"] == "done"


async def test_a_stopping_server_cancels_and_closes(
    api_server: FakeNode, accounts: Accounts
) -> None:
    api_server.waits_at = 1
    async with asyncio.timeout(60):
        async with serving(api_server, accounts) as address:
            socket = await connect(address)
            await ask(socket)
            await api_server.begun.wait()
        await socket.wait_closed()

    assert api_server.closed.is_set()
