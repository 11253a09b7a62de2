"""Admission of sessions by KV cache memory: they wait or are refused, and free all of it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from meshllm.errors import Busy, UserError
from meshllm.model.files.source import resolve
from meshllm.model.split.kv_cache import GrowingLayer
from meshllm.names import SessionId
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import EPOCH, LocalRing, RingOptions, open_local_ring
from meshllm.node.ring.model_runtime import ModelRuntime
from meshllm.node.session import entry
from meshllm.node.session.entry import EntryNode
from meshllm.node.session.wire import sealed
from meshllm.protocol.kv_cache import admission
from meshllm.protocol.kv_cache.admission import MAX_OPEN_SESSIONS
from meshllm.protocol.kv_cache.budget import BLOCK, KvBudget, KvCapacity
from meshllm.protocol.session import entry as protocol_entry
from meshllm.protocol.session.blob import session_key
from meshllm.protocol.session.messages import (
    Data,
    Fault,
    FaultCode,
    Flags,
    Forward,
    SessionMessage,
)
from meshllm.request import Sampling
from meshllm.testing.models import tiny_model
from tests.builders.waiting import at_rest

PROMPT = tuple(range(2, 32))
CONTEXT = 1024


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a longer context than the others of the tests."""
    folder = tmp_path_factory.mktemp("llama")
    config = tiny_model(folder, "llama").folder / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps(fields | {"max_position_embeddings": CONTEXT}))
    return folder


@asynccontextmanager
async def ring_with(
    llama: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, nodes: int = 2
) -> AsyncIterator[LocalRing]:
    """Open a ring whose last rank has memory for ``blocks`` blocks, the others for more."""

    def budget(*_: object) -> KvBudget:
        def measure(tokens: int) -> tuple[int, int]:
            return tokens, 0

        return KvBudget(
            [KvCapacity(999 * BLOCK, measure)] * (nodes - 1) + [KvCapacity(blocks * BLOCK, measure)]
        )

    monkeypatch.setattr(ModelRuntime, "budget", budget)
    options = RingOptions(nodes, inference=InferenceConfig(threads=1, speculation=False))
    async with open_local_ring(resolve(str(llama)), options) as ring:
        yield ring


async def ask(ring: LocalRing, prompt: tuple[int, ...] = PROMPT, tokens: int = 5) -> list[int]:
    return [token async for token in ring.tokens(prompt, Sampling(), tokens)]


