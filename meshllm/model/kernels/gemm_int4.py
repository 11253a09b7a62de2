"""GEMV and GEMM with int4 weights and int16 activations.

Theory of operation
-------------------
Weights have a scale and a zero point for every `GROUP` inputs of an output: code c stands for
(c - 8) * scale + zero. Rows are quantised to int16 as for int8 weights, see
`meshllm.model.kernels.gemm_int8`. The sum over a group is then

    scale * (sum of c * x - 8 * sum of x) + zero * sum of x

whose sums of integers are exact, so their order does not matter, and the kernel is row-invariant on
any CPU. What a group comes to is rounded to float32, multiplied by the scale of the row, and added
up in order.

`OUTPUTS` outputs of a matrix [N, K] are interleaved: for every 8 inputs, a word of each output with
their codes. The codes of inputs 2 j and 2 j + 1 are bits 4 j and 16 + 4 j of it and the three
above, so that a shift and a mask turn a vector of words into pairs of int16, in registers.
"""

import platform
from collections.abc import Callable, Mapping
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from meshllm.model.hardware import uncached_bytes
from meshllm.model.kernels.gemm_int8 import GROUP as ROW_GROUP
from meshllm.model.kernels.gemm_int8 import MEASURED, PART, quantise_rows
from meshllm.model.kernels.ir import FLOAT, HALF, LANES, WORD, Code
from meshllm.model.kernels.jit import RUN, JitFunction, registers
from meshllm.model.kernels.prefetch import (
    AHEAD,
    FEW,
    LINE,
    PREFETCHED,
    PassInfo,
    claim,
    prefetch_share,
    prefetches,
)
from meshllm.model.pages import huge_zeros

OUTPUTS = 64
"""Outputs of a block; four cache lines for every 8 inputs."""
GROUP = PART
"""Inputs of an output that share a scale and a zero point."""
CODES = 8
"""Codes of a word."""

_WORDS = GROUP // CODES  # of a group of an output
_SIZE = OUTPUTS * _WORDS  # words of a group of a block
_GEMM = (
    *("tiles", "parts", "row_groups", "*weights", "*scales", "*whole", "*sizes", "*totals"),
    *("*products", "outputs", "threads", RUN),
)
_DEQUANTISER = "*weights", "*scales", "*wide", "parts", "outputs"


