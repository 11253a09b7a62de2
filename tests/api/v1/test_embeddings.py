import base64
import struct
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from meshllm.api.v1 import embeddings
from meshllm.errors import ContextTooLong
from meshllm.request import Event
from tests.builders.fake_node import FakeNode
from tests.builders.fake_ring import answer_of

PATH = "/v1/embeddings"
BODY: dict[str, Any] = {"model": "builtin", "input": "hi"}
VALUES = [0.6, -0.8, 1e-9]


def packed(values: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def answer(embedding: str) -> tuple[Event, ...]:
    return (replace(answer_of("", 0), embedding=embedding),)


@pytest.fixture
def api_server() -> FakeNode:
    return FakeNode(said=answer(packed(VALUES)))


async def test_an_embedding(client: httpx2.AsyncClient, api_server: FakeNode) -> None:
    said = await client.post(PATH, json=BODY | {"user": "me"})

    assert said.headers["content-type"] == "application/json"
    body = said.json()
    (values,) = (each.pop("embedding") for each in body["data"])
    assert packed(values) == packed(VALUES)
    assert body == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0}],
        "model": "builtin",
        "usage": {"prompt_tokens": 2, "total_tokens": 2},
    }
    (asked,) = api_server.requests
    assert (asked.raw, asked.embeds, asked.dimensions, asked.max_tokens) == ("hi", True, None, 0)


async def test_an_embedding_in_base64(client: httpx2.AsyncClient, api_server: FakeNode) -> None:
    asked = BODY | {"encoding_format": "base64", "dimensions": 3}
    said = (await client.post(PATH, json=asked)).json()

    assert said["data"][0]["embedding"] == packed(VALUES)
    assert api_server.requests[0].dimensions == 3


@pytest.mark.parametrize(
    ("given", "raw", "ids"),
    [
        ("a", ["a"], [()]),
        (["a", "b"], ["a", "b"], [(), ()]),
        ([1, 2], [None], [(1, 2)]),
        ([[1, 2], [3]], [None, None], [(1, 2), (3,)]),
    ],
)
async def test_the_four_forms_of_an_input(
    client: httpx2.AsyncClient, api_server: FakeNode, given: object, raw: list[Any], ids: list[Any]
) -> None:
    said = (await client.post(PATH, json=BODY | {"input": given})).json()

    assert [each["index"] for each in said["data"]] == [*range(len(raw))]
    assert [each.raw for each in api_server.requests] == raw
    assert [each.ids for each in api_server.requests] == ids
    assert said["usage"]["total_tokens"] == 2 * len(raw)


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": ""}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": ["a"] * 2049}, "input", "invalid_value"),
        ({"input": {"a": 1}}, "input", "invalid_type"),
        ({"dimensions": 0}, "dimensions", "invalid_value"),
        ({"dimensions": "8"}, "dimensions", "invalid_type"),
        ({"encoding_format": "hex"}, "encoding_format", "invalid_value"),
        ({"input_type": "query"}, "input_type", "unsupported_parameter"),
    ],
    ids=range(9),
)
async def test_what_is_not_supported_is_refused_by_name(
    client: httpx2.AsyncClient, api_server: FakeNode, change: dict[str, Any], param: str, code: str
) -> None:
    said = await client.post(PATH, json=BODY | change)

    error = said.json()["error"]
    assert (said.status_code, error["param"], error["code"]) == (400, param, code)
    assert api_server.requests == []


async def test_an_input_that_is_too_long_is_named(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    api_server.fails_at, api_server.error = (
        1,
        ContextTooLong("A prompt of 9 tokens", hint="shorten it"),
    )

    said = await client.post(PATH, json=BODY | {"input": ["a", "b"]})

    assert said.status_code == 400
    assert said.json()["error"] == {
        "message": "A prompt of 9 tokens; shorten it",
        "type": "invalid_request_error",
        "param": "input",
        "code": "context_length_exceeded",
    }


async def test_the_tokens_of_a_request_are_bounded(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "MAX_TOKENS", 4)

    least = await client.post(PATH, json=BODY | {"input": ["a", "b"]})
    most = await client.post(PATH, json=BODY | {"input": ["a", "b", "c"]})

    assert (least.status_code, most.status_code) == (200, 400)
    assert most.json()["error"]["code"] == "max_tokens_per_request"


async def test_what_computes_no_embeddings_is_told(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    api_server.said = answer("")

    said = await client.post(PATH, json=BODY)

    error = said.json()["error"]
    assert (said.status_code, error["param"]) == (400, "model")
    assert error["message"] == "The backend of `builtin` does not compute embeddings"
