"""The structure of a stock model, found by running it without its layers."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from meshllm.errors import ModelError
from meshllm.model.parity.families import read_table, tiny_config
from meshllm.model.split.meta_model import build
from meshllm.model.split.structure import ModelStructure, find_structure


def structure_of(name: str, layers: int | None = None) -> ModelStructure:
    config = tiny_config(name, read_table())
    config.num_hidden_layers = layers or config.num_hidden_layers
    return build(config, torch.float32).structure


@dataclass(frozen=True)
class Parts:
    layers: str
    inputs: set[str]
    outputs: set[str]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("llama", Parts("model.layers", {"model.embed_tokens"}, {"model.norm", "lm_head"})),
        (
            "gpt2",
            Parts(
                "transformer.h",
                {"transformer.wte", "transformer.wpe"},
                {"transformer.ln_f", "lm_head"},
            ),
        ),
        (
            "opt",  # with a narrower embedding
            Parts(
                "model.decoder.layers",
                {
                    "model.decoder.embed_tokens",
                    "model.decoder.embed_positions",
                    "model.decoder.project_in",
                },
                {"model.decoder.final_layer_norm", "model.decoder.project_out", "lm_head"},
            ),
        ),
        (
            "bloom",
            Parts(
                "transformer.h",
                {"transformer.word_embeddings", "transformer.word_embeddings_layernorm"},
                {"transformer.ln_f", "lm_head"},
            ),
        ),
    ],
)
def test_the_ends_are_distinguished_from_the_layers(name: str, parts: Parts) -> None:
    structure = structure_of(name)

    assert Parts(structure.layers, set(structure.inputs), set(structure.outputs)) == parts


@pytest.mark.parametrize(("name", "arity"), [("llama", 0), ("bloom", 1), ("bamba", 2)])
def test_the_arity_of_the_layers_is_found(name: str, arity: int) -> None:
    assert structure_of(name).arity == arity


@pytest.mark.parametrize(("name", "arity"), [("llama", 0), ("bloom", 1)])
def test_the_arity_of_a_single_layer_shows_in_the_shape_of_the_logits(
    name: str, arity: int
) -> None:
    assert structure_of(name, layers=1).arity == arity


def test_the_signature_of_the_forward_is_read() -> None:
    assert structure_of("llama").call.position_ids
    assert not structure_of("bloom").call.position_ids
    assert structure_of("mamba").call.cache == "cache_params"


def test_the_model_is_unchanged_afterwards() -> None:
    meta_model = build(tiny_config("llama", read_table()), torch.float32)

    assert {type(layer).__name__ for layer in meta_model.parts} == {"LlamaDecoderLayer"}
    assert meta_model.model.config._attn_implementation == "sdpa"
    assert not meta_model.model.lm_head._forward_pre_hooks


class Odd(nn.Module):
    """A model whose forward needs its layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.config = LlamaConfig(num_hidden_layers=layers)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(layers))

    def forward(self, input_ids: torch.Tensor, past_key_values: Any, use_cache: bool) -> object:
        if use_cache:
            raise ValueError("it has a cache of its own")
        return SimpleNamespace(logits=input_ids)


def test_a_model_that_does_not_run_without_its_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="`Odd` does not run without its layers"):
        find_structure(Odd(2), 2)


def test_a_model_without_a_list_of_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="`Odd` has no list of 3 layers"):
        find_structure(Odd(2), 3)


class Twin(nn.Module):
    """A model with two lists of as many modules, of which the second is run."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.config = LlamaConfig(num_hidden_layers=layers)
        with torch.device("meta"):
            self.embed = nn.Embedding(8, 4)
            self.scales = nn.ModuleList(nn.Linear(2, 2) for _ in range(layers))
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
            self.gates = nn.ModuleList(nn.Linear(1, 1) for _ in range(layers))
            self.head = nn.Linear(4, 8)

    def forward(self, input_ids: torch.Tensor, past_key_values: Any, use_cache: bool) -> object:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return SimpleNamespace(logits=self.head(hidden))


@pytest.mark.parametrize("layers", [1, 3])
def test_of_two_lists_the_layers_are_the_larger_one(layers: int) -> None:
    structure = find_structure(Twin(layers), layers)

    assert (structure.layers, structure.arity) == ("blocks", 0)
    assert [*structure.inputs, *structure.outputs] == ["embed", "head"]
    assert (structure.call.cache, structure.call.logits_to_keep) == ("past_key_values", False)
