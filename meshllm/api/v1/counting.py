"""Counts each request of a key from its headers to the end of its answer.

An API server has `2 * MAX_OPEN` places for requests and connections, of which others than the owner
take `MAX_OPEN`. A client that leaves while its body waits to be read gives its place back.
"""

from contextlib import ExitStack, suppress

from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from meshllm.api.access.accounts import is_of_owner
from meshllm.api.access.gate import key_of
from meshllm.api.connection import MAX_OPEN
from meshllm.api.failure import LATER, Refused, response_of
from meshllm.api.generation.service import Service
from meshllm.api.respond import BodyEncoded, BodyTooLarge, BodyTooSlow, read_body

MAX_OTHERS = MAX_OPEN  # requests in progress of others than the owner


class RequestLimitMiddleware:
    """An application whose requests with a body count; those of a WebSocket count by themselves."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._others = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it if its key or the keys of others have too many."""
        if is_of_owner(key_of(HTTPConnection(scope))):
            await self._count(scope, receive, send)
        elif self._others >= MAX_OTHERS:
            full = response_of(
                Refused("This server has too many requests in progress", LATER), scope["path"]
            )
            await full(scope, receive, send)
        else:
            self._others += 1
            try:
                await self._count(scope, receive, send)
            finally:
                self._others -= 1

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it if its key has too many."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        request, answer = Request(scope, receive), self._app
        with ExitStack() as stack:
            try:
                stack.enter_context(self._service.counted(key_of(request)))
            except Refused as refused:
                await _discard_body(request)
                answer = response_of(refused, scope["path"])
            await answer(scope, receive, send)


async def _discard_body(request: Request) -> None:
    """Read a body as one that is longer than allowed."""
    with suppress(BodyTooLarge, BodyTooSlow, BodyEncoded, ClientDisconnect):
        await read_body(request, longest=0)
