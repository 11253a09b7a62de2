"""What replies share: their ends, usage and reasons."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import httpx2
import pytest

from meshllm.api.generation.reply import MAX_COMMENT_CHARS, comment
from meshllm.api.respond import KEEP_ALIVE_S
from meshllm.request import FinishReason, Prefilled, Waiting
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
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    api_server.fails_at = 2

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


ASKED = {"model": "builtin", "stream": True}
HI = {**ASKED, "messages": [{"role": "user", "content": "hi"}]}
TOLD = ": waiting: its nodes load it: desk data: {}"
DIALECTS = {
    PATH: (HI, ": patience"),
    "/v1/completions": ({**ASKED, "prompt": "hi"}, ": patience"),
    "/v1/responses": ({**ASKED, "input": "hi"}, ": patience"),
    "/v1/messages": ({**HI, "max_tokens": 9}, 'event: ping\ndata: {"type": "ping"}'),
}


async def first_part(
    client: httpx2.AsyncClient, api_server: FakeNode, advance: Callable[[float], None], path: str
) -> str:
    """Return the first part of a stream in which nothing comes for a while."""
    asking = asyncio.ensure_future(client.post(path, json=DIALECTS[path][0]))
    await api_server.begun.wait()
    advance(KEEP_ALIVE_S)
    asyncio.get_running_loop().call_later(0, api_server.go.set)
    return (await asking).text.split("\n\n")[0]


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_comment_says_what_a_stream_waits_for(
    client: httpx2.AsyncClient, api_server: FakeNode, advance: Callable[[float], None], path: str
) -> None:
    api_server.progress, api_server.waits_at = Waiting("its nodes load it: desk\ndata: {}"), 1

    assert await first_part(client, api_server, advance, path) == TOLD


@pytest.mark.parametrize("path", DIALECTS)
async def test_what_was_awaited_is_not_told_any_more_once_it_is_there(
    client: httpx2.AsyncClient, api_server: FakeNode, advance: Callable[[float], None], path: str
) -> None:
    api_server.progress, api_server.said = (
        Waiting("desk loads it"),
        (Prefilled(1, 2), answer_of("a", 1)),
    )
    api_server.waits_at = 2

    assert await first_part(client, api_server, advance, path) == DIALECTS[path][1]


async def test_a_reply_that_is_not_streamed_says_nothing_of_its_wait(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    api_server.progress = Waiting("desk loads it")

    said = await client.post(PATH, json=BODY)

    assert said.json()["choices"][0]["message"]["content"] == "hello"


def test_a_comment_is_one_line_of_bounded_length() -> None:
    assert comment("a\r\nb\x1b\ud800") == b": a\\x0d b\\x1b\\ud800\n\n"
    assert len(comment("x" * 10_000)) == MAX_COMMENT_CHARS + 4
