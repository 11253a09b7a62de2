"""Root mean square norm of rows, compiled; knows no model.

What stock code does in six operations, with their roundings: to bfloat16 before the weights are
multiplied with, and behind (arXiv:1910.07467). Squares are added in torch's order, where `_ROW`
divides the width: number k to sum k modulo `_ROW`, sixteen times, then these sums to those before,
and in the end one after the other (torch, SumKernel.cpp).
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from math import gcd

import torch
from llvmlite import ir
from torch import Tensor

from meshllm.model.native import Native
from meshllm.model.native_code import HALF, LANES, WORD, Code, bits_of, float_of

_ROW = 2 * LANES  # numbers that torch adds at a time: 4 vectors of 8
_STEP = 16  # times that it does so before it adds to what came before
_WIDEST = _ROW * _STEP * _STEP  # of what is added so; of more, torch adds more levels

_FIELDS = "*rows", "*weight", "*normed", "eps"


def norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm rows [..., D], bfloat16 and contiguous, and multiply with ``weight`` [D].

    Raises:
        ValueError: the rows are longer or shorter than the weights.
    """
    (width,) = weight.shape
    if rows.shape[-1] != width:
        raise ValueError(f"rows of {rows.shape[-1]} numbers for {width} weights")
    normed = torch.empty_like(rows)
    _function(width)(
        rows.numel() // width,
        1,
        *(rows.data_ptr(), weight.data_ptr(), normed.data_ptr(), bits_of(eps)),
    )
    return normed


@cache
def _function(width: int) -> Native:
    """Compile it for rows of a width."""
    lanes = gcd(LANES, width)

    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, _: ir.Value) -> None:
        do = code.do
        top = do.mul(block, code.index(width))

        def load(name: str, start: ir.Value, part: ir.Value) -> ir.Value:
            at = do.add(start, do.mul(part, code.index(lanes)))
            return code.widen(code.load(HALF, fields[name], at, lanes))

        if width % _ROW == 0 and width <= _WIDEST:
            total = _add_squares(code, partial(load, "rows", top), width // _ROW)
        else:
            with code.rounds(code.index(width // lanes), code.floats(0.0, lanes)) as loop:
                x = load("rows", top, loop.index)
                loop.then = [code.fma(x, x, loop.held[0])]
            total = code.sum(loop.then[0])
        mean = do.fdiv(total, code.number(float(width)))
        root = code.root(do.fadd(mean, float_of(code, fields["eps"])))
        share = code.spread(do.fdiv(code.number(1.0), root), lanes)
        with code.rounds(code.index(width // lanes)) as loop:
            scaled = do.fmul(load("rows", top, loop.index), share)
            rounded = code.widen(code.narrow(scaled))
            product = do.fmul(rounded, load("weight", code.index(0), loop.index))
            at = do.add(top, do.mul(loop.index, code.index(lanes)))
            code.store(HALF, code.narrow(product), fields["normed"], at)

    return Native(_FIELDS, write, held=["weight"])


def _add_squares(code: Code, load: Callable[[ir.Value], ir.Value], rows: int) -> ir.Value:
    """Add up the squares of so many times `_ROW` numbers, of which ``load`` gives `LANES`."""
    do, zeros = code.do, [code.floats(0.0)] * 2

    def add(start: ir.Value, count: int) -> list[ir.Value]:
        with code.rounds(code.index(count), *zeros) as loop:
            at = do.mul(do.add(start, loop.index), code.index(2))
            numbers = [load(do.add(at, code.index(half))) for half in range(2)]
            loop.then = [code.fma(x, x, total) for x, total in zip(numbers, loop.held, strict=True)]
        return loop.then

    steps, rest = divmod(rows, _STEP)
    sums = zeros
    if steps:
        with code.rounds(code.index(steps), *zeros) as loop:
            found = add(do.mul(loop.index, code.index(_STEP)), _STEP)
            loop.then = [do.fadd(*both) for both in zip(loop.held, found, strict=True)]
        sums = loop.then
    if rest:
        found = add(code.index(steps * _STEP), rest)
        sums = [do.fadd(*both) for both in zip(found, sums, strict=True)]
    first, *others = [half for each in sums for half in code.halves(each)]
    for half in others:
        first = do.fadd(first, half)
    total, *numbers = [do.extract_element(first, ir.Constant(WORD, at)) for at in range(LANES // 2)]
    for number in numbers:
        total = do.fadd(total, number)
    return total
