"""bf16 GEMV and GEMM: documented summation orders, row-invariant."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from meshllm.model.kernels.gemm_bf16 import GEMV_LANES, MAX_ROWS, PART, Bf16Matrix
from meshllm.model.kernels.ir import LANES
from meshllm.model.modules.kernel_choice import has_bf16_dot
from meshllm.model.modules.probe import probe_matrix

FEW = [(1, 64), (7, 128), (64, 64), (100, 448), (129, 1024)]
MANY = [(64, 64), (128, 448), (64, PART), (64, 2048), (192, 896)]


@pytest.fixture
def _threads() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def multiply_few(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return Bf16Matrix(weight, bias).gemv(rows)


def multiply_many(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return Bf16Matrix(weight, bias).gemm(rows)


def multiply_pairs(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return Bf16Matrix(weight, bias, dot=True).gemv(rows)


needs_dot = pytest.mark.skipif(not has_bf16_dot(), reason="no instruction for pairs of bf16")


def drawn(outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw rows, a matrix and a bias whose products cancel except for rounding errors."""
    like = nn.Linear(inputs, outputs, device="meta", dtype=torch.bfloat16)
    plain, x = probe_matrix(like)
    return x, plain.weight.detach(), plain.bias.detach()


def in_lanes(x: Tensor, weight: Tensor) -> Tensor:
    """Sum [M, N] in the documented order of few rows."""
    products = x.float()[:, None] * weight.float()  # [M, N, K], exact
    sums = torch.zeros(len(x), len(weight), GEMV_LANES)
    for start in range(0, x.shape[1], GEMV_LANES):
        sums = sums + products[..., start : start + GEMV_LANES]
    return halved(sums)


def in_pairs(x: Tensor, weight: Tensor) -> Tensor:
    """Sum [M, N] in the documented order of few rows, with the instruction."""
    products = x.float()[:, None] * weight.float()  # [M, N, K], exact
    sums = torch.zeros(len(x), len(weight), LANES)
    for start in range(0, x.shape[1], 2 * LANES):
        for place in (start + 1, start):
            sums = sums + products[..., place : start + 2 * LANES : 2]
    return halved(sums)


def halved(sums: Tensor) -> Tensor:
    """Add up the last dimension in a tree of halves."""
    while sums.shape[-1] > 1:
        lower, upper = sums.chunk(2, -1)
        sums = lower + upper
    return sums[..., 0]


def in_blocks(x: Tensor, weight: Tensor, part: int) -> Tensor:
    """Sum [M, N] in the documented order of many rows."""
    sums = []
    for rows, weights in zip(
        *(torch.split(each.float(), part, 1) for each in (x, weight)), strict=True
    ):
        total = torch.zeros(len(x), len(weight))
        for pair in range(0, rows.shape[1], 2):
            for place in (pair + 1, pair):
                total = total + rows[:, place, None] * weights[None, :, place]
        sums.append(total)
    whole = sums[0]
    for total in sums[1:]:
        whole = whole + total
    return whole


@pytest.mark.parametrize(("outputs", "inputs"), FEW)
def test_few_rows_are_summed_in_lanes(outputs: int, inputs: int) -> None:
    x, weight, bias = drawn(outputs, inputs)
    sums = in_lanes(x[:7], weight)

    assert torch.equal(multiply_few(x[:7], weight), sums.bfloat16())
    assert torch.equal(multiply_few(x[:7], weight, bias), (sums + bias.float()).bfloat16())


@needs_dot
@pytest.mark.parametrize(("outputs", "inputs"), FEW)
def test_few_rows_are_summed_in_pairs(outputs: int, inputs: int) -> None:
    x, weight, bias = drawn(outputs, inputs)
    sums = in_pairs(x[:7], weight)

    assert torch.equal(multiply_pairs(x[:7], weight), sums.bfloat16())
    assert torch.equal(multiply_pairs(x[:7], weight, bias), (sums + bias.float()).bfloat16())


@pytest.mark.parametrize(("outputs", "inputs"), MANY)
def test_many_rows_are_summed_in_blocks(outputs: int, inputs: int) -> None:
    x, weight, bias = drawn(outputs, inputs)
    sums = in_blocks(x, weight, PART)

    assert torch.equal(multiply_many(x, weight), sums.bfloat16())
    with_bias = multiply_many(x, weight, bias)
    assert torch.equal(with_bias, (sums + bias.float()).bfloat16())


@pytest.mark.usefixtures("_threads")
def test_a_row_has_the_same_bits_in_any_batch() -> None:
    x, weight, bias = drawn(192, 1088)
    x = torch.cat([x, x.flip(0) * 3, x.roll(1, 0)[:, :1088], x[:9]])
    assert len(x) > MAX_ROWS
    torch.set_num_threads(1)
    ways: list[Callable[..., Tensor]] = [multiply_few, multiply_many]
    ways += [multiply_pairs] * has_bf16_dot()
    alone = [torch.cat([way(row[None], weight, bias) for row in x]) for way in ways]
    assert not torch.equal(*alone[:2])

    for threads in (1, 2):
        torch.set_num_threads(threads)
        for way, expected in zip(ways, alone, strict=True):
            for rows in (1, 2, 3, 5, 6, 7, 8, 9, 12, 13, 17, 64, MAX_ROWS, len(x)):
                assert torch.equal(way(x[:rows], weight, bias), expected[:rows])
                assert torch.equal(way(x[-rows:], weight, bias), expected[-rows:])


def test_nan_and_infinity_affect_only_their_row() -> None:
    x, weight, _ = drawn(64, 128)
    x[1, 3], x[2, 5] = torch.nan, torch.inf

    for products in (multiply_few(x, weight), multiply_many(x, weight)):
        assert products[1].isnan().all()
        assert not products[2].isfinite().any()
        assert products[[0, 3, 63]].isfinite().all()


def test_no_rows_have_no_products() -> None:
    x, weight, _ = drawn(64, 128)

    assert multiply_few(x[:0], weight).shape == (0, 64)
    assert multiply_many(x[:0], weight).shape == (0, 64)


def test_invalid_operands_are_refused() -> None:
    x, weight, bias = drawn(64, 128)

    for rows, matrix, extra in (
        (x[:, :64], weight, None),
        (x.float(), weight, None),
        (x, weight.float(), None),
        (x, weight.T.contiguous().T, None),
        (x, weight, bias[:32]),
        (x, weight, bias.float()),
        (x[:, :96], weight[:, :96].contiguous(), None),
        (x, weight[:0], None),
        (x.to("meta"), weight, None),
        (x[0], weight, None),
        (x[None], weight, None),
        (x, weight[0], None),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            multiply_few(rows, matrix, extra)
        with pytest.raises(ValueError, match=r"\w"):
            multiply_many(rows, matrix, extra)
    with pytest.raises(ValueError, match="63 outputs"):
        multiply_many(x, weight[:63])
