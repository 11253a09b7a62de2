"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's messages.

https://docs.anthropic.com/en/api/messages
"""

import json
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from meshllm.api.access.gate import key_of
from meshllm.api.failure import JSON, messages_error
from meshllm.api.respond import Stream, read_body, with_keep_alive
from meshllm.api.v1 import reply as base
from meshllm.api.v1.generating import MAX_STOPS, SEEDS
from meshllm.api.v1.reply import STREAM
from meshllm.api.v1.service import Choices, Service
from meshllm.errors import MeshError
from meshllm.request import Answer, FinishReason, Piece, Prefilled, Sampling, Turn
from meshllm.request import Request as Asked
from meshllm.strict_json import WrongField, build, parse

HARMLESS = frozenset({"metadata", "service_tier"})
NEUTRAL: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ({"type": "none"}, {"type": "auto"}),
    "thinking": ({"type": "disabled"},),
    "stop_sequences": ([],),
}
"""Values of fields that are not supported which ask for nothing."""
PING = b'event: ping\ndata: {"type": "ping"}\n\n'


@dataclass(frozen=True, slots=True)
class TextBlock:
    """A content block."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, str] | None = None
    """Accepted, ignored: every prompt is cached."""


@dataclass(frozen=True, slots=True)
class MessagesTurn:
    """One message of a chat."""

    role: Literal["user", "assistant"]
    content: str | tuple[TextBlock, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesPrompt:
    """The part of a body that both routes take; null is the same as absent."""

    model: str
    messages: tuple[MessagesTurn, ...]
    system: str | tuple[TextBlock, ...] | None = None

    def turns(self) -> tuple[Turn, ...]:
        """Return the chat; raise `WrongField` for one that the model would have to go on with."""
        if not self.messages:
            raise WrongField("messages", "`messages` is empty")
        if self.messages[-1].role == "assistant":
            text = "`messages` ends with the assistant: an answer cannot be prefilled"
            raise WrongField("messages", text)
        first = [Turn(role="system", content=_text(self.system))] if self.system else []
        rest = [Turn(role=each.role, content=_text(each.content)) for each in self.messages]
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
            seed=secrets.randbelow(SEEDS),
        )
        return Asked(self.turns(), sampling=sampling, max_tokens=self.max_tokens, stop=stops)


@dataclass(slots=True)
class _MessagesReply:
    """Writes one message, whole or as events."""

    model: str
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")
    read: int = 0
    is_begun: bool = False

    def message(self, news: Choices) -> bytes:
        """Write the message once it is complete; no bytes before."""
        _, happened = news
        if not isinstance(happened, Answer):
            return b""
        content = [{"type": "text", "text": happened.text}] if happened.text else []
        return _compact(
            {**self._head(), "content": content, **_end(happened), "usage": _usage(happened)}
        )

    def events(self, news: Choices | None) -> bytes:
        """Write server-sent events: a ping for None."""
        if news is None:
            return PING
        match news[1]:
            case Prefilled(total=total):
                self.read = total
                return b""
            case Piece(text) if text:
                delta = {"type": "text_delta", "text": text}
                return self._begin() + _event("content_block_delta", index=0, delta=delta)
            case Answer() as answer:
                return (
                    self._begin()
                    + _event("content_block_stop", index=0)
                    + _event("message_delta", delta=_end(answer), usage=_usage(answer))
                    + _event("message_stop")
                )
            case _:
                return b""

    def _begin(self) -> bytes:
        if self.is_begun:
            return b""
        self.is_begun = True
        usage = {"input_tokens": self.read, "output_tokens": 0}
        nothing = {"stop_reason": None, "stop_sequence": None}
        message = {**self._head(), "content": [], **nothing, "usage": usage}
        block = {"type": "text", "text": ""}
        return _event("message_start", message=message) + _event(
            "content_block_start", index=0, content_block=block
        )

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model}


def routes(service: Service) -> list[Route]:
    """Return the routes of a service."""

    async def messages(request: Request) -> Response:
        body, key = await _read(request, Messages), key_of(request)
        asked = body.request()
        model = await service.model(key, body.model)
        reply, events = _MessagesReply(model.name), service.answer(key, model, [asked])
        if body.stream:
            slow = with_keep_alive(events, base.KEEP_ALIVE_S)
            return Stream(slow, STREAM, reply.events, _failure)
        return Stream(events, JSON, reply.message, messages_error)

    async def count(request: Request) -> Response:
        body, key = await _read(request, MessagesPrompt), key_of(request)
        asked = Asked(body.turns(), max_tokens=0)
        model = await service.model(key, body.model)
        return JSONResponse({"input_tokens": await _count(service.answer(key, model, [asked]))})

    return [
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count, methods=["POST"]),
    ]


async def _read(request: Request, kind: type[Any]) -> Any:
    found = parse(await read_body(request))
    if isinstance(found, dict):
        found = {
            name: value
            for name, value in found.items()
            if name not in HARMLESS and value not in NEUTRAL.get(name, ())
        }
    return build(kind, found)


async def _count(events: AsyncGenerator[Choices, None]) -> int:
    async for _, event in events:
        if isinstance(event, Answer):
            return event.prompt_tokens
    raise RuntimeError("the ring ended without an answer")


def _text(content: str | tuple[TextBlock, ...] | None) -> str:
    if isinstance(content, str):
        return content
    return "".join(block.text for block in content or ())


def _end(answer: Answer) -> dict[str, Any]:
    reason = "max_tokens" if answer.finish_reason is FinishReason.LENGTH else "end_turn"
    if answer.stop_text:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop_text or None}


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(answer.tokens),
    }


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\n".encode() + base.event(_compact({"type": kind, **fields}))


def _failure(error: MeshError) -> bytes:
    return b"event: error\n" + base.event(messages_error(error))


def _compact(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()
