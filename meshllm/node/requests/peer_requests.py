"""Requests that other nodes and clients send here, answered within their limits.

A node gets at most `MAX_PER_PEER` answers at a time, from the entry or the provider that this node
is, to requests within the limit of `HeldBytes`. A client gets what this node's own requests get,
within the limits of its ticket and of all clients together.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import replace

from meshllm.errors import Busy, MeshError, PeerFault, UserError
from meshllm.names import GroupId, NodeId
from meshllm.node.event_loop import OffLoop
from meshllm.node.requests.held_bytes import HeldBytes, size_of
from meshllm.node.requests.request_json import error_to_json, event_to_lines, request_from_json
from meshllm.node.supervisor import contained
from meshllm.node.timer import loop_time
from meshllm.protocol.kv_cache.admission import MAX_SESSIONS, OPEN_PER_PLACE
from meshllm.protocol.membership.client_quota import ClientQuota, places
from meshllm.protocol.membership.codec import (
    AnswerEvent,
    AskModels,
    CancelRequest,
    Generate,
    ModelList,
    RequestMessage,
)
from meshllm.protocol.membership.peer_limit import MAX_INVALID, WINDOW_S, PeerLimit
from meshllm.protocol.trust.credential import NO_LIMITS, ClientLimits
from meshllm.request import Backend, Event, Request
from meshllm.strict_json import WrongField

MAX_PER_CLIENT = 2  # concurrent requests of one client
MAX_OF_CLIENTS = 4  # of all clients together: the rest of the ring is for its owners
CLIENT_TOKENS = 4096  # most tokens of one answer to a client
SHORT_BYTES = 16 * 1024  # a request that is parsed in a millisecond or two
MAX_FORWARDED = MAX_SESSIONS + 8
"""Concurrent requests that a node sends to another one; a few wait there, to follow at once."""
MAX_PER_PEER = 2 * OPEN_PER_PLACE * MAX_FORWARDED  # of one node: cancelled ones take a while to end
MAX_LISTS, LISTS_S = 8, 10.0  # lists of models for one peer within so many seconds

logger = logging.getLogger(__name__)


class PeerRequests:
    """Answers the requests of peers over their links."""

    def __init__(
        self,
        backend: Callable[[NodeId, str, GroupId | None], AbstractAsyncContextManager[Backend]],
        answer: Callable[[Request, NodeId], AsyncGenerator[Event, None]],
        send: Callable[[NodeId, RequestMessage], None],
        *,
        longest: Callable[[], int],
        off_loop: OffLoop,
    ) -> None:
        """Answer nodes by ``backend``, for an asker, a model and its ring; clients by ``answer``.

        ``longest`` returns the limit on the bytes of a request.
        """
        self.limits_of: Callable[[NodeId], ClientLimits] = lambda _: NO_LIMITS
        """Returns what the ticket of a client allows it."""
        self.list_models: Callable[[], bytes] = lambda: b"{}"
        """Returns what clients see of the models, see `model_list`."""
        self._backend = backend
        self._answer = answer
        self._send = send
        self._held = HeldBytes()  # of requests in JSON, and of those of nodes until they end
        self._longest = longest
        self._off_loop = off_loop
        self._faults = PeerLimit()
        self._lists = PeerLimit(MAX_LISTS, LISTS_S)
        self._quota = ClientQuota()
        self._running: dict[tuple[NodeId, bytes], asyncio.Task[None]] = {}
        self._of_clients: set[asyncio.Task[None]] = set()
        self._jobs = asyncio.TaskGroup()

    @property
    def held_bytes(self) -> int:
        """Memory of the requests of nodes in progress."""
        return self._held.total

    async def run(self) -> None:
        """Answer until cancelled."""
        async with self._jobs:
            await asyncio.Event().wait()  # never set

    def receive(self, peer: NodeId, message: RequestMessage, *, is_client: bool) -> None:
        """Handle a message about a request.

        Raises:
            PeerFault: the peer has sent too many malformed requests.
        """
        match message:
            case Generate(request_id, data):
                if self._faults.is_excluded(peer, loop_time()):
                    raise PeerFault(f"{MAX_INVALID} malformed requests within {WINDOW_S:.0f} s")
                self._open(peer, request_id, data, is_client=is_client)
            case CancelRequest(request_id):
                if task := self._running.get((peer, request_id)):
                    _cancel(task)
            # One that asks too often gets no answer.
            case AskModels() if not self._lists.is_excluded(peer, loop_time()):
                self._lists.record(peer, loop_time())
                self._send(peer, ModelList(self.list_models()))

    def lost(self, peer: NodeId) -> None:
        """End the requests of a peer whose link was lost."""
        for (requester, _), task in self._running.items():
            if requester == peer:
                _cancel(task)

    def _open(self, peer: NodeId, request_id: bytes, data: bytes, *, is_client: bool) -> None:
        if error := self._objection(peer, request_id, is_client=is_client):
            self._send(peer, AnswerEvent(request_id, error_to_json(error)))
            return
        task = self._jobs.create_task(
            self._supervised(peer, request_id, [data], is_client=is_client)
        )
        self._running[peer, request_id] = task
        task.add_done_callback(lambda _: self._running.pop((peer, request_id), None))
        if is_client:
            self._of_clients.add(task)
            task.add_done_callback(self._of_clients.discard)

    def _objection(self, peer: NodeId, request_id: bytes, *, is_client: bool) -> Busy | None:
        """Return why there is no place for a request; None if there is."""
        held = Counter(requester for requester, _ in self._running)[peer]
        limits = self.limits_of(peer) if is_client else NO_LIMITS
        most = places(limits, MAX_PER_CLIENT) if is_client else MAX_PER_PEER
        if held >= most or (peer, request_id) in self._running:
            return Busy(f"{held} requests of this node are in progress", hint="retry later")
        if is_client and len(self._of_clients) >= MAX_OF_CLIENTS:
            text = f"{MAX_OF_CLIENTS} requests of clients are in progress"
            return Busy(text, hint="retry later")
        return self._quota.objection(peer, limits, time.time()) if is_client else None

    async def _supervised(
        self, peer: NodeId, request_id: bytes, received: list[bytes], *, is_client: bool
    ) -> None:
        def report(error: Exception) -> None:
            bug = MeshError(f"Bug: {type(error).__name__}")
            self._send(peer, AnswerEvent(request_id, error_to_json(bug)))

        with contained("bug while serving a request", report):
            await self._serve(peer, request_id, received, is_client=is_client)

    async def _serve(
        self, peer: NodeId, request_id: bytes, received: list[bytes], *, is_client: bool
    ) -> None:
        """Answer the request in ``received``, which is taken out: it is not kept meanwhile."""
        try:
            async with AsyncExitStack() as stack:
                with self._held.holding(peer, len(received[0])):
                    request = await self._read(peer, received.pop())
                if is_client:
                    answer = self._limited(request, peer)
                else:
                    stack.enter_context(self._held.holding(peer, size_of(request)))
                    group = request.group
                    at = None if group is None else GroupId(bytes.fromhex(group))
                    ring = self._backend(peer, request.model, at)
                    backend = await stack.enter_async_context(ring)
                    answer = backend.generate(request)
                events = await stack.enter_async_context(aclosing(answer))
                async for event in events:
                    for line in event_to_lines(event):
                        self._send(peer, AnswerEvent(request_id, line))
        except MeshError as error:
            self._send(peer, AnswerEvent(request_id, error_to_json(error)))

    async def _limited(self, request: Request, client: NodeId) -> AsyncGenerator[Event, None]:
        """Answer a client within its limits; count the tokens, also if it does not wait for them.

        Raises:
            MeshError: the request exceeds what is left of the day, or fails.
        """
        if request.max_tokens is not None:
            request = replace(request, max_tokens=min(request.max_tokens, CLIENT_TOKENS))
        limits = self.limits_of(client)
        reservation = self._quota.reserve(client, limits, request, time.time())
        bound = reservation.request.bound
        bound = CLIENT_TOKENS if bound is None else min(bound, CLIENT_TOKENS)
        limited = replace(reservation.request, bound=bound)
        try:
            async with aclosing(self._answer(limited, client)) as events:
                async for event in events:
                    reservation.take(event, time.time())
                    yield event
        finally:
            reservation.end(time.time())

    async def _read(self, peer: NodeId, data: bytes) -> Request:
        """Parse a request, off the event loop unless it is short; count a malformed one.

        A length or a value that is refused may be what somebody asked at the API server of an
        honest peer, who cannot know the limits of this node.
        """
        _check_length(data, self._longest())
        try:
            if len(data) <= SHORT_BYTES:
                return request_from_json(data)
            return await self._off_loop(request_from_json, data)
        except UserError as error:
            if not isinstance(error, WrongField):
                self._faults.record(peer, loop_time())
            raise


def _cancel(task: asyncio.Task[None]) -> None:
    """Cancel once: a second time would interrupt what frees the caches on all ranks."""
    if not task.cancelling():
        task.cancel()


def _check_length(data: bytes, longest: int) -> None:
    if len(data) > longest:
        raise UserError(
            f"The request is {len(data)} bytes long; the limit is {longest}",
            hint="the limit follows from the longest context of a model of the mesh",
        )
