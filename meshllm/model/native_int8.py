"""Products with matrices of 8 bits, compiled; knows nothing about models or files.

Theory of operation
-------------------
A few rows wait for the weights to come from memory: these are read once, in the order in which
they lie there, become float32 in the processor's registers, and meet all rows. `OUTPUTS` of a
matrix [N, K] lie together: for each input the weights of so many outputs. So a sum is one lane of a
vector, from the first input to the last, however many rows, threads or lanes there are.
"""

from collections.abc import Mapping
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from meshllm.model.native import BYTE, FLOAT, HALF, LANES, Code, Native, room

OUTPUTS = 64
"""Of a block; a line of the processor's cache for each input."""

_MOST = 6  # rows whose sums are held in registers
_AHEAD = 8192  # bytes of weights that are on their way: processors themselves ask for fewer
_MULTIPLIER = "tiles", "inputs", "*weights", "*scales", "*rows", "*products", "outputs"
_WIDENER = "*weights", "*scales", "*wide", "inputs", "outputs"


def multiply(rows: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
    """Multiply rows [M, K] by weights [N / 64, K, 64], int8: [M, N], in the dtype of the rows.

    ``scales`` [N], float32, are what the sums, float32 too, are multiplied with before they are
    rounded.

    Raises:
        ValueError: the rows are longer or shorter than those of the matrix, or on a GPU; or there
            are more or fewer scales than outputs.
    """
    count, inputs = rows.shape
    if len(scales) != OUTPUTS * len(weights):
        raise ValueError(f"{len(scales)} scales for {OUTPUTS * len(weights)} outputs")
    if inputs != weights.shape[1] or rows.device != weights.device:
        raise ValueError(
            f"rows of {inputs} numbers on {rows.device} for a matrix of {weights.shape[1]} inputs"
        )
    if not count:
        return rows.new_empty(0, len(scales))
    tiles = -(-count // _MOST)
    each = -(-count // tiles)
    is_half = rows.dtype == torch.bfloat16
    kept = torch.bfloat16 if is_half else torch.float32
    products = torch.empty(tiles * each, len(scales), dtype=kept)
    wide = rows.float().contiguous()
    if tiles * each > count:
        wide = torch.nn.functional.pad(wide, (0, 0, 0, tiles * each - count))
    _multiplier(each, is_half)(
        len(weights),
        torch.get_num_threads(),
        *(tiles, inputs, weights.data_ptr(), scales.data_ptr()),
        *(wide.data_ptr(), products.data_ptr(), len(scales)),
    )
    if tiles * each > count:
        products = products[:count]
    return products if kept == rows.dtype else products.to(rows.dtype)


def widen(weights: Tensor, scales: Tensor, wide: Tensor) -> None:
    """Write weights [B, K, 64], int8, times their scales to ``wide`` [K, 64 B], bfloat16.

    Raises:
        ValueError: ``wide`` or ``scales`` have the shape of another matrix.
    """
    blocks, inputs, outputs = weights.shape
    if wide.shape != (inputs, blocks * outputs) or len(scales) != wide.shape[1]:
        raise ValueError(f"no room of {list(wide.shape)} for weights of {list(weights.shape)}")
    _widener()(
        len(weights),
        torch.get_num_threads(),
        *(weights.data_ptr(), scales.data_ptr(), wide.data_ptr(), *wide.shape),
    )


@cache
def _multiplier(rows: int, is_half: bool) -> Native:
    """Compile it for tiles of so many rows."""
    columns = next(n for n in (4, 2, 1) if n == 1 or rows * n <= room())

    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, _: ir.Value) -> None:
        do = code.do
        first = do.mul(block, code.index(OUTPUTS))
        weights = code.at(fields["weights"], do.mul(first, fields["inputs"]), BYTE)
        for part in range(0, OUTPUTS, LANES * columns):
            places = [code.index(part + at * LANES) for at in range(columns)]
            with code.rounds(fields["tiles"]) as tile:
                top = do.mul(tile.index, code.index(rows))
                lines = [do.add(top, code.index(row)) for row in range(rows)]
                starts = [
                    code.at(fields["rows"], do.mul(line, fields["inputs"]), FLOAT) for line in lines
                ]
                none = [code.floats(0.0)] * (rows * columns)
                with code.rounds(fields["inputs"], *none) as loop:
                    line = code.at(weights, do.mul(loop.index, code.index(OUTPUTS)), BYTE)
                    code.fetch(code.at(line, code.index(_AHEAD), BYTE))
                    mine = [code.whole(code.load(BYTE, line, at, LANES)) for at in places]
                    sums = iter(loop.held)
                    for start in starts:
                        value = code.spread(code.load(FLOAT, start, loop.index))
                        loop.then += [code.fma(each, value, next(sums)) for each in mine]
                sums = iter(loop.then)
                for line in lines:
                    start = do.add(do.mul(line, fields["outputs"]), first)
                    for at in places:
                        scale = code.load(FLOAT, fields["scales"], do.add(first, at), LANES)
                        product = do.fmul(next(sums), scale)
                        kept = code.narrow(product) if is_half else product
                        place = do.add(start, at)
                        code.store(HALF if is_half else FLOAT, kept, fields["products"], place)

    return Native(_MULTIPLIER, write)


@cache
def _widener() -> Native:
    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, _: ir.Value) -> None:
        do = code.do
        first = do.mul(block, code.index(OUTPUTS))
        weights = code.at(fields["weights"], do.mul(first, fields["inputs"]), BYTE)
        places = [code.index(at) for at in range(0, OUTPUTS, LANES)]
        scales = [code.load(FLOAT, fields["scales"], do.add(first, at), LANES) for at in places]
        with code.rounds(fields["inputs"]) as loop:
            source = code.at(weights, do.mul(loop.index, code.index(OUTPUTS)), BYTE)
            line = do.add(do.mul(loop.index, fields["outputs"]), first)
            for at, scale in zip(places, scales, strict=True):
                weight = code.whole(code.load(BYTE, source, at, LANES))
                code.store(
                    HALF, code.narrow(do.fmul(weight, scale)), fields["wide"], do.add(line, at)
                )

    return Native(_WIDENER, write)
