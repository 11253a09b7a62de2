"""Guarantees of a ring in one process."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from meshllm.errors import IntegrityFault, LinkLost, ModelError, PeerFault, UserError
from meshllm.model.files.source import resolve
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.steps import strategies
from meshllm.node.options import InferenceConfig
from meshllm.node.ring import local_ring
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.node.ring.runtime import RingRuntime
from meshllm.node.session.generation import Ended, GenerationRequest, Token
from meshllm.protocol.planning.plan import Ends
from meshllm.request import FinishReason, Prefilled, Sampling
from meshllm.testing.clock import run_virtual
from meshllm.testing.models import tiny_model
from meshllm_loopback import LoopbackTransport, TrafficShape
from tests.builders.tampering import Tampering
from tests.builders.waiting import at_rest

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)
TOKENS = 12


def order(prompt: Sequence[int] = PROMPT, tokens: int = TOKENS, seed: int = 0) -> GenerationRequest:
    sampling = Sampling(temperature=0.9 if seed else 0.0, seed=seed)
    return GenerationRequest(tuple(prompt), sampling, tokens, take_token=lambda _: False)


async def answer(ring: LocalRing, asked: GenerationRequest) -> list[int]:
    return [o.id async for o in ring.entry.generate(asked) if isinstance(o, Token)]


@pytest.fixture(scope="session")
def reference(llama: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(llama)
    generated = model.generate(
        input_ids=torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        do_sample=False,
        max_new_tokens=TOKENS,
        eos_token_id=None,
    )
    tokens: list[int] = generated[0, len(PROMPT) :].tolist()
    return tokens


PLAIN = RingOptions(nodes=3, inference=InferenceConfig(threads=1, speculation=False))
"""Each trip gives one token."""


@asynccontextmanager
async def ring_of(folder: Path, nodes: int, chunk: int = 256) -> AsyncIterator[LocalRing]:
    options = RingOptions(nodes=nodes, inference=InferenceConfig(threads=1, chunk=chunk))
    async with open_local_ring(resolve(str(folder)), options) as ring:
        yield ring


@pytest.mark.parametrize("nodes", [1, 2, 3, 6])
async def test_every_ring_answers_as_transformers_does(
    llama: Path, reference: list[int], nodes: int
) -> None:
    async with ring_of(llama, nodes) as ring:
        assert await answer(ring, order()) == reference


@pytest.mark.parametrize("nodes", [1, 3])
async def test_a_prompt_in_chunks_gives_the_same_text_and_reports_progress(
    llama: Path, reference: list[int], nodes: int
) -> None:
    async with ring_of(llama, nodes, chunk=4) as ring:
        outputs = [output async for output in ring.entry.generate(order())]

    assert [o.id for o in outputs if isinstance(o, Token)] == reference
    assert [o for o in outputs if isinstance(o, Prefilled)] == [
        Prefilled(4, 10),
        Prefilled(8, 10),
        Prefilled(10, 10),
    ]


async def test_concurrent_sessions_do_not_disturb_each_other(llama: Path) -> None:
    orders = [order(PROMPT[: 3 + i % 6], TOKENS, seed=i) for i in range(12)]
    async with ring_of(llama, 3) as ring:
        alone = [await answer(ring, one) for one in orders]

        together = await asyncio.gather(*(answer(ring, one) for one in orders))

        assert together == alone
        assert len({tuple(tokens) for tokens in alone}) > 6


async def test_leaving_early_frees_every_rank(llama: Path) -> None:
    async with ring_of(llama, 3) as ring:
        async with aclosing(ring.entry.generate(order(tokens=400))) as outputs:
            async for output in outputs:
                if isinstance(output, Token):
                    held = [stage.sessions for stage in ring.stages]
                    break

        await at_rest(ring)

        assert held == [1, 1]
        assert [stage.sessions for stage in ring.stages] == [0, 0]
        assert ring.entry.sessions == 0


async def test_cancelling_the_task_frees_every_rank(llama: Path) -> None:
    async with ring_of(llama, 3) as ring:
        started = asyncio.Event()

        async def ask() -> None:
            async for _ in ring.entry.generate(order(tokens=400)):
                started.set()

        task = asyncio.create_task(ask())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await at_rest(ring)

        assert [stage.sessions for stage in ring.stages] == [0, 0]
        assert await answer(ring, order(tokens=2))


async def test_a_corrupted_blob_ends_one_session_and_not_the_ring(
    llama: Path, reference: list[int]
) -> None:
    def flip(number: int, message: bytes) -> bytes:
        return message[:-1] + bytes([message[-1] ^ 1]) if number == 7 else message

    async with open_local_ring(resolve(str(llama)), PLAIN, Tampering(flip)) as ring:
        with pytest.raises(IntegrityFault, match="rank 2: Blob of 256 bytes"):
            await answer(ring, order())

        assert await answer(ring, order()) == reference


async def test_a_cut_link_is_a_typed_error_and_the_ring_forms_again(
    llama: Path, reference: list[int]
) -> None:
    cuts = [8]

    def cut(number: int, message: bytes) -> bytes | None:
        if number not in cuts:
            return message
        cuts.clear()
        return None

    async with open_local_ring(resolve(str(llama)), RingOptions(nodes=3), Tampering(cut)) as ring:
        with pytest.raises(LinkLost):
            await answer(ring, order())
        with pytest.raises(LinkLost):
            await answer(ring, order())
        for _ in range(100):  # passes of the loop; the ranks notice one after the other
            await asyncio.sleep(0)
        await ring.formed()

        assert await answer(ring, order()) == reference
        await at_rest(ring)
        assert [stage.sessions for stage in ring.stages] == [0, 0]


class Panic(BaseException):
    """What a panic of Rust code becomes in Python; no `Exception`."""


@pytest.mark.parametrize("kind", [KeyError, Panic])
async def test_a_bug_ends_its_session_and_not_the_others(
    llama: Path,
    reference: list[int],
    caplog: pytest.LogCaptureFixture,
    kind: type[BaseException],
) -> None:
    def bug(_: int) -> bool:
        raise kind("a bug in the tokenizer")

    async with ring_of(llama, 2) as ring:
        with pytest.raises(ModelError, match="a bug in the tokenizer"):
            await answer(ring, replace(order(), take_token=bug))

        assert await answer(ring, order()) == reference
    assert (
        kind is Panic or "KeyError" in caplog.text
    )  # exceptions of foreign code are not logged as bugs


async def test_a_ring_does_not_wait_for_a_rank_that_a_bug_has_ended(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_: RingRuntime) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(RingRuntime, "run", broken)
    opened = list[LocalRing]()

    with pytest.raises(ExceptionGroup):
        async with ring_of(llama, 2) as ring:
            opened.append(ring)

    assert opened == []


async def test_a_head_without_layers_gives_the_same_text(llama: Path, reference: list[int]) -> None:
    options = RingOptions(nodes=2, ends=Ends.CLIENT, inference=InferenceConfig(threads=1))
    async with open_local_ring(resolve(str(llama)), options) as ring:
        assert await answer(ring, order()) == reference


async def test_a_model_that_cannot_be_split_keeps_its_ends(tmp_path: Path) -> None:
    source = tiny_model(tmp_path, "inkling2_text")

    with pytest.raises(ModelError, match="cannot be split"):
        async with open_local_ring(
            source, RingOptions(ends=Ends.CLIENT, inference=InferenceConfig(threads=1))
        ):
            pass


async def test_garbage_on_the_wire_drops_the_link(llama: Path) -> None:
    def garble(number: int, message: bytes) -> bytes:
        return b"\xff" * 40 if number == 5 else message

    async with open_local_ring(
        resolve(str(llama)), RingOptions(nodes=2), Tampering(garble)
    ) as ring:
        with pytest.raises((LinkLost, PeerFault)):
            await answer(ring, order())


async def test_figures_cover_every_hop(llama: Path) -> None:
    async with open_local_ring(resolve(str(llama)), PLAIN) as ring:
        outputs = [output async for output in ring.entry.generate(order())]

    ended = outputs[-1]
    assert isinstance(ended, Ended)
    assert ended.reason is FinishReason.LENGTH
    assert len(ended.measured.hops) == 3
    assert all(hop.compute_s > 0 for hop in ended.measured.hops)
    assert {hop.bytes_sent for hop in ended.measured.hops} == {64 * 4 + 85}  # the row, the header


def test_a_token_takes_one_link_delay_per_hop_and_nothing_else(llama: Path) -> None:
    async def times() -> list[float]:
        transport = LoopbackTransport(TrafficShape(delay_s=0.050))
        async with open_local_ring(resolve(str(llama)), PLAIN, transport) as ring:
            clock = asyncio.get_running_loop().time
            return [clock() async for o in ring.entry.generate(order()) if isinstance(o, Token)]

    stamps = run_virtual(times())

    steps = [round(b - a, 6) for a, b in pairwise(stamps)]
    assert steps == [0.150] * (TOKENS - 1)


@pytest.mark.parametrize("seed", range(8))
def test_jitter_and_loss_change_no_token(llama: Path, reference: list[int], seed: int) -> None:
    async def tokens() -> list[int]:
        shape = TrafficShape(delay_s=0.01, jitter_s=0.05, loss=0.2, seed=seed)
        options = RingOptions(nodes=3, inference=InferenceConfig(threads=1, chunk=4))
        async with open_local_ring(resolve(str(llama)), options, LoopbackTransport(shape)) as ring:
            return await answer(ring, order())

    assert run_virtual(tokens()) == reference


def test_chunks_fill_the_ring_without_waiting(llama: Path) -> None:
    async def first_token(chunk: int) -> float:
        transport = LoopbackTransport(TrafficShape(delay_s=0.050))
        options = RingOptions(nodes=3, inference=InferenceConfig(chunk=chunk))
        async with open_local_ring(resolve(str(llama)), options, transport) as ring:
            begin = asyncio.get_running_loop().time()
            async with aclosing(ring.entry.generate(order())) as outputs:
                async for output in outputs:
                    if isinstance(output, Token):
                        break
            return asyncio.get_running_loop().time() - begin

    one, three = run_virtual(first_token(100)), run_virtual(first_token(4))

    assert three < 1.5 * one  # one after the other they would take 3 times as long


async def test_nothing_is_left_running(llama: Path) -> None:
    async with ring_of(llama, 3) as ring:
        await answer(ring, order())

    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("compute")]


@pytest.mark.parametrize("is_stock", [True, False])
async def test_a_fallback_of_all_ranks_is_one_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_stock: bool,
) -> None:
    source = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16)
    if is_stock:
        monkeypatch.setattr(strategies, "lacks_invariance", lambda *_: "it is odd")
    else:
        monkeypatch.setattr(SpanCache, "extends", False)
    options = RingOptions(nodes=2, inference=InferenceConfig(threads=1))

    async with open_local_ring(source, options):
        pass

    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    (warning,) = warnings
    assert (
        "kernels disabled (it is odd)" if is_stock else "steps are slower: no replay"
    ) in warning


async def test_more_nodes_than_layers_are_refused(llama: Path) -> None:
    with pytest.raises(UserError, match="7 nodes for the 6 layers"):
        async with ring_of(llama, 7):
            pass


async def test_a_model_larger_than_the_memory_is_refused(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_ring, "free_memory", lambda: 200_000)

    with pytest.raises(ModelError, match="lacks"):
        async with ring_of(llama, 2):
            pass


async def test_a_prompt_longer_than_the_context_is_refused(llama: Path) -> None:
    async with ring_of(llama, 2) as ring:
        with pytest.raises(UserError, match="the prompt has 128"):
            await answer(ring, order(prompt=[1] * 128))

        assert ring.entry.sessions == 0


async def test_the_context_ends_an_answer(llama: Path) -> None:
    async with ring_of(llama, 2) as ring:
        tokens = await answer(ring, order(prompt=[1] * 116, tokens=100))

    assert len(tokens) == 128 - 116
