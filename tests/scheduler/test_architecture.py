import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshllm.errors import UserError
from meshllm.model.capacity import shape_of
from meshllm.node.ring.shape import reserved_bytes
from meshllm.scheduler.architecture import Architecture
from meshllm.testing.models import tiny_model
from tests.builders.model_configs import LLAMA_8B, MIXTRAL

QWEN_MOE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 151936,
}


def test_parameters_match_the_published_counts() -> None:
    for config, billions in ((LLAMA_8B, 8.03), (MIXTRAL, 46.7), (QWEN_MOE, 14.3)):
        sizes = Architecture.from_config("model", config).sizes(4096)

        total = sum(sizes.layer_bytes) + sizes.ends_bytes
        assert total / 2e9 == pytest.approx(billions, rel=0.002)


def test_a_shared_expert_computes_every_row() -> None:
    model = Architecture.from_config("model", QWEN_MOE)
    routed = Architecture.from_config("model", QWEN_MOE | {"shared_expert_intermediate_size": 0})
    alike = QWEN_MOE | {"shared_expert_intermediate_size": None, "n_shared_experts": 4}

    more = sum(each.flops for each in model.operators(1)) - sum(
        each.flops for each in routed.operators(1)
    )
    assert more == 2 * 3 * 2048 * 5632
    assert Architecture.from_config("model", alike) == model


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ({}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float32", "text_config": QWEN_MOE | {"dtype": "float16"}}, "float32"),
        ({"dtype": "\x1b[2J"}, "bfloat16"),
        ({"dtype": ["float16"]}, "bfloat16"),
    ],
)
def test_an_unquantised_model_has_the_precise_name_of_a_mesh(
    told: dict[str, Any], name: str
) -> None:
    bare = {key: value for key, value in QWEN_MOE.items() if "dtype" not in key}

    assert Architecture.from_config("model", bare | told).precise_name == f"model@{name}"


@pytest.mark.parametrize(
    "change",
    [
        {"first_k_dense_replace": 1},
        {"mlp_only_layers": [0]},
        {"decoder_sparse_step": 2},
        {"full_attention_interval": 4},
        {"layer_types": ["linear_attention", "full_attention"] * 12},
        {"layer_types": 5},
    ],
    ids=str,
)
def test_layers_of_several_kinds_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(UserError, match="its layers are of several kinds"):
        Architecture.from_config("model", QWEN_MOE | change)


def test_a_cache_holds_keys_and_values_of_the_kv_heads() -> None:
    sizes = Architecture.from_config("model", LLAMA_8B).sizes(4096)

    assert sum(sizes.kv_bytes_per_token) == 128 << 10


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_model_needs_as_much_besides_as_a_node_reserves(tmp_path: Path, family: str) -> None:
    source = tiny_model(tmp_path, family)
    config = json.loads((source.folder / "config.json").read_text())
    shape = shape_of(source, torch.bfloat16)

    sizes = Architecture.from_config("model", config).sizes(shape.context)

    assert sizes.workspace_bytes == pytest.approx(reserved_bytes(shape), rel=0.02)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "no valid `num_hidden_layers`: `None`"),
        (LLAMA_8B | {"hidden_size": -1}, "no valid `hidden_size`: `-1`"),
        (LLAMA_8B | {"kv_lora_rank": 512}, "operators of `model` are unknown"),
    ],
)
def test_a_config_without_known_operators_is_refused(config: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Architecture.from_config("model", config)


def test_the_text_part_of_a_config_counts() -> None:
    nested = {"text_config": LLAMA_8B, "vision_config": {"hidden_size": 1}}

    assert Architecture.from_config("m", nested) == Architecture.from_config("m", LLAMA_8B)
