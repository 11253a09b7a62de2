import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from meshllm.api.v1 import chat
from meshllm.request import FinishReason, Request, Sampling
from tests.builders.fake_node import FakeNode
from tests.builders.fake_ring import answer_of

PATH = "/v1/chat/completions"
HI = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": "builtin", "messages": [HI]}
STREAM = BODY | {"stream": True}


def chunks_of(said: httpx2.Response) -> list[Any]:
    """Read server-sent events; the last of a whole stream is `[DONE]`."""
    data = [part.removeprefix("data: ") for part in said.text.split("\n\n") if part]
    return [json.loads(each) if each.startswith("{") else each for each in data]


async def test_a_completion_without_streaming(client: httpx2.AsyncClient) -> None:
    said = (await client.post(PATH, json=BODY)).json()

    assert said.pop("id").startswith("chatcmpl-")
    assert type(said.pop("created")) is int
    assert said == {
        "object": "chat.completion",
        "model": "builtin",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 5,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_a_stream_begins_with_the_role_and_ends_with_done(
    client: httpx2.AsyncClient,
) -> None:
    said = await client.post(PATH, json=STREAM)

    *chunks, done = chunks_of(said)
    assert said.headers["content-type"].startswith("text/event-stream")
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "hello"},
        {"content": " w\u2028rld"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


async def test_usage_is_last_and_only_on_request(client: httpx2.AsyncClient) -> None:
    asked = STREAM | {"stream_options": {"include_usage": True}}

    *chunks, last, done = chunks_of(await client.post(PATH, json=asked))

    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)


async def test_an_early_error_of_a_stream_has_a_status(
    client: httpx2.AsyncClient, door: FakeNode
) -> None:
    door.fails_at = 1  # the progress before it is not sent to OpenAI clients

    said = await client.post(PATH, json=STREAM)

    assert (said.status_code, said.json()["error"]["message"]) == (500, "It broke; mend it")


async def test_a_late_error_of_a_stream_is_its_last_event(
    client: httpx2.AsyncClient, door: FakeNode
) -> None:
    door.fails_at = 2

    *_, last = chunks_of(await client.post(PATH, json=STREAM))

    assert last["error"]["message"] == "It broke; mend it"


async def test_comments_keep_a_silent_stream_open(
    client: httpx2.AsyncClient, door: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    door.waits_at = 1
    monkeypatch.setattr(chat, "KEEP_ALIVE_S", 0.01)
    asyncio.get_running_loop().call_later(0.05, door.go.set)

    said = await client.post(PATH, json=STREAM)

    first, *_, done = said.text.split("\n\n")[:-1]
    assert (first, done) == (": patience", "data: [DONE]")


async def test_an_answer_of_max_tokens_has_the_reason_length(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = replace(answer_of("x", 1), finish_reason=FinishReason.LENGTH)
    monkeypatch.setattr("tests.builders.fake_node.answer_of", lambda *_: cut)

    said = (await client.post(PATH, json=BODY)).json()

    assert said["choices"][0]["finish_reason"] == "length"


async def test_every_parameter_reaches_the_mesh(client: httpx2.AsyncClient, door: FakeNode) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = BODY | {
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": parts}],
        "n": 1, "max_completion_tokens": 9, "max_tokens": 9, "stop": ["x", "y"],
        "temperature": 0.5, "top_p": 0.9, "seed": 7, "frequency_penalty": 0.1,
        "presence_penalty": 0.2, "top_k": 4, "min_p": 0.3, "repetition_penalty": 1.5,
    }  # fmt: skip

    said = await client.post(PATH, json=asked)

    assert said.status_code == 200
    assert door.requests == [
        Request(
            turns=({"role": "system", "content": "s"}, {"role": "user", "content": "ab"}),
            sampling=Sampling(0.5, 4, 0.9, 0.3, 1.5, 0.1, 0.2, 7),
            max_tokens=9,
            stop=("x", "y"),
        )
    ]


async def test_a_null_field_is_ignored(client: httpx2.AsyncClient, door: FakeNode) -> None:
    names = ("stream", "stream_options", "n", "max_tokens", "stop", "temperature", "seed")

    await client.post(PATH, json=BODY | dict.fromkeys(names))

    assert door.requests == [Request(turns=({"role": "user", "content": "hi"},))]


def test_a_random_seed_is_used_when_sampling_without_a_seed() -> None:
    seeds = {chat.Chat("m", (), temperature=1.0).request().sampling.seed for _ in range(3)}

    assert len(seeds) == 3
    assert chat.Chat("m", (), temperature=0.0).request().sampling.seed == 0


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"n": 2}, "n"),
        ({"tools": []}, "tools"),
        ({"logprobs": False}, "logprobs"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"user": "me"}, "user"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": 1}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"temperature": "hot"}, "temperature"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [HI | {"role": "tool"}]}, "messages[0].role"),
        ({"messages": [HI | {"name": "me"}]}, "messages[0].name"),
        ({"messages": [HI | {"content": [{"type": "image_url"}]}]}, "messages[0].content[0].text"),
        ({"messages": [HI | {"content": None}]}, "messages[0].content"),
    ],
)
async def test_unsupported_fields_are_refused_by_name(
    client: httpx2.AsyncClient, door: FakeNode, change: dict[str, Any], param: str
) -> None:
    said = await client.post(PATH, json=BODY | change)

    error = said.json()["error"]
    assert (said.status_code, error["param"], door.requests) == (400, param, [])
    assert error["type"] == "invalid_request_error"
    assert f"`{param}`" in error["message"]


async def test_a_message_of_an_answer_can_be_sent_back(client: httpx2.AsyncClient) -> None:
    first = await client.post(PATH, json=BODY)
    reply = first.json()["choices"][0]["message"] | {"tool_calls": None}

    again = await client.post(PATH, json=BODY | {"messages": [HI, reply, HI]})

    assert (first.status_code, again.status_code) == (200, 200)


async def test_a_model_that_is_not_served_is_not_found(client: httpx2.AsyncClient) -> None:
    said = await client.post(PATH, json=BODY | {"model": "gpt-5"})

    assert (said.status_code, said.json()["error"]) == (
        404,
        {
            "message": "The model `gpt-5` is not served here; served: `builtin`",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        },
    )
