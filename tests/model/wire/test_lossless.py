"""Lossless compression: it restores every bit, and refuses corrupt payloads."""

import tracemalloc
import zlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshllm.errors import ModelError
from meshllm.model.wire.lossless import deflate, inflate

TYPES = [torch.float32, torch.bfloat16, torch.float16]


def bytes_of(values: Tensor) -> memoryview:
    data: Any = values.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(data)


def packed(values: Tensor) -> bytearray:
    fewer = deflate(bytes_of(values), values.itemsize)
    assert fewer is not None
    return bytearray(fewer)


@given(st.binary(min_size=4, max_size=400), st.sampled_from([2, 4]))
def test_any_bytes_are_restored(data: bytes, itemsize: int) -> None:
    data = data[: len(data) // itemsize * itemsize]
    count = len(data) // itemsize

    fewer = deflate(memoryview(data), itemsize)

    if fewer is not None:
        assert count * (itemsize - 1) < len(fewer) < len(data)
        assert inflate(fewer, count, itemsize) == data


@pytest.mark.parametrize(("dtype", "part"), [*zip(TYPES, (0.87, 0.73, 0.92), strict=True)])
def test_a_hidden_state_shrinks_as_documented(dtype: torch.dtype, part: float) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp(torch.randn(1024, generator=generator))  # some features are larger
    values = (torch.randn(256, 1024, generator=generator) * sizes).to(dtype)

    fewer = packed(values)

    assert part - 0.05 < len(fewer) / values.nbytes < part
    assert inflate(fewer, values.numel(), values.itemsize) == bytes_of(values)


@pytest.mark.parametrize("value", [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40])
@pytest.mark.parametrize("dtype", TYPES)
def test_every_kind_of_number_keeps_its_bits(value: float, dtype: torch.dtype) -> None:
    values = torch.randn(1024).to(dtype)
    values[7] = value

    assert inflate(packed(values), 1024, values.itemsize) == bytes_of(values)


def test_noise_is_not_compressed() -> None:
    noise = torch.randint(0, 256, (4096,), dtype=torch.uint8)

    assert deflate(bytes_of(noise), 2) is None


HALVES = torch.randn(300, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("cut", [1, 5, 60])
def test_a_truncated_stream_is_refused(cut: int) -> None:
    with pytest.raises(ModelError, match="300 values"):
        inflate(packed(HALVES)[:-cut], 300, 2)


@pytest.mark.parametrize("count", [299, 301])
def test_a_stream_of_another_length_is_refused(count: int) -> None:
    whole = packed(HALVES)
    stream = whole[300:]

    with pytest.raises(ModelError, match=f"{count} values"):
        inflate(bytes(count) + stream, count, 2)


def test_a_decompression_bomb_is_not_expanded() -> None:
    coder = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    bomb = bytes(300) + coder.compress(bytes(50_000_000)) + coder.flush()
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match="Corrupt compressed payload of 300 values"):
            inflate(bomb, 300, 2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 1_000_000


def test_rows_of_one_kind_have_one_length_or_two() -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(500, 1024, generator=generator).bfloat16()

    lengths = {len(packed(row)) for row in rows}

    assert len(lengths) <= 2
    assert all(length % 64 == 0 for length in lengths)


@pytest.mark.parametrize("tail", [b"x", bytes(1), bytes(19), bytes(64)])
def test_only_zeros_of_the_right_number_may_follow_the_stream(tail: bytes) -> None:
    whole = packed(HALVES)

    with pytest.raises(ModelError, match="Corrupt compressed payload"):
        inflate(whole + tail, 300, 2)
    if not whole[-1]:
        with pytest.raises(ModelError, match="Corrupt compressed payload"):
            inflate(whole[:-1] + b"x", 300, 2)


def test_a_stream_that_is_not_shorter_is_not_used() -> None:
    for count in range(1, 200):  # so few values take about as many bytes with their codes
        values = torch.randn(count).bfloat16()
        fewer = deflate(bytes_of(values), 2)
        assert fewer is None or len(fewer) < values.nbytes


def test_an_invalid_stream_is_refused() -> None:
    with pytest.raises(ModelError, match="Cannot decompress"):
        inflate(bytes(300) + b"\xff" * 40, 300, 2)
