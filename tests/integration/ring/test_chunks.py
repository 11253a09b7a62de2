"""Chunked prefill, with ranks that compute concurrently, and its effect on other sessions."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from meshllm.model.files.source import Source, resolve
from meshllm.node.compute.worker import Worker
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.node.session.generation import GenerationRequest, Token
from meshllm.protocol.planning.chunking import usual_pace
from meshllm.protocol.session.pace import Pace
from meshllm.request import Prefilled, Sampling
from meshllm.testing.models import tiny_model

CHUNKS = {"_prefill"}
"""Functions that compute a prefill chunk, on the entry and on a stage."""
STEPS = {"_run_batch"}
"""Functions that compute a decode step."""


def order(prompt: list[int], tokens: int) -> GenerationRequest:
    return GenerationRequest(tuple(prompt), Sampling(), tokens, is_last=lambda _: False)


async def answer(ring: LocalRing, asked: GenerationRequest) -> list[int]:
    return [o.id async for o in ring.entry.generate(asked) if isinstance(o, Token)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Write a model whose sessions are batched, if this processor can."""
    return tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", dtype=torch.bfloat16)


def computing(job: "partial[Any]") -> Callable[..., Any]:
    """Return the function of a job, or the one that it calls."""
    first = job.args[0] if job.args else None
    return first if callable(first) else job.func


class Log:
    """Jobs of the workers: when they were submitted and when they began."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.notes: list[tuple[int, str, str]] = []
        self._lock = threading.Lock()
        run, start = Worker.run, Worker.start

        def logged(worker: Worker, function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
            alone = [computing(each) for each in args if isinstance(each, partial)]
            number, name = id(worker), getattr([function, *alone][-1], "__name__", "")
            self._note(number, name, "asked")

            def begin() -> Any:
                self._note(number, name, "begun")
                return function(*args)

            return begin

        def run_logged(worker: Worker, function: Callable[..., Any], *args: Any) -> Any:
            return run(worker, logged(worker, function, *args))

        def start_logged(worker: Worker, function: Callable[..., Any], *args: Any) -> Any:
            return start(worker, logged(worker, function, *args))

        patch.setattr(Worker, "run", run_logged)
        patch.setattr(Worker, "start", start_logged)

    def of_each_worker(self) -> list[list[tuple[str, str]]]:
        """Return the notes of each worker, in order of time."""
        workers = {number for number, _, _ in self.notes}
        return [[note[1:] for note in self.notes if note[0] == number] for number in workers]

    def _note(self, worker: int, name: str, what: str) -> None:
        with self._lock:
            self.notes.append((worker, name, what))


def waits(notes: list[tuple[str, str]]) -> list[int]:
    """Count, for each step, the chunks that began while it was queued."""
    counts: list[int] = []
    waiting: list[int] = []
    for name, what in notes:
        if name in STEPS and what == "asked":
            waiting.append(0)
        elif name in STEPS:
            counts.append(waiting.pop(0))
        elif name in CHUNKS and what == "begun":
            waiting = [count + 1 for count in waiting]
    return counts


async def test_decode_steps_overtake_a_long_prefill(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(monkeypatch)
    options = RingOptions(
        nodes=2, own_threads=True, inference=InferenceConfig(threads=1, chunk=2, speculation=False)
    )
    async with (
        open_local_ring(resolve(str(llama)), options) as ring,
        aclosing(ring.entry.generate(order([3, 1, 4], 120))) as steps,
    ):
        while not isinstance(await anext(steps), Token):
            pass
        log.notes.clear()
        prompt = asyncio.ensure_future(answer(ring, order([5] * 100, 1)))
        while not prompt.done():
            await anext(steps)

    for notes in log.of_each_worker():
        chunks = [at for at, note in enumerate(notes) if note in {(n, "begun") for n in CHUNKS}]
        between = notes[chunks[0] : chunks[-1]]
        assert len(chunks) >= 50
        assert ("_run_batch", "begun") in between
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

        def pace(prompt: int, others: int) -> Pace:
            asked.append((prompt, others))
            return Pace(chunk=4, window=2)

        monkeypatch.setattr(ring.entry, "pace", pace)
        outputs = [output async for output in ring.entry.generate(order([5] * 10, 2))]
        async with aclosing(ring.entry.generate(order([7] * 9, 9))) as other:
            await anext(other)
            await answer(ring, order([8] * 8, 1))

    assert paces == [usual_pace(prompt, 3) for prompt in (10, 100, 2000)]
    assert asked == [(10, 0), (9, 0), (8, 1)]
    assert [o.done for o in outputs if isinstance(o, Prefilled)] == [4, 8, 10]
