from dataclasses import replace

import pytest

from meshllm.names import Quant
from meshllm.scheduler.architecture import Architecture
from meshllm.scheduler.machine import Costs, MachineKind
from tests.builders.meshes import NODE
from tests.builders.model_configs import LLAMA_8B, MIXTRAL

A100 = MachineKind("a100", 80 << 30, 312e12, 2.039e12)


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
