"""Attention of new rows behind others.

A row gives the same bits in any company if it is computed by itself. The kernels of libraries are
made for many rows at a time; a few go to one that is made for them, on the CPU: it is faster
besides, see `meshllm.model.kernels.attention`. Prompts are computed many rows at a time.
"""

from itertools import pairwise

import torch
from torch import Tensor

from meshllm.model.kernels import attention as native_attention
from meshllm.model.kernels.softmax import COLUMNS, share_out
from meshllm.model.modules import int8

SCORES = 1 << 20  # that are made at a time


def attend_alone(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """Attend with the last T places, each as if it came alone; none sees what is behind its own.

    query [1, H, T, D], key [1, G, S, D] and value [1, G, S, E] with H a multiple of G; the result
    is [1, T, H, E]. ``window`` is how many keys a row sees, its own included, 1 at least.
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


def attend_chunk(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """Attend with many rows at the end of a text, see `attend_alone`; bfloat16 or float32.

    The fused kernel of torch takes longer where there are many keys: it does not skip what is
    hidden, and stock code copies keys for every head. Here some rows at a time see what they see,
    as many as leave their scores in the processor's cache; and scores stand as the product with the
    keys gives them, a column for each row, so that nothing is turned. All of it is float32 until
    the end, which takes less than half the time; but where the processor multiplies matrices of
    bfloat16, scores are rounded to that, as by transformers' eager attention.
    """
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
        asked = (query[:, :, at:stop] * scale).reshape(groups, columns, width)
        whole = -(-columns // COLUMNS) * COLUMNS
        scores = query.new_empty(groups, past + stop - start, whole)  # [G, S, H/G * T], and more
        own = scores[:, :, :columns]
        torch.bmm(key[0, :, seen], asked.transpose(1, 2), out=own)
        share_out(scores, stop - at, window)
        part = torch.matmul(own.transpose(1, 2), value[0, :, seen])
        mixed[0, at:stop] = part.view(heads, stop - at, -1).transpose(0, 1)
    return mixed


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend with one row [1, H, 1, D]; scores are rounded as by transformers' eager attention."""
    heads, _, width = query.shape[1:]
    groups = key.shape[1]
    asked = query.reshape(groups, heads // groups, width)
    scores = torch.matmul(asked, key[0].transpose(1, 2)).float().mul_(scale)  # [G, H/G, S]
    mixed = torch.matmul(scores.softmax(-1).to(value.dtype), value[0])
    return mixed.view(1, 1, heads, -1)
