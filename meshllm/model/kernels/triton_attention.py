"""Attention of a few rows on a GPU, each with a cache of its own.

Theory of operation: a graph does again what it was recorded with, at the same addresses. But caches
grow, move and belong to sessions, so where the keys and values of a row are is not in the call: it
is read from a table in the memory of the GPU. A launch adds all rows to their caches, the next one
attends: one program for a row, the heads that share a head of keys, and a part of the keys; and the
last one puts the parts together. How the keys are parted depends on how many the row sees, and on
nothing else, so that a row has the same bits in any company. Numbers are float32 in between.

Triton comes with torch where torch is built for GPUs; nothing else imports this module.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_PARTS = 16  # of the keys, at most
_BLOCK_BYTES = 1 << 14  # of keys that are looked at together
_LEAST = 16  # rows or columns of a product


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Add rows to their caches, and attend with each to all that its cache holds up to it.

    query [1, H, T, D], key [1, G, T, D] and value [1, G, T, E] with H a multiple of G; table [T, 4]
    of int64: the addresses of a row's keys and values, the rows that these have room for, and the
    place of this one among them, -1 where there is no row. Keys are [1, G, room, D], values
    [1, G, room, E], without gaps. ``window`` is how many keys a row sees, its own included.
    Returns [1, T, H, E], with zeros where there is no row.
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
    _put_together[rows, heads](
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
    """Copy the key and the value of one row, of one head, into its cache."""
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
    """Attend to a part of the keys: give a sum of values, the largest score, a sum of shares."""
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
def _put_together(
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
    """Add up what the parts of the keys gave to one head of one row."""
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
