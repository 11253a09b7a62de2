"""Training through a ring of nodes that also answers, while one of them is lost."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from meshllm.api.unix import SOCKET
from meshllm.cli.commands.help import topics
from meshllm.model.files.source import resolve
from meshllm.model.training.merge import LoraAdapter
from meshllm.node.compute.worker import compute_thread
from meshllm.node.control import control_of
from meshllm.node.node import MeshNode
from meshllm.remote import from_pretrained
from meshllm.request import Answer, Request
from meshllm.status import RingState
from meshllm.testing.models import stock_model
from tests.builders.node_mesh import Mesh, report_of, until
from tests.builders.served import running

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft

IDS = torch.arange(40, 64).reshape(2, 12)
STEPS = 4


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with compute_thread() as worker, AsyncExitStack() as stack:
        yield Mesh(tmp_path, stack, worker)


@asynccontextmanager
async def on_socket(node: MeshNode, folder: Path) -> AsyncIterator[Path]:
    folder.mkdir(mode=0o700)  # noqa: ASYNC240 -- a test
    async with running(control_of(node), folder / SOCKET):  # type: ignore[arg-type]  # as a fake
        yield folder


class Trainer:
    """Trains an adapter, one step at a time."""

    def __init__(self, model: Any, seed: int) -> None:
        torch.manual_seed(seed)
        config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        self.model: Any = get_peft_model(model, config)
        parameters = [each for each in self.model.parameters() if each.requires_grad]
        for each in parameters:
            torch.nn.init.normal_(each, std=0.05)
        self.optimizer = torch.optim.SGD(parameters, lr=0.1)

    def step(self) -> float:
        loss = self.model(IDS, labels=IDS, use_cache=False).loss
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


async def serving(nodes: list[MeshNode], count: int) -> None:
    for node in nodes:
        await until(
            lambda node=node: (  # type: ignore[misc]  # a closure
                report_of(node).ring.state is RingState.SERVING
                and len(report_of(node).ring.stages) == count
            ),
            node,
        )


async def test_the_example_of_the_manual_runs(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = re.search(r"```python\n(.*?)```", topics()["training"], re.DOTALL)
    assert found
    a = await mesh.start("a", model="builtin")
    await serving([a], 1)
    monkeypatch.chdir(tmp_path)

    async with on_socket(a, tmp_path / "s") as state:
        monkeypatch.setenv("MESHLLM_STATE", str(state))
        await asyncio.to_thread(exec, found[1], {})

    losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 4
    LoraAdapter.read(tmp_path / "adapter")


async def test_two_clients_train_while_the_ring_answers_and_loses_a_node(
    mesh: Mesh, tmp_path: Path
) -> None:
    a = await mesh.start("a", model="builtin", members=0, policy="proportional")
    b = await mesh.start("b", join=await a.create_ticket())
    c = await mesh.start("c", join=await a.create_ticket())
    await serving([a, b, c], 3)
    builtin = resolve("builtin", offline=True)
    alone = Trainer(stock_model(builtin), 1)
    expected = [alone.step() for _ in range(STEPS)]

    async with on_socket(a, tmp_path / "s") as state:
        first, second = [
            Trainer(await asyncio.to_thread(from_pretrained, "builtin", state=state), 1)
            for _ in range(2)
        ]
        losses = [await asyncio.to_thread(first.step)]
        *_, answer = [each async for each in a.router.generate(Request(raw="A ring"))]
        training = [asyncio.create_task(asyncio.to_thread(each.step)) for each in (first, second)]
        await mesh.kill("c")
        losses.append(await training[0])
        others = [await training[1]]
        losses += [await asyncio.to_thread(first.step) for _ in range(STEPS - 2)]
        others += [await asyncio.to_thread(second.step) for _ in range(STEPS - 1)]

    assert isinstance(answer, Answer)
    assert losses == others == expected
    assert expected[-1] < expected[0]
