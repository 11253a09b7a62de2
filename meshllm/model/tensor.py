"""Tensors as bytes and back; knows nothing about messages.

The codes are those of the wire: 1 float32, 2 bfloat16, 3 float16, in C order, little endian; and 4,
5, 6 for the same types in 8 bits, see `meshllm.model.wire8`.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

from meshllm.errors import ModelError
from meshllm.model.wire8 import pack, packed_size, unpack

_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_IN_8_BITS = len(_CODES)  # what is added to a code


def to_payload(hidden: Tensor, *, int8: bool = False) -> tuple[int, tuple[int, ...], memoryview]:
    """Show a tensor as code, shape and bytes; contiguous CPU memory is not copied.

    With ``int8`` the values are rounded to 8 bits, which halves the bytes.

    Raises:
        ModelError: the element type has no code, or a value to be rounded is not finite.
    """
    if (code := _CODES.get(hidden.dtype)) is None:
        raise ModelError(
            f"Hidden states of `{hidden.dtype}` cannot travel",
            hint="load the model with `--dtype bfloat16` or `--dtype float32`",
        )
    own = hidden.detach().cpu()
    if int8:
        code, own = code + _IN_8_BITS, pack(own)
    data: Any = own.contiguous().view(-1).view(torch.uint8).numpy()
    return code, tuple(hidden.shape), memoryview(data)


def from_payload(
    code: int, shape: tuple[int, ...], payload: bytes | bytearray | memoryview
) -> Tensor:
    """Show bytes as a tensor that shares the memory of ``payload``.

    A read-only or misaligned payload is copied once: torch has no read-only tensors. One in 8 bits
    becomes the type that it was.

    Raises:
        ModelError: an unknown code, or bytes that do not fill ``shape``, or that nobody writes.
    """
    int8 = code > _IN_8_BITS
    dtype = _DTYPES.get(code - _IN_8_BITS * int8)
    if dtype is None or _size(shape, dtype, int8=int8) != len(payload):
        raise ModelError(f"{len(payload)} bytes are no tensor of code {code}, shape {list(shape)}")
    if memoryview(payload).readonly:
        payload = bytearray(payload)
    if int8:
        return unpack(torch.frombuffer(payload, dtype=torch.uint8), shape, dtype)
    flat = torch.frombuffer(payload, dtype=dtype)
    if flat.data_ptr() % dtype.itemsize:
        flat = torch.frombuffer(bytearray(payload), dtype=dtype)
    return flat.view(shape)


def _size(shape: tuple[int, ...], dtype: torch.dtype, *, int8: bool) -> int:
    return packed_size(shape) if int8 else prod(shape) * dtype.itemsize
