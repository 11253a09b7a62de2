"""`/v1/chat/completions`: OpenAI's chat completions.

Unsupported fields are rejected by name, never silently ignored.
"""

import json
import secrets
import time
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from meshllm.api.access.gate import key_of
from meshllm.api.failure import JSON, error_object
from meshllm.api.respond import Stream, read, with_keep_alive
from meshllm.api.v1.service import Service
from meshllm.errors import MeshError
from meshllm.request import Answer, Event, FinishReason, Piece, Prefilled, Sampling, Turn
from meshllm.request import Request as Asked
from meshllm.strict_json import WrongField

KEEP_ALIVE_S = 10.0  # proxies close a connection that is idle for 30 to 60 s
MAX_STOPS = 4  # OpenAI API reference


@dataclass(frozen=True, slots=True)
class Part:
    """A content part of a message."""

    type: Literal["text"]
    text: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str | tuple[Part, ...]

    def turn(self) -> Turn:
        """Return the message with its parts joined."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(each.text for each in parts)
        return Turn(role=self.role, content=text)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options of a streamed answer."""

    include_usage: bool = False


@dataclass(frozen=True, slots=True)
class Chat:
    """The body of a request; null is the same as absent."""

    model: str
    messages: tuple[Message, ...]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | tuple[str, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def request(self) -> Asked:
        """Convert to a request of the mesh; raise `WrongField` for what is not supported."""
        if self.n not in {None, 1}:
            raise WrongField("n", f"`n` is {self.n}, not 1")
        if self.stream_options is not None and not self.stream:
            raise WrongField("stream_options", "`stream_options` requires `stream`")
        return Asked(
            turns=tuple(each.turn() for each in self.messages),
            sampling=self._sampling(),
            max_tokens=self._limit(),
            stop=self._stops(),
        )

    def _limit(self) -> int:
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
        return next(iter(given.values()), Asked().max_tokens)

    def _stops(self) -> tuple[str, ...]:
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        if len(stops) > MAX_STOPS or "" in stops:
            raise WrongField("stop", f"`stop` must have 1 to {MAX_STOPS} non-empty texts")
        return stops

    def _sampling(self) -> Sampling:
        """Return the sampling parameters, with a random seed unless one is given."""
        given: dict[str, Any] = {
            each.name: value
            for each in fields(Sampling)
            if (value := getattr(self, each.name)) is not None
        }
        if given.get("temperature"):
            given = {"seed": secrets.randbits(63), **given}
        return Sampling(**given)


@dataclass(slots=True)
class _Reply:
    """Writes the JSON objects of one answer."""

    model: str
    has_usage: bool
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(16)}")
    created: int = field(default_factory=lambda: int(time.time()))
    is_begun: bool = False
    """The first chunk, with the role, is written."""

    def completion(self, answer: Event) -> bytes:
        """Write the completion; no bytes for other events."""
        if not isinstance(answer, Answer):
            return b""
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        choice = {
            "index": 0, "message": message, "logprobs": None, "finish_reason": _reason(answer)
        }  # fmt: skip
        return self._write("chat.completion", [choice], usage=_usage(answer))

    def chunks(self, event: Event | None) -> bytes:
        """Write server-sent events: a keep-alive comment for None, nothing for progress."""
        if event is None:
            return b": patience\n\n"
        if isinstance(event, Prefilled) or (isinstance(event, Piece) and not event.text):
            return b""
        opening = b"" if self.is_begun else self.delta({"role": "assistant", "content": ""})
        self.is_begun = True
        if isinstance(event, Piece):
            return opening + self.delta({"content": event.text})
        end = opening + self.delta({}, _reason(event))
        if self.has_usage:
            end += _event(self._write("chat.completion.chunk", [], usage=_usage(event)))
        return end + _event(b"[DONE]")

    def delta(self, delta: dict[str, str], finish_reason: str | None = None) -> bytes:
        """Write one chunk."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        usage = {"usage": None} if self.has_usage else {}
        return _event(self._write("chat.completion.chunk", [choice], **usage))

    def _write(self, kind: str, choices: list[dict[str, Any]], **more: object) -> bytes:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return json.dumps({**head, "choices": choices, **more}, separators=(",", ":")).encode()


def routes(service: Service) -> list[Route]:
    """Return the routes of a service."""

    async def chat(request: Request) -> Response:
        body = await read(request, Chat)
        asked = body.request()
        key = key_of(request)
        model = await service.model(key, body.model)
        options = body.stream_options or StreamOptions()
        reply = _Reply(body.model, options.include_usage)
        if body.stream:
            events = with_keep_alive(service.answer(key, model, asked), KEEP_ALIVE_S)
            return Stream(events, "text/event-stream", reply.chunks, _failure)
        return Stream(service.answer(key, model, asked), JSON, reply.completion, error_object)

    return [Route("/v1/chat/completions", chat, methods=["POST"])]


def _failure(error: MeshError) -> bytes:
    return _event(error_object(error))


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _reason(answer: Answer) -> str:
    """Return OpenAI's finish reason of an answer."""
    return "length" if answer.finish_reason is FinishReason.LENGTH else "stop"


def _usage(answer: Answer) -> dict[str, Any]:
    read, written = answer.prompt_tokens, len(answer.tokens)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }
