"""Asks for weights before a function wants them.

Theory of operation
-------------------
One row waits for the weights to come from memory; of many rows only some have room for their sums
in the processor's registers, so each block of weights is passed over several times. Only the first
pass over it would wait for memory, and memory would wait for all others. So every pass asks for its
share of what is passed over next, and the weights come evenly, behind the sums. A single pass asks
for what lies a little ahead of itself.
"""

from typing import NamedTuple

from llvmlite import ir

from meshllm.model.kernels.ir import BYTE, Code

LINE = 64  # bytes that a processor's cache reads at a time; some read two
AHEAD = 1 << 14  # bytes that weights are on their way which are passed over once


class Pass(NamedTuple):
    """One of several, each of as many steps, over the same weights."""

    number: ir.Value
    least: int
    """Passes that there are, at least."""
    steps: ir.Value


def ask(code: Code, following: ir.Value, lines: int, one: Pass, step: ir.Value) -> None:
    """Ask in a step for its share of what lies from ``following`` on, ``lines`` for each step.

    ``lines`` is a power of two. Memory that does not exist may be asked for.
    """
    do, share = code.do, max(1, lines // (1 << one.least.bit_length() - 1))
    done = do.add(do.mul(one.number, one.steps), step)
    has_share = do.icmp_unsigned("<", one.number, code.index(lines // share))
    at = do.select(has_share, do.mul(done, code.index(share * LINE)), code.index(0))
    for line in range(share):
        place = do.add(at, code.index(line * LINE))
        code.fetch(code.at(following, place, BYTE), is_far=True)
