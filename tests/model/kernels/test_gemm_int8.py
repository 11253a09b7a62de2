"""int8 GEMM: exact sums, row-invariant."""

import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from meshllm.model.kernels import gemm_int8
from meshllm.model.kernels.gemm_int8 import GROUP, OUTPUTS, dequantise, multiply
from meshllm.model.steps.compiled_step import CompiledStep, ScoreBuffer
from meshllm.model.steps.trace import KernelCall, Tracer

SHAPES = [(64, 1), (64, 77), (192, 576), (1024, 100)]
DTYPES = torch.bfloat16, torch.float32, torch.float16


@pytest.fixture
def _threads() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def matrix(outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a matrix [N, K], the same in blocks, and scales that are powers of two."""
    generator = torch.Generator().manual_seed(outputs * inputs)
    whole = torch.randint(-127, 128, (outputs, inputs), generator=generator).to(torch.int8)
    even = torch.nn.functional.pad(whole, (0, inputs % 2))
    blocks = even.view(-1, OUTPUTS, even.shape[1] // 2, 2).transpose(1, 2).contiguous()
    return whole, blocks, 2.0 ** torch.randint(-3, 4, (outputs,), generator=generator)


@pytest.mark.parametrize(("shape", "rows"), list(zip(SHAPES, [1, 7, 16, 100], strict=True)))
def test_integers_are_multiplied_exactly(shape: tuple[int, int], rows: int) -> None:
    whole, blocks, scales = matrix(*shape)
    x = torch.randint(-100, 101, (rows, shape[1])).float()

    y = multiply(x, blocks, scales)

    assert torch.equal(y, (x.double() @ whole.double().T * scales).float())


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("shape", "dtype"), list(zip(SHAPES[1:], DTYPES, strict=True)))
def test_a_row_has_the_same_bits_in_any_batch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    _, blocks, scales = matrix(*shape)
    x = torch.randn(130, shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    torch.set_num_threads(1)
    alone = torch.cat([multiply(row[None], blocks, scales) for row in x])

    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 17, 40, 95, 96, 97, 130):
            assert torch.equal(multiply(x[:rows], blocks, scales), alone[:rows])
            assert torch.equal(multiply(x[-rows:], blocks, scales), alone[-rows:])
    assert alone.dtype == dtype


@pytest.fixture
def _recompile() -> Iterator[None]:
    """Clear the cache of compiled kernels, before and after."""
    gemm_int8._gemm.cache_clear()
    yield
    gemm_int8._gemm.cache_clear()


@pytest.mark.usefixtures("_recompile")
@pytest.mark.parametrize("shape", SHAPES[2:3])
def test_cpus_without_pair_instructions_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    _, blocks, scales = matrix(*shape)
    x = torch.randn(17, shape[1]) * torch.logspace(-6, 6, 17)[:, None]
    found = []
    for machine in ("x86_64", "aarch64"):
        gemm_int8._gemm.cache_clear()
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        found += [[multiply(x[:rows], blocks, scales) for rows in (1, 6, 17)]]

    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def expected(x: Tensor, whole: Tensor, scales: Tensor) -> Tensor:
    """Multiply in the documented way, with torch."""
    total = torch.zeros(len(x), len(whole))
    for own, weights in zip(
        torch.split(x.float(), GROUP, 1), torch.split(whole, GROUP, 1), strict=True
    ):
        exponent = own.abs().amax(1, keepdim=True).frexp().exponent.clamp_min(15 - 126)
        size = torch.ldexp(torch.ones(exponent.shape), exponent - 15)
        rounded = (own / size).round().clamp(-32767, 32767)
        sums = rounded.long() @ weights.long().T
        assert sums.abs().max() < 2**31
        total = (total.double() + sums.float().double() * size.double()).float()  # rounded once
    return total * scales


@pytest.mark.parametrize(
    ("inputs", "rows", "size"),
    [(1, 1, 0.1), (3, 5, 1e30), (128, 13, 1e-36), (129, 25, 0.1), (257, 5, 1e-36), (300, 1, 1e30)],
)
def test_the_result_is_the_documented_one(inputs: int, rows: int, size: float) -> None:
    whole, blocks, scales = matrix(128, inputs)
    x = torch.randn(rows, inputs) * size

    assert torch.equal(multiply(x, blocks, scales), expected(x, whole, scales))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sum_there_can_be_has_room(sign: int) -> None:
    blocks = torch.full((1, 3 * GROUP // 2, OUTPUTS, 2), -128, dtype=torch.int8)
    x = torch.full((3, 3 * GROUP), sign * (2 - 2**-23))

    y = multiply(x, blocks, torch.ones(OUTPUTS))

    assert torch.equal(y, torch.full_like(y, -sign * 3 * GROUP * 128 * 32767 / 2**14))


@pytest.mark.parametrize(("inputs", "rows"), [(576, 9), (640, 17)])
@torch.inference_mode()
def test_a_product_is_traced_as_kernel_calls_only(inputs: int, rows: int) -> None:
    _, blocks, scales = matrix(192, inputs)
    x = torch.randn(2, rows, inputs).bfloat16()
    with Tracer([x[0], torch.zeros(1, rows)]) as tracer:
        recorded = multiply(x[0], blocks, scales)
    recording = tracer.end(recorded)
    compiled = CompiledStep(recording, x[0], 1, ScoreBuffer())

    found = compiled.run(x[1], torch.zeros(1, rows), [], [])

    if rows < 17:  # with two tiles, one row of padding is cut off
        assert list(map(type, recording.items)) == [KernelCall, KernelCall]
    assert torch.equal(found, multiply(x[1], blocks, scales))


def diagonal(inputs: int) -> tuple[Tensor, Tensor]:
    """Return an identity matrix."""
    blocks = torch.zeros(inputs // OUTPUTS, inputs // 2, OUTPUTS, 2, dtype=torch.int8)
    for at in range(inputs):
        blocks[at // OUTPUTS, at // 2, at % OUTPUTS, at % 2] = 1
    return blocks, torch.ones(inputs)


@pytest.mark.parametrize("size", [1e-30, 0.37, 1.0, 250.0, 1e30])
def test_values_near_the_largest_are_exact_and_others_have_small_errors(size: float) -> None:
    generator = torch.Generator().manual_seed(6)
    x = (torch.randn(9, 3 * GROUP, generator=generator).exp() ** 4 * size).bfloat16()
    x *= torch.where(torch.rand(x.shape, generator=generator) < 0.5, -1, 1).bfloat16()

    y = multiply(x.float(), *diagonal(3 * GROUP))

    largest = x.float().abs().view(9, 3, GROUP).amax(2).repeat_interleave(GROUP, 1)
    is_near = x.float().abs() * 128 >= largest
    assert 0.05 < is_near.float().mean() < 0.95
    assert torch.equal(y[is_near], x.float()[is_near])
    assert ((y - x.float()).abs() <= largest / 2**15).all()


def test_the_largest_number_of_float32_is_rounded_within_16_bits() -> None:
    x = torch.full((1, GROUP), 2 - 2**-23)  # would be 32,768 times its scale
    x[0, 1] = -x[0, 1]

    y = multiply(x, *diagonal(GROUP))

    assert torch.equal(y.sign(), x.sign())
    assert ((y - x).abs() <= 2**-14).all()


def test_an_outlier_costs_the_rest_of_its_group_little_and_other_groups_nothing() -> None:
    x = torch.randn(1, 3 * GROUP, generator=torch.Generator().manual_seed(2))
    before = multiply(x, *diagonal(3 * GROUP))
    x[0, 5] = 200 * x.abs().max()

    after = multiply(x, *diagonal(3 * GROUP))

    assert torch.equal(after[:, GROUP:], before[:, GROUP:])
    others = slice(6, GROUP)
    assert (after - before)[:, others].norm() < 0.01 * before[:, others].norm()


@pytest.mark.parametrize(
    ("bad", "dtype"), list(zip([torch.nan, torch.inf, -torch.inf], DTYPES, strict=True))
)
def test_nan_and_infinity_affect_only_their_row(bad: float, dtype: torch.dtype) -> None:
    _, blocks, scales = matrix(192, 576)
    x = torch.randn(8, 576).to(dtype)
    clean = multiply(x, blocks, scales)
    x[3, 575] = bad

    y = multiply(x, blocks, scales)

    assert y[3].isnan().all()
    assert torch.equal(y[:3], clean[:3])
    assert torch.equal(y[4:], clean[4:])


@pytest.mark.parametrize("number", [0.0, 1e-45, -1e-40, 1e-35, 3.4e38])
def test_the_smallest_and_largest_values_are_approximated(number: float) -> None:
    x = torch.full((2, GROUP), number)

    y = multiply(x, *diagonal(GROUP))

    assert torch.allclose(y, x, rtol=2**-14, atol=2**-126)


@pytest.mark.usefixtures("_threads")
def test_concurrent_callers_with_several_threads_do_not_interfere() -> None:
    _, blocks, scales = matrix(24 * OUTPUTS, 3000)
    torch.set_num_threads(1)
    given = [torch.randn(rows, 3000).bfloat16() for rows in (97, 150, 97, 150)]
    alone = [torch.cat([multiply(row[None], blocks, scales) for row in x]) for x in given]

    def together(x: Tensor) -> list[Tensor]:
        torch.set_num_threads(2)
        return [multiply(x, blocks, scales) for _ in range(5)]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(together, given))

    for own, expected in zip(found, alone, strict=True):
        assert all(torch.equal(each, expected) for each in own)


def test_nothing_is_written_outside_the_output() -> None:
    _, blocks, scales = matrix(64, 32)
    wide = torch.full((34, 64), 7.0, dtype=torch.bfloat16)

    dequantise(blocks, scales, wide[1:33])

    assert (wide[0] == 7.0).all()
    assert (wide[33] == 7.0).all()


@pytest.mark.parametrize("shape", SHAPES[1:3])
def test_weights_are_dequantised_exactly(shape: tuple[int, int]) -> None:
    whole, blocks, scales = matrix(*shape)
    scales = scales * 1.1
    wide = torch.empty(2 * blocks.shape[1], shape[0], dtype=torch.bfloat16)

    dequantise(blocks, scales, wide)

    assert torch.equal(wide[: shape[1]], (whole.float() * scales[:, None]).bfloat16().T)


def test_invalid_operands_are_refused() -> None:
    _, blocks, scales = matrix(64, 32)

    with pytest.raises(ValueError, match="rows of 0 values on cpu for 0 inputs"):
        multiply(torch.zeros(1, 0), blocks[:, :0], scales)
    with pytest.raises(ValueError, match="rows of 30 values on cpu for 32 inputs"):
        multiply(torch.zeros(1, 30), blocks, scales)
    with pytest.raises(ValueError, match=r"weights of torch.int8 \("):
        multiply(torch.zeros(1, 32), blocks[:, :1].expand(1, 16, 64, 2), scales)
    with pytest.raises(ValueError, match=r"scales of torch.bfloat16"):
        multiply(torch.zeros(1, 32), blocks, scales.bfloat16())
    with pytest.raises(ValueError, match=r"64 scales for weights of \[2, 16, 64, 2\]"):
        multiply(torch.zeros(1, 32), torch.cat([blocks, blocks]), scales)
    with pytest.raises(ValueError, match=r"64 scales for weights of \[1, 32, 64\]"):
        multiply(torch.zeros(1, 32), blocks.view(1, 32, 64), scales)
    for wide in (torch.zeros(32, 128), torch.zeros(31, 64)):
        with pytest.raises(ValueError, match=r"for weights of \[1, 16, 64, 2\]"):
            dequantise(blocks, scales, wide.bfloat16())
    with pytest.raises(ValueError, match="5 scales for weights of"):
        dequantise(blocks, scales[:5], torch.zeros(32, 64).bfloat16())
    with pytest.raises(ValueError, match="on meta"):
        multiply(torch.zeros(1, 32, device="meta"), blocks, scales)
