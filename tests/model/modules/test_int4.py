"""int4 GEMM: close to the plain product, and row-invariant."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from meshllm.model.kernels.gemm_int4 import GROUP
from meshllm.model.modules import int4, quant_matrix
from meshllm.model.modules.int4 import form, open_packed, pack
from meshllm.model.modules.quant_matrix import DEQUANTISE_ROWS, QuantMatrix
from meshllm.model.pauses import pausing

SHAPES = [(64, 64), (192, 576), (48, 128), (1, 64)]


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
    return float((found.float() - exact).norm() / exact.norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_error_of_normal_weights_is_about_a_tenth(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight, x = normal(*shape).to(dtype), normal(32, shape[1]).to(dtype)

    y = packed(weight)(x)

    assert y.dtype == dtype
    assert relative(y, x.float() @ weight.float().T) < 0.12


def test_sixteen_values_are_kept_exactly() -> None:
    weight = torch.randint(0, 16, (32, 128), generator=torch.Generator().manual_seed(1)).float()
    weight[:, ::GROUP], weight[:, 1::GROUP] = 0, 15
    x = torch.eye(128)

    assert torch.equal(packed(weight)(x), weight.T)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_does_not_depend_on_the_others(shape: tuple[int, int]) -> None:
    matrix, x = packed(normal(*shape).bfloat16()), normal(33, shape[1]).bfloat16()

    whole = matrix(x)

    for rows in (1, 2, 3, 4, 5, 7, 8, 12, 13, 15, 16, 17, 32):
        assert torch.equal(matrix(x[:rows]), whole[:rows])


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_the_number_of_threads_changes_no_bit(rows: int) -> None:
    matrix, x = packed(normal(1024, 512).bfloat16()), normal(rows, 512).bfloat16()
    torch.set_num_threads(1)
    alone = matrix(x)

    torch.set_num_threads(2)

    assert torch.equal(matrix(x), alone)


def test_it_takes_less_than_two_sevenths_of_the_memory_of_bfloat16() -> None:
    weight = normal(256, 1024).bfloat16()

    assert weight.nbytes / sum(part.nbytes for part in pack(weight).values()) > 3.5


def test_a_large_matrix_is_packed_in_pieces_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, pauses = normal(144, 64), list[Tensor]()
    whole = pack(weight)

    monkeypatch.setattr(int4, "CHUNK_ROWS", 64)
    with pausing(lambda: pauses.append(packed(weight)(weight))):  # as steps compute meanwhile
        parts = pack(weight)

    assert all(torch.equal(part, whole[name]) for name, part in parts.items())
    assert len(pauses) == 3


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_form_is_known_before_packing(shape: tuple[int, int], dtype: torch.dtype) -> None:
    parts = pack(normal(*shape).to(dtype))
    made = {name: (tuple(part.shape), part.dtype) for name, part in parts.items()}

    assert made == form(shape, dtype)


def test_rows_may_be_strided() -> None:
    matrix, x = packed(normal(32, 64)), normal(64, 6)

    for rows in (x.T, normal(12, 64)[::2], normal(6, 128)[:, ::2]):
        assert torch.equal(matrix(rows), matrix(rows.clone(memory_format=torch.contiguous_format)))


def test_equal_weights_are_exact() -> None:
    weight = torch.full((16, 64), 0.5)

    assert relative(packed(weight)(torch.ones(1, 64)), torch.full((1, 16), 32.0)) < 1e-6


@pytest.mark.parametrize("rows", [DEQUANTISE_ROWS - 1, DEQUANTISE_ROWS, DEQUANTISE_ROWS + 4])
def test_prompts_are_multiplied_by_torch_where_it_has_matrix_instructions(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = normal(2000, 1088).bfloat16(), normal(rows, 1088).bfloat16()
    matrix, both = packed(weight), list[torch.Tensor]()
    for has_matrices in (False, True):
        monkeypatch.setattr(quant_matrix, "multiplies_matrices", lambda has=has_matrices: has)
        both.append(matrix(x))
    own, found = both

    assert found.shape == own.shape
    assert torch.equal(found, own) == (rows < DEQUANTISE_ROWS)
    assert relative(found, own.float()) < 0.01
