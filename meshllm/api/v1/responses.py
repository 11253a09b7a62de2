"""`/v1/responses`: OpenAI's responses.

https://platform.openai.com/docs/api-reference/responses
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from meshllm.api.access.gate import key_of
from meshllm.api.failure import (
    INVALID,
    JSON,
    Failure,
    Refused,
    compact,
    error_object,
    failure_of,
    message_of,
)
from meshllm.api.generation import reply as base
from meshllm.api.generation.extension import SeededNeeds, answer_as_needed, model_as_needed, seed_of
from meshllm.api.generation.generating import DEFAULT_TEMPERATURE, read_fields
from meshllm.api.generation.headers import headers_of, is_traced, trace_of
from meshllm.api.generation.reply import EventStream
from meshllm.api.generation.service import IndexedEvent, Service
from meshllm.api.generation.structured import schema_of_format
from meshllm.api.generation.tools import FIELDS, new_call_id, tools_of
from meshllm.api.respond import Stream
from meshllm.api.v1.response_store import ResponseStore, StoredResponse
from meshllm.errors import MeshError
from meshllm.request import Answer, FinishReason, Piece, Sampling, ToolCall, Turn
from meshllm.request import Request as Asked
from meshllm.strict_json import WrongField

APART = ("text", *FIELDS)
"""Fields of a body that are read apart from `Responses`."""
HARMLESS = frozenset(
    {
        "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "stream_options",
    }
)  # fmt: skip
NEUTRAL: dict[str, tuple[object, ...]] = {
    "include": ([], ["reasoning.encrypted_content"]),  # reasoning is never encrypted
    "background": (False,),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
}
"""Values of fields that are not supported which ask for nothing."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """A content part of an item."""

    type: Literal["input_text", "output_text", "reasoning_text"]
    text: str
    annotations: tuple[dict[str, str], ...] = ()
    logprobs: tuple[dict[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ResponsesItem:
    """An item of the input, as a client writes it or as a response had it."""

    type: Literal[
        "message", "function_call", "function_call_output", "reasoning", "item_reference"
    ] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | tuple[TextPart, ...] | None = None
    id: str | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | tuple[TextPart, ...] | None = None
    summary: tuple[dict[str, str], ...] = ()

    def turns(self, where: str) -> Iterator[Turn]:
        """Yield the turn of the item, none for reasoning; a developer's is a system message."""
        match self:
            case ResponsesItem(type="message", role=str(role)) if self.content is not None:
                yield Turn(
                    role="system" if role == "developer" else role, content=_text(self.content)
                )
            case ResponsesItem("function_call", call_id=str(name), name=str(called)):
                call = ToolCall(called, self.arguments or "{}", name)
                yield Turn(role="assistant", content="", tool_calls=(call,))
            case ResponsesItem("function_call_output", call_id=str(name)):
                yield Turn(role="tool", content=_text(self.output or ""), tool_call_id=name)
            case ResponsesItem("reasoning"):
                pass
            case _:
                raise WrongField(where, f"`{where}` is not a valid `{self.type}`")


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Whether and how long to reason."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto"] | None = None
    """One if there is any, and there is none: the reasoning itself is included."""


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
    reasoning: Reasoning | None = None
    meshllm: SeededNeeds | None = None

    def turns(self, stored: Callable[[str], tuple[Turn, ...] | None]) -> tuple[Turn, ...]:
        """Return the messages of this request alone; ``stored`` finds those of a referred item."""
        if isinstance(self.input, str):
            return (Turn(role="user", content=self.input),)
        if not self.input:
            raise WrongField("input", "`input` is empty")
        found, referred = list[Turn](), set[str]()
        for place, each in enumerate(self.input):
            where, name = f"input[{place}]", each.id or ""
            if each.type != "item_reference":
                found += each.turns(where)
            elif name in referred:
                raise WrongField(f"{where}.id", f"`{where}` refers to `{name[:100]}` again")
            elif (turns := stored(name)) is not None:
                found += turns
                referred.add(name)
            else:
                text = f"There is no output item `{name[:100]}` of a response that is kept"
                raise Refused(text, Failure(404, INVALID, "item_not_found", f"{where}.id"))
        return tuple(_joined(found))

    def request(self, turns: tuple[Turn, ...]) -> Asked:
        """Convert to a request of the mesh that answers these turns."""
        most = self.max_output_tokens
        if most is not None and most < 1:
            raise WrongField("max_output_tokens", f"`max_output_tokens` is {most}, not at least 1")
        first = [Turn(role="system", content=self.instructions)] if self.instructions else []
        sampling = Sampling(
            temperature=DEFAULT_TEMPERATURE if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=seed_of(self.meshllm),
        )
        effort = self.reasoning.effort if self.reasoning else None
        return Asked(
            (*first, *turns),
            sampling=sampling,
            max_tokens=most,
            thinks=None if effort is None else effort != "none",
            effort=None if effort == "none" else effort,
        )


