"""GEMM with int8 weights.

Theory of operation
-------------------
Weights have one scale per output; activations keep 16 bits, so an outlier among them costs the
others next to nothing. `meshllm.model.kernels.gemm_int8` multiplies them: it reads each weight once
for a few rows and is row-invariant. Prefill is bound by arithmetic instead: on CPUs with bf16
matrix instructions, some weights at a time are dequantised to bfloat16 and multiplied by torch.
"""

from collections.abc import Callable, Sequence
from functools import cache
from math import inf

import torch
from torch import Tensor

from meshllm.model.kernels import gemm_int8, jit
from meshllm.model.kernels.gemm_int8 import OUTPUTS
from meshllm.model.kernels.jit import scratch
from meshllm.model.modules.quant_form import Form, Packed, Shape
from meshllm.model.pages import huge_zeros
from meshllm.model.pauses import pause

CHUNK_ROWS = 4096  # of a matrix quantised at a time
DEQUANTISE_ROWS = 96  # rows from which on dequantising pays, on a Xeon with AMX
DEQUANTISED_BYTES = 2 << 20  # of weights that are dequantised at a time: they stay in the CPU cache
_BF16_MATRIX = "amx-bf16", "bf16"  # LLVM's names of bf16 matrix instructions, of x86 and of ARM
_TINY = 1e-30  # used as the largest weight of an all-zero output


class Int8Matrix:
    """int8 weights with a scale per output."""

    __slots__ = ("_data", "_scale", "shape")

    def __init__(self, packed: Packed, shape: Shape) -> None:
        self.shape = shape
        self._data, self._scale = packed["data"], packed["scale"]

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Its weights and scales."""
        return self._data, self._scale

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply [M, K] to [M, N], in their dtype."""
        if is_dequantised(rows):
            products = multiply_dequantised(rows, self._data, self._scale, gemm_int8.dequantise)
        else:
            products = gemm_int8.multiply(rows, self._data, self._scale)
        outputs = self.shape[0]
        return products if products.shape[1] == outputs else products[:, :outputs]


Dequantise = Callable[[Tensor, Tensor, Tensor], None]
"""Writes blocks of weights, with their scales, as bfloat16 [K, N]."""


def is_dequantised(rows: Tensor) -> bool:
    """Whether so many rows are multiplied by dequantised weights on this CPU."""
    is_prompt = len(rows) >= DEQUANTISE_ROWS and rows.dtype == torch.bfloat16
    return is_prompt and multiplies_matrices()


def multiply_dequantised(
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


def pack(weight: Tensor) -> dict[str, Tensor]:
    """Quantise and pack a matrix [N, K]; it takes memory for `CHUNK_ROWS` besides the result."""
    outputs, inputs = weight.shape
    blocks = -(-outputs // OUTPUTS)
    data = huge_zeros(blocks, -(-inputs // 2), OUTPUTS, 2, dtype=torch.int8)
    scales = torch.zeros(blocks * OUTPUTS, dtype=torch.float32)
    for at in range(0, outputs, CHUNK_ROWS):
        pause()
        part = weight[at : at + CHUNK_ROWS].float()
        scale = part.abs().amax(1).clamp_min_(_TINY).div_(127)
        whole = (part / scale[:, None]).round_()
        whole = torch.nn.functional.pad(whole, (0, inputs % 2, 0, -len(whole) % OUTPUTS))
        first = at // OUTPUTS
        blocked = whole.view(-1, OUTPUTS, data.shape[1], 2).transpose(1, 2)
        data[first : first + len(blocked)] = blocked
        scales[at : at + len(scale)] = scale
    return {"data": data, "scale": scales}


def form(shape: Shape, _dtype: torch.dtype) -> Form:
    """Return the shapes and dtypes of what `pack` returns."""
    blocks = -(-shape[0] // OUTPUTS)
    return {
        "data": ((blocks, -(-shape[1] // 2), OUTPUTS, 2), torch.int8),
        "scale": ((blocks * OUTPUTS,), torch.float32),
    }
