import asyncio
import json
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import httpx2
import pytest

from meshllm.api.v1 import completions
from meshllm.errors import ContextTooLong
from meshllm.request import Logprob, Piece, TokenLogprobs
from meshllm.status import ModelStatus
from tests.builders.fake_node import FOX, FakeNode
from tests.builders.fake_ring import answer_of

PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": "builtin", "prompt": "hi", "temperature": 0, "seed": 1}
TOLD = TokenLogprobs(
    Logprob(5, "hel", (104, 101, 108), -0.5),
    (Logprob(6, "\ufffd", (240,), -0.1), Logprob(7, "\ufffd", (241,), -0.7)),
)


def chunks_of(said: httpx2.Response) -> list[Any]:
    data = [part.removeprefix("data: ") for part in said.text.split("\n\n") if part]
    return [json.loads(each) if each.startswith("{") else each for each in data]


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every piece of the fake node have a token with its log probability."""
    monkeypatch.setattr("tests.builders.fake_node.Piece", lambda text: Piece(text, (5,), (TOLD,)))


async def test_a_completion(client: httpx2.AsyncClient, api_server: FakeNode) -> None:
    said = (await client.post(PATH, json=BODY)).json()

    assert said.pop("id").startswith("cmpl-")
    assert type(said.pop("created")) is int
    assert said == {
        "object": "text_completion",
        "model": "builtin",
        "system_fingerprint": "fp_0123456789ab",
        "choices": [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 5,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "meshllm": {"seed": 1},
    }
    (asked,) = api_server.requests
    assert (asked.raw, asked.max_tokens, asked.scores_prompt) == ("hi", 16, False)


async def test_end_tokens_are_ignored_on_request(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    for given in ({}, {"ignore_eos": True}, {"ignore_eos": False}):
        await client.post(PATH, json=BODY | given)

    assert [each.ignores_end for each in api_server.requests] == [False, True, False]


@pytest.mark.parametrize(
    ("prompt", "raw", "ids"),
    [
        ("a", ["a"], [()]),
        (["a", "b"], ["a", "b"], [(), ()]),
        ([1, 2], [None], [(1, 2)]),
        ([[1, 2], [3]], [None, None], [(1, 2), (3,)]),
    ],
)
async def test_the_four_forms_of_a_prompt(
    client: httpx2.AsyncClient, api_server: FakeNode, prompt: object, raw: list[Any], ids: list[Any]
) -> None:
    said = (await client.post(PATH, json=BODY | {"prompt": prompt, "n": 2})).json()

    count = len(raw)
    assert [each["index"] for each in said["choices"]] == [*range(2 * count)]
    assert [each.raw for each in api_server.requests[::2]] == raw
    assert [each.ids for each in api_server.requests[::2]] == ids
    assert [each.sampling.seed for each in api_server.requests] == [1, 2] * count
    assert said["usage"]["prompt_tokens"] == 2 * count
    assert said["usage"]["completion_tokens"] == 5 * 2 * count


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"prompt": None}, "prompt", "missing_required_parameter"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [[]]}, "prompt", "invalid_value"),
        ({"prompt": ["a", ""]}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 257}, "prompt", "invalid_value"),
        ({"prompt": 1}, "prompt", "invalid_type"),
        ({"prompt": [True]}, "prompt", "invalid_type"),
        ({"prompt": [1, "a"]}, "prompt", "invalid_type"),
        ({"prompt": [[1, [2]]]}, "prompt", "invalid_type"),
        ({"prompt": {"a": 1}}, "prompt", "invalid_type"),
        ({"prompt": ["a"] * 17, "n": 16}, "n", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": -1, "echo": True}, "max_tokens", "invalid_value"),
        ({"logprobs": -1}, "logprobs", "invalid_value"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"logprobs": True}, "logprobs", "invalid_type"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"best_of": 2}, "best_of", "unsupported_parameter"),
        ({"messages": []}, "messages", "unsupported_parameter"),
    ],
    ids=range(20),
)
async def test_what_is_not_supported_is_refused_by_name(
    client: httpx2.AsyncClient, api_server: FakeNode, change: dict[str, Any], param: str, code: str
) -> None:
    said = await client.post(PATH, json=BODY | change)

    error = said.json()["error"]
    assert (said.status_code, error["param"], error["code"]) == (400, param, code)
    assert api_server.requests == []


async def test_log_probabilities_of_a_completion(
    client: httpx2.AsyncClient, api_server: FakeNode, scored: None
) -> None:
    said = (await client.post(PATH, json=BODY | {"logprobs": 2})).json()

    assert said["choices"][0]["logprobs"] == {
        "tokens": ["hel", "hel"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"hel": -0.5, "\ufffd": -0.1}] * 2,
        "text_offset": [0, 3],
    }
    assert (api_server.requests[0].logprobs, api_server.requests[0].scores_prompt) == (2, False)


async def test_the_parts_of_a_character_have_its_offset(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    spelled = b"a", b"\xf0\x9f", b"\x98", b"\x80", b"b"
    texts = "a", "", "", "\U0001f600", "b"
    api_server.said = (
        *(
            Piece(text, (place,), (TokenLogprobs(Logprob(place, "", tuple(part), -0.5)),))
            for place, (text, part) in enumerate(zip(texts, spelled, strict=True))
        ),
        answer_of("".join(texts), len(texts)),
    )

    said = (await client.post(PATH, json=BODY | {"logprobs": 0})).json()

    assert said["choices"][0]["logprobs"]["text_offset"] == [0, 1, 1, 1, 2]


async def test_log_probabilities_are_laid_out_as_they_come(
    client: httpx2.AsyncClient, api_server: FakeNode, scored: None
) -> None:
    api_server.waits_at = 3
    with patch.object(completions, "_top", wraps=completions._top) as laid_out:
        asking = asyncio.ensure_future(client.post(PATH, json=BODY | {"logprobs": 2}))
        await api_server.begun.wait()
        laid_out_before = laid_out.call_count
        api_server.go.set()
        await asking

    assert (laid_out_before, laid_out.call_count) == (2, 2)


async def test_an_echoed_prompt_is_scored_but_for_its_first_token(
    client: httpx2.AsyncClient, api_server: FakeNode, scored: None
) -> None:
    asked = BODY | {"logprobs": 1, "echo": True, "max_tokens": 0}
    said = (await client.post(PATH, json=asked)).json()

    told = said["choices"][0]["logprobs"]
    assert told["token_logprobs"] == [None, -0.5]
    assert told["top_logprobs"] == [None, {"hel": -0.5, "\ufffd": -0.1}]
    assert said["usage"]["completion_tokens"] == 3
    assert (api_server.requests[0].max_tokens, api_server.requests[0].scores_prompt) == (0, True)


async def test_a_stream_has_the_same_parts(client: httpx2.AsyncClient, scored: None) -> None:
    asked = BODY | {
        "stream": True, "logprobs": 0, "echo": True, "stream_options": {"include_usage": True}
    }  # fmt: skip
    *chunks, usage, done = chunks_of(await client.post(PATH, json=asked))

    parts = [chunk["choices"][0] for chunk in chunks]
    assert [part["text"] for part in parts] == ["hello", " w\u2028rld", ""]
    assert [part["finish_reason"] for part in parts] == [None, None, "stop"]
    assert [part["logprobs"] and part["logprobs"]["text_offset"] for part in parts] == [
        [0],
        [3],
        None,
    ]
    assert [part["logprobs"]["token_logprobs"] for part in parts[:2]] == [[None], [-0.5]]
    assert [part["logprobs"]["top_logprobs"] for part in parts[:2]] == [None, None]
    assert (usage["choices"], done) == ([], "[DONE]")
    assert usage["usage"]["prompt_tokens"] == 2


async def test_a_late_error_is_the_last_event(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    api_server.fails_at = 2

    *_, last = chunks_of(await client.post(PATH, json=BODY | {"stream": True}))

    assert last["error"]["message"] == "It broke; mend it"


async def test_a_prompt_that_is_too_long_is_named(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    api_server.fails_at, api_server.error = 0, ContextTooLong("A prompt of 9 tokens")

    said = await client.post(PATH, json=BODY)

    error = said.json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


async def test_ids_are_left_to_the_choice_between_several_providers(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    api_server.provided = (replace(FOX, context=4, providers=("gpu", "desk")),)
    asked = [(4, 0), (5, 0), (5, 3), (5, 8)]

    for count, least in asked:
        fields = {"prompt": [1] * count, "meshllm": {"min_context": least}}
        said = await client.post(PATH, json=BODY | fields | {"model": "fox"})
        assert said.status_code == 200

    assert [each.min_context for each in api_server.requests] == [0, 0, 3, 8]


async def test_more_ids_than_the_model_takes_are_not_sent_to_the_entry(
    client: httpx2.AsyncClient, api_server: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def models(_: FakeNode) -> list[ModelStatus]:
        known = api_server.report().model
        assert known
        return [replace(known, context=4)]

    monkeypatch.setattr(FakeNode, "models", models)

    said = [(await client.post(PATH, json=BODY | {"prompt": [1] * count})) for count in (4, 5)]

    assert [each.status_code for each in said] == [200, 400]
    assert said[1].json()["error"]["code"] == "context_length_exceeded"
    assert [each.ids for each in api_server.requests] == [(1,) * 4]
