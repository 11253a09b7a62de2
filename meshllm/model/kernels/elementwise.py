"""Elementwise sums, products, copies and table look-ups.

A unary function of bfloat16 is a look-up: the type has 65,536 values, so a table computed by torch
gives torch's bits for every function. Operands are strided: three sizes and the strides of each
operand are arguments, so a kernel is compiled once for all shapes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from math import gcd

import torch
from llvmlite import ir

from meshllm.model.kernels.ir import FLOAT, HALF, INT, LANES, Code
from meshllm.model.kernels.jit import JitFunction

DTYPES = {torch.bfloat16: HALF, torch.float32: FLOAT}
NUMBERS = 1 << 16
"""Values of bfloat16; a table has one entry for each, in the order of their bits."""

TARGET = slice(7, 10)
"""Place of the target's address and strides in the arguments of `copy_lines`."""
SOURCE = 11
"""Place of the source's address in the arguments of `copy_lines`."""

_DIMS = 3
_SIZES = "planes", "lines", "parts"


class ElementwiseOp(Enum):
    """An operation on one number of each operand, in float32; the result is rounded."""

    ADD = "fadd"
    SUBTRACT = "fsub"
    MULTIPLY = "fmul"
    COPY = "copy"
    LOOK_UP = "look up"
    """The second operand is a table; see `NUMBERS`."""


@dataclass(frozen=True, slots=True)
class StridedView:
    """A strided tensor in memory."""

    place: int
    """Its address, or a placeholder of the caller, which is passed through."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Operand:
    """What a kernel is specialised for, per operand."""

    kind: ir.Type
    is_dense: bool
    """Whether the numbers of a line are adjacent; else they are `step` apart."""


def call_for(
    task: ElementwiseOp, out: StridedView, *inputs: StridedView
) -> tuple[JitFunction, list[int]] | None:
    """Return a kernel and its fields, for one thread; None if the operands are not supported.

    ``out`` has the shape of the result; inputs are broadcast to it. A table is the last input; only
    its `place` is used.
    """
    table = inputs[-1:] if task is ElementwiseOp.LOOK_UP else ()
    operands = out, *inputs[: len(inputs) - len(table)]
    if any(each.dtype not in DTYPES for each in operands) or 0 in out.shape:
        return None
    if table and any(each.dtype != torch.bfloat16 for each in operands):
        return None
    dims = _collapse(out.shape, [_broadcast(each, out.shape) for each in operands])
    if len(dims) > _DIMS:
        return None
    dims = [(1, (0,) * len(operands))] * (_DIMS - len(dims)) + dims
    width, steps = dims[-1]
    dense = [step == 1 for step in steps]
    even = not table and dense[0] and all(step in (0, 1) for step in steps)
    lanes = gcd(LANES, width) if even else 1
    function = _function(
        task,
        lanes,
        tuple(
            _Operand(DTYPES[each.dtype], is_dense)
            for each, is_dense in zip(operands, dense, strict=True)
        ),
    )
    values = [dims[0][0], dims[1][0], width // lanes]
    for at, each in enumerate(operands):
        values += [each.place, *(stride[at] for _, stride in dims)]
    return function, [*values, *(each.place for each in table)]


def copy_lines(shape: Sequence[int], strides: Sequence[int]) -> tuple[JitFunction, list[int]]:
    """Return a kernel that copies bfloat16 [G, T, D] of these strides, the last 1, and its fields.

    The caller sets the source address, and the target's address and strides of G and T, in the
    arguments (`JitFunction.given`), at `SOURCE` and `TARGET`.
    """
    half = _Operand(HALF, is_dense=True)
    lanes = gcd(LANES, shape[2])
    sizes = *shape[:2], shape[2] // lanes
    return _function(ElementwiseOp.COPY, lanes, (half, half)), [
        *sizes,
        0,
        0,
        0,
        1,
        0,
        *strides[:2],
        1,
    ]


def _broadcast(view: StridedView, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a view broadcast to a shape; 0 for broadcast dimensions."""
    ahead = len(shape) - len(view.shape)
    strides = [
        0 if size == 1 else stride for size, stride in zip(view.shape, view.strides, strict=True)
    ]
    return (*[0] * ahead, *strides)


def _collapse(
    shape: Sequence[int], strides: Sequence[Sequence[int]]
) -> list[tuple[int, tuple[int, ...]]]:
    """Merge dimensions that are contiguous in all operands; return sizes with their strides."""
    dims: list[tuple[int, tuple[int, ...]]] = []
    for size, *steps in reversed(list(zip(shape, *strides, strict=True))):
        if size == 1:
            continue
        if dims:
            inner, below = dims[0]
            if all(step == inner * less for step, less in zip(steps, below, strict=True)):
                dims[0] = size * inner, below
                continue
        dims.insert(0, (size, tuple(steps)))
    return dims


@cache
def _function(task: ElementwiseOp, lanes: int, operands: tuple[_Operand, ...]) -> JitFunction:
    """Compile the kernel for vectors of ``lanes``; the first operand is the result."""
    names = [f"operand{at}" for at in range(len(operands))]
    fields = [*_SIZES]
    for name in names:
        fields += [f"*{name}", f"{name}_plane", f"{name}_line", f"{name}_step"]
    if task is ElementwiseOp.LOOK_UP:
        fields.append("*table")

    def write(code: Code, given: Mapping[str, ir.Value], block: ir.Value, _: ir.Value) -> None:
        do = code.do
        with code.loop(given["planes"]) as plane, code.loop(given["lines"]) as line:
            starts = []
            for name, operand in zip(names, operands, strict=True):
                above = do.mul(plane.index, given[f"{name}_plane"])
                first = do.add(above, do.mul(line.index, given[f"{name}_line"]))
                starts.append(code.at(given[name], first, operand.kind))
            with code.loop(given["parts"]) as part:

                def place(at: int) -> ir.Value:
                    by = code.index(lanes) if operands[at].is_dense else given[f"{names[at]}_step"]
                    return do.mul(part.index, by)

                numbers = []
                for at, operand in enumerate(operands[1:], start=1):
                    count = lanes if operand.is_dense else 1
                    loaded = code.load(operand.kind, starts[at], place(at), count)
                    if count < lanes:
                        one = do.extract_element(loaded, code.index(0))
                        loaded = code.splat(one, lanes)
                    numbers.append(loaded)
                kinds = [operand.kind for operand in operands]
                result = _compute(code, task, kinds, numbers, given.get("table"))
                code.store(kinds[0], result, starts[0], place(0))

    return JitFunction(fields, write)


def _compute(
    code: Code,
    task: ElementwiseOp,
    kinds: Sequence[ir.Type],
    numbers: Sequence[ir.Value],
    table: ir.Value | None,
) -> ir.Value:
    """Emit the operation on vectors of numbers."""
    do = code.do
    if task is ElementwiseOp.LOOK_UP:
        bits = do.extract_element(numbers[0], code.index(0))
        return code.load(HALF, table, do.zext(bits, INT), 1)
    if task is ElementwiseOp.COPY and kinds[0] == kinds[1]:
        return numbers[0]
    wide = [
        code.widen(number) if kind == HALF else number
        for kind, number in zip(kinds[1:], numbers, strict=True)
    ]
    if task is ElementwiseOp.COPY:
        (result,) = wide
    else:
        combine: Callable[..., ir.Value] = getattr(do, task.value)
        result = combine(*wide)
    return code.narrow(result) if kinds[0] == HALF else result
