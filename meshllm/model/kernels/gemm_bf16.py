"""GEMV and GEMM with bf16 weights, by float32 arithmetic or by an instruction for pairs of bf16.

Theory of operation
-------------------
The product of two bfloat16 is exact in float32, so the bits of a sum depend only on the order of
summation. In each order a row is row-invariant:

- Few rows (GEMV): input k is added to sum k modulo `GEMV_LANES`, and these sums are added in a
  tree of halves. Weights are read as stored in their file, once for all rows.
- Few rows, with the instruction: input pair k is added to sum k modulo `LANES`, its second product
  first, and these sums are added in a tree of halves. It takes half as many instructions, or less.
- Many rows (GEMM): inputs are cut into blocks of `PART`. In a block, for each pair of inputs the
  second product is added, then the first; then the sums of the blocks one after the other, and the
  bias. A block of weights is transposed once, so that each lane of a vector is an output.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
from llvmlite import ir
from torch import Tensor

from meshllm.model.hardware import uncached_bytes
from meshllm.model.kernels.ir import FLOAT, HALF, INT, LANES, WORD, Code
from meshllm.model.kernels.jit import RUN, JitFunction, registers, scratch
from meshllm.model.kernels.prefetch import claim, reading_times
from meshllm.model.pages import huge_zeros

GEMV_LANES = 64
"""Partial sums per output of a GEMV; the number of inputs is a multiple of this."""
OUTPUTS = 64
"""Outputs of a GEMM block; the number of outputs is a multiple of this."""
PART = 768
"""Inputs of a GEMM block: as many as fit in the CPU cache."""
MAX_ROWS = 192
"""Rows of a GEMM: their sums fit in the CPU cache next to a block of weights."""

_GEMV_OUTPUTS = 16  # outputs of a GEMV block
_TOGETHER = 4  # outputs that share the loads of several rows, given enough registers
_DOT_ALONE = 3  # rows up to which the instruction is faster with one output, a single stream
_NEAR_BYTES = 24 << 10  # of such rows: the nearest CPU cache holds them next to the weights
_DOT_TILE = 8  # rows of the instruction that take one tile, faster than two although some spill
_STREAMED = range(4, 7)  # rows of it for which one stream may be faster than four
_MEASURED_ROWS = 5  # of these
_NARROW = 768  # inputs below which the matrices of a model stay in a CPU cache
_LARGE = 2 << 20  # values from which on they do not, as those of an LM head
_MEASURED_OUTPUTS = 2048  # of a matrix that is measured
_MEASURED_INPUTS = 1 << 16  # at most: more, which a config may say, take gigabytes
_TILE = 6  # rows whose sums fit in registers; in a GEMM, twice as many with AVX-512
_AHEAD = 2048  # weights; prefetch distance, larger than that of hardware prefetchers
_PAIRS_AHEAD = 2048  # pairs of weights; the same for a single row with the instruction
_GEMV = "*weights", "*bias", "*rows", "*products", "outputs", "steps", "tiles", RUN
_DOT_GEMV = *_GEMV, "count"
_GEMM = (
    *("*weights", "*bias", "*rows", "*products", "*scratch", "outputs", "pairs", "part"),
    *("parts", "tiles", "room"),
)


class Bf16Matrix:
    """Weights [N, K] and a bias [N], bfloat16, read in place."""

    __slots__ = ("_bias", "_dot", "_inputs", "_kept", "_outputs", "_weights")

    def __init__(self, weights: Tensor, bias: Tensor | None = None, *, dot: bool = False) -> None:
        """Take weights whose address and shape do not change afterwards.

        With ``dot``, use the instruction `Code.dot`, which the CPU must have.

        Raises:
            ValueError: K is not a multiple of `GEMV_LANES`, the shapes do not match, or a tensor
                is not bfloat16, not contiguous or not on the CPU.
        """
        self._dot = dot
        self._kept = weights, bias  # keeps their addresses valid
        for tensor in (weights,) if bias is None else (weights, bias):
            if tensor.dtype != torch.bfloat16 or tensor.device.type != "cpu":
                raise ValueError(f"Weights must be bfloat16, not {tensor.dtype} on {tensor.device}")
            if not tensor.is_contiguous():
                raise ValueError("Weights must be contiguous")
        if weights.dim() != 2 or weights.shape[1] % GEMV_LANES or not weights.numel():
            raise ValueError(f"Unsupported weights of shape {list(weights.shape)}")
        self._outputs, self._inputs = weights.shape
        if bias is not None and bias.shape != (self._outputs,):
            raise ValueError(f"Bias of shape {list(bias.shape)} for {self._outputs} outputs")
        self._weights = weights.data_ptr()
        self._bias = 0 if bias is None else bias.data_ptr()

    def gemv(self, rows: Tensor) -> Tensor:
        """Multiply rows [M, K] in the order of few rows, each as if alone: [M, N], bfloat16.

        Raises:
            ValueError: the rows are not [M, K], not bfloat16 or not on the CPU.
        """
        return self._multiply(rows, None)

    def _multiply(self, rows: Tensor, way: "_ReadMode | None") -> Tensor:
        """Multiply few rows; ``way`` is how the instruction reads weights, None chooses."""
        count, outputs = self._count(rows), self._outputs
        is_tile = self._dot and count <= _DOT_TILE
        tiles = 1 if is_tile else -(-count // _TILE) or 1
        each = -(-count // tiles)
        products = torch.empty(tiles * each, outputs, dtype=torch.bfloat16)
        if not count:
            return products
        given = rows.contiguous() if self._dot or each == 1 else _padded(rows, tiles * each)
        has_bias = bool(self._bias)
        if self._dot:
            threads = torch.get_num_threads()
            way = way or _choose_way(each, tiles, outputs, self._inputs, threads)
            function = _dot_gemv(each, way.together, has_bias, way.has_prefetch)
        else:
            is_wide = each > 1 and outputs % _TOGETHER == 0 and registers() > LANES
            function = _gemv(each, _TOGETHER if is_wide else 1, has_bias)
        blocks, threads = -(-outputs // _GEMV_OUTPUTS), torch.get_num_threads()
        steps = self._inputs // (2 * LANES if self._dot else GEMV_LANES)
        run = claim(blocks, 2 * _GEMV_OUTPUTS * self._inputs, threads)
        function(
            *(blocks, threads, self._weights, self._bias, given.data_ptr(), products.data_ptr()),
            *(outputs, steps, tiles, run, *([count] if self._dot else [])),
        )
        return products if tiles * each == count else products[:count]

    def gemm(self, rows: Tensor) -> Tensor:
        """Multiply rows [M, K] in the order of many rows, by blocks of inputs: [M, N], bfloat16.

        Raises:
            ValueError: N is not a multiple of `OUTPUTS`, or as for `gemv`.
        """
        count, outputs = self._count(rows), self._outputs
        if outputs % OUTPUTS:
            raise ValueError(f"{outputs} outputs are not a multiple of {OUTPUTS}")
        if count > MAX_ROWS:
            return torch.cat([self.gemm(each) for each in torch.split(rows, MAX_ROWS)])
        tiles, part = -(-count // max(_TILE, registers() // 2)) or 1, min(PART, self._inputs)
        each, threads = -(-count // tiles), torch.get_num_threads()
        products = torch.empty(tiles * each, outputs, dtype=torch.bfloat16)
        if not count:
            return products
        given = _padded(rows, tiles * each)
        words = (part // 2 + tiles * each) * OUTPUTS
        written = scratch(2 * threads * words)
        _gemm(each, bool(self._bias))(
            *(outputs // OUTPUTS, threads, self._weights, self._bias, given.data_ptr()),
            *(products.data_ptr(), written.data_ptr(), outputs, self._inputs // 2, part // 2),
            *(-(-self._inputs // part), tiles, words),
        )
        return products[:count]

    def _count(self, rows: Tensor) -> int:
        """Check rows and return their number."""
        shape = rows.shape
        if len(shape) != 2 or shape[1] != self._inputs:
            raise ValueError(f"rows {list(shape)} for a matrix of {self._inputs} inputs")
        if rows.dtype != torch.bfloat16 or not rows.is_cpu:
            raise ValueError(f"rows of {rows.dtype} on {rows.device}")
        return shape[0]


class _ReadMode(NamedTuple):
    """How the GEMV with the instruction reads weights; the sums are the same."""

    together: int
    """Outputs that share the loads of rows; more than one are read as so many streams."""
    has_prefetch: bool


_READ_MODES = {
    "a stream": _ReadMode(1, has_prefetch=False),
    "a stream, prefetched": _ReadMode(1, has_prefetch=True),
    "four streams": _ReadMode(_TOGETHER, has_prefetch=False),
    "four streams, prefetched": _ReadMode(_TOGETHER, has_prefetch=True),
}
_OF_ONE: tuple[str, ...] = "a stream", "a stream, prefetched", "four streams"
_OF_SEVERAL: tuple[str, ...] = "a stream, prefetched", "four streams, prefetched"
"""Which of these are measured for one row, and for several."""


@cache
def _choose_way(rows: int, tiles: int, outputs: int, inputs: int, threads: int) -> _ReadMode:
    """Choose how ``rows`` rows of a tile are multiplied, by measurement where no rule decides."""
    is_wide = outputs % _TOGETHER == 0 and registers() > LANES
    is_small = inputs < _NARROW and outputs * inputs < _LARGE
    if rows == 1 and (is_small or inputs > _MEASURED_INPUTS):
        return _ReadMode(1, has_prefetch=not is_small)
    if rows > 1:
        is_near = tiles == 1 and 2 * rows * inputs <= _NEAR_BYTES
        if not is_wide or (is_near and rows <= _DOT_ALONE):
            return _ReadMode(1, has_prefetch=True)
        if not is_near or is_small or rows not in _STREAMED:
            return _ReadMode(_TOGETHER, has_prefetch=True)
    what, ways, measured = "one row of bf16", _OF_ONE, 1
    if rows > 1:
        what, ways, measured = "several rows of bf16", _OF_SEVERAL, _MEASURED_ROWS
    times = reading_times(what, str(inputs), threads, ways, partial(_prepare, measured, inputs))
    able = (name for name in ways if is_wide or _READ_MODES[name].together == 1)
    return _READ_MODES[min(able, key=times.__getitem__)]


def _prepare(rows: int, inputs: int) -> tuple[int, Callable[[str, int], object]]:
    """Make matrices of ``inputs`` inputs to measure, see `Prepare`."""
    count = -(-uncached_bytes() // (2 * _MEASURED_OUTPUTS * inputs))
    weights = huge_zeros(count, _MEASURED_OUTPUTS, inputs, dtype=torch.bfloat16).fill_(0.01)
    matrices = [Bf16Matrix(each, dot=True) for each in weights]
    given = torch.ones(rows, inputs, dtype=torch.bfloat16)
    return count, lambda name, number: matrices[number]._multiply(given, _READ_MODES[name])


def _padded(rows: Tensor, count: int) -> Tensor:
    """Convert rows [M, K] to float32, padded with zeros to ``count`` rows."""
    wide, given = torch.empty(count, rows.shape[1], dtype=torch.float32), rows.shape[0]
    wide[:given] = rows
    if given < count:
        wide[given:] = 0
    return wide


@cache
def _gemv(rows: int, together: int, has_bias: bool) -> JitFunction:
    """Compile the GEMV for tiles of rows and outputs; a single row is still bfloat16."""
    kind = HALF if rows == 1 else FLOAT  # so a single row needs no conversion beforehand
    vectors, tile = GEMV_LANES // LANES, rows * together
    columns = next(n for n in (vectors, vectors // 2, 1) if n == 1 or tile * n <= registers())

    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, _: ir.Value) -> None:
        do, steps = code.do, fields["steps"]
        inputs = do.mul(steps, code.index(GEMV_LANES))
        first = do.mul(block, code.index(_GEMV_OUTPUTS))
        left, most = do.sub(fields["outputs"], first), code.index(_GEMV_OUTPUTS)
        here = do.select(do.icmp_unsigned("<", left, most), left, most)
        with code.loop(fields["tiles"]) as tile:
            lines = _lines(code, tile.index, rows)
            starts = [code.at(fields["rows"], do.mul(line, inputs), kind) for line in lines]
            with code.loop(do.udiv(here, code.index(together))) as group:
                at = do.add(first, do.mul(group.index, code.index(together)))
                outputs = [do.add(at, code.index(output)) for output in range(together)]
                weights = [code.at(fields["weights"], do.mul(at, inputs), HALF) for at in outputs]
                sums = [list[ir.Value]() for _ in range(rows * together)]
                for column in range(0, vectors, columns):
                    found = _add_lanes(code, weights, starts, steps, (column, columns))
                    for own, new in zip(sums, found, strict=True):
                        own.extend(new)
                places = ((line, output) for output in outputs for line in lines)
                for (line, output), own in zip(places, sums, strict=True):
                    total = _add_up(code, own)
                    if has_bias:
                        one = code.load(HALF, fields["bias"], output, 1)
                        extra = do.extract_element(code.widen(one), ir.Constant(WORD, 0))
                        total = do.fadd(total, extra)
                    place = do.add(do.mul(line, fields["outputs"]), output)
                    code.store(HALF, code.narrow(code.splat(total, 1)), fields["products"], place)

    return JitFunction(_GEMV, write, held=["weights", "bias"])


@cache
def _dot_gemv(rows: int, together: int, has_bias: bool, has_prefetch: bool) -> JitFunction:
    """Compile the GEMV with the instruction for pairs, for tiles of rows and outputs."""

    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, _: ir.Value) -> None:
        do, steps = code.do, fields["steps"]
        pairs = do.mul(steps, code.index(LANES))
        first = do.mul(block, code.index(_GEMV_OUTPUTS))
        left, most = do.sub(fields["outputs"], first), code.index(_GEMV_OUTPUTS)
        here = do.select(do.icmp_unsigned("<", left, most), left, most)
        with code.loop(fields["tiles"]) as tile:
            lines = _lines(code, tile.index, rows)
            starts = _starts(code, fields, lines, pairs)
            with code.loop(do.udiv(here, code.index(together))) as group:
                at = do.add(first, do.mul(group.index, code.index(together)))
                weights = [
                    code.at(fields["weights"], do.mul(do.add(at, code.index(output)), pairs), WORD)
                    for output in range(together)
                ]
                ahead = (
                    do.mul(pairs, code.index(together)) if rows > 1 else code.index(_PAIRS_AHEAD)
                )
                sums = _dot_lanes(code, weights, starts, steps, ahead if has_prefetch else None)
                for row, line in enumerate(lines):
                    total = code.sums(sums[row::rows])
                    if has_bias:
                        extra = code.load(HALF, fields["bias"], at, together)
                        total = do.fadd(total, code.widen(extra))
                    place = do.add(do.mul(line, fields["outputs"]), at)
                    code.store(HALF, code.narrow(total), fields["products"], place)

    return JitFunction(_DOT_GEMV, write, held=["weights", "bias"])


def _dot_lanes(
    code: Code,
    weights: Sequence[ir.Value],
    rows: Sequence[ir.Value],
    steps: ir.Value,
    ahead: ir.Value | None,
) -> list[ir.Value]:
    """Accumulate the products of outputs and rows, `LANES` pairs at a time.

    ``ahead`` is the distance of prefetches; None for none.
    """
    do = code.do
    with code.loop(steps, *[code.floats(0.0)] * (len(weights) * len(rows))) as loop:
        place = do.mul(loop.index, code.index(LANES))
        pairs = [code.load(WORD, row, place, LANES) for row in rows]
        sums = iter(loop.carried)
        for output in weights:
            if ahead is not None:
                code.prefetch(code.at(output, do.add(place, ahead), WORD), is_far=True)
            own = code.load(WORD, output, place, LANES)
            loop.next += [code.dot(own, pair, next(sums)) for pair in pairs]
    return loop.next


def _lines(code: Code, tile: ir.Value, rows: int) -> list[ir.Value]:
    """Return the numbers of the rows of a tile."""
    top = code.do.mul(tile, code.index(rows))
    return [code.do.add(top, code.index(row)) for row in range(rows)]


def _starts(
    code: Code, fields: Mapping[str, ir.Value], lines: Sequence[ir.Value], pairs: ir.Value
) -> list[ir.Value]:
    """Return the addresses of rows; past the last (products unused), that of the last."""
    do, last = code.do, code.do.sub(fields["count"], code.index(1))
    held = [do.select(do.icmp_unsigned("<", line, last), line, last) for line in lines]
    return [code.at(fields["rows"], do.mul(line, pairs), WORD) for line in held]


def _add_lanes(
    code: Code,
    weights: Sequence[ir.Value],
    rows: Sequence[ir.Value],
    steps: ir.Value,
    columns: tuple[int, int],
) -> list[list[ir.Value]]:
    """Accumulate some of the lanes of the products of outputs and rows."""
    do, (start, count) = code.do, columns
    zeros = [code.floats(0.0)] * (len(weights) * len(rows) * count)
    with code.loop(steps, *zeros) as loop:
        first = do.mul(loop.index, code.index(GEMV_LANES))
        places = [do.add(first, code.index((start + at) * LANES)) for at in range(count)]
        kind = HALF if len(rows) == 1 else FLOAT
        numbers = [[code.load(kind, row, place, LANES) for place in places] for row in rows]
        if kind == HALF:
            numbers = [[code.widen(number) for number in row] for row in numbers]
        sums = iter(_chunks(loop.carried, count))
        for output in weights:
            for line in range(0, GEMV_LANES, 32):  # a cache line
                ahead = do.add(first, code.index(_AHEAD + line))
                code.prefetch(code.at(output, ahead, HALF))
            values = [code.widen(code.load(HALF, output, place, LANES)) for place in places]
            for row in numbers:
                loop.next += map(code.fma, row, values, next(sums))
    return _chunks(loop.next, count)


def _add_up(code: Code, sums: list[ir.Value]) -> ir.Value:
    """Add up partial sums in a tree of halves."""
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [code.do.fadd(*both) for both in zip(sums[:half], sums[half:], strict=True)]
    return code.sum(sums[0])


def _chunks(values: Sequence[ir.Value], count: int) -> list[list[ir.Value]]:
    return [list(values[at : at + count]) for at in range(0, len(values), count)]


@cache
def _gemm(rows: int, has_bias: bool) -> JitFunction:
    """Compile the GEMM for tiles of ``rows`` rows."""
    columns = next(n for n in (4, 2, 1) if n == 1 or rows * n <= registers())
    wide = LANES * columns

    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, by: ir.Value) -> None:
        do, pairs, tiles = code.do, fields["pairs"], fields["tiles"]
        first, width = do.mul(block, code.index(OUTPUTS)), code.index(OUTPUTS)
        transposed = code.at(fields["scratch"], do.mul(by, fields["room"]), WORD)
        totals = code.at(transposed, do.mul(fields["part"], width), FLOAT)
        weights = code.at(fields["weights"], do.mul(first, pairs), WORD)
        with code.loop(fields["parts"]) as part:
            begin = do.mul(part.index, fields["part"])
            left = do.sub(pairs, begin)
            is_last = do.icmp_unsigned("<=", left, fields["part"])
            count = do.select(is_last, left, fields["part"])
            _transpose(code, code.at(weights, begin, WORD), transposed, (pairs, count))
            is_first = do.icmp_unsigned("==", part.index, code.index(0))
            for column in range(0, OUTPUTS, wide):
                places = [code.index(column + at * LANES) for at in range(columns)]
                with code.loop(tiles) as tile:
                    lines = _lines(code, tile.index, rows)
                    starts = [
                        code.at(fields["rows"], do.add(do.mul(line, pairs), begin), INT)
                        for line in lines
                    ]
                    sums = iter(_add_pairs(code, transposed, starts, count, places))
                    for line in lines:
                        for place in places:
                            at, new = do.add(do.mul(line, width), place), next(sums)
                            total = do.fadd(code.load(FLOAT, totals, at, LANES), new)
                            code.store(FLOAT, do.select(is_first, new, total), totals, at)
        with code.loop(do.mul(tiles, code.index(rows))) as line:
            _round(code, fields, line.index, (first, totals), has_bias=has_bias)

    return JitFunction(_GEMM, write, held=["weights", "bias"])


def _round(
    code: Code,
    fields: Mapping[str, ir.Value],
    line: ir.Value,
    block: tuple[ir.Value, ir.Value],
    *,
    has_bias: bool,
) -> None:
    """Round and store a row's sums of a block, given its first output and their address."""
    do, (first, totals) = code.do, block
    for place in range(0, OUTPUTS, LANES):
        at, output = (
            do.add(start, code.index(place)) for start in (do.mul(line, code.index(OUTPUTS)), first)
        )
        total = code.load(FLOAT, totals, at, LANES)
        if has_bias:
            total = do.fadd(total, code.widen(code.load(HALF, fields["bias"], output, LANES)))
        at = do.add(do.mul(line, fields["outputs"]), output)
        code.store(HALF, code.narrow(total), fields["products"], at)


