"""Nodes in a slow network, in virtual time."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from meshllm.testing.clock import run_virtual
from meshllm_loopback import LoopbackTransport, TrafficShape
from tests.builders.mesh_members import MemberNetwork, MeshMember, network
from tests.builders.training import TrainingNode

Scenario: TypeAlias = Callable[[MeshMember, MeshMember, TrainingNode], Coroutine[Any, Any, None]]
"""Takes two linked members, of which the second computes the batches of the node."""


async def meet(network: MemberNetwork) -> tuple[MeshMember, MeshMember, TrainingNode]:
    attic, barn = [await network.add(name) for name in ("attic", "barn")]
    node = TrainingNode()
    barn.train = node.server.serve
    barn.meet(attic)
    await asyncio.sleep(2)
    return attic, barn, node


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Scenario], None]:
    """Run a scenario; check that no task is left."""

    async def main(scenario: Scenario) -> None:
        transport = LoopbackTransport(TrafficShape(delay_s=0.01))
        async with network(tmp_path / "network", transport) as made:
            await scenario(*await meet(made))
        await asyncio.sleep(2)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    return lambda scenario: run_virtual(main(scenario))
