"""Requests to engines, and what their chunks say."""

import json
from dataclasses import replace
from typing import Any

import pytest

from meshllm.node.provider.engine_json import (
    MAX_COUNT,
    SEEDS,
    AnswerState,
    call_of,
    offers_of,
)
from meshllm.protocol.membership.records import MAX_OFFERS, ModelOffer
from meshllm.request import (
    NEVER,
    TYPICAL_TOKENS,
    FinishReason,
    Piece,
    Request,
    Sampling,
    ToolCall,
    ToolCallDelta,
    Tools,
)
from meshllm.strict_json import WrongField

CHAT = Request(({"role": "user", "content": "hi"},), model="fox", max_tokens=9)
HEAD = {
    "model": "fox", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 9,
}  # fmt: skip


def chunk(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def test_a_chat_asks_with_what_is_set_only() -> None:
    path, body = call_of(CHAT)

    assert path == "/chat/completions"
    assert body == HEAD | {
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0.0, "top_p": 1.0, "seed": 0,
    }  # fmt: skip


def test_all_that_a_chat_may_ask_for() -> None:
    call = ToolCall("f", "{}", "a")
    asked = replace(
        CHAT,
        turns=(
            {"role": "assistant", "content": "", "tool_calls": (call,)},
            {"role": "tool", "content": "done", "tool_call_id": "a"},
        ),
        sampling=Sampling(0.5, 9, 0.9, 0.1, 1.1, 0.2, 0.3, seed=SEEDS + 7),
        stop=("END",), logit_bias=((5, 1.0),), logprobs=3, schema='{"type":"null"}',
        tools=Tools('[{"name":"f"}]', is_required=True, parallel=False), thinks=False, effort="low",
        ignores_end=True,
    )  # fmt: skip

    _, body = call_of(asked)

    function = {"name": "f", "arguments": "{}"}
    form = {"name": "answer", "schema": {"type": "null"}, "strict": True}
    assert body == HEAD | {
        "temperature": 0.5, "top_k": 9, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1,
        "frequency_penalty": 0.2, "presence_penalty": 0.3, "seed": 7, "stop": ["END"],
        "logit_bias": {"5": 1.0}, "logprobs": True, "top_logprobs": 3,
        "response_format": {"type": "json_schema", "json_schema": form},
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required", "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low",
        "ignore_eos": True,
        "messages": [
            {
                "role": "assistant", "content": "",
                "tool_calls": [{"id": "a", "type": "function", "function": function}],
            },
            {"role": "tool", "content": "done", "tool_call_id": "a"},
        ],
    }  # fmt: skip


def test_the_engine_chooses_what_the_request_leaves_to_the_model() -> None:
    _, body = call_of(replace(CHAT, unset=("temperature", "top_p")))

    assert not {"temperature", "top_p"} & body.keys()


@pytest.mark.parametrize(("prompt", "sent"), [({"raw": "Once"}, "Once"), ({"ids": (1, 2)}, [1, 2])])
def test_a_raw_prompt_is_a_completion(prompt: dict[str, Any], sent: object) -> None:
    path, body = call_of(replace(CHAT, turns=(), **prompt))

    assert (path, body["prompt"]) == ("/completions", sent)


def test_an_engine_ends_a_chat_without_a_limit_and_a_completion_gets_one() -> None:
    _, chat = call_of(replace(CHAT, max_tokens=None))
    _, completion = call_of(replace(CHAT, turns=(), raw="Once", max_tokens=None))

    assert "max_tokens" not in chat
    assert completion["max_tokens"] == TYPICAL_TOKENS


@pytest.mark.parametrize(
    ("asked", "most"),
    [
        (replace(CHAT, max_tokens=9, bound=7), 9),
        (replace(CHAT, turns=(), raw="Once", max_tokens=None, bound=7), 7),
        (replace(CHAT, turns=(), raw="Once", max_tokens=None, bound=1 << 20), TYPICAL_TOKENS),
    ],
)
def test_a_text_of_an_engine_is_limited_by_a_quota(asked: Request, most: int) -> None:
    assert call_of(asked)[1]["max_tokens"] == most


def test_the_quota_of_a_chat_is_not_sent_to_engines_that_may_refuse_it() -> None:
    assert "max_tokens" not in call_of(replace(CHAT, max_tokens=None, bound=1 << 20))[1]


@pytest.mark.parametrize(
    "change",
    [
        {"scores_prompt": True},
        {"max_tokens": 0},
        {"max_reasoning": 9},
        {"turns": (), "raw": "a", "embeds": True},
        {"turns": (), "raw": "a", "logprobs": 1},
    ],
)
def test_what_no_engine_does_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(WrongField):
        call_of(replace(CHAT, **change))


def test_chunks_become_pieces() -> None:
    state = AnswerState()
    function = {"name": "f", "arguments": '{"a"'}

    pieces = [
        state.take(each)
        for each in (
            chunk(role="assistant", content=""),
            chunk(reasoning_content="Hm."),
            chunk(reasoning="Hm."),
            chunk(content="Hi"),
            chunk(tool_calls=[{"index": 0, "id": "a", "function": function}]),
            chunk(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": ":1}"}}]),
            {"choices": [{"text": "raw", "finish_reason": "length"}]},
            {
                "choices": [],
                "usage": {
                    "prompt_tokens": 3,
                    "completion_tokens": 4,
                    "prompt_tokens_details": {"cached_tokens": 2},
                },
            },
        )
    ]

    assert pieces == [
        None,
        Piece("", reasoning="Hm."),
        Piece("", reasoning="Hm."),
        Piece("Hi"),
        Piece("", calls=(ToolCallDelta(0, "f", '{"a"'),)),
        Piece("", calls=(ToolCallDelta(0, "", ":1}"),)),
        Piece("raw"),
        None,
    ]
    assert (state.finish, state.pieces) == (FinishReason.LENGTH, 6)
    assert (state.prompt_tokens, state.cached_tokens, state.completion_tokens) == (3, 2, 4)


def test_log_probabilities_are_told() -> None:
    entry = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}
    told = {"content": [entry | {"top_logprobs": [{"token": "Ho", "logprob": -1}]}]}

    piece = AnswerState().take({"choices": [{"delta": {"content": "Hi"}, "logprobs": told}]})

    assert piece is not None
    [found] = piece.logprobs
    assert (found.chosen.text, found.chosen.bytes, found.chosen.logprob) == ("Hi", (72, 105), -0.5)
    assert (found.top[0].text, found.top[0].bytes) == ("Ho", (72, 111))


