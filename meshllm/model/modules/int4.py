"""GEMM with int4 weights.

Weights have a scale and a zero point per `GROUP` inputs of an output; activations keep 16 bits, as
for int8 weights. `meshllm.model.kernels.gemm_int4` multiplies any number of rows, or dequantises
the weights for prompts, see `QuantMatrix`.
"""

import torch
from torch import Tensor

from meshllm.model.kernels import gemm_int4
from meshllm.model.kernels.gemm_int4 import CODES, GROUP, OUTPUTS
from meshllm.model.modules.quant_matrix import Form, Packed, QuantMatrix, Shape
from meshllm.model.pages import huge_zeros
from meshllm.model.pauses import pause

CHUNK_ROWS = 4096  # of a matrix quantised at a time; a multiple of `OUTPUTS`

_SHRINKS = (1.0, 0.9, 0.8)  # of the range of a group: clipping its ends often reduces the error
_TINY = 1e-30  # smallest scale, for groups of equal weights


def pack(weight: Tensor) -> dict[str, Tensor]:
    """Quantise and pack a matrix [N, K]; it takes memory for `CHUNK_ROWS` besides the result."""
    outputs, inputs = weight.shape
    blocks, groups = -(-outputs // OUTPUTS), inputs // GROUP
    data = huge_zeros(blocks, inputs // CODES, OUTPUTS, dtype=torch.int32)
    scales = huge_zeros(blocks, groups, OUTPUTS, 2, dtype=torch.bfloat16)
    for at in range(0, outputs, CHUNK_ROWS):
        pause()
        words, pairs = _pack_rows(weight[at : at + CHUNK_ROWS])
        missing = -len(words) % OUTPUTS
        words = torch.nn.functional.pad(words, (0, 0, 0, missing))
        pairs = torch.nn.functional.pad(pairs, (0, 0, 0, 0, 0, missing))
        here = slice(at // OUTPUTS, at // OUTPUTS + len(words) // OUTPUTS)
        data[here] = words.view(-1, OUTPUTS, words.shape[1]).transpose(1, 2)
        scales[here] = pairs.view(-1, OUTPUTS, groups, 2).transpose(1, 2)
    return {"data": data, "scale": scales}


def open_packed(packed: Packed, shape: Shape) -> QuantMatrix:
    """Return the matrix of what `pack` returned."""
    return QuantMatrix(packed, shape, gemm_int4.multiply, gemm_int4.dequantise)


def form(shape: Shape, _dtype: torch.dtype) -> Form:
    """Return the shapes and dtypes of what `pack` returns."""
    outputs, inputs = shape
    blocks = -(-outputs // OUTPUTS)
    return {
        "data": ((blocks, inputs // CODES, OUTPUTS), torch.int32),
        "scale": ((blocks, inputs // GROUP, OUTPUTS, 2), torch.bfloat16),
    }


def _pack_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise some rows [N, K] with the best of a few ranges per group.

    Returns words [N, K / 8], int32, with scales and zero points [N, K / 64, 2].
    """
    groups = weight.float().reshape(len(weight), -1, GROUP)
    least = torch.full(groups.shape[:2], torch.inf)
    codes = torch.empty(groups.shape, dtype=torch.int32)
    pairs = torch.empty(*groups.shape[:2], 2, dtype=torch.bfloat16)
    low, high = groups.aminmax(dim=2)
    for shrink in _SHRINKS:
        scale = ((high - low) * (shrink / 15)).clamp_min_(_TINY)
        # Code c stands for (c - 8) * scale + zero, both rounded.
        pair = torch.stack((scale, (high + low) / 2 + scale / 2), 2).bfloat16()
        scale, zero = (value.float()[..., None] for value in pair.unbind(2))
        code = ((groups - zero) / scale.clamp_min(_TINY)).round_().add_(8).clamp_(0, 15)
        error = ((code - 8) * scale + zero - groups).square_().sum(2)
        better = error < least
        least[better], pairs[better] = error[better], pair[better]
        codes[better] = code[better].int()
    eights = codes.view(len(weight), -1, CODES)
    words = torch.zeros(eights.shape[:2], dtype=torch.int32)
    for number in range(CODES):
        words |= eights[..., number] << (number // 2 * 4 + number % 2 * 16)
    return words, pairs
