"""Products with matrices of 8 bits by oneDNN; knows nothing about models or files.

Theory of operation
-------------------
Weights have one scale per output. A row of activations becomes whole numbers of 16 bits with one
scale per row; their low and high bytes are two rows of the same product of bytes, which the kernel
sums without rounding. Decoding waits for the weights, so the second row is nearly free, and an
outlier 200 times larger than the rest of its row leaves them 8 bits: no column has to be treated
apart. Sums of whole numbers do not depend on their order, so neither the number of rows nor of
threads changes a bit.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshllm.errors import ModelError
from meshllm.model.quant_form import Form, Packed, Shape

CHUNK_ROWS = 4096  # of a matrix rounded at a time
MAX_INPUTS = 2**31 // (255 * 128)  # more could overflow a sum of 32 bits
SUM_BYTES = 16 << 20  # at a time; larger ones are new pages of memory each time, 2.7 times slower

_LARGEST = 127 * 256 + 127  # of two digits of a byte each, in base 256
# Added to a float it rounds to whole numbers, makes both digits unsigned, and leaves them in the
# lowest two bytes.
_DIGITS = float(2**23 + 128 * 256 + 128)
_TINY = 1e-30  # instead of the peak of a row of zeros


class Int8Matrix:
    """Weights of 8 bits with a scale per output."""

    __slots__ = ("_data", "_matrix", "_scale", "_zeros", "shape")

    def __init__(self, packed: Packed, shape: Shape) -> None:
        self.shape = shape
        self._data, self._scale = packed["data"], packed["scale"]
        self._zeros = torch.zeros(1, dtype=torch.int32)
        self._matrix = _open_matrix(self._data, layout(shape)[0], shape)

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply [M, K] to [M, N], float32."""
        at_once = max(1, SUM_BYTES // (8 * self.shape[0]))
        if len(rows) <= at_once:
            return self._multiply(rows)
        return torch.cat([self._multiply(part) for part in torch.split(rows, at_once)])

    def _multiply(self, rows: Tensor) -> Tensor:
        digits, scale = _split(rows.contiguous())
        low, high = _sums(digits, self._matrix, self._scale, self._zeros).chunk(2)
        return torch.add(low, high, alpha=256).mul_(scale)


def pack(weight: Tensor) -> dict[str, Tensor]:
    """Pack a matrix [N, K]; beside the result, one of bytes and a few rows are held."""
    whole = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight))
    for at in range(0, len(weight), CHUNK_ROWS):
        part = weight[at : at + CHUNK_ROWS].float()
        scale = part.abs().amax(1).clamp_min_(_TINY).div_(127)
        whole[at : at + CHUNK_ROWS] = (part / scale[:, None]).round_()
        scales[at : at + CHUNK_ROWS] = scale
    matrix = torch.ops.onednn.qlinear_prepack(whole, None)
    data = torch.empty(torch.ops.mkldnn._nbytes(matrix), dtype=torch.uint8)
    ctypes.memmove(data.data_ptr(), torch.ops.mkldnn.data_ptr(matrix), data.nbytes)
    return {"data": data, "scale": scales}


def form(shape: Shape, _dtype: torch.dtype) -> Form:
    """Tell what `pack` makes of a matrix."""
    return {"data": ((layout(shape)[1],), torch.uint8), "scale": (shape[:1], torch.float32)}


@cache
def layout(shape: Shape) -> tuple[Tensor, int]:
    """Tell how oneDNN orders a matrix on this processor, and its size in bytes.

    It is asked and never read from a file: it says where the kernel reads and writes.
    """
    matrix = torch.ops.onednn.qlinear_prepack(torch.zeros(shape, dtype=torch.int8), None)
    descriptor: Tensor = torch.ops.mkldnn._get_mkldnn_serialized_md(matrix)
    return descriptor, int(torch.ops.mkldnn._nbytes(matrix))


def order(shape: Shape) -> str:
    """Name the order of the bytes, which may change with the processor and the version of torch."""
    return bytes(layout(shape)[0].tolist()).hex()


def _split(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Turn rows [M, K] into digits [2 M, K], uint8, low ones first, and scales [M, 1]."""
    rows = rows.float()
    scale = rows.abs().amax(1, keepdim=True).clamp_min_(_TINY).div_(_LARGEST)
    numbers = (rows / scale).add_(_DIGITS)
    digits = numbers.view(torch.uint8).view(*rows.shape, 4)[..., :2]
    return digits.permute(2, 0, 1).reshape(-1, rows.shape[1]), scale


def _sums(digits: Tensor, matrix: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    """Multiply bytes, whose zero is 128, by a packed matrix: [2 M, N], float32.

    Signed bytes would do without the 128, but on processors without AMX oneDNN multiplies them
    one by one.
    """
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        digits, 1.0, 128, matrix, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product


def _open_matrix(data: Tensor, layout: Tensor, shape: Shape) -> Tensor:
    """Show bytes in oneDNN's order as the tensor that its kernel takes, without a copy.

    This is the C interface that compiled models of torch use for their constants. The tensor does
    not own ``data``.
    """
    library, capsule = _library()
    sizes = (ctypes.c_int64 * 2)(shape[1], shape[0])
    strides = (ctypes.c_int64 * 2)(shape[0], 1)
    handle = ctypes.c_void_p()
    fault = library.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(data.data_ptr()),
        ctypes.c_int64(2),
        sizes,
        strides,
        ctypes.c_int64(0),
        library.aoti_torch_dtype_int8(),
        library.aoti_torch_device_type_cpu(),
        0,
        ctypes.byref(handle),
        library.aoti_torch_layout__mkldnn(),
        ctypes.c_void_p(layout.data_ptr()),
        ctypes.c_int64(layout.nbytes),
    )
    if fault:
        raise ModelError(
            f"torch {torch.__version__} does not take an int8 matrix of {list(shape)}",
            hint="use `--quant none` or `--quant int4`",
        )
    aoti: Any = torch._C._aoti
    matrix: Tensor = aoti.alloc_tensor_by_stealing_from_void_ptr(capsule(handle, None, None))
    return matrix


@cache
def _library() -> tuple[Any, Callable[..., Any]]:
    """Open torch's own library, and Python's way to hand a pointer over."""
    new = ctypes.pythonapi.PyCapsule_New
    capsule = ctypes.PYFUNCTYPE(
        ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
    )(ctypes.cast(new, ctypes.c_void_p).value or 0)
    folder = Path(torch.__file__).parent / "lib"
    return ctypes.CDLL(str(next(folder.glob("libtorch_cpu.*")))), capsule
