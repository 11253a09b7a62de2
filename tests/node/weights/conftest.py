"""Nodes with a model, in a slow network."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from meshllm.model.files.source import Source, open_folder
from meshllm.testing.clock import run_virtual
from meshllm_loopback import LoopbackTransport, TrafficShape
from tests.builders.mesh_members import network
from tests.builders.weight_nodes import Nodes, Scenario


@pytest.fixture
def source(llama: Path) -> Source:
    return open_folder("llama", llama)


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Scenario], None]:
    """Run a scenario in a slow network; check that no task is left."""

    async def main(scenario: Scenario) -> None:
        async with network(
            tmp_path / "network", LoopbackTransport(TrafficShape(delay_s=0.01))
        ) as made:
            await scenario(made)
        await asyncio.sleep(2)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    return lambda scenario: run_virtual(main(scenario))


@pytest.fixture
def nodes(tmp_path: Path, source: Source) -> Nodes:
    return Nodes(tmp_path, source)
