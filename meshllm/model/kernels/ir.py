"""Emits kernels in LLVM IR.

The IR fixes the order of summation: vectors of `LANES` numbers, each lane on its own, products and
sums rounded once. LLVM does not reorder them, so results have the same bits on every CPU, whatever
the width of its registers. A NaN stays a NaN, perhaps with another payload; `Code.dot` has one more
exception.
"""

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from llvmlite import ir

LANES = 16  # float32 values of a vector: an AVX-512 register; narrower CPUs take it in parts
BYTE, HALF, WORD, INT = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT = ir.FloatType()
FLOATS = ir.VectorType(FLOAT, LANES)
PAIRS_FEATURE = "avx512bf16"
"""LLVM's name of the CPU feature that `Code.dot` needs."""
ROUND = 1.5 * 2**23
"""Added to a much smaller number, it leaves the nearest integer in the lowest bits of the sum."""

_LOG2_E = 1.4426950408889634
_LN_2 = 0.693359375, -2.12194440e-4  # in two parts, the first of few bits (Cephes, expf.c)
_SERIES = 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0
_LEAST = -87.0  # smallest argument of `Code.exp`; lower ones are clamped to it


@dataclass(slots=True)
class Loop:
    """The index and the loop-carried values of a loop."""

    index: ir.Value
    """The iteration, from 0."""
    carried: list[ir.Value]
    """Carried values at the start of an iteration."""
    next: list[ir.Value] = field(default_factory=list[ir.Value])
    """The same at its end, to be set by the body; after the loop, those of the last iteration."""


class _Halves(ir.Type):  # type: ignore[misc]  # llvmlite is untyped
    """A vector of pairs of bfloat16, a type that llvmlite lacks."""

    def _to_string(self) -> str:
        return f"<{2 * LANES} x bfloat>"


_HALVES = _Halves()  # a singleton: llvmlite compares such types by identity


