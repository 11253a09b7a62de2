import gzip
import json

import httpx2
import pytest
from starlette.requests import ClientDisconnect, Request

from meshllm.api.failure import Failure, Refused, error_object, failure_of, on_error, response_of
from meshllm.api.respond import BodyEncoded, BodyTooLarge, BodyTooSlow
from meshllm.errors import (
    Busy,
    ContextTooLong,
    Leaving,
    LinkLost,
    MeshError,
    ModelError,
    ModelMissing,
    NotAuthorised,
    NotServed,
    PeerFault,
    QuotaUsed,
    TimedOut,
    UserError,
)
from meshllm.node.requests.request_json import REQUEST_BYTES
from meshllm.strict_json import WrongField
from tests.builders.fake_node import FakeNode

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (UserError("x"), 400, None),
        (ContextTooLong("x"), 400, "context_length_exceeded"),
        (WrongField("a.b", "x"), 400, "invalid_value"),
        (BodyTooLarge("x"), 413, "request_too_large"),
        (BodyEncoded("x"), 415, "unsupported_encoding"),
        (BodyTooSlow("x"), 408, "request_timeout"),
        (Busy("x"), 429, "rate_limit_exceeded"),
        (QuotaUsed("x", retry_s=9), 429, "rate_limit_exceeded"),
        (Leaving("x"), 503, "service_unavailable"),
        (LinkLost("x"), 503, "service_unavailable"),
        (TimedOut("x"), 503, "service_unavailable"),
        (NotServed("x", retry_s=40), 503, "service_unavailable"),
        (NotAuthorised("x"), 503, "service_unavailable"),
        (PeerFault("x"), 500, "internal_error"),
        (ModelMissing("x"), 404, "model_not_found"),
        (ModelError("x"), 500, "internal_error"),
        (MeshError("x"), 500, "internal_error"),
    ],
)
def test_every_error_has_a_status_and_a_code(
    error: MeshError, status: int, code: str | None
) -> None:
    failure = failure_of(error)

    assert (failure.status, failure.code) == (status, code)


def test_the_object_has_the_four_fields_of_openai_and_no_other() -> None:
    error = WrongField("a.b", "It is wrong", hint="mend it", code="invalid_type")

    assert json.loads(error_object(error)) == {
        "error": {
            "message": "It is wrong; mend it",
            "type": "invalid_request_error",
            "param": "a.b",
            "code": "invalid_type",
        }
    }


def test_only_what_may_succeed_later_says_when_to_retry() -> None:
    unserved = NotServed("x", retry_s=40)
    errors = (Busy("x"), Leaving("x"), QuotaUsed("x", retry_s=99), unserved, UserError("x"))
    responses = [response_of(each) for each in errors]

    assert [each.headers.get("retry-after") for each in responses] == ["2", "2", "99", "40", None]


def test_a_refused_key_names_the_scheme() -> None:
    response = response_of(Refused("x", Failure(401, "t", "c")))

    assert response.headers["www-authenticate"] == "Bearer"


async def test_unknown_urls_and_methods_are_named(client: httpx2.AsyncClient) -> None:
    missing, wrong = await client.get("/v1/nothing"), await client.get(CHAT)

    assert missing.json()["error"]["message"] == "Unknown request URL: GET /v1/nothing"
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_supported")
    assert wrong.headers["allow"] == "POST"


async def test_only_the_type_of_a_bug_is_sent(
    client: httpx2.AsyncClient, api_server: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken() -> list[str]:
        raise KeyError("canary")

    monkeypatch.setattr(api_server, "models", broken)

    said = await client.get("/v1/models")

    assert (said.status_code, said.json()["error"]["code"]) == (500, "internal_error")
    assert said.json()["error"]["message"] == "This is a bug in meshllm: KeyError"


async def test_a_client_that_left_is_not_a_bug() -> None:
    request = Request({"type": "http"})

    assert (await on_error(request, ClientDisconnect())).status_code == 400


async def test_a_body_that_announces_too_much_is_refused_unread(
    client: httpx2.AsyncClient,
) -> None:
    headers = {"content-length": str(REQUEST_BYTES + 1)}

    said = await client.post(CHAT, content=b"{}", headers=headers)

    assert (said.status_code, said.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("length", ["9" * 21, "9" * 5000])
async def test_an_absurd_length_is_refused(client: httpx2.AsyncClient, length: str) -> None:
    said = await client.post(CHAT, content=b"{}", headers={"content-length": length})

    assert said.status_code == 413


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/mesh/ask"])
async def test_a_compressed_body_is_refused(client: httpx2.AsyncClient, path: str) -> None:
    headers = {"content-encoding": "gzip"}

    said = await client.post(path, content=gzip.compress(b"{}"), headers=headers)

    assert said.status_code == 415
    assert "the content encoding `gzip` is not supported" in said.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["Identity", ""])
async def test_a_body_may_say_that_it_is_not_compressed(
    client: httpx2.AsyncClient, encoding: str
) -> None:
    said = await client.post(CHAT, content=b"{}", headers={"content-encoding": encoding})

    assert (said.status_code, said.json()["error"]["code"]) == (400, "missing_required_parameter")


async def test_deep_json_is_refused(client: httpx2.AsyncClient) -> None:
    said = await client.post(CHAT, content=b"[" * 10_000)

    assert (said.status_code, said.json()["error"]["type"]) == (400, "invalid_request_error")
