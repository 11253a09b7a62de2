"""Requests to another node over its link, each answered by lines of JSON, see `asking`."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from meshllm.errors import LinkLost, MeshError, PeerFault, TimedOut
from meshllm.names import NodeId
from meshllm.node.requests.request_json import AnswerReader, request_to_json
from meshllm.protocol.membership.codec import ASK_ID_BYTES, Ask, Hush, Said
from meshllm.protocol.ring.failover import Reported
from meshllm.request import Answer, Event, Request

MAX_UNREAD = 16 << 20  # bytes of one answer that nobody took
SILENT_S = 600.0  # s without an event: a long prompt in a long line


@dataclass(slots=True)
class _Call:
    """An Ask that is not yet answered."""

    peer: NodeId
    lines: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    """What was said; None when the link is gone, or nobody reads."""

    unread: int = 0
    """Bytes in ``lines``."""

    is_over: bool = False
    """Nothing more will be said."""

    def take(self, line: bytes) -> None:
        """Queue a line; a call whose queue is full is given up."""
        if self.unread <= MAX_UNREAD:
            self.unread += len(line)
            self.lines.put_nowait(line if self.unread <= MAX_UNREAD else None)

    async def next(self) -> bytes:
        """Wait for a line.

        Raises:
            TimedOut: nothing came for too long.
            LinkLost: nothing more will come.
        """
        try:
            async with asyncio.timeout(SILENT_S):
                line = await self.lines.get()
        except TimeoutError:
            raise TimedOut(f"The entry said nothing for {SILENT_S:.0f} s") from None
        if line is None:
            raise LinkLost("The entry of the ring is gone")
        self.unread -= len(line)
        return line


class Remote:
    """All calls to other nodes; each node is a `Backend`."""

    def __init__(
        self, send: Callable[[NodeId, Ask | Said | Hush], None], *, asks_ingress: bool
    ) -> None:
        """With ``asks_ingress`` the nodes that are asked ask the entry again themselves."""
        self._send = send
        self._asks_ingress = asks_ingress
        self._calls: dict[bytes, _Call] = {}

    def receive(self, peer: NodeId, message: Said) -> None:
        """Take a line of an answer."""
        if (call := self._calls.get(message.ask)) and call.peer == peer:
            call.take(message.body)

    def lost(self, peer: NodeId) -> None:
        """End what a node was asked."""
        for call in self._calls.values():
            if call.peer == peer:
                call.lines.put_nowait(None)

    async def generate(self, peer: NodeId, request: Request) -> AsyncGenerator[Event, None]:
        """Let a node answer, see `Backend`."""
        reader = AnswerReader()
        with self._calling(peer, request) as call:
            while not call.is_over:
                line = await call.next()
                try:
                    event = reader.take(line)
                except LinkLost as error:
                    call.is_over = True
                    if self._asks_ingress:
                        raise Reported(str(error), hint=error.hint) from None
                    raise
                except MeshError as error:
                    call.is_over = not isinstance(error, PeerFault)
                    raise
                call.is_over = isinstance(event, Answer)
                if event is not None:
                    yield event

    @contextmanager
    def _calling(self, peer: NodeId, request: Request) -> Iterator[_Call]:
        """Ask; tell a node that still answers at the end that nobody listens any more."""
        ask = os.urandom(ASK_ID_BYTES)
        call = self._calls[ask] = _Call(peer)
        try:
            self._send(peer, Ask(ask, request_to_json(request)))
            yield call
        finally:
            del self._calls[ask]
            if not call.is_over:
                self._send(peer, Hush(ask))
