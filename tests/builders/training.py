"""A node that computes batches with fake layers, and others that send them."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

from meshllm.names import Digest, NodeId, Span
from meshllm.node.timer import loop_time
from meshllm.node.training import FrozenModel, LayerPass, TrainingRelay, TrainingServer
from meshllm.protocol.planning.plan import Ends, Plan, PlanStage
from meshllm.protocol.training.codec import Direction
from tests.builders.mesh_members import MeshMember

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
MODEL = Digest(bytes(range(32)))
SPAN = Span(0, 4)
FORWARD = LayerPass(MODEL, SPAN, Direction.FORWARD)


class FakeLayers:
    """Layers that reverse a batch, or fail."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.error: BaseException | None = None

    def forward(self, data: bytes, *, keeps: bool = False) -> bytes:
        if self.error is not None:
            raise self.error
        return (b"kept " if keeps else b"") + data[::-1]

    def backward(self, data: bytes) -> bytes:
        return b"back " + self.forward(data)


class FakeWorker:
    """A compute thread that takes a time, in virtual seconds."""

    def __init__(self) -> None:
        self.takes_s = 0.0
        self.begun = 0.0
        self.reclaimed = 0

    async def run_when_idle(self, idle_s: float, function: Callable[..., T], *args: Any) -> T:
        assert idle_s == 0
        self.begun = loop_time()
        await asyncio.sleep(self.takes_s)
        return function(*args)

    def reclaim_later(self) -> None:
        self.reclaimed += 1


class TrainingNode:
    """A server of batches with fake layers."""

    def __init__(self) -> None:
        self.worker = FakeWorker()
        self.loaded: list[FakeLayers] = []
        self.server = TrainingServer(self._call_later)
        worker: Any = self.worker
        load: Any = self.load
        self.server.offer(MODEL, FrozenModel(worker, load))

    def load(self, span: Span) -> FakeLayers:
        self.loaded.append(FakeLayers(span))
        return self.loaded[-1]

    @staticmethod
    def _call_later(delay_s: float, callback: Callable[[*Ts], None], /, *args: *Ts) -> object:
        return asyncio.get_running_loop().call_later(delay_s, callback, *args)


def ring(*nodes: NodeId) -> Plan:
    """Make a plan in which each node holds 4 layers."""
    stages = [PlanStage(node, Span(4 * at, 4 * at + 4)) for at, node in enumerate(nodes)]
    return Plan(1, "fake", Ends.ENTRY, tuple(stages))


def relay_of(member: MeshMember, *nodes: NodeId, server: TrainingServer) -> TrainingRelay:
    """Make the relay of a member, in a ring of nodes."""

    async def plan_of(_: Digest) -> Plan:
        if not nodes:
            await asyncio.Event().wait()
        return ring(*nodes)

    return TrainingRelay(member.me, plan_of, member.links.dial_training, server)
