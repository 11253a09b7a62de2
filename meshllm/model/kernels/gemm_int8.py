"""GEMV and GEMM with int8 weights and int16 activations.

Theory of operation
-------------------
CPUs with VNNI multiply pairs of int16 and accumulate the products in int32, twice as fast as
float32; others need more than one instruction. So a row [K] is quantised to int16 first: each
`GROUP` of its inputs has a scale, the power of two with which the largest value needs 15 bits and a
sign. A bfloat16 value of at least 1/128 of the largest stays exact; the error of a smaller one is
at most 1/32,768 of the largest. The sum over a group is exact, so its order does not matter and the
kernel is row-invariant: a row has the same bits in any batch, with any number of threads, on any
CPU. The group sums, rounded to float32, times their scales are accumulated in float32, in order.

A few rows are bound by memory bandwidth: weights are read once, in memory order, widened to int16
in registers, and multiplied with all rows. `OUTPUTS` outputs of a matrix [N, K] are interleaved:
for each pair of inputs, two weights of each output. The rows of a tile, those multiplied in one
pass, are interleaved alike: for each pair of inputs, two values of each row.
"""

import platform
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import NamedTuple

import torch
from llvmlite import ir
from torch import Tensor

from meshllm.model.hardware import uncached_bytes
from meshllm.model.kernels.ir import BYTE, FLOAT, HALF, LANES, ROUND, WORD, Code
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
"""Outputs of a block; two cache lines for each pair of inputs."""
GROUP = 128
"""Inputs of a row that share a scale."""
PART = 64
"""Inputs of a row that are added up, for weights with a zero point."""

MEASURED = 4096, 512
"""Inputs and outputs of matrices by which it is measured whether prefetches help."""

_TILE_ROWS = 6  # rows of a tile, whose sums fit in registers; twice as many with AVX-512
_SERIAL = 1 << 16  # values that one thread quantises as fast as several
_INT16_MAX = 32767.0  # magnitude of an int16; larger results of rounding are clamped
_EXPONENT, _BIAS, _INF_EXPONENT = 23, 127, 255  # of a float32 (IEEE 754-2019, 3.4)
_MIN_EXPONENT = 15  # smallest biased exponent of a value whose scale is not denormal
_NAN = 0x7FC00000  # bits of a float32
_QUANTISER = "*given", "*whole", "*sizes", "*totals", "inputs", "groups", "rows", "each"
_GEMM = (
    *("tiles", "pairs", "groups", "*weights", "*scales", "*whole", "*sizes", "*products"),
    *("outputs", "threads", RUN),
)
_DEQUANTISER = "*weights", "*scales", "*wide", "pairs", "outputs"


