"""Chunked prefill, with ranks that compute concurrently, and its effect on other sessions."""

import asyncio
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from meshllm.model.files.source import Source, resolve
from meshllm.names import SessionId
from meshllm.node.compute.batcher import Batcher
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.node.session.generation import GenerationRequest, Token
from meshllm.protocol.planning.chunking import default_pace
from meshllm.protocol.session.pace import PrefillPacing
from meshllm.request import Prefilled, Sampling
from meshllm.testing.models import tiny_model


def order(prompt: list[int], tokens: int) -> GenerationRequest:
    return GenerationRequest(tuple(prompt), Sampling(), tokens, take_token=lambda _: False)


async def answer(ring: LocalRing, asked: GenerationRequest) -> list[int]:
    return [o.id async for o in ring.entry.generate(asked) if isinstance(o, Token)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Write a model whose sessions are batched, if this processor can."""
    return tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", dtype=torch.bfloat16)


class Log:
    """Jobs of the ranks: steps that are submitted, batches and other jobs that run."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.notes: list[tuple[int, str]] = []
        self._lock = threading.Lock()
        submit, submit_alone, run = Batcher.submit, Batcher.submit_alone, Batcher._run_batch

        def submit_logged(batcher: Batcher[Any], *args: Any) -> None:
            self._note(batcher, "step")
            submit(batcher, *args)

        def submit_alone_logged(
            batcher: Batcher[Any], session: SessionId, function: Any, *callbacks: Any, left: int = 0
        ) -> None:
            def begin() -> Any:
                self._note(batcher, "chunk")
                return function()

            submit_alone(batcher, session, begin, *callbacks, left=left)

        def run_logged(batcher: Batcher[Any], *args: Any) -> None:
            self._note(batcher, "batch")
            run(batcher, *args)

        patch.setattr(Batcher, "submit", submit_logged)
        patch.setattr(Batcher, "submit_alone", submit_alone_logged)
        patch.setattr(Batcher, "_run_batch", run_logged)

    def of_each_rank(self) -> list[list[str]]:
        """Return the notes of each rank, in order of time."""
        ranks = {number for number, _ in self.notes}
        return [[note for number, note in self.notes if number == rank] for rank in ranks]

    def _note(self, batcher: Batcher[Any], what: str) -> None:
        with self._lock:
            self.notes.append((id(batcher), what))


def waits(notes: list[str]) -> list[int]:
    """Count, for each batch, the chunks that began while its first step was queued."""
    counts: list[int] = []
    waiting: int | None = None
    for what in notes:
        if what == "step":
            waiting = waiting or 0
        elif what == "batch":
            counts.append(waiting or 0)
            waiting = None
        elif waiting is not None:
            waiting += 1
    return counts


@pytest.mark.parametrize("nodes", [1, 2])
async def test_a_step_waits_for_one_chunk_however_many_prompts_are_prefilled(
    llama: Path, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    log = Log(monkeypatch)
    inference = InferenceConfig(threads=1, chunk=2, speculation=False)
    options = RingOptions(nodes=nodes, own_threads=True, inference=inference)
    async with (
        open_local_ring(resolve(str(llama)), options) as ring,
        aclosing(ring.entry.generate(order([3, 1, 4], 400))) as steps,
    ):
        while not isinstance(await anext(steps), Token):
            pass
        log.notes.clear()
        prompts = [order([5 + number] * 40, 1) for number in range(4)]
        prefilled = asyncio.gather(*(answer(ring, each) for each in prompts))
        async for _ in steps:  # usually they last longer than the prompts
            if prefilled.done():
                break
        await prefilled

    for notes in log.of_each_rank():
        chunks = [at for at, note in enumerate(notes) if note == "chunk"]
        assert len(chunks) >= 80
        assert "batch" in notes[chunks[0] : chunks[-1]]
        assert max(waits(notes)) <= 1


@pytest.mark.parametrize("nodes", [1, 3])
async def test_ranks_on_separate_threads_give_the_same_text(source: Source, nodes: int) -> None:
    orders = [order([5, 9, 13, 5, 9, 13, 7 + number], 24) for number in range(4)]
    texts = []
    for own_threads in (False, True):
        options = RingOptions(
            nodes=nodes, own_threads=own_threads, inference=InferenceConfig(threads=1, chunk=3)
        )
        async with open_local_ring(source, options) as ring:
            names = [thread.name for thread in threading.enumerate()]
            assert sum(name.startswith("compute") for name in names) <= (
                nodes if own_threads else 1
            )
            texts.append(await asyncio.gather(*(answer(ring, each) for each in orders)))

    assert texts[0] == texts[1]
    assert not [each for each in threading.enumerate() if each.name.startswith("compute")]


async def test_a_prompt_is_prefilled_in_the_default_chunks(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_local_ring(
        resolve(str(llama)), RingOptions(nodes=3, inference=InferenceConfig(threads=1))
    ) as ring:
        paces = [ring.entry.pace(prompt, 0) for prompt in (10, 100, 2000)]
        asked: list[tuple[int, int]] = []

        def pace(prompt: int, others: int) -> PrefillPacing:
            asked.append((prompt, others))
            return PrefillPacing(chunk=4, window=2)

        monkeypatch.setattr(ring.entry, "pace", pace)
        outputs = [output async for output in ring.entry.generate(order([5] * 10, 2))]
        async with aclosing(ring.entry.generate(order([7] * 9, 9))) as other:
            await anext(other)
            await answer(ring, order([8] * 8, 1))

    assert paces == [default_pace(prompt, 3) for prompt in (10, 100, 2000)]
    assert asked == [(10, 0), (9, 0), (8, 1)]
    assert [o.done for o in outputs if isinstance(o, Prefilled)] == [4, 8, 10]
