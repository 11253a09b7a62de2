"""Nodes with a model, in a town with a slow network."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from meshllm.model.files.source import Source, open_folder
from meshllm.testing.clock import run_virtual
from meshllm_loopback import LoopbackTransport, TrafficShape
from tests.builders.mesh_members import town
from tests.builders.weight_nodes import Nodes, Story


@pytest.fixture
def source(llama: Path) -> Source:
    return open_folder("llama", llama)


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Story], None]:
    """Run a story in a town with a slow network; check that no task is left."""

    async def main(story: Story) -> None:
        async with town(tmp_path / "town", LoopbackTransport(TrafficShape(delay_s=0.01))) as made:
            await story(made)
        await asyncio.sleep(2)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    return lambda story: run_virtual(main(story))


@pytest.fixture
def nodes(tmp_path: Path, source: Source) -> Nodes:
    return Nodes(tmp_path, source)
