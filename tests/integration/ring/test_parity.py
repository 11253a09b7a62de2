"""A ring gives the tokens of one process, on prompts of the builtin model."""

import asyncio
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from meshllm.model.files.source import Source, resolve
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.request import Sampling

HELDOUT = Path(__file__).parents[2] / "builtin" / "heldout.toml"
SIZES = (1, 2, 3, 4)
TOKENS = 12


def prompts(ring: LocalRing, most: int) -> list[list[int]]:
    cases = tomllib.loads(HELDOUT.read_text(encoding="utf-8"))["case"]
    return [
        ring.text.encode_chat([{"role": "user", "content": case["turns"][0]}])
        for case in cases[:most]
    ]


def reference(source: Source, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
    return [
        model.generate(
            input_ids=torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            eos_token_id=None,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


async def texts(nodes: int, most: int, *samplings: Sampling) -> list[list[list[int]]]:
    """Return the answers to prompts, for each sampling."""
    options = RingOptions(nodes=nodes, inference=InferenceConfig(dtype="float32", threads=1))
    async with open_local_ring(resolve("builtin"), options) as ring:
        asked = prompts(ring, most)
        return [
            [[token async for token in ring.tokens(prompt, sampling, TOKENS)] for prompt in asked]
            for sampling in samplings
        ]


async def encoded(most: int) -> list[list[int]]:
    async with open_local_ring(
        resolve("builtin"), RingOptions(inference=InferenceConfig(threads=1))
    ) as ring:
        return prompts(ring, most)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("most", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_rings_of_1_to_4_nodes_match_transformers(most: int) -> None:
    source = resolve("builtin")
    expected = reference(source, asyncio.run(encoded(most)))

    rings = {nodes: asyncio.run(texts(nodes, most, Sampling())) for nodes in SIZES}

    assert len(expected) == most
    assert [nodes for nodes in SIZES if rings[nodes] != [expected]] == []


def test_a_seed_gives_the_same_text_on_every_ring() -> None:
    sampling = Sampling(temperature=3.0, top_p=0.95, seed=7)

    rings = [asyncio.run(texts(nodes, 4, sampling)) for nodes in SIZES]

    assert all(ring == rings[0] for ring in rings)


def test_another_seed_gives_another_text() -> None:
    samplings = [Sampling(temperature=3.0, seed=seed) for seed in (1, 2)]

    first, second = asyncio.run(texts(2, 2, *samplings))

    assert first != second
