"""Nodes over one loopback network, and what they report."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from meshllm.node.compute.worker import Worker
from meshllm.node.node import MeshNode, open_node
from meshllm.node.provider import Provider
from meshllm.node.report import mesh_status
from meshllm.node.ring.memory import measure
from meshllm.status import MeshStatus
from meshllm_loopback import LoopbackTransport
from tests.builders.node_options import node_options

PATIENCE_S = 120.0


class Mesh:
    """Nodes over one loopback network, on one compute thread."""

    def __init__(self, folder: Path, stack: AsyncExitStack, worker: Worker) -> None:
        self.folder = folder
        self.network = LoopbackTransport()
        self.worker = worker
        self._stack = stack
        self._lives: dict[str, AsyncExitStack] = {}

    async def start(self, name: str, provider: Provider | None = None, **wishes: Any) -> MeshNode:
        options = node_options(self.folder / name, name=name, threads=1, discovery=False, **wishes)
        life = self._lives[name] = await self._stack.enter_async_context(AsyncExitStack())
        opened = open_node(options, self.network, self.worker, provider=provider)
        return await life.enter_async_context(opened)

    async def kill(self, name: str) -> None:
        await self._lives.pop(name).aclose()


async def until(claim: Callable[[], bool], node: MeshNode) -> None:
    """Wait for changes of a node until the claim holds."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for _ in node.state.changes():
                if claim():
                    return
    except TimeoutError:
        status = report_of(node)
        rings = [(each.model, each.replica, each.state, each.reason) for each in status.rings]
        nodes = [(each.name, each.state, each.reason) for each in status.nodes]
        about = f"{node.name}: {status.ring.reason!r}, {rings}, {nodes}"
        told = "a change was not told" if claim() else "the claim does not hold"
        raise AssertionError(f"{told} after {PATIENCE_S:.0f} s; {about}") from None


def report_of(node: MeshNode) -> MeshStatus:
    return mesh_status(node.view(), measure(node.state.ranks, node.state.held))
