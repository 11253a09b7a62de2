"""A fake node, to test the HTTP API without a mesh."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from meshllm.errors import LinkLost, MeshError, UserError
from meshllm.names import Digest, LossCause, Span
from meshllm.node.options import ModelOptions
from meshllm.node.training import LayerPass
from meshllm.protocol.trust.credential import NO_LIMITS, ClientLimits
from meshllm.request import Backend, Event, Piece, Prefilled, Request
from meshllm.status import (
    Change,
    LossCounts,
    Measured,
    Members,
    MeshStatus,
    ModelStatus,
    Named,
    NodeState,
    Planned,
    PlannedRing,
    PlanTerms,
    ProviderOffer,
    Removed,
    RingState,
    SessionCounts,
    Stopped,
)
from tests.builders.fake_ring import answer_of
from tests.builders.status import member, node_id, status_of, with_link, with_node, with_ring

CHANGE = Change("changed", RingState.SERVING, 7, "0123456789ab", {"abc": NodeState.SERVING})


def mesh_status() -> MeshStatus:
    """A ring of two, with round numbers and a malicious node name."""
    status = status_of(2)
    assert status.ring.measured
    hop = replace(
        status.ring.measured.hops[0],
        node="atti0bc", compute_ms=3.0, serialise_ms=0.25, queue_ms=0.125, wire_ms=0.5,
    )  # fmt: skip
    status = with_ring(
        status,
        predicted=Planned(8.0, 30.0, 1.0, ()),
        measured=Measured(10.0, 40.0, 9, (hop,)),
    )
    status = with_node(status, 1, name='a "b"\\\nc')
    status = with_link(status, 1, round_trip_ms=2.5, bytes_sent=1000)
    losses = (LossCounts(LossCause.NODE_LOST, 2, 1.75, 96, 480),)
    return replace(status, sessions=SessionCounts(3, 2, 3, 4, 99, losses, 480))


FOX = ModelStatus("fox", 0, 0, "", "", 2048, providers=("gpu",), precision="bf16")


@dataclass
class FakeNode:
    """Answers `hello world`, with optional waits and failures."""

    fails_at: int | None = None
    """Fail instead of this event: 0 is the progress, 1 and 2 are pieces, 3 is the answer."""
    error: MeshError = field(default_factory=lambda: MeshError("It broke", hint="mend it"))
    waits_at: int | None = None
    """Wait before this event until `go`."""
    go: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[Request] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    backend: Backend | None = None
    """Answers instead."""
    served: str | None = "builtin"
    said: tuple[Event, ...] = ()
    """Answer with these events instead."""
    progress: Event = field(default_factory=lambda: Prefilled(2, 2))
    entry: str = node_id(0)
    waits_for: str = ""
    """The ring is forming, for this reason."""
    provided: tuple[ModelStatus, ...] = ()
    beside: tuple[ProviderOffer, ...] = ()
    """Of providers of the model of the ring."""
    revoked: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    cuts: tuple[Span, ...] = (Span(0, 4), Span(4, 8))
    """The spans of its ring."""
    is_away: bool = False
    """It cannot be told which keys are revoked."""
    """By other members."""

    def report(self) -> MeshStatus:
        status = mesh_status()
        assert status.model
        rings = 0 if self.waits_for else 1
        known = replace(status.model, fingerprint="fp_0123456789ab", rings=rings)
        model = replace(known, name=self.served, beside=self.beside) if self.served else None
        status = replace(status, model=model, provided=self.provided)
        state = RingState.FORMING if self.waits_for else RingState.SERVING
        return with_ring(status, entry=self.entry, state=state, reason=self.waits_for)

    def members(self) -> Members:
        return Members((member(0), member(1)))

    async def status(self) -> MeshStatus:
        return self.report()

    async def models(self) -> list[ModelStatus]:
        status = self.report()
        return [*([status.model] if status.model else []), *status.provided]

    async def try_plan(self, terms: PlanTerms) -> PlannedRing:
        self.calls.append((terms,))
        if terms.policy == "bad":
            raise UserError("Unknown policy `bad`")
        ring = mesh_status().ring
        return PlannedRing(terms.policy or "auto", "", ring.stages, ring.predicted)

    async def invite(
        self, role: str, expires_s: int, uses: int, limits: ClientLimits = NO_LIMITS
    ) -> str:
        self.calls.append((role, expires_s, uses, *([limits] if limits != NO_LIMITS else ())))
        return "meshllm1abc"

    async def remove(self, node: str, spare: Sequence[str] = ()) -> Removed:
        self.calls.append((node, *spare))
        return Removed(node, "desk", (Named("def", "attic"),))

    async def serve(self, asked: ModelOptions) -> ModelStatus:
        self.calls.append(("serve", asked))
        return replace(FOX, name=asked.model, replicas=asked.replicas or 1)

    def stop(self, model: str) -> Stopped:
        self.calls.append(("stop", model))
        return Stopped(model)

    async def revoke(self, tags: Sequence[bytes]) -> None:
        if self.is_away:
            raise LinkLost("No node is running")
        self.calls.append(tuple(tags))

    async def layer_spans(self, model: Digest) -> Sequence[Span]:
        self.calls.append(("layer_spans", model))
        return self.cuts

    async def compute_layers(self, asked: LayerPass, data: bytes) -> bytes:
        self.calls.append((asked, len(data)))
        if self.fails_at == 0:
            raise self.error
        return data[::-1]

    def revocations(self) -> dict[str, tuple[bytes, ...]]:
        return self.revoked

    async def events(self) -> AsyncGenerator[Change, None]:
        self.begun.set()
        try:
            yield CHANGE
            await self.go.wait()
            yield replace(CHANGE, epoch=8)
        finally:
            self.closed.set()

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        hello = (Piece("hello"), Piece(" w\u2028rld"), answer_of("hello", 5))
        if self.backend:
            async with aclosing(self.backend.generate(request)) as events:
                async for event in events:
                    yield event
            return
        try:
            for place, event in enumerate((self.progress, *(self.said or hello))):
                if place == (self.waits_at or 0):
                    self.begun.set()
                if place == self.waits_at:
                    await self.go.wait()
                if place == self.fails_at:
                    raise self.error
                yield event
        finally:
            await asyncio.sleep(0)  # cancelling a generation on every node takes a while
            self.closed.set()
