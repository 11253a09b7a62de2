"""What replies share: their ends, usage and reasons."""

from dataclasses import replace

import httpx2
import pytest

from meshllm.request import FinishReason
from tests.builders.bodies import BODY, PATH, STREAM, chunks_of
from tests.builders.fake_node import FakeNode
from tests.builders.fake_ring import answer_of


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
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)


async def test_a_late_error_of_a_stream_is_its_last_event(
    client: httpx2.AsyncClient, door: FakeNode
) -> None:
    door.fails_at = 2

    *_, last = chunks_of(await client.post(PATH, json=STREAM))

    assert last["error"]["message"] == "It broke; mend it"


async def test_an_answer_of_max_tokens_has_the_reason_length(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = replace(answer_of("x", 1), finish_reason=FinishReason.LENGTH)
    monkeypatch.setattr("tests.builders.fake_node.answer_of", lambda *_: cut)

    said = (await client.post(PATH, json=BODY)).json()

    assert said["choices"][0]["finish_reason"] == "length"


async def test_a_stream_of_several_choices_ends_once(client: httpx2.AsyncClient) -> None:
    options = {"n": 2, "stream_options": {"include_usage": True}}
    *chunks, usage, done = chunks_of(await client.post(PATH, json=STREAM | options))

    for index in (0, 1):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [each["delta"] for each in own] == [
            {"role": "assistant", "content": ""},
            {"content": "hello"},
            {"content": " w\u2028rld"},
            {},
        ]
        assert own[-1]["finish_reason"] == "stop"
    assert (usage["choices"], usage["usage"]["completion_tokens"], done) == ([], 10, "[DONE]")
