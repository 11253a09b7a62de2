"""The memory of a rank, by purpose; it does not grow with the number of requests."""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import ref

import pytest

from meshllm.model.files.source import resolve
from meshllm.model.speculation.prompt_lookup import MAX_STORE, SuffixDrafting
from meshllm.model.split.kv_cache import SpanCache
from meshllm.names import SessionId
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.node.ring.memory import measure
from meshllm.node.session.generation import Generation
from meshllm.protocol.kv_cache import prefix_index
from meshllm.protocol.planning.plan import Plan
from meshllm.request import Sampling
from meshllm.status import MemoryStatus
from meshllm.testing.clock import run_virtual
from meshllm.testing.models import tiny_model
from tests.builders.offers import A, B
from tests.node.ring.test_runtime import Place, World, at_work, plan_of, tokens, until

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
    assert alone == MemoryStatus(alone.process)


def test_the_texts_of_the_drafter_are_bounded() -> None:
    drafting, most = SuffixDrafting(), 0
    for turn in range(8):
        drafting.keep(range(turn * 40_000, (turn + 1) * 40_000))
        most = max(most, drafting.bytes)

    assert MAX_STORE * 8 < most < 64 << 20