@dataclass(slots=True)
class _OutputItem:
    """An item of the output, as far as it has come."""

    fields: dict[str, Any]
    text: str = ""


@dataclass(slots=True)
class _ResponsesReply:
    """Writes one response, whole or as events; keeps it at its end."""

    model: str
    body: Responses
    given: dict[str, object]
    """The fields of the request that describe its format and its tools."""
    owner: str
    turns: tuple[Turn, ...]
    store: ResponseStore
    seed: int
    is_traced: bool
    """Whether the complete response says where the time went."""
    id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(24)}")
    created: int = field(default_factory=lambda: int(time.time()))
    is_begun: bool = False
    _items: list[_OutputItem] = field(default_factory=list)
    _calls: int = 0
    _count: int = 0

    def whole(self, news: IndexedEvent) -> bytes:
        """Write the response once it is complete; no bytes before."""
        _, happened = news
        if not isinstance(happened, Answer):
            return b""
        if happened.reasoning:
            self._add("reasoning").text = happened.reasoning
        if happened.text or not happened.calls:
            self._add("message").text = happened.text
        for call in happened.calls:
            self._add("function_call", call.name).text = call.arguments
        return compact(self._kept(happened))

    def events(self, news: IndexedEvent) -> bytes:
        """Write server-sent events, nothing for progress."""
        return b"".join(self._events(news[1]))

    def failure(self, error: MeshError) -> bytes:
        """Write the event of an error, after which the stream ends."""
        code = failure_of(error).code
        return self._event("error", code=code, message=message_of(error), param=None)

    def _events(self, happened: object) -> Iterator[bytes]:
        if not isinstance(happened, Piece | Answer):
            return
        if not self.is_begun:
            self.is_begun = True
            for name in ("created", "in_progress"):
                yield self._event(f"response.{name}", response=self._object("in_progress", []))
        if isinstance(happened, Piece):
            yield from self._deltas(happened)
            return
        if not self._items:
            yield from self._opened("message")
        yield from self._closed(_status(happened))
        whole = self._kept(happened)
        yield self._event(f"response.{whole['status']}", response=whole)

    def _deltas(self, piece: Piece) -> Iterator[bytes]:
        if piece.reasoning:
            yield from self._opened("reasoning")
            yield self._delta(piece.reasoning)
        if piece.text:
            yield from self._opened("message")
            yield self._delta(piece.text, logprobs=[])
        for call in piece.calls:  # as `Written` takes them
            if call.index == self._calls:
                self._calls += 1
                yield from self._opened("function_call", call.name)
            is_open = self._is_open("function_call") and call.index == self._calls - 1
            if call.arguments and is_open:
                yield self._delta(call.arguments)

    def _is_open(self, kind: str) -> bool:
        return bool(self._items) and self._items[-1].fields["type"] == kind

    def _opened(self, kind: str, name: str = "") -> Iterator[bytes]:
        """Open an item, unless it is open; each call is one of its own."""
        if kind != "function_call" and self._is_open(kind):
            return
        yield from self._closed()
        item = self._add(kind, name)
        added = self._item(item, "in_progress")
        added |= {"content": []} if kind == "message" else {}
        yield self._event("response.output_item.added", output_index=self._last, item=added)
        if kind == "message":
            place = self._place(item)
            yield self._event("response.content_part.added", **place, part=_part(""))

    def _closed(self, status: str = "completed") -> Iterator[bytes]:
        """Close the open item."""
        if not self._items:
            return
        item = self._items[-1]
        place, kind = self._place(item), item.fields["type"]
        if kind == "message":
            yield self._event("response.output_text.done", **place, text=item.text, logprobs=[])
            yield self._event("response.content_part.done", **place, part=_part(item.text))
        elif kind == "reasoning":
            yield self._event("response.reasoning_text.done", **place, text=item.text)
        else:
            done = {"arguments": item.text, "name": item.fields["name"]}
            yield self._event("response.function_call_arguments.done", **place, **done)
        whole = self._item(item, status)
        yield self._event("response.output_item.done", output_index=self._last, item=whole)

    def _delta(self, text: str, **more: object) -> bytes:
        item = self._items[-1]
        item.text += text
        name = {
            "message": "output_text",
            "reasoning": "reasoning_text",
            "function_call": "function_call_arguments",
        }[item.fields["type"]]
        return self._event(f"response.{name}.delta", **self._place(item), delta=text, **more)

    @property
    def _last(self) -> int:
        return len(self._items) - 1

    def _place(self, item: _OutputItem) -> dict[str, Any]:
        place = {"item_id": item.fields["id"], "output_index": self._last}
        return place if item.fields["type"] == "function_call" else {**place, "content_index": 0}

    def _add(self, kind: str, name: str = "") -> _OutputItem:
        """Append an item to the output."""
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        fields = {"type": kind, "id": f"{prefix}_{secrets.token_hex(24)}"}
        if kind == "function_call":
            fields |= {"call_id": new_call_id(), "name": name}
        self._items.append(_OutputItem(fields))
        return self._items[-1]

    @staticmethod
    def _item(item: _OutputItem, status: str) -> dict[str, Any]:
        match item.fields["type"]:
            case "message":
                more = {"role": "assistant", "content": [_part(item.text)]}
            case "reasoning":
                content = [{"type": "reasoning_text", "text": item.text}]
                more = {"summary": [], "content": content}
            case _:
                more = {"arguments": item.text}
        return {**item.fields, "status": status, **more}

    def _kept(self, answer: Answer) -> dict[str, Any]:
        """Return the complete response; keep it unless `store` is false."""
        status = _status(answer)
        output = [self._item(each, "completed") for each in self._items]
        output[-1]["status"] = status
        whole = self._object(status, output)
        if status == "incomplete":
            whole["incomplete_details"] = {"reason": "max_output_tokens"}
        read, written = answer.prompt_tokens, answer.completion_tokens
        whole["usage"] = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
            "total_tokens": read + written,
        }
        if self.is_traced:
            whole["meshllm"]["trace"] = trace_of([answer])
        if self.body.store is not False:
            turn = Turn(role="assistant", content=answer.text)
            calls = [each.fields for each in self._items if each.fields["type"] == "function_call"]
            if calls:
                turn["tool_calls"] = tuple(
                    replace(call, id=fields["call_id"])
                    for call, fields in zip(answer.calls, calls, strict=True)
                )
            turns, items = (*self.turns, turn), self._items_of(turn)
            self.store.put(self.id, StoredResponse(self.owner, compact(whole), turns, items))
        return whole

    def _items_of(self, turn: Turn) -> dict[str, tuple[Turn, ...]]:
        """Return the turns of each item; together they are the turn of the answer."""
        calls, found = iter(turn.get("tool_calls", ())), dict[str, tuple[Turn, ...]]()
        turns: tuple[Turn, ...]
        for each in self._items:
            match each.fields["type"]:
                case "message":
                    turns = (Turn(role="assistant", content=each.text),)
                case "function_call":
                    turns = (Turn(role="assistant", content="", tool_calls=(next(calls),)),)
                case _:
                    turns = ()
            found[each.fields["id"]] = turns
        return found

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
            "parallel_tool_calls": self.given.get("parallel_tool_calls", True),
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning else None,
                "summary": None,
            },
            "store": body.store is not False,
            "temperature": DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
            "text": {"format": self.given.get("format") or {"type": "text"}},
            "tool_choice": self.given.get("tool_choice") or "auto",
            "tools": self.given.get("tools") or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "meshllm": {"seed": self.seed},
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._count = self._count, self._count + 1
        return base.event(compact({"type": kind, "sequence_number": number, **fields}), kind)


