"""Every field of every route does what its manual says."""

import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import httpx2
import pytest
from starlette.routing import Route

from meshllm.api.app import public_routes
from meshllm.api.generation.service import Service
from meshllm.cli.commands.help import topics
from meshllm.request import Event, Request, Tools, Turn
from tests.builders.fake_node import FakeNode
from tests.builders.fake_ring import answer_of
from tests.builders.tool_calls import CHAT_TOOL, MESSAGES_TOOL, RESPONSES_TOOL
from tests.manual.documented import HEADING, ROUTES, DocumentedRoute, with_fields

Said = tuple[int, str, tuple[Request, ...]]
"""The status, the text, and what the mesh was asked."""

HI = Turn(role="user", content="hi")
TOOLS = {"chat": CHAT_TOOL, "responses": RESPONSES_TOOL}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [HI]},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "embeddings": {"input": "hi"},
    "messages": {"messages": [HI], "max_tokens": 9},
    "count_tokens": {"messages": [HI]},
}
HONOURED: dict[str, Any] = {
    "chat_template_kwargs": {"enable_thinking": False},
    "dimensions": 1,
    "echo": True,
    "encoding_format": "base64",
    "frequency_penalty": 0.5,
    "ignore_eos": True,
    "input": "bye",
    "instructions": "be kind",
    "logit_bias": {"7": 1},
    "logprobs": True,
    "max_completion_tokens": 3,
    "max_output_tokens": 3,
    "max_reasoning_tokens": 3,
    "max_tokens": 3,
    "meshllm": {"trust": ["desk"]},
    "messages": [HI | {"content": "bye"}],
    "min_p": 0.5,
    "model": "other",
    "n": 2,
    "parallel_tool_calls": False,
    "presence_penalty": 0.5,
    "previous_response_id": "resp_1",
    "prompt": "bye",
    "reasoning": {"effort": "low"},
    "reasoning_effort": "low",
    "repetition_penalty": 1.5,
    "response_format": {"type": "json_object"},
    "seed": 7,
    "stop": ["."],
    "stop_sequences": ["."],
    "store": False,
    "stream": True,
    "stream_options": {"include_usage": True},
    "system": "be kind",
    "temperature": 0.5,
    "text": {"format": {"type": "json_object"}},
    "thinking": {"type": "disabled"},
    "top_k": 7,
    "top_logprobs": 2,
    "top_p": 0.5,
}
"""Values that change what is answered, or what the mesh is asked."""
NEEDS: dict[str, dict[str, Any]] = {"top_logprobs": {"logprobs": True}}
"""What a field needs beside it."""
NEEDS["stream_options"] = {"stream": True}
_FUNCTIONS = '[{"name":"f","parameters":{}}]'
_BYE = (Turn(role="user", content="bye"),)
ASKED: dict[str, dict[str, Any]] = {
    "chat_template_kwargs": {"thinks": False},
    "echo": {"scores_prompt": True},
    "encoding_format": {},
    "ignore_eos": {"ignores_end": True},
    "input": {"turns": _BYE},
    "input of embeddings": {"raw": "bye"},
    "instructions": {"turns": (Turn(role="system", content="be kind"), HI)},
    "logit_bias": {"logit_bias": ((7, 1.0),)},
    "logprobs": {"logprobs": 0},
    "logprobs of completions": {"logprobs": 1},
    "max_completion_tokens": {"max_tokens": 3},
    "max_output_tokens": {"max_tokens": 3},
    "max_reasoning_tokens": {"max_reasoning": 3},
    "meshllm": {"trusted": ("desk",)},
    "messages": {"turns": _BYE},
    "n": {"requests": 2, "shares_prefix": True},
    "parallel_tool_calls": {"tools": Tools(_FUNCTIONS, is_required=False, parallel=False)},
    "prompt": {"raw": "bye"},
    "reasoning": {"thinks": True, "effort": "low"},
    "reasoning_effort": {"thinks": True, "effort": "low"},
    "response_format": {"schema": '{"type":"object"}'},
    "stop": {"stop": (".",)},
    "stop_sequences": {"stop": (".",)},
    "store": {},
    "stream": {},
    "stream_options": {},
    "system": {"turns": (Turn(role="system", content="be kind"), HI)},
    "text": {"schema": '{"type":"object"}'},
    "thinking": {"thinks": False},
    "tool_choice": {"tools": Tools(_FUNCTIONS, is_required=True, parallel=True)},
    "tools": {"tools": Tools(_FUNCTIONS, is_required=False, parallel=True)},
    "top_logprobs": {"logprobs": 2},
}
"""What a field changes of the request to the mesh, and nothing else; others have one name there."""
REFUSED = {"model", "previous_response_id"}
"""Fields whose values above name what there is not."""
EVERY_FIELD = sorted(frozenset[str]().union(*(each.fields for each in ROUTES)))


def answer(route: DocumentedRoute) -> tuple[Event, ...]:
    """Answer as the ring does, with an embedding of three values where one is asked for."""
    if route.name != "embeddings":
        return ()
    return (replace(answer_of("", 0), embedding="AACAPwAAgD8AAIA/"),)


