import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from starlette.types import Message

from meshllm.api.app import owner_application
from meshllm.api.v1.messages import _end
from meshllm.errors import Busy, LinkLost, MeshError
from meshllm.request import FinishReason, Request, Sampling, ToolCall, Tools, Turn
from tests.builders.fake_node import FakeNode
from tests.builders.fake_ring import answer_of
from tests.builders.tool_calls import MESSAGES_TOOL, ONE_CALL

PATH = "/v1/messages"
HI = {"role": "user", "content": "hi"}
USED = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}
END = dict.fromkeys(("stop_reason", "stop_sequence", "stop_details", "container"))
BODY: dict[str, Any] = {"model": "builtin", "max_tokens": 9, "messages": [HI]}


def events_of(said: httpx2.Response) -> list[tuple[str, Any]]:
    """Read server-sent events as names and data."""
    parts = [part.split("\n", 1) for part in said.text.split("\n\n") if part]
    return [(name.removeprefix("event: "), json.loads(data[6:])) for name, data in parts]


async def test_a_message(client: httpx2.AsyncClient, api_server: FakeNode) -> None:
    said = (await client.post(PATH, json=BODY)).json()

    assert said.pop("id").startswith("msg_")
    assert said == {
        "type": "message",
        "role": "assistant",
        "model": "builtin",
        "meshllm": {"seed": api_server.requests[0].sampling.seed},
        "content": [{"type": "text", "text": "hello", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": {
            "input_tokens": 2,
            "cache_creation": None,
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0,
            "inference_geo": None,
            "output_tokens": 5,
            "output_tokens_details": None,
            "server_tool_use": None,
            "service_tier": None,
        },
    }
    assert api_server.requests[0].turns == ({"role": "user", "content": "hi"},)


async def test_every_field_reaches_the_mesh(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    blocks = [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}]
    body = {
        "system": [*blocks, {"type": "text", "text": " kind"}],
        "messages": [HI, {"role": "assistant", "content": [{"type": "text", "text": "yes?"}]}, HI],
        "stop_sequences": ["stop"], "temperature": 0.5, "top_p": 0.9, "top_k": 3,
        "metadata": {"user_id": "me"}, "tools": [], "thinking": {"type": "disabled"},
    }  # fmt: skip
    said = await client.post(PATH, json=BODY | body)

    [asked] = api_server.requests
    assert said.status_code == 200
    assert asked == Request(
        turns=(
            Turn(role="system", content="be\n kind"), Turn(role="user", content="hi"),
            Turn(role="assistant", content="yes?"), Turn(role="user", content="hi"),
        ),
        sampling=Sampling(0.5, top_k=3, top_p=0.9, seed=asked.sampling.seed),
        max_tokens=9,
        stop=("stop",),
        thinks=False,
    )  # fmt: skip


async def test_an_answer_can_be_had_again_by_its_seed(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    first = (await client.post(PATH, json=BODY)).json()
    other = (await client.post(PATH, json=BODY)).json()
    again = await client.post(PATH, json=BODY | {"meshllm": first["meshllm"], "stream": True})

    begun = next(data for name, data in events_of(again) if name == "message_start")
    assert begun["message"]["meshllm"] == first["meshllm"] != other["meshllm"]
    assert api_server.requests[2] == api_server.requests[0] != api_server.requests[1]


async def test_a_stream_has_anthropics_events(client: httpx2.AsyncClient) -> None:
    said = await client.post(PATH, json=BODY | {"stream": True})

    events = events_of(said)
    assert [name for name, _ in events] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta",
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert all(data["type"] == name for name, data in events)
    assert events[0][1]["message"]["content"] == []
    assert "".join(data["delta"]["text"] for _, data in events[2:4]) == "hello w\u2028rld"
    assert events[5][1]["delta"] == END | {"stop_reason": "end_turn"}
    assert events[5][1]["usage"]["output_tokens"] == 5


async def test_tokens_are_counted(client: httpx2.AsyncClient, api_server: FakeNode) -> None:
    body = {"model": "builtin", "messages": [HI], "system": "be kind", "meshllm": {"seed": 1}}
    said = await client.post(f"{PATH}/count_tokens", json=body)

    assert said.json() == {"input_tokens": 2}
    assert api_server.requests[0].max_tokens == 0


async def test_a_client_that_leaves_while_its_tokens_are_counted_cancels(
    api_server: FakeNode,
) -> None:
    api_server.waits_at = 1
    body = json.dumps({"model": "builtin", "messages": [HI]}).encode()
    headers = [(b"host", b"node"), (b"content-length", str(len(body)).encode())]
    scope = {
        "type": "http", "method": "POST", "path": f"{PATH}/count_tokens", "headers": headers,
        "scheme": "http", "query_string": b"",
    }  # fmt: skip
    sent: list[Message] = [{"type": "http.request", "body": body}]

    async def receive() -> Message:
        if sent:
            return sent.pop()
        await api_server.begun.wait()
        return {"type": "http.disconnect"}

    async def send(_: Message) -> None:
        pass

    async with asyncio.timeout(60):
        await owner_application(api_server)(scope, receive, send)

    assert api_server.closed.is_set()


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 0},
        {"max_tokens": None},
        {"messages": []},
        {"messages": [{"role": "assistant", "content": "yes"}]},
        {"messages": [{"role": "system", "content": "hi"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"tools": [MESSAGES_TOOL | {"x": 1}]},
        {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "tool"}},
        {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "tool", "name": "g"}},
        {"tool_choice": {"type": "any"}},
        {"tools": [{"type": [], "name": "f"}]},
        {"tools": [MESSAGES_TOOL], "tool_choice": {"type": []}},
        {"tools": [MESSAGES_TOOL], "tool_choice": {}},
        {"tools": [MESSAGES_TOOL], "tool_choice": "none"},
        {"tools": [MESSAGES_TOOL], "tool_choice": True},
        {"thinking": {"type": "enabled", "budget_tokens": -1}},
        {"messages": [{"role": "user", "content": [USED]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"stop_sequences": [""]},
        {"stop_sequences": [str(at) for at in range(65)]},
        {"unheard_of": 1},
        {"model": "other"},
    ],
    ids=str,
)
async def test_what_is_not_supported_is_refused(
    client: httpx2.AsyncClient, api_server: FakeNode, change: dict[str, Any]
) -> None:
    said = await client.post(PATH, json=BODY | change)

    kind = "not_found_error" if "model" in change else "invalid_request_error"
    assert (said.status_code, said.json()["error"]["type"]) == (
        404 if "model" in change else 400, kind,
    )  # fmt: skip
    assert (said.json()["type"], said.json()["request_id"]) == ("error", said.headers["request-id"])
    assert api_server.requests == []


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Busy("full"), 429, "rate_limit_error"),
        (LinkLost("gone"), 503, "overloaded_error"),
        (MeshError("?"), 500, "api_error"),
    ],
)
async def test_errors_have_anthropics_shape(
    client: httpx2.AsyncClient, api_server: FakeNode, error: MeshError, status: int, kind: str
) -> None:
    api_server.fails_at, api_server.error = 0, error
    said = await client.post(PATH, json=BODY)

    assert (said.status_code, said.json()["error"]["type"]) == (status, kind)


