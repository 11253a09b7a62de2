"""Row-invariant linear layers by padding."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from meshllm.model.modules import linear_bf16
from meshllm.model.modules import linear_padded as module
from meshllm.model.modules.kernel_choice import LinearKernel
from meshllm.model.modules.linear_bf16 import CompiledLinear
from meshllm.model.modules.linear_onednn import PackedLinear, keeps_bits, replace_linears
from meshllm.model.modules.linear_padded import (
    PaddedLinear,
    find_min_rows,
    pad_linears,
    unpad_linears,
)
from meshllm.model.modules.probe import probe_matrix

COUNTS = (1, 2, 3, 5, 9, 17)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Clear the cached results of trials, before and after."""
    module._min_rows.cache_clear()
    yield
    module._min_rows.cache_clear()


class LocalIdentity(nn.Linear):
    pass


def model_of(inputs: int, outputs: int, dtype: torch.dtype, kind: type = nn.Linear) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(kind(inputs, outputs, dtype=dtype))


def row_variant(least: int) -> Callable[..., Any]:
    """Return a linear that sums fewer rows in another order, to show the effect on any CPU."""

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
        products = x[..., None, :] * weight  # [..., N, K]
        halves = products.chunk(2, -1)
        if x.shape[-2] < least:
            halves = products[..., ::2], products[..., 1::2]
        return halves[0].sum(-1) + halves[1].sum(-1)

    return linear


def test_a_row_variant_matrix_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "linear", row_variant(3))
    model = nn.Sequential(nn.Linear(96, 40, bias=False))
    x = torch.randn(1, 17, 96)
    before = model(x)

    floors = find_min_rows(model, torch.float32, COUNTS)

    assert floors == {(40, 96): 3}
    pad_linears(model, floors)
    assert isinstance(model[0], PaddedLinear)
    assert torch.equal(model(x), before)
    for rows in COUNTS:
        assert torch.equal(model(x[:, :rows]), before[:, :rows])


def test_a_packed_copy_with_the_same_bits_is_tried_instead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = nn.Linear(2048, 512, bias=False, dtype=torch.bfloat16)
    if not keeps_bits(512, 2048, torch.bfloat16, torch.get_num_threads()):
        pytest.skip("no such copy on this CPU")
    monkeypatch.setattr(linear_bf16, "choose_kernel", lambda _: LinearKernel.TORCH)
    rows = list[int]()
    stock = functional.linear

    def linear(x: torch.Tensor, *how: Any) -> torch.Tensor:
        rows.append(x.shape[-2])
        return stock(x, *how)

    monkeypatch.setattr(functional, "linear", linear)

    assert find_min_rows(nn.Sequential(plain), torch.bfloat16, COUNTS) is not None
    assert rows == []


def test_no_minimum_is_found_if_padding_does_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "linear", row_variant(5))

    assert find_min_rows(model_of(96, 40, torch.float32), torch.float32, COUNTS) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 32), (96, 256), (2048, 64), (33, 7)])
def test_rows_have_the_same_bits_in_any_batch_if_a_minimum_is_found(
    inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    model = model_of(inputs, outputs, dtype)
    floors = find_min_rows(model, dtype, COUNTS)
    if floors is None:
        pytest.skip(f"this CPU has no such kernel for {inputs} x {outputs} in {dtype}")
    pad_linears(model, floors)
    x = torch.randn(1, 17, inputs).to(dtype)
    x[..., inputs // 2 : inputs // 2 * 2] = -x[
        ..., : inputs // 2
    ]  # the sums cancel except for rounding errors

    whole = model(x)

    for rows in COUNTS:
        assert torch.equal(model(x[:, :rows]), whole[:, :rows]), rows


def test_a_packed_copy_needs_the_minimum_of_its_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16
    monkeypatch.setattr(linear_bf16, "choose_kernel", lambda _: LinearKernel.TORCH)
    model = model_of(2048, 512, dtype)
    floors = find_min_rows(model, dtype, COUNTS)
    replace_linears(model)
    if floors is None or not isinstance(model.get_submodule("0"), PackedLinear):
        pytest.skip("no such copy, or no such kernel, on this CPU")
    pad_linears(model, floors)
    x = torch.randn(1, 17, 2048).to(dtype)
    x[..., 1024:] = -x[..., :1024]

    whole = model(x)

    for rows in COUNTS:
        assert torch.equal(model(x[:, :rows]), whole[:, :rows]), rows


@torch.inference_mode()
def test_a_compiled_module_needs_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshllm.model.modules.linear_bf16.use_own_gemm", lambda: True)
    plain, x = probe_matrix(nn.Linear(896, 64, False, device="meta", dtype=torch.bfloat16))
    model = nn.Sequential(plain)
    floors = find_min_rows(model, torch.bfloat16, COUNTS)

    assert floors == {}
    assert pad_linears(model, floors)

    assert isinstance(model.get_submodule("0"), CompiledLinear)
    assert torch.equal(model(x[:17]), torch.cat([model(row[None]) for row in x[:17]]))
    unpad_linears(model)
    assert model[0] is plain


def test_a_module_whose_hook_prevents_its_compiled_form_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshllm.model.modules.linear_bf16.use_own_gemm", lambda: True)
    model = model_of(128, 64, torch.bfloat16)
    floors = find_min_rows(model, torch.bfloat16, COUNTS)
    assert floors == {}
    model.get_submodule("0").register_forward_hook(lambda *_: None)

    assert not pad_linears(model, floors)


def test_a_subclass_of_linear_has_no_minimum() -> None:
    model = model_of(96, 40, torch.bfloat16, LocalIdentity)

    assert find_min_rows(model, torch.bfloat16, COUNTS) is None


def test_a_matrix_of_another_dtype_has_no_minimum() -> None:
    assert find_min_rows(model_of(96, 40, torch.float32), torch.bfloat16, COUNTS) is None


def test_weight_and_bias_are_those_of_the_plain_module() -> None:
    plain = nn.Linear(8, 4)
    linear = PaddedLinear(plain, 2)

    assert linear.weight is plain.weight
    assert linear.bias is plain.bias
