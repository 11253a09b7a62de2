"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's messages.

https://docs.anthropic.com/en/api/messages
"""

import json
import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from meshllm.api.access.gate import key_of
from meshllm.api.failure import JSON, compact, messages_error
from meshllm.api.generation import reply as base
from meshllm.api.generation.extension import SeededNeeds, answer_as_needed, model_as_needed, seed_of
from meshllm.api.generation.generating import read_fields
from meshllm.api.generation.headers import headers_of, is_traced, trace_of
from meshllm.api.generation.reply import EventStream
from meshllm.api.generation.service import IndexedEvent, Service
from meshllm.api.generation.tools import tools_of_messages
from meshllm.api.respond import Stream, while_connected
from meshllm.errors import MeshError, UserError
from meshllm.request import (
    MAX_STOPS,
    Answer,
    FinishReason,
    Piece,
    Prefilled,
    Sampling,
    ToolCall,
    Turn,
)
from meshllm.request import Request as Asked
from meshllm.strict_json import WrongField, parse

T = TypeVar("T")

HARMLESS = frozenset({"metadata", "service_tier", "cache_control"})
NEUTRAL: dict[str, tuple[object, ...]] = {"stop_sequences": ([],)}
"""Values of fields that are not supported which ask for nothing."""
APART = ("tools", "tool_choice")
PING = b'event: ping\ndata: {"type": "ping"}\n\n'


@dataclass(frozen=True, slots=True)
class TextBlock:
    """A content block with text."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, str] | None = None
    """Accepted, ignored: every prompt is cached."""


@dataclass(frozen=True, slots=True)
class Block:
    """A content block: the fields of its type are set."""

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: object = None
    tool_use_id: str | None = None
    content: str | tuple[TextBlock, ...] | None = None
    is_error: bool | None = None
    """Accepted, ignored: the content tells the model."""
    thinking: str | None = None
    """Accepted, ignored: models do not read the reasoning behind earlier answers."""
    signature: str | None = None
    data: str | None = None
    caller: dict[str, str] | None = None
    """Accepted, ignored, as our own calls have it."""
    cache_control: dict[str, str] | None = None

    def part(self, role: str, where: str) -> str | ToolCall | Turn:
        """Return text, a call of the assistant, or the turn of a result."""
        match self:
            case Block(type="text", text=str(text)):
                return text
            case Block(type="thinking" | "redacted_thinking"):
                return ""
            case Block(type="tool_use", id=str(name), name=str(called)) if role == "assistant":
                return ToolCall(called, json.dumps(self.input or {}, ensure_ascii=False), name)
            case Block(type="tool_result", tool_use_id=str(name)) if role == "user":
                return Turn(role="tool", content=_text(self.content), tool_call_id=name)
            case _:
                raise WrongField(where, f"`{where}` is not a valid `{self.type}` block")


@dataclass(frozen=True, slots=True)
class MessagesTurn:
    """One message of a chat."""

    role: Literal["user", "assistant"]
    content: str | tuple[Block, ...]

    def turns(self, where: str) -> Iterator[Turn]:
        """Yield the results of calls, each as a turn, and the message."""
        if isinstance(self.content, str):
            yield Turn(role=self.role, content=self.content)
            return
        parts = [
            each.part(self.role, f"{where}.content[{place}]")
            for place, each in enumerate(self.content)
        ]
        results = [each for each in parts if isinstance(each, dict)]
        calls = tuple(each for each in parts if isinstance(each, ToolCall))
        text = "\n".join(each for each in parts if each and isinstance(each, str))
        yield from results
        if calls:
            yield Turn(role=self.role, content=text, tool_calls=calls)
        elif text or not results:
            yield Turn(role=self.role, content=text)


