"""Causal attention of new rows over the KV cache.

A row that is computed by itself is row-invariant: its bits do not depend on the rows of the same
step. Library kernels are made for many rows; a few rows on the CPU use our own kernel, which is
also faster, see `meshllm.model.kernels.attention`. Prefill computes many rows at a time.
"""

from collections.abc import Mapping
from enum import StrEnum
from functools import cache, partial
from itertools import pairwise
from math import inf
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

from meshllm.model.device import using_threads
from meshllm.model.kernels import attention as native_attention
from meshllm.model.kernels import flash_attention, jit
from meshllm.model.kernels.measured import measure_once, rounds_in_time, seconds_of
from meshllm.model.kernels.softmax import COLUMNS, causal_softmax_
from meshllm.model.modules import quant_matrix
from meshllm.model.modules.kernel_choice import has_bf16_dot

SCORES = 1 << 20  # attention scores computed at a time
FLOAT_BYTES = 64 << 20  # of copies of keys and values in float32, at most, or those of one head
NARROW = 512
"""Numbers of a row, in all of its query heads, below which kernels differ little: those of such
models, the embedded one among them, are not measured, which would take longer than an answer."""
FUSED_ROWS = 256
"""Rows that the fused kernel of torch gets with the same keys."""

_PROBE = 8, 4, 256, 1024, 128  # query heads, KV heads, rows, keys, width of a head: measured
_ROUNDS = 3
_TIE = 1.2  # times the time of the fastest, up to which ours is chosen


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

    Of the kernels for bfloat16, the fastest on this machine computes it, see `prefill_kernel`.
    """
    is_usual = query.is_cpu and query.dtype == torch.bfloat16
    kernel = prefill_kernel(*query.shape[1::2]) if is_usual else PrefillKernel.BLOCKS
    return _KERNELS[kernel](query, key, value, scale, window)


class PrefillKernel(StrEnum):
    """A kernel for the attention of many rows in bfloat16."""

    OWN = "own"
    """`meshllm.model.kernels.flash_attention`, where the CPU multiplies pairs of bfloat16."""
    FUSED = "torch fused"
    """The fused kernel of torch, fast where the CPU multiplies matrices of bfloat16 (AMX)."""
    BLOCKS = "torch"
    """Products of blocks by torch, in float32 where the CPU multiplies no matrices."""


def prefill_kernel(heads: int, width: int) -> PrefillKernel:
    """Return the kernel for prompts, of a number of query heads and their width."""
    is_ours = flash_attention.takes_width(width)
    if heads * width >= NARROW:
        return fastest_prefill(is_ours=is_ours)
    return PrefillKernel.OWN if is_ours and _has_own() else PrefillKernel.BLOCKS


@cache
def fastest_prefill(*, is_ours: bool = True) -> PrefillKernel:
    """Return the fastest kernel for prompts on this CPU, measured once per machine.

    Unless ``is_ours``, it is one of torch's.
    """
    shape = "x".join(map(str, _PROBE))
    times = measure_once("attention of prompts", shape, 1, _measure, choose_prefill).seconds
    able = (each for each in times if is_ours or each != PrefillKernel.OWN)
    return choose_prefill({each: times[each] for each in able})


def choose_prefill(times: Mapping[str, float]) -> PrefillKernel:
    """Choose the fastest kernel; ours, which is row-invariant, unless another is clearly faster."""
    best = min(times, key=lambda kernel: times[kernel])
    own = times.get(PrefillKernel.OWN, inf)
    return PrefillKernel.OWN if own <= _TIE * times[best] else PrefillKernel(best)


@torch.inference_mode()
def _measure() -> dict[str, float]:
    """Return the seconds of each kernel for a chunk of a prompt."""
    heads, groups, rows, keys, width = _PROBE
    query = torch.ones(1, heads, rows, width, dtype=torch.bfloat16)
    key = torch.ones(1, groups, keys, width, dtype=torch.bfloat16)
    kernels = [each for each in PrefillKernel if _has_own() or each is not PrefillKernel.OWN]
    times: dict[str, list[float]] = {str(each): [] for each in kernels}
    with using_threads(1):
        for _ in rounds_in_time(_ROUNDS):
            for each in kernels:
                attend = partial(_KERNELS[each], query, key, key, 1.0, None)
                times[each].append(seconds_of(attend, 1))
    return {kernel: median(each[1:]) for kernel, each in times.items()}


def _has_own() -> bool:
    return jit.jit_available() and has_bf16_dot()


def _own(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    if not flash_attention.takes(query, key, value):
        return _in_blocks(query, key, value, scale, window)
    return flash_attention.attend(query, key, value, scale, window)


def _fused(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """Attend by the kernel of torch; it skips no masked keys, so few rows at a time get theirs.

    Where values have another width than keys, torch has none, and would store all scores.
    """
    if query.shape[3] != value.shape[3]:
        return _in_blocks(query, key, value, scale, window)
    rows, keys = query.shape[2], key.shape[2]
    past, is_whole = keys - rows, rows == keys <= (window or keys)
    attended = []
    for at in range(0, rows, rows if is_whole else FUSED_ROWS):
        stop = rows if is_whole else min(rows, at + FUSED_ROWS)
        start = max(0, past + at - window + 1) if window else 0
        seen, mask = slice(start, past + stop), None
        if not is_whole:
            mask = torch.ones(stop - at, past + stop - start, dtype=torch.bool)
            mask = mask.tril_(past + at - start)
            if window:
                mask = mask.triu_(past + at - start - window + 1)
        part = functional.scaled_dot_product_attention(
            query[:, :, at:stop], key[:, :, seen], value[:, :, seen],
            attn_mask=mask, is_causal=is_whole, scale=scale, enable_gqa=True,
        )  # fmt: skip
        attended.append(part.transpose(1, 2))
    return attended[0] if len(attended) == 1 else torch.cat(attended, 1)


def _in_blocks(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor:
    """Attend by products of torch, with blocks of rows over the keys that they see.

    A block has as many rows as keep their scores in the CPU cache. Scores keep the layout of the
    product with the keys, one column per row, so nothing is transposed. All is float32 until the
    end, which takes less than half the time, in one head of keys after the other where copies of
    all would take much memory; on CPUs with bfloat16 matrix instructions, scores are
    rounded to bfloat16, as in transformers' eager attention.
    """
    heads, rows, width = query.shape[1:]
    groups, keys = key.shape[1:3]
    each, past = heads // groups, keys - rows
    mixed = query.new_empty(1, rows, heads, value.shape[3])
    if query.dtype == torch.bfloat16 and not quant_matrix.multiplies_matrices():
        if groups > 1 and 4 * (key.numel() + value.numel()) > FLOAT_BYTES:
            heads_of = (query.chunk(groups, 1), key.chunk(groups, 1), value.chunk(groups, 1))
            parts = zip(*heads_of, strict=True)
            return torch.cat([_in_blocks(*part, scale, window) for part in parts], 2)
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


_KERNELS = {
    PrefillKernel.OWN: _own,
    PrefillKernel.FUSED: _fused,
    PrefillKernel.BLOCKS: _in_blocks,
}


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend with one row [1, H, 1, D]; scores are rounded as in transformers' eager attention."""
    heads, _, width = query.shape[1:]
    groups = key.shape[1]
    queries = query.reshape(groups, heads // groups, width)
    scores = torch.matmul(queries, key[0].transpose(1, 2)).float().mul_(scale)  # [G, H/G, S]
    mixed = torch.matmul(scores.softmax(-1).to(value.dtype), value[0])
    return mixed.view(1, 1, heads, -1)
