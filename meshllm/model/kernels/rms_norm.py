"""Fused RMS norm of rows (arXiv:1910.07467).

Replaces six operations of stock code, with their roundings to bfloat16: before and after the
multiplication with the weights.
"""

from collections.abc import Mapping
from functools import cache
from math import gcd

import torch
from llvmlite import ir
from torch import Tensor

from meshllm.model.kernels.ir import HALF, LANES, Code, bits_of, float_of
from meshllm.model.kernels.jit import JitFunction

_ALONE = 512  # rows that one thread normalises as fast as several

_FIELDS = "*rows", "*weight", "*normed", "eps"


def norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise rows [..., D], bfloat16 and contiguous, and multiply by ``weight`` [D].

    A row has the same bits in any batch.

    Raises:
        ValueError: the rows and the weights differ in length.
    """
    (width,) = weight.shape
    if rows.shape[-1] != width:
        raise ValueError(f"rows of {rows.shape[-1]} values for {width} weights")
    normed, count = torch.empty_like(rows), rows.numel() // width
    _function(width)(
        count,
        torch.get_num_threads() if count > _ALONE else 1,
        *(rows.data_ptr(), weight.data_ptr(), normed.data_ptr(), bits_of(eps)),
    )
    return normed


@cache
def _function(width: int) -> JitFunction:
    """Compile the kernel for rows of a width."""
    lanes = gcd(LANES, width)

    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, _: ir.Value) -> None:
        do = code.do
        top = do.mul(block, code.index(width))

        def load(name: str, start: ir.Value, part: ir.Value) -> ir.Value:
            at = do.add(start, do.mul(part, code.index(lanes)))
            return code.widen(code.load(HALF, fields[name], at, lanes))

        with code.loop(code.index(width // lanes), code.floats(0.0, lanes)) as loop:
            x = load("rows", top, loop.index)
            loop.next = [code.fma(x, x, loop.carried[0])]
        total = code.sum(loop.next[0])
        mean = do.fdiv(total, code.number(float(width)))
        root = code.sqrt(do.fadd(mean, float_of(code, fields["eps"])))
        share = code.splat(do.fdiv(code.number(1.0), root), lanes)
        with code.loop(code.index(width // lanes)) as loop:
            scaled = do.fmul(load("rows", top, loop.index), share)
            rounded = code.widen(code.narrow(scaled))
            product = do.fmul(rounded, load("weight", code.index(0), loop.index))
            at = do.add(top, do.mul(loop.index, code.index(lanes)))
            code.store(HALF, code.narrow(product), fields["normed"], at)

    return JitFunction(_FIELDS, write, held=["weight"])
