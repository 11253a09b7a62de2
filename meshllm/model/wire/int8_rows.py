"""int8 encoding of hidden states, for slow links.

Each row is cut into blocks of `BLOCK` values; the last one may be shorter. A block is a scale, the
bfloat16 nearest to its largest magnitude / 127, and for each value the nearest multiple of that
scale; zeros stay zeros. The error of a value is at most half a scale: 0.4 % of the largest of its
block. The scales of all rows come first, then the integers: 17 / 16 of a byte per value.

The encoding of a row does not depend on other rows. A bfloat16 scale has the range of a float32: a
float16 scale is 1 % more accurate on hidden states of real models, but too small for values above 8
million.
"""

from math import inf, prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from meshllm.errors import ModelError

BLOCK = 32
"""Values per scale."""

_MOST = 127
_SCALE = torch.bfloat16
_LEAST = float(torch.finfo(_SCALE).tiny)  # of a scale: 2**-126, which has a finite inverse


def encoded_size(shape: tuple[int, ...]) -> int:
    """Return the encoded bytes of rows of this shape, the values of a row last."""
    return prod(shape) + _scale_bytes(shape)


def encode_rows(rows: Tensor) -> Tensor:
    """Encode ``rows`` [..., D] of any float type, on the CPU, as bytes [`encoded_size`].

    Raises:
        ModelError: a value is infinite or NaN.
    """
    shape = tuple(rows.shape)
    blocks = _blocks(rows)  # [N, D / 32, 32], float32
    largest = torch.maximum(blocks.amax(-1), blocks.amin(-1).neg_())  # abs() would copy all
    scales = (largest * (1 / _MOST)).clamp_min_(_LEAST).to(_SCALE)
    if not float(scales.max()) < inf:
        raise ModelError(
            "Cannot encode hidden states as int8: a value is not finite",
            hint="load the model with another `--dtype`",
        )
    blocks.mul_(scales.float().reciprocal_().unsqueeze(-1)).round_()
    encoded = torch.empty(encoded_size(shape), dtype=torch.uint8)
    edge = _scale_bytes(shape)
    encoded[:edge].view(_SCALE).copy_(scales.view(-1))
    encoded[edge:].view(torch.int8).view(-1, shape[-1]).copy_(blocks.flatten(1)[:, : shape[-1]])
    return encoded


def decode_rows(encoded: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Decode rows of ``shape`` from ``encoded``, `encoded_size` bytes, uint8.

    Raises:
        ModelError: a scale is invalid: not finite, or smaller than `encode_rows` writes.
    """
    edge = _scale_bytes(shape)
    head = encoded[:edge]
    scales = (head.clone() if head.data_ptr() % _SCALE.itemsize else head).view(_SCALE).float()
    least, largest = scales.aminmax()  # both are NaN if any scale is NaN
    if not _LEAST <= float(least) <= float(largest) < inf:
        raise ModelError(f"int8 payload of shape {list(shape)} with invalid scales")
    blocks = _blocks(encoded[edge:].view(torch.int8).view(shape))
    blocks *= scales.view(blocks.shape[:2]).unsqueeze(-1)
    if _MOST * float(largest) > (limit := torch.finfo(dtype).max):
        blocks.clamp_(-limit, limit)  # a scale that was rounded up may exceed the range
    return blocks.flatten(1)[:, : shape[-1]].to(dtype).reshape(shape)


def _scale_bytes(shape: tuple[int, ...]) -> int:
    return prod(shape[:-1]) * -(-shape[-1] // BLOCK) * _SCALE.itemsize


def _blocks(rows: Tensor) -> Tensor:
    """Copy rows [..., D] to float32 blocks [N, D / 32, 32], padded with zeros."""
    flat = rows.to(torch.float32, copy=True).reshape(-1, rows.shape[-1])
    if missing := -rows.shape[-1] % BLOCK:
        flat = pad(flat, (0, missing))
    return flat.view(flat.shape[0], -1, BLOCK)