def multiply(rows: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
    """Multiply rows [M, K] by weights [N / 64, K / 2, 64, 2], int8: [M, N], in the dtype of rows.

    If K is odd, the weights have one more input, of zeros. The float32 sums are multiplied by
    ``scales`` [N], float32, before they are rounded. A row with NaN or an infinity gives NaN.

    Raises:
        ValueError: K is 0 or not that of the weights, the rows are not on the CPU, there is not one
            scale per output, or the weights are not contiguous int8.
    """
    _check(rows, weights, scales)
    if not len(rows):
        return rows.new_empty(0, len(scales))
    has_prefetch = len(rows) > FEW or _prefetches(torch.get_num_threads())
    return _multiply(rows, weights, scales, has_prefetch)


def _multiply(rows: Tensor, weights: Tensor, scales: Tensor, has_prefetch: bool) -> Tensor:
    given, threads = quantise_rows(rows), torch.get_num_threads()
    products = given.new_products(len(scales))
    is_single_pass = len(rows) * OUTPUTS <= LANES * registers()
    run = claim(len(weights), weights[0].nbytes, threads) if is_single_pass else 1
    _gemm(given.each, given.is_half, min(given.tiles, 2), has_prefetch)(
        *(len(weights), threads, given.tiles, weights.shape[1], given.groups, weights.data_ptr()),
        *(scales.data_ptr(), given.whole.data_ptr(), given.sizes.data_ptr()),
        *(products.data_ptr(), len(scales), threads, run),
    )
    return given.only(products, rows)


@cache
def _prefetches(threads: int) -> bool:
    """Whether prefetches make a row faster, measured once per machine and number of threads."""
    return prefetches("one row of int8", str(MEASURED[0]), threads, _prepare)


def _prepare() -> tuple[int, Callable[[str, int], object]]:
    """Make matrices to measure, see `Prepare`."""
    inputs, outputs = MEASURED
    count = -(-uncached_bytes() // (inputs * outputs))
    shape = count, outputs // OUTPUTS, inputs // 2, OUTPUTS, 2
    weights = huge_zeros(*shape, dtype=torch.int8).fill_(1)  # pages like those of loaded ones
    row, scales = torch.ones(1, inputs, dtype=torch.bfloat16), torch.ones(outputs)
    return count, lambda way, number: _multiply(row, weights[number], scales, way == PREFETCHED)


class QuantisedRows(NamedTuple):
    """Rows [M, K] in int16, in tiles of ``each`` rows, the last of which may be padded."""

    whole: Tensor
    """[tiles, groups * GROUP / 2, each, 2], int16."""
    sizes: Tensor
    """Scales [tiles, groups, each], float32."""
    totals: Tensor
    """Sums of `PART` inputs [tiles, groups * GROUP / PART, each], int32; empty if not asked for."""
    is_half: bool
    """Whether products are bfloat16, not float32."""

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return self.whole.shape[0]

    @property
    def each(self) -> int:
        """Rows of a tile."""
        return self.whole.shape[2]

    @property
    def groups(self) -> int:
        """Groups of inputs."""
        return self.sizes.shape[1]

    def new_products(self, outputs: int) -> Tensor:
        """Make room for the products of all rows of all tiles."""
        kept = torch.bfloat16 if self.is_half else torch.float32
        return torch.empty(self.tiles * self.each, outputs, dtype=kept)

    def only(self, products: Tensor, rows: Tensor) -> Tensor:
        """Return the products of the given rows, in their dtype."""
        if len(products) > len(rows):
            products = products[: len(rows)]
        return products if products.dtype == rows.dtype else products.to(rows.dtype)


def quantise_rows(rows: Tensor, *, has_totals: bool = False) -> QuantisedRows:
    """Quantise at least one row [M, K] on the CPU to int16, and add up its parts if wanted."""
    count, inputs = rows.shape
    is_half, threads = rows.dtype == torch.bfloat16, torch.get_num_threads()
    tiles = -(-count // max(_TILE_ROWS, registers() // 2))
    each, groups = -(-count // tiles), -(-inputs // GROUP)
    given = (rows if is_half else rows.float()).contiguous()
    whole = torch.empty(tiles, groups * GROUP // 2, each, 2, dtype=torch.int16)
    sizes = torch.empty(tiles, groups, each, dtype=torch.float32)
    parts = groups * GROUP // PART if has_totals else 0
    totals = torch.empty(tiles, parts, each, dtype=torch.int32)
    _quantiser(is_half, has_totals)(
        *(tiles, threads if tiles > 1 and given.numel() > _SERIAL else 1),
        *(given.data_ptr(), whole.data_ptr(), sizes.data_ptr(), totals.data_ptr()),
        *(inputs, groups, count, each),
    )
    return QuantisedRows(whole, sizes, totals, is_half)


def _check(rows: Tensor, weights: Tensor, scales: Tensor) -> None:
    if weights.dtype != torch.int8 or scales.dtype != torch.float32 or not weights.is_contiguous():
        strides = weights.stride()
        raise ValueError(f"weights of {weights.dtype} {strides}, scales of {scales.dtype}")
    if weights.shape[2:] != (OUTPUTS, 2) or len(scales) != OUTPUTS * len(weights):
        raise ValueError(f"{len(scales)} scales for weights of {list(weights.shape)}")
    inputs = rows.shape[1]
    if not inputs or inputs + inputs % 2 != 2 * weights.shape[1] or not rows.is_cpu:
        raise ValueError(
            f"rows of {inputs} values on {rows.device} for {2 * weights.shape[1]} inputs"
        )


def dequantise(weights: Tensor, scales: Tensor, wide: Tensor) -> None:
    """Dequantise weights [B, K / 2, 64, 2], int8, to ``wide`` [K, 64 B], bfloat16.

    Raises:
        ValueError: ``wide`` or ``scales`` does not match the shape of the weights.
    """
    blocks, pairs, outputs, _ = weights.shape
    if wide.shape != (2 * pairs, blocks * outputs) or len(scales) != wide.shape[1]:
        shape = list(weights.shape)
        raise ValueError(f"output {list(wide.shape)}, {len(scales)} scales for weights of {shape}")
    _dequantiser()(
        *(blocks, torch.get_num_threads(), weights.data_ptr(), scales.data_ptr()),
        *(wide.data_ptr(), pairs, wide.shape[1]),
    )


@cache
def _quantiser(is_half: bool, has_totals: bool) -> JitFunction:
    """Compile the quantiser of a tile, to int16 and one scale per row and group."""
    kind = HALF if is_half else FLOAT

    def write(code: Code, fields: Mapping[str, ir.Value], tile: ir.Value, _: ir.Value) -> None:
        do, groups, each = code.do, fields["groups"], fields["each"]
        with do.goto_entry_block():
            padded = do.bitcast(do.alloca(kind, GROUP), ir.PointerType())
        top = do.mul(tile, each)
        left = do.sub(fields["rows"], top)
        count = do.select(do.icmp_unsigned("<", left, each), left, each)
        with code.loop(count) as row:
            start = do.mul(do.add(top, row.index), fields["inputs"])
            given = code.at(fields["given"], start, kind)
            is_whole = _pad(code, kind, given, padded, fields["inputs"])
            with code.loop(groups) as group:
                number = do.add(do.mul(tile, groups), group.index)
                here = code.at(given, do.mul(group.index, code.index(GROUP)), kind)
                is_last = do.icmp_unsigned("==", do.add(group.index, code.index(1)), groups)
                here = do.select(do.and_(is_last, do.not_(is_whole)), padded, here)
                numbers = [
                    code.load(kind, here, code.index(at), LANES) for at in range(0, GROUP, LANES)
                ]
                whole, size = _quantise(code, map(code.widen, numbers) if is_half else numbers)
                code.store(WORD, size, fields["sizes"], do.add(do.mul(number, each), row.index))
                for part in range(GROUP // PART if has_totals else 0):
                    own = whole[part * PART // LANES : (part + 1) * PART // LANES]
                    at = do.add(do.mul(number, code.index(GROUP // PART)), code.index(part))
                    place = do.add(do.mul(at, each), row.index)
                    code.store(WORD, _add_up(code, own), fields["totals"], place)
                place = do.add(do.mul(do.mul(number, code.index(GROUP // 2)), each), row.index)
                for shorts in whole:
                    pairs = do.bitcast(shorts, ir.VectorType(WORD, LANES // 2))
                    for at in range(LANES // 2):
                        pair = do.extract_element(pairs, _word(at))
                        code.store(WORD, pair, fields["whole"], place)
                        place = do.add(place, each)

    return JitFunction(_QUANTISER, write)


def _pad(code: Code, kind: ir.Type, row: ir.Value, padded: ir.Value, inputs: ir.Value) -> ir.Value:
    """Copy the last group of a row, padded with zeros, unless it is full; return whether it is."""
    do = code.do
    left = do.urem(inputs, code.index(GROUP))
    is_whole = do.icmp_unsigned("==", left, code.index(0))
    with do.if_then(do.not_(is_whole)):
        last = code.at(row, do.sub(inputs, left), kind)
        with code.loop(code.index(GROUP)) as loop:
            code.store(kind, ir.Constant(kind, 0), padded, loop.index)
        with code.loop(left) as loop:
            code.store(kind, code.load(kind, last, loop.index), padded, loop.index)
    return is_whole


def _quantise(code: Code, numbers: Iterable[ir.Value]) -> tuple[list[ir.Value], ir.Value]:
    """Round float32 to int16; return these and the bits of their scale."""
    do, words, numbers = code.do, ir.VectorType(WORD, LANES), list(numbers)
    positive = ir.Constant(words, [0x7FFFFFFF] * LANES)
    most, *others = [do.and_(do.bitcast(number, words), positive) for number in numbers]
    for other in others:
        most = code.umax(most, other)
    exponent = code.umax(do.lshr(code.reduce_umax(most), _word(_EXPONENT)), _word(_MIN_EXPONENT))
    # Brings the largest to [2^14, 2^15): times 2^14, divided by the power of two in it.
    up = do.shl(do.sub(_word(2 * _BIAS + 14), exponent), _word(_EXPONENT))
    down = do.shl(do.sub(exponent, _word(14)), _word(_EXPONENT))
    is_not_finite = do.icmp_unsigned("==", exponent, _word(_INF_EXPONENT))
    factor = code.splat(do.bitcast(up, FLOAT))
    least, largest = code.floats(-_INT16_MAX), code.floats(_INT16_MAX)
    whole = []
    for number in numbers:
        grown = do.fmul(number, factor)
        grown = do.select(do.fcmp_ordered(">", grown, largest), largest, grown)
        grown = do.select(do.fcmp_ordered("<", grown, least), least, grown)
        bits = do.bitcast(do.fadd(grown, code.floats(ROUND)), words)
        whole.append(do.trunc(bits, ir.VectorType(HALF, LANES)))
    return whole, do.select(is_not_finite, _word(_NAN), down)


def _add_up(code: Code, shorts: Iterable[ir.Value]) -> ir.Value:
    """Add up int16 values in int32."""
    total, *others = [code.do.sext(each, ir.VectorType(WORD, LANES)) for each in shorts]
    for other in others:
        total = code.do.add(total, other)
    while total.type.count > 1:
        total = code.do.add(*code.halves(total))
    return code.do.extract_element(total, _word(0))


def _word(value: int) -> ir.Constant:
    return ir.Constant(WORD, value)


@cache
def _gemm(rows: int, is_half: bool, tiles: int, has_prefetch: bool) -> JitFunction:
    """Compile the GEMM for tiles of ``rows`` rows, and at least ``tiles`` of them."""
    columns = next(n for n in (4, 2, 1) if n == 1 or rows * n <= registers())
    wide = LANES * columns
    passes = OUTPUTS // wide * tiles

    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, _: ir.Value) -> None:
        do, pairs, groups = code.do, fields["pairs"], fields["groups"]
        first, size = do.mul(block, code.index(OUTPUTS)), do.mul(pairs, code.index(2 * OUTPUTS))
        weights = code.at(fields["weights"], do.mul(block, size), BYTE)
        ahead = do.mul(size, fields["threads"]) if passes > 1 else code.index(AHEAD)
        following = code.at(weights, ahead, BYTE)
        for part in range(0, OUTPUTS, wide):
            columns_at = range(part, part + wide, LANES)
            with code.loop(fields["tiles"]) as tile:
                top = do.mul(tile.index, code.index(rows))
                number = do.add(do.mul(fields["tiles"], code.index(part // wide)), tile.index)
                one = PassInfo(number, passes, pairs)
                with code.loop(groups, *[code.floats(0.0)] * (rows * columns)) as loop:
                    at = do.add(do.mul(tile.index, groups), loop.index)
                    given = code.at(
                        fields["whole"], do.mul(at, code.index(GROUP // 2 * rows)), WORD
                    )
                    ours, theirs = (weights, columns_at), (given, rows)
                    fetched = (one, following) if has_prefetch else None
                    found = _sum_group(code, ours, theirs, (loop.index, pairs), fetched)
                    sums, totals = iter(found), iter(loop.carried)
                    sizes = code.at(fields["sizes"], do.mul(at, code.index(rows)), FLOAT)
                    for row in range(rows):
                        scale = code.splat(code.load(FLOAT, sizes, code.index(row)))
                        loop.next += [
                            code.fma(code.int_to_float(next(sums)), scale, next(totals))
                            for _ in columns_at
                        ]
                totals = iter(loop.next)
                for row in range(rows):
                    start = do.mul(do.add(top, code.index(row)), fields["outputs"])
                    for column in columns_at:
                        output = do.add(first, code.index(column))
                        scale = code.load(FLOAT, fields["scales"], output, LANES)
                        total, place = do.fmul(next(totals), scale), do.add(start, output)
                        kept = code.narrow(total) if is_half else total
                        code.store(HALF if is_half else FLOAT, kept, fields["products"], place)

    return JitFunction(_GEMM, write, held=["weights", "scales"])


def _sum_group(
    code: Code,
    block: tuple[ir.Value, range],
    tile: tuple[ir.Value, int],
    group: tuple[ir.Value, ir.Value],
    ahead: tuple[PassInfo, ir.Value] | None,
) -> list[ir.Value]:
    """Sum the products of one group of a tile's inputs with a block of weights.

    ``block`` is its weights and the outputs to compute; ``tile`` the values of the group and the
    number of rows; ``group`` its index and the number of input pairs in all; ``ahead`` the pass and
    the address of the weights to prefetch, if any.
    """
    do, (weights, columns), (given, rows) = code.do, block, tile
    each, shorts = code.index(GROUP // 2), ir.VectorType(HALF, 2 * LANES)
    begin = do.mul(group[0], each)
    left = do.sub(group[1], begin)
    count = do.select(do.icmp_unsigned("<", left, each), left, each)
    nothing = ir.Constant(ir.VectorType(WORD, LANES), [0] * LANES)
    at_once = platform.machine() in {"x86_64", "AMD64"}
    with code.loop(count, *[nothing] * (rows * len(columns))) as loop:
        pair = do.add(begin, loop.index)
        if ahead is not None:
            one, following = ahead
            prefetch_share(code, following, 2 * OUTPUTS // LINE, one, pair)
        line = code.at(weights, do.mul(pair, code.index(2 * OUTPUTS)), BYTE)
        own = [
            do.sext(code.load(BYTE, line, code.index(2 * column), 2 * LANES), shorts)
            for column in columns
        ]
        start, sums = do.mul(loop.index, code.index(rows)), iter(loop.carried)
        for row in range(rows):
            word = code.load(WORD, given, do.add(start, code.index(row)))
            both = do.bitcast(code.splat(word), shorts)
            loop.next += [
                code.multiply_pairs(weight, both, next(sums), at_once=at_once) for weight in own
            ]
    return loop.next


@cache
def _dequantiser() -> JitFunction:
    eight = ir.Constant(ir.VectorType(HALF, LANES), [8] * LANES)

    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, _: ir.Value) -> None:
        do = code.do
        first = do.mul(block, code.index(OUTPUTS))
        weights = code.at(fields["weights"], do.mul(first, fields["pairs"]), HALF)
        places = [code.index(at) for at in range(0, OUTPUTS, LANES)]
        scales = [code.load(FLOAT, fields["scales"], do.add(first, at), LANES) for at in places]
        with code.loop(fields["pairs"]) as loop:
            source = code.at(weights, do.mul(loop.index, code.index(OUTPUTS)), HALF)
            line = do.mul(do.add(loop.index, loop.index), fields["outputs"])
            for at, scale in zip(places, scales, strict=True):
                both = code.load(HALF, source, at, LANES)
                place = do.add(do.add(line, first), at)
                for weight in (do.ashr(do.shl(both, eight), eight), do.ashr(both, eight)):
                    kept = code.narrow(do.fmul(code.int_to_float(weight), scale))
                    code.store(HALF, kept, fields["wide"], place)
                    place = do.add(place, fields["outputs"])

    return JitFunction(_DEQUANTISER, write, held=["weights", "scales"])
