"""Text requests to a ring of the built-in model."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from random import Random
from threading import Event as ThreadEvent
from typing import Any

import pytest
import pytest_asyncio
import torch
from jsonschema import Draft202012Validator
from transformers import AutoModelForCausalLM

from meshllm.errors import ContextTooLong, ModelError, UserError
from meshllm.model.files.source import resolve
from meshllm.model.text import tokenizer
from meshllm.model.text.reasoning import ReasoningFormat
from meshllm.model.text.tokenizer import Text
from meshllm.names import NodeId, show
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.node.session.generation import GenerationRequest, Output
from meshllm.node.session.text import RingBackend
from meshllm.request import (
    Answer,
    Event,
    FinishReason,
    Piece,
    Prefilled,
    PromptTokens,
    Request,
    Resumable,
    Sampling,
    Tools,
    Turn,
)
from meshllm.strict_json import WrongField
from tests.builders.json_schemas import draw_schema

ASKED = Request(turns=(Turn(role="user", content="Tell me a story about a fox"),), max_tokens=40)

COUNT: dict[str, Any] = {
    "name": "count",
    "parameters": {
        "type": "object",
        "properties": {"to": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["to"],
        "additionalProperties": False,
    },
}
WAIT: dict[str, Any] = {
    "name": "wait",
    "parameters": {
        "type": "object",
        "properties": {"unit": {"enum": ["s", "min"]}},
        "required": ["unit"],
        "additionalProperties": False,
    },
}


pytestmark = pytest.mark.asyncio(loop_scope="module")

PAIR = RingOptions(nodes=2, inference=InferenceConfig(threads=1))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ring() -> AsyncIterator[LocalRing]:
    async with open_local_ring(resolve("builtin"), PAIR) as ring:
        yield ring


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone() -> AsyncIterator[LocalRing]:
    """One node that does not speculate."""
    plain = RingOptions(inference=InferenceConfig(threads=1, speculation=False))
    async with open_local_ring(resolve("builtin"), plain) as ring:
        yield ring


@pytest_asyncio.fixture(loop_scope="module")
async def new_ring() -> AsyncIterator[LocalRing]:
    """For tests of what is cached or measured, and of what ends a ring."""
    async with open_local_ring(resolve("builtin"), PAIR) as ring:
        yield ring


async def events_of(ring: LocalRing, request: Request) -> tuple[list[Event], Answer]:
    events = [event async for event in ring.generate(request)]
    assert isinstance(events[-1], Answer)
    return events, events[-1]


def pieces_of(events: list[Event]) -> list[Piece]:
    return [event for event in events if isinstance(event, Piece)]


async def test_the_entry_learns_who_asks(ring: LocalRing, monkeypatch: pytest.MonkeyPatch) -> None:
    requester, orders, generate = NodeId(b"o" * 32), list[GenerationRequest](), ring.entry.generate

    def record(order: GenerationRequest) -> AsyncGenerator[Output, None]:
        orders.append(order)
        return generate(order)

    monkeypatch.setattr(ring.entry, "generate", record)
    backend = RingBackend(ring.entry, ring.worker, await ring.model.text(), ring.plan, requester)

    _ = [event async for event in backend.generate(ASKED)]

    assert [order.requester for order in orders] == [requester]


@pytest.mark.parametrize("embeds", [False, True])
async def test_nodes_that_are_not_trusted_are_named(ring: LocalRing, *, embeds: bool) -> None:
    nodes = [stage.node for stage in ring.plan.stages]
    names = dict(zip(nodes, ("attic", "desk", "shed"), strict=False))
    text = await ring.model.text()
    backend = RingBackend(ring.entry, ring.worker, text, ring.plan, name_of=names.__getitem__)

    asked = replace(ASKED, trusted=(), embeds=embeds)
    with pytest.raises(WrongField, match="not trusted: attic, desk") as refused:
        _ = [event async for event in backend.generate(asked)]

    assert refused.value.name == "meshllm.trust"


@pytest.mark.parametrize("embeds", [False, True])
async def test_the_caches_of_a_request_that_names_its_nodes_are_not_handed_over(
    ring: LocalRing, monkeypatch: pytest.MonkeyPatch, *, embeds: bool
) -> None:
    orders, generate = list[GenerationRequest](), ring.entry.generate

    def record(order: GenerationRequest) -> AsyncGenerator[Output, None]:
        orders.append(order)
        return generate(order)

    monkeypatch.setattr(ring.entry, "generate", record)
    trusted = tuple(show(stage.node) for stage in ring.plan.stages)
    asked = Request(raw="A fox", max_tokens=2, embeds=embeds)

    for request in (replace(asked, trusted=trusted), asked):
        await events_of(ring, request)

    assert [order.hands_over for order in orders] == [False, True]


async def test_a_template_that_does_not_end_keeps_no_running_answer_waiting(
    ring: LocalRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chat waits in a thread of its own; texts are answered meanwhile."""
    begun, go = ThreadEvent(), ThreadEvent()
    encode_chat = Text.encode_chat

    def wait(*args: Any) -> list[int]:
        begun.set()
        assert go.wait(60)
        return encode_chat(*args)

    monkeypatch.setattr(Text, "encode_chat", wait)
    chat = asyncio.ensure_future(events_of(ring, ASKED))
    assert await asyncio.to_thread(begun.wait, 60)

    _, answer = await events_of(ring, Request(raw="Once upon a time", max_tokens=20))
    assert len(answer.tokens) == 20
    assert not chat.done()
    go.set()
    _, told = await chat
    assert told.text


