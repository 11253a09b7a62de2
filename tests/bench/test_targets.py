import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from meshllm.api.app import owner_application
from meshllm.bench.targets import BackendTarget, HttpTarget, TargetAnswer, lines, open_http_target
from meshllm.errors import LinkLost, MeshError, ModelError, NotAuthorised
from meshllm.request import Event, Piece, Prefilled, Request, Sampling
from tests.builders.fake_node import FakeNode
from tests.builders.fake_ring import answer_of

ASKED = Request(
    ids=(1, 2),
    max_tokens=5,
    sampling=Sampling(top_k=3, seed=7),
    model="builtin",
    ignores_end=True,
)


@pytest.fixture
async def client() -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(owner_application(FakeNode()))
    async with httpx2.AsyncClient(transport=transport, base_url="http://node/v1") as client:
        yield client


def answering(status: int, text: str) -> HttpTarget:
    transport = httpx2.MockTransport(lambda _: httpx2.Response(status, text=text))
    return HttpTarget(httpx2.AsyncClient(transport=transport, base_url="http://node/v1"))


async def test_an_api_server_answers_with_its_usage() -> None:
    node, begun = FakeNode(), list[None]()
    transport = httpx2.ASGITransport(owner_application(node))
    async with httpx2.AsyncClient(transport=transport, base_url="http://node/v1") as client:
        answer = await HttpTarget(client).ask(ASKED, lambda: begun.append(None))

    assert answer == TargetAnswer(2, 0, 5)
    assert len(begun) == 3
    assert node.requests == [replace(ASKED, model="")]  # the only one of the fake node


async def test_the_error_of_an_api_server_is_raised(client: httpx2.AsyncClient) -> None:
    with pytest.raises(MeshError, match="`other` is not served here"):
        await HttpTarget(client).ask(replace(ASKED, model="other"), lambda: None)


@pytest.mark.parametrize(
    ("status", "text", "told"),
    [
        (502, "{}", "HTTP status 502"),
        (502, "<html>Bad Gateway</html>", "HTTP status 502"),
        (429, '{"error": {"message": "Too many", "code": null, "param": 1}}', "^Too many$"),
        (404, '{"error": {"message": "No such model", "code": 404}}', "^No such model$"),
        (404, '{"error": "Not found"}', "^Not found$"),
        (200, "data: [1]\n\n", "no JSON object"),
        (200, 'data: {"error": {"message": "It broke", "code": "x"}}\n\n', "It broke"),
        (200, ": patience\n\ndata: [DONE]\n\n", "reported no usage"),
        (200, 'data: {"usage": {"prompt_tokens": "two"}}\n\n', "completion_tokens"),
    ],
)
async def test_what_a_server_must_not_send_is_an_error(status: int, text: str, told: str) -> None:
    with pytest.raises(MeshError, match=told):
        await answering(status, text).ask(ASKED, lambda: None)


async def test_a_text_may_have_other_separators_of_lines() -> None:
    chunk = json.dumps({"choices": [{"text": "a\u2028b\x85c"}]}, ensure_ascii=False)
    usage = json.dumps({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 1}})

    answer = await answering(200, f"data: {chunk}\r\n\r\ndata: {usage}").ask(ASKED, lambda: None)

    assert (answer.prompt_tokens, answer.new_tokens) == (2, 1)


async def test_bytes_that_are_not_utf_8_are_replaced() -> None:
    response = httpx2.Response(200, content=b"data: \xff\r\n\nrest \xff")

    assert [each async for each in lines(response)] == ["data: \ufffd", "", "rest \ufffd"]


async def test_a_server_need_not_tell_its_hits() -> None:
    usage: dict[str, Any] = {"prompt_tokens": 2, "completion_tokens": 5}
    details: list[dict[str, Any]] = [
        {},
        {"prompt_tokens_details": None},
        {"prompt_tokens_details": {}},
    ]
    for more in details:
        text = f"data: {json.dumps({'choices': [], 'usage': usage | more})}\n\n"

        assert await answering(200, text).ask(ASKED, lambda: None) == TargetAnswer(2, 0, 5)


async def test_a_lost_connection_is_named() -> None:
    def lost(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ReadError("reset", request=request)

    transport = httpx2.MockTransport(lost)
    async with httpx2.AsyncClient(transport=transport, base_url="http://node/v1") as client:
        with pytest.raises(LinkLost, match="The connection was lost: reset"):
            await HttpTarget(client).ask(ASKED, lambda: None)


async def test_an_api_server_that_needs_a_key_says_how_to_give_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = json.dumps({"error": {"message": "An API key is required"}})
    transport = httpx2.MockTransport(lambda _: httpx2.Response(401, text=text))
    plain = httpx2.AsyncClient
    monkeypatch.setattr(httpx2, "AsyncClient", lambda **terms: plain(transport=transport, **terms))

    with pytest.raises(NotAuthorised, match="requires a valid API key") as raised:
        async with open_http_target("http://node/v1", None) as api_server:
            await api_server.models()

    assert raised.value.hint == "`--key-file FILE` reads one"


async def test_an_api_server_without_models_tells_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport = httpx2.MockTransport(lambda _: httpx2.Response(502, text="<html>"))
    plain = httpx2.AsyncClient
    monkeypatch.setattr(httpx2, "AsyncClient", lambda **terms: plain(transport=transport, **terms))

    with pytest.raises(MeshError, match="HTTP status 502"):
        async with open_http_target("http://node/v1", None) as api_server:
            await api_server.models()


@pytest.mark.parametrize("more", [{}, {"meshllm": {"aliases": ["b"], "key": "ab" * 8, "new": 1}}])
async def test_an_api_server_lists_its_models(more: dict[str, Any]) -> None:
    text = json.dumps({"data": [{"id": "one", "object": "model", **more}, {"id": "two"}]})

    one, two = await answering(200, text).models()

    assert (one.name, two.name) == ("one", "two")
    assert (one.aliases, one.key) == ((("b",), "ab" * 8) if more else ((), ""))


async def test_an_api_server_that_serves_nothing_replays_nothing() -> None:
    with pytest.raises(ModelError, match="No model is served at"):
        await answering(200, '{"data": []}').models()


async def test_a_backend_answers_with_its_tokens() -> None:
    begun: list[None] = []
    node = FakeNode(said=(Piece("", (1,)), Piece("held"), answer_of("held", 5)))

    answer = await BackendTarget(node).ask(ASKED, lambda: begun.append(None))

    assert (answer.prompt_tokens, answer.new_tokens, len(answer.tokens)) == (2, 5, 5)
    assert len(begun) == 2
    assert node.requests == [ASKED]


async def test_an_engine_that_tells_no_tokens_has_begun_with_its_text() -> None:
    begun: list[None] = []
    counted = replace(answer_of("text", 0), counted=7)
    node = FakeNode(said=(Piece(""), Piece("text"), counted))

    answer = await BackendTarget(node).ask(ASKED, lambda: begun.append(None))

    assert (answer.new_tokens, len(begun)) == (7, 1)


async def test_an_answer_without_an_end_is_lost() -> None:
    class Endless:
        async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
            yield Prefilled(1, 1)

    with pytest.raises(LinkLost, match="no end"):
        await BackendTarget(Endless()).ask(ASKED, lambda: None)
