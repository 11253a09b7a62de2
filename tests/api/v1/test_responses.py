import json
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from meshllm.request import FinishReason, Piece, ToolCall, ToolCallDelta, Tools, Turn
from tests.builders.fake_node import FakeNode
from tests.builders.fake_ring import answer_of
from tests.builders.tool_calls import ONE_CALL, RESPONSES_TOOL

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "builtin", "input": "hi"}
HI: Turn = {"role": "user", "content": "hi"}
HELLO: Turn = {"role": "assistant", "content": "hello"}


def events_of(said: httpx2.Response) -> list[tuple[str, Any]]:
    """Read server-sent events as names and data."""
    parts = [part.split("\n", 1) for part in said.text.split("\n\n") if part]
    return [(name.removeprefix("event: "), json.loads(data[6:])) for name, data in parts]


async def test_a_response(client: httpx2.AsyncClient, api_server: FakeNode) -> None:
    said = (await client.post(PATH, json=BODY | {"instructions": "be kind"})).json()

    [item] = said["output"]
    assert (said["object"], said["status"], said["error"]) == ("response", "completed", None)
    assert item["content"] == [
        {"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}
    ]
    assert said["usage"]["total_tokens"] == 7
    assert (said["instructions"], said["store"]) == ("be kind", True)
    assert api_server.requests[0].turns == ({"role": "system", "content": "be kind"}, HI)


async def test_items_of_earlier_outputs_are_inputs(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    first = (await client.post(PATH, json=BODY)).json()
    parts = [{"type": "input_text", "text": "h"}, {"type": "input_text", "text": "i"}]
    items = [
        {"role": "developer", "content": "be kind"}, *first["output"],
        {"type": "message", "role": "user", "content": parts},
    ]  # fmt: skip
    await client.post(PATH, json=BODY | {"input": items})

    lines: Turn = {"role": "user", "content": "h\ni"}
    assert api_server.requests[1].turns == ({"role": "system", "content": "be kind"}, HELLO, lines)


async def test_an_answer_can_be_had_again_by_its_seed(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    first = (await client.post(PATH, json=BODY)).json()
    other = (await client.post(PATH, json=BODY)).json()
    again = await client.post(PATH, json=BODY | {"meshllm": first["meshllm"], "stream": True})

    seeds = [data["response"]["meshllm"] for _, data in events_of(again) if "response" in data]
    assert seeds == [first["meshllm"]] * 3
    assert first["meshllm"] != other["meshllm"]
    assert api_server.requests[2] == api_server.requests[0] != api_server.requests[1]


async def test_a_response_continues_another_one(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    first = (await client.post(PATH, json=BODY | {"instructions": "once"})).json()
    second = (await client.post(PATH, json=BODY | {"previous_response_id": first["id"]})).json()
    await client.post(PATH, json=BODY | {"previous_response_id": second["id"]})

    assert second["previous_response_id"] == first["id"]
    assert api_server.requests[2].turns == (HI, HELLO, HI, HELLO, HI)


async def test_responses_are_kept_until_they_are_deleted(client: httpx2.AsyncClient) -> None:
    first = (await client.post(PATH, json=BODY)).json()
    where = f"{PATH}/{first['id']}"

    assert (await client.get(where)).json() == first
    assert (await client.delete(where)).json() == {
        "id": first["id"], "object": "response", "deleted": True,
    }  # fmt: skip
    gone = await client.get(where)
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "response_not_found")
    again = await client.post(PATH, json=BODY | {"previous_response_id": first["id"]})
    assert again.status_code == 404


async def test_a_response_that_is_not_stored_is_not_kept(client: httpx2.AsyncClient) -> None:
    first = (await client.post(PATH, json=BODY | {"store": False})).json()

    assert not first["store"]
    assert (await client.get(f"{PATH}/{first['id']}")).status_code == 404


async def test_a_stream_has_openais_events(client: httpx2.AsyncClient) -> None:
    events = events_of(await client.post(PATH, json=BODY | {"stream": True}))

    assert [name for name, _ in events] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", "response.output_text.delta", "response.output_text.delta",
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    assert [data["sequence_number"] for _, data in events] == [*range(10)]
    assert all(data["type"] == name for name, data in events)
    last = events[-1][1]["response"]
    assert (await client.get(f"{PATH}/{last['id']}")).json() == last


async def test_an_error_in_the_middle_is_an_event(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    api_server.fails_at = 2
    events = events_of(await client.post(PATH, json=BODY | {"stream": True}))

    assert (events[-1][0], events[-1][1]["message"]) == ("error", "It broke; mend it")


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, '{"type":"object"}'),
        ({"type": "json_schema", "name": "n", "schema": {"type": "null"}}, '{"type":"null"}'),
    ],
    ids=["text", "object", "schema"],
)
async def test_an_answer_follows_a_schema(
    client: httpx2.AsyncClient, api_server: FakeNode, form: object, schema: str | None
) -> None:
    said = await client.post(PATH, json=BODY | {"text": {"format": form}})

    assert said.json()["text"] == {"format": form}
    assert api_server.requests[0].schema == schema


@pytest.mark.parametrize(
    "text",
    [{}, {"verbosity": "medium"}, {"format": {"type": "text"}, "verbosity": None}],
    ids=str,
)
async def test_a_text_that_asks_for_nothing_is_taken(
    client: httpx2.AsyncClient, text: dict[str, Any]
) -> None:
    said = await client.post(PATH, json=BODY | {"text": text})

    assert said.json()["text"] == {"format": {"type": "text"}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "tool", "content": ""}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "text": ""}]}]},
            "input[0].content[0].type",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [RESPONSES_TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input[0]"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"text": 3}, "text"),
        ({"text": {"size": 3}}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": ""}}}, "text.format.name"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
    ids=str,
)
async def test_what_is_not_supported_is_refused(
    client: httpx2.AsyncClient, api_server: FakeNode, change: dict[str, Any], param: str
) -> None:
    said = await client.post(PATH, json=BODY | change)

    assert (said.status_code, said.json()["error"]["param"]) == (400, param)
    assert api_server.requests == []


async def test_tools_are_offered_or_required(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    choice = {"type": "function", "name": "f"}

    said = await client.post(PATH, json=BODY | {"tools": [RESPONSES_TOOL], "tool_choice": choice})

    assert (said.json()["tools"], said.json()["tool_choice"]) == ([RESPONSES_TOOL], choice)
    functions = '[{"name":"f","parameters":{}}]'
    assert api_server.requests[0].tools == Tools(functions, is_required=True, parallel=False)


async def test_calls_and_reasoning_are_items(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    api_server.said = ONE_CALL

    said = (await client.post(PATH, json=BODY | {"tools": [RESPONSES_TOOL]})).json()

    assert [each["type"] for each in said["output"]] == ["reasoning", "message", "function_call"]
    thought, message, call = said["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "I see."
    assert (call["name"], call["arguments"]) == ("f", '{"x": 1}')
    assert said["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


async def test_calls_and_reasoning_stream(client: httpx2.AsyncClient, api_server: FakeNode) -> None:
    api_server.said = ONE_CALL

    events = events_of(
        await client.post(PATH, json=BODY | {"stream": True, "tools": [RESPONSES_TOOL]})
    )

    assert [name.removeprefix("response.") for name, _ in events] == [
        "created", "in_progress",
        "output_item.added", "reasoning_text.delta", "reasoning_text.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    places = [each["output_index"] for _, each in events if "output_index" in each]
    assert places == sorted(places)
    assert events[-1][1]["response"]["output"][2]["arguments"] == '{"x": 1}'


async def test_a_call_is_answered_in_the_next_response(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    api_server.said = ONE_CALL
    first = (await client.post(PATH, json=BODY | {"tools": [RESPONSES_TOOL]})).json()
    name = first["output"][2]["call_id"]

    result = {"type": "function_call_output", "call_id": name, "output": "done"}
    body = BODY | {"previous_response_id": first["id"], "input": [result]}
    await client.post(PATH, json=body)
    await client.post(PATH, json=BODY | {"input": [HI, *first["output"], result]})

    references = [{"type": "item_reference", "id": each["id"]} for each in first["output"]]
    await client.post(PATH, json=BODY | {"input": [HI, *references, result]})

    for asked in api_server.requests[1:]:
        call = ToolCall("f", '{"x": 1}', name)
        assert asked.turns == (
            HI,
            {"role": "assistant", "content": "I see.", "tool_calls": (call,)},
            {"role": "tool", "content": "done", "tool_call_id": name},
        )


async def test_parallel_calls_are_one_turn(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    calls = [
        {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"} for name in "ab"
    ]
    hello = {"role": "assistant", "content": "hello"}
    await client.post(PATH, json=BODY | {"input": [HI, *calls, hello, hello, *calls]})

    both = tuple(ToolCall("f", "{}", name) for name in "ab")
    assert api_server.requests[0].turns == (
        HI,
        {"role": "assistant", "content": "", "tool_calls": both},
        HELLO,
        HELLO | {"tool_calls": both},
    )


async def test_an_item_that_is_not_kept_is_not_found(client: httpx2.AsyncClient) -> None:
    first = (await client.post(PATH, json=BODY | {"store": False})).json()
    item = {"type": "item_reference", "id": first["output"][0]["id"]}
    said = await client.post(PATH, json=BODY | {"input": [HI, item]})

    assert (said.status_code, said.json()["error"]["param"]) == (404, "input[1].id")


async def test_an_item_is_referred_to_once(client: httpx2.AsyncClient) -> None:
    first = (await client.post(PATH, json=BODY)).json()
    item = {"type": "item_reference", "id": first["output"][0]["id"]}
    said = await client.post(PATH, json=BODY | {"input": [item, item]})

    assert (said.status_code, said.json()["error"]["param"]) == (400, "input[1].id")


async def test_a_request_of_codex_is_answered(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    tool = {
        "type": "function", "name": "shell", "description": "Runs a command", "strict": False,
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    }  # fmt: skip
    said = await client.post(
        PATH,
        json={
            "model": "builtin",
            "instructions": "You are a coding agent.",
            "input": [
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "List the files"}],
                }
            ],
            "tools": [tool],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0b6c9a",
        },
    )

    assert said.status_code == 200, said.text
    assert "response.completed" in said.text
    assert api_server.requests[0].effort == "medium"


async def test_reasoning_is_asked_for(client: httpx2.AsyncClient, api_server: FakeNode) -> None:
    said = await client.post(PATH, json=BODY | {"reasoning": {"effort": "low"}})

    assert said.json()["reasoning"]["effort"] == "low"
    assert (api_server.requests[0].thinks, api_server.requests[0].effort) == (True, "low")


async def test_unusual_deltas_of_calls_make_the_calls_of_the_answer(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    deltas = (
        ToolCallDelta(3, "g", "no"), ToolCallDelta(0, "", '{"x":'), ToolCallDelta(0, "", "1}"),
        ToolCallDelta(1, "", "{"), ToolCallDelta(1, "", "}"), ToolCallDelta(0, "", "no"),
    )  # fmt: skip
    calls = ToolCall("", '{"x":1}no'), ToolCall("", "{}")
    end = replace(answer_of("", 5), calls=calls)
    api_server.said = *(Piece("", calls=(each,)) for each in deltas), end

    body = BODY | {"stream": True, "tools": [RESPONSES_TOOL]}
    events = events_of(await client.post(PATH, json=body))

    name, last = events[-1]
    assert name == "response.completed"
    assert [each["arguments"] for each in last["response"]["output"]] == ['{"x":1}', "{}"]


async def test_an_item_that_is_cut_is_incomplete_in_the_stream_too(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    end = replace(answer_of("hel", 1), finish_reason=FinishReason.LENGTH)
    api_server.said = Piece("hel"), end

    events = dict(events_of(await client.post(PATH, json=BODY | {"stream": True})))

    (whole,) = events["response.incomplete"]["response"]["output"]
    assert events["response.output_item.done"]["item"] == whole
    assert whole["status"] == "incomplete"
