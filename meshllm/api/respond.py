"""Bodies in, errors and streams out; knows nothing about what is asked for."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from meshllm.errors import (
    LinkLost,
    MeshError,
    ModelError,
    NotAuthorised,
    PeerFault,
    TimedOut,
    UserError,
)
from meshllm.node.asking import REQUEST_BYTES, error_to_fields
from meshllm.strict_json import build, parse

T = TypeVar("T")

BODY_S = 30.0  # for a body; 4 MiB at 1.2 Mbit/s

_STATUSES: dict[type[MeshError], int] = {
    UserError: 400,
    NotAuthorised: 403,
    ModelError: 404,
    PeerFault: 502,
    LinkLost: 503,
    TimedOut: 504,
    MeshError: 500,
}


class Stream(Response):
    """Sends what a generator yields, and closes it when that is done or the client is gone.

    The status waits for the first chunk: an error before it has a status of its own.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], media_type: str) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self.chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all, or stop in the middle."""
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_leave(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            leaving.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        is_begun = False
        async with aclosing(self.chunks) as chunks:
            async for chunk in chunks:
                if not is_begun:
                    is_begun = True
                    await send(
                        {
                            "type": "http.response.start",
                            "status": self.status_code,
                            "headers": self.raw_headers,
                        }
                    )
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _leave(receive: Receive) -> None:
    """Wait until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def patiently(
    items: AsyncGenerator[T, None], every_s: float
) -> AsyncGenerator[T | None, None]:
    """Yield the items, and None each time so long passed without one; the caller closes them."""
    upcoming = asyncio.ensure_future(anext(items, None))
    try:
        while True:
            await asyncio.wait({upcoming}, timeout=every_s)
            if not upcoming.done():
                yield None
            elif (item := upcoming.result()) is not None:
                yield item
                upcoming = asyncio.ensure_future(anext(items, None))
            else:
                return
    finally:
        upcoming.cancel()
        await asyncio.gather(upcoming, return_exceptions=True)


async def read_body(request: Request) -> bytes:
    """Read a body.

    Raises:
        UserError: it is too long.
        TimedOut: it comes too slowly.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > REQUEST_BYTES:
                    raise UserError(f"The body is longer than {REQUEST_BYTES} bytes")
    except TimeoutError:
        raise TimedOut(f"The body did not come within {BODY_S:.0f} s") from None
    return bytes(body)


async def read(request: Request, kind: type[T]) -> T:
    """Read a body into a dataclass; raise `UserError` for whatever does not fit."""
    return build(kind, parse(await read_body(request)))


async def on_error(_: Request, error: Exception) -> Response:
    """Answer with what went wrong."""
    match error:
        case MeshError():
            status = next(_STATUSES[each] for each in type(error).__mro__ if each in _STATUSES)
            return _failure(error, status)
        case HTTPException(status_code=status, detail=detail):
            return _failure(UserError(detail), status)
        case ClientDisconnect():
            return Response(status_code=400)  # nobody reads it
        case _:
            return _failure(MeshError(f"This is a bug in meshllm: {type(error).__name__}"), 500)


def _failure(error: MeshError, status: int) -> Response:
    return JSONResponse({"error": error_to_fields(error)}, status)
