"""The bodies and events of an engine with OpenAI's API."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshllm.protocol.membership.records import MAX_CONTEXT, MAX_OFFERS, ModelOffer
from meshllm.protocol.planning.plan import MAX_NAME_BYTES
from meshllm.request import (
    NEVER,
    FinishReason,
    Logprob,
    Piece,
    Request,
    Sampling,
    TokenLogprobs,
    ToolCallDelta,
    openai_message,
)
from meshllm.strict_json import WrongField

CHAT, COMPLETIONS = "/chat/completions", "/completions"
SEEDS = 1 << 31  # engines differ; all take these
MAX_COUNT = 1 << 32  # of tokens or calls
_CONTEXT_FIELDS = ("max_model_len", "context_length", "context_window", "n_ctx")
_PLAIN = Sampling()
_NOT_OPENAIS = ("top_k", "min_p", "repetition_penalty")
_PENALTIES = ("frequency_penalty", "presence_penalty")


def call_of(request: Request) -> tuple[str, dict[str, Any]]:
    """Return the path and the body that ask an engine; raise `WrongField` for what none can do."""
    if refused := request.beyond_engines:
        raise WrongField(*refused)
    body: dict[str, Any] = {
        "model": request.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        **_sampling(request),
    }
    if (most := _most_tokens(request)) is not None:
        body["max_tokens"] = most
    if request.stop:
        body["stop"] = list(request.stop)
    if request.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in request.logit_bias}
    if request.ignores_end:
        body["ignore_eos"] = True
    if not request.turns:
        body["prompt"] = list(request.ids) if request.ids else request.raw or ""
        return COMPLETIONS, body
    return CHAT, body | _chat(request)


def _most_tokens(request: Request) -> int | None:
    """Return the limit of an answer; engines take 16 for a text without one, as OpenAI does.

    Of a chat without one, `Request.bound` is left to `Engine.generate`: some engines refuse what is
    longer than their context.
    """
    if request.max_tokens is not None or request.turns:
        return request.max_tokens
    most = request.expected_tokens
    return most if request.bound is None else min(most, request.bound)


def _sampling(request: Request) -> dict[str, Any]:
    """Return the sampling parameters that are set; engines without others do not see them."""
    sampling = request.sampling
    always = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    others = {
        name: getattr(sampling, name)
        for name in (*_NOT_OPENAIS, *_PENALTIES)
        if getattr(sampling, name) != getattr(_PLAIN, name)
    }
    found = {**always, **others, "seed": sampling.seed % SEEDS}
    return {name: value for name, value in found.items() if name not in request.unset}


def _chat(request: Request) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [*map(openai_message, request.turns)]}
    if request.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": request.logprobs}
    if request.schema is not None:
        schema = {"name": "answer", "schema": json.loads(request.schema), "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if tools := request.tools:
        functions = json.loads(tools.functions)
        body["tools"] = [{"type": "function", "function": each} for each in functions]
        body["tool_choice"] = "required" if tools.is_required else "auto"
        if not tools.parallel:
            body["parallel_tool_calls"] = False
    if request.thinks is not None:
        body["chat_template_kwargs"] = {"enable_thinking": request.thinks}
    if request.effort is not None:
        body["reasoning_effort"] = request.effort
    return body


@dataclass(slots=True)
class AnswerState:
    """An answer of an engine, as far as it has come."""

    finish: FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int | None = None
    reasoning_tokens: int = 0
    stop_text: str = ""
    """The stop text that ended the answer, if the engine says that (vLLM)."""
    pieces: int = 0
    is_cut: bool = False
    """Whether it ended before the engine reported what it counted."""
    _names: set[int] = field(default_factory=set)

    def take(self, chunk: Mapping[str, Any]) -> Piece | None:
        """Take a chunk of a stream; return its new text, if any."""
        if isinstance(usage := chunk.get("usage"), dict):
            self._count(usage)
        choices = chunk.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else {}
        if not isinstance(choice, dict):
            return None
        if reason := choice.get("finish_reason"):
            self.finish = FinishReason.LENGTH if reason == "length" else FinishReason.STOP
            self.stop_text = _text(choice.get("stop_reason"))
        delta = choice.get("delta")
        if isinstance(delta, dict):
            piece = Piece(
                _text(delta.get("content")),
                logprobs=_logprobs(choice.get("logprobs")),
                reasoning=_text(delta.get("reasoning_content") or delta.get("reasoning")),
                calls=tuple(self._calls(delta.get("tool_calls"))),
            )
        else:
            piece = Piece(_text(choice.get("text")))
        if not piece.has_text and not piece.logprobs:
            return None
        self.pieces += 1
        return piece

    def cut(self, bound: int) -> bool:
        """End an answer that has ``bound`` pieces; return whether it had not ended yet."""
        if self.finish is not None or self.pieces < bound:
            return False
        self.finish, self.is_cut = FinishReason.LENGTH, True
        return True

    def _count(self, usage: Mapping[str, Any]) -> None:
        self.prompt_tokens = _count_of(usage.get("prompt_tokens"))
        self.completion_tokens = _count_of(usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            self.cached_tokens = _count_of(details.get("cached_tokens"))
        details = usage.get("completion_tokens_details")
        if isinstance(details, dict):
            self.reasoning_tokens = _count_of(details.get("reasoning_tokens"))

    def _calls(self, found: object) -> list[ToolCallDelta]:
        deltas: list[ToolCallDelta] = []
        for each in found if isinstance(found, list) else []:
            function = each.get("function") if isinstance(each, dict) else None
            if not isinstance(function, dict):
                continue
            index = _count_of(each.get("index"))
            name = "" if index in self._names else _text(function.get("name"))
            self._names.add(index)
            deltas.append(ToolCallDelta(index, name, _text(function.get("arguments"))))
        return deltas


def offers_of(found: object, precision: str) -> tuple[ModelOffer, ...]:
    """Return the models that an engine lists, without those whose names a record cannot have."""
    listed = found.get("data") if isinstance(found, dict) else None
    offers: list[ModelOffer] = []
    for each in listed if isinstance(listed, list) else []:
        name = each.get("id") if isinstance(each, dict) else None
        if isinstance(name, str) and _is_name(name):
            given = (each.get(field) for field in _CONTEXT_FIELDS)
            meta = each.get("meta")
            trained = meta.get("n_ctx_train") if isinstance(meta, dict) else None
            context = next(filter(None, map(_count_of, (*given, trained))), 0)
            offers.append(ModelOffer(name, precision, min(context, MAX_CONTEXT)))
    return tuple(offers[:MAX_OFFERS])


def _is_name(text: str) -> bool:
    try:
        return 0 < len(text.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:  # a lone surrogate, which JSON can escape
        return False


def _logprobs(found: object) -> tuple[TokenLogprobs, ...]:
    listed = found.get("content") if isinstance(found, dict) else None
    scores: list[TokenLogprobs] = []
    for each in listed if isinstance(listed, list) else []:
        if isinstance(each, dict):
            top = each.get("top_logprobs")
            likeliest = (
                [one for one in top if isinstance(one, dict)] if isinstance(top, list) else []
            )
            scores.append(TokenLogprobs(_logprob(each), tuple(map(_logprob, likeliest))))
    return tuple(scores)


def _logprob(found: Mapping[str, Any]) -> Logprob:
    text, value, spelled = found.get("token"), found.get("logprob"), found.get("bytes")
    text = _text(text)
    is_spelled = isinstance(spelled, list) and all(map(_is_byte, spelled))
    parts = tuple(spelled) if isinstance(spelled, list) and is_spelled else tuple(text.encode())
    # In this order NaN becomes `NEVER`, too.
    logprob = max(NEVER, min(value, 0.0)) if isinstance(value, int | float) else 0.0
    return Logprob(-1, text, parts, float(logprob))


def _is_byte(value: object) -> bool:
    return type(value) is int and 0 <= value < 256


def _text(value: object) -> str:
    return value.encode(errors="replace").decode() if isinstance(value, str) else ""


def _count_of(value: object) -> int:
    return min(max(0, value), MAX_COUNT) if type(value) is int else 0