async def test_an_error_in_the_middle_is_an_event(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    api_server.fails_at = 2
    events = events_of(await client.post(PATH, json=BODY | {"stream": True}))

    assert events[-1][0] == "error"
    assert events[-1][1]["error"]["message"] == "It broke; mend it"


@pytest.mark.parametrize(
    ("finish", "stop_text", "reason"),
    [
        (FinishReason.LENGTH, "", "max_tokens"),
        (FinishReason.STOP, "END", "stop_sequence"),
        (FinishReason.STOP, "", "end_turn"),
    ],
)
def test_the_reason_of_an_end(finish: FinishReason, stop_text: str, reason: str) -> None:
    answer = replace(answer_of("hi", 1), finish_reason=finish, stop_text=stop_text)

    assert _end(answer) == END | {"stop_reason": reason, "stop_sequence": stop_text or None}


@pytest.mark.parametrize(
    ("choice", "required", "parallel"),
    [
        (None, False, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, False, False),
        ({"type": "any"}, True, True),
        ({"type": "tool", "name": "f"}, True, False),
    ],
)
async def test_tools_are_offered_or_required(
    client: httpx2.AsyncClient, api_server: FakeNode, choice: Any, required: bool, parallel: bool
) -> None:
    await client.post(PATH, json=BODY | {"tools": [MESSAGES_TOOL], "tool_choice": choice})

    functions = '[{"name":"f","parameters":{}}]'
    assert api_server.requests[0].tools == Tools(functions, required, parallel)


async def test_no_tools_are_offered(client: httpx2.AsyncClient, api_server: FakeNode) -> None:
    body = {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "none"}}
    await client.post(PATH, json=BODY | body)

    assert api_server.requests[0].tools is None


