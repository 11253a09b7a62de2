"""Nodes that compute on another device than the CPU."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from meshllm.errors import UserError
from meshllm.model.device import CPU
from meshllm.model.files.source import Source, resolve
from meshllm.model.split.shard import Shard
from meshllm.model.steps.cuda_graph import Graph
from meshllm.model.steps.load import load_shard
from meshllm.model.timing import measure_speed
from meshllm.names import NodeId, Quant, Span
from meshllm.node import preparation as preparation_module
from meshllm.node.compute.worker import Worker
from meshllm.node.options import InferenceConfig
from meshllm.node.preparation import Preparation
from meshllm.node.ring import model_runtime
from meshllm.node.ring.local_ring import RingOptions, open_local_ring
from meshllm.node.ring.model_runtime import ModelRuntime
from meshllm.protocol.membership.records import Profile
from meshllm.protocol.planning.plan import Ends, Plan, PlanStage
from meshllm.request import Sampling
from meshllm.testing.clock import InlineExecutor
from tests.builders.fake_gpu import GPU, ONCE, OTHER_CPU, graphs_pretended, needs_gpu, pretended
from tests.builders.node_options import node_options

FREE = 64 << 20
SAMPLING = Sampling(temperature=0.8, seed=3)
PROMPT = tuple((7 * i + 3) % 61 for i in range(20))
ME, OTHER = (NodeId(bytes([number]) * 32) for number in (1, 2))
PLAN = Plan(1, "tiny", Ends.ENTRY, (PlanStage(OTHER, Span(0, 2)), PlanStage(ME, Span(2, 6))))


@pytest.fixture
def source(llama: Path) -> Source:
    return resolve(str(llama))


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the free memory of any GPU to `FREE` bytes."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (FREE, 2 * FREE))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)


def choosing(found: torch.device, asked: list[object]) -> Callable[..., torch.device]:
    def choose(*wanted: object) -> torch.device:
        asked.append(wanted)
        return found

    return choose


async def write(source: Source, **options: Any) -> list[int]:
    nodes = options.pop("nodes", 2)
    if dtype := options.pop("dtype", None):
        options["dtype"] = str(dtype).removeprefix("torch.")
    config = InferenceConfig(**{"threads": 1} | options)
    async with open_local_ring(source, RingOptions(nodes, inference=config)) as ring:
        return [token async for token in ring.tokens(PROMPT, SAMPLING, 12)]


@pytest.mark.parametrize("device", ["cuda", "gpu"])
async def test_a_missing_device_is_reported(
    source: Source, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    with pytest.raises(UserError, match=f"device `{device}`"):
        await write(source, device=device)
    with pytest.raises(UserError, match=f"device `{device}`"):
        await ModelRuntime.open(source, Worker(InlineExecutor()), InferenceConfig(device=device))


@pytest.mark.usefixtures("free")
async def test_a_node_holds_its_layers_on_its_device(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(model_runtime, "choose", choosing(GPU, asked))
    monkeypatch.setattr("meshllm.model.steps.strategies.lacks_invariance", lambda *_: "not tried")
    worker = Worker(InlineExecutor())

    engine = await ModelRuntime.open(source, worker, InferenceConfig(device="auto"), source)
    held = await engine.hold(PLAN, ME)
    with pretended(monkeypatch) as traffic:
        entry = await engine.hold(PLAN, OTHER)

    assert asked == [("auto", torch.float32, Quant.NONE)]
    assert held.runner
    assert entry.entry
    assert entry.entry.head
    assert [each for each in traffic.taken() if "with a wait" not in each] == ONCE  # the draft
    for runner in (*held.runners, *entry.runners):
        assert runner.shard.device == GPU
    layer = engine.shape.kv_bytes_per_token[0]
    (first, _), prefixes = engine.budget(PLAN, [7, 8]).rooms, engine.prefix_bytes
    assert (first.total, first.cost(256)) == (7, (2 * 256 * layer, 256 * layer))
    assert prefixes is None


@pytest.mark.usefixtures("free")
async def test_a_node_offers_the_memory_of_its_device(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    measured: list[torch.device] = []

    def measure(*what: Any) -> Any:
        measured.append(what[-1])
        return measure_speed(*what[:-1])

    monkeypatch.setattr(model_runtime, "choose", choosing(GPU, asked))
    monkeypatch.setattr(preparation_module, "measure_speed", measure)
    monkeypatch.setattr(model_runtime, "calibrate", None)
    options = node_options(tmp_path / "state", model=str(llama), device="cuda:1")
    preparation = Preparation(options, Worker(InlineExecutor()), tmp_path / "cache")

    engine, _ = await preparation.open_founding_model()
    profile = await preparation.offer(engine, Profile("desk", "1", (), 0))

    assert asked == [("cuda:1", torch.float32, Quant.NONE)]
    assert measured == [GPU]
    assert profile.memory_bytes == int(FREE * 0.8)


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nodes", [1, 2])
async def test_another_device_gives_the_same_text(
    source: Source, monkeypatch: pytest.MonkeyPatch, nodes: int, dtype: torch.dtype
) -> None:
    expected = await write(source, nodes=nodes, dtype=dtype)
    asked: list[object] = []
    monkeypatch.setattr(model_runtime, "choose", choosing(OTHER_CPU, asked))

    with pretended(monkeypatch):
        text = await write(source, nodes=nodes, dtype=dtype, device="cuda")

    assert asked == [("cuda", dtype, Quant.NONE)]
    assert text == expected


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
async def test_a_gpu_is_deterministic(source: Source, dtype: torch.dtype) -> None:
    texts = [await write(source, dtype=dtype, device="cuda") for _ in range(2)]

    assert texts[0] == texts[1]


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize("speculation", [False, True])
@pytest.mark.parametrize("nodes", [1, 2, 3])
async def test_cuda_graphs_give_the_text_of_steps_without_drafts(
    source: Source, monkeypatch: pytest.MonkeyPatch, nodes: int, speculation: bool
) -> None:
    expected = await write(source, nodes=nodes)
    monkeypatch.setattr(model_runtime, "choose", choosing(OTHER_CPU, []))
    recorded: list[Graph] = []
    record = Graph.record

    def noting(graph: Graph, *given: Any) -> None:
        record(graph, *given)
        recorded.append(graph)

    monkeypatch.setattr(Graph, "record", noting)
    options: dict[str, Any] = {} if speculation else {"speculation": False}

    with graphs_pretended(monkeypatch):
        text = await write(source, nodes=nodes, device="cuda", **options)

    assert text == expected
    assert len(recorded) == nodes + (nodes > 1)  # the entry has a head of its own


@needs_gpu
@pytest.mark.parametrize("on_gpu", [(0,), (1,), (0, 1)])
async def test_a_ring_may_be_part_gpu(
    source: Source, monkeypatch: pytest.MonkeyPatch, on_gpu: Sequence[int]
) -> None:
    expected = await write(source)

    def loading(source: Source, span: Span, **options: Any) -> Shard:
        rank = int(0 < span.start < 6)
        device = torch.device("cuda", 0) if rank in on_gpu else CPU
        return load_shard(source, span, **options | {"device": device})

    monkeypatch.setattr("meshllm.node.ring.span_loader.load_shard", loading)

    assert await write(source) == expected
