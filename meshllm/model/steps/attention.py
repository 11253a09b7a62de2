"""Causal attention of new rows over the KV cache.

A row that is computed by itself is row-invariant: its bits do not depend on the rows of the same
step. Library kernels are made for many rows; a few rows on the CPU use our own kernel, which is
also faster, see `meshllm.model.kernels.attention`. Prefill computes many rows at a time.
"""

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from meshllm.model.kernels import attention as native_attention
from meshllm.model.kernels import flash_attention, jit
from meshllm.model.kernels.softmax import COLUMNS, causal_softmax_
from meshllm.model.modules import int8
from meshllm.model.modules.kernel_choice import has_bf16_dot

SCORES = 1 << 20  # attention scores computed at a time


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """Compute causal attention of the last T positions; a row does not depend on T.

    query [1, H, T, D], key [1, G, S, D] and value [1, G, S, E] with H a multiple of G; returns
    [1, T, H, E]. ``window`` is the sliding window: the keys that a row sees, its own included.
    """
    if native_attention.takes(key):
        return native_attention.attend(query, key, value, scale, window)
    rows, keys = query.shape[2], key.shape[2]
    attended = []
    for row in range(rows):
        stop = keys - rows + row + 1
        seen = slice(max(0, stop - window) if window else 0, stop)
        one = query[:, :, row : row + 1]
        attended.append(_attend(one, key[:, :, seen], value[:, :, seen], scale))
    return torch.cat(attended, 1)


def prefill_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """Compute attention of a prefill chunk, see `decode_attention`; bfloat16 or float32.

    On CPUs with an instruction for pairs of bfloat16, and none for matrices, our own kernel is
    three times as fast as what follows, see `meshllm.model.kernels.flash_attention`.

    The fused kernel of torch is slower with many keys: it does not skip masked keys, and stock code
    repeats the keys for every query head. Here rows are processed in blocks over the keys that they
    see, as many rows as keep their scores in the CPU cache. Scores keep the layout of the product
    with the keys, one column per row, so nothing is transposed. All is float32 until the end, which
    takes less than half the time; on CPUs with bfloat16 matrix instructions, scores are rounded to
    bfloat16, as in transformers' eager attention.
    """
    if is_flash_faster() and flash_attention.takes(query, key, value):
        return flash_attention.attend(query, key, value, scale, window)
    heads, rows, width = query.shape[1:]
    groups, keys = key.shape[1:3]
    each, past = heads // groups, keys - rows
    mixed = query.new_empty(1, rows, heads, value.shape[3])
    if query.dtype == torch.bfloat16 and not int8.multiplies_matrices():
        query, key, value = query.float(), key.float(), value.float()
    most = max(COLUMNS, SCORES // (groups * keys)) // each or 1
    times = -(-rows // most)
    for at, stop in pairwise(rows * turn // times for turn in range(times + 1)):
        start = max(0, past + at - window + 1) if window else 0
        seen, columns = slice(start, past + stop), each * (stop - at)
        queries = (query[:, :, at:stop] * scale).reshape(groups, columns, width)
        whole = -(-columns // COLUMNS) * COLUMNS
        scores = query.new_empty(groups, past + stop - start, whole)  # [G, S, H/G * T], padded
        own = scores[:, :, :columns]
        torch.bmm(key[0, :, seen], queries.transpose(1, 2), out=own)
        causal_softmax_(scores, stop - at, window)
        part = torch.matmul(own.transpose(1, 2), value[0, :, seen])
        mixed[0, at:stop] = part.view(heads, stop - at, -1).transpose(0, 1)
    return mixed


@cache
def is_flash_faster() -> bool:
    """Whether this CPU multiplies pairs of bfloat16, but not whole matrices of them."""
    return jit.jit_available() and has_bf16_dot() and not int8.multiplies_matrices()


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend with one row [1, H, 1, D]; scores are rounded as in transformers' eager attention."""
    heads, _, width = query.shape[1:]
    groups = key.shape[1]
    queries = query.reshape(groups, heads // groups, width)
    scores = torch.matmul(queries, key[0].transpose(1, 2)).float().mul_(scale)  # [G, H/G, S]
    mixed = torch.matmul(scores.softmax(-1).to(value.dtype), value[0])
    return mixed.view(1, 1, heads, -1)