async def test_calls_and_thoughts_are_blocks(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    api_server.said = ONE_CALL

    said = (await client.post(PATH, json=BODY | {"tools": [MESSAGES_TOOL]})).json()

    thought, text, call = said["content"]
    assert thought == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text == {"type": "text", "text": "I see.", "citations": None}
    assert call.pop("id").startswith("toolu_")
    caller = {"type": "direct"}
    assert call == {"type": "tool_use", "name": "f", "input": {"x": 1}, "caller": caller}
    assert said["stop_reason"] == "tool_use"


async def test_the_content_of_an_answer_can_be_sent_back(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    api_server.said = ONE_CALL
    said = (await client.post(PATH, json=BODY)).json()

    turn = {"role": "assistant", "content": said["content"]}
    again = await client.post(PATH, json=BODY | {"messages": [HI, turn, HI]})

    assert again.status_code == 200
    assert api_server.requests[1].turns[1]["content"] == "I see."


async def test_calls_and_thoughts_stream(client: httpx2.AsyncClient, api_server: FakeNode) -> None:
    api_server.said = ONE_CALL

    events = events_of(await client.post(PATH, json=BODY | {"stream": True}))

    begin, delta, end = (f"content_block_{each}" for each in ("start", "delta", "stop"))
    assert [name for name, _ in events] == [
        "message_start", begin, delta, end, begin, delta, end, begin, delta, delta, end,
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert [data["index"] for name, data in events if name == begin] == [0, 1, 2]
    assert events[8][1]["delta"] == {"type": "input_json_delta", "partial_json": '{"x"'}


async def test_calls_and_their_results_are_turns(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": "done"}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    messages = [
        HI,
        {"role": "assistant", "content": [thought, {"type": "text", "text": "so"}, USED]},
        {"role": "user", "content": [result, {"type": "text", "text": "next"}]},
    ]
    await client.post(PATH, json=BODY | {"messages": messages})

    call = ToolCall("f", '{"x": 1}', "a")
    assert api_server.requests[0].turns[1:] == (
        {"role": "assistant", "content": "so", "tool_calls": (call,)},
        {"role": "tool", "content": "done", "tool_call_id": "a"},
        {"role": "user", "content": "next"},
    )


@pytest.mark.parametrize(
    "written", ['{"x', "[1]", "5", '{"x": NaN}', '{"x": 1e999}', '{"x": "\ud800"}']
)
async def test_a_call_without_an_object_of_json_is_told(
    client: httpx2.AsyncClient, api_server: FakeNode, written: str
) -> None:
    api_server.said = (replace(answer_of("", 5), calls=(ToolCall("f", written),)),)

    said = json.loads((await client.post(PATH, json=BODY)).text, parse_constant=pytest.fail)

    assert said["content"][0]["input"] == {"invalid": written}


async def test_reasoning_has_a_budget(client: httpx2.AsyncClient, api_server: FakeNode) -> None:
    await client.post(PATH, json=BODY | {"thinking": {"type": "enabled", "budget_tokens": 9}})

    assert (api_server.requests[0].thinks, api_server.requests[0].max_reasoning) == (True, 9)
