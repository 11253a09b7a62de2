"""Request routing: requests are answered on this node, or forwarded to the entry of the ring.

Theory of operation
-------------------
The node that receives a request is its ingress. If it is the entry, it answers by itself; otherwise
it forwards the request to the entry over their link: a `Generate` one way, an `AnswerEvent` for
each line the other way until the answer or an error, and a `CancelRequest` if the ingress cancels
before that. The request names the ring, as a node may be the entry of several; the entry refuses it
if it is not that of this ring any more, and picks the ring for an ingress of an earlier version,
which names none. A client sends its request to any node, which is then the ingress, and may ask it
for the models (`AskModels`), since it knows no records of the mesh. Only the entry serves the
`Generate` of a node, so no request is forwarded in a circle.

An ingress has at most `MAX_FORWARDED` requests at an entry or a provider, beside as many whose
answers have become long. Further ones wait here: those of its owner first, the others in turns, as
at the entry. When `MAX_WAITING` of the owner wait, the next is refused. So is one whose asker has
too many `HeldBytes`, wherever its requests wait or run.

A request for a name goes to the quantisation that the name means when it comes, also if the name
means another one after a loss. `NAME@PRECISION` means rings of that precision, and no provider.

Between the rings that serve the model of a request, which are replicas, `ReplicaChoice` chooses;
rings with a node that the request does not trust, or that are not exact where the request needs
that, are left out, and refused if there are no others. An entry that has moved to another model
refuses the request, which is repeated elsewhere, as after the loss of a ring. So does one whose
queue is full: the request is refused only if all replicas refuse.

A request for a model that no ring serves, or whose rings lack the precision or the context that
the request needs, goes to a node that provides it with an engine of its own, to the next one if it
fails before its first event. Between the trusted nodes that provide it with the precision and the
context that the request needs, the ingress chooses as between rings. If there are none, the request
is refused with what there is.

While no ring of a model serves, because its rings load, lack nodes or are broken, a new request
goes to such a provider of its name, at once: also if a ring would have been there in a second, as
this node cannot tell. It must not need what only rings do, see `waits_for_ring`. The model counts
as used all the same, so that a ring is loaded if that takes a request. If every provider fails
before its first event, or refuses the request, it waits for a ring like those that no provider may
answer. This is decided when the request comes: one that waits for a ring, or that a ring has
accepted, stays with rings.

When a ring breaks, the ingress repeats the request on the next ring, see
`meshllm.protocol.ring.failover`. While the nodes of the next one still load their layers, a request
that has begun waits longer than a new one. A client repeats it only after losing the link to its
ingress. Until a request begins, the owner or client who sent it hears what it waits for: no more
than the error would say if no ring came.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    suppress,
)
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from meshllm.errors import (
    Busy,
    ContextTooLong,
    LinkLost,
    MeshError,
    ModelMissing,
    NotServed,
    UserError,
)
from meshllm.names import (
    SESSION_ID_BYTES,
    GroupId,
    LossCause,
    NodeId,
    RingEntry,
    SessionId,
    show,
)
from meshllm.node.admission_queue import AdmissionQueue
from meshllm.node.event_loop import OffLoop
from meshllm.node.requests.counts import RequestCounters
from meshllm.node.requests.held_bytes import HeldBytes, size_of
from meshllm.node.requests.needs import PROMPT, lacking, waits_for_ring
from meshllm.node.requests.peer_requests import MAX_FORWARDED, PeerRequests
from meshllm.node.requests.remote import RemoteBackend
from meshllm.node.requests.replica_choice import AttemptHistory, ReplicaChoice, step_ms
from meshllm.node.requests.request_json import REQUEST_BYTES
from meshllm.node.requests.waits import with_wait_events
from meshllm.node.timer import loop_time
from meshllm.protocol.kv_cache.admission import QUANTUM, Admission, requester_of
from meshllm.protocol.kv_cache.budget import KvBudget
from meshllm.protocol.kv_cache.prefix_scope import SECRET_BYTES, ScopeNames
from meshllm.protocol.membership.client_quota import estimate
from meshllm.protocol.membership.codec import AnswerEvent, RequestMessage
from meshllm.protocol.membership.records import ModelOffer
from meshllm.protocol.ring.failover import Failover
from meshllm.protocol.ring.interruption import RingPlan
from meshllm.request import (
    Answer,
    Backend,
    Event,
    Interruption,
    Piece,
    PromptTokens,
    Request,
    Waiting,
)
from meshllm.strict_json import WrongField

MAX_COUNTED = 1 << 17  # tokens of one that waits: about the longest context, whatever it asks for
MAX_WAITING = 256  # requests of the owner that wait here for their turn at one node
QUIET_S = 60.0  # s after the loss of a ring without an event of any: the next loss is the last
RING_S = 30.0  # s; how long a request waits for a ring: loading a span takes seconds
MAX_LOADING_S = 3600.0  # s; how long one that has begun waits for rings that load

logger = logging.getLogger(__name__)


class Ring(Protocol):
    """What the router needs from the ring in force."""

    async def entries(
        self, model: str = "", trusted: Sequence[str] | None = None
    ) -> Sequence[RingEntry]:
        """Wait for a ring of a model, the first if it is empty; return the entries of all.

        With ``asks_ingress`` these are nodes that may read a request which only the ``trusted`` may
        read; it raises `WrongField` if there are none.
        """
        ...

    def reason(self, model: str = "") -> str:
        """Return why there is none."""
        ...

    def retry_s(self, model: str, waited_s: float) -> int:
        """Return after how many seconds a request may be repeated which waited for a ring."""
        ...

    @property
    def loads_until(self) -> float:
        """Until when its nodes may still load layers, in loop time; a past time if none does."""
        ...

    def ring_at(self, entry: RingEntry, model: str = "") -> RingPlan | None:
        """Return the ring of a model with this entry, as far as it is known here."""
        ...

    def is_exact(self, entry: RingEntry, model: str = "") -> bool:
        """Return whether all nodes of that ring compute bit-identically to transformers."""
        ...

    def explain(self, before: RingPlan | None, after: RingPlan | None) -> tuple[LossCause, str]:
        """Return why a ring with its earlier plan was lost, and a phrase about it.

        ``after`` is what the answer continues with: a later plan, or another ring of the model.
        """
        ...

    def backend(
        self, requester: NodeId | None = None, model: str = "", group: GroupId | None = None
    ) -> AbstractAsyncContextManager[Backend]:
        """Return the local entry or provider as a context, for an asker; None is the owner.

        ``group`` is a ring of the model; None is any whose entry this node is.

        Raises:
            LinkLost: this node is not the entry of that ring, or does not provide the model.
        """
        ...

    def is_provided(self, model: str) -> bool:
        """Return whether a request for a model is one for a provider, not for the ring."""
        ...

    def pinned(self, model: str) -> str:
        """Return a name of a model of rings that always means what this one means now.

        A client leaves that to its ingress.
        """
        ...

    def shown(self, model: str) -> str:
        """Return the name of a model for people, who do not know its key."""
        ...

    def of_rings(self, model: str) -> ModelOffer | None:
        """Return what the rings of a model have, by its name; None if it is a provider's.

        Also None on a client, whose ingress knows them.
        """
        ...

    def awaited(self, model: str) -> str:
        """Return why requests for a model wait for its rings; empty if one serves."""
        ...

    def using(self, model: str) -> AbstractContextManager[None]:
        """Count a model as used inside the context, so that its rings are loaded."""
        ...

    def offers(self, model: str) -> Mapping[NodeId, ModelOffer]:
        """Return the nodes that provide a model now, and what they say of it.

        For a model of rings, these are those that may read its prompts.
        """
        ...

    def ids_of(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the ids of nodes; raise `UserError` if a name is unknown or that of several."""
        ...

    def name_of(self, node: NodeId) -> str:
        """Return the name of a node, if it is known, and its short id."""
        ...


