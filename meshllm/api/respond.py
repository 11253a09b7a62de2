"""Request bodies, error responses and streamed responses."""

import asyncio
import logging
import os
import time
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from meshllm.api.request_id import request_id
from meshllm.errors import (
    Busy,
    LinkLost,
    MeshError,
    ModelMissing,
    NotAuthorised,
    PeerFault,
    TimedOut,
    UserError,
)
from meshllm.names import SESSION_ID_BYTES, SessionId
from meshllm.node.admission_queue import AdmissionQueue
from meshllm.node.event_loop import awake_timeout
from meshllm.node.requests.held_bytes import HeldBytes
from meshllm.node.requests.request_json import REQUEST_BYTES, error_to_fields
from meshllm.protocol.kv_cache.admission import Admission
from meshllm.protocol.kv_cache.budget import KvBudget
from meshllm.strict_json import MAX_DIGITS, build, parse

T = TypeVar("T")

logger = logging.getLogger(__name__)

BODY_S = 30.0  # s to receive a body; 4 MiB at 1.2 Mbit/s
KEEP_ALIVE_S = 10.0  # proxies close a connection that is idle for 30 to 60 s
SHORT_BYTES = 16 * 1024  # of JSON that is read in a millisecond or two
HELD_STEP = 256 * 1024  # of a longer body, which are counted at a time
REST = 2.0  # times as long as a long one took
MAX_LONG = 1024  # that wait to be read: more than an API server has connections
DRAIN_BYTES = 256 << 20  # of a body that is refused, for a client that reads after it has sent all


class BodyTooLarge(UserError):
    """A body is longer than `REQUEST_BYTES`."""


class BodyEncoded(UserError):
    """A body is compressed."""


class BodyTooSlow(TimedOut):
    """A body does not arrive within `BODY_S`."""


_STATUSES: dict[type[MeshError], int] = {
    BodyTooLarge: 413,
    BodyEncoded: 415,
    BodyTooSlow: 408,
    UserError: 400,
    NotAuthorised: 403,
    ModelMissing: 404,
    PeerFault: 502,
    Busy: 503,
    LinkLost: 503,
    TimedOut: 504,
    MeshError: 500,
}