@dataclass(frozen=True, slots=True)
class Thinking:
    """Whether and how long to reason."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesPrompt:
    """The part of a body that both routes take; null is the same as absent."""

    model: str
    messages: tuple[MessagesTurn, ...]
    system: str | tuple[TextBlock, ...] | None = None
    thinking: Thinking | None = None
    meshllm: SeededNeeds | None = None

    @property
    def thinks(self) -> bool | None:
        """Whether the model reasons before its answer; None leaves it to the model."""
        return None if self.thinking is None else self.thinking.type != "disabled"

    def turns(self) -> tuple[Turn, ...]:
        """Return the chat; raise `WrongField` for one that the model would have to go on with."""
        if not self.messages:
            raise WrongField("messages", "`messages` is empty")
        if self.messages[-1].role == "assistant":
            text = "`messages` ends with the assistant: an answer cannot be prefilled"
            raise WrongField("messages", text)
        first = [Turn(role="system", content=_text(self.system))] if self.system else []
        rest = [
            turn
            for place, each in enumerate(self.messages)
            for turn in each.turns(f"messages[{place}]")
        ]
        return (*first, *rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages(MessagesPrompt):
    """The body of a request."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: tuple[str, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def request(self) -> Asked:
        """Convert to a request of the mesh; raise `WrongField` for what is not supported."""
        stops = self.stop_sequences or ()
        if self.max_tokens < 1:
            raise WrongField("max_tokens", f"`max_tokens` is {self.max_tokens}, not at least 1")
        if len(stops) > MAX_STOPS or "" in stops:
            text = f"`stop_sequences` must have at most {MAX_STOPS} non-empty texts"
            raise WrongField("stop_sequences", text)
        sampling = Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=0 if self.top_k is None else self.top_k,
            seed=seed_of(self.meshllm),
        )
        thinking = self.thinking
        if thinking and (thinking.budget_tokens or 0) < 0:
            text = f"`thinking.budget_tokens` is {thinking.budget_tokens}, not at least 0"
            raise WrongField("thinking.budget_tokens", text)
        return Asked(
            self.turns(),
            sampling=sampling,
            max_tokens=self.max_tokens,
            stop=stops,
            thinks=self.thinks,
            max_reasoning=thinking.budget_tokens if thinking else None,
        )


@dataclass(slots=True)
class _MessagesReply:
    """Writes one message, whole or as events."""

    model: str
    seed: int
    is_traced: bool = False
    """Whether the end says where the time went."""
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")
    read: int = 0
    is_begun: bool = False
    _blocks: int = 0
    """Content blocks that have begun."""
    _open: tuple[str, int] | None = None
    """The type of the open block, and which call it is."""

    def message(self, news: IndexedEvent) -> bytes:
        """Write the message once it is complete; no bytes before."""
        _, happened = news
        if not isinstance(happened, Answer):
            return b""
        content: list[dict[str, Any]] = []
        if happened.reasoning:
            thought = {"type": "thinking", "thinking": happened.reasoning, "signature": ""}
            content.append(thought)
        if happened.text:
            content.append(_text_block(happened.text))
        content += (
            {**_tool_use(call.name), "input": _object(call.arguments)} for call in happened.calls
        )
        head = self._head()
        head["meshllm"] |= self._trace(happened)
        return compact({**head, "content": content, **_end(happened), "usage": _usage(happened)})

    def events(self, news: IndexedEvent) -> bytes:
        """Write server-sent events."""
        match news[1]:
            case Prefilled(total=total):
                self.read = total
                return b""
            case Piece() as piece if piece.has_text:
                return self._begin() + b"".join(self._deltas(piece))
            case Answer() as answer:
                trace = self._trace(answer)
                extra = {"meshllm": trace} if trace else {}
                return (
                    self._begin()
                    + self._closed()
                    + _event("message_delta", delta=_end(answer), usage=_usage(answer), **extra)
                    + _event("message_stop")
                )
            case _:
                return b""

    def _begin(self) -> bytes:
        if self.is_begun:
            return b""
        self.is_begun = True
        usage = _usage_fields(self.read, 0, 0)
        message = {**self._head(), "content": [], **_end_fields(None, None), "usage": usage}
        return _event("message_start", message=message)

    def _deltas(self, piece: Piece) -> Iterator[bytes]:
        if piece.reasoning:
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            yield self._opened(("thinking", 0), empty)
            yield self._delta("thinking_delta", thinking=piece.reasoning)
        if piece.text:
            yield self._opened(("text", 0), _text_block(""))
            yield self._delta("text_delta", text=piece.text)
        for call in piece.calls:
            yield self._opened(("tool_use", call.index), {**_tool_use(call.name), "input": {}})
            if call.arguments:
                yield self._delta("input_json_delta", partial_json=call.arguments)

    def _opened(self, wanted: tuple[str, int], block: dict[str, Any]) -> bytes:
        """Open a content block, unless it is open."""
        if self._open == wanted:
            return b""
        closed = self._closed()
        self._open, index = wanted, self._blocks
        self._blocks += 1
        return closed + _event("content_block_start", index=index, content_block=block)

    def _closed(self) -> bytes:
        """Close the open content block."""
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", index=self._blocks - 1)

    def _delta(self, kind: str, **fields: str) -> bytes:
        delta = {"type": kind, **fields}
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _trace(self, answer: Answer) -> dict[str, Any]:
        return {"trace": trace_of([answer])} if self.is_traced else {}

    def _head(self) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "meshllm": {"seed": self.seed}}


