"""Speculative decoding does not change the text: any ring, drafter, delay, greedy or not."""

import asyncio
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from meshllm.model.files.source import Source, resolve
from meshllm.model.speculation.prompt_lookup import SuffixDrafting
from meshllm.model.steps.load import load_shard
from meshllm.model.steps.runner import Runner
from meshllm.names import Quant, Span
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import RingOptions, open_local_ring
from meshllm.node.session.generation import Ended, GenerationRequest
from meshllm.protocol.drafting.drafter import Drafting
from meshllm.protocol.drafting.window import STEPS
from meshllm.request import FinishReason, Sampling
from meshllm.testing.clock import run_virtual
from meshllm.testing.models import tiny_model
from meshllm_loopback import LoopbackTransport, Shape
from tests.builders.oracle import Oracle

PROMPT = (5, 9, 13, 5, 9, 13, 7, 5, 9)
TOKENS = 32
SAMPLINGS = (Sampling(), Sampling(temperature=0.8, seed=3, repetition_penalty=1.1))


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=str)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Source:
    return tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", dtype=request.param)


async def answer(
    source: Source,
    drafting: Drafting | None,
    sampling: Sampling = SAMPLINGS[0],
    *,
    nodes: int = 1,
    shape: Shape | None = None,
    order: GenerationRequest | None = None,
) -> tuple[list[int], Ended]:
    options = RingOptions(
        nodes=nodes,
        inference=InferenceConfig(threads=1, speculation=drafting is not None, drafting=drafting),
    )
    order = order or GenerationRequest(PROMPT, sampling, TOKENS, is_last=lambda _: False)
    async with open_local_ring(source, options, LoopbackTransport(shape or Shape())) as ring:
        outputs = [output async for output in ring.entry.generate(order)]
    ended = outputs[-1]
    assert isinstance(ended, Ended)
    return [output.id for output in outputs if hasattr(output, "id")], ended


def computes_together(source: Source) -> bool:
    """Whether this processor computes rows of this model batch-invariantly."""
    shard = load_shard(source, Span(0, 6), embed=True, head=True)
    return Runner(shard, STEPS).is_row_invariant


def plain_text(source: Source, sampling: Sampling) -> list[int]:
    """Return the text of a ring of one without drafts."""
    return _plain_text(source.folder, sampling)


@cache
def _plain_text(folder: Path, sampling: Sampling) -> list[int]:
    return asyncio.run(answer(resolve(str(folder)), None, sampling))[0]


@pytest.mark.parametrize(
    ("nodes", "sampling"),
    [
        (1, SAMPLINGS[0]),
        (2, SAMPLINGS[1]),
        (3, SAMPLINGS[0]),
        pytest.param(4, SAMPLINGS[1], marks=pytest.mark.slow),
    ],
    ids=["1-greedy", "2-sampled", "3-greedy", "4-sampled"],
)
def test_good_and_bad_drafts_give_the_same_text(
    source: Source, sampling: Sampling, nodes: int
) -> None:
    text = plain_text(source, sampling)
    for acceptance in (0.0, 0.6, 1.0):
        oracle = Oracle((*PROMPT, *text), acceptance)
        tokens, ended = asyncio.run(answer(source, oracle, sampling, nodes=nodes))
        assert tokens == text, acceptance
        if acceptance == 1.0 and computes_together(source):
            assert ended.measured.tokens_per_step > 1
    assert asyncio.run(answer(source, SuffixDrafting(), sampling, nodes=nodes))[0] == text


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "phi3", "gpt_neox", "mixtral", "lfm2"])
def test_a_text_of_any_family_is_the_same(name: str, tmp_path: Path) -> None:
    source = tiny_model(tmp_path, name, dtype=torch.bfloat16)
    text = plain_text(source, SAMPLINGS[1])
    oracle = Oracle((*PROMPT, *text), 0.7)

    assert asyncio.run(answer(source, oracle, SAMPLINGS[1], nodes=3))[0] == text


@pytest.mark.parametrize("seed", range(3))
def test_delays_change_no_token(source: Source, seed: int) -> None:
    shape = Shape(delay_s=0.01, jitter_s=0.05, loss=0.2, seed=seed)
    text = plain_text(source, SAMPLINGS[1])
    oracle = Oracle((*PROMPT, *text), 0.7, seed)
    tokens, _ = run_virtual(answer(source, oracle, SAMPLINGS[1], nodes=3, shape=shape))
    assert tokens == text


def test_good_drafts_save_steps(source: Source) -> None:
    shape = Shape(delay_s=0.1)
    text = plain_text(source, SAMPLINGS[0])
    _, plain = run_virtual(answer(source, None, nodes=3, shape=shape))
    oracle = Oracle((*PROMPT, *text), 1.0)
    _, fast = run_virtual(answer(source, oracle, nodes=3, shape=shape))

    assert plain.measured.tokens_per_step == 1
    assert fast.measured.token_s < plain.measured.token_s / 3


