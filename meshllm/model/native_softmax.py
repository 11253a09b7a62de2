"""Softmax of columns, compiled; knows no model.

Scores of many rows stand in columns, as the product of keys with queries gives them: neighbours in
memory belong to different rows, and a vector holds as many rows as it has lanes. Each lane goes
down its own column twice: for the largest score, and for the exponentials of what the others lack
to it. What a row may not see becomes 0 on the way, so nobody writes a mask.
"""

from collections.abc import Mapping
from functools import cache
from math import inf

import torch
from llvmlite import ir
from torch import Tensor

from meshllm.model.native import FLOAT, FLOATS, HALF, LANES, WORD, Code, Native

COLUMNS = 64
"""Of a block; two lines of the processor's cache in bfloat16."""

_FIELDS = "*scores", "*starts", "*seen", "*sums", "strips", "keys", "columns"
_WORDS = ir.VectorType(WORD, LANES)
_LOG2_E = 1.4426950408889634
_LN_2 = 0.693359375, -2.12194440e-4  # in two parts, the first one short (Cephes, expf.c)
_SERIES = 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0
_ROUND = 1.5 * 2**23  # added to a small number it leaves the nearest whole one in the lowest bits
_LEAST = -87.0  # of an exponent; less is as good as nothing


def share_out(scores: Tensor, rows: int, window: int | None = None) -> Tensor:
    """Turn scores [G, S, C] into their softmax over S but for a divisor; return it, [G, C] float32.

    bfloat16 or float32, in C order; C is a multiple of `COLUMNS`. Column c is of row c mod ``rows``
    of the last ``rows`` of S places: it sees the keys up to its own place, ``window`` of them at
    most. The divisors are the sums of what stands there then.

    Raises:
        ValueError: these do not belong together.
    """
    groups, keys, columns = scores.shape
    kinds = torch.bfloat16, torch.float32
    if columns % COLUMNS or not 0 < rows <= keys or scores.dtype not in kinds:
        raise ValueError(f"softmax of {list(scores.shape)} {scores.dtype} for {rows} rows")
    if not scores.is_contiguous() or scores.device.type != "cpu":
        raise ValueError(f"softmax of scores anyhow on {scores.device}")
    stops = torch.arange(columns, dtype=torch.int32).remainder_(rows).add_(keys - rows + 1)
    starts = (stops - (window or keys)).clamp_min_(0)
    seen, sums = stops - starts, torch.empty(groups, columns)
    _function(scores.dtype == torch.bfloat16)(
        groups * columns // COLUMNS,
        torch.get_num_threads(),
        *(scores.data_ptr(), starts.data_ptr(), seen.data_ptr(), sums.data_ptr()),
        *(columns // COLUMNS, keys, columns),
    )
    return sums


@cache
def _function(is_half: bool) -> Native:
    kind = HALF if is_half else FLOAT

    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, _: ir.Value) -> None:
        do, keys, columns = code.do, fields["keys"], fields["columns"]
        group, strip = do.udiv(block, fields["strips"]), do.urem(block, fields["strips"])
        first = do.mul(strip, code.index(COLUMNS))
        begin = do.add(do.mul(group, do.mul(keys, columns)), first)
        scores = code.at(fields["scores"], begin, kind)
        places = [code.index(at) for at in range(0, COLUMNS, LANES)]
        starts, seen = (
            [code.load(WORD, fields[name], do.add(first, at), LANES) for at in places]
            for name in ("starts", "seen")
        )

        def visible(key: ir.Value) -> list[ir.Value]:
            number = code.spread(do.trunc(key, WORD))
            return [
                do.icmp_unsigned("<", do.sub(number, start), count)
                for start, count in zip(starts, seen, strict=True)
            ]

        def load(line: ir.Value, at: ir.Value) -> ir.Value:
            loaded = code.load(kind, line, at, LANES)
            return code.widen(loaded) if is_half else loaded

        nothing = code.floats(-inf)
        with code.rounds(keys, *[nothing] * len(places)) as loop:
            line = code.at(scores, do.mul(loop.index, columns), kind)
            for at, is_seen, most in zip(places, visible(loop.index), loop.held, strict=True):
                score = do.select(is_seen, load(line, at), nothing)
                loop.then.append(do.select(do.fcmp_ordered(">", score, most), score, most))
        peaks = loop.then
        zero = code.floats(0.0)
        with code.rounds(keys, *[zero] * len(places)) as loop:
            line = code.at(scores, do.mul(loop.index, columns), kind)
            for at, is_seen, peak, total in zip(
                places, visible(loop.index), peaks, loop.held, strict=True
            ):
                power = exponential(code, do.fsub(load(line, at), peak))
                power = do.select(is_seen, power, zero)
                kept = code.narrow(power) if is_half else power
                code.store(kind, kept, line, at)
                loop.then.append(do.fadd(total, code.widen(kept) if is_half else kept))
        start = do.add(do.mul(group, columns), first)
        for at, total in zip(places, loop.then, strict=True):
            code.store(FLOAT, total, fields["sums"], do.add(start, at))

    return Native(_FIELDS, write)


def exponential(code: Code, x: ir.Value) -> ir.Value:
    """Raise e to numbers that are 0 or less, within 3 units in the last place (Cephes, expf.c).

    What is no number stays none.
    """
    do, given = code.do, x
    least = code.floats(_LEAST)
    x = do.select(do.fcmp_ordered("<", x, least), least, x)
    shifted = code.fma(x, code.floats(_LOG2_E), code.floats(_ROUND))
    whole = do.fsub(shifted, code.floats(_ROUND))
    for part in _LN_2:
        x = code.fma(whole, code.floats(-part), x)
    power = code.floats(_SERIES[0])
    for term in _SERIES[1:]:
        power = code.fma(power, x, code.floats(term))
    twos = do.shl(do.bitcast(shifted, _WORDS), ir.Constant(_WORDS, [23] * LANES))
    raised = do.bitcast(do.add(do.bitcast(power, _WORDS), twos), FLOATS)
    return do.select(do.fcmp_unordered("uno", given, given), given, raised)
