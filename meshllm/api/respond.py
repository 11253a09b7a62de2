"""Request bodies, error responses and streamed responses."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Generic, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from meshllm.errors import (
    Busy,
    LinkLost,
    MeshError,
    ModelError,
    NotAuthorised,
    PeerFault,
    TimedOut,
    UserError,
)
from meshllm.node.requests.request_json import REQUEST_BYTES, error_to_fields
from meshllm.strict_json import MAX_DIGITS, build, parse

T = TypeVar("T")

BODY_S = 30.0  # s to receive a body; 4 MiB at 1.2 Mbit/s
DRAIN_BYTES = 256 << 20  # of a body that is refused, for a client that reads after it has sent all


class BodyTooLarge(UserError):
    """A body is longer than `REQUEST_BYTES`."""


class BodyTooSlow(TimedOut):
    """A body does not arrive within `BODY_S`."""


_STATUSES: dict[type[MeshError], int] = {
    BodyTooLarge: 413,
    BodyTooSlow: 408,
    UserError: 400,
    NotAuthorised: 403,
    ModelError: 404,
    PeerFault: 502,
    Busy: 503,
    LinkLost: 503,
    TimedOut: 504,
    MeshError: 500,
}


class Stream(Response, Generic[T]):
    """Streams the items of a generator; closes it at its end or when the client disconnects.

    An item for which ``write`` returns no bytes is not sent. The status line is sent with the
    first bytes: an earlier error sets its own status, a later one is written by ``fail``.
    """

    def __init__(
        self,
        items: AsyncGenerator[T, None],
        media_type: str,
        write: Callable[[T], bytes],
        fail: Callable[[MeshError], bytes],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(media_type=media_type, headers=headers)
        del self.headers["content-length"]
        self.items, self.write, self.fail = items, write, fail

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the items until their end or until the client disconnects."""
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_disconnected(receive))
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

        async def put(chunk: bytes, *, is_last: bool = False) -> None:
            nonlocal is_begun
            if not is_begun:
                head = {"status": self.status_code, "headers": self.raw_headers}
                is_begun = True
                await send({"type": "http.response.start", **head})
            await send({"type": "http.response.body", "body": chunk, "more_body": not is_last})

        async with aclosing(self.items) as items:
            try:
                async for item in items:
                    if chunk := self.write(item):
                        await put(chunk)
            except MeshError as error:
                if not is_begun:
                    raise
                await put(self.fail(error))
        await put(b"", is_last=True)


async def _disconnected(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def with_keep_alive(
    items: AsyncGenerator[T, None], every_s: float
) -> AsyncGenerator[T | None, None]:
    """Yield the items, and None after each ``every_s`` without one; close them at the end."""
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
        await items.aclose()


async def within(items: AsyncGenerator[T, None], limit_s: float) -> AsyncGenerator[T, None]:
    """Yield the items; close them at the end.

    Raises:
        TimedOut: they are not complete within ``limit_s``.
    """
    clock = asyncio.get_running_loop().time
    end = clock() + limit_s
    async with aclosing(items):
        try:
            while True:
                yield await asyncio.wait_for(anext(items), end - clock())
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise TimedOut(f"The answer was not complete within {limit_s:g} s") from None


async def read_body(request: Request) -> bytes:
    """Read a body.

    Raises:
        BodyTooLarge: it is longer than `REQUEST_BYTES`, or announces that it is.
        BodyTooSlow: it takes longer than `BODY_S`.

    A client that has its connection closed after the response reads that once it has sent the body:
    if the rest were not read, a reset would reach it instead. The others keep theirs, and uvicorn
    discards the rest.
    """
    closes = "close" in request.headers.get("connection", "").lower()
    longest = DRAIN_BYTES if closes else REQUEST_BYTES
    announced = request.headers.get("content-length", "0")
    is_too_large = len(announced) > MAX_DIGITS or int(announced) > REQUEST_BYTES
    body, size = bytearray(), 0
    if closes or not is_too_large:
        try:
            async with asyncio.timeout(BODY_S):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > longest:
                        break
                    if size <= REQUEST_BYTES:
                        body += chunk
        except TimeoutError:
            raise BodyTooSlow(f"The body did not arrive within {BODY_S:.0f} s") from None
    if is_too_large or size > REQUEST_BYTES:
        raise BodyTooLarge(f"The body is longer than {REQUEST_BYTES} bytes")
    return bytes(body)


async def read(request: Request, kind: type[T]) -> T:
    """Read a body into a dataclass; raise `UserError` if it does not match."""
    return build(kind, parse(await read_body(request)))


async def on_error(_: Request, error: Exception) -> Response:
    """Respond with the error."""
    match error:
        case MeshError():
            status = next(_STATUSES[each] for each in type(error).__mro__ if each in _STATUSES)
            return _failure(error, status)
        case HTTPException(status_code=status, detail=detail):
            return _failure(UserError(detail), status)
        case ClientDisconnect():
            return Response(status_code=400)  # never read
        case _:
            return _failure(MeshError(f"This is a bug in meshllm: {type(error).__name__}"), 500)


def _failure(error: MeshError, status: int) -> Response:
    return JSONResponse({"error": error_to_fields(error)}, status)
