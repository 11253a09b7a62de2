"""The memory of a rank, by purpose; it does not grow with the number of requests."""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from weakref import ref

import pytest
import torch
from torch import nn

from meshllm.model.files.source import Source, resolve
from meshllm.model.modules import linear_onednn
from meshllm.model.modules.quantise import quantise
from meshllm.model.speculation.prompt_lookup import MAX_STORE, SuffixDrafting
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.split.shard import Shard
from meshllm.model.steps.load import load_shard
from meshllm.model.steps.runner import Runner
from meshllm.names import Quant, SessionId, Span
from meshllm.node.options import InferenceConfig
from meshllm.node.ring import memory
from meshllm.node.ring.kv_transfer import KvReceiver
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.node.ring.memory import addresses, measure
from meshllm.node.session.generation import Generation
from meshllm.protocol.kv_cache import prefix_index
from meshllm.protocol.planning.plan import Plan
from meshllm.request import Sampling
from meshllm.status import MemoryStatus
from meshllm.testing.clock import run_virtual
from meshllm.testing.models import stock_model, tiny_model
from tests.builders.offers import A, B
from tests.builders.ring_world import Place, World, at_work, plan_of, tokens, until

MAX_KEPT = 8  # sessions; fewer requests than a node needs reach the limit
ONE = InferenceConfig(threads=1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama"), "llama").folder


async def ask(ring: LocalRing, numbers: Iterator[int]) -> None:
    """Send a short prompt that was not sent before."""
    number = next(numbers)
    prompt = [2 + number % 69, 2 + number // 69, *range(2, 20)]
    async for _ in ring.tokens(prompt, Sampling(), 3):
        pass


def alive(kind: type) -> int:
    """Count the live objects of a type."""
    gc.collect()
    return sum(issubclass(type(each), kind) for each in gc.get_objects())


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable the garbage collector: it frees cycles at times that a test cannot know."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def weights_of(place: Place) -> list[ref[object]]:
    """Return weak references to the models that a place has loaded."""
    return [ref(runner.shard.model) for runner in place.runtime._model.runners]


@pytest.mark.parametrize(
    "after",
    [None, plan_of((B, "0:6"), epoch=2), plan_of((B, "0:2"), (A, "2:6"), epoch=2)],
    ids=["no plan", "no rank", "another rank"],
)
def test_weights_and_caches_of_an_ended_rank_are_freed(llama: Path, after: Plan | None) -> None:
    async def main() -> None:
        world = World(llama)
        async with world.serving(A, B) as (a, b):
            world.follow(plan_of((A, "0:2"), (B, "2:6")))
            await until(lambda: at_work(a, b))
            await tokens(a)
            assert a.runtime.entry is not None
            held: list[ref[object]] = [*weights_of(a), ref(a.runtime.entry)]
            with without_collector():
                world.follow(after)
                await until(lambda: after is None or at_work(b))
                await asyncio.sleep(5)  # of virtual time
                assert [each() for each in held] == [None] * len(held)

    run_virtual(main())


def test_layers_loaded_in_advance_are_shown(llama: Path) -> None:
    async def main() -> None:
        world, after = World(llama), plan_of((B, "0:6"), epoch=2)
        async with world.serving(A, B) as (a, b):
            world.follow(plan_of((A, "0:6")))
            await until(lambda: at_work(a))
            assert measure([], b.runtime._model.runners).weights == 0
            b.runtime.prepare(after)
            await until(lambda: b.runtime.preloaded == after)
            shown = measure([], b.runtime._model.runners).weights
            assert a.runtime.entry is not None
            assert shown == measure([a.runtime.entry]).weights > 0

    run_virtual(main())


def test_handed_over_caches_are_shown(llama: Path) -> None:
    async def main() -> None:
        world = World(llama)
        async with world.serving(A) as (a,):
            a.runtime._held._receivers[B] = cast("KvReceiver", SimpleNamespace(bytes=7))

            assert a.runtime.received_bytes == 7

    run_virtual(main())


@pytest.mark.parametrize("kind", [Quant.INT8, Quant.INT4])
async def test_quantised_matrices_are_counted_instead_of_what_they_replace(
    llama: Path, kind: Quant
) -> None:
    source = resolve(str(llama))
    shown = [await weights(source, ONE), await weights(source, replace(ONE, quant=kind))]
    model: Any = stock_model(source)
    report = quantise(model, kind)
    table = model.get_input_embeddings().weight  # tied to the head, and still read

    plain, quantised = shown
    assert plain.packed_weights == 0
    assert quantised.packed_weights == report.bytes > 0
    assert quantised.weights == plain.weights - report.plain_bytes + table.nbytes


async def weights(source: Source, config: InferenceConfig) -> MemoryStatus:
    async with open_local_ring(source, RingOptions(inference=config)) as ring:
        return measure([ring.entry])


def test_copies_for_onednn_are_counted_beside_what_they_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_onednn, "SMALLEST", 0)
    for name, value in (("has_native", False), ("_gains", True)):
        monkeypatch.setattr(linear_onednn, name, lambda *_, value=value, **__: value)
    source = tiny_model(tmp_path, "llama", dtype=torch.bfloat16)
    whole = Span(0, source.config.num_hidden_layers)
    loaded = [
        runner_of(load_shard(source, whole, embed=True, head=True, packed=packed))
        for packed in (False, True)
    ]

    plain, packed = (measure([], [each]) for each in loaded)

    linears = [each for each in loaded[0].shard.model.modules() if isinstance(each, nn.Linear)]
    assert packed.weights == plain.weights
    assert plain.packed_weights == 0
    assert packed.packed_weights == sum(each.weight.nbytes for each in linears)
    assert sum(end - begin for begin, end in addresses(loaded[1:])) == packed.weights


def test_a_tied_head_and_a_part_of_a_head_are_counted_once(tmp_path: Path) -> None:
    source = tiny_model(tmp_path, "gemma")
    layers = source.config.num_hidden_layers
    whole = load_shard(source, Span(0, layers), embed=True, head=True, packed=False)
    part = load_shard(
        source, Span(layers, layers), embed=False, head=True, packed=False, share=whole,
        outputs=range(64),
    )  # fmt: skip
    size = part.model.get_output_embeddings().weight.nbytes
    own, both = (measure([], [*map(runner_of, each)]) for each in ([whole], [whole, part]))

    assert size > 0
    assert own.weights == sum(each.nbytes for each in whole.model.parameters()) + sum(
        each.nbytes for each in whole.model.buffers()
    )
    assert both.weights - own.weights < size


def runner_of(shard: Shard) -> Runner:
    return Runner(shard, trial=lambda *_: "")


async def test_the_parts_take_the_process(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_local_ring(resolve(str(llama)), RingOptions(inference=ONE)) as ring:
        ring.entry.budget.reserve(SessionId(bytes(16)), 20)
        monkeypatch.setattr(memory, "process_memory", lambda: 1 << 40)
        shown = measure([ring.entry], unread=100, received=3, requests=5)
        monkeypatch.setattr(memory, "process_memory", lambda: 1)
        small = measure([ring.entry])
        monkeypatch.setattr(memory, "process_memory", lambda: 1 << 40)
        for runner in ring.entry.runners:
            monkeypatch.setattr(runner.shard, "device", torch.device("cuda"))
        on_gpu = measure([ring.entry])

        assert addresses(ring.entry.runners) == []

    parts = asdict(shown)
    total = parts.pop("process") + parts.pop("unread_weights")
    assert parts.pop("kv_room") > 0
    assert parts.pop("waiting_room") == 0
    assert total == sum(parts.values())
    assert shown.kv_cache > 0 < shown.other
    assert small.other == 0
    assert on_gpu.other == shown.other + shown.weights + shown.kv_cache - 100 + 3 + 5


async def test_many_requests_hold_no_more_memory_than_some(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_index, "MAX_KEPT", MAX_KEPT)
    numbers = iter(range(1000))
    of_others = {kind: alive(kind) for kind in (Generation, SpanCache)}  # in this process
    async with open_local_ring(resolve(str(llama)), RingOptions(nodes=2, inference=ONE)) as ring:
        nodes = ring.entry, ring.stages[0]
        for _ in range(MAX_KEPT + 8):
            await ask(ring, numbers)
        some = [measure([node]) for node in nodes]
        for _ in range(MAX_KEPT + 8):
            await ask(ring, numbers)
        many = [measure([node]) for node in nodes]

        # The jobs that ended last still hold theirs.
        assert alive(Generation) - of_others[Generation] <= 4
        assert alive(SpanCache) - of_others[SpanCache] <= 2 * (MAX_KEPT + 2)

    for before, after in zip(some, many, strict=True):
        assert 0 < after.weights == before.weights
        assert 0 < after.prefix_cache == before.prefix_cache < after.kv_room
        assert after.kv_cache == 0
        assert after.recorded_steps == before.recorded_steps
    assert many[0].drafter > 0
    assert many[1].drafter == 0


async def test_a_session_in_progress_is_counted(llama: Path) -> None:
    async with open_local_ring(resolve(str(llama)), RingOptions(inference=ONE)) as ring:
        ring.entry.budget.reserve(SessionId(bytes(16)), 20)

        assert measure([ring.entry]).kv_cache == ring.entry.budget.rooms[0].cost(20).held


def test_a_node_outside_a_ring_reports_its_process_only() -> None:
    alone = measure([])

    assert alone.process > 1 << 20
    assert alone == MemoryStatus(alone.process, other=alone.process)


def test_the_texts_of_the_drafter_are_bounded() -> None:
    drafting, most = SuffixDrafting(), 0
    for turn in range(8):
        drafting.keep(range(turn * 40_000, (turn + 1) * 40_000))
        most = max(most, drafting.bytes)

    assert MAX_STORE * 8 < most < 64 << 20