def routes(service: Service) -> list[Route]:
    """Return the routes of a service."""
    store = ResponseStore()

    async def create(request: Request) -> Response:
        body, given = await _read(service, request)
        owner = _owner(request)
        before: tuple[Turn, ...] = ()
        if body.previous_response_id is not None:
            before = _found(store, body.previous_response_id, owner).turns
        turns = (*before, *body.turns(lambda item: store.item(item, owner)))
        asked, key = body.request(turns), key_of(request)
        schema, tools = schema_of_format(given.get("format")), tools_of(given, is_flat=True)
        asked = replace(asked, schema=schema, tools=tools)
        model = await model_as_needed(service, key, body.model, [asked], body.meshllm)
        reply = _ResponsesReply(
            model.name, body, given, owner, turns, store, asked.sampling.seed, is_traced(request)
        )
        events = answer_as_needed(service, key, model, [asked], body.meshllm)
        headers = headers_of(model)
        if body.stream:
            return EventStream(events, reply.events, reply.failure, headers)
        return Stream(events, JSON, reply.whole, error_object, headers)

    async def retrieve(request: Request) -> Response:
        found = _found(store, request.path_params["name"], _owner(request))
        return Response(found.body, media_type=JSON)

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


async def _read(service: Service, request: Request) -> tuple[Responses, dict[str, object]]:
    """Read a body, its `text.format` and its tools; raise `WrongField` for the unsupported."""
    body, given = await read_fields(service, request, Responses, APART, HARMLESS, NEUTRAL)
    text = given.pop("text", None) or {}
    asked = {} if not isinstance(text, dict) else {k: v for k, v in text.items() if v is not None}
    if asked.get("verbosity") == "medium":
        del asked["verbosity"]
    if not isinstance(text, dict) or asked.keys() - {"format"}:
        raise WrongField("text", "`text` takes `format` only")
    return body, given | asked


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason is FinishReason.LENGTH else "completed"


def _joined(turns: Iterable[Turn]) -> Iterator[Turn]:
    """Join calls to the turn of the assistant before them: an answer is one turn."""
    joined = list[tuple[Turn, list[ToolCall]]]()
    for turn in turns:
        calls = turn.get("tool_calls", ())
        if joined and joined[-1][0]["role"] == "assistant" and calls and not turn["content"]:
            joined[-1][1].extend(calls)
        else:
            joined.append((turn, list(calls)))
    for turn, together in joined:
        yield {**turn, "tool_calls": tuple(together)} if together else turn


def _owner(request: Request) -> str:
    key = key_of(request)
    return key.name if key else ""


def _found(store: ResponseStore, name: str, owner: str) -> StoredResponse:
    found = store.get(name, owner)
    if found is None:
        text = f"There is no response `{name[:100]}`: it is another key's, or no longer kept"
        raise Refused(text, Failure(404, INVALID, "response_not_found", "previous_response_id"))
    return found


def _text(content: str | tuple[TextPart, ...]) -> str:
    """Return a content, its parts as lines."""
    return content if isinstance(content, str) else "\n".join(each.text for each in content)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