@pytest.mark.parametrize(
    "odd",
    [
        {}, {"choices": None}, {"choices": [None]}, {"choices": [{}]}, {"usage": 3},
        {"choices": [{"delta": {"content": 3, "tool_calls": [None, {"function": 3}, {}]}}]},
        {"choices": [{"delta": {}, "logprobs": {"content": [None]}}]},
        {"usage": {"prompt_tokens": "many", "prompt_tokens_details": []}},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_odd_chunks_say_nothing(odd: dict[str, Any]) -> None:
    assert AnswerState().take(odd) is None


@pytest.mark.parametrize("written", ["-Infinity", "NaN", "-1e999", f"-{'9' * 400}"])
def test_a_log_probability_that_json_lacks_is_that_of_what_cannot_be(written: str) -> None:
    entry = json.loads(f'{{"token": "Hi", "logprob": {written}, "bytes": [72, 256]}}')

    piece = AnswerState().take({"choices": [{"delta": {}, "logprobs": {"content": [entry]}}]})

    assert piece
    [found] = piece.logprobs
    assert (found.chosen.logprob, found.chosen.bytes) == (NEVER, (72, 105))


def test_reasoning_is_counted_and_a_stop_text_is_told() -> None:
    state = AnswerState()

    state.take({"choices": [{"delta": {}, "finish_reason": "stop", "stop_reason": "END"}]})
    state.take({"choices": [], "usage": {"completion_tokens_details": {"reasoning_tokens": 7}}})
    assert (state.stop_text, state.reasoning_tokens) == ("END", 7)

    state.take({"choices": [{"delta": {}, "finish_reason": "stop", "stop_reason": 151643}]})
    assert state.stop_text == ""


def test_absurd_counts_are_bounded() -> None:
    state = AnswerState()

    state.take({"usage": {"prompt_tokens": 10**400, "completion_tokens": -5}})

    assert (state.prompt_tokens, state.completion_tokens) == (MAX_COUNT, 0)


def test_the_models_of_an_engine() -> None:
    listed = {
        "data": [
            {"id": "a", "max_model_len": 4096},
            {"id": "b", "meta": {"n_ctx_train": 2048}},
            {"id": "c", "max_model_len": -1},
            {"id": ""}, {"id": 3}, {"id": "x" * 600}, {"id": "\ud800"}, None,
        ]
    }  # fmt: skip

    assert offers_of(listed, "bf16") == (
        ModelOffer("a", "bf16", 4096),
        ModelOffer("b", "bf16", 2048),
        ModelOffer("c", "bf16", 0),
    )
    assert len(offers_of({"data": [{"id": str(each)} for each in range(99)]}, "")) == MAX_OFFERS
    assert offers_of([], "") == offers_of({"data": 3}, "") == ()
