import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import httpx2
import pytest

from meshllm.api.respond import KEEP_ALIVE_S
from meshllm.api.v1 import chat
from meshllm.request import Logprob, Piece, Request, Sampling, TokenLogprobs, ToolCall, Tools
from tests.builders.bodies import BODY, HI, PATH, STREAM, chunks_of
from tests.builders.fake_node import FOX, FakeNode
from tests.builders.tool_calls import CALL, CHAT_TOOL, ONE_CALL
from tests.builders.writer import Writer

OUTLINED = "1. Parks\n\ntext of 1\n\n2. Work\n\ntext of 2\n\n3. Friends\n\ntext of 3"


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def with_schema(**fields: Any) -> dict[str, Any]:
    wanted = {"name": "number", "schema": {"type": "integer"}, **fields}
    return {"response_format": {"type": "json_schema", "json_schema": wanted}}


async def test_a_completion_without_streaming(client: httpx2.AsyncClient) -> None:
    said = (await client.post(PATH, json=BODY | {"seed": 7})).json()

    assert said.pop("id").startswith("chatcmpl-")
    assert type(said.pop("created")) is int
    assert said == {
        "object": "chat.completion",
        "model": "builtin",
        "system_fingerprint": "fp_0123456789ab",
        "meshllm": {"seed": 7},
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
            "completion_tokens_details": {"reasoning_tokens": 0},
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


async def test_an_early_error_of_a_stream_has_a_status(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    api_server.fails_at = 1  # the progress before it is not sent to OpenAI clients

    said = await client.post(PATH, json=STREAM)

    assert (said.status_code, said.json()["error"]["message"]) == (500, "It broke; mend it")


async def test_comments_keep_a_silent_stream_open(
    client: httpx2.AsyncClient, api_server: FakeNode, advance: Callable[[float], None]
) -> None:
    api_server.waits_at = 1
    asking = asyncio.ensure_future(client.post(PATH, json=STREAM))
    await api_server.begun.wait()
    advance(KEEP_ALIVE_S)
    asyncio.get_running_loop().call_later(0, api_server.go.set)

    said = await asking

    first, *_, done = said.text.split("\n\n")[:-1]
    assert (first, done) == (": patience", "data: [DONE]")


async def test_every_parameter_reaches_the_mesh(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = BODY | {
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": parts}],
        "n": 1, "max_completion_tokens": 9, "max_tokens": 9, "stop": ["x", "y"],
        "temperature": 0.5, "top_p": 0.9, "seed": 7, "frequency_penalty": 0.1,
        "logit_bias": {"5": -100, "6": 1.5},
        "presence_penalty": 0.2, "top_k": 4, "min_p": 0.3, "repetition_penalty": 1.5,
    }  # fmt: skip

    said = await client.post(PATH, json=asked)

    assert said.status_code == 200
    assert api_server.requests == [
        Request(
            turns=({"role": "system", "content": "s"}, {"role": "user", "content": "a\nb"}),
            sampling=Sampling(0.5, 4, 0.9, 0.3, 1.5, 0.1, 0.2, 7),
            max_tokens=9,
            stop=("x", "y"),
            logit_bias=((5, -100.0), (6, 1.5)),
        )
    ]


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        (None, None),
        ({"type": "json_object"}, '{"type":"object"}'),
        (with_schema(strict=True, description="d")["response_format"], '{"type":"integer"}'),
        ({"type": "json_schema", "json_schema": {"name": "any"}}, "{}"),
    ],
    ids=["none", "object", "schema", "any"],
)
async def test_an_answer_follows_a_schema(
    client: httpx2.AsyncClient, api_server: FakeNode, form: object, schema: str | None
) -> None:
    said = await client.post(PATH, json=BODY | {"response_format": form})

    assert said.status_code == 200
    assert api_server.requests[0].schema == schema


async def test_a_developers_message_is_a_system_message(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    first = {"role": "developer", "content": "be kind"}
    await client.post(PATH, json=BODY | {"messages": [first, HI]})

    assert api_server.requests[0].turns[0] == {"role": "system", "content": "be kind"}


LIKELY = TokenLogprobs(
    Logprob(5, "hel", (104, 101, 108), -0.5), (Logprob(6, "\ufffd", (240,), -0.1),)
)
ENTRY = {
    "token": "hel",
    "logprob": -0.5,
    "bytes": [104, 101, 108],
    "top_logprobs": [{"token": "\ufffd", "logprob": -0.1, "bytes": [240]}],
}


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every piece of the fake node have a token with its log probability."""
    monkeypatch.setattr("tests.builders.fake_node.Piece", lambda text: Piece(text, (5,), (LIKELY,)))


async def test_log_probabilities_come_with_a_completion(
    client: httpx2.AsyncClient, api_server: FakeNode, scored: None
) -> None:
    said = await client.post(PATH, json=BODY | {"logprobs": True, "top_logprobs": 1})

    told = said.json()["choices"][0]["logprobs"]
    assert told == {"content": [ENTRY, ENTRY], "refusal": None}
    assert api_server.requests[0].logprobs == 1


async def test_log_probabilities_are_laid_out_as_they_come(
    client: httpx2.AsyncClient, api_server: FakeNode, scored: None
) -> None:
    api_server.waits_at = 3
    with patch.object(chat, "token_entry", wraps=chat.token_entry) as laid_out:
        asking = asyncio.ensure_future(client.post(PATH, json=BODY | {"logprobs": True}))
        await api_server.begun.wait()
        laid_out_before = laid_out.call_count
        api_server.go.set()
        await asking

    assert (laid_out_before, laid_out.call_count) == (2, 2)


async def test_log_probabilities_come_with_their_chunk(
    client: httpx2.AsyncClient, api_server: FakeNode, scored: None
) -> None:
    *chunks, _ = chunks_of(await client.post(PATH, json=STREAM | {"logprobs": True}))

    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    expected = {"content": [ENTRY], "refusal": None}
    assert told == [None, expected, expected, None]
    assert api_server.requests[0].logprobs == 0


async def test_the_fingerprint_is_that_of_the_model(client: httpx2.AsyncClient) -> None:
    said = (await client.post(PATH, json=BODY)).json()

    assert said["system_fingerprint"] == "fp_0123456789ab"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"tools": [{}]}, "tools[0]"),
        (
            {
                "tools": [{"type": "function", "function": {"description": "d"}}],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
            "tool_choice",
        ),
        ({"tools": {}}, "tools"),
        ({"tools": [CHAT_TOOL | {"type": "web_search"}]}, "tools[0]"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]},
            "tools[0].function.x",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]"),
        ({"tools": [CHAT_TOOL, CHAT_TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CHAT_TOOL], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [CHAT_TOOL], "tool_choice": named("g")}, "tool_choice"),
        ({"tools": [CHAT_TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"max_reasoning_tokens": -1}, "max_reasoning_tokens"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (with_schema(x=1), "response_format.json_schema.x"),
        (with_schema(name=""), "response_format.json_schema.name"),
        (with_schema(name="n" * 65), "response_format.json_schema.name"),
        (with_schema(strict="yes"), "response_format.json_schema.strict"),
        (with_schema(description=1), "response_format.json_schema.description"),
        (with_schema(schema=[]), "response_format.json_schema.schema"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
        ({"logit_bias": {str(each): 1 for each in range(1025)}}, "logit_bias"),
        ({"messages": []}, "messages"),
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
        ({"messages": [HI | {"role": "narrator"}]}, "messages[0].role"),
        ({"messages": [HI | {"role": "tool"}]}, "messages[0].tool_call_id"),
        ({"messages": [HI | {"tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [HI | {"speaker": "me"}]}, "messages[0].speaker"),
        ({"messages": [HI | {"content": [{"type": "image_url"}]}]}, "messages[0].content[0].text"),
        ({"messages": [HI | {"content": None}]}, "messages[0].content"),
    ],
)
async def test_unsupported_fields_are_refused_by_name(
    client: httpx2.AsyncClient, api_server: FakeNode, change: dict[str, Any], param: str
) -> None:
    said = await client.post(PATH, json=BODY | change)

    error = said.json()["error"]
    assert (said.status_code, error["param"], api_server.requests) == (400, param, [])
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


@pytest.mark.parametrize(
    ("fields", "tools"),
    [
        ({"tool_choice": "auto"}, Tools('[{"name":"f","parameters":{}}]')),
        ({}, Tools('[{"name":"f","parameters":{}}]')),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            Tools('[{"name":"f","parameters":{}}]', is_required=True, parallel=False),
        ),
        (
            {"tool_choice": named("f")},
            Tools('[{"name":"f","parameters":{}}]', is_required=True, parallel=False),
        ),
        ({"tool_choice": "none"}, None),
    ],
)
async def test_tools_are_offered_or_required(
    client: httpx2.AsyncClient, api_server: FakeNode, fields: dict[str, Any], tools: Tools | None
) -> None:
    said = await client.post(PATH, json=BODY | {"tools": [CHAT_TOOL]} | fields)

    assert said.status_code == 200
    assert api_server.requests[0].tools == tools


async def test_calls_and_reasoning_are_apart_from_the_content(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    api_server.said = ONE_CALL

    said = (await client.post(PATH, json=BODY | {"tools": [CHAT_TOOL]})).json()

    [choice] = said["choices"]
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I see."
    assert choice["message"]["reasoning_content"] == "Hm."
    assert call["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert call["id"].startswith("call_")
    assert said["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


async def test_calls_and_reasoning_stream(client: httpx2.AsyncClient, api_server: FakeNode) -> None:
    api_server.said = ONE_CALL

    *chunks, done = chunks_of(await client.post(PATH, json=STREAM | {"tools": [CHAT_TOOL]}))

    deltas = [each["choices"][0]["delta"] for each in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    names = [call.pop("id") for call in calls if "id" in call]
    assert deltas[:3] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm."},
        {"content": "I see."},
    ]
    assert calls == [
        {"index": 0, "type": "function", "function": {"name": "f", "arguments": '{"x"'}},
        {"index": 0, "function": {"arguments": ": 1}"}},
    ]
    assert len(names) == 1
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert done == "[DONE]"


async def test_calls_and_their_results_can_be_sent_back(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    messages = [
        HI,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]

    said = await client.post(PATH, json=BODY | {"messages": messages})

    assert said.status_code == 200
    assert api_server.requests[0].turns[1:] == (
        {"role": "assistant", "content": "", "tool_calls": (ToolCall("f", "{}", "call_1"),)},
        {"role": "tool", "content": "done", "tool_call_id": "call_1"},
    )


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"reasoning_effort": "none"}, (False, None, None)),
        ({"reasoning_effort": "low"}, (True, "low", None)),
        ({"chat_template_kwargs": {"enable_thinking": False}}, (False, None, None)),
        ({"max_reasoning_tokens": 9}, (None, None, 9)),
    ],
)
async def test_reasoning_is_asked_for(
    client: httpx2.AsyncClient,
    api_server: FakeNode,
    fields: dict[str, Any],
    wanted: tuple[Any, ...],
) -> None:
    await client.post(PATH, json=BODY | fields)

    [asked] = api_server.requests
    assert (asked.thinks, asked.effort, asked.max_reasoning) == wanted


async def test_an_outline_is_joined(client: httpx2.AsyncClient, api_server: FakeNode) -> None:
    api_server.backend = Writer()
    asked = BODY | {"meshllm": {"outline": True}, "seed": 7}

    said = (await client.post(PATH, json=asked)).json()

    assert said["choices"][0]["message"]["content"] == OUTLINED
    assert said["usage"] == {
        "prompt_tokens": 40,
        "completion_tokens": 13,
        "total_tokens": 53,
        "prompt_tokens_details": {"cached_tokens": 24},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_an_outline_is_streamed(client: httpx2.AsyncClient, api_server: FakeNode) -> None:
    api_server.backend = Writer()
    asked = STREAM | {"meshllm": {"outline": "auto"}}

    *chunks, done = chunks_of(await client.post(PATH, json=asked))

    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(each.get("content", "") for each in deltas) == OUTLINED
    assert (deltas[1], done) == ({"content": "1. Parks"}, "[DONE]")


async def test_a_model_of_a_provider_is_asked_for_by_name(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    api_server.provided = (FOX,)

    said = await client.post(PATH, json=BODY | {"model": "fox", "meshllm": {"trust": ["gpu"]}})

    assert said.json()["model"] == "fox"
    assert (api_server.requests[0].model, api_server.requests[0].trusted) == ("fox", ("gpu",))
