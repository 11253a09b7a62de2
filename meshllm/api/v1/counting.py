"""Counts each request of a key from its headers to the end of its answer."""

from contextlib import ExitStack, suppress

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from meshllm.api.access.gate import key_of
from meshllm.api.failure import Refused, response_of
from meshllm.api.respond import BodyTooLarge, BodyTooSlow, read_body
from meshllm.api.v1.service import Service


class Counting:
    """An application whose requests with a body count; those of a WebSocket count by themselves."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
    with suppress(BodyTooLarge, BodyTooSlow, ClientDisconnect):
        await read_body(request, longest=0)
