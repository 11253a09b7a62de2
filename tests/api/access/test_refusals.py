"""Every refusal of an API server: its code, and no trace of key or prompt in it or in any log."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

import httpx2
import pytest

from meshllm.api.access.accounts import Accounts, KeyLimits, tag_of
from meshllm.api.tcp import ApiServer, ApiServerOptions, open_api_server
from meshllm.errors import UserError
from tests.builders.fake_node import FakeNode

pytestmark = pytest.mark.socket

PROMPT = "canary prompt that nobody may log"
CANARIES = ("canary", "sk-meshllm")
TURNS = [{"role": "user", "content": PROMPT}]
BODIES: dict[str, dict[str, object]] = {
    "/chat/completions": {"model": "builtin", "messages": TURNS},
    "/completions": {"model": "builtin", "prompt": PROMPT},
    "/embeddings": {"model": "builtin", "input": PROMPT},
    "/responses": {"model": "builtin", "input": PROMPT},
    "/messages": {"model": "builtin", "messages": TURNS, "max_tokens": 9},
}
ANTHROPICS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


@dataclass(frozen=True, slots=True)
class Case:
    """What a request shows, and how it is refused."""

    key: str
    status: int
    code: str
    headers: tuple[tuple[str, str], ...] = ()
    needs_key: bool = True
    retry: bool = False
    """Whether the refusal says when to try again."""


CASES = {
    "no key": Case("", 401, "invalid_api_key"),
    "bad": Case("sk-meshllm-0badc0de-canary", 401, "invalid_api_key"),
    "revoked": Case("revoked", 401, "invalid_api_key"),
    "revoked by a member": Case("heard", 401, "invalid_api_key"),
    "expired": Case("expired", 401, "invalid_api_key"),
    "revoked, where none is needed": Case("revoked", 401, "invalid_api_key", needs_key=False),
    "over its tokens": Case("spent", 429, "rate_limit_exceeded", retry=True),
    "over its requests": Case("busy", 429, "rate_limit_exceeded", retry=True),
    "another model": Case("other", 404, "model_not_found"),
    "wrong origin": Case("right", 403, "origin_not_allowed", (("origin", "https://evil.test"),)),
    "wrong origin, no key needed": Case(
        "", 403, "origin_not_allowed", (("origin", "https://evil.test"),), needs_key=False
    ),
    "wrong host": Case("", 421, "unknown_host", (("host", "evil.test"),), needs_key=False),
}


@pytest.fixture
def keys(accounts: Accounts) -> dict[str, str]:
    """A key for each case, by name."""
    limits = {
        "right": KeyLimits(),
        "revoked": KeyLimits(),
        "heard": KeyLimits(),
        "expired": KeyLimits(expires_s=1),
        "spent": KeyLimits(tokens_per_day=1),
        "busy": KeyLimits(concurrency=1),
        "other": KeyLimits(models=("gpt-5",)),
    }
    made = {name: accounts.create(name, each, 0) for name, each in limits.items()}
    accounts.revoke("revoked", 1)
    accounts.store_revoked("node-b", [tag_of(made["heard"])])
    return made


async def opened(
    api_server: FakeNode, accounts: Accounts, *, needs_key: bool
) -> AsyncIterator[ApiServer]:
    """Serve a node on TCP."""
    options = ApiServerOptions("127.0.0.1", 0, require_key=needs_key)
    with open_api_server(options, accounts) as it:
        serving = asyncio.ensure_future(it.serve(api_server))
        try:
            yield it
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", CASES)
async def test_a_refusal_has_its_code_and_tells_no_secret(
    api_server: FakeNode,
    accounts: Accounts,
    keys: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    name: str,
    path: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    case = CASES[name]
    key = keys.get(case.key, case.key)
    headers = {**({"authorization": f"Bearer {key}"} if key else {}), **dict(case.headers)}
    api_server.waits_at = 1
    async for it in opened(api_server, accounts, needs_key=case.needs_key):
        async with asyncio.timeout(60), httpx2.AsyncClient(timeout=None) as client:
            chat = f"{it.url}/chat/completions"
            first = None
            if case.key == "busy":
                body = BODIES["/chat/completions"]
                first = asyncio.ensure_future(client.post(chat, json=body, headers=headers))
                await api_server.begun.wait()
            said = await client.post(f"{it.url}{path}", json=BODIES[path], headers=headers)
            api_server.go.set()
            assert first is None or (await first).status_code == 200

    assert said.status_code == case.status
    error = said.json()["error"]
    if path == "/messages":
        assert error["type"] == ANTHROPICS.get(case.status, "api_error")
    else:
        assert error["code"] == case.code
    assert ("retry-after" in said.headers) is case.retry
    told = f"{said.text}{said.headers}"
    assert not [each for each in CANARIES if each in told]
    assert len(api_server.requests) == (case.key == "busy")
    _check_logs(caplog, keys)


async def test_an_answer_that_fails_tells_no_secret(
    api_server: FakeNode, accounts: Accounts, keys: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    headers = {"authorization": f"Bearer {keys['right']}"}
    bodies = [
        *({**each, "seed": PROMPT} for each in BODIES.values()),
        *({**each, "canary": keys["right"]} for each in BODIES.values()),
    ]
    async for it in opened(api_server, accounts, needs_key=True):
        async with httpx2.AsyncClient(timeout=None) as client:
            refused = [
                (await client.post(f"{it.url}{path}", json=body, headers=headers)).status_code
                for path, body in zip([*BODIES] * 2, bodies, strict=True)
            ]
            api_server.fails_at = 1
            failed = [
                (await client.post(f"{it.url}{path}", json=body, headers=headers)).status_code
                for path, body in BODIES.items()
            ]

    assert (set(refused), set(failed)) == ({400}, {500})
    _check_logs(caplog, keys)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_off_loopback_an_api_server_without_a_key_does_not_open(
    accounts: Accounts, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    caplog.set_level(logging.DEBUG)
    gone = accounts.create("gone", KeyLimits(), 0)
    accounts.create("old", KeyLimits(expires_s=1), 0)
    accounts.revoke("gone", 1)

    with (
        pytest.raises(UserError, match="needs a key") as raised,
        open_api_server(ApiServerOptions(host, 0), accounts),
    ):
        pass

    assert "meshllm key create" in str(raised.value.hint)
    _check_logs(caplog, {"gone": gone})


def _check_logs(caplog: pytest.LogCaptureFixture, keys: dict[str, str]) -> None:
    """Fail if a record of any logger has a prompt or a key, also in its fields."""
    client = ("httpx", "httpcore", "httpx2")  # that of the test says what it sends
    records = [each for each in caplog.records if not each.name.startswith(client)]
    told = "\n".join(f"{each.getMessage()} {vars(each)}" for each in records)
    assert not [each for each in (*CANARIES, *keys.values()) if each in told]