class Stream(Response, Generic[T]):
    """Streams the items of a generator; closes it at its end or when the client disconnects.

    An item for which ``write`` returns no bytes is not sent. The status line is sent with the
    first bytes: an earlier error sets its own status, a later one is written by ``fail``. In each
    `KEEP_ALIVE_S` of silence, what ``idle`` returns is sent.
    """

    def __init__(
        self,
        items: AsyncGenerator[T, None],
        media_type: str,
        write: Callable[[T], bytes],
        fail: Callable[[MeshError], bytes],
        headers: Mapping[str, str] | None = None,
        idle: Callable[[], bytes] | None = None,
    ) -> None:
        super().__init__(media_type=media_type, headers=headers)
        del self.headers["content-length"]
        self.items, self.write, self.fail, self.idle = items, write, fail, idle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the items until their end or until the client disconnects.

        For HEAD, which has no body, no item is made.
        """
        sent = _Body({"status": self.status_code, "headers": self.raw_headers}, send)
        if scope.get("method") == "HEAD":
            await self.items.aclose()
            await sent.put(b"", is_last=True)
            return
        sending = asyncio.ensure_future(self._send(sent))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await self._wait({sending, leaving}, sent)
        finally:
            sending.cancel()
            leaving.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
        if not sending.cancelled():
            sending.result()

    async def _wait(self, tasks: "set[asyncio.Future[None]]", sent: "_Body") -> None:
        """Wait for the first of these tasks; keep the connection alive meanwhile."""
        limit_s = KEEP_ALIVE_S if self.idle else None
        while not (await asyncio.wait(tasks, timeout=limit_s, return_when=FIRST_COMPLETED))[0]:
            limit_s = sent.quiet_s
            if self.idle and limit_s <= 0:
                limit_s = KEEP_ALIVE_S
                await sent.put(self.idle())

    async def _send(self, sent: "_Body") -> None:
        async with aclosing(self.items) as items:
            try:
                async for item in items:
                    if chunk := self.write(item):
                        await sent.put(chunk)
            except MeshError as error:
                if not sent.is_begun:
                    raise
                await sent.put(self.fail(error))
        await sent.put(b"", is_last=True)


class _Body:
    """The body of a response, whose status line is sent with the first bytes."""

    def __init__(self, head: dict[str, Any], send: Send) -> None:
        self.is_begun = False
        self._head, self._send = head, send
        self._clock = asyncio.get_running_loop().time
        self._since = self._clock()
        self._lock = asyncio.Lock()  # two tasks write

    @property
    def quiet_s(self) -> float:
        """Seconds of silence until `KEEP_ALIVE_S`; not those of waiting for the client to read."""
        since = self._clock() if self._lock.locked() else self._since
        return since + KEEP_ALIVE_S - self._clock()

    async def put(self, chunk: bytes, *, is_last: bool = False) -> None:
        """Send bytes."""
        async with self._lock:
            if not self.is_begun:
                self.is_begun = True
                await self._send({"type": "http.response.start", **self._head})
            await self._send(
                {"type": "http.response.body", "body": chunk, "more_body": not is_last}
            )
            self._since = self._clock()


async def _disconnected(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def within(
    items: AsyncGenerator[T, None], limit_s: float, whose: str
) -> AsyncGenerator[T, None]:
    """Yield the items; close them at the end.

    Raises:
        TimedOut: they are not complete within ``limit_s``; its message says ``whose`` limit it is.
    """
    end = asyncio.get_running_loop().time() + limit_s
    async with aclosing(items):
        try:
            while True:
                yield await _next_until(end, items)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise TimedOut(
                f"The answer was not complete within {limit_s:g} s, the deadline of {whose}",
                hint="request a shorter answer, or set a later deadline",
            ) from None


async def _next_until(end: float, items: AsyncGenerator[T, None]) -> T:
    """Return the next item; raise `TimeoutError` at the time ``end``, also if it is there by then.

    `asyncio.wait_for` of Python 3.11 may lose a cancellation.
    """
    if asyncio.get_running_loop().time() >= end:
        raise TimeoutError
    async with asyncio.timeout_at(end):
        return await anext(items)


async def begun_within(
    items: AsyncGenerator[T, None], limit_s: float, is_begun: Callable[[T], bool]
) -> AsyncGenerator[T, None]:
    """Yield the items; close them at the end.

    Raises:
        TimedOut: none of them ``is_begun`` within ``limit_s``.
    """
    end, has_begun = asyncio.get_running_loop().time() + limit_s, False
    async with aclosing(items):
        try:
            while not has_begun:
                item = await _next_until(end, items)
                has_begun = is_begun(item)
                yield item
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise TimedOut(
                f"The answer did not begin within {limit_s:g} s",
                hint="retry later, or allow more time",
            ) from None
        async for item in items:
            yield item


async def read_body(
    request: Request,
    longest: int = REQUEST_BYTES,
    hold: Callable[[int], object] = lambda _size: None,
) -> bytes:
    """Read a body; ``hold`` counts the bytes of a long one before they arrive.

    Raises:
        Busy: ``hold`` raised it.
        BodyTooLarge: it has more bytes than the ``longest``, or announces that it has.
        BodyTooSlow: it takes longer than `BODY_S`.
        BodyEncoded: it is compressed.

    A client that has its connection closed after the response reads that once it has sent the body:
    if the rest were not read, a reset would reach it instead. The others keep theirs, and uvicorn
    discards the rest.
    """
    body, closes = _IncomingBody(longest, hold), "close" in _header(request, "connection")
    announced = request.headers.get("content-length", "0")
    if len(announced) > MAX_DIGITS or int(announced) > longest:
        body.refuse_length()
    if closes or body.error is None:
        try:
            async with awake_timeout(BODY_S):
                await body.receive(request.stream(), DRAIN_BYTES if closes else 0)
        except TimeoutError:
            raise BodyTooSlow(f"The body did not arrive within {BODY_S:.0f} s") from None
    if body.error:
        raise body.error
    encoding = _header(request, "content-encoding").strip()
    if encoding not in ("", "identity"):
        text = f"A body in the content encoding `{encoding[:40]}` is not supported"
        raise BodyEncoded(text, hint="send it uncompressed")
    return bytes(body.received)


class _IncomingBody:
    """A body that arrives: its bytes are kept until it is refused."""

    def __init__(self, longest: int, hold: Callable[[int], object]) -> None:
        self.received = bytearray()
        self.error: MeshError | None = None
        """Why it is refused."""
        self._longest, self._hold = longest, hold
        self._held = SHORT_BYTES

    def refuse_length(self) -> None:
        self._refuse(BodyTooLarge(f"The body is longer than {self._longest} bytes"))

    async def receive(self, chunks: AsyncIterator[bytes], drained: int) -> None:
        """Keep the chunks; once the body is refused, read on up to ``drained`` bytes of it."""
        size = 0
        async for chunk in chunks:
            size += len(chunk)
            self._take(chunk)
            if self.error and size > drained:
                return

    def _take(self, chunk: bytes) -> None:
        if self.error:
            return
        size = len(self.received) + len(chunk)
        if size > self._longest:
            self.refuse_length()
            return
        try:
            while self._held < size:
                self._hold(HELD_STEP)
                self._held += HELD_STEP
        except Busy as error:
            self._refuse(error)
            return
        self.received += chunk

    def _refuse(self, error: MeshError) -> None:
        self.error = error
        self.received.clear()


def _header(request: Request, name: str) -> str:
    return request.headers.get(name, "").lower()


async def while_connected(request: Request, doing: Coroutine[Any, Any, T]) -> T:
    """Return what something returns, for a client that has sent its whole body.

    Raises:
        ClientDisconnect: the client left before; it is cancelled.
    """
    done = asyncio.ensure_future(doing)
    leaving = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({done, leaving}, return_when=FIRST_COMPLETED)
    finally:
        done.cancel()
        leaving.cancel()
        await asyncio.gather(done, leaving, return_exceptions=True)
    if done.cancelled():
        raise ClientDisconnect
    return done.result()


class LongReader:
    """Reads long JSON, one text at a time; who sends it takes turns with others by KiB.

    Texts that wait are bounded by sender, as `HeldBytes`. One that is cancelled keeps its turn
    until the thread that reads it has ended.

    A thread reads it, which shares the interpreter with the event loop: after a text it rests twice
    as long as it worked.
    """

    def __init__(
        self,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sleep, self._clock = sleep, clock
        self._turns = AdmissionQueue(Admission(KvBudget([]), most=1, waiting=MAX_LONG))
        self._held = HeldBytes()
        self._rests_until = clock()

    async def read(self, sender: str, data: bytes, convert: Callable[[object], T]) -> T:
        """Parse JSON and convert it, off the event loop unless it is short.

        Raises:
            Busy: too many bytes wait.
            UserError: it is invalid.
        """
        if len(data) <= SHORT_BYTES:
            return convert(parse(data))
        turn = SessionId(os.urandom(SESSION_ID_BYTES))
        with self._held.holding(sender, len(data)):
            async with self._turns.admitted(turn, len(data) // 1024, sender):
                if (rest := self._rests_until - self._clock()) > 0:
                    await self._sleep(rest)
                reading = asyncio.ensure_future(asyncio.to_thread(self._read, data, convert))
                try:
                    await asyncio.wait({reading})
                    return reading.result()
                finally:
                    await asyncio.gather(reading, return_exceptions=True)

    def _read(self, data: bytes, convert: Callable[[object], T]) -> T:
        begin = self._clock()
        try:
            return convert(parse(data))
        finally:
            end = self._clock()
            self._rests_until = end + REST * (end - begin)


async def read(request: Request, kind: type[T]) -> T:
    """Read a body of the owner into a dataclass; raise `UserError` if it does not match."""
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
            logger.error("request %s: %s", request_id(), type(error).__name__)
            return _failure(MeshError(f"This is a bug in meshllm: {type(error).__name__}"), 500)


def _failure(error: MeshError, status: int) -> Response:
    return JSONResponse({"error": error_to_fields(error)}, status)
