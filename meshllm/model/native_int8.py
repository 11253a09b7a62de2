"""Products with matrices of 8 bits, compiled; knows nothing about models or files.

Theory of operation
-------------------
A few rows wait for the weights to come from memory: these are read once, in the order in which
they lie there, become float32 in the processor's registers, and meet all rows. `OUTPUTS` of a
matrix [N, K] lie together: for each input the weights of so many outputs. So a sum is one lane of a
vector, however many rows, threads or lanes there are: for each pair of inputs the product with the
second is added, then that with the first. This is the order of an instruction of some processors
that takes pairs of bfloat16 and adds twice as much at a time, which many rows wait for; a whole
number of 8 bits is such a number. Some of these take more than twice as long for it, though
(Intel's that have another unit for products of matrices, which a virtual machine may hide), so it
is timed.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import cache
from itertools import product
from time import perf_counter

import torch
from llvmlite import ir
from torch import Tensor

from meshllm.model import native
from meshllm.model.native import Native, heard, room
from meshllm.model.native_ahead import AHEAD, LINE, Pass, ask
from meshllm.model.native_code import BYTE, FLOAT, HALF, INT, LANES, PAIRS_FEATURE, WORD, Code
from meshllm.model.scratch import scratch

OUTPUTS = 64
"""Of a block; a line of the processor's cache for each input."""

_MOST = 6  # rows whose sums are held in registers; twice as many where there are more
_MANY = 96  # rows from which on it pays to write down what weights are in pairs
_TRIAL_BLOCKS, _TRIAL_INPUTS, _TRIALS = 4, 512, 9  # of weights that lie in the processor's cache
_MULTIPLIER = (
    *("tiles", "pairs", "*weights", "*scales", "*rows", "*products", "outputs", "*scratch"),
    "threads",
)
_WIDENER = "*weights", "*scales", "*wide", "inputs", "outputs"

Vectors = Sequence[ir.Value]
Add = Callable[[ir.Value, Vectors], Vectors]
"""Adds the products with a pair of inputs, at an address, to the sums of a row."""


class _Terms(Enum):
    """What is added at a time."""

    SINGLE = auto()
    """A product of float32."""
    PAIR = auto()
    """Products of two bfloat16."""
    WRITTEN = auto()
    """The same, for so many rows that a block of weights is turned into pairs once for all."""


