"""Probe matrices for comparing the summation orders of kernels."""

import torch
from torch import Tensor, nn

MAX_ROWS = 64
"""Rows of a probe."""

_VALUES = 1 << 23  # of a probe of many inputs; torch's plain kernels may take a second for 2^26
_OUTPUTS = 512  # of a probe, at least, for each thread


def probe_outputs(outputs: int, inputs: int) -> int:
    """Return how many of a matrix's outputs a probe has: the order of summation depends on both.

    Several threads may share out the inputs of few outputs.
    """
    return min(outputs, max(_OUTPUTS * torch.get_num_threads(), _VALUES // max(1, inputs)))


def probe_matrix(like: nn.Linear) -> tuple[nn.Linear, Tensor]:
    """Draw a matrix and rows [M, K] whose products cancel: what is left is the rounding error.

    It changes entirely with the order of summation; of the sums of ordinary numbers, rounded to 16
    bits, about one in ten thousand differs.
    """
    generator = torch.Generator().manual_seed(0)
    half, dtype = like.in_features // 2, like.weight.dtype

    def draw(rows: int, sign: int) -> Tensor:
        values = torch.randn(rows, half, generator=generator).to(dtype)
        odd = values.new_zeros(rows, like.in_features - 2 * half)
        return torch.cat([values, sign * values, odd], dim=1)

    plain = nn.Linear(like.in_features, like.out_features, like.bias is not None, device="meta")
    plain.weight = nn.Parameter(draw(like.out_features, -1))
    if like.bias is not None:  # as small as the rounding error
        bias = torch.randn(like.out_features, generator=generator) * 1e-5
        plain.bias = nn.Parameter(bias.to(dtype))
    return plain, draw(MAX_ROWS, 1)
