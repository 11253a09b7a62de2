"""Encodes tensors as bytes and decodes them.

The codes are those of the wire: 1 float32, 2 bfloat16, 3 float16, in C order, little endian; 4, 5,
6 the same types as int8, see `meshllm.model.wire.int8_rows`; and 7, 8, 9 the same types compressed
without loss, see `meshllm.model.wire.lossless`.
"""

from dataclasses import dataclass
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor

from meshllm.errors import ModelError
from meshllm.model.wire.int8_rows import decode_rows, encode_rows, encoded_size
from meshllm.model.wire.lossless import deflate, inflate

_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_INT8 = len(_CODES)  # added to a code
_LOSSLESS = 2 * len(_CODES)


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The format of the hidden states that one rank sends another."""

    width: int
    dtype: torch.dtype


def is_finite(hidden: Tensor) -> bool:
    """Return whether no value is infinite or NaN; in one pass, unlike `torch.isfinite`."""
    least, largest = hidden.aminmax()  # both are NaN if any value is
    return isfinite(least) and isfinite(largest)


def to_payload(
    hidden: Tensor, *, int8: bool = False, packed: bool = False
) -> tuple[int, tuple[int, ...], memoryview]:
    """Encode a tensor as code, shape and bytes; contiguous CPU memory is shared, not copied.

    With ``int8`` the values are rounded to 8 bits, which halves 16-bit types. With ``packed`` they
    are compressed without loss, if that shrinks them.

    Raises:
        ModelError: the dtype has no code, or a value to be rounded is not finite.
    """
    if (code := _CODES.get(hidden.dtype)) is None:
        raise ModelError(
            f"Cannot send hidden states of `{hidden.dtype}`",
            hint="load the model with `--dtype bfloat16` or `--dtype float32`",
        )
    own = hidden.detach().cpu()
    if int8:
        code, own = code + _INT8, encode_rows(own)
    data: Any = own.contiguous().view(-1).view(torch.uint8).numpy()
    payload = memoryview(data)
    if packed and not int8 and (fewer := deflate(payload, hidden.itemsize)) is not None:
        code, payload = code + _LOSSLESS, fewer
    return code, tuple(hidden.shape), payload


def from_payload(
    code: int, shape: tuple[int, ...], payload: bytes | bytearray | memoryview
) -> Tensor:
    """Decode bytes to a tensor, which shares the memory of ``payload``.

    A read-only or misaligned payload is copied once: torch has no read-only tensors. int8 and
    compressed payloads are decoded to the original type.

    Raises:
        ModelError: the code is unknown, the size does not match ``shape``, or the data is corrupt.
    """
    encoding = _LOSSLESS if code > _LOSSLESS else _INT8 if code > _INT8 else 0
    dtype = _DTYPES.get(code - encoding)
    if dtype is None or len(payload) not in _sizes(shape, dtype, encoding):
        raise ModelError(f"Invalid payload: {len(payload)} bytes, code {code}, shape {list(shape)}")
    if encoding == _LOSSLESS:
        payload = inflate(payload, prod(shape), dtype.itemsize)
    elif memoryview(payload).readonly:
        payload = bytearray(payload)
    if encoding == _INT8:
        return decode_rows(torch.frombuffer(payload, dtype=torch.uint8), shape, dtype)
    flat = torch.frombuffer(payload, dtype=dtype)
    if flat.data_ptr() % dtype.itemsize:
        flat = torch.frombuffer(bytearray(payload), dtype=dtype)
    return flat.view(shape)


def _sizes(shape: tuple[int, ...], dtype: torch.dtype, encoding: int) -> range:
    count = prod(shape)
    size = encoded_size(shape) if encoding == _INT8 else count * dtype.itemsize
    return range(size - count + 1, size) if encoding == _LOSSLESS else range(size, size + 1)