def multiply(rows: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
    """Multiply rows [M, K] by weights [N / 64, K, 64], int8: [M, N], in the dtype of the rows.

    Where K is odd the weights have one input more, of zeros. ``scales`` [N], float32, are what the
    sums, float32 too, are multiplied with before they are rounded.

    Raises:
        ValueError: the rows are longer or shorter than those of the matrix, or on a GPU; there are
            more or fewer scales than outputs; or the weights do not lie one after the other.
    """
    _check(rows, weights, scales)
    if not len(rows):
        return rows.new_empty(0, len(scales))
    terms = _Terms.SINGLE
    if rows.dtype == torch.bfloat16 and pairs_pay():
        terms = _Terms.PAIR if len(rows) < _MANY else _Terms.WRITTEN
    return _multiply(rows, weights, scales, (terms, torch.get_num_threads()))


def _multiply(rows: Tensor, weights: Tensor, scales: Tensor, how: tuple[_Terms, int]) -> Tensor:
    """Multiply, adding so at a time, with so many threads."""
    (count, inputs), (terms, threads) = rows.shape, how
    is_half, pairs = rows.dtype == torch.bfloat16, weights.shape[1] // 2
    tiles = -(-count // max(_MOST, room() // 2))
    each = -(-count // tiles)
    kept = torch.bfloat16 if is_half else torch.float32
    products = torch.empty(tiles * each, len(scales), dtype=kept)
    written = scratch(threads * pairs * OUTPUTS * 2 if terms is _Terms.WRITTEN else 0)
    given = (rows.float() if terms is _Terms.SINGLE else rows).contiguous()
    if inputs % 2 or tiles * each > count:
        given = torch.nn.functional.pad(given, (0, inputs % 2, 0, tiles * each - count))
    if given.data_ptr() % 4:  # a part of something, and pairs are loaded as words
        given = given.clone()
    _multiplier(each, is_half, (terms, min(tiles, 2)))(
        *(len(weights), threads, tiles, pairs, weights.data_ptr(), scales.data_ptr()),
        *(given.data_ptr(), products.data_ptr(), len(scales), written.data_ptr()),
        threads,
    )
    if tiles * each > count:
        products = products[:count]
    return products if kept == rows.dtype else products.to(rows.dtype)


def _check(rows: Tensor, weights: Tensor, scales: Tensor) -> None:
    if weights.dtype != torch.int8 or scales.dtype != torch.float32 or not weights.is_contiguous():
        raise ValueError(f"weights of {weights.dtype}, scales of {scales.dtype}, or with gaps")
    if len(scales) != OUTPUTS * len(weights):
        raise ValueError(f"{len(scales)} scales for {OUTPUTS * len(weights)} outputs")
    inputs = rows.shape[1]
    if inputs + inputs % 2 != weights.shape[1] or rows.device != weights.device:
        raise ValueError(
            f"rows of {inputs} numbers on {rows.device} for a matrix of {weights.shape[1]} inputs"
        )


@cache
def adds_pairs() -> bool:
    """Whether the processor can add pairs of bfloat16."""
    return native.can(PAIRS_FEATURE)


@cache
def pairs_pay() -> bool:
    """Whether rows of bfloat16 are multiplied as such: whether that is sooner than as float32."""
    if not adds_pairs():
        return False
    rows = torch.ones(2 * _MOST, _TRIAL_INPUTS, dtype=torch.bfloat16)
    weights = torch.ones(_TRIAL_BLOCKS, _TRIAL_INPUTS, OUTPUTS, dtype=torch.int8)
    scales = torch.ones(_TRIAL_BLOCKS * OUTPUTS)
    seconds: dict[_Terms, list[float]] = {_Terms.SINGLE: [], _Terms.PAIR: []}
    with heard(None):
        for _, terms in product(range(1 + _TRIALS), seconds):
            begin = perf_counter()
            _multiply(rows, weights, scales, (terms, 1))
            seconds[terms].append(perf_counter() - begin)
    single, pair = (min(each[1:]) for each in seconds.values())  # the first one compiles
    return pair < single


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
def _multiplier(rows: int, is_half: bool, how: tuple[_Terms, int]) -> Native:
    """Compile it for tiles of so many rows, and at least so many."""
    columns, (terms, tiles) = next(n for n in (4, 2, 1) if n == 1 or rows * n <= room()), how
    wide = LANES * columns
    passes = OUTPUTS // wide * tiles
    kind = INT if terms is _Terms.SINGLE else WORD  # of a pair of inputs

    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, by: ir.Value) -> None:
        do, pairs = code.do, fields["pairs"]
        first, line_of = do.mul(block, code.index(OUTPUTS)), do.mul(pairs, code.index(OUTPUTS))
        weights = code.at(fields["weights"], do.mul(block, do.mul(line_of, code.index(2))), BYTE)
        written = code.at(fields["scratch"], do.mul(by, line_of), WORD)
        if terms is _Terms.WRITTEN:
            _write_pairs(code, weights, written, pairs)
        blocks = do.mul(do.mul(line_of, code.index(2)), fields["threads"])
        ahead = blocks if passes > 1 else code.index(AHEAD)
        following = code.at(weights, ahead, BYTE)
        for part in range(0, OUTPUTS, wide):
            places = [code.index(part + at * LANES) for at in range(columns)]
            with code.rounds(fields["tiles"]) as tile:
                top = do.mul(tile.index, code.index(rows))
                lines = [do.add(top, code.index(row)) for row in range(rows)]
                starts = [code.at(fields["rows"], do.mul(line, pairs), kind) for line in lines]
                number = do.add(do.mul(fields["tiles"], code.index(part // wide)), tile.index)
                with code.rounds(pairs, *[code.floats(0.0)] * (rows * columns)) as loop:
                    one = Pass(number, passes, pairs)
                    ask(code, following, 2 * OUTPUTS // LINE, one, loop.index)
                    if terms is _Terms.WRITTEN:
                        line = code.at(written, do.mul(loop.index, code.index(OUTPUTS)), WORD)
                        add = _add_pair(code, [code.load(WORD, line, at, LANES) for at in places])
                    else:
                        lows, highs = _weights(code, weights, loop.index, places)
                        add = (
                            _add_pair(code, list(map(code.pair, lows, highs)))
                            if terms is _Terms.PAIR
                            else _add_both(code, lows, highs)
                        )
                    for at, start in enumerate(starts):
                        sums = loop.held[at * columns : (at + 1) * columns]
                        loop.then += add(code.at(start, loop.index, kind), sums)
                sums_left = iter(loop.then)
                for row in lines:
                    start = do.add(do.mul(row, fields["outputs"]), first)
                    for at in places:
                        scale = code.load(FLOAT, fields["scales"], do.add(first, at), LANES)
                        product = do.fmul(next(sums_left), scale)
                        kept = code.narrow(product) if is_half else product
                        place = do.add(start, at)
                        code.store(HALF if is_half else FLOAT, kept, fields["products"], place)

    return Native(_MULTIPLIER, write)


def _weights(
    code: Code, block: ir.Value, pair: ir.Value, places: Sequence[ir.Value]
) -> tuple[list[ir.Value], list[ir.Value]]:
    """Load what a pair of inputs is multiplied with."""
    start = code.at(block, code.do.mul(pair, code.index(2 * OUTPUTS)), BYTE)
    lines = start, code.at(start, code.index(OUTPUTS), BYTE)
    low, high = ([code.whole(code.load(BYTE, line, at, LANES)) for at in places] for line in lines)
    return low, high


def _write_pairs(code: Code, block: ir.Value, written: ir.Value, pairs: ir.Value) -> None:
    places = [code.index(at) for at in range(0, OUTPUTS, LANES)]
    with code.rounds(pairs) as loop:
        line = code.at(written, code.do.mul(loop.index, code.index(OUTPUTS)), WORD)
        lows, highs = _weights(code, block, loop.index, places)
        for at, low, high in zip(places, lows, highs, strict=True):
            code.store(WORD, code.pair(low, high), line, at)


def _add_pair(code: Code, weights: Vectors) -> Add:
    def add(pair: ir.Value, sums: Vectors) -> Vectors:
        both = code.spread(code.load(WORD, pair, code.index(0)))
        return [code.dot(each, both, total) for each, total in zip(weights, sums, strict=True)]

    return add


def _add_both(code: Code, lows: Vectors, highs: Vectors) -> Add:
    def add(pair: ir.Value, sums: Vectors) -> Vectors:
        low_input, high_input = (
            code.spread(code.load(FLOAT, pair, code.index(at))) for at in range(2)
        )
        return [
            code.fma(low, low_input, code.fma(high, high_input, total))
            for low, high, total in zip(lows, highs, sums, strict=True)
        ]

    return add


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
