"""int8 GEMM: close to the plain product."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from meshllm.model.modules import int8, quant_matrix
from meshllm.model.modules.int8 import form, open_packed, pack
from meshllm.model.modules.quant_matrix import DEQUANTISE_ROWS, QuantMatrix
from meshllm.model.pauses import pausing

SHAPES = [(64, 64), (192, 576), (200, 100), (1000, 77), (1, 32)]


@pytest.fixture
def _threads() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def packed(weight: Tensor) -> QuantMatrix:
    return open_packed(pack(weight), (weight.shape[0], weight.shape[1]))


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_error_of_normal_weights_is_about_a_hundredth(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight, x = normal(*shape).to(dtype), normal(9, shape[1]).to(dtype)

    y = packed(weight)(x)

    assert y.dtype == dtype
    assert relative(y, x.float() @ weight.float().T) < 0.012


def test_outliers_cost_the_other_columns_next_to_nothing() -> None:
    weight, x = normal(64, 512), normal(8, 512)
    weight[:, [3, 77, 400]] = 0  # or their products would hide the errors of the others
    before = packed(weight)(x)
    x[:, [3, 77, 400]] *= torch.tensor([60.0, 120.0, 200.0])

    assert x.abs().max() > 100
    assert relative(packed(weight)(x), before) < 0.002


@pytest.mark.parametrize("outputs", [64, 200, 1000])
def test_prefill_has_the_same_error_with_and_without_dequantising(
    monkeypatch: pytest.MonkeyPatch, outputs: int
) -> None:
    weight, x = normal(outputs, 96), normal(DEQUANTISE_ROWS, 96).bfloat16()
    exact, matrix = x.float() @ weight.T, packed(weight)
    monkeypatch.setattr(quant_matrix, "DEQUANTISED_BYTES", 2 * 96 * 64 * 3)
    found = []
    for fast in (True, False):
        monkeypatch.setattr(quant_matrix, "multiplies_matrices", lambda fast=fast: fast)
        found.append(matrix(x))

    assert [y.shape for y in found] == [exact.shape] * 2
    assert all(relative(y.float(), exact) < 0.012 for y in found)
    assert not torch.equal(*found)  # both code paths were taken


def test_weights_are_left_as_they_are() -> None:
    weight = normal(64, 64)
    before = weight.clone()

    pack(weight)

    assert torch.equal(weight, before)


def test_rows_may_be_strided() -> None:
    matrix, x = packed(normal(32, 64)), normal(64, 6)

    for rows in (x.T, x.T.bfloat16(), normal(12, 64)[::2], normal(6, 128)[:, ::2]):
        assert torch.equal(matrix(rows), matrix(rows.clone(memory_format=torch.contiguous_format)))


def test_rows_of_zeros_give_zeros() -> None:
    assert torch.equal(packed(normal(32, 64))(torch.zeros(3, 64)), torch.zeros(3, 32))


def test_outputs_of_zeros_give_zeros() -> None:
    assert torch.equal(packed(torch.zeros(32, 64))(normal(3, 64)), torch.zeros(3, 32))


def test_a_large_matrix_is_packed_in_pieces_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, pauses = normal(100, 64), list[Tensor]()
    whole = pack(weight)

    monkeypatch.setattr(int8, "CHUNK_ROWS", 64)
    with pausing(lambda: pauses.append(packed(weight)(weight))):  # as steps compute meanwhile
        parts = pack(weight)

    assert all(torch.equal(part, whole[name]) for name, part in parts.items())
    assert len(pauses) == 2


@pytest.mark.parametrize("shape", SHAPES)
def test_the_form_is_known_before_packing(shape: tuple[int, int]) -> None:
    made = {name: (tuple(part.shape), part.dtype) for name, part in pack(normal(*shape)).items()}

    assert made == form(shape, torch.bfloat16)


def test_packed_tensors_are_not_copied() -> None:
    parts = pack(normal(64, 64))
    matrix, x = open_packed(parts, (64, 64)), normal(1, 64)
    before = matrix(x)

    parts["scale"].mul_(2)
    parts["data"].zero_()

    assert not torch.equal(matrix(x), before)
    assert torch.equal(matrix(x), torch.zeros(1, 64))
