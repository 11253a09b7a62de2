"""Request routing: requests are answered on this node, or forwarded to the entry of the ring.

Theory of operation
-------------------
The node that receives a request is its ingress. If it is the entry, it answers by itself; otherwise
it forwards the request to the entry over their link: a `Generate` one way, an `AnswerEvent` for
each line the other way until the answer or an error, and a `CancelRequest` if the ingress cancels
before that. A client sends its request to any node, which is then the ingress. Only the entry
serves the `Generate` of a node, so no request is forwarded in a circle.

An ingress has at most `MAX_FORWARDED` requests at the entry. Further ones wait their turn here, in
the order of arrival, and when `MAX_WAITING` wait, the next is refused.

When a ring breaks, the ingress repeats the request on the next ring, see
`meshllm.protocol.ring.failover`. A client repeats it only after losing the link to its ingress.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import dataclass, replace
from typing import Protocol

from meshllm.errors import Busy, LinkLost, MeshError, TimedOut
from meshllm.names import NodeId
from meshllm.node.requests.remote import Remote
from meshllm.node.requests.request_json import error_to_json, event_to_lines, request_from_json
from meshllm.protocol.membership.codec import AnswerEvent, CancelRequest, Generate, RequestMessage
from meshllm.protocol.ring.failover import Failover
from meshllm.request import Answer, Backend, Event, Request

MAX_FORWARDED = 16  # concurrent requests of this node at the entry; further ones wait
MAX_WAITING = 64  # of those
MAX_PER_PEER = 2 * MAX_FORWARDED  # of one node or client: cancelled ones take a while to end
RING_S = 30.0  # s; how long a request waits for a ring: loading a span takes seconds

logger = logging.getLogger(__name__)


class Ring(Protocol):
    """What the router needs from the ring in force."""

    async def entry(self) -> NodeId:
        """Wait for an open ring, and return its entry."""
        ...

    def reason(self) -> str:
        """Return why there is none."""
        ...

    def backend(self) -> AbstractAsyncContextManager[Backend]:
        """Return the local entry as a context; raise `LinkLost` if this node is not the entry."""
        ...


@dataclass(slots=True)
class Counts:
    """Counters of the requests whose ingress is this node."""

    active: int = 0
    served: int = 0
    failed: int = 0
    tokens: int = 0
    last: Answer | None = None
    """The latest answer, for its times; without its text and tokens."""
    last_tokens: int = 0


class RequestRouter:
    """Answers requests, locally or through the entry."""

    def __init__(
        self,
        me: NodeId,
        ring: Ring,
        send: Callable[[NodeId, RequestMessage], None],
        *,
        asks_ingress: bool = False,
    ) -> None:
        """Answer; with ``asks_ingress``, remote requests go to an ingress, which retries itself."""
        self._me = me
        self._ring = ring
        self._send = send
        self._remote = Remote(send, asks_ingress=asks_ingress)
        self._served: dict[tuple[NodeId, bytes], asyncio.Task[None]] = {}
        self._jobs = asyncio.TaskGroup()
        self._slots = asyncio.Semaphore(MAX_FORWARDED)
        self._waiting = 0  # for a slot
        self.counts = Counts()

    async def run(self) -> None:
        """Serve the requests of other nodes and clients until cancelled."""
        async with self._jobs:
            await asyncio.Event().wait()  # never set

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Yield the events of a request from the entry, wherever it is; survive the loss of a ring.

        Raises:
            MeshError: the request cannot be served, or no ring answered it.
        """
        failover = Failover(request)
        self.counts.active += 1
        try:
            while True:
                try:
                    async with self._answering(failover.request) as events:
                        async for event in events:
                            if new := failover.take(event):
                                if isinstance(new, Answer):
                                    self._count(new)
                                yield new
                except (LinkLost, Busy) as error:
                    delay = failover.failed(error)
                    logger.info("ring lost after %d tokens, retrying: %s", failover.resumed, error)
                    await asyncio.sleep(delay)
                else:
                    return
        except MeshError:
            self.counts.failed += 1
            raise
        finally:
            self.counts.active -= 1

    def receive(self, peer: NodeId, message: RequestMessage, *, is_client: bool) -> None:
        """Handle a message about a request."""
        match message:
            case Generate(ask, data):
                self._open(peer, ask, data, is_client=is_client)
            case AnswerEvent():
                self._remote.receive(peer, message)
            case CancelRequest(ask):
                if task := self._served.get((peer, ask)):
                    task.cancel()

    def lost(self, peer: NodeId) -> None:
        """End the requests from and to a peer whose link was lost."""
        for (asker, _), task in self._served.items():
            if asker == peer:
                task.cancel()
        self._remote.lost(peer)

    @asynccontextmanager
    async def _answering(self, request: Request) -> AsyncIterator[AsyncGenerator[Event, None]]:
        """Open the event stream of the entry, local or remote; close it at the end."""
        entry = await self._entry()
        async with AsyncExitStack() as stack:
            if entry != self._me:
                await stack.enter_async_context(self._slot())
                entry = await self._entry()  # it may have changed
            if entry == self._me:
                backend = await stack.enter_async_context(self._ring.backend())
                events = backend.generate(request)
            else:
                events = self._remote.generate(entry, request)
            yield await stack.enter_async_context(aclosing(events))

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """Wait for a turn at the entry, and hold it inside the context.

        Raises:
            Busy: too many wait already.
        """
        if self._slots.locked() and self._waiting >= MAX_WAITING:
            raise Busy(
                f"The queue is full: {MAX_FORWARDED} requests of this node are in progress"
                f" and {self._waiting} are waiting",
                hint="retry later, or ask another node",
            )
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._slots.release()

    async def _entry(self) -> NodeId:
        try:
            async with asyncio.timeout(RING_S):
                return await self._ring.entry()
        except TimeoutError:
            raise TimedOut(
                f"There is no ring: {self._ring.reason()}", hint="see `meshllm ring status`"
            ) from None

    def _open(self, peer: NodeId, ask: bytes, data: bytes, *, is_client: bool) -> None:
        held = Counter(asker for asker, _ in self._served)[peer]
        if held >= MAX_PER_PEER or (peer, ask) in self._served:
            error = Busy(f"{held} requests of this node are in progress", hint="retry later")
            self._send(peer, AnswerEvent(ask, error_to_json(error)))
            return
        task = self._jobs.create_task(self._serve(peer, ask, data, is_client=is_client))
        self._served[peer, ask] = task
        task.add_done_callback(lambda _: self._served.pop((peer, ask), None))

    async def _serve(self, peer: NodeId, ask: bytes, data: bytes, *, is_client: bool) -> None:
        try:
            request = request_from_json(data)
            async with (
                nullcontext(self) if is_client else self._ring.backend() as backend,
                aclosing(backend.generate(request)) as events,
            ):
                async for event in events:
                    for line in event_to_lines(event):
                        self._send(peer, AnswerEvent(ask, line))
        except MeshError as error:
            self._send(peer, AnswerEvent(ask, error_to_json(error)))
        except Exception as error:  # the supervisor: a bug ends its request, not the node
            logger.exception("bug while serving a request")
            self._send(
                peer, AnswerEvent(ask, error_to_json(MeshError(f"Bug: {type(error).__name__}")))
            )

    def _count(self, answer: Answer) -> None:
        self.counts.served += 1
        self.counts.tokens += len(answer.tokens)
        self.counts.last = replace(answer, text="", tokens=())
        self.counts.last_tokens = len(answer.tokens)