def _transpose(
    code: Code, weights: ir.Value, transposed: ir.Value, sizes: tuple[ir.Value, ir.Value]
) -> None:
    """Transpose pairs of weights [64, K / 2] to [count, 64]; ``sizes`` are K / 2 and count."""
    do, (pairs, count) = code.do, sizes
    with code.loop(code.index(OUTPUTS // LANES)) as group:
        output = do.mul(group.index, code.index(LANES))
        lines = [do.mul(pairs, do.add(output, code.index(at))) for at in range(LANES)]
        with code.loop(do.udiv(count, code.index(LANES))) as loop:
            start = do.mul(loop.index, code.index(LANES))
            places = [do.mul(do.add(line, start), code.index(2)) for line in lines]
            halves = [code.load(HALF, weights, place, 2 * LANES) for place in places]
            square = [do.bitcast(each, ir.VectorType(WORD, LANES)) for each in halves]
            for at, column in enumerate(code.transpose(square)):
                place = do.mul(do.add(start, code.index(at)), code.index(OUTPUTS))
                code.store(WORD, column, transposed, do.add(place, output))


def _add_pairs(
    code: Code,
    transposed: ir.Value,
    rows: Sequence[ir.Value],
    count: ir.Value,
    places: Sequence[ir.Value],
) -> list[ir.Value]:
    """Accumulate the products of rows with ``count`` pairs of inputs, for outputs at ``places``."""
    do = code.do
    with code.loop(count, *[code.floats(0.0)] * (len(rows) * len(places))) as loop:
        line = code.at(transposed, do.mul(loop.index, code.index(OUTPUTS)), WORD)
        words = [code.load(WORD, line, place, LANES) for place in places]
        lows, highs = [code.low(word) for word in words], [code.high(word) for word in words]
        for row, sums in zip(rows, _chunks(loop.carried, len(places)), strict=True):
            pair = code.at(row, loop.index, INT)
            first, second = (code.splat(code.load(FLOAT, pair, code.index(at))) for at in range(2))
            for low, high, total in zip(lows, highs, sums, strict=True):
                loop.next.append(code.fma(low, first, code.fma(high, second, total)))
    return loop.next