async def test_a_tokenizer_that_does_not_end_keeps_no_running_answer_waiting(
    ring: LocalRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = ThreadEvent(), ThreadEvent()
    encode = Text.encode

    def wait(text: Text, words: str) -> list[int]:
        begun.set()
        assert go.wait(60)
        return encode(text, words)

    monkeypatch.setattr(Text, "encode", wait)
    asked = asyncio.ensure_future(events_of(ring, Request(raw="Once upon a time", max_tokens=2)))
    assert await asyncio.to_thread(begun.wait, 60)

    *_, answer = await events_of(ring, ASKED)
    assert answer.text
    assert not asked.done()
    go.set()
    _, told = await asked
    assert len(told.tokens) == 2


async def test_a_long_text_keeps_no_short_one_waiting(
    ring: LocalRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = ThreadEvent(), ThreadEvent()
    encode, long, short = Text.encode, "Once upon a time there was", "Once upon"

    def wait(text: Text, words: str) -> list[int]:
        if words == long:
            begun.set()
            assert go.wait(60)
        return encode(text, words)

    monkeypatch.setattr(Text, "encode", wait)
    monkeypatch.setattr("meshllm.model.text.tokenizer.SHORT_CHARS", len(short))
    asked = asyncio.ensure_future(events_of(ring, Request(raw=long, max_tokens=2)))
    assert await asyncio.to_thread(begun.wait, 60)

    _, answer = await events_of(ring, Request(raw=short, max_tokens=2))
    assert len(answer.tokens) == 2
    assert not asked.done()
    go.set()
    _, told = await asked
    assert len(told.tokens) == 2


class PanicException(BaseException):
    """What a panic of Rust code is in Python."""


@pytest.mark.parametrize("error", [PanicException("no"), TypeError("no"), AttributeError("no")])
@pytest.mark.parametrize(
    ("part", "name", "asked"),
    [
        ("chat template", "_apply_template", ASKED),
        ("tokenizer", "_tokenize", Request(raw="Once")),
    ],
)
async def test_an_error_in_the_code_of_the_tokenizer_is_one_of_the_model(
    new_ring: LocalRing,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    part: str,
    name: str,
    asked: Request,
    error: BaseException,
) -> None:
    def fail(*_: object) -> list[int]:
        raise error

    monkeypatch.setattr(tokenizer, name, fail)
    with pytest.raises(ModelError, match=f"{part} failed: {type(error).__name__}$") as raised:
        await events_of(new_ring, asked)

    assert raised.value.__cause__ is error
    assert "Traceback" in caplog.text


async def test_the_pieces_are_the_text(ring: LocalRing) -> None:
    events, answer = await events_of(ring, ASKED)

    assert answer.text == "".join(event.text for event in events if isinstance(event, Piece))
    assert answer.text == ring.text._tokenizer.decode(answer.tokens, skip_special_tokens=True)
    assert isinstance(events[0], Prefilled)
    assert events[0].total == answer.prompt_tokens


async def test_the_tokens_of_the_prompt_are_reported_on_request(
    ring: LocalRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshllm.node.session.text.LINE_TOKENS", 4)
    text = "once upon a time in a ring of nodes"

    events, answer = await events_of(ring, Request(raw=text, max_tokens=2, reports_prompt=True))
    told = [event for event in events if isinstance(event, PromptTokens)]

    assert [token for each in told for token in each.tokens] == ring.text.encode(text)
    assert [each.start for each in told] == [*range(0, answer.prompt_tokens, 4)]
    assert events[: len(told)] == told
    assert not any(isinstance(event, PromptTokens) for event in (await events_of(ring, ASKED))[0])


async def test_an_answer_continues_behind_end_tokens_on_request(ring: LocalRing) -> None:
    endless = replace(ASKED, ignores_end=True, max_tokens=200)
    _, short = await events_of(ring, replace(ASKED, max_tokens=200))
    count = len(short.tokens)

    _, answer = await events_of(ring, endless)
    _, rest = await events_of(ring, replace(endless, given=answer.tokens[:count]))

    assert (short.finish_reason, answer.finish_reason) == (FinishReason.STOP, FinishReason.LENGTH)
    assert count < len(answer.tokens) == 200
    assert answer.tokens[:count] == short.tokens
    assert rest.tokens == answer.tokens[count:]
    with pytest.raises(WrongField, match="cannot continue"):
        await events_of(ring, replace(endless, schema="{}"))


async def test_the_model_recommends_what_the_request_does_not_set(
    ring: LocalRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = Sampling(temperature=1.5, top_k=9, seed=3)
    _, expected = await events_of(ring, replace(ASKED, sampling=hot))
    defaults = {"temperature": 1.5, "top_k": 9, "top_p": 1.0}
    monkeypatch.setattr(await ring.model.text(), "defaults", defaults)
    seeded = replace(ASKED, sampling=Sampling(seed=3))

    _, recommended = await events_of(ring, replace(seeded, unset=("temperature", "top_k")))
    _, greedy = await events_of(ring, seeded)
    _, partly = await events_of(
        ring, replace(seeded, sampling=replace(hot, top_p=1e-6), unset=("temperature", "top_k"))
    )  # the first of the likeliest tokens, where a `top_k` of 1 keeps all that are equal

    assert recommended.tokens == expected.tokens
    assert expected.tokens != greedy.tokens == partly.tokens


@pytest.mark.parametrize("seed", range(4))
async def test_an_answer_follows_its_schema_on_every_ring(
    ring: LocalRing, alone: LocalRing, seed: int
) -> None:
    schema = json.dumps(draw_schema(Random(seed)))
    asked = replace(ASKED, schema=schema, sampling=Sampling(1.0, seed=seed), max_tokens=120)

    _, answer = await events_of(ring, asked)
    _, same = await events_of(alone, asked)

    assert answer.text == same.text
    if answer.finish_reason is FinishReason.STOP:
        Draft202012Validator(json.loads(schema)).validate(json.loads(answer.text))


async def test_an_answer_that_goes_on_follows_its_schema(ring: LocalRing) -> None:
    schema = json.dumps(draw_schema(Random(1)))
    asked = replace(ASKED, schema=schema, sampling=Sampling(1.0, seed=1), max_tokens=120)
    _, whole = await events_of(ring, asked)

    for cut in (1, len(whole.tokens) // 2, len(whole.tokens) - 1):
        _, rest = await events_of(ring, replace(asked, given=whole.tokens[:cut]))
        assert whole.tokens[:cut] + rest.tokens == whole.tokens


async def test_a_schema_that_is_not_supported_is_refused(ring: LocalRing) -> None:
    with pytest.raises(WrongField, match="not supported: Invalid type"):
        await events_of(ring, replace(ASKED, schema='{"type":"str"}'))


@pytest.mark.parametrize("seed", range(3))
async def test_a_required_call_is_the_same_on_every_ring(
    ring: LocalRing, alone: LocalRing, seed: int
) -> None:
    tools = Tools(json.dumps([COUNT, WAIT]), is_required=True)
    asked = replace(ASKED, tools=tools, sampling=Sampling(1.0, seed=seed), max_tokens=80)

    _, answer = await events_of(ring, asked)
    _, same = await events_of(alone, asked)

    [call] = answer.calls
    schemas = {each["name"]: each["parameters"] for each in (COUNT, WAIT)}
    assert (answer.text, answer.calls) == ("", same.calls)
    assert answer.finish_reason is FinishReason.STOP
    Draft202012Validator(schemas[call.name]).validate(json.loads(call.arguments))


async def test_a_call_goes_on_where_it_was_interrupted(ring: LocalRing) -> None:
    tools = Tools(json.dumps([COUNT]), is_required=True)
    asked = replace(ASKED, tools=tools, max_tokens=80)
    events, whole = await events_of(ring, asked)
    [call], pieces = whole.calls, pieces_of(events)

    for cut in range(1, len(whole.tokens), 5):
        rest, _ = await events_of(ring, replace(asked, given=whole.tokens[:cut]))
        shown = [each for piece in (*pieces[:cut], *pieces_of(rest)) for each in piece.calls]
        assert "".join(each.name for each in shown) == call.name
        assert "".join(each.arguments for each in shown) == call.arguments


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tools": Tools("[{}]")}, "1 to 64 letters"),
        ({"tools": Tools('[{"name": "f"}]'), "schema": "{}"}, "cannot be combined"),
        ({"tools": Tools('[{"name": "f"}]'), "turns": (), "raw": "a"}, "requires a chat"),
        (
            {"tools": Tools('[{"name": "f", "parameters": {"type": 1}}]', is_required=True)},
            "schema is not supported",
        ),
        ({"thinks": True}, "does not reason"),
    ],
)
async def test_what_the_model_cannot_do_is_refused(
    ring: LocalRing, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(WrongField, match=message):
        await events_of(ring, replace(ASKED, **change))


async def test_reasoning_is_closed_in_time(
    ring: LocalRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = await ring.model.text()
    role = text.tail(text.encode_chat(ASKED.turns)).split()[-1]
    token = max(text.words)
    word = text.token_bytes(token).decode()
    style = replace(text.style, reasoning=ReasoningFormat(role, word))
    monkeypatch.setattr(text, "style", style)
    monkeypatch.setattr(text, "markers", {role: 0, word: token})

    _, answer = await events_of(ring, replace(ASKED, max_reasoning=2))
    _, schema = await events_of(ring, replace(ASKED, max_reasoning=2, schema='{"const": 7}'))

    assert answer.tokens[2] == token
    assert answer.reasoning_tokens == 3
    assert answer.reasoning == text._tokenizer.decode(answer.tokens[:2]).strip()
    assert (
        answer.text == text._tokenizer.decode(answer.tokens[3:], skip_special_tokens=True).lstrip()
    )
    assert (schema.text, schema.reasoning) == ("7", answer.reasoning)

    low = replace(ASKED, effort="low", thinks=True, max_tokens=10)
    assert (await events_of(ring, low))[1].reasoning_tokens == 3  # two tokens, and its end
    medium = replace(low, effort="medium")
    assert (await events_of(ring, medium))[1].reasoning_tokens == 6
    for most, count in ((9, 3), (1, 2)):  # the lower limit counts
        _, limited = await events_of(ring, replace(low, max_reasoning=most))
        assert limited.reasoning_tokens == count
    monkeypatch.setattr(text, "style", replace(style, takes_effort=True))
    assert (await events_of(ring, low))[1].reasoning_tokens == 10

    monkeypatch.setattr(text, "markers", {})
    assert (await events_of(ring, low))[1].reasoning_tokens == 10
    with pytest.raises(WrongField, match="cannot be limited"):
        await events_of(ring, replace(ASKED, max_reasoning=2))


async def test_a_prompt_is_only_counted(ring: LocalRing) -> None:
    _, answer = await events_of(ring, replace(ASKED, max_tokens=1))
    events, counted = await events_of(ring, replace(ASKED, max_tokens=0))

    assert (counted.prompt_tokens, counted.tokens) == (answer.prompt_tokens, ())
    assert events == [counted]


async def test_the_stop_text_is_told(ring: LocalRing) -> None:
    _, whole = await events_of(ring, ASKED)
    stop = whole.text.split()[3]
    _, answer = await events_of(ring, replace(ASKED, stop=("xyz", stop)))

    assert (answer.stop_text, whole.stop_text) == (stop, "")


async def test_an_answer_ends_at_its_length_or_its_end_token(ring: LocalRing) -> None:
    _, short = await events_of(ring, replace(ASKED, max_tokens=3))
    _, whole = await events_of(ring, replace(ASKED, max_tokens=1000))

    assert (short.finish_reason, len(short.tokens)) == (FinishReason.LENGTH, 3)
    assert whole.finish_reason is FinishReason.STOP
    assert whole.tokens[-1] in ring.text.end_tokens
    assert len(whole.tokens) < 1000


async def test_a_stop_text_ends_the_answer_and_is_not_in_it(ring: LocalRing) -> None:
    _, whole = await events_of(ring, ASKED)
    stop = whole.text[10:14]

    _, cut = await events_of(ring, replace(ASKED, stop=(stop,)))

    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason is FinishReason.STOP


async def test_figures_come_with_the_answer(new_ring: LocalRing) -> None:
    _, answer = await events_of(new_ring, ASKED)

    assert answer.ttft_ms > 0
    assert answer.ms_per_token > 0
    assert answer.tokens_per_second == pytest.approx(1e3 / answer.ms_per_token)
    assert [hop.rank for hop in answer.hops] == [0, 1]
    assert [hop.span for hop in answer.hops] == [stage.span for stage in new_ring.plan.stages]


async def test_the_parts_of_a_token_sum_to_at_most_its_time(new_ring: LocalRing) -> None:
    _, answer = await events_of(new_ring, ASKED)

    parts = [
        part
        for hop in answer.hops
        for part in (hop.compute_ms, hop.serialise_ms, hop.queue_ms, hop.wire_ms)
    ]

    assert min(parts) >= 0
    assert all(hop.compute_ms > 0 and hop.serialise_ms > 0 for hop in answer.hops)
    assert all(hop.queue_ms > 0 for hop in answer.hops)
    assert sum(parts) <= answer.ms_per_token


async def test_a_raw_prompt_is_used_as_it_is(ring: LocalRing) -> None:
    _, answer = await events_of(ring, Request(raw="Once upon a time", max_tokens=5))

    assert answer.prompt_tokens == len(ring.text.encode("Once upon a time"))


@pytest.mark.parametrize(
    "request_",
    [
        Request(),
        Request(raw=""),
        replace(ASKED, sampling=Sampling(top_p=2.0)),
        replace(ASKED, sampling=Sampling(min_p=-1.0)),
    ],
)
async def test_an_invalid_request_is_refused(ring: LocalRing, request_: Request) -> None:
    with pytest.raises(UserError):
        await events_of(ring, request_)

    assert ring.entry.sessions == 0


SAMPLED = replace(
    ASKED,
    sampling=Sampling(
        temperature=0.9, seed=3, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2
    ),
)


@pytest.mark.parametrize("request_", [ASKED, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("given", [1, 2, 17, 39])
async def test_an_answer_continues_behind_the_tokens_that_were_given(
    ring: LocalRing, request_: Request, given: int
) -> None:
    events, whole = await events_of(ring, request_)
    pieces = [event for event in events if isinstance(event, Piece)]
    assert tuple(token for piece in pieces for token in piece.tokens) == whole.tokens

    _, rest = await events_of(ring, replace(request_, given=whole.tokens[:given]))

    assert rest.tokens == whole.tokens[given:]
    assert "".join(piece.text for piece in pieces[:given]) + rest.text == whole.text
    assert (rest.prompt_tokens, rest.finish_reason) == (whole.prompt_tokens, whole.finish_reason)


async def test_given_tokens_that_are_the_whole_answer_compute_nothing(ring: LocalRing) -> None:
    request = replace(ASKED, max_tokens=1000)
    for asked in (ASKED, request, replace(ASKED, stop=("fox",), max_tokens=1000)):
        events, whole = await events_of(ring, asked)

        again, rest = await events_of(ring, replace(asked, given=whole.tokens))

        assert (rest.tokens, rest.finish_reason) == ((), whole.finish_reason)
        assert rest.text == "".join(e.text for e in events if isinstance(e, Piece) and not e.tokens)
        assert not any(isinstance(event, Prefilled) for event in again)


async def test_an_answer_that_goes_on_tells_what_was_cached_when_it_began(
    new_ring: LocalRing,
) -> None:
    asked = replace(ASKED, turns=(Turn(role="user", content="Tell me a story about a fox. " * 4),))
    for is_cached in (False, True):
        events, whole = await events_of(new_ring, asked)
        *_, resume = (event for event in events if isinstance(event, Resumable))
        assert (whole.cached_tokens > 0) is is_cached
        for given in (9, len(whole.tokens)):
            goes_on = replace(asked, given=whole.tokens[:given], resume=resume)
            again, rest = await events_of(new_ring, goes_on)

            told = [event.cached for event in again if isinstance(event, Resumable)]
            assert {rest.cached_tokens, *told} == {whole.cached_tokens}


@pytest.mark.parametrize("claimed", [-7, 10**9])
async def test_a_claimed_number_of_cached_tokens_is_bounded(
    new_ring: LocalRing, claimed: int
) -> None:
    resume = Resumable("00", (), cached=claimed)

    _, answer = await events_of(new_ring, replace(ASKED, resume=resume, max_tokens=2))

    assert answer.cached_tokens == (answer.prompt_tokens if claimed > 0 else 0)


async def test_a_stop_text_may_begin_in_the_given_tokens(ring: LocalRing) -> None:
    _, whole = await events_of(ring, ASKED)
    stop = whole.text[20:32]
    events, cut = await events_of(ring, replace(ASKED, stop=(stop,)))
    given = len(cut.tokens) - 1
    shown = "".join(e.text for e in events if isinstance(e, Piece) and e.tokens)

    _, rest = await events_of(ring, replace(ASKED, stop=(stop,), given=cut.tokens[:given]))

    assert rest.tokens == cut.tokens[given:]
    assert cut.text.endswith(rest.text)
    assert len(shown) <= len(cut.text)


async def test_a_tokenizer_of_another_model_is_refused(
    ring: LocalRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Text, "encode_chat", lambda *_: [3, 1 << 20])

    with pytest.raises(ModelError, match="tokenizer of the model gives token 1048576, and its"):
        await events_of(ring, ASKED)


@pytest.mark.parametrize("token", [-1, 1 << 40])
async def test_given_tokens_outside_the_vocabulary_are_refused(ring: LocalRing, token: int) -> None:
    with pytest.raises(UserError, match=f"Token {token} of `given` is not in the vocabulary of"):
        await events_of(ring, replace(ASKED, given=(3, token)))
    with pytest.raises(WrongField, match=f"Token {token} of `prompt` is not in") as refused:
        await events_of(ring, replace(ASKED, turns=(), ids=(3, token)))

    assert refused.value.name == "prompt"


async def test_log_probabilities_are_the_same_on_every_ring_and_with_speculation(
    ring: LocalRing, alone: LocalRing
) -> None:
    asked = replace(SAMPLED, logprobs=3)
    events, answer = await events_of(ring, asked)
    told = [each for event in events if isinstance(event, Piece) for each in event.logprobs]

    _, plain = await events_of(ring, SAMPLED)
    assert answer.tokens == plain.tokens == tuple(each.chosen.token for each in told)
    assert b"".join(bytes(each.chosen.bytes) for each in told).decode().strip() == answer.text
    for each in told:
        assert [top.logprob for top in each.top] == sorted(t.logprob for t in each.top)[::-1]
        assert each.chosen.logprob <= each.top[0].logprob
    again, _ = await events_of(alone, asked)
    others = [each for event in again if isinstance(event, Piece) for each in event.logprobs]
    assert [each.chosen.logprob for each in others] == pytest.approx(
        [each.chosen.logprob for each in told], abs=1e-3
    )


async def test_token_ids_are_a_prompt(ring: LocalRing) -> None:
    ids = tuple(ring.text.encode("Once upon a time"))

    _, answer = await events_of(ring, Request(ids=ids, max_tokens=5))
    _, same = await events_of(ring, Request(raw="Once upon a time", max_tokens=5))

    assert (answer.tokens, answer.prompt_tokens) == (same.tokens, len(ids))


async def test_a_bias_decides_the_text(ring: LocalRing) -> None:
    _, answer = await events_of(ring, replace(ASKED, logit_bias=((300, 100.0),), max_tokens=3))

    assert answer.tokens == (300, 300, 300)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"ids": (10**6,), "turns": ()}, "prompt"),
        ({"ids": (-1,), "turns": ()}, "prompt"),
        ({"given": (10**6,)}, "given"),
        ({"logit_bias": ((10**6, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((1, 100.5),)}, "logit_bias"),
        ({"logprobs": 21}, "top_logprobs"),
        ({"logprobs": -1}, "top_logprobs"),
    ],
)
async def test_an_invalid_token_or_amount_is_refused_by_name(
    ring: LocalRing, change: dict[str, Any], name: str
) -> None:
    with pytest.raises(WrongField) as raised:
        await events_of(ring, replace(ASKED, **change))

    assert raised.value.name == name


STORY = "Once upon a time there was a fox. The fox"


@pytest.mark.parametrize("speculation", [True, False], ids=["drafts", "steps"])
@pytest.mark.parametrize("nodes", [1, 3])
async def test_a_prompt_is_scored_as_the_whole_model_does(nodes: int, speculation: bool) -> None:
    config = InferenceConfig(threads=1, speculation=speculation)
    async with open_local_ring(resolve("builtin"), RingOptions(nodes, inference=config)) as ring:
        ids = tuple(ring.text.encode(STORY))
        asked = Request(ids=ids, logprobs=2, max_tokens=3, scores_prompt=True)
        events, answer = await events_of(ring, asked)
        _, plain = await events_of(ring, replace(asked, scores_prompt=False, logprobs=None))

    told = [each for event in events if isinstance(event, Piece) for each in event.logprobs]
    assert answer.tokens == (*ids, *plain.tokens)
    assert tuple(each.chosen.token for each in told) == answer.tokens
    assert answer.text.startswith(STORY)
    assert (answer.prompt_tokens, answer.finish_reason) == (len(ids), FinishReason.LENGTH)
    model = AutoModelForCausalLM.from_pretrained(resolve("builtin").folder, dtype=ring_dtype())
    with torch.inference_mode():
        logits = model(torch.tensor([answer.tokens])).logits[0, :-1].float().log_softmax(-1)
    expected = logits.gather(1, torch.tensor(answer.tokens[1:])[:, None])[:, 0].tolist()
    assert [each.chosen.logprob for each in told[1:]] == pytest.approx(expected, abs=0.15)


def ring_dtype() -> torch.dtype:
    return torch.bfloat16  # as stored


async def test_a_scored_prompt_needs_no_answer_and_continues_anywhere(ring: LocalRing) -> None:
    asked = Request(raw=STORY, logprobs=0, max_tokens=0, scores_prompt=True)
    events, whole = await events_of(ring, asked)

    assert whole.tokens == tuple(ring.text.encode(STORY))
    for given in (1, 5, len(whole.tokens) - 1):
        again, rest = await events_of(ring, replace(asked, given=whole.tokens[:given]))
        told = [event for event in again if isinstance(event, Piece) and event.tokens]
        assert rest.tokens == whole.tokens[given:]
        assert told == [e for e in events if isinstance(e, Piece) and e.tokens][given:]
    one = Request(ids=whole.tokens[:1], logprobs=0, max_tokens=0, scores_prompt=True)
    assert (await events_of(ring, one))[1].tokens == whole.tokens[:1]


async def test_stop_texts_and_end_tokens_of_a_scored_prompt_do_not_end_it(
    ring: LocalRing,
) -> None:
    end = min(ring.text.end_tokens)
    ids = (*ring.text.encode(STORY), end, *ring.text.encode("fox"))
    asked = Request(ids=ids, max_tokens=2, scores_prompt=True, stop=("fox",))

    _, answer = await events_of(ring, asked)

    assert answer.tokens[: len(ids)] == ids
    assert len(answer.tokens) > len(ids)


async def test_penalties_do_not_count_a_scored_prompt(ring: LocalRing) -> None:
    sampling = Sampling(temperature=0.8, seed=4, frequency_penalty=2, presence_penalty=2)
    asked = Request(raw=STORY, sampling=sampling, max_tokens=12)

    _, plain = await events_of(ring, asked)
    _, scored = await events_of(ring, replace(asked, scores_prompt=True))

    assert scored.tokens[scored.prompt_tokens :] == plain.tokens


async def test_a_prompt_of_too_many_characters_is_refused_with_a_hint(ring: LocalRing) -> None:
    with pytest.raises(ContextTooLong, match="more than that many tokens can have") as refused:
        await events_of(ring, Request(raw="a" * 64 * (ring.entry.context + 1)))

    assert refused.value.hint == "shorten the prompt or the chat"


async def test_a_prompt_to_score_must_fit(ring: LocalRing) -> None:
    longest = ring.entry.context
    for ids in ((5,) * longest, (5,) * (longest + 7)):
        with pytest.raises(ContextTooLong, match="prompt to score"):
            await events_of(ring, Request(ids=ids, max_tokens=1, scores_prompt=True))


@pytest.mark.parametrize("is_shared", [True, False])
async def test_requests_that_share_a_text_continue_copies_of_its_cache(
    new_ring: LocalRing, is_shared: bool
) -> None:
    _, first = await events_of(new_ring, ASKED)
    told = Turn(role="assistant", content=first.text)
    more = [
        replace(
            ASKED,
            turns=(*ASKED.turns, told, Turn(role="user", content=text)),
            shares_prefix=is_shared,
        )
        for text in ("And then?", "Why is that?")
    ]

    answers = [
        answer for _, answer in await asyncio.gather(*(events_of(new_ring, a) for a in more))
    ]

    known = first.prompt_tokens + len(first.tokens) - 1
    assert [answer.cached_tokens >= known - 4 for answer in answers] == [True, is_shared]


async def test_more_tokens_than_the_context_are_not_taken_as_given(ring: LocalRing) -> None:
    given = (5,) * (ring.entry.context + 1)

    with pytest.raises(ContextTooLong, match=f"{len(given)} are given"):
        await events_of(ring, Request(raw="hi", given=given, max_tokens=2 * len(given)))
