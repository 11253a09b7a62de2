"""Rotary embeddings that change with the text length are pinned, and served."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from meshllm.model.capacity import shape_of
from meshllm.model.files.source import Source, open_folder
from meshllm.model.parity.check import check, verify
from meshllm.model.split.rope import context_of, pin_frequencies, pinned_frequencies
from meshllm.model.steps.load import load_shard
from meshllm.model.steps.runner import Runner
from meshllm.names import Span

CONTEXT, ORIGINAL = 256, 48
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1 + 0.1 * at for at in range(8)],
        "long_factor": [2.0 + at for at in range(8)],
        "original_max_position_embeddings": ORIGINAL,
    },
}


def config_of(kind: str) -> PreTrainedConfig:
    return LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_theta": 10_000.0, **KINDS[kind]},
    )


def model_of(folder: Path, kind: str, dtype: torch.dtype) -> Source:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config_of(kind), dtype=dtype).save_pretrained(folder)
    return open_folder(kind, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_the_context_ends_before_frequencies_change(tmp_path: Path, kind: str) -> None:
    context = ORIGINAL if kind == "longrope" else CONTEXT

    assert context_of(config_of(kind)) == context
    assert shape_of(model_of(tmp_path, kind, torch.float32)).context == context


def test_a_config_may_set_no_limit_and_may_be_nested() -> None:
    config = SimpleNamespace(to_dict=lambda: {"rope_parameters": {"full": KINDS["longrope"]}})
    assert context_of(SimpleNamespace(get_text_config=lambda decoder: config)) == ORIGINAL

    config = SimpleNamespace(to_dict=lambda: {"rope_parameters": None})
    assert context_of(SimpleNamespace(get_text_config=lambda decoder: config)) is None


def test_the_context_is_that_of_the_decoder() -> None:
    texts = {
        decoder: SimpleNamespace(max_position_embeddings=limit, to_dict=dict)
        for decoder, limit in ((True, 7), (False, 9))
    }

    assert context_of(SimpleNamespace(get_text_config=lambda decoder: texts[decoder])) == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_split_model_is_that_of_transformers(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    source = model_of(tmp_path / "model", kind, dtype)

    assert check(source.config, folder=tmp_path).equal
    assert verify(source, prompt=range(1, ORIGINAL - 16), splits=[2, 3]).splits[0].equal


@pytest.mark.parametrize("kind", KINDS)
def test_sessions_of_any_length_are_batched(tmp_path: Path, kind: str) -> None:
    shard = load_shard(model_of(tmp_path, kind, torch.bfloat16), Span(0, 3), embed=True, head=True)

    assert Runner(shard, (2,)).is_row_invariant


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_long_text_does_not_change_the_frequencies_of_a_shard(tmp_path: Path, kind: str) -> None:
    shard = load_shard(model_of(tmp_path, kind, torch.float32), Span(0, 3), embed=True, head=True)
    rotary = shard.model.model.rotary_emb
    before = rotary.inv_freq.clone()

    shard.forward(torch.ones(1, 2 * CONTEXT, dtype=torch.long), shard.new_cache())

    assert torch.equal(rotary.inv_freq, before)
    assert not before.equal(torch.zeros_like(before))


def test_frequencies_are_pinned_within_a_block_or_permanently() -> None:
    def one(kind: object) -> nn.Module:
        module = nn.Module()
        module.rope_type = kind  # type: ignore[assignment]
        return module

    kinds = ["yarn", "dynamic", {"full": "longrope", "sliding": "default"}]
    model = nn.ModuleList([nn.Module(), *map(one, kinds)])
    fixed = ["yarn", "default", {"full": "default", "sliding": "default"}]

    def now() -> list[object]:
        return [vars(module)["rope_type"] for module in model if "rope_type" in vars(module)]

    with pinned_frequencies(model):
        assert now() == fixed
    assert now() == kinds

    pin_frequencies(model)
    assert now() == fixed
