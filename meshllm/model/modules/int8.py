"""GEMM with int8 weights.

Theory of operation
-------------------
Weights have one scale per output; activations keep 16 bits, so an outlier among them costs the
others next to nothing. `meshllm.model.kernels.gemm_int8` multiplies them, or dequantises them for
prompts, see `QuantMatrix`.
"""

import torch
from torch import Tensor

from meshllm.model.kernels import gemm_int8
from meshllm.model.kernels.gemm_int8 import OUTPUTS
from meshllm.model.modules.quant_matrix import Form, Packed, QuantMatrix, Shape
from meshllm.model.pages import huge_zeros
from meshllm.model.pauses import pause

CHUNK_ROWS = 4096  # of a matrix quantised at a time
_TINY = 1e-30  # used as the largest weight of an all-zero output


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


def open_packed(packed: Packed, shape: Shape) -> QuantMatrix:
    """Return the matrix of what `pack` returned."""
    return QuantMatrix(packed, shape, gemm_int8.multiply, gemm_int8.dequantise)


def form(shape: Shape, _dtype: torch.dtype) -> Form:
    """Return the shapes and dtypes of what `pack` returns."""
    blocks = -(-shape[0] // OUTPUTS)
    return {
        "data": ((blocks, -(-shape[1] // 2), OUTPUTS, 2), torch.int8),
        "scale": ((blocks * OUTPUTS,), torch.float32),
    }
