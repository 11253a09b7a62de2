import asyncio
import json
from collections.abc import AsyncIterator
from threading import Event

import httpx2
import pytest
from starlette.types import Message

from meshllm.api.access.accounts import Accounts, ApiKey, KeyLimits
from meshllm.api.access.gate import AccessPolicy
from meshllm.api.app import public_application
from meshllm.api.generation.service import Service
from meshllm.api.respond import SHORT_BYTES
from meshllm.api.v1 import counting
from meshllm.status import ModelStatus
from tests.builders.fake_node import FakeNode
from tests.processes.fleet import WAIT_S

PATH = "/v1/chat/completions"
BODY = {"model": "builtin", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def client(service: Service) -> AsyncIterator[httpx2.AsyncClient]:
    application = public_application(service, AccessPolicy(needs_key=True))
    transport = httpx2.ASGITransport(application)
    async with httpx2.AsyncClient(transport=transport, base_url="http://node") as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_a_key_has_so_many_requests_at_a_time(
    client: httpx2.AsyncClient, api_server: FakeNode, accounts: Accounts
) -> None:
    key = accounts.create("laptop", KeyLimits(concurrency=1), 0)
    api_server.waits_at = 1
    first = asyncio.ensure_future(client.post(PATH, json=BODY, headers=bearer(key)))
    await api_server.begun.wait()

    second = await client.post(PATH, json=BODY, headers=bearer(key))

    assert (second.status_code, second.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert second.headers["retry-after"] == "2"
    api_server.go.set()
    assert (await first).status_code == 200
    assert (await client.post(PATH, json=BODY, headers=bearer(key))).status_code == 200


async def test_a_request_counts_before_its_body_has_arrived(
    client: httpx2.AsyncClient, accounts: Accounts
) -> None:
    key = accounts.create("laptop", KeyLimits(concurrency=1), 0)
    begun, go = asyncio.Event(), asyncio.Event()

    async def slow_body() -> AsyncIterator[bytes]:
        begun.set()
        await go.wait()
        yield json.dumps(BODY).encode()

    first = asyncio.ensure_future(client.post(PATH, content=slow_body(), headers=bearer(key)))
    await begun.wait()

    second = await client.post(PATH, content=b"not even read", headers=bearer(key))

    assert (second.status_code, second.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    go.set()
    assert (await first).status_code == 200


async def test_a_request_that_was_let_in_is_not_refused_for_a_later_one(
    client: httpx2.AsyncClient,
    api_server: FakeNode,
    accounts: Accounts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = accounts.create("laptop", KeyLimits(concurrency=1), 0)
    begun, go, models = asyncio.Event(), asyncio.Event(), api_server.models

    async def slow_models() -> list[ModelStatus]:
        begun.set()
        await go.wait()
        return await models()

    monkeypatch.setattr(api_server, "models", slow_models)  # asked for behind the body
    first = asyncio.ensure_future(client.post(PATH, json=BODY, headers=bearer(key)))
    await begun.wait()

    second = asyncio.ensure_future(client.post(PATH, json=BODY, headers=bearer(key)))
    async with asyncio.timeout(WAIT_S):
        refused = await second
    go.set()

    assert ((await first).status_code, refused.status_code) == (200, 429)


@pytest.mark.parametrize(("connection", "read"), [("close", 3), ("keep-alive", 0)])
async def test_a_client_that_closes_reads_why_it_was_refused_behind_its_body(
    client: httpx2.AsyncClient, api_server: FakeNode, accounts: Accounts, connection: str, read: int
) -> None:
    key = accounts.create("laptop", KeyLimits(concurrency=1), 0)
    api_server.waits_at, sent = 1, 0
    first = asyncio.ensure_future(client.post(PATH, json=BODY, headers=bearer(key)))
    await api_server.begun.wait()

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(3):
            sent += 1
            yield b"x" * 1000

    headers = bearer(key) | {"connection": connection, "content-length": "3000"}
    refused = await client.post(PATH, content=body(), headers=headers)

    assert (refused.status_code, sent) == (429, read)
    api_server.go.set()
    assert (await first).status_code == 200


async def test_a_client_that_left_has_no_place_while_others_are_read(
    service: Service, accounts: Accounts
) -> None:
    application = public_application(service, AccessPolicy(needs_key=True))
    key = accounts.create("laptop", KeyLimits(), 0)
    begun, go, loop = asyncio.Event(), Event(), asyncio.get_running_loop()
    long = json.dumps(BODY | {"user": "x" * SHORT_BYTES}).encode()
    sent: list[Message] = [
        {"type": "http.request", "body": long, "more_body": False},
        {"type": "http.disconnect"},
    ]

    def convert(_: object) -> None:
        loop.call_soon_threadsafe(begun.set)
        go.wait()

    async def receive() -> Message:
        return sent.pop(0)

    async def send(message: Message) -> None:
        assert message.get("status", 400) == 400

    scope = {
        "type": "http",
        "method": "POST",
        "path": PATH,
        "headers": [(b"authorization", f"Bearer {key}".encode())],
        "scheme": "http",
        "query_string": b"",
    }
    other = asyncio.create_task(service.read(ApiKey("other", "", 0), long, convert))
    try:
        await begun.wait()
        async with asyncio.timeout(WAIT_S):
            await application(scope, receive, send)
    finally:
        go.set()
    await other

    assert sent == []


async def test_others_leave_places_to_the_owner(
    client: httpx2.AsyncClient,
    api_server: FakeNode,
    accounts: Accounts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(counting, "MAX_OTHERS", 1)
    guest = accounts.create("guest", KeyLimits(), 0)
    own = accounts.create("own", KeyLimits(), 0, is_owner=True)
    api_server.waits_at = 1
    first = asyncio.ensure_future(client.post(PATH, json=BODY, headers=bearer(guest)))
    await api_server.begun.wait()

    refused = await client.get("/v1/models", headers=bearer(guest))
    listed = await client.get("/v1/models", headers=bearer(own))
    api_server.go.set()

    assert (refused.status_code, listed.status_code) == (503, 200)
    assert "too many requests in progress" in refused.json()["error"]["message"]
    assert (await first).status_code == 200
    assert (await client.get("/v1/models", headers=bearer(guest))).status_code == 200
