"""GEMM with int4 weights.

Weights have a scale and a zero point per `GROUP` inputs of an output; activations keep their dtype.
torch's kernel sums each output of each row separately, in one order.
"""

import torch
from torch import Tensor

from meshllm.model.modules.quant_form import Form, Packed, Shape

GROUP = 64  # inputs per scale and zero: 4.5 bits a weight, 3.55 times fewer than bfloat16
OUTPUTS = 16  # the kernel requires a multiple of it
CHUNK_ROWS = 4096  # of a matrix quantised at a time; a multiple of the 64 that are packed together

_SHRINKS = (1.0, 0.9, 0.8)  # of the range of a group: clipping its ends often reduces the error
_TINY = 1e-30  # smallest scale, for groups of equal weights


class Int4Matrix:
    """int4 weights with a scale and a zero point per group of inputs."""

    __slots__ = ("_data", "_scale", "shape")

    def __init__(self, packed: Packed, shape: Shape) -> None:
        self.shape = shape
        self._data, self._scale = packed["data"], packed["scale"]

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply [M, K] to [M, N], in their dtype, which is that of the packed weights."""
        result: Tensor = torch._weight_int4pack_mm_for_cpu(
            rows.contiguous(), self._data, GROUP, self._scale
        )
        return result


def pack(weight: Tensor) -> dict[str, Tensor]:
    """Quantise and pack a matrix [N, K]; scales and zero points have its dtype, for the kernel."""
    parts = [_pack_rows(rows) for rows in torch.split(weight, CHUNK_ROWS)]
    data = torch.cat([data for data, _ in parts])
    return {"data": data, "scale": torch.cat([scale for _, scale in parts], 1).contiguous()}


def form(shape: Shape, dtype: torch.dtype) -> Form:
    """Return the shapes and dtypes of what `pack` returns for a matrix of that dtype."""
    outputs, inputs = shape
    return {
        "data": ((outputs, inputs // 2), torch.uint8),
        "scale": ((inputs // GROUP, outputs, 2), dtype),
    }


def layout(_shape: Shape) -> str:
    """Name the memory layout: the kernel packs for the vector width of the CPU."""
    return torch.backends.cpu.get_cpu_capability()


def _pack_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise some rows [N, K] with the best of a few ranges per group, and pack them."""
    groups = weight.float().reshape(len(weight), -1, GROUP)
    least = torch.full(groups.shape[:2], torch.inf)
    codes = torch.empty(groups.shape, dtype=torch.int32)
    pairs = torch.empty(*groups.shape[:2], 2, dtype=weight.dtype)
    low, high = groups.aminmax(dim=2)
    for shrink in _SHRINKS:
        scale = ((high - low) * (shrink / 15)).clamp_min_(_TINY)
        # The kernel decodes c as (c - 8) * scale + zero, both rounded to the dtype.
        pair = torch.stack((scale, (high + low) / 2 + scale / 2), 2).to(weight.dtype)
        scale, zero = (value.float()[..., None] for value in pair.unbind(2))
        code = ((groups - zero) / scale.clamp_min(_TINY)).round_().add_(8).clamp_(0, 15)
        error = ((code - 8) * scale + zero - groups).square_().sum(2)
        better = error < least
        least[better], pairs[better] = error[better], pair[better]
        codes[better] = code[better].int()
    packed = torch._convert_weight_to_int4pack_for_cpu(codes.view(weight.shape), 1)
    return packed, pairs.transpose(0, 1).contiguous()