@dataclass(slots=True)
class _Pause:
    """Measures how long the loss of a ring leaves an answer without text."""

    ring: Ring
    model: str
    tried: AttemptHistory
    before: RingPlan | None = None
    """The ring of the attempt that was lost, or is under way."""
    since: float | None = None
    """When the text before a loss came, or the loss if none did; None while no answer pauses."""
    text_at: float | None = None
    """When the latest text came."""
    quiet_since: float | None = None
    """When the first ring was lost after the latest event of any."""

    def lost(self) -> bool:
        """Note that an attempt was lost; return whether it was the last one.

        Rings came and went without an event for too long, and none loads now. A ring that is lost
        first may have computed a long prompt for as long.
        """
        now = loop_time()
        self.quiet_since = now if self.quiet_since is None else self.quiet_since
        return now - self.quiet_since > QUIET_S and self.ring.loads_until <= now

    @property
    def current(self) -> RingPlan | None:
        """The ring of the latest attempt."""
        entry = self.tried.entry
        return self.ring.ring_at(entry, self.model) if entry is not None else None

    def attempt(self) -> None:
        """Note the ring of an attempt, unless the answer has paused since an earlier loss."""
        if self.since is None:
            self.before = self.current

    def begin(self) -> None:
        """Begin, unless the answer has paused since an earlier loss."""
        if self.since is None:
            self.since = loop_time() if self.text_at is None else self.text_at

    def end(self, event: Event) -> Interruption | None:
        """End with an event that has text."""
        if not isinstance(event, Piece | Answer):
            return None
        now, since = loop_time(), self.since
        self.text_at, self.since = now, None
        if since is None:
            return None
        cause, text = self.ring.explain(self.before, self.current)
        self.attempt()
        return Interruption(cause, text, round(now - since, 3))


