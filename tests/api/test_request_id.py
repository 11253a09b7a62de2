"""Every response names its request, and pipelined requests keep their own ids."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx2
import pytest

from meshllm.api.access.accounts import Accounts
from meshllm.api.access.gate import AccessPolicy
from meshllm.api.app import public_application
from meshllm.api.generation.service import Service
from meshllm.api.owner import owner_views
from meshllm.api.serve import serve
from meshllm.errors import Busy, ContextTooLong, LinkLost, MeshError
from tests.builders.fake_node import FakeNode
from tests.builders.waiting import until

TURNS = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": TURNS, "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
    "/v1/embeddings": {"input": "hi"},
}
MINE = {"x-request-id": "trace 7/a"}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("error", "status"),
    [(ContextTooLong, 400), (Busy, 429), (LinkLost, 503), (MeshError, 500), (KeyError, 500)],
)
async def test_an_error_has_the_id_of_its_client(
    client: httpx2.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    error: type[Exception],
    status: int,
) -> None:
    async def models(_: FakeNode) -> list[object]:
        raise error("x")

    monkeypatch.setattr(FakeNode, "models", models)

    said = await client.post(path, json={"model": "builtin", **BODIES[path]}, headers=MINE)

    assert said.status_code == status
    assert said.headers.get_list("x-request-id") == ["trace 7/a"]
    assert said.headers.get_list("request-id") == ["trace 7/a"]
    if path == "/v1/messages":
        assert said.json()["request_id"] == "trace 7/a"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models", 200),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/responses", 400),
        ("GET", "/v1/responses/resp_x", 404),
        ("GET", "/", 200),
        ("GET", "/mesh/status", 200),
        ("POST", "/mesh/ask", 400),
        ("GET", "/metrics", 200),
    ],
)
async def test_each_response_has_a_new_id(
    client: httpx2.AsyncClient, method: str, path: str, status: int
) -> None:
    said = [await client.request(method, path) for _ in range(2)]
    ids = [each.headers["x-request-id"] for each in said]

    assert [each.status_code for each in said] == [status, status]
    assert ids[0] != ids[1]
    assert all(each.startswith("req_") and len(each) == 36 for each in ids)


@pytest.mark.parametrize("path", ["/v1/models", "/owner/keys", "/owner/none"])
async def test_a_refused_key_has_an_id(tmp_path: Path, path: str) -> None:
    policy = AccessPolicy(needs_key=True)
    with Accounts.open(tmp_path / "state") as accounts:
        owner = owner_views(FakeNode(), accounts, policy)
        app = public_application(Service(FakeNode(), accounts), policy, owner)
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            said = await client.get(path, headers=MINE)

    assert (said.status_code, said.headers["x-request-id"]) == (401, "trace 7/a")


async def test_pages_of_allowed_origins_may_read_the_id() -> None:
    policy = AccessPolicy(origins=("https://a.example",))
    transport = httpx2.ASGITransport(public_application(Service(FakeNode()), policy))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        refused = await client.get("/", headers={**MINE, "origin": "https://b.example"})
        said = await client.get("/v1/models", headers={"origin": "https://a.example"})

    assert (refused.status_code, refused.headers["x-request-id"]) == (403, "trace 7/a")
    exposed = said.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "request-id"} <= set(exposed)


@pytest.mark.parametrize("sent", [b"a" * 129, b"", "né".encode(), b"a\tb", b"a\x7fb"])
async def test_an_invalid_id_is_replaced(client: httpx2.AsyncClient, sent: bytes) -> None:
    said = await client.get("/v1/models", headers={b"x-request-id": sent})

    assert said.headers["x-request-id"].startswith("req_")


async def test_the_longest_id_is_kept(client: httpx2.AsyncClient) -> None:
    said = await client.get("/v1/models", headers={"x-request-id": "~" * 128})

    assert said.headers["x-request-id"] == "~" * 128


@pytest.mark.parametrize("path", ["/v1/models", "/mesh/models"])
async def test_the_log_names_the_request_that_met_a_bug(
    client: httpx2.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str,
) -> None:
    async def models(_: FakeNode) -> list[object]:
        raise KeyError("canary")

    monkeypatch.setattr(FakeNode, "models", models)
    with caplog.at_level(logging.ERROR, "meshllm"):
        said = await client.get(path)

    assert f"request {said.headers['x-request-id']}: KeyError" in caplog.messages
    assert "canary" not in caplog.text


@pytest.mark.socket
async def test_pipelined_requests_keep_their_own_ids(tmp_path: Path) -> None:
    path = tmp_path / "state" / "s"
    serving = asyncio.ensure_future(serve(FakeNode(), path))
    try:
        await until(path.exists)
        reader, writer = await asyncio.open_unix_connection(path)
        asks = [f"GET /v1/none HTTP/1.1\r\nhost: a\r\nx-request-id: {i}\r\n" for i in "ab"]
        writer.write(f"{asks[0]}\r\n{asks[1]}connection: close\r\n\r\n".encode())
        said = (await reader.read(-1)).decode()
        writer.close()
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    lines = [each for each in said.split("\r\n") if each.startswith("x-request-id")]
    assert lines == ["x-request-id: a", "x-request-id: b"]
