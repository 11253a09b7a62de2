"""Decode attention of a few rows over the KV cache, row-invariant.

Theory of operation: each row is computed by itself, in float32: dot products with the keys it sees,
their softmax (two passes, with the maximum subtracted), the weighted mean of the values. A block is
one row and the query heads that share one key head (GQA).

Two vectors of bfloat16 are loaded as one of words, whose lower and higher halves are its even and
odd numbers: converting these to float32 takes an instruction each. So a vector holds every other
number of a row; where it is stored, two are interleaved again. On CPUs with the instruction for
pairs of bfloat16, scores are computed from the words themselves. Others add the products in the
order of that instruction, odd numbers first, so the bits are those of any CPU, except that the
instruction takes denormals (below 2^-126) for 0.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import gcd, inf

import torch
from llvmlite import ir
from torch import Tensor

from meshllm.model.kernels.ir import (
    FLOAT,
    HALF,
    LANES,
    PAIRS_FEATURE,
    WORD,
    Code,
    bits_of,
    float_of,
)
from meshllm.model.kernels.jit import (
    JitFunction,
    has_cpu_feature,
    has_fma,
    jit_available,
    registers,
)

THREADED = 1 << 16  # values of keys times rows, some 4 us; to start threads takes 1 us

_FIELDS = (
    *("*query", "query_head", "query_row", "*key", "key_head", "key_row"),
    *("*value", "value_head", "value_row", "*mixed", "*scores", "room"),
    *("groups", "rows", "keys", "window", "scale"),
)
_HELD = 16  # vectors of queries that are kept in registers
_OUT = 8  # vectors of the means of a tile that are accumulated at a time, twice that with AVX-512
_KEYS = 4  # whose scores are summed together, with a third of the instructions
_BLOCK = 1024  # keys whose values are summed separately, to keep a long sum accurate
_LINE = 64  # bytes of a cache line
_DTYPES = torch.bfloat16, torch.float32


def takes(key: Tensor) -> bool:
    """Whether this kernel supports such keys on this machine."""
    return key.dtype in _DTYPES and key.device.type == "cpu" and jit_available() and has_fma()


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention of the last T positions, each as if alone; see `attention.decode_attention`.

    Raises:
        ValueError: shapes or dtypes do not match, or ``window`` is not positive.
    """
    batch, heads, rows, width = query.shape
    groups, keys, width_out = value.shape[1:]
    fits = heads % groups == 0 and 0 < rows <= keys and query.dtype == key.dtype == value.dtype
    fits = fits and batch == len(value) == 1 and (window is None or window > 0)
    if not fits or key.shape != (1, groups, keys, width):
        shapes = ", ".join(str(list(each.shape)) for each in (query, key, value))
        raise ValueError(f"Invalid attention of {shapes}")
    query, key, value = (
        each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value)
    )
    mixed = query.new_empty(1, rows, heads, width_out)
    function, held = _function(heads // groups, width, width_out, query.dtype)
    threads = torch.get_num_threads() if key.numel() * rows > THREADED else 1
    room = room_for(keys)
    scores = torch.empty(threads, held, room, dtype=torch.float32)
    function(
        groups * rows,
        threads,
        *(query.data_ptr(), *query.stride()[1:3]),
        *(key.data_ptr(), *key.stride()[1:3]),
        *(value.data_ptr(), *value.stride()[1:3]),
        *(mixed.data_ptr(), scores.data_ptr(), room),
        *(groups, rows, keys, window or keys, bits_of(scale)),
    )
    return mixed


KEYS, SCORES, SEEN = slice(7, 13), slice(14, 16), slice(18, 20)
"""Places in the arguments (`JitFunction.given`) of `prepare`: address, head stride and row stride
of the keys and of the values; address and size of a score buffer; number of keys, and of a
window."""


def prepare(
    query: Tensor, mixed: Tensor, groups: int, scale: float
) -> tuple[JitFunction, int, list[int]]:
    """Return a kernel for queries at a fixed address, its heads per tile, and its fields.

    query [1, H, T, D] and mixed [1, T, H, E], bfloat16, the latter contiguous. The caller sets
    `KEYS`, `SCORES` and `SEEN` before each call; each thread needs a score buffer of `room_for`
    numbers per head of a tile.
    """
    heads, rows, width = query.shape[1:]
    function, held = _function(heads // groups, width, mixed.shape[3], query.dtype)
    place = query.data_ptr(), *query.stride()[1:3]
    keys = 0, 0, 0, 0, 0, 0, mixed.data_ptr(), 0, 0
    return function, held, [*place, *keys, groups, rows, 0, 0, bits_of(scale)]


def room_for(keys: int) -> int:
    """Return the size of a score buffer for ``keys`` keys, in numbers."""
    return (keys // LANES + 2) * LANES


@cache
def _function(each: int, width: int, width_out: int, dtype: torch.dtype) -> tuple[JitFunction, int]:
    """Compile the kernel for heads of a shape; return it and the heads computed at a time."""
    lanes = gcd(LANES, width, width_out)
    held = next(n for n in (4, 2, 1) if each % n == 0 and (n == 1 or n * width <= _HELD * lanes))
    is_half = dtype == torch.bfloat16
    has_dot = is_half and lanes == LANES and width % (2 * LANES) == 0
    has_dot = has_dot and has_cpu_feature(PAIRS_FEATURE)
    shape = _Shape(each, held, lanes, width // lanes, width_out // lanes, is_half, has_dot)
    return JitFunction(_FIELDS, shape.write), held


@dataclass(frozen=True, slots=True)
class _Shape:
    """The query heads that share a key head."""

    each: int
    """Their number."""
    held: int
    """Heads computed at a time, a tile: as many as fit in registers."""
    lanes: int
    parts: int
    """Vectors of a key."""
    parts_out: int
    """Vectors of a value."""
    is_half: bool
    """Whether the numbers are bfloat16."""
    has_dot: bool
    """Whether scores are computed by `Code.dot`."""

    def write(
        self, code: Code, fields: Mapping[str, ir.Value], block: ir.Value, thread: ir.Value
    ) -> None:
        """Emit the attention of one row over one key head."""
        work = _AttentionEmitter(self, code, fields, block, thread)
        with code.loop(code.index(self.each // self.held)) as tile:
            work.head = code.do.add(work.first, code.do.mul(tile.index, code.index(self.held)))
            largest = work.score()
            totals = work.exponentiate(largest)
            most = (2 * _OUT if registers() > LANES else _OUT) // self.held
            for at in range(0, self.parts_out, most):
                work.mix(totals, range(at, min(at + most, self.parts_out)))


class _AttentionEmitter:
    """Emits its parts: scores, softmax, weighted mean."""

    def __init__(
        self,
        shape: _Shape,
        code: Code,
        fields: Mapping[str, ir.Value],
        block: ir.Value,
        thread: ir.Value,
    ) -> None:
        self.shape, self.code, self.fields = shape, code, fields
        do = code.do
        self.row = do.udiv(block, fields["groups"])
        group = do.urem(block, fields["groups"])
        stop = do.add(do.sub(fields["keys"], fields["rows"]), do.add(self.row, code.index(1)))
        slides = do.icmp_unsigned(">", stop, fields["window"])
        self.seen = do.select(slides, fields["window"], stop)
        start = do.sub(stop, self.seen)
        self.key, self.value = (
            self._point(name, do.add(do.mul(group, head), do.mul(start, row)))
            for name, head, row in (
                ("key", fields["key_head"], fields["key_row"]),
                ("value", fields["value_head"], fields["value_row"]),
            )
        )
        self.first = self.head = do.mul(group, code.index(shape.each))
        mine = do.mul(thread, do.mul(code.index(shape.held), fields["room"]))
        self.scores = [
            code.at(fields["scores"], do.add(mine, do.mul(code.index(at), fields["room"])), FLOAT)
            for at in range(shape.held)
        ]

    @property
    def kind(self) -> ir.Type:
        return HALF if self.shape.is_half else FLOAT

    def score(self) -> list[ir.Value]:
        """Emit the scores of every key; return the largest score of each head."""
        code, do, shape = self.code, self.code.do, self.shape
        together = min(_KEYS, shape.lanes)
        asked = [self._score_parts(self._query(head)) for head in range(shape.held)]
        scale = code.splat(float_of(code, self.fields["scale"]), together)
        last = do.sub(self.seen, code.index(1))
        groups = do.udiv(do.add(self.seen, code.index(together - 1)), code.index(together))
        with code.loop(groups, *[code.floats(-inf, together)] * shape.held) as loop:
            first = do.mul(loop.index, code.index(together))
            products = list[list[ir.Value]]()
            for number in range(together):
                at = do.add(first, code.index(number))
                at = do.select(do.icmp_unsigned("<", at, last), at, last)
                self._fetch_value(at)
                key = code.at(self.key, do.mul(at, self.fields["key_row"]), self.kind)
                parts = self._score_parts(key)
                products.append([self._product(mine, parts) for mine in asked])
            for heads, place, most in zip(
                zip(*products, strict=True), self.scores, loop.carried, strict=True
            ):
                scores = do.fmul(code.sums(heads), scale)
                code.store(FLOAT, scores, place, first)
                loop.next.append(do.select(do.fcmp_ordered(">", scores, most), scores, most))
        for place in self.scores:  # the rest of the last vector
            code.store(FLOAT, code.floats(-inf), place, self.seen)
        return [code.largest(most) for most in loop.next]

    def _score_parts(self, start: ir.Value) -> list[ir.Value]:
        """Load a query or key as `_product` takes it."""
        code, found, parts = self.code, list[ir.Value](), range(self.shape.parts)
        for part, count in self._pairs(parts):
            if count == 1:
                found += self._load(start, range(part, part + 1))
                continue
            words = self._words(start, part)
            found += [words] if self.shape.has_dot else [code.high(words), code.low(words)]
        return found

    def _product(self, query: list[ir.Value], key: list[ir.Value]) -> ir.Value:
        """Multiply and add up parts, lane by lane."""
        multiply = self.code.dot if self.shape.has_dot else self.code.fma
        total = self.code.floats(0.0, self.shape.lanes)
        for mine, its in zip(query, key, strict=True):
            total = multiply(mine, its, total)
        return total

    def _fetch_value(self, key: ir.Value) -> None:
        """Prefetch a value, which `mix` reads soon."""
        code, shape = self.code, self.shape
        value = code.at(self.value, code.do.mul(key, self.fields["value_row"]), self.kind)
        for at in range(0, shape.parts_out * shape.lanes, _LINE // (2 if shape.is_half else 4)):
            code.prefetch(code.at(value, code.index(at), self.kind))

    def exponentiate(self, largest: list[ir.Value]) -> list[ir.Value]:
        """Replace scores by exp(score - largest); return their sums."""
        code, do = self.code, self.code.do
        peaks = [code.splat(peak) for peak in largest]
        vectors = do.udiv(do.add(self.seen, code.index(LANES - 1)), code.index(LANES))
        with code.loop(vectors, *[code.floats(0.0)] * len(peaks)) as loop:
            at = do.mul(loop.index, code.index(LANES))
            for place, peak, total in zip(self.scores, peaks, loop.carried, strict=True):
                power = code.exp(do.fsub(code.load(FLOAT, place, at, LANES), peak))
                code.store(FLOAT, power, place, at)
                loop.next.append(do.fadd(total, power))
        return [code.sum(total) for total in loop.next]

    def mix(self, totals: list[ir.Value], parts: range) -> None:
        """Sum these parts of the values, weighted by the scores, and store the mean."""
        code, do, shape = self.code, self.code.do, self.shape
        none = [code.floats(0.0, shape.lanes)] * (len(parts) * shape.held)
        blocks = do.udiv(do.add(self.seen, code.index(_BLOCK - 1)), code.index(_BLOCK))
        with code.loop(blocks, *none) as whole:
            first = do.mul(whole.index, code.index(_BLOCK))
            left, most = do.sub(self.seen, first), code.index(_BLOCK)
            count = do.select(do.icmp_unsigned("<", left, most), left, most)
            with code.loop(count, *none) as loop:
                key = do.add(first, loop.index)
                value = code.at(self.value, do.mul(key, self.fields["value_row"]), self.kind)
                mine = self._load(value, parts)
                sums = iter(loop.carried)
                for place in self.scores:
                    share = code.splat(code.load(FLOAT, place, key), shape.lanes)
                    loop.next += [code.fma(share, each, next(sums)) for each in mine]
            whole.next = [do.fadd(*pair) for pair in zip(whole.carried, loop.next, strict=True)]
        sums = iter(whole.next)
        for head, total in enumerate(totals):
            share = code.splat(do.fdiv(code.number(1.0), total), shape.lanes)
            row = do.mul(self.row, do.mul(self.fields["groups"], code.index(shape.each)))
            place = do.add(row, do.add(self.head, code.index(head)))
            width = code.index(shape.parts_out * shape.lanes)
            mixed = self._point("mixed", do.mul(place, width))
            self._store([do.fmul(next(sums), share) for _ in parts], mixed, parts)

    def _query(self, head: int) -> ir.Value:
        do, fields = self.code.do, self.fields
        number = do.add(self.head, self.code.index(head))
        return self._point(
            "query",
            do.add(do.mul(number, fields["query_head"]), do.mul(self.row, fields["query_row"])),
        )

    def _point(self, name: str, index: ir.Value) -> ir.Value:
        return self.code.at(self.fields[name], index, self.kind)

    def _load(self, start: ir.Value, parts: range) -> list[ir.Value]:
        """Load vectors of a row as float32: even and odd numbers of each two, if bfloat16."""
        code, lanes, loaded = self.code, self.shape.lanes, list[ir.Value]()
        for part, count in self._pairs(parts):
            if count == 2:
                words = self._words(start, part)
                loaded += code.low(words), code.high(words)
                continue
            single = code.load(self.kind, start, code.index(part * lanes), lanes)
            loaded.append(code.widen(single) if self.shape.is_half else single)
        return loaded

    def _words(self, start: ir.Value, part: int) -> ir.Value:
        """Load two vectors of bfloat16 as one of words."""
        code, lanes = self.code, self.shape.lanes
        halves = code.load(HALF, start, code.index(part * lanes), 2 * lanes)
        return code.do.bitcast(halves, ir.VectorType(WORD, lanes))

    def _store(self, means: list[ir.Value], start: ir.Value, parts: range) -> None:
        """Store what `_load` would load."""
        code, shape, rest = self.code, self.shape, iter(means)
        for part, count in self._pairs(parts):
            mean = next(rest) if count == 1 else code.interleave(next(rest), next(rest))
            kept = code.narrow(mean) if shape.is_half else mean
            code.store(self.kind, kept, start, code.index(part * shape.lanes))

    def _pairs(self, parts: range) -> Iterator[tuple[int, int]]:
        """Divide vectors of a row into those that are loaded together."""
        by = 2 if self.shape.is_half else 1
        for part in parts[::by]:
            yield part, min(by, parts.stop - part)
