"""The fields that chat and text completions share."""

from dataclasses import replace
from threading import get_ident
from typing import Any

import httpx2
import pytest

from meshllm import strict_json
from meshllm.api.respond import SHORT_BYTES
from meshllm.request import Request, Sampling, Turn
from tests.builders.bodies import BODY, MESSAGES, PATH, PATHS
from tests.builders.fake_node import FakeNode


@pytest.mark.parametrize("path", [*PATHS, "/v1/messages/count_tokens"])
async def test_every_route_reads_a_long_body_off_the_loop(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    threads = list[int]()

    def parse(data: bytes) -> object:
        threads.append(get_ident())
        return strict_json.parse(data)

    monkeypatch.setattr("meshllm.api.respond.parse", parse)
    body = PATHS.get(path, {"messages": MESSAGES})

    said = await client.post(path, json={"model": "builtin", **body, "x" * SHORT_BYTES: 1})

    assert said.status_code == 400
    assert len(threads) == 1
    assert threads != [get_ident()]


async def test_a_null_field_is_ignored(client: httpx2.AsyncClient, api_server: FakeNode) -> None:
    names = ("stream", "stream_options", "n", "max_tokens", "stop", "temperature", "seed")

    await client.post(PATH, json=BODY | dict.fromkeys(names))

    (request,) = api_server.requests
    assert replace(request, sampling=Sampling()) == Request(turns=(TURN,))


async def test_a_seed_is_drawn_and_shown(client: httpx2.AsyncClient, api_server: FakeNode) -> None:
    shown = [(await client.post(PATH, json=BODY)).json()["meshllm"]["seed"] for _ in range(3)]
    again = await client.post(PATH, json=BODY | {"seed": shown[0]})

    assert len(set(shown)) == 3
    assert [each.sampling.seed for each in api_server.requests] == [*shown, shown[0]]
    assert again.json()["meshllm"] == {"seed": shown[0]}


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63, 2**64 - 1])
async def test_every_seed_of_64_bits_is_accepted(
    client: httpx2.AsyncClient, api_server: FakeNode, seed: int
) -> None:
    said = await client.post(PATH, json=BODY | {"seed": seed})

    assert said.status_code == 200
    assert 0 <= api_server.requests[0].sampling.seed < 2**63


async def test_the_default_temperature_is_openais(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    await client.post(PATH, json=BODY)
    await client.post(PATH, json=BODY | {"temperature": 0})

    assert [each.sampling.temperature for each in api_server.requests] == [1.0, 0.0]


async def test_several_choices_have_seeds_of_their_own(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    said = (await client.post(PATH, json=BODY | {"n": 3, "seed": 2**63 - 1})).json()

    assert [each["index"] for each in said["choices"]] == [0, 1, 2]
    assert [each["message"]["content"] for each in said["choices"]] == ["hello"] * 3
    assert [each.sampling.seed for each in api_server.requests] == [2**63 - 1, 0, 1]
    assert said["usage"]["prompt_tokens"] == 2
    assert said["usage"]["completion_tokens"] == 15


@pytest.mark.parametrize(
    "extra",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"safety_identifier": "x", "prompt_cache_key": "y", "prediction": {"type": "content"}},
        {"modalities": ["text"], "response_format": {"type": "text"}, "tools": []},
        {"tool_choice": "none", "parallel_tool_calls": True, "logprobs": False},
    ],
    ids=range(4),
)
async def test_what_changes_no_answer_is_ignored(
    client: httpx2.AsyncClient, api_server: FakeNode, extra: dict[str, Any]
) -> None:
    said = await client.post(PATH, json=BODY | {"temperature": 0, "seed": 0} | extra)

    assert said.status_code == 200
    assert api_server.requests == [Request(turns=(TURN,))]


TURN: Turn = {"role": "user", "content": "hi"}