@pytest.mark.parametrize("nodes", [1, 2])
async def test_sessions_wait_for_memory_and_all_are_served(
    llama: Path, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    most = 0
    async with ring_with(llama, monkeypatch, 2, nodes) as ring:

        async def watched() -> list[int]:
            nonlocal most
            tokens = []
            async for token in ring.tokens(PROMPT, Sampling(), 5):
                most = max(most, ring.entry.sessions)
                tokens.append(token)
            return tokens

        answers = await asyncio.gather(*(watched() for _ in range(6)))

        assert most == 2
        assert answers == [answers[0]] * 6
        assert ring.entry.budget.live_bytes == 0


async def test_answers_that_grow_into_the_memory_pause_and_none_is_lost(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (admission, entry, protocol_entry):
        monkeypatch.setattr(module, "QUANTUM", 128)  # room that an answer asks for at a time
    most = 0
    async with ring_with(llama, monkeypatch, 3) as ring:

        async def watched() -> list[int]:
            nonlocal most
            tokens = []
            async for token in ring.tokens(PROMPT, Sampling(), 300):
                tokens.append(token)
                most = max(most, ring.entry.sessions)
            return tokens

        one, other = await asyncio.gather(watched(), watched())

        assert most == 2  # with room for 300 tokens each, one would fit
        assert one == other
        assert len(one) == 300
        assert ring.entry.budget.live_bytes == 0


async def test_what_can_never_fit_is_refused_and_the_next_one_served(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ring_with(llama, monkeypatch, 2) as ring:
        with pytest.raises(
            UserError, match=r"512 tokens, for which the KV caches have room; .* at least 601"
        ) as why:
            await ask(ring, PROMPT * 20)

        assert "shorter prompt" in str(why.value.hint)
        assert len(await ask(ring)) == 5


async def test_a_full_queue_is_busy(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission.Admission.__init__, "__defaults__", (1,))
    async with ring_with(llama, monkeypatch, 1) as ring:
        results = await asyncio.gather(*(ask(ring) for _ in range(3)), return_exceptions=True)

        assert [type(each) for each in results] == [list, list, Busy]
        assert len(await ask(ring)) == 5


async def test_a_cancelled_wait_frees_its_place(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ring_with(llama, monkeypatch, 1) as ring:
        first = asyncio.create_task(ask(ring, tokens=50))
        await asyncio.sleep(0)
        second, third = asyncio.create_task(ask(ring)), asyncio.create_task(ask(ring))
        await asyncio.sleep(0)
        second.cancel()

        assert len(await third) == 5
        assert len(await first) == 50
        assert not ring.entry._queue._waiting
        assert ring.entry.budget.live_bytes == 0


async def test_a_stage_refuses_a_session_beyond_its_memory(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ring_with(llama, monkeypatch, 2) as ring:
        budget = ring.entry.budget
        budget.rooms = [budget.rooms[0]] * 2
        with pytest.raises(Busy, match=r"rank 1: No room for the cache of 5\d\d positions"):
            await ask(ring, tokens=600)

        assert len(await ask(ring)) == 5
        await at_rest(ring)
        assert ring.stages[0].sessions == 0


@pytest.mark.parametrize(
    ("blocks", "code", "positions"),
    [(2, FaultCode.BUSY, 2 * BLOCK), (999, FaultCode.MODEL, MAX_OPEN_SESSIONS * CONTEXT)],
)
async def test_a_hostile_rank_0_exceeds_neither_memory_nor_context_of_a_stage(
    llama: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, code: FaultCode, positions: int
) -> None:
    answers, receive = asyncio.Queue[SessionMessage](), EntryNode._receive

    def overheard(node: EntryNode, message: SessionMessage) -> None:
        answers.put_nowait(message)
        receive(node, message)

    monkeypatch.setattr(EntryNode, "_receive", overheard)
    async with ring_with(llama, monkeypatch, blocks) as ring:
        (stage,), neighbours = ring.stages, ring.entry._neighbours
        assert neighbours is not None
        rows = torch.zeros(1, BLOCK, ring.model.shape.hidden_size)
        live = {SessionId(bytes([number]) * 16) for number in range(MAX_OPEN_SESSIONS + 2)}
        codes, most = set[FaultCode](), 0
        for pos in range(0, 2 * CONTEXT, BLOCK):
            for session in sorted(live):
                blob = sealed(session_key(session), rows)
                data = Data(session, EPOCH, 0, pos, BLOCK, Flags.PREFILL, blob)
                neighbours.forward(Forward(data))
                if isinstance(answer := await answers.get(), Fault):
                    codes.add(answer.code)
                    live.remove(session)
                held = list(stage._sessions.values())  # the compute thread frees some meanwhile
                most = max(most, sum(each.cache.length for each in held))

        assert (live, codes) == (set(), {code, FaultCode.BUSY})
        assert most == positions
        await at_rest(ring)
        assert (stage.sessions, stage.budget.live_bytes) == (0, 0)


async def test_cached_prefixes_are_evicted_for_sessions(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ring_with(llama, monkeypatch, 2) as ring:
        await ask(ring)
        await ask(ring, PROMPT[::-1])
        kept = ring.entry._prefixes.index.budget
        assert kept.kept_bytes == 2 * BLOCK

        assert len(await ask(ring, (40, *PROMPT), tokens=300)) == 300
        await at_rest(ring)
        assert kept.kept_bytes == 2 * BLOCK
        assert len(ring.stages[0]._kept) == 1


@pytest.mark.parametrize("error", [RuntimeError("can't allocate memory"), MemoryError()], ids=repr)
async def test_a_failed_allocation_ends_its_session_only(
    llama: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async with ring_with(llama, monkeypatch, 9) as ring:
        update = GrowingLayer.update

        def fail(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(GrowingLayer, "update", fail)
        with pytest.raises(Busy):
            await ask(ring)
        monkeypatch.setattr(GrowingLayer, "update", update)

        assert len(await ask(ring)) == 5
