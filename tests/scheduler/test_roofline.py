import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshllm.errors import UserError
from meshllm.model.capacity import shape_of
from meshllm.names import NodeId, Quant
from meshllm.node.ring.shape import reserved_bytes
from meshllm.scheduler.architecture import Architecture
from meshllm.scheduler.machine import Costs, MachineKind
from meshllm.testing.models import tiny_model

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
MIXTRAL = LLAMA_8B | {"num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000}
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
A100 = MachineKind("a100", 80 << 30, 312e12, 2.039e12)
NODE = NodeId(bytes(32))


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


def test_a_step_of_one_row_is_bound_by_memory() -> None:
    model = Architecture.from_config("model", LLAMA_8B)
    offer = A100.offer(NODE, model)

    step_s = 32 * offer.layer_seconds(1) + offer.head_s
    read = sum(model.sizes(1).layer_bytes) + model.sizes(1).head_read_bytes
    assert step_s == pytest.approx(read / A100.bandwidth, rel=0.01)


def test_a_long_chunk_is_bound_by_computation() -> None:
    model = Architecture.from_config("model", LLAMA_8B)

    seconds = A100.offer(NODE, model).layer_seconds(2048)

    flops = 2 * 2048 * (model.attention_weights + model.expert_weights)
    attention = 2 * 2048 * 2049 * model.heads * model.head_width
    norms = 8 * 2048 * 4096 * 2 / A100.bandwidth
    assert seconds == pytest.approx((flops + attention) / A100.flops + norms, rel=1e-6)


def test_few_rows_read_few_experts() -> None:
    offer = A100.offer(NODE, Architecture.from_config("model", MIXTRAL))

    one, many = offer.layer_seconds(1), offer.layer_seconds(64)

    assert 3 < many / one < 4  # two of eight experts, then all of them; attention is shared


def test_quantised_weights_are_read_faster_and_take_less_memory() -> None:
    plain = Architecture.from_config("model", LLAMA_8B)
    packed = replace(plain, quant=Quant.INT8)

    assert packed.sizes(1).layer_bytes[0] * 2 == plain.sizes(1).layer_bytes[0]
    ratio = A100.offer(NODE, plain).layer_seconds(1) / A100.offer(NODE, packed).layer_seconds(1)
    assert ratio == pytest.approx(2, rel=0.01)


def test_a_measured_machine_takes_what_was_measured_and_scales_to_other_models() -> None:
    model = Architecture.from_config("model", LLAMA_8B)
    half = replace(model, quant=Quant.INT8)
    machine = MachineKind.measured("attic", 8 << 30, 0.010, model)

    offer = machine.offer(NODE, model)

    assert offer.layer_seconds(1) == pytest.approx(0.010)
    assert offer.layer_seconds(256) == pytest.approx(0.0424, rel=0.01)
    assert machine.offer(NODE, half).layer_seconds(1) == pytest.approx(0.005, rel=0.01)


def test_a_measured_cost_table_is_taken_as_it_is_and_scaled_to_other_models() -> None:
    model = Architecture.from_config("model", LLAMA_8B)
    half, wide = replace(model, quant=Quant.INT8), replace(model, hidden=2 * model.hidden)
    table = ((1, 0.010), (8, 0.011), (32, 0.020), (256, 0.090))
    machine = MachineKind.with_costs("attic", 8 << 30, Costs(model, table, 0.03))

    offer = machine.offer(NODE, model)

    assert (offer.layer_s, offer.head_s) == (table, 0.03)
    assert machine.offer(NODE, half).layer_seconds(1) == pytest.approx(0.005, rel=0.01)
    assert machine.offer(NODE, half).layer_seconds(256) > 0.08  # bound by computation
    assert machine.offer(NODE, wide).head_s == pytest.approx(0.06, rel=0.01)


def test_devices_share_the_work_and_pay_for_all_reduces() -> None:
    model = Architecture.from_config("model", LLAMA_8B)
    four = replace(A100, devices=4, device_link=300e9)

    one_s, four_s = (each.offer(NODE, model).layer_seconds(512) for each in (A100, four))

    assert one_s / 4 < four_s < one_s / 2


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
