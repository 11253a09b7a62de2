"""In-place causal (or sliding-window) softmax over columns.

The scores of a row are a column, as the product of keys with queries gives them: neighbours in
memory belong to different rows, and a vector holds as many rows as it has lanes. Each lane goes
down its own column three times: for the largest score, for the exponentials of the differences from
it, and to divide these by their sum. Keys that a row may not see become 0, so no mask is needed.
Where no memory can be made executable, torch computes it, with a mask.
"""

from collections.abc import Mapping
from functools import cache
from math import inf

import torch
from llvmlite import ir
from torch import Tensor

from meshllm.model.kernels import jit
from meshllm.model.kernels.ir import FLOAT, HALF, LANES, WORD, Code
from meshllm.model.kernels.jit import JitFunction

COLUMNS = LANES
"""Their number is a multiple of this."""

_STRIP = 64  # columns that are processed together; two cache lines of bfloat16

_FIELDS = "*scores", "*starts", "*seen", "strips", "keys", "columns"


def causal_softmax_(scores: Tensor, rows: int, window: int | None = None) -> None:
    """Replace scores [G, S, C] by their causal softmax over S, in place.

    bfloat16 or float32, in C order; C is a multiple of `COLUMNS`. Column c belongs to row
    c mod ``rows`` of the last ``rows`` of S positions: it sees the keys up to its own position, at
    most ``window`` of them.

    Raises:
        ValueError: the shape, dtype, layout or device is not supported.
    """
    groups, keys, columns = scores.shape
    kinds = torch.bfloat16, torch.float32
    if columns % COLUMNS or not 0 < rows <= keys or scores.dtype not in kinds:
        raise ValueError(f"Invalid softmax of {list(scores.shape)} {scores.dtype}, {rows} rows")
    if not scores.is_contiguous() or scores.device.type != "cpu":
        raise ValueError(f"Scores must be contiguous and on the CPU, not on {scores.device}")
    stops = torch.arange(columns, dtype=torch.int32).remainder_(rows).add_(keys - rows + 1)
    starts = (stops - min(window or keys, keys)).clamp_min_(0)
    if not jit.jit_available():
        _by_torch(scores, starts, stops)
        return
    seen = stops - starts
    strip = COLUMNS if columns % _STRIP else _STRIP
    _function(scores.dtype == torch.bfloat16, strip)(
        groups * columns // strip,
        torch.get_num_threads(),
        *(scores.data_ptr(), starts.data_ptr(), seen.data_ptr()),
        *(columns // strip, keys, columns),
    )


def _by_torch(scores: Tensor, starts: Tensor, stops: Tensor) -> None:
    places = torch.arange(scores.shape[1])[:, None]
    hidden = (places < starts) | (places >= stops)
    scores.copy_(scores.float().masked_fill_(hidden, -inf).softmax(1))


@cache
def _function(is_half: bool, width: int) -> JitFunction:
    """Compile the kernel for strips of ``width`` columns."""
    kind = HALF if is_half else FLOAT

    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, _: ir.Value) -> None:
        do, keys, columns = code.do, fields["keys"], fields["columns"]
        group, strip = do.udiv(block, fields["strips"]), do.urem(block, fields["strips"])
        first = do.mul(strip, code.index(width))
        begin = do.add(do.mul(group, do.mul(keys, columns)), first)
        scores = code.at(fields["scores"], begin, kind)
        places = [code.index(at) for at in range(0, width, LANES)]
        starts, seen = (
            [code.load(WORD, fields[name], do.add(first, at), LANES) for at in places]
            for name in ("starts", "seen")
        )

        def visible(key: ir.Value) -> list[ir.Value]:
            number = code.splat(do.trunc(key, WORD))
            return [
                do.icmp_unsigned("<", do.sub(number, start), count)
                for start, count in zip(starts, seen, strict=True)
            ]

        def load(line: ir.Value, at: ir.Value) -> ir.Value:
            loaded = code.load(kind, line, at, LANES)
            return code.widen(loaded) if is_half else loaded

        nothing = code.floats(-inf)
        with code.loop(keys, *[nothing] * len(places)) as loop:
            line = code.at(scores, do.mul(loop.index, columns), kind)
            for at, is_seen, most in zip(places, visible(loop.index), loop.carried, strict=True):
                score = do.select(is_seen, load(line, at), nothing)
                loop.next.append(do.select(do.fcmp_ordered(">", score, most), score, most))
        peaks = loop.next
        zero = code.floats(0.0)
        with code.loop(keys, *[zero] * len(places)) as loop:
            line = code.at(scores, do.mul(loop.index, columns), kind)
            for at, is_seen, peak, total in zip(
                places, visible(loop.index), peaks, loop.carried, strict=True
            ):
                power = code.exp(do.fsub(load(line, at), peak))
                power = do.select(is_seen, power, zero)
                kept = code.narrow(power) if is_half else power
                code.store(kind, kept, line, at)
                loop.next.append(do.fadd(total, code.widen(kept) if is_half else kept))
        shares = [do.fdiv(code.floats(1.0), total) for total in loop.next]
        with code.loop(keys) as loop:
            line = code.at(scores, do.mul(loop.index, columns), kind)
            for at, share in zip(places, shares, strict=True):
                shared = do.fmul(load(line, at), share)
                code.store(kind, code.narrow(shared) if is_half else shared, line, at)

    return JitFunction(_FIELDS, write)