def honoured(route: DocumentedRoute, field: str) -> tuple[dict[str, Any], object]:
    """Return what a field needs, and a value that changes the answer."""
    calls: dict[str, Any] = {"tools": [TOOLS.get(route.name, MESSAGES_TOOL)]}
    if field == "tools":
        return {}, calls["tools"]
    if field == "tool_choice":
        return calls, "required" if route.name in TOOLS else {"type": "any"}
    if (route.name, field) == ("completions", "logprobs"):
        return {}, 1
    return calls if field == "parallel_tool_calls" else NEEDS.get(field, {}), HONOURED[field]


@pytest.fixture
def _no_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make equal requests give equal answers."""
    monkeypatch.setattr(secrets, "randbelow", lambda _: 5)
    monkeypatch.setattr(secrets, "token_hex", lambda _: "ab")
    monkeypatch.setattr(time, "time", lambda: 1.0)


@pytest.mark.usefixtures("_no_chance")
@pytest.mark.parametrize("route", ROUTES, ids=lambda each: each.name)
async def test_each_field_does_what_the_table_says(
    route: DocumentedRoute,
    client: httpx2.AsyncClient,
    api_server: FakeNode,
    subtests: pytest.Subtests,
) -> None:
    api_server.said = answer(route)
    base = {"model": "builtin", **BODIES[route.name]}

    async def said(**change: Any) -> Said:
        api_server.requests.clear()
        found = await client.post(route.path, json=base | change)
        return found.status_code, found.text, tuple(api_server.requests)

    for field in EVERY_FIELD:
        with subtests.test(field=field):
            await check_field(route, field, said)


async def check_field(
    route: DocumentedRoute, field: str, said: Callable[..., Awaitable[Said]]
) -> None:
    match route.effect(field).split():
        case ["honoured"]:
            needs, value = honoured(route, field)
            plain, changed = await said(**needs), await said(**needs, **{field: value})
            assert plain[0] == 200
            assert changed != plain
            if field in REFUSED:
                assert changed[0] == 404
            else:
                known = ASKED.get(field, {field: value})
                wanted = ASKED.get(f"{field} of {route.name}", known)
                assert (changed[0], changes(plain[2], changed[2])) == (200, wanted)
        case ["ignored"]:
            assert await said(**{field: {"x": "y"}}) == await said()
        case ["only", *_]:
            for value in route.only(field):
                assert await said(**{field: value}) == await said()
            assert_refused(await said(**{field: {"x": "y"}}), route, field)
        case ["refused"] | []:
            assert_refused(await said(**{field: {"x": "y"}}), route, field)
        case other:
            pytest.fail(f"the table says {other}")


def changes(before: Sequence[Request], after: Sequence[Request]) -> dict[str, object]:
    """Return what of a request changed, and the number of requests if that did."""
    one, other = (_parts(each[0]) for each in (before, after))
    found = {name: value for name, value in other.items() if one[name] != value}
    return found | ({} if len(before) == len(after) else {"requests": len(after)})


def _parts(request: Request) -> dict[str, object]:
    parts = {each.name: getattr(request, each.name) for each in fields(request)}
    del parts["sampling"]
    return parts | asdict(request.sampling)


def assert_refused(said: Said, route: DocumentedRoute, field: str) -> None:
    status, text, asked = said
    assert (status, asked) == (400, ())
    assert f"`{field}`" in str(text)
    assert route.name in {"messages", "count_tokens"} or f'"param":"{field}"' in str(text)


@pytest.mark.parametrize("route", ROUTES[:3] + ROUTES[4:5], ids=lambda each: each.name)
async def test_a_seed_that_is_drawn_is_exact_in_javascript(
    route: DocumentedRoute,
    client: httpx2.AsyncClient,
    api_server: FakeNode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(secrets, "randbelow", lambda bound: bound - 1)
    more = {"n": 16} if "n" in route.honoured else {}

    await client.post(route.path, json={"model": "builtin", **BODIES[route.name], **more})

    assert 0 < max(each.sampling.seed for each in api_server.requests) < 2**53


@pytest.mark.parametrize("route", ROUTES, ids=lambda each: each.name)
def test_every_field_is_explained(route: DocumentedRoute) -> None:
    explained = set(re.findall(r"`([a-z_]+)`", topics()["api"].partition(HEADING)[0]))

    assert {each for each in route.honoured | route.harmless if each not in explained} == set()


async def test_every_route_that_takes_a_body_is_in_the_table(service: Service) -> None:
    routes = public_routes(service)

    taken = {
        route.path for route in routes if isinstance(route, Route) and route.methods == {"POST"}
    }

    assert taken == {route.path for route in ROUTES}


def test_a_page_without_the_heading_is_an_error() -> None:
    with pytest.raises(ValueError, match="Every documented field"):
        with_fields("# meshllm-api: x\n")


def test_the_table_replaces_an_old_one_only() -> None:
    once = with_fields(f"# a: b\n\n{HEADING}\nold\n\n## After\n\nkept\n")

    assert with_fields(once) == once
    assert "old" not in once
    assert once.startswith("# a: b\n\n")
    assert once.endswith("\n\n## After\n\nkept\n")
