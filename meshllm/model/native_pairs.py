"""Times the processor's instruction for pairs of bfloat16; knows nothing about models.

It multiplies two pairs and adds both products, so it does the work of two for float32. Some
processors take more than twice as long for it, though (Intel's that have another unit for products
of matrices, which a virtual machine may hide), and torch goes by what there is.
"""

from collections.abc import Mapping
from functools import cache
from time import perf_counter

import torch
from llvmlite import ir

from meshllm.model import native
from meshllm.model.native import Native, heard
from meshllm.model.native_code import FLOAT, LANES, PAIRS_FEATURE, WORD, Code

_SUMS = 16  # at a time: as many as it takes to be never without work
_ROUNDS, _TRIALS = 4096, 9
_CLEARLY = 1.25  # times as long; two that are as fast are not told apart by chance


@cache
def adds_pairs() -> bool:
    """Whether the processor can add pairs of bfloat16."""
    return native.can(PAIRS_FEATURE)


@cache
def pairs_pay() -> bool:
    """Whether that is about as soon as to add their products one by one, as float32, or sooner."""
    if not adds_pairs():
        return False
    numbers = torch.zeros((2 + _SUMS) * LANES, dtype=torch.float32)
    seconds = []
    with heard(None):
        for function in (_adder(in_pairs=False), _adder(in_pairs=True)):
            times = []
            for _ in range(_TRIALS):
                begin = perf_counter()
                function(1, 1, numbers.data_ptr(), _ROUNDS)
                times.append(perf_counter() - begin)
            seconds.append(min(times))
    single, pair = seconds
    return pair < _CLEARLY * single


def _adder(*, in_pairs: bool) -> Native:
    """Compile what adds the products of two vectors of pairs to some sums, again and again."""

    def write(code: Code, fields: Mapping[str, ir.Value], _block: ir.Value, _: ir.Value) -> None:
        numbers = fields["numbers"]
        one, other = (code.load(WORD, numbers, code.index(at * LANES), LANES) for at in range(2))
        places = [code.index((2 + at) * LANES) for at in range(_SUMS)]
        sums = [code.load(FLOAT, numbers, place, LANES) for place in places]
        with code.rounds(fields["rounds"], *sums) as loop:
            for total in loop.held:
                if in_pairs:
                    loop.then.append(code.dot(one, other, total))
                else:
                    high = code.fma(code.high(one), code.high(other), total)
                    loop.then.append(code.fma(code.low(one), code.low(other), high))
        for place, total in zip(places, loop.then, strict=True):
            code.store(FLOAT, total, numbers, place)

    return Native(("*numbers", "rounds"), write)
