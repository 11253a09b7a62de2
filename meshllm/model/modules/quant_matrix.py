"""A quantised matrix.

Theory of operation
-------------------
The kernel of the quantisation reads each weight once for a few rows and is row-invariant. Prefill
is bound by arithmetic instead: on CPUs with bf16 matrix instructions, some weights at a time are
dequantised to bfloat16 and multiplied by torch.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import inf

import torch
from torch import Tensor

from meshllm.model.kernels import jit
from meshllm.model.kernels.gemm_int8 import OUTPUTS
from meshllm.model.kernels.jit import scratch

DEQUANTISE_ROWS = 96  # rows from which on dequantising pays, on a Xeon with AMX
DEQUANTISED_BYTES = 2 << 20  # of weights that are dequantised at a time: they stay in the CPU cache
_BF16_MATRIX = "amx-bf16", "bf16"  # LLVM's names of bf16 matrix instructions, of x86 and of ARM

Shape = tuple[int, int]
"""Outputs N and inputs K."""
Packed = Mapping[str, Tensor]
"""The tensors of a packed matrix: its ``data`` and ``scale``."""
Form = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Their shapes and dtypes."""
Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Multiplies rows [M, K] by blocks of weights, with their scales."""
Dequantise = Callable[[Tensor, Tensor, Tensor], None]
"""Writes blocks of weights, with their scales, as bfloat16 [K, N]."""


class QuantMatrix:
    """A packed matrix [N, K]."""

    __slots__ = ("_data", "_dequantise", "_multiply", "_scale", "shape")

    def __init__(
        self, packed: Packed, shape: Shape, multiply: Multiply, dequantise: Dequantise
    ) -> None:
        self.shape = shape
        """Outputs N and inputs K."""
        self._data, self._scale = packed["data"], packed["scale"]
        self._multiply, self._dequantise = multiply, dequantise

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Its weights and scales: all that it holds in memory."""
        return self._data, self._scale

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply [M, K] to [M, N], in their dtype."""
        if _is_dequantised(rows):
            products = _multiply_dequantised(rows, self._data, self._scale, self._dequantise)
        else:
            products = self._multiply(rows, self._data, self._scale)
        outputs = self.shape[0]
        return products if products.shape[1] == outputs else products[:, :outputs]


def _is_dequantised(rows: Tensor) -> bool:
    """Whether this many rows are multiplied by dequantised weights on this CPU."""
    is_prompt = len(rows) >= DEQUANTISE_ROWS and rows.dtype == torch.bfloat16
    return is_prompt and multiplies_matrices()


def _multiply_dequantised(
    rows: Tensor, data: Tensor, scales: Tensor, dequantise: Dequantise
) -> Tensor:
    """Multiply [M, K] by blocks of weights, dequantised some at a time: [M, N]."""
    blocks = len(data)
    each = len(scales) // blocks  # scales of a block
    inputs = rows.shape[1] + rows.shape[1] % 2
    if rows.shape[1] < inputs:
        rows = torch.nn.functional.pad(rows, (0, 1))
    most = max(1, DEQUANTISED_BYTES // (2 * inputs * OUTPUTS))
    room = scratch(most * inputs * OUTPUTS)
    products = rows.new_empty(len(rows), blocks * OUTPUTS)
    for at in range(0, blocks, most):
        part = data[at : at + most]
        wide = room[: len(part) * OUTPUTS * inputs].view(inputs, -1)
        dequantise(part, scales[at * each : (at + len(part)) * each], wide)
        torch.mm(rows, wide, out=products[:, at * OUTPUTS : (at + len(part)) * OUTPUTS])
    return products


def most_rows() -> float:
    """Return the rows up to which each has the bits of a single one on this CPU."""
    return DEQUANTISE_ROWS - 1 if multiplies_matrices() else inf


@cache
def multiplies_matrices() -> bool:
    """Whether the CPU has instructions that multiply bf16 matrices."""
    return jit.has_cpu_feature(*_BF16_MATRIX) or jit.is_listed_by_linux("bf16")
