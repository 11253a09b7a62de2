import asyncio
import gc
import json
import os
import signal
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from meshllm.api.serve import HEADER_BYTES, serve
from meshllm.api.unix import is_answered
from meshllm.errors import UserError
from meshllm.request import Piece
from meshllm.status import Change, from_json, to_json
from tests.builders.fake_node import CHANGE, FakeNode
from tests.builders.waiting import until

pytestmark = pytest.mark.socket

ASK = ("/mesh/ask", {"raw": "hi"})
CHAT = ("/v1/chat/completions", {"model": "builtin", "messages": [{"role": "user", "content": ""}]})
STREAM = (CHAT[0], CHAT[1] | {"stream": True})


@asynccontextmanager
async def serving(api_server: FakeNode, path: Path) -> AsyncIterator[asyncio.Task[None]]:
    """Serve a node, and check that it stops."""
    task = asyncio.ensure_future(serve(api_server, path))
    await until(lambda: is_answered(path))
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def client_of(path: Path) -> httpx2.AsyncClient:
    transport = httpx2.AsyncHTTPTransport(uds=str(path))
    return httpx2.AsyncClient(transport=transport, base_url="http://node", timeout=60)


def _mode(path: Path) -> int | None:
    return stat.S_IMODE(path.stat().st_mode) if path.exists() else None


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "api.sock"


@pytest.fixture
async def server(api_server: FakeNode, path: Path) -> AsyncIterator[asyncio.Task[None]]:
    async with serving(api_server, path) as task:
        yield task


async def test_it_answers_on_a_private_socket(
    api_server: FakeNode, path: Path, server: asyncio.Task[None]
) -> None:
    async with client_of(path) as client:
        said = await client.get("/mesh/status")

    assert said.json() == {"schema": 1} | to_json(api_server.report())
    assert "server" not in said.headers
    assert _mode(path) == 0o600


async def test_a_second_node_is_refused_without_affecting_the_first(
    path: Path, server: asyncio.Task[None]
) -> None:
    with pytest.raises(UserError, match="A node is already running"):
        await serve(FakeNode(), path)

    assert is_answered(path)


@pytest.mark.parametrize(("where", "body"), [ASK, CHAT, STREAM])
@pytest.mark.parametrize("waits_at", [0, 1, 2])
async def test_a_disconnect_cancels_the_generation(
    api_server: FakeNode, path: Path, where: str, body: dict[str, object], waits_at: int
) -> None:
    api_server.waits_at = waits_at
    async with serving(api_server, path), asyncio.timeout(60):
        async with client_of(path) as client:
            asking = asyncio.ensure_future(client.post(where, json=body))
            await api_server.begun.wait()
            asking.cancel()

        await api_server.closed.wait()


async def test_a_disconnect_without_reading_cancels_too(
    api_server: FakeNode, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_waiting, pause = asyncio.Event(), FlowControl.pause_writing

    def paused(flow: FlowControl) -> None:
        pause(flow)
        is_waiting.set()

    monkeypatch.setattr(FlowControl, "pause_writing", paused)
    monkeypatch.setattr("tests.builders.fake_node.Piece", lambda _: Piece("x" * (8 << 20)))
    body = b'{"raw":"hi"}'
    async with serving(api_server, path), asyncio.timeout(60):
        _, writer = await asyncio.open_unix_connection(path)
        head = f"POST /mesh/ask HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await is_waiting.wait()  # for the client to read
        assert not api_server.closed.is_set()
        writer.transport.abort()

        await api_server.closed.wait()


async def test_a_disconnect_before_the_request_is_not_a_bug(
    api_server: FakeNode,
    path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_reading, is_over = asyncio.Event(), asyncio.Event()
    receive, run = RequestResponseCycle.receive, RequestResponseCycle.run_asgi

    async def received(cycle: RequestResponseCycle) -> Any:
        is_reading.set()
        return await receive(cycle)

    async def ran(cycle: RequestResponseCycle, application: Any) -> None:
        await run(cycle, application)
        is_over.set()

    monkeypatch.setattr(RequestResponseCycle, "receive", received)
    monkeypatch.setattr(RequestResponseCycle, "run_asgi", ran)
    async with serving(api_server, path), asyncio.timeout(60):
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(b"POST /mesh/ask HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        await is_reading.wait()
        assert not is_over.is_set()  # the server waits for the rest
        writer.transport.abort()
        await is_over.wait()

    assert (api_server.requests, caplog.records) == ([], [])


async def test_a_disconnect_closes_the_events(
    api_server: FakeNode, path: Path, server: asyncio.Task[None]
) -> None:
    async with asyncio.timeout(60):
        async with client_of(path) as client, client.stream("GET", "/mesh/events") as said:
            lines = said.aiter_lines()
            first = json.loads(await anext(lines))

        await api_server.closed.wait()
    assert from_json(Change, first) == CHANGE


async def test_a_stopping_node_closes_connections_and_leaves_nothing(
    api_server: FakeNode, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    api_server.waits_at = 2
    async with asyncio.timeout(60):
        async with serving(api_server, path):
            asking = asyncio.ensure_future(_fetch(path))
            await api_server.begun.wait()
            assert not asking.done()

        with pytest.raises(httpx2.RemoteProtocolError):
            await asking
    assert api_server.closed.is_set()
    assert _mode(path) is None
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def _fetch(path: Path) -> httpx2.Response:
    async with client_of(path) as client:
        return await client.post(ASK[0], json=ASK[1])


async def test_signals_stay_with_the_node(path: Path, server: asyncio.Task[None]) -> None:
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]

    assert all("uvicorn" not in repr(each) for each in handlers)


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\nx: " + b"x" * (2 * HEADER_BYTES), b"no request\r\n\r\n"],
    ids=["endless headers", "no request"],
)
async def test_what_is_not_http_is_refused_as_a_request_is(
    path: Path, server: asyncio.Task[None], sent: bytes
) -> None:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(sent)

    head, _, body = (await reader.read()).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


@pytest.mark.parametrize("turns", range(5))
async def test_accepted_connections_are_closed_whenever_it_stops(
    api_server: FakeNode, path: Path, turns: int
) -> None:
    task = asyncio.ensure_future(serve(api_server, path))
    while not is_answered(path):  # noqa: ASYNC110  # one turn of the loop at a time
        await asyncio.sleep(0)
    with socket.socket(socket.AF_UNIX) as visitor:
        visitor.setblocking(False)
        visitor.connect(os.fsencode(path))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

        with suppress(ConnectionResetError):
            assert visitor.recv(1) == b""
    gc.collect()  # a leaked connection is reported here


async def test_it_can_be_stopped_before_it_has_started(api_server: FakeNode, path: Path) -> None:
    task = asyncio.ensure_future(serve(api_server, path))
    await asyncio.sleep(0)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert _mode(path) is None
