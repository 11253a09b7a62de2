from collections.abc import AsyncIterator, Iterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from meshllm.api.access.accounts import Accounts, KeyLimits, tag_of
from meshllm.api.access.gate import AccessPolicy
from meshllm.api.app import public_application
from meshllm.api.generation.service import Service
from tests.builders.fake_node import FakeNode

MODELS = "/v1/models"
OPEN = AccessPolicy()
SHUT = AccessPolicy(needs_key=True, file_keys=("0123456789abcdef", "fedcba9876543210"))


@asynccontextmanager
async def entering(
    policy: AccessPolicy, accounts: Accounts, host: str = "localhost:7780"
) -> AsyncIterator[httpx2.AsyncClient]:
    application = public_application(Service(FakeNode(), accounts), policy)
    transport = httpx2.ASGITransport(application)
    async with httpx2.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:7780", 200),
        ("127.0.0.1", 200),
        ("[::1]:7780", 200),
        ("LOCALHOST", 200),
        ("evil.example", 421),
        ("localhost.evil.example:7780", 421),
        ("127.0.0.1.nip.example", 421),
    ],
)
async def test_without_a_key_only_names_of_this_machine_are_served(
    accounts: Accounts, host: str, status: int
) -> None:
    async with entering(OPEN, accounts, host) as client:
        said = await client.get(MODELS)

    assert said.status_code == status
    assert status == 200 or said.json()["error"]["code"] == "unknown_host"


@pytest.mark.parametrize("host", ["", "[", "user@evil.example", "localhost@evil.example"])
async def test_a_malformed_host_is_refused(accounts: Accounts, host: str) -> None:
    async with entering(OPEN, accounts) as client:
        said = await client.get(MODELS, headers={"host": host})

    assert said.status_code == 421


async def test_with_a_key_any_host_is_served(accounts: Accounts) -> None:
    async with entering(SHUT, accounts, "mesh.example") as client:
        said = await client.get(MODELS, headers=bearer(SHUT.file_keys[1]))

    assert said.status_code == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:7780", 200),
        ("https://chat.example", 200),
        ("https://localhost:7780", 403),
        ("http://localhost:1", 403),
        ("https://chat.example.evil.example", 403),
        ("null", 403),
        ("", 403),
    ],
)
async def test_only_named_origins_may_use_the_api(
    accounts: Accounts, origin: str, status: int
) -> None:
    policy = AccessPolicy(origins=("https://chat.example",))
    async with entering(policy, accounts) as client:
        said = await client.get(MODELS, headers={"origin": origin})

    assert said.status_code == status
    allowed = said.headers.get("access-control-allow-origin")
    assert allowed == (origin if origin == "https://chat.example" else None)


@pytest.mark.parametrize(("scheme", "origin"), [("ws", "http"), ("wss", "https")])
@pytest.mark.parametrize("is_own", [True, False])
async def test_a_websocket_has_the_origin_of_its_page(
    accounts: Accounts, scheme: str, origin: str, is_own: bool
) -> None:
    page = f"{origin}://localhost:7780" if is_own else f"{origin}://evil.example"
    sent = await handshake(accounts, scheme, [(b"origin", page.encode())])

    assert (sent[0]["type"] == "websocket.accept") is is_own
    assert b"x-request-id" in [name for name, _ in sent[0]["headers"]]
    assert is_own or sent[0] == sent[0] | {"type": "websocket.http.response.start", "status": 403}


