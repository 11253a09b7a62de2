"""The memory of a rank, by purpose; it does not grow with the number of requests."""

import gc
from collections.abc import Iterator
from pathlib import Path

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
from meshllm.request import Sampling
from meshllm.status import MemoryStatus
from meshllm.testing.models import tiny_model

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
        some = [measure(node) for node in nodes]
        for _ in range(MAX_KEPT + 8):
            await ask(ring, numbers)
        many = [measure(node) for node in nodes]

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

        assert measure(ring.entry).kv_cache == ring.entry.budget.rooms[0].cost(20).held


def test_a_node_outside_a_ring_reports_its_process_only() -> None:
    alone = measure(None)

    assert alone.process > 1 << 20
    assert alone == MemoryStatus(alone.process)


def test_the_texts_of_the_drafter_are_bounded() -> None:
    drafting, most = SuffixDrafting(), 0
    for turn in range(8):
        drafting.keep(range(turn * 40_000, (turn + 1) * 40_000))
        most = max(most, drafting.bytes)

    assert MAX_STORE * 8 < most < 64 << 20
