"""int4 GEMM: the documented sums, row-invariant, the same on every CPU."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from meshllm.model.kernels import gemm_int4, gemm_int8, jit
from meshllm.model.kernels.gemm_int4 import CODES, GROUP, OUTPUTS, dequantise, multiply

pytestmark = pytest.mark.skipif(
    not jit.jit_available(), reason="executable memory is forbidden here"
)
BARE = "x86-64-v3", "+avx2,+fma,-avx512f"
SHAPES = [(64, 64), (128, 192), (192, 1088)]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def matrix(outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a matrix [N, K] of integers with scales that are powers of two, and its blocks."""
    generator = torch.Generator().manual_seed(outputs * inputs)
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.int32)
    words = torch.zeros(outputs, inputs // CODES, dtype=torch.int32)
    for at in range(CODES):
        words |= codes[:, at::CODES] << (4 * (at // 2) + 16 * (at % 2))
    shape = outputs, inputs // GROUP
    scale = 2.0 ** torch.randint(-2, 3, shape, generator=generator)
    zero = torch.randint(-20, 21, shape, generator=generator).float()
    plain = (codes - 8).float() * scale.repeat_interleave(GROUP, 1)
    plain += zero.repeat_interleave(GROUP, 1)
    blocks = words.view(-1, OUTPUTS, inputs // CODES).transpose(1, 2).contiguous()
    pairs = torch.stack((scale, zero), 2).view(-1, OUTPUTS, shape[1], 2).transpose(1, 2)
    return plain, blocks, pairs.contiguous().bfloat16()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 6, 13, 40])
def test_integers_are_multiplied_exactly(shape: tuple[int, int], rows: int) -> None:
    plain, weights, scales = matrix(*shape)
    x = torch.randint(-100, 101, (rows, shape[1])).float()

    assert torch.equal(multiply(x, weights, scales), (x.double() @ plain.double().T).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    _, weights, scales = matrix(192, 1088)
    x = torch.randn(60, 1088, generator=torch.Generator().manual_seed(1)).to(dtype)
    torch.set_num_threads(1)
    alone = torch.cat([multiply(row[None], weights, scales) for row in x])

    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in (1, 2, 3, 5, 6, 7, 12, 13, 17, 24, 60):
            assert torch.equal(multiply(x[:rows], weights, scales), alone[:rows])
            assert torch.equal(multiply(x[-rows:], weights, scales), alone[-rows:])
    assert alone.dtype == dtype


def test_a_processor_without_avx512_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    _, weights, scales = matrix(128, 192)
    x = torch.randn(20, 192).bfloat16()
    own = multiply(x, weights, scales)
    wide = torch.empty(192, 128, dtype=torch.bfloat16)
    dequantise(weights, scales, wide)
    kept = wide.clone()
    cached = (
        gemm_int4._gemm, gemm_int4._dequantiser, gemm_int8._quantiser, jit.registers,
        jit.private_folder,
    )  # fmt: skip

    monkeypatch.setattr(jit, "processor", lambda: BARE)
    for each in cached:
        each.cache_clear()
    try:
        assert jit.registers() == 6
        assert torch.equal(multiply(x, weights, scales), own)
        dequantise(weights, scales, wide)
        assert torch.equal(wide, kept)
    finally:
        monkeypatch.undo()
        for each in cached:
            each.cache_clear()


def test_dequantised_weights_are_those_that_are_multiplied() -> None:
    plain, weights, scales = matrix(128, 192)
    wide = torch.empty(192, 128, dtype=torch.bfloat16)

    dequantise(weights, scales, wide)

    assert torch.equal(wide.float(), plain.T)


def test_a_row_with_nan_gives_nan_and_no_other() -> None:
    _, weights, scales = matrix(64, 192)
    x = torch.randn(3, 192)
    x[1, 70] = torch.nan

    products = multiply(x, weights, scales)

    assert products[1].isnan().all()
    assert products[::2].isfinite().all()
    assert multiply(x[:0], weights, scales).shape == (0, 64)


def test_invalid_operands_are_refused() -> None:
    _, weights, scales = matrix(64, 128)
    x = torch.randn(2, 128)

    for rows, words, pairs in (
        (x[:, :64], weights, scales),
        (x.to("meta"), weights, scales),
        (x, weights.float(), scales),
        (x, weights, scales.float()),
        (x, weights[:, :4], scales),
        (x, weights[..., :32], scales),
        (x, weights, scales[:, :1]),
        (x, weights.transpose(1, 2).contiguous().transpose(1, 2), scales),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            multiply(rows, words, pairs)
    with pytest.raises(ValueError, match="output"):
        dequantise(weights, scales, torch.empty(128, 128, dtype=torch.bfloat16))
