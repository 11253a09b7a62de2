"""Wire modes of a ring: the same text on any link, and fewer bytes if chosen."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshllm.errors import ModelError
from meshllm.model.files.source import Source, resolve
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.steps.runner import Runner
from meshllm.names import WireMode
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import RingOptions, open_local_ring
from meshllm.protocol.drafting.drafter import Drafting
from meshllm.protocol.session.link import MEASURE
from meshllm.request import Sampling
from meshllm.testing.clock import run_virtual
from meshllm.testing.counting import CountingTransport
from meshllm.testing.models import tiny_model
from meshllm.transport.contract import Channel, Transport
from meshllm_loopback import LoopbackTransport, TrafficShape
from tests.builders.oracle import Oracle

PROMPT = (5, 9, 13, 5, 9, 13, 7, 5, 9)
TOKENS = 16


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", dtype=torch.bfloat16)


async def answer(
    source: Source,
    mode: WireMode = WireMode.INT8,
    prompt: Sequence[int] = PROMPT,
    *,
    transport: Transport | None = None,
    drafting: Drafting | None = None,
    chunk: int = 256,
) -> list[int]:
    options = RingOptions(
        nodes=3,
        inference=InferenceConfig(
            threads=1, speculation=drafting is not None, drafting=drafting, chunk=chunk, wire=mode
        ),
    )
    async with open_local_ring(source, options, transport or LoopbackTransport()) as ring:
        return [token async for token in ring.tokens(prompt, Sampling(), TOKENS)]


def data_of(transport: CountingTransport) -> list[int]:
    return [size for channel, size in transport.sent if channel is Channel.DATA]


@pytest.fixture(scope="module")
def text(source: Source) -> list[int]:
    """The text of a ring with 8-bit rows."""
    return asyncio.run(answer(source))


def test_8_bits_give_the_same_text_each_time_on_any_link(source: Source, text: list[int]) -> None:
    shape = TrafficShape(delay_s=0.01, jitter_s=0.05, loss=0.2, seed=3)

    assert run_virtual(answer(source, transport=LoopbackTransport(shape))) == text


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_8_bits_give_the_same_text_with_good_and_bad_drafts(
    source: Source, text: list[int], acceptance: float
) -> None:
    oracle = Oracle((*PROMPT, *text), acceptance)

    assert asyncio.run(answer(source, drafting=oracle)) == text


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_8_bits_give_the_same_text_in_chunks(llama: Path, chunk: int) -> None:
    source = resolve(str(llama))

    assert asyncio.run(answer(source, chunk=chunk)) == asyncio.run(answer(source))


async def test_8_bits_give_the_same_text_in_a_batch(source: Source, text: list[int]) -> None:
    options = RingOptions(nodes=3, inference=InferenceConfig(threads=1, wire=WireMode.INT8))
    async with open_local_ring(source, options) as ring:

        async def one(prompt: Sequence[int]) -> list[int]:
            return [token async for token in ring.tokens(prompt, Sampling(), TOKENS)]

        together = await asyncio.gather(one(PROMPT), one(PROMPT[1:]), one(PROMPT[2:]))

    assert together[0] == text


async def test_a_hop_costs_a_byte_per_value_and_two_per_block(source: Source) -> None:
    transport = CountingTransport(LoopbackTransport())
    width, head = source.config.hidden_size, 85

    await answer(source, transport=transport)

    row = width + 2 * -(-width // 32)
    assert set(data_of(transport)) == {head + row, head + len(PROMPT) * row}


def test_exact_rows_on_a_slow_link_are_the_same_text_in_fewer_bytes(source: Source) -> None:
    answers, weights = [], []
    for mode in (WireMode.EXACT, WireMode.PLAIN):
        transport = CountingTransport(LoopbackTransport(TrafficShape(bytes_per_s=1000)))
        answers.append(run_virtual(answer(source, mode, transport=transport)))
        weights.append(data_of(transport))

    exact, plain = weights
    width = source.config.hidden_size
    assert answers[0] == answers[1] == asyncio.run(answer(source, WireMode.EXACT))
    assert len(exact) == len(plain)
    assert set(plain) == {85 + 2 * width, 85 + 2 * len(PROMPT) * width}
    assert sum(exact) < 0.95 * sum(plain)  # of tiny rows, each with its own code table


@pytest.mark.parametrize("chunk", [1, 4])
def test_packed_rows_give_the_same_text_with_drafts_chunks_and_delays(
    source: Source, chunk: int
) -> None:
    text = asyncio.run(answer(source, WireMode.PLAIN, chunk=chunk))
    link = TrafficShape(delay_s=0.01, jitter_s=0.05, loss=0.2, seed=3, bytes_per_s=20_000)
    oracle = Oracle((*PROMPT, *text), 0.6)
    asked = answer(
        source, WireMode.EXACT, transport=LoopbackTransport(link), drafting=oracle, chunk=chunk
    )

    assert run_virtual(asked) == text


def test_auto_measures_links_and_changes_no_running_session(source: Source) -> None:
    transport = CountingTransport(LoopbackTransport(TrafficShape(bytes_per_s=1000)))
    options = RingOptions(
        nodes=3, inference=InferenceConfig(threads=1, speculation=False, wire=WireMode.AUTO)
    )

    async def both() -> tuple[list[int], list[int]]:
        async with open_local_ring(source, options, transport) as ring:
            _ = [token async for token in ring.tokens(PROMPT, Sampling(), TOKENS)]
            first = data_of(transport)
            assert asyncio.get_running_loop().time() > 2 * MEASURE  # all links are measured by now
            _ = [token async for token in ring.tokens(PROMPT[1:], Sampling(), TOKENS)]
            return first, data_of(transport)[len(first) :]

    first, second = run_virtual(both())

    width = source.config.hidden_size
    assert max(second[3:]) == min(second) == 85 + width + 2 * -(-width // 32) < min(first)


def test_a_mixture_in_a_ring_stays_exact(tmp_path: Path) -> None:
    source = tiny_model(tmp_path, "qwen3_moe")
    transport = CountingTransport(LoopbackTransport(TrafficShape(bytes_per_s=1000)))
    options = RingOptions(
        nodes=2, inference=InferenceConfig(threads=1, speculation=False, wire=WireMode.AUTO)
    )

    async def answers() -> None:
        async with open_local_ring(source, options, transport) as ring:
            for start in (0, 1):
                _ = [token async for token in ring.tokens(PROMPT[start:], Sampling(), 4)]
                await asyncio.sleep(2 * MEASURE)

    run_virtual(answers())

    assert min(data_of(transport)) > 85 + 3 * source.config.hidden_size  # packed is exact


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
async def test_a_non_finite_state_ends_the_session_with_a_reason(
    source: Source, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Runner.prefill

    def broken(self: Runner, x: Tensor, cache: SpanCache, rows: int | None = None) -> Tensor:
        output = step(self, x, cache, rows)
        return output if self.shard.embed else torch.full_like(output, value)

    monkeypatch.setattr(Runner, "prefill", broken)

    with pytest.raises(ModelError, match=r"rank 1: .* not finite"):
        await answer(source)