async def handshake(
    accounts: Accounts, scheme: str, headers: list[tuple[bytes, bytes]]
) -> list[dict[str, Any]]:
    """Return what a WebSocket that is closed at once is sent."""
    sent: list[dict[str, Any]] = []
    messages: Iterator[dict[str, object]] = iter(
        [{"type": "websocket.connect"}, {"type": "websocket.disconnect", "code": 1005}]
    )

    async def receive() -> dict[str, object]:
        return next(messages)

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(dict(message))

    scope = {
        "type": "websocket", "path": "/v1/chat/socket", "scheme": scheme, "query_string": b"",
        "headers": [(b"host", b"localhost:7780"), *headers], "subprotocols": [],
        "extensions": {"websocket.http.response": {}},
    }  # fmt: skip
    await public_application(Service(FakeNode(), accounts), OPEN)(scope, receive, send)
    return sent


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_a_preflight_of_a_named_origin_needs_no_key(accounts: Accounts, method: str) -> None:
    policy = AccessPolicy(needs_key=True, origins=("https://chat.example",))
    asked = {
        "origin": "https://chat.example",
        "access-control-request-method": method,
        "access-control-request-headers": "authorization,content-type",
    }
    async with entering(policy, accounts) as client:
        said = await client.options("/v1/chat/completions", headers=asked)
        other = await client.options(
            "/v1/chat/completions", headers=asked | {"origin": "https://evil.example"}
        )

    assert said.status_code == 200
    assert "authorization" in said.headers["access-control-allow-headers"]
    assert other.status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer("wrong"),
        bearer("0123456789abcdeF"),
        bearer("x" * 100_000),
        {"authorization": "Basic 0123456789abcdef"},
        {"authorization": "0123456789abcdef"},
        {"x-api-key": "wrong"},
    ],
    ids=range(8),
)
async def test_a_missing_or_wrong_key_is_refused(
    accounts: Accounts, headers: dict[str, str]
) -> None:
    async with entering(SHUT, accounts) as client:
        said = await client.get(MODELS, headers=headers)

    assert (said.status_code, said.json()["error"]["code"]) == (401, "invalid_api_key")
    assert said.headers["www-authenticate"] == "Bearer"


async def test_a_refusal_repeats_no_key(accounts: Accounts) -> None:
    async with entering(SHUT, accounts) as client:
        said = await client.get(MODELS, headers=bearer("canary-canary-canary"))

    assert "canary" not in said.text + str(said.headers)


async def test_both_headers_carry_a_key(accounts: Accounts) -> None:
    key = accounts.create("laptop", KeyLimits(), 0)
    async with entering(AccessPolicy(needs_key=True), accounts) as client:
        statuses = [
            (await client.get(MODELS, headers=each)).status_code
            for each in (bearer(key), {"x-api-key": key}, {"authorization": f"bearer  {key} "})
        ]

    assert statuses == [200, 200, 200]


@pytest.mark.parametrize("policy", [OPEN, SHUT], ids=["open", "shut"])
async def test_expired_and_revoked_keys_are_refused(
    accounts: Accounts, policy: AccessPolicy
) -> None:
    expired = accounts.create("old", KeyLimits(expires_s=1), 0)
    revoked = accounts.create("gone", KeyLimits(), 0)
    async with entering(policy, accounts) as client:
        before = await client.get(MODELS, headers=bearer(revoked))
        accounts.revoke("gone", 1)
        said = [await client.get(MODELS, headers=bearer(each)) for each in (expired, revoked)]

    assert before.status_code == 200
    assert [each.status_code for each in said] == [401, 401]
    assert said[0].json()["error"]["message"] == "The API key `old` is expired"
    assert said[1].json()["error"]["message"] == "The API key `gone` is revoked"


async def test_any_text_is_accepted_where_no_key_is_needed(accounts: Accounts) -> None:
    async with entering(OPEN, accounts) as client:
        said = await client.get(MODELS, headers=bearer("not-needed"))

    assert said.status_code == 200


def test_a_policy_shows_no_key() -> None:
    assert SHUT.file_keys[0] not in repr(SHUT)


@pytest.mark.parametrize("policy", [OPEN, SHUT], ids=["open", "shut"])
async def test_a_key_that_another_member_revoked_is_refused(
    accounts: Accounts, policy: AccessPolicy
) -> None:
    key, other = SHUT.file_keys
    accounts.store_revoked("node-b", [tag_of(key)])
    async with entering(policy, accounts) as client:
        said = [await client.get(MODELS, headers=bearer(each)) for each in (key, other)]

    assert [each.status_code for each in said] == [401, 200]
    assert said[0].json()["error"]["message"] == "The API key is revoked"
    assert key not in said[0].text
