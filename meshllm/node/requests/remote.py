"""Requests to other nodes over their links, answered by JSON lines, see `request_json`."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from sys import getsizeof

from meshllm.errors import LinkLost, MeshError, PeerFault, TimedOut
from meshllm.names import NodeId, RingEntry
from meshllm.node.requests.request_json import AnswerReader, request_to_json
from meshllm.protocol.membership.codec import (
    REQUEST_ID_BYTES,
    AnswerEvent,
    CancelRequest,
    Generate,
    RequestMessage,
)
from meshllm.protocol.ring.failover import RetriesExhausted
from meshllm.request import Answer, Event, Request

MAX_UNREAD = 16 << 20  # bytes of memory of the lines buffered of one answer
LINE_BYTES = getsizeof(b"") + 8  # of a line besides its text, with its place in the queue
IDLE_TIMEOUT_S = 600.0  # s without an event; covers a queue and the prefill of a long prompt


@dataclass(slots=True)
class _Call:
    """A `Generate` whose answer is not complete."""

    peer: NodeId
    lines: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    """Received lines; None after the link is lost, or the buffer overflowed."""

    unread: int = 0
    """Bytes of memory of ``lines``."""

    is_complete: bool = False
    """The answer is complete."""

    def take(self, line: bytes) -> None:
        """Queue a line; end a call whose queue is full."""
        if self.unread <= MAX_UNREAD:
            self.unread += len(line) + LINE_BYTES
            self.lines.put_nowait(line if self.unread <= MAX_UNREAD else None)

    async def next(self) -> bytes:
        """Wait for a line.

        Raises:
            TimedOut: none came within `IDLE_TIMEOUT_S`.
            LinkLost: no more will come.
        """
        try:
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                line = await self.lines.get()
        except TimeoutError:
            raise TimedOut(f"The entry sent nothing for {IDLE_TIMEOUT_S:.0f} s") from None
        if line is None:
            raise LinkLost("The link to the entry was lost")
        self.unread -= len(line) + LINE_BYTES
        return line


class RemoteBackend:
    """Requests in progress on other nodes; each node is a `Backend`."""

    def __init__(
        self,
        send: Callable[[NodeId, RequestMessage], None],
        *,
        asks_ingress: bool,
    ) -> None:
        """With ``asks_ingress``, requests go to an ingress, which retries by itself."""
        self._send = send
        self._asks_ingress = asks_ingress
        self._calls: dict[bytes, _Call] = {}

    def receive(self, peer: NodeId, message: AnswerEvent) -> None:
        """Take a line of an answer."""
        if (call := self._calls.get(message.request_id)) and call.peer == peer:
            call.take(message.body)

    def lost(self, peer: NodeId) -> None:
        """End the requests to a node whose link was lost."""
        for call in self._calls.values():
            if call.peer == peer:
                call.lines.put_nowait(None)

    async def generate(self, entry: RingEntry, request: Request) -> AsyncGenerator[Event, None]:
        """Send a request to a node, naming the ring, and yield its events, see `Backend`."""
        reader = AnswerReader()
        group = None if entry.group is None else entry.group.hex()
        with self._calling(entry.node, replace(request, group=group)) as call:
            while not call.is_complete:
                line = await call.next()
                try:
                    event = reader.take(line)
                except LinkLost as error:
                    call.is_complete = True
                    if self._asks_ingress:
                        raise RetriesExhausted(str(error), hint=error.hint) from None
                    raise
                except MeshError as error:
                    call.is_complete = not isinstance(error, PeerFault)
                    raise
                call.is_complete = isinstance(event, Answer)
                if event is not None:
                    yield event

    @contextmanager
    def _calling(self, peer: NodeId, request: Request) -> Iterator[_Call]:
        """Send a request; at the end, cancel it if its answer is not complete."""
        request_id = os.urandom(REQUEST_ID_BYTES)
        call = self._calls[request_id] = _Call(peer)
        try:
            self._send(peer, Generate(request_id, request_to_json(request)))
            yield call
        finally:
            del self._calls[request_id]
            if not call.is_complete:
                self._send(peer, CancelRequest(request_id))