class Code:
    """Emits the body of a kernel."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.do = builder

    def index(self, value: int) -> ir.Constant:
        """Return a constant of 64 bits."""
        return ir.Constant(INT, value)

    def floats(self, value: float, lanes: int = LANES) -> ir.Constant:
        """Return a vector with a constant, rounded to float32, in every lane."""
        rounded = struct.unpack("f", struct.pack("f", value))[0]
        return ir.Constant(ir.VectorType(FLOAT, lanes), [rounded] * lanes)

    def number(self, value: float) -> ir.Constant:
        """Return a float32 constant."""
        return ir.Constant(FLOAT, value)

    def at(self, start: ir.Value, index: ir.Value, kind: ir.Type) -> ir.Value:
        """Return the address of element ``index`` of the array at ``start``."""
        return self.do.gep(start, [index], source_etype=kind)

    def load(self, kind: ir.Type, start: ir.Value, index: ir.Value, lanes: int = 0) -> ir.Value:
        """Load element ``index`` of the array at ``start``, or ``lanes`` elements from there."""
        wanted = ir.VectorType(kind, lanes) if lanes else kind
        return self.do.load(self.at(start, index, kind), align=_bytes(kind), typ=wanted)

    def store(self, kind: ir.Type, value: ir.Value, start: ir.Value, index: ir.Value) -> None:
        """Store a value or a vector at element ``index`` of the array at ``start``."""
        self.do.store(value, self.at(start, index, kind), align=_bytes(kind))

    def prefetch(self, place: ir.Value, *, is_far: bool = False) -> None:
        """Prefetch the cache line at ``place``, which need not be mapped memory.

        Use ``is_far``, the L2 cache, for what is needed later.
        """
        module, name, flag = self.do.module, "llvm.prefetch.p0", ir.Constant(WORD, 0)
        kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(), WORD, WORD, WORD])
        known = module.globals.get(name) or ir.Function(module, kind, name)
        near, data = ir.Constant(WORD, 2 if is_far else 3), ir.Constant(WORD, 1)
        self.do.call(known, [place, flag, near, data])

    def splat(self, value: ir.Value, lanes: int = LANES) -> ir.Value:
        """Broadcast a number to every lane."""
        kind = ir.VectorType(value.type, lanes)
        one = self.do.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(WORD, 0))
        nowhere = ir.Constant(kind, ir.Undefined)
        return self.do.shuffle_vector(one, nowhere, _mask([0] * lanes))

    def fma(self, left: ir.Value, right: ir.Value, added: ir.Value) -> ir.Value:
        """Multiply and add, rounded once (IEEE 754-2019, 5.4.1)."""
        return self._call("fma", left, right, added)

    def dot(self, pairs: ir.Value, others: ir.Value, added: ir.Value) -> ir.Value:
        """Multiply pairs of bfloat16, given as 32-bit words, and add both products.

        Bit for bit the `fma` of the higher halves and then of the lower ones, except that denormals
        (below 2^-126) count as 0 (Intel, Architecture Instruction Set Extensions, VDPBF16PS). Only
        for CPUs with the `PAIRS_FEATURE`.
        """
        module, name = self.do.module, "llvm.x86.avx512bf16.dpbf16ps.512"
        known = module.globals.get(name) or ir.Function(
            module, ir.FunctionType(FLOATS, [FLOATS, _HALVES, _HALVES]), name
        )
        both = [self.do.bitcast(each, _HALVES) for each in (pairs, others)]
        return self.do.call(known, [added, *both])

    def multiply_pairs(
        self, pairs: ir.Value, others: ir.Value, added: ir.Value, *, at_once: bool
    ) -> ir.Value:
        """Multiply pairs of int16 and add both products, in int32.

        Nothing is rounded, so the result does not depend on the form. With ``at_once`` it matches
        the x86 instructions for pairs; other CPUs have instructions that multiply and add one.
        """
        do, wide = self.do, ir.VectorType(WORD, LANES)
        if at_once:
            long = ir.VectorType(WORD, 2 * LANES)
            products = do.mul(do.sext(pairs, long), do.sext(others, long))
            return do.add(added, do.add(*self.deinterleave(products)))
        for one, other in zip(self.deinterleave(pairs), self.deinterleave(others), strict=True):
            added = do.add(added, do.mul(do.sext(one, wide), do.sext(other, wide)))
        return added

    def deinterleave(self, vector: ir.Value) -> list[ir.Value]:
        """Split a vector into its even and its odd lanes."""
        lanes = vector.type.count
        parts = range(0, lanes, 2), range(1, lanes, 2)
        return [self.do.shuffle_vector(vector, vector, _mask(part)) for part in parts]

    def interleave(self, even: ir.Value, odd: ir.Value) -> ir.Value:
        """Combine the elements of even and of odd index."""
        lanes = even.type.count
        mask = _mask(
            [at for pair in zip(range(lanes), range(lanes, 2 * lanes), strict=True) for at in pair]
        )
        return self.do.shuffle_vector(even, odd, mask)

    def low(self, words: ir.Value) -> ir.Value:
        """Convert the lower halves of words, which are bfloat16, to float32."""
        sixteen = ir.Constant(words.type, [16] * words.type.count)
        return self.do.bitcast(self.do.shl(words, sixteen), ir.VectorType(FLOAT, words.type.count))

    def high(self, words: ir.Value) -> ir.Value:
        """Convert the higher halves of words, which are bfloat16, to float32."""
        mask = ir.Constant(words.type, [0xFFFF0000] * words.type.count)
        return self.do.bitcast(self.do.and_(words, mask), ir.VectorType(FLOAT, words.type.count))

    def transpose(self, lines: Sequence[ir.Value]) -> list[ir.Value]:
        """Transpose a square matrix: as many vectors as each has lanes, a power of 2."""
        lanes, lines = len(lines), list(lines)
        apart = lanes // 2
        while apart:
            for at in range(lanes):
                if not at & apart:
                    both = lines[at], lines[at + apart]
                    ups = [lane + (lanes - apart) * bool(lane & apart) for lane in range(lanes)]
                    lines[at] = self.do.shuffle_vector(*both, _mask(ups))
                    downs = [up + apart for up in ups]
                    lines[at + apart] = self.do.shuffle_vector(*both, _mask(downs))
            apart //= 2
        return lines

    def sqrt(self, number: ir.Value) -> ir.Value:
        """Return the square root, rounded once."""
        return self._call("sqrt", number)

    def _call(self, name: str, *values: ir.Value) -> ir.Value:
        """Call an LLVM intrinsic for values of one type."""
        kind, module = values[0].type, self.do.module
        full = f"llvm.{name}." + (f"v{kind.count}f32" if kind != FLOAT else "f32")
        known = module.globals.get(full) or ir.Function(
            module, ir.FunctionType(kind, [kind] * len(values)), full
        )
        return self.do.call(known, values)

    def exp(self, x: ir.Value) -> ir.Value:
        """Return e to the power of numbers <= 0, within 3 ulp (Cephes, expf.c); NaN stays NaN."""
        do, given, least = self.do, x, self.floats(_LEAST)
        x = do.select(do.fcmp_ordered("<", x, least), least, x)
        shifted = self.fma(x, self.floats(_LOG2_E), self.floats(ROUND))
        whole = do.fsub(shifted, self.floats(ROUND))
        for part in _LN_2:
            x = self.fma(whole, self.floats(-part), x)
        power = self.floats(_SERIES[0])
        for term in _SERIES[1:]:
            power = self.fma(power, x, self.floats(term))
        words = ir.VectorType(WORD, LANES)
        twos = do.shl(do.bitcast(shifted, words), ir.Constant(words, [23] * LANES))
        raised = do.bitcast(do.add(do.bitcast(power, words), twos), FLOATS)
        return do.select(do.fcmp_unordered("uno", given, given), given, raised)

    def halves(self, vector: ir.Value) -> list[ir.Value]:
        """Split a vector into its lower and its upper half."""
        lanes = vector.type.count // 2
        parts = range(lanes), range(lanes, 2 * lanes)
        return [self.do.shuffle_vector(vector, vector, _mask(part)) for part in parts]

    def sum(self, vector: ir.Value) -> ir.Value:
        """Sum the lanes in a tree, halves first; their number is a power of 2."""
        while vector.type.count > 1:
            vector = self.do.fadd(*self.halves(vector))
        return self.do.extract_element(vector, ir.Constant(WORD, 0))

    def sums(self, vectors: Sequence[ir.Value]) -> ir.Value:
        """Sum the lanes of each vector as `sum` does; their number is a power of 2."""
        vectors = list(vectors)
        lanes = size = vectors[0].type.count  # `size` lanes are of one vector
        while size > 1:
            starts = range(0, lanes, size)
            others = vectors[1::2] or vectors
            pairs = list(zip(vectors[::2], others, strict=True))
            if len(vectors) > 1:
                starts = range(0, 2 * lanes, size)
            masks = [
                _mask([start + at for start in starts for at in half])
                for half in (range(size // 2), range(size // 2, size))
            ]
            vectors = [
                self.do.fadd(*(self.do.shuffle_vector(*pair, mask) for mask in masks))
                for pair in pairs
            ]
            lanes, size = len(starts) * size // 2, size // 2
        return vectors[0]

    def widen(self, bits: ir.Value) -> ir.Value:
        """Convert bfloat16, given as integers, to float32."""
        lanes = bits.type.count
        wide = self.do.zext(bits, ir.VectorType(WORD, lanes))
        high = self.do.shl(wide, ir.Constant(wide.type, [16] * lanes))
        return self.do.bitcast(high, ir.VectorType(FLOAT, lanes))

    def narrow(self, values: ir.Value) -> ir.Value:
        """Round float32 to bfloat16, returned as integers; ties go to even."""
        lanes = values.type.count
        kind = ir.VectorType(WORD, lanes)
        bits = self.do.bitcast(values, kind)
        sixteen = ir.Constant(kind, [16] * lanes)
        odd = self.do.and_(self.do.lshr(bits, sixteen), ir.Constant(kind, [1] * lanes))
        rounded = self.do.add(self.do.add(bits, ir.Constant(kind, [0x7FFF] * lanes)), odd)
        return self.do.trunc(self.do.lshr(rounded, sixteen), ir.VectorType(HALF, lanes))

    def int_to_float(self, numbers: ir.Value) -> ir.Value:
        """Convert signed integers of at most 32 bits to float32, rounded once."""
        return self.do.sitofp(numbers, ir.VectorType(FLOAT, numbers.type.count))

    def largest(self, vector: ir.Value) -> ir.Value:
        """Return the largest lane, none of which is NaN; their number is a power of 2."""
        while vector.type.count > 1:
            one, other = self.halves(vector)
            vector = self.do.select(self.do.fcmp_ordered(">", one, other), one, other)
        return self.do.extract_element(vector, ir.Constant(WORD, 0))

    def reduce_umax(self, words: ir.Value) -> ir.Value:
        """Return the largest lane, as unsigned integers; their number is a power of 2."""
        while words.type.count > 1:
            one, other = self.halves(words)
            words = self.umax(one, other)
        return self.do.extract_element(words, ir.Constant(WORD, 0))

    def umax(self, one: ir.Value, other: ir.Value) -> ir.Value:
        """Return the larger of two unsigned integers, in each lane."""
        return self.do.select(self.do.icmp_unsigned(">", one, other), one, other)

    @contextmanager
    def loop(self, count: ir.Value, *start: ir.Value) -> Iterator[Loop]:
        """Emit a loop of ``count`` iterations, at least 1; ``start`` are its carried values."""
        do, before = self.do, self.do.block
        body = do.append_basic_block("round")
        do.branch(body)
        do.position_at_end(body)
        index, carried = do.phi(INT), [do.phi(value.type) for value in start]
        loop = Loop(index, carried)
        yield loop
        last, following = do.block, do.add(index, self.index(1))
        index.add_incoming(self.index(0), before)
        index.add_incoming(following, last)
        for phi, first, last_value in zip(carried, start, loop.next, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(last_value, last)
        behind = do.append_basic_block("behind")
        do.cbranch(do.icmp_unsigned("<", following, count), body, behind)
        do.position_at_end(behind)


def bits_of(value: float) -> int:
    """Return the bits of a float32, to be passed as a field."""
    return int(struct.unpack("I", struct.pack("f", value))[0])


def float_of(code: Code, bits: ir.Value) -> ir.Value:
    """Read a field that was made by `bits_of`."""
    return code.do.bitcast(code.do.trunc(bits, WORD), FLOAT)


def _mask(places: Sequence[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(WORD, len(places)), list(places))


def _bytes(kind: ir.Type) -> int:
    return 4 if kind == FLOAT else kind.width // 8
