"""Products with bytes, each row as it would be alone."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from meshllm.model import native_int8
from meshllm.model.native_int8 import OUTPUTS, multiply, widen

SHAPES = [(64, 1), (64, 77), (192, 576), (1024, 100)]


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
    blocks = even.view(-1, OUTPUTS, even.shape[1]).transpose(1, 2).contiguous()
    return whole, blocks, 2.0 ** torch.randint(-3, 4, (outputs,), generator=generator)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 6, 7, 16, 100])
def test_whole_numbers_are_multiplied_exactly(shape: tuple[int, int], rows: int) -> None:
    whole, blocks, scales = matrix(*shape)
    x = torch.randint(-100, 101, (rows, shape[1])).float()

    y = multiply(x, blocks, scales)

    assert torch.equal(y, (x.double() @ whole.double().T * scales).float())


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_a_row_has_the_same_bits_in_any_company(shape: tuple[int, int], dtype: torch.dtype) -> None:
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


@pytest.mark.skipif(not native_int8.adds_pairs(), reason="this processor adds no pairs")
@pytest.mark.parametrize("shape", SHAPES)
def test_pairs_are_added_in_the_order_of_single_numbers(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    _, blocks, scales = matrix(*shape)
    x = torch.randn(130, shape[1], generator=torch.Generator().manual_seed(2))
    x = (x * torch.logspace(-6, 6, 130)[:, None]).bfloat16()
    x[3, 0], x[5, -1] = torch.inf, torch.nan
    monkeypatch.setattr(native_int8, "pairs_pay", lambda: True)
    in_pairs = [multiply(x[:rows], blocks, scales) for rows in (40, 130)]
    monkeypatch.setattr(native_int8, "pairs_pay", lambda: False)

    alone = multiply(x, blocks, scales)

    for found in in_pairs:
        assert torch.equal(found.isnan(), alone[: len(found)].isnan())
        assert torch.equal(found.nan_to_num(), alone[: len(found)].nan_to_num())


@pytest.mark.usefixtures("_threads")
def test_several_callers_with_several_threads_do_not_disturb_one_another() -> None:
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


def test_nothing_is_written_beside_the_weights() -> None:
    _, blocks, scales = matrix(64, 32)
    wide = torch.full((34, 64), 7.0, dtype=torch.bfloat16)

    widen(blocks, scales, wide[1:33])

    assert (wide[0] == 7.0).all()
    assert (wide[33] == 7.0).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_widened_as_they_are(shape: tuple[int, int]) -> None:
    whole, blocks, scales = matrix(*shape)
    scales = scales * 1.1
    wide = torch.empty(blocks.shape[1], shape[0], dtype=torch.bfloat16)

    widen(blocks, scales, wide)

    assert torch.equal(wide[: shape[1]], (whole.float() * scales[:, None]).bfloat16().T)


def test_what_does_not_belong_together_is_refused() -> None:
    _, blocks, scales = matrix(64, 32)

    with pytest.raises(ValueError, match="rows of 30 numbers on cpu for a matrix of 32 inputs"):
        multiply(torch.zeros(1, 30), blocks, scales)
    with pytest.raises(ValueError, match="with gaps"):
        multiply(torch.zeros(1, 32), blocks[:, :1].expand(1, 32, 64), scales)
    with pytest.raises(ValueError, match=r"scales of torch.bfloat16"):
        multiply(torch.zeros(1, 32), blocks, scales.bfloat16())
    with pytest.raises(ValueError, match="64 scales for 128 outputs"):
        multiply(torch.zeros(1, 32), torch.cat([blocks, blocks]), scales)
    for wide in (torch.zeros(32, 128), torch.zeros(31, 64)):
        with pytest.raises(ValueError, match=r"for weights of \[1, 32, 64\]"):
            widen(blocks, scales, wide.bfloat16())
    with pytest.raises(ValueError, match="no room of"):
        widen(blocks, scales[:5], torch.zeros(32, 64).bfloat16())
    with pytest.raises(ValueError, match="on meta"):
        multiply(torch.zeros(1, 32, device="meta"), blocks, scales)
