"""Requests from here, from clients and from other nodes; knows nothing about how they arrived.

Theory of operation
-------------------
The node that takes a request is its ingress. When it is the entry it answers itself, else it asks
the entry over their link: Ask one way, Said the other until the answer or an error; Hush where
the asker gives up before that.
A client asks any node, which is then its ingress; an Ask of a node is served by the entry only, so
that no request goes round in circles.

The ingress holds the request until it is answered. When the ring breaks, it waits for the next one
and asks again: the text is a pure function of the request, so the new ring writes the same text,
and what was already shown is skipped. Only when it differs, or no ring comes in time, the
request ends with the error. The ingress alone asks again: what it reports to a client in the end is
final, and the client turns to another node only when it has lost the link.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from meshllm.errors import LinkLost, MeshError, PeerFault, TimedOut
from meshllm.names import NodeId
from meshllm.node.asking import (
    AnswerReader,
    error_to_json,
    event_to_lines,
    request_from_json,
    request_to_json,
)
from meshllm.protocol.meshwire import ASK_ID_BYTES, Ask, Hush, Said
from meshllm.request import Answer, Event, Piece, Request

MAX_ASKED = 16  # requests of one node or client at a time
MAX_UNREAD = 16 << 20  # bytes of one answer that nobody took
SILENT_S = 600.0  # s without an event: a long prompt in a long line
RING_S = 30.0  # s; how long a request waits for a ring: loading a span takes seconds
AGAIN_S = 0.25  # s before a request is asked again, and ever longer
ATTEMPTS = 8  # rings that one request may see break

logger = logging.getLogger(__name__)


class Ring(Protocol):
    """What of the ring in force a desk has to know."""

    async def entry(self) -> NodeId:
        """Wait for a ring that stands, and name its entry."""
        ...

    def reason(self) -> str:
        """Say why there is none."""
        ...

    def answer(self, request: Request) -> AsyncGenerator[Event, None]:
        """Answer as the entry."""
        ...


@dataclass(slots=True)
class Counts:
    """What became of requests whose ingress is this node."""

    active: int = 0
    served: int = 0
    failed: int = 0
    tokens: int = 0
    last: Answer | None = None
    """The latest answer, for its times; what was asked and said is not kept."""
    last_tokens: int = 0


@dataclass(slots=True)
class _Call:
    """An Ask to another node that is not yet answered."""

    peer: NodeId
    lines: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    """What was said; None when the link is gone, or nobody reads."""

    unread: int = 0
    """Bytes in ``lines``."""

    is_over: bool = False
    """Nothing more will be said."""

    def take(self, line: bytes) -> None:
        """Queue a line; who fills the queue is given up."""
        if self.unread <= MAX_UNREAD:
            self.unread += len(line)
            self.lines.put_nowait(line if self.unread <= MAX_UNREAD else None)

    async def next(self) -> bytes | None:
        """Wait for a line; None when no more will come."""
        async with asyncio.timeout(SILENT_S):
            line = await self.lines.get()
        self.unread -= len(line or b"")
        return line


@dataclass(slots=True)
class _Shown:
    """The text that the asker has, through all attempts to answer."""

    text: str = ""
    skip: int = 0
    """Characters of it that this attempt has still to write again."""

    def begin(self) -> None:
        """Expect the text from its beginning."""
        self.skip = len(self.text)

    def take(self, event: Event) -> Event | None:
        """Return what of an event is new; None when nothing is.

        Raises:
            MeshError: the new ring writes another text, which cannot go on from what was shown.
        """
        match event:
            case Piece(text):
                self._check(self.text.startswith(text[: self.skip], len(self.text) - self.skip))
                new, self.skip = text[self.skip :], max(0, self.skip - len(text))
                self.text += new
                return Piece(new) if new else None
            case Answer():
                self._check(self.skip == 0)
        return event

    @staticmethod
    def _check(is_same: bool) -> None:
        if not is_same:
            raise MeshError(
                "The answer cannot go on after its ring broke: the next one wrote another"
            )


class _Reported(LinkLost):
    """An ingress has asked again as often as it may."""


class Desk:
    """Answers requests, here or through the entry."""

    def __init__(
        self,
        me: NodeId,
        ring: Ring,
        send: Callable[[NodeId, Ask | Said | Hush], None],
        *,
        asks_ingress: bool = False,
    ) -> None:
        """Answer; with ``asks_ingress`` the nodes that are asked ask the entry again themselves."""
        self._me = me
        self._ring = ring
        self._send = send
        self._asks_ingress = asks_ingress
        self._calls: dict[bytes, _Call] = {}
        self._served: dict[tuple[NodeId, bytes], asyncio.Task[None]] = {}
        self._jobs = asyncio.TaskGroup()
        self.counts = Counts()

    async def run(self) -> None:
        """Serve those who ask, until cancelled."""
        async with self._jobs:
            await asyncio.Event().wait()  # nobody sets it

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Yield the events of a request, whoever is the entry; survive the loss of a ring.

        Raises:
            MeshError: the request cannot be served, or no ring answered it.
        """
        self.counts.active += 1
        try:
            async with aclosing(self._attempts(request)) as events:
                async for event in events:
                    if isinstance(event, Answer):
                        self._count(event)
                    yield event
        except MeshError:
            self.counts.failed += 1
            raise
        finally:
            self.counts.active -= 1

    def receive(self, peer: NodeId, message: Ask | Said | Hush, *, is_client: bool) -> None:
        """Take a message about a request."""
        match message:
            case Ask(ask, data):
                self._open(peer, ask, data, is_client=is_client)
            case Said(ask, data):
                if (call := self._calls.get(ask)) and call.peer == peer:
                    call.take(data)
            case Hush(ask):
                if task := self._served.get((peer, ask)):
                    task.cancel()

    def lost(self, peer: NodeId) -> None:
        """End what another node asked, and what it was asked."""
        for (asker, _), task in self._served.items():
            if asker == peer:
                task.cancel()
        for call in self._calls.values():
            if call.peer == peer:
                call.lines.put_nowait(None)

    async def _attempts(self, request: Request) -> AsyncGenerator[Event, None]:
        shown = _Shown()
        for attempt in range(1, ATTEMPTS + 1):
            shown.begin()
            try:
                async with aclosing(self._once(request)) as events:
                    async for event in events:
                        if new := shown.take(event):
                            yield new
            except LinkLost as error:
                if attempt == ATTEMPTS or isinstance(error, _Reported):
                    raise
                logger.info("the ring broke under a request, which is asked again: %s", error)
                await asyncio.sleep(attempt * AGAIN_S)
            else:
                return

    async def _once(self, request: Request) -> AsyncGenerator[Event, None]:
        entry = await self._entry()
        events = self._ring.answer(request) if entry == self._me else self._ask(entry, request)
        async with aclosing(events):
            async for event in events:
                yield event

    async def _entry(self) -> NodeId:
        try:
            async with asyncio.timeout(RING_S):
                return await self._ring.entry()
        except TimeoutError:
            raise TimedOut(
                f"There is no ring: {self._ring.reason()}", hint="see `meshllm ring status`"
            ) from None

    async def _ask(self, entry: NodeId, request: Request) -> AsyncGenerator[Event, None]:
        reader = AnswerReader()
        async with self._calling(entry, request) as call:
            while not call.is_over:
                try:
                    line = await call.next()
                except TimeoutError:
                    raise TimedOut(f"The entry said nothing for {SILENT_S:.0f} s") from None
                if line is None:
                    raise LinkLost("The entry of the ring is gone")
                try:
                    event = reader.take(line)
                except LinkLost as error:
                    call.is_over = True
                    if self._asks_ingress:
                        raise _Reported(str(error), hint=error.hint) from None
                    raise
                except MeshError as error:
                    call.is_over = not isinstance(error, PeerFault)
                    raise
                call.is_over = isinstance(event, Answer)
                if event is not None:
                    yield event

    @asynccontextmanager
    async def _calling(self, entry: NodeId, request: Request) -> AsyncIterator[_Call]:
        ask = os.urandom(ASK_ID_BYTES)
        call = self._calls[ask] = _Call(entry)
        try:
            self._send(entry, Ask(ask, request_to_json(request)))
            yield call
        finally:
            del self._calls[ask]
            if not call.is_over:
                self._send(entry, Hush(ask))

    def _open(self, peer: NodeId, ask: bytes, data: bytes, *, is_client: bool) -> None:
        held = Counter(asker for asker, _ in self._served)[peer]
        if held >= MAX_ASKED or (peer, ask) in self._served:
            error = MeshError(f"{held} requests of this node are under way", hint="ask again later")
            self._send(peer, Said(ask, error_to_json(error)))
            return
        task = self._jobs.create_task(self._serve(peer, ask, data, is_client=is_client))
        self._served[peer, ask] = task
        task.add_done_callback(lambda _: self._served.pop((peer, ask), None))

    async def _serve(self, peer: NodeId, ask: bytes, data: bytes, *, is_client: bool) -> None:
        try:
            request = request_from_json(data)
            events = self.generate(request) if is_client else self._ring.answer(request)
            async with aclosing(events):
                async for event in events:
                    for line in event_to_lines(event):
                        self._send(peer, Said(ask, line))
        except MeshError as error:
            self._send(peer, Said(ask, error_to_json(error)))
        except Exception as error:  # the supervisor: a bug ends its request, not the node
            logger.exception("a request met a bug")
            self._send(peer, Said(ask, error_to_json(MeshError(f"A bug: {type(error).__name__}"))))

    def _count(self, answer: Answer) -> None:
        self.counts.served += 1
        self.counts.tokens += len(answer.tokens)
        self.counts.last = replace(answer, text="", tokens=())
        self.counts.last_tokens = len(answer.tokens)
