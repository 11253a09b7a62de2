"""Matrices whose rows do not depend on each other's company."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from meshllm.model.modules import linear_padded as module
from meshllm.model.modules.linear_bf16 import NativeLinear
from meshllm.model.modules.linear_onednn import PackedLinear, pack
from meshllm.model.modules.linear_padded import SteadyLinear, find_floors, loosen, steady
from meshllm.model.modules.specimen import specimen

COUNTS = (1, 2, 3, 5, 9, 17)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Try again what was tried with other functions of torch."""
    module._floor.cache_clear()
    yield
    module._floor.cache_clear()


class Own(nn.Linear):
    pass


def model_of(inputs: int, outputs: int, dtype: torch.dtype, kind: type = nn.Linear) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(kind(inputs, outputs, dtype=dtype))


def moody(least: int) -> Callable[..., Any]:
    """Add up fewer rows in another order: the effect, on any processor."""

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
        products = x[..., None, :] * weight  # [..., N, K]
        halves = products.chunk(2, -1)
        if x.shape[-2] < least:
            halves = products[..., ::2], products[..., 1::2]
        return halves[0].sum(-1) + halves[1].sum(-1)

    return linear


def test_a_matrix_that_minds_few_rows_gets_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "linear", moody(3))
    model = nn.Sequential(nn.Linear(96, 40, bias=False))
    x = torch.randn(1, 17, 96)
    before = model(x)

    floors = find_floors(model, torch.float32, COUNTS)

    assert floors == {(40, 96): 3}
    steady(model, floors)
    assert isinstance(model[0], SteadyLinear)
    assert torch.equal(model(x), before)
    for rows in COUNTS:
        assert torch.equal(model(x[:, :rows]), before[:, :rows])


def test_where_more_rows_do_not_help_there_is_no_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "linear", moody(5))

    assert find_floors(model_of(96, 40, torch.float32), torch.float32, COUNTS) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 32), (96, 256), (2048, 64), (33, 7)])
def test_rows_are_the_same_in_any_company_where_it_is_said(
    inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    model = model_of(inputs, outputs, dtype)
    floors = find_floors(model, dtype, COUNTS)
    if floors is None:
        pytest.skip(f"this processor has no such kernel for {inputs} x {outputs} in {dtype}")
    steady(model, floors)
    x = torch.randn(1, 17, inputs).to(dtype)
    x[..., inputs // 2 : inputs // 2 * 2] = -x[..., : inputs // 2]  # the sums are their rounding

    whole = model(x)

    for rows in COUNTS:
        assert torch.equal(model(x[:, :rows]), whole[:, :rows]), rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_copy_in_another_layout_has_the_floor_of_its_matrix(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("meshllm.model.modules.linear_bf16.use_own_gemm", lambda: False)
    model = model_of(2048, 512, dtype)
    floors = find_floors(model, dtype, COUNTS)
    pack(model)
    if floors is None or not isinstance(model.get_submodule("0"), PackedLinear):
        pytest.skip("no such copy, or no such kernel, on this processor")
    steady(model, floors)
    x = torch.randn(1, 17, 2048).to(dtype)
    x[..., 1024:] = -x[..., :1024]

    whole = model(x)

    for rows in COUNTS:
        assert torch.equal(model(x[:, :rows]), whole[:, :rows]), rows


@torch.inference_mode()
def test_what_is_compiled_needs_no_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshllm.model.modules.linear_bf16.use_own_gemm", lambda: True)
    plain, x = specimen(nn.Linear(896, 64, False, device="meta", dtype=torch.bfloat16))
    model = nn.Sequential(plain)
    floors = find_floors(model, torch.bfloat16, COUNTS)

    assert floors == {}
    assert steady(model, floors)

    assert isinstance(model.get_submodule("0"), NativeLinear)
    assert torch.equal(model(x[:17]), torch.cat([model(row[None]) for row in x[:17]]))
    loosen(model)
    assert model[0] is plain


def test_a_module_that_cannot_be_exchanged_where_that_was_counted_on_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshllm.model.modules.linear_bf16.use_own_gemm", lambda: True)
    model = model_of(128, 64, torch.bfloat16)
    floors = find_floors(model, torch.bfloat16, COUNTS)
    assert floors == {}
    model.get_submodule("0").register_forward_hook(lambda *_: None)

    assert not steady(model, floors)


def test_of_a_linear_module_of_the_model_s_own_nothing_is_known() -> None:
    model = model_of(96, 40, torch.bfloat16, Own)

    assert find_floors(model, torch.bfloat16, COUNTS) is None


def test_a_matrix_of_another_dtype_is_none_that_was_tried() -> None:
    assert find_floors(model_of(96, 40, torch.float32), torch.bfloat16, COUNTS) is None


def test_weight_and_bias_are_where_stock_code_looks_for_them() -> None:
    plain = nn.Linear(8, 4)
    linear = SteadyLinear(plain, 2)

    assert linear.weight is plain.weight
    assert linear.bias is plain.bias
