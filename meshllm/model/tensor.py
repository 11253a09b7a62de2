"""Tensors as bytes and back; knows nothing about messages.

The codes are those of the wire: 1 float32, 2 bfloat16, 3 float16. Bytes are C order, little endian.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

from meshllm.errors import ModelError

_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def to_payload(hidden: Tensor) -> tuple[int, tuple[int, ...], memoryview]:
    """Show a tensor as code, shape and bytes; contiguous CPU memory is not copied.

    Raises:
        ModelError: the element type has no code.
    """
    if (code := _CODES.get(hidden.dtype)) is None:
        raise ModelError(
            f"Hidden states of `{hidden.dtype}` cannot travel",
            hint="load the model with `--dtype bfloat16` or `--dtype float32`",
        )
    flat = hidden.detach().cpu().contiguous().view(-1)
    data: Any = flat.view(torch.uint8).numpy()
    return code, tuple(hidden.shape), memoryview(data)


def from_payload(
    code: int, shape: tuple[int, ...], payload: bytes | bytearray | memoryview
) -> Tensor:
    """Show bytes as a tensor that shares the memory of ``payload``.

    A read-only or misaligned payload is copied once: torch has no read-only tensors.

    Raises:
        ModelError: an unknown code, or bytes that do not fill ``shape``.
    """
    dtype = _DTYPES.get(code)
    if dtype is None or prod(shape) * dtype.itemsize != len(payload):
        raise ModelError(f"{len(payload)} bytes are no tensor of code {code}, shape {list(shape)}")
    if memoryview(payload).readonly:
        payload = bytearray(payload)
    flat = torch.frombuffer(payload, dtype=torch.uint8)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(shape)
