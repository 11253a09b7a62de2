"""`/v1/chat/completions`: OpenAI's chat completions."""

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from meshllm.api.access.accounts import ApiKey
from meshllm.api.access.gate import key_of
from meshllm.api.failure import JSON, error_object
from meshllm.api.generation.extension import Extension, answer_as_needed, model_as_needed
from meshllm.api.generation.generating import GenerationFields, read_fields, variants
from meshllm.api.generation.headers import headers_of, is_traced
from meshllm.api.generation.reply import EventStream, Reply, failure, reason
from meshllm.api.generation.service import IndexedEvent, Service
from meshllm.api.generation.structured import schema_of
from meshllm.api.generation.tools import FIELDS, new_call_id, tools_of
from meshllm.api.respond import Stream
from meshllm.request import (
    Answer,
    Logprob,
    Piece,
    TokenLogprobs,
    ToolCall,
    ToolCallDelta,
    Turn,
)
from meshllm.request import Request as Asked
from meshllm.status import ModelStatus
from meshllm.strict_json import WrongField

APART = ("response_format", *FIELDS)
"""Fields of a body that are read apart from `Chat`."""
WHOLE, CHUNK = "chat.completion", "chat.completion.chunk"


@dataclass(frozen=True, slots=True)
class ContentPart:
    """A content part of a message."""

    type: Literal["text"]
    text: str


@dataclass(frozen=True, slots=True)
class CalledFunction:
    """The function of a call."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class MessageToolCall:
    """A call that the assistant made."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None
    """Accepted, ignored: clients collect it from streams."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | tuple[ContentPart, ...] | None = None
    tool_calls: tuple[MessageToolCall, ...] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    """Accepted, ignored: chat templates have no place for it."""
    reasoning_content: str | None = None
    """Accepted, ignored: models do not read the reasoning behind earlier answers."""

    def turn(self, where: str) -> Turn:
        """Return the message, its parts as lines; a developer's is a system message."""
        parts = self.content
        if parts is None and not self.tool_calls:
            raise WrongField(f"{where}.content", f"`{where}.content` is missing")
        text = parts if isinstance(parts, str) else "\n".join(each.text for each in parts or ())
        turn = Turn(role="system" if self.role == "developer" else self.role, content=text)
        if self.tool_calls:
            if self.role != "assistant":
                text = f"`{where}.tool_calls` are those of the assistant only"
                raise WrongField(f"{where}.tool_calls", text)
            turn["tool_calls"] = tuple(
                ToolCall(each.function.name, each.function.arguments, each.id)
                for each in self.tool_calls
            )
        if self.role == "tool":
            if self.tool_call_id is None:
                raise WrongField(f"{where}.tool_call_id", f"`{where}.tool_call_id` is missing")
            turn["tool_call_id"] = self.tool_call_id
        return turn


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """Options of a model's chat template, as other servers take them."""

    enable_thinking: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat(GenerationFields):
    """The body of a request; null is the same as absent."""

    messages: tuple[Message, ...]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    max_reasoning_tokens: int | None = None
    """An extension of meshllm: the reasoning ends after this many tokens."""
    chat_template_kwargs: TemplateOptions | None = None
    meshllm: Extension | None = None

    def requests(self) -> list[Asked]:
        """Convert to requests of the mesh; raise `WrongField` for what is not supported."""
        if not self.messages:
            raise WrongField("messages", "`messages` is empty")
        if self.top_logprobs is not None and not self.logprobs:
            raise WrongField("top_logprobs", "`top_logprobs` requires `logprobs`")
        if (self.max_reasoning_tokens or 0) < 0:
            text = f"`max_reasoning_tokens` is {self.max_reasoning_tokens}, not at least 0"
            raise WrongField("max_reasoning_tokens", text)
        options = self.chat_template_kwargs or TemplateOptions()
        effort = self.reasoning_effort
        asked = replace(
            self.request(self._limit()),
            turns=tuple(
                each.turn(f"messages[{place}]") for place, each in enumerate(self.messages)
            ),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            thinks=effort != "none" if effort else options.enable_thinking,
            effort=effort if effort != "none" else None,
            max_reasoning=self.max_reasoning_tokens,
        )
        return variants(asked, self.choices)

    def _limit(self) -> int | None:
        limits = {
            "max_tokens": self.max_tokens,
            "max_completion_tokens": self.max_completion_tokens,
        }
        given = {name: limit for name, limit in limits.items() if limit is not None}
        for name, limit in given.items():
            if limit < 1:
                raise WrongField(name, f"`{name}` is {limit}, not at least 1")
        if len(set(given.values())) > 1:
            raise WrongField("max_tokens", "`max_tokens` and `max_completion_tokens` differ")
        return next(iter(given.values()), None)


