"""Tiny models whose widths are not multiples of 16: a BLAS may round depending on alignment."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, PreTrainedConfig

from meshllm.model.files.source import Source
from meshllm.model.parity.compare import random_model
from meshllm.model.parity.families import read_table, tiny_config

_FIVE = {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1}
_SEVEN = {"hidden_size": 84, "num_attention_heads": 7, "num_key_value_heads": 7}
_WIDE = {"intermediate_size": 90, "vocab_size": 131}
_EXPERTS = {"hidden_size": 56, "moe_intermediate_size": 40, "intermediate_size": 40}
"""Multiples of 8: torch multiplies groups of 16-bit matrices only with rows of 16 bytes."""
_THREE = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20, "vocab_size": 131}

ODD_SHAPES: dict[str, dict[str, Any]] = {
    "llama": _FIVE | _WIDE | {"head_dim": 12},
    "llama:biased": _SEVEN
    | _WIDE
    | {"head_dim": 12, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "llama:narrow": _FIVE | _WIDE | {"hidden_size": 30, "head_dim": 6},
    "qwen2": _WIDE | {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3},
    "qwen3": _THREE | {"hidden_size": 84, "intermediate_size": 116},
    "qwen3_moe": _THREE | _EXPERTS | {"num_experts": 5},
    "qwen3_next": _THREE
    | _EXPERTS
    | {
        "num_experts": 5,
        "shared_expert_intermediate_size": 40,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
    },
    "gemma2": _THREE | {"hidden_size": 84, "intermediate_size": 100, "head_dim": 28},
    "gemma3_text": _FIVE | _WIDE | {"head_dim": 12},
    "mistral": _SEVEN | _WIDE | {"num_key_value_heads": 1, "head_dim": 12},
    "mixtral": _THREE | _EXPERTS | {"num_local_experts": 3},
    "phi3": _SEVEN | _WIDE,
    "gpt2": {"n_embd": 60, "n_head": 5, "n_inner": 90, "vocab_size": 131},
    "gpt_neox": _WIDE | {"hidden_size": 84, "num_attention_heads": 7},
    "opt": {"hidden_size": 60, "num_attention_heads": 5, "ffn_dim": 90, "vocab_size": 131},
    "bloom": {"hidden_size": 60, "n_head": 5, "vocab_size": 131},
    "mpt": {"d_model": 84, "n_heads": 7, "vocab_size": 131},
    "falcon:alibi": {"hidden_size": 84, "num_attention_heads": 7, "vocab_size": 131},
    "starcoder2": _FIVE | _WIDE,
    "stablelm": _THREE | {"hidden_size": 72, "num_key_value_heads": 3, "intermediate_size": 90},
    "lfm2": _FIVE | _WIDE | {"block_ff_dim": 90},
    "mamba": {"hidden_size": 60, "intermediate_size": 120, "state_size": 7, "vocab_size": 131},
    "mamba2": {"hidden_size": 60, "num_heads": 10, "head_dim": 12, "vocab_size": 131},
    "bamba": _FIVE | _WIDE | {"mamba_n_heads": 10, "mamba_d_head": 12},
    "granite": _FIVE | _WIDE,
}
"""Model type or ``type:variant`` -> changes to its tiny config in the table."""


def odd_config(name: str) -> PreTrainedConfig:
    """Make the tiny config of a model of odd shape."""
    model_type = name.partition(":")[0]
    fields = tiny_config(name, read_table()).to_dict()
    config: PreTrainedConfig = CONFIG_MAPPING[model_type](**fields | ODD_SHAPES[name])
    return config


@contextmanager
def odd_model(name: str, dtype: torch.dtype, shift: int = 8) -> Iterator[Source]:
    """Save a random model of odd shape whose weights begin ``shift`` bytes off a multiple of 16."""
    with random_model(odd_config(name), dtype) as (_, source):
        path = source.folder / "model.safetensors"
        weights = load_file(path)
        weights = {key: weight.clone() for key, weight in weights.items()}
        for size in range(64):  # the header is padded to a multiple of 8
            save_file(weights, path, metadata={"format": "pt", "filling": "-" * size})
            if int.from_bytes(path.read_bytes()[:8], "little") % 16 == (shift + 8) % 16:
                break
        yield source