def routes(service: Service) -> list[Route]:
    """Return the routes of a service."""

    async def messages(request: Request) -> Response:
        (body, apart), key = await _read(service, request, Messages), key_of(request)
        asked = replace(body.request(), tools=tools_of_messages(*map(apart.get, APART)))
        model = await model_as_needed(service, key, body.model, [asked], body.meshllm)
        reply = _MessagesReply(model.name, asked.sampling.seed, is_traced(request))
        events = answer_as_needed(service, key, model, [asked], body.meshllm)
        headers = headers_of(model)
        if body.stream:
            return EventStream(events, reply.events, _failure, headers, PING)
        return Stream(events, JSON, reply.message, messages_error, headers)

    async def count(request: Request) -> Response:
        (body, apart), key = await _read(service, request, MessagesPrompt), key_of(request)
        tools = tools_of_messages(*map(apart.get, APART))
        asked = Asked(body.turns(), max_tokens=0, tools=tools, thinks=body.thinks)
        model = await model_as_needed(service, key, body.model, [asked], body.meshllm)
        events = answer_as_needed(service, key, model, [asked], body.meshllm)
        return JSONResponse({"input_tokens": await while_connected(request, _count(events))})

    return [
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count, methods=["POST"]),
    ]


async def _read(service: Service, request: Request, kind: type[T]) -> tuple[T, dict[str, object]]:
    return await read_fields(service, request, kind, APART, HARMLESS, NEUTRAL)


async def _count(events: AsyncGenerator[IndexedEvent, None]) -> int:
    async with aclosing(events):
        async for _, event in events:
            if isinstance(event, Answer):
                return event.prompt_tokens
    raise RuntimeError("the ring ended without an answer")


def _text(content: str | tuple[TextBlock, ...] | None) -> str:
    """Return a content, its blocks as lines."""
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content or ())


def _end(answer: Answer) -> dict[str, Any]:
    reason = "tool_use" if answer.calls else "end_turn"
    if answer.finish_reason is FinishReason.LENGTH:
        reason = "max_tokens"
    if answer.stop_text:
        reason = "stop_sequence"
    return _end_fields(reason, answer.stop_text or None)


def _end_fields(reason: str | None, sequence: str | None) -> dict[str, Any]:
    nothing = {"stop_details": None, "container": None}
    return {"stop_reason": reason, "stop_sequence": sequence, **nothing}


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def _tool_use(name: str) -> dict[str, Any]:
    caller = {"type": "direct"}
    return {
        "type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": name, "caller": caller
    }  # fmt: skip


def _object(arguments: str) -> object:
    """Return the arguments of a call; what is not a JSON object, as a text."""
    try:
        found = parse(arguments.encode(errors="surrogatepass"))
    except UserError:
        found = None
    return found if isinstance(found, dict) else {"invalid": arguments}


def _usage(answer: Answer) -> dict[str, Any]:
    read = answer.prompt_tokens - answer.cached_tokens
    return _usage_fields(read, answer.cached_tokens, answer.completion_tokens)


def _usage_fields(read: int, cached: int, written: int) -> dict[str, Any]:
    """Lay out a usage; what a mesh has nothing of is null."""
    counts = {"input_tokens": read, "cache_read_input_tokens": cached, "output_tokens": written}
    nothing = (
        "cache_creation", "inference_geo", "output_tokens_details", "server_tool_use",
        "service_tier",
    )  # fmt: skip
    return {**counts, "cache_creation_input_tokens": 0, **dict.fromkeys(nothing)}


def _event(kind: str, **fields: Any) -> bytes:
    return base.event(compact({"type": kind, **fields}), kind)


def _failure(error: MeshError) -> bytes:
    return base.event(messages_error(error), "error")
