"""Decode attention of a few rows on a GPU, each over its own KV cache.

Theory of operation: a CUDA graph replays its kernels with the addresses it was captured with. But
KV caches grow, move and belong to sessions, so the address of a row's keys and values is not an
argument: kernels read it from a table in GPU memory. One launch appends all rows to their caches.
The next one attends (split-KV, as in flash-decoding): one program per row, per group of query heads
that share a key head, and per part of the keys. The last one combines the parts. The split depends
only on how many keys the row sees, so a row is row-invariant. Intermediate results are float32.

Triton comes only with GPU builds of torch, so this module is imported only on a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_PARTS = 16  # of the keys, at most
_BLOCK_BYTES = 1 << 14  # of keys that are loaded together
_LEAST = 16  # rows or columns of a `tl.dot`


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Append rows to their KV caches; causal attention of each row over its own cache.

    query [1, H, T, D], key [1, G, T, D] and value [1, G, T, E] with H a multiple of G; table
    [T, 4], int64, per row: the addresses of its cached keys and values, the capacity of the cache
    in rows, and the row's position in it, -1 for an unused row. Cached keys are contiguous
    [1, G, capacity, D], values [1, G, capacity, E]. ``window`` is how many keys a row sees, its own
    included. Returns [1, T, H, E], zeros for unused rows.
    """
    heads, rows, width = query.shape[1:]
    groups, width_out = value.shape[1], value.shape[3]
    query, key, value = (
        each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value)
    )
    wide, wide_out = (triton.next_power_of_2(max(each, _LEAST)) for each in (width, width_out))
    sizes = {"D": width, "E": width_out, "WIDE": wide, "WIDE_OUT": wide_out}
    _append[rows, groups](
        *(key, value, table),
        *(key.stride(1), key.stride(2), value.stride(1), value.stride(2)),
        FIELDS=table.shape[1],
        **sizes,
    )
    sums = query.new_empty(rows, heads, _PARTS, width_out, dtype=torch.float32)
    norms = query.new_empty(2, rows, heads, _PARTS, dtype=torch.float32)
    each = heads // groups
    _attend_part[rows, groups, _PARTS](
        *(query, sums, norms[0], norms[1], table),
        *(query.stride(1), query.stride(2), scale, window or 0),
        FIELDS=table.shape[1],
        PARTS=_PARTS,
        EACH=each,
        MANY=triton.next_power_of_2(max(each, _LEAST)),
        BLOCK=max(_LEAST, _BLOCK_BYTES // (wide * query.itemsize)),
        **sizes,
    )
    mixed = query.new_empty(1, rows, heads, width_out)
    _combine[rows, heads](
        *(sums, norms[0], norms[1], mixed, table),
        FIELDS=table.shape[1],
        PARTS=_PARTS,
        E=width_out,
        WIDE_OUT=wide_out,
    )
    return mixed


@triton.jit
def _append(
    key,
    value,
    table,
    key_head,
    key_row,
    value_head,
    value_row,
    FIELDS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE: tl.constexpr,
    WIDE_OUT: tl.constexpr,
):
    """Copy the key and value of one row and one key head into the row's cache."""
    row, group = tl.program_id(0), tl.program_id(1)
    entry = table + row * FIELDS
    place = tl.load(entry + 3)
    if place >= 0:
        at = group * tl.load(entry + 2) + place
        keys = tl.load(entry).to(tl.pointer_type(key.dtype.element_ty))
        values = tl.load(entry + 1).to(tl.pointer_type(value.dtype.element_ty))
        d, e = tl.arange(0, WIDE), tl.arange(0, WIDE_OUT)
        own = tl.load(key + group * key_head + row * key_row + d, mask=d < D)
        tl.store(keys + at * D + d, own, mask=d < D)
        own = tl.load(value + group * value_head + row * value_row + e, mask=e < E)
        tl.store(values + at * E + e, own, mask=e < E)


@triton.jit
def _attend_part(
    query,
    sums,
    tops,
    totals,
    table,
    query_head,
    query_row,
    scale,
    window,
    FIELDS: tl.constexpr,
    PARTS: tl.constexpr,
    EACH: tl.constexpr,
    MANY: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE: tl.constexpr,
    WIDE_OUT: tl.constexpr,
):
    """Attend to one part of the keys: store weighted value sum, largest score, sum of weights."""
    row, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1) * EACH
    entry = table + row * FIELDS
    place = tl.load(entry + 3)
    if place < 0:
        return
    first = tl.maximum(place - window + 1, 0) if window > 0 else place * 0
    blocks = tl.cdiv(place + 1 - first, PARTS * BLOCK)
    start = first + part * blocks * BLOCK
    stop = tl.minimum(start + blocks * BLOCK, place + 1)
    top = tl.full([MANY], float("-inf"), tl.float32)
    total = tl.zeros([MANY], tl.float32)
    sum_ = tl.zeros([MANY, WIDE_OUT], tl.float32)
    h, d, e = tl.arange(0, MANY), tl.arange(0, WIDE), tl.arange(0, WIDE_OUT)
    if start < stop:
        room = tl.load(entry + 2)
        dtype = query.dtype.element_ty
        keys = tl.load(entry).to(tl.pointer_type(dtype)) + group * room * D
        values = tl.load(entry + 1).to(tl.pointer_type(dtype)) + group * room * E
        asked = tl.load(
            query + (group * EACH + h[:, None]) * query_head + row * query_row + d[None, :],
            mask=(h[:, None] < EACH) & (d[None, :] < D),
            other=0.0,
        )
        for at in range(start, stop, BLOCK):
            s = at + tl.arange(0, BLOCK)
            seen = tl.load(
                keys + s[None, :] * D + d[:, None],
                mask=(s[None, :] < stop) & (d[:, None] < D),
                other=0.0,
            )
            scores = tl.dot(asked, seen, input_precision="ieee") * scale
            scores = tl.where(s[None, :] < stop, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            shares = tl.exp(scores - higher[:, None])
            fade = tl.exp(top - higher)
            own = tl.load(
                values + s[:, None] * E + e[None, :],
                mask=(s[:, None] < stop) & (e[None, :] < E),
                other=0.0,
            )
            total = total * fade + tl.sum(shares, 1)
            mixed = tl.dot(shares.to(own.dtype), own, input_precision="ieee")
            sum_ = sum_ * fade[:, None] + mixed
            top = higher
    to = (row * heads + group * EACH + h) * PARTS + part
    tl.store(tops + to, top, mask=h < EACH)
    tl.store(totals + to, total, mask=h < EACH)
    tl.store(sums + to[:, None] * E + e[None, :], sum_, mask=(h[:, None] < EACH) & (e[None, :] < E))


@triton.jit
def _combine(
    sums,
    tops,
    totals,
    mixed,
    table,
    FIELDS: tl.constexpr,
    PARTS: tl.constexpr,
    E: tl.constexpr,
    WIDE_OUT: tl.constexpr,
):
    """Combine the results of all parts of the keys for one head of one row."""
    row, head = tl.program_id(0), tl.program_id(1)
    at = row * tl.num_programs(1) + head
    part, e = tl.arange(0, PARTS), tl.arange(0, WIDE_OUT)
    result = tl.zeros([WIDE_OUT], tl.float32)
    if tl.load(table + row * FIELDS + 3) >= 0:
        top = tl.load(tops + at * PARTS + part)
        weight = tl.exp(top - tl.max(top, 0))
        total = tl.sum(weight * tl.load(totals + at * PARTS + part), 0)
        given = tl.load(
            sums + (at * PARTS + part[:, None]) * E + e[None, :], mask=e[None, :] < E, other=0.0
        )
        result = tl.sum(given * weight[:, None], 0) / total
    tl.store(mixed + at * E + e, result.to(mixed.dtype.element_ty), mask=e < E)