class RequestRouter:
    """Answers requests, locally or through the entry."""

    def __init__(
        self,
        me: NodeId,
        ring: Ring,
        send: Callable[[NodeId, RequestMessage], None],
        *,
        asks_ingress: bool = False,
        longest: Callable[[], int] = lambda: REQUEST_BYTES,
        off_loop: OffLoop = asyncio.to_thread,
    ) -> None:
        """Answer; with ``asks_ingress``, remote requests go to an ingress, which retries itself.

        ``longest`` returns the limit on the bytes of a request of another node or client.
        """
        self.trusted: tuple[str, ...] | None = None
        """Names of the nodes that may see the owner's prompts; None are all members."""
        self.peers = PeerRequests(
            ring.backend, self.generate, send, longest=longest, off_loop=off_loop
        )
        """Those that others send here."""
        self._asks_ingress = asks_ingress
        self._replicas = ReplicaChoice()
        self._scopes = ScopeNames(os.urandom(SECRET_BYTES))
        self._me = me
        self._ring = ring
        self._send = send
        self._remote = RemoteBackend(send, asks_ingress=asks_ingress)
        self._queues: dict[NodeId, AdmissionQueue] = {}
        """Of entries and providers; idle ones are forgotten when a further node is asked."""
        self._held = HeldBytes()
        self.counts = RequestCounters()

    @property
    def request_bytes(self) -> int:
        """Memory of the requests in progress."""
        return self._held.total + self.peers.held_bytes

    async def run(self) -> None:
        """Serve the requests of other nodes and clients until cancelled."""
        await self.peers.run()

    async def generate(
        self, request: Request, requester: NodeId | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of a request from the entry, wherever it is; survive the loss of a ring.

        Before them comes a `Waiting` for each reason why no ring serves the model; later there are
        some while the answer has no room to go on. ``asker`` is the client that sent it; None is
        the owner of this node.

        Raises:
            MeshError: the request cannot be served, or no ring answered it.
        """
        request = self._scoped(self._with_ids(request, requester), requester)
        pinned = replace(request, model=self._ring.pinned(request.model))
        if (model := self._provided_model(request)) is not None:
            answer = self._provided(replace(request, model=model))
        elif (model := self._substituted_model(request)) is not None:
            answer = self._substituting(pinned, model, requester)
        else:
            answer = self._awaiting_ring(pinned, requester)
        self.counts.active += 1
        is_begun = False
        try:
            with self._held.holding(requester_of((None, request.scope)), size_of(request)):
                async with aclosing(answer) as events:
                    async for event in events:
                        if not is_begun and not isinstance(event, Waiting | PromptTokens):
                            is_begun = True
                            self.counts.begun += 1
                        yield event
        except MeshError:
            self.counts.failed += 1
            raise
        finally:
            self.counts.active -= 1
            self.counts.begun -= is_begun

    def _provided_model(self, request: Request) -> str | None:
        """Return the name of the model that a provider is asked for; None if a ring is asked."""
        if self._ring.is_provided(request.model):
            return request.model
        ring = self._ring.of_rings(request.model)
        return ring.model if ring and _lacks(ring, request, is_ring=True) else None

    def _substituted_model(self, request: Request) -> str | None:
        """Return the name of the model that a provider is asked for while none of its rings serves.

        None if a ring is asked all the same.
        """
        if waits_for_ring(request) or not self._able(request):
            return None
        ring = self._ring.of_rings(request.model)
        return ring.model if ring and self._ring.awaited(request.model) else None

    async def _substituting(
        self, request: Request, model: str, requester: NodeId | None
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of an answer of a provider, or of a ring if all providers fail at once.

        Meanwhile the model counts as used, so that its rings are loaded.
        """
        provided, is_begun = self._provided(replace(request, model=model)), False
        try:
            with self._ring.using(request.model):
                async with aclosing(provided) as events:
                    async for event in events:
                        is_begun = True
                        yield event
        except MeshError as error:  # an engine may also refuse what a ring does not
            if is_begun:
                raise
            logger.info("no provider answers, waiting for a ring: %s", type(error).__name__)
            refused = error if isinstance(error, UserError) else None
        else:
            return
        try:
            async with aclosing(self._awaiting_ring(request, requester)) as events:
                async for event in events:
                    yield event
        except NotServed:
            if refused is not None:  # to repeat such a request would not help
                raise refused from None
            raise

    def _awaiting_ring(
        self, request: Request, requester: NodeId | None
    ) -> AsyncGenerator[Event, None]:
        """Return the events of an answer of rings, and before them what the request waits for."""
        awaited = partial(self._ring.awaited, request.model)
        return with_wait_events(self._failing_over(request, requester), awaited)

    async def _failing_over(
        self, request: Request, requester: NodeId | None
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of an answer of the ring, and of the rings that follow it."""
        failover, tried = Failover(request), AttemptHistory()
        pause = _Pause(self._ring, request.model, tried)
        while True:
            try:
                wait_s = RING_S if failover.is_new else MAX_LOADING_S
                answering = self._answering(failover.request, requester, wait_s, tried)
                async with answering as events:
                    pause.attempt()
                    async for event in events:
                        pause.quiet_since = None
                        if new := failover.take(event):
                            for each in self._noted(new, pause, failover.resumed):
                                yield each
            except (LinkLost, Busy) as error:
                others, late = tried.has_other, pause.lost()
                delay = failover.failed(error, has_other=others, is_late=late)
                if not failover.is_new:
                    pause.begin()
                logger.info("retrying after %d tokens: %s", failover.resumed, error)
                await asyncio.sleep(delay)
            else:
                return

    async def _provided(self, request: Request) -> AsyncGenerator[Event, None]:
        """Yield the events of an answer of a provider, of another one if it fails at once."""
        tried: dict[NodeId, MeshError] = {}
        while True:
            at, is_begun = self._choose(request, tried), False
            try:
                async with self._from(at, request) as events:
                    async for event in events:
                        is_begun = True
                        if isinstance(event, Answer):
                            self.counts.count(event, None)
                            self._replicas.note(at, request.model, step_ms(event))
                        yield event
            except UserError:
                raise  # a request that is invalid here is invalid there
            except MeshError as error:
                if is_begun:
                    raise
                tried[at.node] = error
                logger.info("provider %s failed: %s", self._ring.name_of(at.node), error)
            else:
                return

    def _choose(self, request: Request, tried: Mapping[NodeId, MeshError]) -> RingEntry:
        """Return a provider of a model, as between replicas.

        Raises:
            ModelMissing: no node provides it.
            WrongField: none of these is trusted, or has what the request needs.
            MeshError: the error of the last one, if all have failed.
        """
        if left := [RingEntry(node) for node in self._able(request) if node not in tried]:
            return self._replicas.choose(left, request, AttemptHistory())
        if tried:
            raise list(tried.values())[-1]
        known = self._ring.offers(request.model)
        trusted = {node: offer for node, offer in known.items() if _is_trusted(node, request)}
        name, hint = request.model[:100], "see `meshllm ring status` for the models that are served"
        if any(not _lacks(offer, request) for offer in known.values()):
            text = f"No trusted node provides `{name}` as the request needs it"
            raise WrongField("meshllm.trust", text, hint=hint)
        if trusted or self._ring.of_rings(request.model):
            raise self._unmet(trusted, request)
        if known:
            raise WrongField("meshllm.trust", f"No trusted node provides `{name}`", hint=hint)
        raise ModelMissing(f"No node provides `{name}`", hint=hint)

    def _able(self, request: Request) -> list[NodeId]:
        """Return the trusted providers of a model that have what a request needs."""
        return [
            node
            for node, offer in self._ring.offers(request.model).items()
            if _is_trusted(node, request) and not _lacks(offer, request)
        ]

    def _unmet(self, offers: Mapping[NodeId, ModelOffer], request: Request) -> UserError:
        """Return the error of a need that nothing meets, with what there is."""
        ring, count = self._ring.of_rings(request.model), len(request.ids)
        lacks = {_lacks(offer, request) for offer in offers.values()}
        if ring:
            lacks.add(_lacks(ring, request, is_ring=True))
        if lacks == {PROMPT}:
            longest = max(offer.context for offer in offers.values())
            text = f"This model's maximum context length is {longest} tokens"
            return ContextTooLong(f"{text}; the prompt has {count}")
        needs = [f"`{each}`" for each in sorted(lacks - {PROMPT})]
        if PROMPT in lacks:
            needs.append(f"a prompt of {count} tokens")
        text = f"No ring or provider meets {' and '.join(needs)}: {self._served(offers, request)}"
        return WrongField(max(lacks - {PROMPT}), text, hint="lower a need, or leave it out")

    def _served(self, offers: Mapping[NodeId, ModelOffer], request: Request) -> str:
        """Return a phrase about all that serve the model of a request."""
        ring = self._ring.of_rings(request.model)
        is_there = not self._ring.awaited(request.model)
        rings = "a ring" if is_there else "a ring that has yet to form"
        listed = [_described(ring, rings)] if ring else []
        for node, offer in offers.items():
            listed.append(_described(offer, f"provider {self._ring.name_of(node)}"))
        name = self._ring.shown(request.model)
        return f"`{name[:100]}` is served {', and '.join(listed)}"

    @asynccontextmanager
    async def _from(
        self, at: RingEntry, request: Request
    ) -> AsyncIterator[AsyncGenerator[Event, None]]:
        """Open the event stream of a provider, local or remote; close it at the end.

        Raises:
            LinkLost: it no longer provides the model when it is the turn of the request.
        """
        async with AsyncExitStack() as stack:
            stack.enter_context(self._replicas.asking(at, AttemptHistory()))
            if at.node == self._me:
                backend = await stack.enter_async_context(self._ring.backend(None, request.model))
                events = backend.generate(request)
            else:
                place = await stack.enter_async_context(self._slot(at.node, request))
                if at.node not in self._ring.offers(request.model):  # it was lost meanwhile
                    who, what = self._ring.name_of(at.node), request.model[:100]
                    raise LinkLost(f"{who} no longer provides `{what}`")
                events = place.watched(self._remote.generate(at, request))
            yield await stack.enter_async_context(aclosing(events))

    def _with_ids(self, request: Request, requester: NodeId | None) -> Request:
        """Replace the names of trusted nodes by their ids, with that of this node for its owner.

        Raises:
            UserError: a name is unknown, or that of several nodes.
        """
        names = self.trusted if request.trusted is None and requester is None else request.trusted
        if names is None or self._asks_ingress:
            return request
        own = show(self._me)
        try:
            ids = self._ring.ids_of(names)
        except UserError as error:
            raise WrongField("meshllm.trust", str(error), hint=error.hint) from None
        if requester is not None and own not in ids:
            raise WrongField("meshllm.trust", "The node that was asked is not one of those trusted")
        return replace(request, trusted=(*ids, own))

    def _scoped(self, request: Request, requester: NodeId | None) -> Request:
        """Keep what a client asks apart from the prompts of others, whatever scope it gave."""
        if requester is None:
            return request
        return replace(request, scope=self._scopes.name(requester, request.scope))

    def receive(self, peer: NodeId, message: RequestMessage, *, is_client: bool) -> None:
        """Handle a message about a request.

        Raises:
            PeerFault: the peer has sent too many malformed requests.
        """
        if isinstance(message, AnswerEvent):
            self._remote.receive(peer, message)
        else:
            self.peers.receive(peer, message, is_client=is_client)

    def lost(self, peer: NodeId) -> None:
        """End the requests from and to a peer whose link was lost."""
        self.peers.lost(peer)
        self._remote.lost(peer)

    @asynccontextmanager
    async def _answering(
        self, request: Request, requester: NodeId | None, wait_s: float, tried: AttemptHistory
    ) -> AsyncIterator[AsyncGenerator[Event, None]]:
        """Open the event stream of an entry, local or remote; close it at the end.

        The entry is noted in ``tried`` if it fails, or its queue here is full.
        """
        async with AsyncExitStack() as stack:
            slot = await stack.enter_async_context(AsyncExitStack())
            entry, place = await self._turn(slot, request, wait_s, tried)
            if place is None:
                ring = self._ring.backend(requester, request.model, entry.group)
                backend = await stack.enter_async_context(ring)
                events = backend.generate(request)
            else:
                events = place.watched(self._remote.generate(entry, request))
            yield await stack.enter_async_context(aclosing(events))

    async def _turn(
        self, slot: AsyncExitStack, request: Request, wait_s: float, tried: AttemptHistory
    ) -> "tuple[RingEntry, _QueueSlot | None]":
        """Wait for a slot at an entry; return the entry, which may answer the request then.

        With it the place of the request there, unless that is this node. The request counts as one
        in progress there from the beginning of the wait.

        Raises:
            WrongField: no ring may.
        """
        waited, place = None, None
        entry = await self._entry(request, wait_s, tried)
        while entry != waited:
            await slot.aclose()
            place = None
            slot.enter_context(self._replicas.asking(entry, tried))
            if entry.node != self._me:
                place = await slot.enter_async_context(self._slot(entry.node, request))
            waited, entries = entry, await self._serving(request)
            if not entries:  # the ring was lost; others may have the place while this one waits
                await slot.aclose()
                waited, place, entries = None, None, await self._entries(request, wait_s)
            if entry not in entries or self._objection(entry, request):  # it has changed
                entry = self._choose_entry(entries, request, tried)
            if error := self._objection(entry, request):
                raise error
        return entry, place

    @asynccontextmanager
    async def _slot(self, node: NodeId, request: Request) -> "AsyncIterator[_QueueSlot]":
        """Wait for a turn at another node, and hold it inside the context; raise `Busy`."""
        if (queue := self._queues.get(node)) is None:
            self._queues = {each: it for each, it in self._queues.items() if not it.is_idle}
            places = Admission(KvBudget([]), MAX_FORWARDED, MAX_WAITING)
            queue = self._queues[node] = AdmissionQueue(places)
        session = SessionId(os.urandom(SESSION_ID_BYTES))
        prompt, answer = min(estimate(request), MAX_COUNTED), request.expected_tokens
        requester = requester_of((None, request.scope))
        async with queue.admitted(session, prompt + answer, requester, answer=answer):
            yield _QueueSlot(queue, session, prompt)

    async def _entry(self, request: Request, wait_s: float, tried: AttemptHistory) -> RingEntry:
        """Wait `RING_S` for a ring, and up to ``wait_s`` while its nodes load their layers."""
        return self._choose_entry(await self._entries(request, wait_s), request, tried)

    def _choose_entry(
        self, entries: Sequence[RingEntry], request: Request, tried: AttemptHistory
    ) -> RingEntry:
        allowed = [entry for entry in entries if self._objection(entry, request) is None]
        return self._replicas.choose(
            allowed or entries, request, tried, lambda entry: self._nodes(entry, request.model)
        )

    def _nodes(self, entry: RingEntry, model: str) -> list[NodeId]:
        """Return the nodes of the ring with this entry, as far as they are known here."""
        ring = None if self._asks_ingress else self._ring.ring_at(entry, model)
        return [stage.node for stage in ring[1].stages] if ring else [entry.node]

    def _objection(self, entry: RingEntry, request: Request) -> WrongField | None:
        """Return why a ring may not answer a request, as far as the ring is known here."""
        if self._asks_ingress:
            return None
        nodes = self._nodes(entry, request.model)
        strange = (node for node in nodes if not _is_trusted(node, request))
        if others := [self._ring.name_of(node) for node in strange]:
            text = f"The ring has nodes that are not trusted: {', '.join(others)}"
            return WrongField("meshllm.trust", text)
        if request.needs_exact and not self._ring.is_exact(entry, request.model):
            name = self._ring.name_of(entry.node)
            text = f"The ring of {name} is not bit-identical to transformers"
            if offers := self._ring.offers(request.model):
                text += f", and no provider is: {self._served(offers, request)}"
            without = "without `--quant` and a lossy `--wire`"
            hint = f"start every node of its ring with `--exact`, {without}"
            return WrongField("meshllm.exact", text, hint=hint)
        return None

    async def _serving(self, request: Request) -> Sequence[RingEntry]:
        """Return the entries of the rings that serve now; none if there are none."""
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                return await self._ring.entries(request.model, request.trusted)
        return ()

    async def _entries(self, request: Request, wait_s: float) -> Sequence[RingEntry]:
        since = loop_time()
        until = since + RING_S
        while until > loop_time():
            try:
                async with asyncio.timeout_at(until):
                    return await self._ring.entries(request.model, request.trusted)
            except TimeoutError:
                until = min(since + wait_s, self._ring.loads_until + RING_S)
        of_model = f" of `{self._ring.shown(request.model)[:100]}`" if request.model else ""
        after_s = self._ring.retry_s(request.model, loop_time() - since)
        raise NotServed(
            f"There is no ring{of_model}: {self._ring.reason(request.model)}",
            hint=f"retry in {after_s} s; see `meshllm ring status`",
            retry_s=after_s,
        )

    def _noted(self, event: Event, pause: _Pause, given: int) -> Iterator[Event]:
        """Yield an event, after the end of a pause; the ring was ``given`` this many tokens."""
        if interruption := pause.end(event):
            self.counts.survived(interruption, given)
            paused_s, text = interruption.pause_s, interruption.text
            logger.info("an answer continues after %.1f s: %s", paused_s, text)
            yield interruption
        if isinstance(event, Answer):
            self.counts.count(event, pause.current[0] if pause.current else None)
            if pause.tried.entry is not None:
                self._replicas.note(pause.tried.entry, pause.model, step_ms(event))
        yield event


@dataclass(slots=True)
class _QueueSlot:
    """The place of a request at another node."""

    queue: AdmissionQueue
    session: SessionId
    prompt: int
    """Tokens, estimated."""

    async def watched(self, answer: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
        """Yield an answer, and count it; a long one leaves its place to others, see `Admission`."""
        written, counted = 0, QUANTUM
        async with aclosing(answer) as events:
            async for event in events:
                if isinstance(event, Piece):
                    written += len(event.tokens) or event.has_text
                if written > counted:
                    counted += QUANTUM
                    self.queue.grow(self.session, self.prompt + counted, lambda: None)
                yield event


def _lacks(offer: ModelOffer, request: Request, *, is_ring: bool = False) -> str:
    return lacking(offer.precision, offer.context, request, is_ring=is_ring)


def _described(offer: ModelOffer, who: str) -> str:
    context = f"context {offer.context}" if offer.context else "unknown context"
    return f"in {offer.precision or 'unknown precision'} by {who} with {context}"


def _is_trusted(node: NodeId, request: Request) -> bool:
    return request.trusted is None or show(node) in request.trusted