def test_useless_drafts_cost_no_step(source: Source) -> None:
    shape = Shape(delay_s=0.1)
    text = plain_text(source, SAMPLINGS[0])
    _, plain = run_virtual(answer(source, None, nodes=3, shape=shape))
    oracle = Oracle((*PROMPT, *text), 0.0)
    _, slow = run_virtual(answer(source, oracle, nodes=3, shape=shape))

    assert slow.measured.token_s < plain.measured.token_s * 1.02


@pytest.mark.parametrize("nodes", [1, 3])
def test_an_answer_ends_where_it_does_without_drafts(source: Source, nodes: int) -> None:
    text = plain_text(source, SAMPLINGS[0])
    oracle = Oracle((*PROMPT, *text), 1.0)
    for place in (0, 1, 7, 20):
        seen: list[int] = []

        def is_last(token: int, seen: list[int] = seen, place: int = place) -> bool:
            seen.append(token)
            return len(seen) > place

        order = GenerationRequest(PROMPT, SAMPLINGS[0], TOKENS, is_last)
        tokens, ended = asyncio.run(answer(source, oracle, nodes=nodes, order=order))
        assert (tokens, ended.reason) == (text[: place + 1], FinishReason.STOP)
        assert seen == tokens


@pytest.mark.parametrize("most", [1, 2, 18])
def test_an_answer_is_as_long_as_asked(source: Source, most: int) -> None:
    text = plain_text(source, SAMPLINGS[0])
    order = GenerationRequest(PROMPT, SAMPLINGS[0], most, lambda _: False)
    oracle = Oracle((*PROMPT, *text), 1.0)
    tokens, ended = asyncio.run(answer(source, oracle, nodes=2, order=order))

    assert (tokens, ended.reason) == (text[:most], FinishReason.LENGTH)


def test_an_end_token_among_the_drafts_is_the_last(source: Source) -> None:
    text = plain_text(source, SAMPLINGS[0])
    end = text[10]
    cut = text[: text.index(end) + 1]
    order = GenerationRequest(PROMPT, SAMPLINGS[0], TOKENS, lambda token: token == end)
    oracle = Oracle((*PROMPT, *text), 1.0)
    tokens, _ = asyncio.run(answer(source, oracle, nodes=2, order=order))

    assert tokens == cut


def test_two_sessions_share_what_they_learn_and_nothing_else(source: Source) -> None:
    async def both() -> list[list[int]]:
        options = RingOptions(nodes=2, inference=InferenceConfig(threads=1))
        async with open_local_ring(source, options) as ring:

            async def one(prompt: Sequence[int]) -> list[int]:
                return [token async for token in ring.tokens(prompt, SAMPLINGS[1], TOKENS)]

            return list(await asyncio.gather(one(PROMPT), one(PROMPT[::-1]), one(PROMPT)))

    first, other, again = asyncio.run(both())
    text = plain_text(source, SAMPLINGS[1])
    assert first == again == text
    assert other != text


@pytest.mark.parametrize("nodes", [1, 3])
def test_batched_sessions_each_have_their_own_text(source: Source, nodes: int) -> None:
    prompts = [PROMPT, PROMPT[::-1], PROMPT[:2], (*PROMPT, *PROMPT), (1,), (2, 2), (3,), (4, 1)]

    async def texts(*, at_once: bool) -> list[list[int]]:
        async with open_local_ring(
            source, RingOptions(nodes=nodes, inference=InferenceConfig(threads=1))
        ) as ring:

            async def one(prompt: Sequence[int], seed: int) -> list[int]:
                sampling = Sampling(temperature=seed % 2 * 0.8, seed=seed)
                return [token async for token in ring.tokens(prompt, sampling, TOKENS)]

            asked = [one(prompt, seed) for seed, prompt in enumerate(prompts)]
            return list(await asyncio.gather(*asked)) if at_once else [await each for each in asked]

    assert asyncio.run(texts(at_once=True)) == asyncio.run(texts(at_once=False))


@pytest.mark.parametrize("quant", [Quant.INT8, Quant.INT4])
def test_a_quantised_text_is_the_same_on_every_ring(tmp_path: Path, quant: Quant) -> None:
    source = tiny_model(tmp_path / "model", "qwen3", dtype=torch.bfloat16)

    async def text(nodes: int, drafting: Drafting | None) -> list[int]:
        options = RingOptions(
            nodes=nodes,
            inference=InferenceConfig(
                threads=1,
                quant=quant,
                cache=tmp_path / "cache",
                speculation=drafting is not None,
                drafting=drafting,
            ),
        )
        async with open_local_ring(source, options) as ring:
            return [token async for token in ring.tokens(PROMPT, SAMPLINGS[1], TOKENS)]

    alone = asyncio.run(text(1, None))

    assert [asyncio.run(text(nodes, SuffixDrafting())) for nodes in (1, 2, 3)] == [alone] * 3
    assert asyncio.run(text(3, Oracle((*PROMPT, *alone), 0.7))) == alone
