"""int8 encoding: error bounds, and independence of rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshllm.errors import ModelError
from meshllm.model.wire.int8_rows import BLOCK, decode_rows, encode_rows, encoded_size

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LEAST = 2.0**-126
"""The smallest scale."""


@st.composite
def rows(draw: st.DrawFn) -> Tensor:
    """Rows [1, T, D] of any width and size, each block of its own magnitude, some values huge."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 3 * BLOCK + 1))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    sizes = torch.randint(-140, 129, shape, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):
        sizes = sizes[:, :1]  # of one magnitude
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 2**sizes
    finite = torch.finfo(dtype)
    return values.clamp(finite.min, finite.max).to(dtype).unsqueeze(0)


def round_trip(hidden: Tensor) -> Tensor:
    return decode_rows(encode_rows(hidden), tuple(hidden.shape), hidden.dtype)


def worst(hidden: Tensor) -> Tensor:
    """Return the largest error of each value [1, T, D]: half a scale, and rounding to the type."""
    finite = torch.finfo(hidden.dtype)
    blocks = torch.nn.functional.pad(hidden.double(), (0, -hidden.shape[-1] % BLOCK))
    largest = blocks.view(1, hidden.shape[1], -1, BLOCK).abs().amax(-1)
    scale = (largest / 127 * (1 + 2**-8)).clamp_min(LEAST)
    step: Tensor = scale.repeat_interleave(BLOCK, -1)[..., : hidden.shape[-1]]
    return step * 0.50001 + hidden.double().abs() * finite.eps + finite.smallest_normal * finite.eps


@given(rows())
def test_the_error_of_a_value_is_at_most_half_a_scale(hidden: Tensor) -> None:
    back = round_trip(hidden)

    assert (back.dtype, back.shape) == (hidden.dtype, hidden.shape)
    assert bool(((back.double() - hidden.double()).abs() <= worst(hidden)).all())


@given(rows(), st.data())
def test_a_row_is_the_same_in_any_batch(hidden: Tensor, draws: st.DataObject) -> None:
    count, width = hidden.shape[1:]
    first = draws.draw(st.integers(0, count - 1))
    some = slice(first, draws.draw(st.integers(first + 1, count)))
    edge = encoded_size((count, width)) - count * width
    whole = encode_rows(hidden)
    scales, values = whole[:edge].view(count, -1), whole[edge:].view(count, -1)

    alone = encode_rows(hidden[:, some])

    assert torch.equal(alone, torch.cat([scales[some].flatten(), values[some].flatten()]))
    assert torch.equal(round_trip(hidden[:, some]), round_trip(hidden)[:, some])


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros(dtype: torch.dtype) -> None:
    hidden = torch.zeros(1, 2, 40, dtype=dtype)
    hidden[0, 1, 33] = 127

    assert torch.equal(round_trip(hidden), hidden)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_number_of_a_type_stays_finite(dtype: torch.dtype, sign: int) -> None:
    largest = torch.finfo(dtype).max
    hidden = torch.full((1, 1, BLOCK), sign * largest, dtype=dtype)

    assert torch.allclose(round_trip(hidden).double(), hidden.double(), rtol=0.004)


def test_the_smallest_numbers_of_a_type_become_zero() -> None:
    hidden = torch.full((1, 1, BLOCK), 1e-40)

    assert torch.equal(round_trip(hidden), torch.zeros(1, 1, BLOCK))


def test_an_outlier_affects_only_its_own_block() -> None:
    hidden = torch.linspace(-1, 1, 4 * BLOCK).view(1, 1, -1)
    hidden[..., 5] = 10_000

    off = (round_trip(hidden) - hidden).abs()[..., BLOCK:]

    assert float(off.max()) <= 0.0041


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_that_is_not_finite_is_refused(value: float, dtype: torch.dtype) -> None:
    hidden = torch.ones(1, 2, 70, dtype=dtype)
    hidden[0, 1, 69] = value

    with pytest.raises(ModelError, match="not finite") as caught:
        encode_rows(hidden)

    assert caught.value.hint is not None


@pytest.mark.parametrize("scale", [torch.nan, torch.inf, -torch.inf, -1.0, 0.0, LEAST / 2], ids=str)
def test_an_invalid_scale_is_refused(scale: float) -> None:
    encoded = encode_rows(torch.ones(1, 2, 2 * BLOCK))
    encoded[2:4].view(torch.bfloat16).fill_(scale)

    with pytest.raises(ModelError, match="with invalid scales"):
        decode_rows(encoded, (1, 2, 2 * BLOCK), torch.float32)


@pytest.mark.parametrize(("width", "size"), [(1024, 1088), (1, 3), (33, 37), (32, 34)])
def test_a_row_takes_a_byte_per_value_and_two_per_block(width: int, size: int) -> None:
    assert encoded_size((1, 3, width)) == 3 * size == len(encode_rows(torch.ones(1, 3, width)))


def test_a_strided_tensor_is_encoded_in_c_order() -> None:
    hidden = torch.randn(40, 3).t().unsqueeze(0)

    assert torch.equal(encode_rows(hidden), encode_rows(hidden.contiguous()))


def test_encoding_does_not_change_its_input() -> None:
    hidden = torch.randn(1, 2, 64)
    before = hidden.clone()

    encode_rows(hidden)

    assert torch.equal(hidden, before)
