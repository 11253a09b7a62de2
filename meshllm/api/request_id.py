"""The id of a request: the client's own if it sends one, in every response and in the log.

What is not HTTP has none: the server refuses it before there is a request.

https://platform.openai.com/docs/api-reference/debugging-requests
https://docs.anthropic.com/en/api/errors#request-id
"""

import secrets
from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = "x-request-id"
ANTHROPICS = "request-id"  # what Anthropic's clients read
MAX_ID_CHARS = 128

_SCOPE = "meshllm.request_id"
_HEADS = {"http.response.start", "websocket.accept", "websocket.http.response.start"}
_current: ContextVar[str] = ContextVar("request_id", default="")


def request_id() -> str:
    """Return the id of the request that this task answers; an empty text outside of one."""
    return _current.get()


class RequestIds:
    """An application whose every response carries the id of its request.

    The application may include others like it: the outermost one chooses the id.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Choose the id of a request and pass it on."""
        if _SCOPE in scope:  # not by the task: uvicorn begins pipelined requests in the last one's
            await self._app(scope, receive, send)
            return
        chosen = scope[_SCOPE] = _chosen(Headers(scope=scope).get(REQUEST_ID, ""))

        async def named(message: Message) -> None:
            if message["type"] in _HEADS:
                headers = MutableHeaders(raw=list(message.get("headers", ())))
                headers[REQUEST_ID] = headers[ANTHROPICS] = chosen
                message = {**message, "headers": headers.raw}
            await send(message)

        token = _current.set(chosen)
        try:
            await self._app(scope, receive, named)
        finally:
            _current.reset(token)


def _chosen(sent: str) -> str:
    """Return what a client sent if it may stand in headers and logs, else a new id."""
    is_valid = 0 < len(sent) <= MAX_ID_CHARS and sent.isascii() and sent.isprintable()
    return sent if is_valid else f"req_{secrets.token_hex(16)}"
