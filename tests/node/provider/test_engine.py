"""An engine over HTTP: answers, errors and cancellation."""

import ssl
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import pytest

from meshllm.errors import (
    Busy,
    LinkLost,
    MeshError,
    ModelMissing,
    PeerFault,
    TimedOut,
    UserError,
)
from meshllm.node.provider import EngineClient, engine
from meshllm.protocol.membership.records import ModelOffer
from meshllm.request import Answer, Event, FinishReason, Piece, Request
from tests.builders.fake_engine import FakeEngine, serving
from tests.builders.waiting import until

pytestmark = pytest.mark.socket


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def url(fake: FakeEngine) -> AsyncIterator[str]:
    async with serving(fake) as url:
        yield url


def asking(text: str) -> Request:
    return Request(({"role": "user", "content": text},), model="fox")


async def events_of(url: str, text: str) -> list[Event]:
    return [event async for event in EngineClient(url).generate(asking(text))]


async def test_an_answer(fake: FakeEngine, url: str) -> None:
    *pieces, answer = [each async for each in EngineClient(url, "secret").generate(asking("to be"))]

    assert pieces == [Piece("to "), Piece("be ")]
    assert isinstance(answer, Answer)
    assert (answer.text, answer.finish_reason) == ("to be ", FinishReason.STOP)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.tokens) == (3, 2, ())
    [(body, key)] = fake.asked
    assert (body["model"], key) == ("fox", "Bearer secret")


@pytest.mark.parametrize(
    ("bound", "text", "reason"),
    [(2, "to be ", FinishReason.LENGTH), (9, "to be or not ", FinishReason.STOP)],
)
async def test_an_answer_is_as_long_as_the_quota_allows(
    fake: FakeEngine, url: str, bound: int, text: str, reason: FinishReason
) -> None:
    asked = replace(asking("to be or not"), bound=bound)

    *_, answer = [each async for each in EngineClient(url).generate(asked)]

    assert isinstance(answer, Answer)
    assert (answer.text, answer.finish_reason) == (text, reason)
    assert answer.completion_tokens == min(bound, 4)
    assert answer.prompt_tokens > 0
    assert "max_tokens" not in fake.asked[0][0]


@pytest.mark.parametrize("url", ["http://[::1/v1", "http:///v1", "http://a:x/v1", "ftp://a/v1"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="Invalid URL"):
        EngineClient(url)


def test_https_in_capitals_has_authorities(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    monkeypatch.setattr("ssl.create_default_context", lambda: made)

    assert EngineClient("HTTPS://127.0.0.1:1/v1")._tls is made


@pytest.mark.parametrize("key", ["a\nb", "caf\u00e9"])
def test_a_key_that_is_not_valid_in_a_header_is_refused(key: str) -> None:
    with pytest.raises(UserError, match="printable ASCII"):
        EngineClient("http://127.0.0.1:1/v1", key)


async def test_its_models(url: str) -> None:
    assert await EngineClient(url, precision="bf16").models() == (ModelOffer("fox", "bf16", 2048),)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, UserError),
        (404, ModelMissing),
        (429, Busy),
        (503, Busy),
        (401, MeshError),
        (500, MeshError),
        (502, LinkLost),
        (504, TimedOut),
    ],
)
async def test_a_refusal_keeps_its_kind_and_text(
    fake: FakeEngine, url: str, status: int, kind: type[MeshError]
) -> None:
    fake.status = status

    with pytest.raises(kind) as raised:
        await events_of(url, "hi")

    assert type(raised.value) is kind
    assert str(raised.value) == f"The engine refused ({status}): no way"


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("so cut", LinkLost, "before the answer was complete"),
        ("so fail", MeshError, "The engine failed: out of memory"),
        ("so odd", PeerFault, "invalid JSON"),
    ],
)
async def test_an_answer_that_breaks_ends_with_an_error(
    url: str, text: str, kind: type[MeshError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        await events_of(url, text)


async def test_an_engine_that_is_not_there() -> None:
    with pytest.raises(LinkLost, match="No engine answers"):
        await EngineClient("http://127.0.0.1:9/v1").models()


async def test_an_engine_that_moved_says_where(fake: FakeEngine, url: str) -> None:
    fake.location = "https://127.0.0.1/v1/models"

    with pytest.raises(MeshError, match=r"refused \(307\): moved to https://127.0.0.1/v1/models"):
        await EngineClient(url).models()


async def test_an_engine_that_sends_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "IDLE_S", 0.2)

    with pytest.raises(TimedOut, match="sent nothing for too long"):
        await events_of(url, "so wait")


async def test_an_engine_that_sends_too_much(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MAX_LINE_BYTES", 8)

    with pytest.raises(PeerFault, match="more than 8 bytes"):
        await EngineClient(url).models()


async def test_closing_an_answer_disconnects(fake: FakeEngine, url: str) -> None:
    async with aclosing(EngineClient(url).generate(asking("so wait"))) as events:
        await anext(events)

    await until(lambda: fake.closed)  # the server notices it a little later


async def test_named_models_are_offered_with_what_is_known_of_them(url: str) -> None:
    engine = EngineClient(url, precision="bf16", names={"short": "fox", "other": "unlisted"})

    assert await engine.models() == (ModelOffer("short", "bf16", 2048), ModelOffer("other", "bf16"))


async def test_named_models_need_no_list(fake: FakeEngine, url: str) -> None:
    fake.list_status = 500
    named = EngineClient(url, names={"short": "fox"})

    assert await named.models() == (ModelOffer("short"),)
    with pytest.raises(MeshError, match="refused"):
        await EngineClient(url).models()


async def test_named_models_wait_for_an_engine_that_loads(fake: FakeEngine, url: str) -> None:
    fake.list_status = 503

    with pytest.raises(Busy):
        await EngineClient(url, names={"short": "fox"}).models()


async def test_the_engine_is_asked_by_its_own_name(fake: FakeEngine, url: str) -> None:
    named = EngineClient(url, names={"short": "fox"})

    async with aclosing(named.generate(replace(asking("to be"), model="short"))) as events:
        _ = [each async for each in events]

    assert fake.asked[-1][0]["model"] == "fox"
