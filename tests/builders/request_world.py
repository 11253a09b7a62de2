"""Nodes that answer requests for one another, over a network without delay."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from meshllm.errors import MeshError, UserError
from meshllm.names import GroupId, LossCause, NodeId, RingEntry, short, show
from meshllm.node.requests.request_json import AnswerReader
from meshllm.node.requests.router import RequestRouter
from meshllm.protocol.membership.codec import AnswerEvent, Generate, RequestMessage
from meshllm.protocol.membership.records import ModelOffer
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.ring.interruption import RingPlan
from meshllm.request import Answer, Event, Piece, Prefilled, Request
from meshllm.testing.clock import run_virtual
from tests.builders.fake_ring import answer_of

ME, ENTRY, OTHER, THIRD = (NodeId(name * 32) for name in (b"m", b"e", b"o", b"t"))
REQUEST = Request(raw="what?")
TEXT = "a ring of nodes"
ASK = b"i" * 16


def pieces(text: str) -> list[Event]:
    """Give each three characters a token."""
    return [Piece(text[at : at + 3], (at // 3,)) for at in range(0, len(text), 3)]


def answer(text: str = TEXT) -> list[Event]:
    return [Prefilled(1, 1), *pieces(text), answer_of(text, len(pieces(text)))]


def behind(given: tuple[int, ...], event: Event) -> Event | None:
    """Return what an event says behind the tokens that were given."""
    match event:
        case Piece(tokens=(token,)) if token < len(given):
            return None
        case Answer(tokens=tokens):
            return replace(event, tokens=tokens[len(given) :])
    return event


@dataclass
class FakeRing:
    """Answers from a list of attempts: each has events, or an error that ends it."""

    at: NodeId | None = ME
    attempts: list[Sequence[Event | Exception | None]] = field(default_factory=list)
    """None waits without end."""
    asked: list[Request] = field(default_factory=list)
    requesters: list[NodeId | None] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    provided: dict[str, tuple[NodeId, ...]] = field(default_factory=dict)
    """Who provides each model,"""
    offered: dict[NodeId, ModelOffer] = field(default_factory=dict)
    """and what some of them say of it."""
    loads_s: float | None = None
    """After an error there is no ring, and its nodes load for so long; None keeps the ring."""
    loads_until: float = 0.0
    frees_s: float = 0.0
    """Until all ranks have freed what they held for a request."""
    closed: int = 0

    replicas: dict[str, tuple[NodeId, ...]] = field(default_factory=dict)
    """The entries of the rings of each model that several serve."""
    groups: dict[str, tuple[GroupId, ...]] = field(default_factory=dict)
    """The rings of each model whose entry is the same node,"""
    named: list[GroupId | None] = field(default_factory=list)
    """and those that requests named."""

    plans: dict[NodeId, Plan] = field(default_factory=dict)
    """Of the ring of each entry."""
    sizes: dict[str, ModelOffer] = field(default_factory=dict)
    """What the rings of each model have, where that is known."""
    pins: dict[str, str] = field(default_factory=dict)
    """What each name means now."""
    used: list[str] = field(default_factory=list)
    """The models that count as used while providers are asked."""
    exact: frozenset[NodeId] = frozenset()
    """The entries of rings that are exact."""
    explained: list[tuple[RingPlan | None, RingPlan | None]] = field(default_factory=list)

    async def entries(
        self, model: str = "", trusted: Sequence[str] | None = None
    ) -> Sequence[RingEntry]:
        while self.at is None:  # noqa: ASYNC110  # in virtual time
            await asyncio.sleep(1)
        if groups := self.groups.get(model):
            return [RingEntry(self.at, group) for group in groups]
        return [RingEntry(node) for node in self.replicas.get(model, (self.at,))]

    def reason(self, model: str = "") -> str:
        return "they sleep"

    def retry_s(self, model: str, waited_s: float) -> int:
        return round(2 * waited_s)

    def ring_at(self, entry: RingEntry, model: str = "") -> RingPlan | None:
        plan = self.plans.get(entry.node)
        return (GroupId(model.encode()), plan) if plan else None

    def is_exact(self, entry: RingEntry, model: str = "") -> bool:
        return entry.node in self.exact

    def explain(self, before: RingPlan | None, after: RingPlan | None) -> tuple[LossCause, str]:
        self.explained.append((before, after))
        return LossCause.NODE_LOST, "they slept"

    def is_provided(self, model: str) -> bool:
        return bool(model) and model not in self.replicas.keys() | self.groups.keys()

    def awaited(self, model: str) -> str:
        return "" if self.at else "they sleep"

    def pinned(self, model: str) -> str:
        return self.pins.get(model, model)

    def shown(self, model: str) -> str:
        return next((name for name, pin in self.pins.items() if pin == model), model)

    def of_rings(self, model: str) -> ModelOffer | None:
        return self.sizes.get(model)

    @contextmanager
    def using(self, model: str) -> Iterator[None]:
        self.used.append(model)
        yield

    def offers(self, model: str) -> dict[NodeId, ModelOffer]:
        name = self.sizes[model].model if model in self.sizes else model
        provided = self.provided.get(name, ())
        return {node: self.offered.get(node, ModelOffer(name)) for node in provided}

    def name_of(self, node: NodeId) -> str:
        known = {ME: "me", ENTRY: "entry", OTHER: "other"}
        return f"{known[node]} ({short(node)})" if node in known else short(node)

    def ids_of(self, names: Sequence[str]) -> tuple[str, ...]:
        known = {"me": ME, "entry": ENTRY, "other": OTHER}
        if unknown := set(names) - known.keys():
            raise UserError(f"There is no node `{min(unknown)}`")
        return tuple(show(known[name]) for name in names)

    def backend(
        self, requester: NodeId | None = None, model: str = "", group: GroupId | None = None
    ) -> AbstractAsyncContextManager["FakeRing"]:
        self.requesters.append(requester)
        self.models.append(model)
        self.named.append(group)
        return nullcontext(self)

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        self.asked.append(request)
        try:
            for event in self.attempts.pop(0):
                if event is None:
                    await asyncio.Event().wait()
                elif isinstance(event, Exception):
                    if self.loads_s is not None:
                        self.at = None
                        self.loads_until = asyncio.get_running_loop().time() + self.loads_s
                    raise event
                elif (rest := behind(request.given, event)) is not None:
                    await asyncio.sleep(0)
                    yield rest
        finally:
            await asyncio.sleep(self.frees_s)
            self.closed += 1


class World:
    """Nodes connected by a network without delay."""

    def __init__(self) -> None:
        self.routers: dict[NodeId, RequestRouter] = {}
        self.rings: dict[NodeId, FakeRing] = {}
        self.sent: list[tuple[NodeId, NodeId, RequestMessage]] = []
        self.clients: set[NodeId] = set()
        self.drop: Callable[[NodeId, RequestMessage], bool] = lambda _, __: False

    def add(
        self, node: NodeId, ring: FakeRing | None = None, *, is_client: bool = False
    ) -> RequestRouter:
        def send(peer: NodeId, message: RequestMessage) -> None:
            self.sent.append((node, peer, message))
            if peer in self.routers and not self.drop(peer, message):
                router, is_client = self.routers[peer], node in self.clients
                asyncio.get_running_loop().call_soon(
                    lambda: router.receive(node, message, is_client=is_client)
                )

        self.rings[node] = ring or FakeRing()
        self.routers[node] = RequestRouter(node, self.rings[node], send, asks_ingress=is_client)
        return self.routers[node]

    def said(self, peer: NodeId) -> list[Event | MeshError]:
        """Return the events and errors sent to a peer."""
        told: list[Event | MeshError] = []
        reader = AnswerReader()
        for _, to, message in self.sent:
            if to == peer and isinstance(message, AnswerEvent):
                try:
                    if event := reader.take(message.body):
                        told.append(event)
                except MeshError as error:
                    told.append(error)
        return told

    def run(self, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a scenario among the nodes, and check that it leaves no state behind."""

        async def main() -> None:
            running = [asyncio.ensure_future(router.run()) for router in self.routers.values()]
            await asyncio.sleep(0)
            async with asyncio.timeout(1000):
                await scenario()
                await asyncio.sleep(1)
            for router in self.routers.values():
                assert (router._remote._calls, router.peers._running) == ({}, {})
                assert router.counts.active == 0
            assert not [task for task in running if task.done()]
            for task in running:
                task.cancel()
            await asyncio.wait(running)

        run_virtual(main())


async def all_of(router: RequestRouter, request: Request = REQUEST) -> list[Event]:
    return [event async for event in router.generate(request)]


async def note(router: RequestRouter, events: list[Event], request: Request = REQUEST) -> None:
    async for event in router.generate(request):
        events.append(event)  # noqa: PERF401  # it is read although the rest fails


def text_of(events: Sequence[object]) -> str:
    return "".join(event.text for event in events if isinstance(event, Piece))


def asked(world: World) -> bytes:
    (message,) = [message for _, _, message in world.sent if isinstance(message, Generate)]
    return message.request_id
