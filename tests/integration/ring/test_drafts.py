"""A draft model does not change the text: a good one, a bad one, any ring, greedy or not."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshllm.errors import ModelError
from meshllm.model.files.source import Source, open_folder
from meshllm.model.speculation.prompt_lookup import SuffixDrafting
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import RingOptions, open_local_ring
from meshllm.node.session.generation import Ended, GenerationRequest, Token
from meshllm.request import Sampling
from meshllm.testing.clock import run_virtual
from meshllm.testing.models import tiny_model
from meshllm_loopback import LoopbackTransport, TrafficShape
from tests.builders.oracle import Oracle

PROMPT = (5, 9, 13, 5, 9, 13, 7, 5, 9)
TOKENS = 40
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.8, seed=3)
SILENT = Oracle((), 1.0)
NEAR, FAR = TrafficShape(), TrafficShape(delay_s=0.1)
SURE = 32  # factor on the logits of random weights: probabilities near 1


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of an answer, and the tokens per step."""

    tokens: list[int]
    tokens_per_step: float


def tiny(folder: Path, name: str, seed: int) -> Source:
    """Write a tiny model, in bfloat16 so that rows go together, that is sure of what it says.

    Random weights mostly say the last token again; with a shuffled head they walk about.
    """
    tiny_model(folder, name, dtype=torch.bfloat16)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= SURE
    shuffled = torch.randperm(128, generator=torch.Generator().manual_seed(seed))
    weights["lm_head.weight"] = weights["lm_head.weight"][shuffled]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return open_folder(name, folder)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", 1)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return tiny(tmp_path_factory.mktemp("mistral"), "mistral", 2)


async def answers(source: Source, options: RingOptions, shape: TrafficShape = NEAR) -> list[Answer]:
    """Answer the prompt greedily, sampled, and greedily again."""
    found = []
    async with open_local_ring(source, options, LoopbackTransport(shape)) as ring:
        for sampling in (GREEDY, SAMPLED, GREEDY):
            order = GenerationRequest(PROMPT, sampling, TOKENS, take_token=lambda _: False)
            outputs = [output async for output in ring.entry.generate(order)]
            ended = outputs[-1]
            assert isinstance(ended, Ended)
            tokens = [output.id for output in outputs if isinstance(output, Token)]
            found.append(Answer(tokens, ended.measured.tokens_per_step))
    return found


@pytest.fixture(scope="module")
def texts(source: Source) -> list[list[int]]:
    """The answers without drafts."""
    plain = RingOptions(nodes=1, inference=InferenceConfig(threads=1, speculation=False))
    return [answer.tokens for answer in asyncio.run(answers(source, plain))]


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("draft", ["source", "stranger"])
def test_a_good_and_a_bad_draft_model_give_the_same_text(
    source: Source,
    texts: list[list[int]],
    draft: str,
    is_alone: bool,
    request: pytest.FixtureRequest,
) -> None:
    drafter = request.getfixturevalue(draft)
    drafting = SILENT if is_alone else SuffixDrafting()
    options = RingOptions(
        nodes=1,
        inference=InferenceConfig(threads=1, drafting=drafting, draft=str(drafter.folder)),
    )

    assert [answer.tokens for answer in asyncio.run(answers(source, options))] == texts


def test_a_good_draft_model_saves_steps(source: Source, texts: list[list[int]]) -> None:
    options = RingOptions(
        nodes=3, inference=InferenceConfig(threads=1, drafting=SILENT, draft=str(source.folder))
    )

    found = run_virtual(answers(source, options, FAR))

    assert [answer.tokens for answer in found] == texts
    assert all(answer.tokens_per_step > 2 for answer in found)


def test_the_entry_measures_the_way_round_the_ring(source: Source) -> None:
    async def measured() -> float | None:
        inference = InferenceConfig(threads=1, drafting=SILENT)
        options = RingOptions(nodes=3, inference=inference)
        async with open_local_ring(source, options, LoopbackTransport(FAR)) as ring:
            order = GenerationRequest(PROMPT, GREEDY, TOKENS, take_token=lambda _: False)
            async for _ in ring.entry.generate(order):
                pass
            assert ring.entry._speculation
            return ring.entry._speculation.times.of(1)

    assert run_virtual(measured()) == pytest.approx(3 * 0.1, rel=0.1)


def test_nobody_is_drafted_the_answers_of_others(source: Source) -> None:
    async def steps(*scopes: str) -> list[float]:
        found = []
        options = RingOptions(nodes=3, inference=InferenceConfig(threads=1))
        async with open_local_ring(source, options, LoopbackTransport(FAR)) as ring:
            for scope in scopes:
                order = GenerationRequest(
                    PROMPT, SAMPLED, TOKENS, take_token=lambda _: False, scope=scope
                )
                *_, ended = [output async for output in ring.entry.generate(order)]
                assert isinstance(ended, Ended)
                found.append(ended.measured.tokens_per_step)
        return found

    first, other, again = run_virtual(steps("", "key", ""))

    assert first == other < again


def test_a_bad_draft_model_saves_no_steps_and_changes_no_text(
    source: Source, stranger: Source, texts: list[list[int]]
) -> None:
    options = RingOptions(
        nodes=3, inference=InferenceConfig(threads=1, drafting=SILENT, draft=str(stranger.folder))
    )

    found = run_virtual(answers(source, options, FAR))

    assert [answer.tokens for answer in found] == texts
    assert all(answer.tokens_per_step < 1.2 for answer in found)


def test_a_draft_model_with_another_vocabulary_is_refused(source: Source) -> None:
    options = RingOptions(nodes=1, inference=InferenceConfig(threads=1, draft="builtin"))

    with pytest.raises(ModelError, match="`builtin` cannot draft for `qwen3`"):
        asyncio.run(answers(source, options))
