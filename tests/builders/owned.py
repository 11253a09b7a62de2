"""A node that records the commands."""

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, cast

from meshllm.names import NodeId, show
from meshllm.node.control import NodeControl
from meshllm.node.options import ModelOptions
from meshllm.node.report import mesh_status
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.trust.credential import ClientLimits, Removal, Role
from meshllm.request import Event, Piece, Request
from meshllm.status import MemoryStatus, MeshStatus, NodeState, NodeStatus, RingStatus
from tests.builders.snapshots import charter
from tests.builders.view import KEYS, view_of

MEMORY = MemoryStatus(process=2**30)


class Owned:
    """A node that records the commands."""

    def __init__(self) -> None:
        self.view = view_of()
        self.invited: list[tuple[Role, float | None, int | None]] = []
        self.ended_members: list[Removal] = []
        self.is_full = False
        self.asked: list[ModelOptions] = []
        self.stopped: list[str] = []
        self.revoked: tuple[bytes, ...] = ()
        self.relay = cast("Any", None)
        self.control = NodeControl(
            lambda: self.view, KEYS[0], self.invite, self.publish_removal, self.revoke,
            self.changes, self.answer, self.measure, self.add_model, self.stop_model, self.relay,
        )  # fmt: skip

    async def invite(
        self, role: Role, lasts_s: float | None, uses: int | None, limits: ClientLimits
    ) -> str:
        self.invited.append((role, lasts_s, uses))
        self.limits = limits
        return "ticket"

    async def add_model(self, asked: ModelOptions) -> Charter:
        self.asked.append(asked)
        return charter()

    def stop_model(self, model: str) -> str:
        self.stopped.append(model)
        return f"{model}@int8"

    async def publish_removal(self, removal: Removal) -> None:
        self.ended_members.append(removal)
        if not self.is_full:
            self.view = replace(self.view, removed=(removal.node,))

    def revoke(self, tags: tuple[bytes, ...]) -> None:
        self.revoked = tags

    async def changes(self) -> AsyncGenerator[None, None]:
        while True:
            yield

    async def answer(self, request: Request) -> AsyncGenerator[Event, None]:
        yield Piece(request.raw or "")

    async def measure(self) -> MemoryStatus:
        return MEMORY

    def see(self, **changes: Any) -> None:
        self.view = replace(self.view, **changes)

    def status(self) -> MeshStatus:
        return mesh_status(self.view, MEMORY)

    def ring(self) -> RingStatus:
        return self.status().ring

    def of(self, node: NodeId) -> NodeStatus:
        (found,) = (each for each in self.status().nodes if each.node == show(node))
        return found

    def state(self, node: NodeId) -> tuple[NodeState, str]:
        return self.of(node).state, self.of(node).reason
