"""`/v1/responses`: OpenAI's responses, without tools.

https://platform.openai.com/docs/api-reference/responses
"""

import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from meshllm.api.access.gate import key_of
from meshllm.api.failure import INVALID, JSON, Failure, Refused, error_object, failure_of
from meshllm.api.respond import Stream, read_body, with_keep_alive
from meshllm.api.v1 import reply as base
from meshllm.api.v1.generating import DEFAULT_TEMPERATURE, SEEDS
from meshllm.api.v1.reply import PATIENCE, STREAM
from meshllm.api.v1.response_store import ResponseStore, StoredResponse
from meshllm.api.v1.service import Choices, Service
from meshllm.api.v1.structured import schema_of_format
from meshllm.errors import MeshError
from meshllm.request import Answer, FinishReason, Piece, Sampling, Turn
from meshllm.request import Request as Asked
from meshllm.strict_json import WrongField, build, parse

HARMLESS = frozenset(
    {
        "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "stream_options",
    }
)  # fmt: skip
NEUTRAL: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "include": ([],),
    "background": (False,),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}),
}
"""Values of fields that are not supported which ask for nothing."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """A content part of an item."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: tuple[dict[str, str], ...] = ()
    logprobs: tuple[dict[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ResponsesItem:
    """A message, as a client writes it or as a response had it."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | tuple[TextPart, ...]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None

    def turn(self) -> Turn:
        """Return the message with its parts joined; a developer's is a system message."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(each.text for each in parts)
        return Turn(role="system" if self.role == "developer" else self.role, content=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Responses:
    """The body of a request but its `text`; null is the same as absent."""

    model: str
    input: str | tuple[ResponsesItem, ...]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None

    def turns(self) -> tuple[Turn, ...]:
        """Return the messages of this request alone."""
        if isinstance(self.input, str):
            return (Turn(role="user", content=self.input),)
        if not self.input:
            raise WrongField("input", "`input` is empty")
        return tuple(each.turn() for each in self.input)

    def request(self, turns: tuple[Turn, ...], schema: str | None) -> Asked:
        """Convert to a request of the mesh that answers these turns."""
        most = Asked().max_tokens if self.max_output_tokens is None else self.max_output_tokens
        if most < 1:
            raise WrongField("max_output_tokens", f"`max_output_tokens` is {most}, not at least 1")
        first = [Turn(role="system", content=self.instructions)] if self.instructions else []
        sampling = Sampling(
            temperature=DEFAULT_TEMPERATURE if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=secrets.randbelow(SEEDS),
        )
        return Asked((*first, *turns), sampling=sampling, max_tokens=most, schema=schema)


@dataclass(slots=True)
class _ResponsesReply:
    """Writes one response, whole or as events; keeps it at its end."""

    model: str
    body: Responses
    form: object
    owner: str
    turns: tuple[Turn, ...]
    store: ResponseStore
    id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(24)}")
    item: str = field(default_factory=lambda: f"msg_{secrets.token_hex(24)}")
    created: int = field(default_factory=lambda: int(time.time()))
    is_begun: bool = False
    _count: int = 0

    def whole(self, news: Choices) -> bytes:
        """Write the response once it is complete; no bytes before."""
        _, happened = news
        return _compact(self._kept(happened)) if isinstance(happened, Answer) else b""

    def events(self, news: Choices | None) -> bytes:
        """Write server-sent events: a comment for None, nothing for progress."""
        if news is None:
            return PATIENCE
        return b"".join(self._events(news[1]))

    def failure(self, error: MeshError) -> bytes:
        """Write the event of an error, after which the stream ends."""
        code = failure_of(error).code
        return self._event("error", code=code, message=str(error), param=None)

    def _events(self, happened: object) -> Iterator[bytes]:
        if not isinstance(happened, Piece | Answer):
            return
        place = {"item_id": self.item, "output_index": 0, "content_index": 0}
        if not self.is_begun:
            self.is_begun = True
            for name in ("created", "in_progress"):
                yield self._event(f"response.{name}", response=self._object("in_progress", []))
            item = self._item("in_progress", [])
            yield self._event("response.output_item.added", output_index=0, item=item)
            yield self._event("response.content_part.added", **place, part=_part(""))
        match happened:
            case Piece(text) if text:
                yield self._event("response.output_text.delta", **place, delta=text, logprobs=[])
            case Answer(text=text):
                whole = self._kept(happened)
                [item] = whole["output"]
                yield self._event("response.output_text.done", **place, text=text, logprobs=[])
                yield self._event("response.content_part.done", **place, part=_part(text))
                yield self._event("response.output_item.done", output_index=0, item=item)
                yield self._event(f"response.{whole['status']}", response=whole)

    def _kept(self, answer: Answer) -> dict[str, Any]:
        """Return the complete response; keep it unless `store` is false."""
        status = "incomplete" if answer.finish_reason is FinishReason.LENGTH else "completed"
        whole = self._object(status, [self._item(status, [_part(answer.text)])])
        if status == "incomplete":
            whole["incomplete_details"] = {"reason": "max_output_tokens"}
        read, written = answer.prompt_tokens, len(answer.tokens)
        whole["usage"] = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + written,
        }
        if self.body.store is not False:
            turns = (*self.turns, Turn(role="assistant", content=answer.text))
            self.store.put(self.id, StoredResponse(self.owner, whole, turns))
        return whole

    def _object(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self.body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": body.store is not False,
            "temperature": DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
            "text": {"format": self.form or {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"type": "message", "id": self.item, "status": status, "role": "assistant"}
        return {**head, "content": content}

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._count = self._count, self._count + 1
        data = _compact({"type": kind, "sequence_number": number, **fields})
        return f"event: {kind}\n".encode() + base.event(data)


def routes(service: Service) -> list[Route]:
    """Return the routes of a service."""
    store = ResponseStore()

    async def create(request: Request) -> Response:
        body, form = await _read(request)
        owner = _owner(request)
        before: tuple[Turn, ...] = ()
        if body.previous_response_id is not None:
            before = _found(store, body.previous_response_id, owner).turns
        turns = (*before, *body.turns())
        asked = body.request(turns, schema_of_format(form))
        key = key_of(request)
        model = await service.model(key, body.model)
        reply = _ResponsesReply(model.name, body, form, owner, turns, store)
        events = service.answer(key, model, [asked])
        if body.stream:
            slow = with_keep_alive(events, base.KEEP_ALIVE_S)
            return Stream(slow, STREAM, reply.events, reply.failure)
        return Stream(events, JSON, reply.whole, error_object)

    async def retrieve(request: Request) -> Response:
        found = _found(store, request.path_params["name"], _owner(request))
        return JSONResponse(found.body)

    async def delete(request: Request) -> Response:
        name, owner = request.path_params["name"], _owner(request)
        _found(store, name, owner)
        store.drop(name, owner)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    return [
        Route("/v1/responses", create, methods=["POST"]),
        Route("/v1/responses/{name}", retrieve, methods=["GET"]),
        Route("/v1/responses/{name}", delete, methods=["DELETE"]),
    ]


async def _read(request: Request) -> tuple[Responses, object]:
    """Read a body and its `text.format`; raise `WrongField` for what is not supported."""
    found, text = parse(await read_body(request)), None
    if isinstance(found, dict):
        text = found.pop("text", None)
        found = {
            name: value
            for name, value in found.items()
            if name not in HARMLESS and value not in NEUTRAL.get(name, ())
        }
    match text:
        case None:
            form = None
        case {"format": form, **rest} if not rest or rest == {"verbosity": "medium"}:
            pass
        case _:
            raise WrongField("text", "`text` takes `format` only")
    return build(Responses, found), form


def _owner(request: Request) -> str:
    key = key_of(request)
    return key.name if key else ""


def _found(store: ResponseStore, name: str, owner: str) -> StoredResponse:
    found = store.get(name, owner)
    if found is None:
        text = f"There is no response `{name[:100]}`: it is another key's, or no longer kept"
        raise Refused(text, Failure(404, INVALID, "response_not_found", "previous_response_id"))
    return found


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _compact(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()
