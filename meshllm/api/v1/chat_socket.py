"""`/v1/chat/socket`: chats over one WebSocket, for clients that want a single connection.

Theory of operation
-------------------
Both sides send JSON objects as text messages. The client sends `ask` with an id of its own and the
body of a chat completion, and `cancel` with an id. The server answers each ask by `progress` of the
prefill, `piece`s, and then one of `done`, `error` and `cancelled`; all carry the id. Several asks
run at a time, each in a task. Any other message ends the connection.

A task sends its messages itself, and waits while the client does not read: nothing is queued. One
task reads, so that the end of the connection is noticed at once, in any phase; it then cancels all
others, which close their generations on every node.
"""

import asyncio
import json
from collections.abc import Mapping
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from meshllm.api.access.accounts import ApiKey
from meshllm.api.access.connection_limit import ConnectionLimit
from meshllm.api.access.gate import identify_again, key_of
from meshllm.api.failure import (
    RETRY_S,
    Failure,
    Refused,
    compact,
    error_object,
    failure_of,
    response_of,
)
from meshllm.api.generation.generating import build_fields
from meshllm.api.generation.reply import Reply, reason
from meshllm.api.generation.service import Service
from meshllm.api.v1.chat import APART, Chat, ChatCall, call, call_entry, token_entry
from meshllm.errors import Busy, MeshError, UserError
from meshllm.node.event_loop import awake_timeout
from meshllm.request import Answer, Event, Piece, Prefilled
from meshllm.strict_json import WrongField, build

PATH = "/v1/chat/socket"
PROTOCOL = "meshllm.chat.1"
"""The subprotocol; a client may offer it."""
MAX_SOCKETS = 128  # of one API server; the owner has as many of its own
MAX_OF_KEY = 32
MAX_CHATS = 8  # in progress on one connection
MAX_ID_CHARS = 64
IDLE_S = 300.0  # s without a message or an answer in progress, after which the connection ends