@dataclass(slots=True)
class _ChatReply(Reply):
    """Writes the JSON objects of a chat completion."""

    def completion(self, news: IndexedEvent) -> bytes:
        """Write the completion once it is complete; no bytes before."""
        place, happened = news
        choice = self.choices[place]
        match happened:
            case Piece(logprobs=logprobs):
                choice.logprobs.add(self._logprobs(place, logprobs))
            case Answer():
                choice.answer = happened
        if not isinstance(happened, Answer) or not self.is_complete:
            return b""
        return self.whole(WHOLE, map(self._whole, range(len(self.choices))))

    def chunks(self, news: IndexedEvent) -> bytes:
        """Write server-sent events, nothing for progress."""
        place, happened = news
        choice = self.choices[place]
        if not isinstance(happened, Piece | Answer) or happened == Piece(""):
            return b""
        written = b""
        if not choice.is_begun and (isinstance(happened, Answer) or _is_shown(happened)):
            choice.is_begun = True
            written = self._delta(place, {"role": "assistant", "content": ""})
        if isinstance(happened, Answer):
            choice.answer = happened
            written += self._delta(place, {}, reason=reason(happened))
            return written + (self.end(CHUNK) if self.is_complete else b"")
        if happened.reasoning:
            written += self._delta(place, {"reasoning_content": happened.reasoning})
        if happened.text or happened.logprobs:
            written += self._delta(place, {"content": happened.text}, happened.logprobs)
        if happened.calls:
            calls = [call_entry(each) for each in happened.calls]
            written += self._delta(place, {"tool_calls": calls})
        return written

    def _whole(self, place: int) -> bytes:
        choice, answer = self.choices[place], self.choices[place].answer
        assert answer  # the reply is complete
        choice.logprobs.add(self._logprobs(place, ()))  # if there are none
        fields = {"index": place, "message": _message(answer), "finish_reason": reason(answer)}
        return self.choice(place, fields)

    def _delta(
        self,
        place: int,
        delta: dict[str, Any],
        logprobs: Iterable[TokenLogprobs] = (),
        reason: str | None = None,
    ) -> bytes:
        scores = self._logprobs(place, logprobs) if "content" in delta and logprobs else None
        choice = {"index": place, "delta": delta, "logprobs": scores, "finish_reason": reason}
        return self.chunk(CHUNK, [choice])

    def _logprobs(self, place: int, found: Iterable[TokenLogprobs]) -> dict[str, Any] | None:
        if self.asked[place].logprobs is None:
            return None
        return {"content": [*map(token_entry, found)], "refusal": None}


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A chat that is allowed and checked; its events are computed once they are read."""

    model: ModelStatus
    asked: list[Asked]
    events: AsyncGenerator[IndexedEvent, None]


async def call(
    service: Service, key: ApiKey | None, body: Chat, apart: dict[str, object]
) -> ChatCall:
    """Check a chat with the fields of it that stand `APART`; raise `UserError` if invalid."""
    schema, tools = schema_of(apart.get("response_format")), tools_of(apart)
    asked = [replace(each, schema=schema, tools=tools) for each in body.requests()]
    needs = body.meshllm
    model = await model_as_needed(service, key, body.model, asked, needs)
    outline = needs.outline_mode(model, body.choices) if needs else None
    events = answer_as_needed(service, key, model, asked, needs, outline)
    return ChatCall(model, asked, events)


def routes(service: Service) -> list[Route]:
    """Return the routes of a service."""

    async def chat(request: Request) -> Response:
        body, apart = await read_fields(service, request, Chat, APART)
        made = await call(service, key_of(request), body, apart)
        model = made.model
        reply = _ChatReply(
            "chatcmpl", model.name, model.fingerprint, made.asked, body.choices, body.has_usage,
            is_traced(request),
        )  # fmt: skip
        headers = headers_of(model)
        if body.stream:
            return EventStream(made.events, reply.chunks, failure, headers)
        return Stream(made.events, JSON, reply.completion, error_object, headers)

    return [Route("/v1/chat/completions", chat, methods=["POST"])]


def _is_shown(piece: Piece) -> bool:
    return piece.has_text or bool(piece.logprobs)


def call_entry(delta: ToolCallDelta) -> dict[str, Any]:
    """Lay out what is new of a call."""
    if not delta.name:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    head = {"index": delta.index, "id": new_call_id(), "type": "function"}
    return {**head, "function": function}


def _message(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["content"] = answer.text or None
        message["tool_calls"] = [
            {
                "id": new_call_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.calls
        ]
    return message


def token_entry(found: TokenLogprobs) -> dict[str, Any]:
    """Lay out the log probabilities of a token."""
    top = [_entry(each) for each in found.top]
    return {**_entry(found.chosen), "top_logprobs": top}


def _entry(found: Logprob) -> dict[str, Any]:
    return {"token": found.text, "logprob": found.logprob, "bytes": list(found.bytes)}