def multiply(rows: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
    """Multiply rows [M, K] by weights [N / 64, K / 8, 64], int32: [M, N], in the dtype of rows.

    ``scales`` [N / 64, K / 64, 64, 2], bfloat16, are the scales and zero points. A row with NaN or
    an infinity gives NaN.

    Raises:
        ValueError: K is 0 or not that of the weights, the rows are not on the CPU, or the weights
            or scales have another shape or dtype, or are not contiguous.
    """
    _check(weights, scales)
    blocks, words, _ = weights.shape
    if rows.shape[1] != CODES * words or not rows.is_cpu:
        count, device = rows.shape[1], rows.device
        raise ValueError(f"rows of {count} values on {device} for {CODES * words} inputs")
    if not len(rows):
        return rows.new_empty(0, blocks * OUTPUTS)
    has_prefetch = len(rows) > FEW or _prefetches(torch.get_num_threads())
    return _multiply(rows, weights, scales, has_prefetch)


def _multiply(rows: Tensor, weights: Tensor, scales: Tensor, has_prefetch: bool) -> Tensor:
    blocks, words, outputs = weights.shape[0], weights.shape[1], len(weights) * OUTPUTS
    given, threads = quantise_rows(rows, has_totals=True), torch.get_num_threads()
    products = given.new_products(outputs)
    is_single_pass = len(rows) * OUTPUTS <= LANES * registers()
    run = claim(blocks, weights[0].nbytes, threads) if is_single_pass else 1
    _gemm(given.each, given.is_half, min(given.tiles, 2), has_prefetch)(
        *(blocks, threads, given.tiles, words // _WORDS, given.groups),
        *(weights.data_ptr(), scales.data_ptr(), given.whole.data_ptr(), given.sizes.data_ptr()),
        *(given.totals.data_ptr(), products.data_ptr(), outputs, threads, run),
    )
    return given.only(products, rows)


@cache
def _prefetches(threads: int) -> bool:
    """Whether prefetches make a row faster, measured once per machine and number of threads."""
    return prefetches("one row of int4", str(MEASURED[0]), threads, _prepare)


def _prepare() -> tuple[int, Callable[[str, int], object]]:
    """Make matrices to measure, see `Prepare`."""
    inputs, outputs = MEASURED
    count = -(-2 * uncached_bytes() // (inputs * outputs))
    blocks, words = outputs // OUTPUTS, inputs // CODES
    weights = huge_zeros(count, blocks, words, OUTPUTS, dtype=torch.int32).fill_(1)
    scales = torch.ones(blocks, words // _WORDS, OUTPUTS, 2, dtype=torch.bfloat16)
    row = torch.ones(1, inputs, dtype=torch.bfloat16)
    return count, lambda way, number: _multiply(row, weights[number], scales, way == PREFETCHED)


def dequantise(weights: Tensor, scales: Tensor, wide: Tensor) -> None:
    """Dequantise weights [B, K / 8, 64], int32, to ``wide`` [K, 64 B], bfloat16.

    Raises:
        ValueError: ``wide`` or ``scales`` does not match the shape of the weights.
    """
    _check(weights, scales)
    blocks, words, _ = weights.shape
    if wide.shape != (CODES * words, blocks * OUTPUTS):
        raise ValueError(f"output {list(wide.shape)} for weights of {list(weights.shape)}")
    _dequantiser()(
        *(blocks, torch.get_num_threads(), weights.data_ptr(), scales.data_ptr()),
        *(wide.data_ptr(), words // _WORDS, wide.shape[1]),
    )


def _check(weights: Tensor, scales: Tensor) -> None:
    if weights.dtype != torch.int32 or scales.dtype != torch.bfloat16:
        raise ValueError(f"weights of {weights.dtype}, scales of {scales.dtype}")
    blocks, words, outputs = weights.shape
    if outputs != OUTPUTS or not words or scales.shape != (blocks, words // _WORDS, outputs, 2):
        shapes = list(weights.shape), list(scales.shape)
        raise ValueError(f"weights of {shapes[0]} with scales of {shapes[1]}")
    if words % _WORDS or not weights.is_contiguous() or not scales.is_contiguous():
        raise ValueError(f"{words} words are not whole groups, or not contiguous")


@cache
def _gemm(rows: int, is_half: bool, tiles: int, has_prefetch: bool) -> JitFunction:
    """Compile the GEMM for tiles of ``rows`` rows, and at least ``tiles`` of them."""
    columns = next(n for n in (4, 2, 1) if n == 1 or rows * n <= registers())
    wide = LANES * columns
    passes = OUTPUTS // wide * tiles

    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, _: ir.Value) -> None:
        do, parts, tiles = code.do, fields["parts"], fields["tiles"]
        size = do.mul(parts, code.index(_SIZE))
        weights = code.at(fields["weights"], do.mul(block, size), WORD)
        all_scales = do.mul(block, do.mul(parts, code.index(OUTPUTS)))
        scales = code.at(fields["scales"], all_scales, WORD)
        bytes_ahead = do.mul(size, do.mul(fields["threads"], code.index(4)))
        ahead = bytes_ahead if passes > 1 else code.index(AHEAD)
        following = code.at(weights, ahead, ir.IntType(8))
        first = do.mul(block, code.index(OUTPUTS))
        for start in range(0, OUTPUTS, wide):
            places = range(start, start + wide, LANES)
            with code.loop(tiles) as tile:
                number = do.add(do.mul(tiles, code.index(start // wide)), tile.index)
                one = PassInfo(number, passes, do.mul(parts, code.index(_WORDS)))
                with code.loop(parts, *[code.floats(0.0)] * (rows * columns)) as loop:
                    work = _GroupEmitter(code, fields, (tile.index, loop.index), rows)
                    fetched = (one, following) if has_prefetch else None
                    sums = iter(work.sum(weights, places, fetched))
                    line = do.mul(loop.index, code.index(OUTPUTS))
                    both = [
                        code.load(WORD, scales, do.add(line, code.index(at)), LANES)
                        for at in places
                    ]
                    totals = iter(loop.carried)
                    for row in range(rows):
                        total, scale = work.total(row), work.scale(row)
                        for pair in both:
                            zeros = do.fmul(code.high(pair), total)
                            own = code.fma(code.int_to_float(next(sums)), code.low(pair), zeros)
                            loop.next.append(code.fma(own, scale, next(totals)))
                totals = iter(loop.next)
                for row in range(rows):
                    line = do.add(do.mul(tile.index, code.index(rows)), code.index(row))
                    begin = do.add(do.mul(line, fields["outputs"]), first)
                    for at in places:
                        kept = next(totals)
                        place = do.add(begin, code.index(at))
                        if is_half:
                            code.store(HALF, code.narrow(kept), fields["products"], place)
                        else:
                            code.store(FLOAT, kept, fields["products"], place)

    return JitFunction(_GEMM, write, held=["weights", "scales"])


class _GroupEmitter:
    """Emits the sums of one group of inputs for the rows of a tile."""

    def __init__(
        self,
        code: Code,
        fields: Mapping[str, ir.Value],
        place: tuple[ir.Value, ir.Value],
        rows: int,
    ) -> None:
        do, (tile, self.index) = code.do, place
        self.code, self.rows = code, rows
        each, per = code.index(rows), ROW_GROUP // GROUP
        group = do.add(do.mul(tile, fields["row_groups"]), do.udiv(self.index, code.index(per)))
        part = do.add(do.mul(do.mul(tile, fields["row_groups"]), code.index(per)), self.index)
        self._sizes = code.at(fields["sizes"], do.mul(group, each), FLOAT)
        self._totals = code.at(fields["totals"], do.mul(part, each), WORD)
        pairs = do.mul(part, code.index(GROUP // 2))
        self._whole = code.at(fields["whole"], do.mul(pairs, each), WORD)

    def scale(self, row: int) -> ir.Value:
        """Return the scale of a row."""
        return self.code.splat(self.code.load(FLOAT, self._sizes, self.code.index(row)))

    def total(self, row: int) -> ir.Value:
        """Return the sum of the inputs of a row, as float32."""
        total = self.code.load(WORD, self._totals, self.code.index(row))
        return self.code.splat(self.code.do.sitofp(total, FLOAT))

    def sum(
        self, weights: ir.Value, places: range, ahead: tuple[PassInfo, ir.Value] | None
    ) -> list[ir.Value]:
        """Sum the products of rows and codes less 8, for outputs at ``places``."""
        code, do = self.code, self.code.do
        eight = ir.Constant(WORD, -8)
        start = list[ir.Value]()
        for row in range(self.rows):
            total = code.load(WORD, self._totals, code.index(row))
            start += [code.splat(do.mul(total, eight))] * len(places)
        at_once = platform.machine() in {"x86_64", "AMD64"}
        with code.loop(code.index(_WORDS), *start) as loop:
            word = do.add(do.mul(self.index, code.index(_WORDS)), loop.index)
            if ahead is not None:
                one, following = ahead
                prefetch_share(code, following, 4 * OUTPUTS // LINE, one, word)
            line = do.mul(word, code.index(OUTPUTS))
            own = [
                _pairs(code, code.load(WORD, weights, do.add(line, code.index(at)), LANES))
                for at in places
            ]
            sums = list(loop.carried)
            first = do.mul(loop.index, code.index(CODES // 2 * self.rows))
            for pair in range(CODES // 2):
                for row in range(self.rows):
                    place = do.add(first, code.index(pair * self.rows + row))
                    given = code.splat(code.load(WORD, self._whole, place))
                    both = do.bitcast(given, ir.VectorType(HALF, 2 * LANES))
                    for at, codes in enumerate(own):
                        mine = row * len(places) + at
                        sums[mine] = code.multiply_pairs(
                            codes[pair], both, sums[mine], at_once=at_once
                        )
            loop.next += sums
        return loop.next


def _pairs(code: Code, words: ir.Value) -> list[ir.Value]:
    """Unpack words to vectors of pairs of codes, as int16."""
    do, shorts = code.do, ir.VectorType(HALF, 2 * LANES)
    mask = ir.Constant(words.type, [0x000F000F] * LANES)
    found = []
    for pair in range(CODES // 2):
        shift = ir.Constant(words.type, [4 * pair] * LANES)
        codes = do.and_(do.lshr(words, shift) if pair else words, mask)
        found.append(do.bitcast(codes, shorts))
    return found


@cache
def _dequantiser() -> JitFunction:
    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, _: ir.Value) -> None:
        do, parts = code.do, fields["parts"]
        first = do.mul(block, code.index(OUTPUTS))
        with code.loop(do.mul(parts, code.index(_WORDS))) as loop:
            line = do.add(do.mul(block, do.mul(parts, code.index(_WORDS))), loop.index)
            group = do.add(do.mul(block, parts), do.udiv(loop.index, code.index(_WORDS)))
            for at in range(0, OUTPUTS, LANES):
                place = do.add(do.mul(line, code.index(OUTPUTS)), code.index(at))
                words = code.load(WORD, fields["weights"], place, LANES)
                place = do.add(do.mul(group, code.index(OUTPUTS)), code.index(at))
                both = code.load(WORD, fields["scales"], place, LANES)
                for number in range(CODES):
                    shift = number // 2 * 4 + number % 2 * 16
                    codes = do.lshr(words, ir.Constant(words.type, [shift] * LANES))
                    codes = do.and_(codes, ir.Constant(words.type, [15] * LANES))
                    less = do.sub(codes, ir.Constant(words.type, [8] * LANES))
                    weight = code.fma(code.int_to_float(less), code.low(both), code.high(both))
                    row = do.add(do.mul(loop.index, code.index(CODES)), code.index(number))
                    place = do.add(do.mul(row, fields["outputs"]), do.add(first, code.index(at)))
                    code.store(HALF, code.narrow(weight), fields["wide"], place)

    return JitFunction(_DEQUANTISER, write, held=["weights", "scales"])