_INVALID, _AWAY, _ABNORMAL = 1008, 1001, 1006  # close codes, RFC 6455
_FULL = Failure(503, "server_error", "service_unavailable", retry_s=RETRY_S)
_TOO_MANY = Failure(429, "requests", "rate_limit_exceeded", retry_s=RETRY_S)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat to answer."""

    type: Literal["ask"]
    id: str
    request: dict[str, object]
    """The body of a chat completion."""


@dataclass(frozen=True, slots=True)
class _BuiltAsk:
    """An ask whose body has been read."""

    id: str
    body: tuple[Chat, dict[str, object]] | UserError
    """The chat, and the fields that stand `APART`; or what is invalid."""


@dataclass(frozen=True, slots=True)
class CancelChat:
    """A chat to end."""

    type: Literal["cancel"]
    id: str


def routes(service: Service) -> list[WebSocketRoute]:
    """Return the routes of a service."""
    sockets = ConnectionLimit(MAX_SOCKETS, MAX_OF_KEY)

    async def chat(socket: WebSocket) -> None:
        with ExitStack() as stack:
            try:
                stack.enter_context(sockets.counted(key_of(socket), _too_many_sockets()))
            except Refused as full:
                await socket.send_denial_response(response_of(full))
                return
            await socket.accept(PROTOCOL if PROTOCOL in socket.scope["subprotocols"] else None)
            await _ChatSocket(service, socket).run()

    return [WebSocketRoute(PATH, chat)]


def _now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(slots=True)
class _ChatSocket:
    """One connection."""

    service: Service
    socket: WebSocket
    answers: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """In progress, by the id of the ask."""
    quiet_since: float = field(default_factory=_now)
    """When the last message came, or the last answer ended."""

    @property
    def _is_open(self) -> bool:
        return self.socket.application_state is WebSocketState.CONNECTED

    async def run(self) -> None:
        """Answer until the client leaves, sends what is invalid, or is idle."""
        async with asyncio.TaskGroup() as group:
            try:
                await self._read(group)
            except WebSocketDisconnect:
                pass
            finally:
                await self._cancel_all()

    async def _read(self, group: asyncio.TaskGroup) -> None:
        while True:
            try:
                async with awake_timeout(max(0.0, self.quiet_since + IDLE_S - _now())):
                    message = await self.socket.receive()
            except TimeoutError:
                if self.answers:
                    self.quiet_since = _now()
                elif _now() >= self.quiet_since + IDLE_S:
                    await self._end(_AWAY, "idle")
                    return
                continue
            self.quiet_since = _now()
            if message["type"] == "websocket.disconnect":
                return
            try:
                wanted = await self._read_message(message.get("text"))
            except Busy as error:  # nor was its id read
                await self._fail(None, error)
                continue
            except UserError as error:
                await self._fail(None, error)
                await self._end(_INVALID, "invalid message")
                return
            await self._do(wanted, group)

    async def _read_message(self, text: str | None) -> _BuiltAsk | CancelChat:
        """Read a message; raise `UserError` for anything else."""
        if text is None:
            raise UserError("Invalid message: it is not text")
        return await self.service.read(key_of(self.socket), text.encode(), _message)

    async def _do(self, wanted: _BuiltAsk | CancelChat, group: asyncio.TaskGroup) -> None:
        running = self.answers.get(wanted.id)
        if isinstance(wanted, CancelChat):
            if running:  # else it has just ended
                await self._cancel(wanted.id, running)
        elif running:
            await self._fail(wanted.id, UserError(f"The request `{wanted.id}` is in progress"))
        elif len(self.answers) == MAX_CHATS:
            text = f"This connection has {MAX_CHATS} requests in progress, its limit"
            await self._fail(wanted.id, Refused(text, _TOO_MANY))
        else:
            answer = self.answers[wanted.id] = group.create_task(self._answer(wanted))
            answer.add_done_callback(lambda _: self._ended(wanted.id))

    def _ended(self, ask: str) -> None:
        del self.answers[ask]
        self.quiet_since = _now()

    async def _cancel(self, ask: str, answer: asyncio.Task[None]) -> None:
        answer.cancel()
        await asyncio.wait({answer})
        if answer.cancelled():  # else its end is sent already
            await self._send({"type": "cancelled", "id": ask})

    async def _cancel_all(self) -> None:
        answers = set(self.answers.values())
        for answer in answers:
            answer.cancel()
        if answers:
            await asyncio.wait(answers)

    async def _end(self, code: int, why: str) -> None:
        """Close the connection, once no answer can send any more."""
        await self._cancel_all()
        if self._is_open:
            await self.socket.close(code, why)

    async def _answer(self, asked: _BuiltAsk) -> None:
        try:
            key = await identify_again(self.socket)
            with self.service.counted(key):
                done = await self._send_events(asked.id, await self._call(asked, key))
            await self._send({"type": "done", "id": asked.id, **done})
        except WebSocketDisconnect:  # the reader notices it, too
            return
        except MeshError as error:
            with suppress(WebSocketDisconnect):
                await self._fail(asked.id, error)

    async def _send_events(self, ask: str, made: ChatCall) -> dict[str, Any]:
        """Send the events of an ask; return its end, which is sent once nothing of it runs."""
        done = dict[str, Any]()
        async with aclosing(made.events) as events:
            async for _, event in events:
                if isinstance(event, Answer):
                    done = _done(event, made)
                elif fields := _fields_of(event):
                    await self._send({"type": fields.pop("type"), "id": ask, **fields})
        return done

    async def _call(self, asked: _BuiltAsk, key: ApiKey | None) -> ChatCall:
        if isinstance(asked.body, UserError):
            raise asked.body
        body, apart = asked.body
        for name in ("stream", "stream_options"):
            if getattr(body, name) is not None:
                raise WrongField(name, f"`{name}` has no effect on a WebSocket")
        if body.choices != 1:
            raise WrongField("n", f"`n` is {body.n}, not 1: send several requests")
        return await call(self.service, key, body, apart)

    async def _fail(self, ask: str | None, error: MeshError) -> None:
        fields = json.loads(error_object(error))
        wait_s = failure_of(error).retry_s
        await self._send({"type": "error", "id": ask, **fields, "retry_after_s": wait_s})

    async def _send(self, fields: dict[str, Any]) -> None:
        """Send a message; wait while the client does not read.

        Raises:
            WebSocketDisconnect: the client has left, as an earlier message may have shown.
        """
        if not self._is_open:
            raise WebSocketDisconnect(_ABNORMAL)
        await self.socket.send_text(compact(fields).decode())


def _too_many_sockets() -> Refused:
    text = f"This server has {MAX_SOCKETS} WebSockets, or {MAX_OF_KEY} of this key, its limit"
    return Refused(text, _FULL)


def _message(found: object) -> _BuiltAsk | CancelChat:
    """Read a message; long ones in a thread."""
    kind = found.get("type") if isinstance(found, Mapping) else None
    if kind not in ("ask", "cancel"):  # not a set: it may be a list
        raise UserError("Invalid message", hint="`type` is `ask` or `cancel`")
    message: ChatRequest | CancelChat = (
        build(ChatRequest, found) if kind == "ask" else build(CancelChat, found)
    )
    if not 0 < len(message.id) <= MAX_ID_CHARS:
        raise UserError(f"`id` does not have 1 to {MAX_ID_CHARS} characters")
    if isinstance(message, CancelChat):
        return message
    try:
        return _BuiltAsk(message.id, build_fields(message.request, Chat, APART))
    except UserError as error:  # of this ask only
        return _BuiltAsk(message.id, error)


def _fields_of(event: Event) -> dict[str, Any] | None:
    """Lay out an event; None for what is not shown."""
    match event:
        case Prefilled(done=done, total=total):
            return {"type": "progress", "done": done, "total": total}
        case Piece() if event.has_text or event.logprobs:
            return {"type": "piece", "text": event.text, **_more(event)}
    return None


def _more(piece: Piece) -> dict[str, Any]:
    """Lay out what a piece has beside its text."""
    more = {
        "reasoning": piece.reasoning,
        "logprobs": [token_entry(each) for each in piece.logprobs],
        "tool_calls": [call_entry(each) for each in piece.calls],
    }
    return {name: value for name, value in more.items() if value}


def _done(answer: Answer, made: ChatCall) -> dict[str, Any]:
    reply = Reply("", made.model.name, made.model.fingerprint, made.asked, 1, has_usage=True)
    reply.choices[0].answer = answer
    return {
        "finish_reason": reason(answer),
        "usage": reply.usage(),
        "seed": made.asked[0].sampling.seed,
        "model": made.model.name,
        "system_fingerprint": made.model.fingerprint or None,
        "ttft_ms": answer.ttft_ms,
        "ms_per_token": answer.ms_per_token,
    }
