"""Software prefetch of weights.

Theory of operation
-------------------
A single row is bound by memory bandwidth. Of many rows only some fit their sums in registers, so a
kernel makes several passes over each block of weights. Without prefetch the first pass would wait
for memory, and memory would idle during the others. So every pass prefetches its share of the next
block, which spreads the loads evenly and overlaps them with arithmetic. A single pass prefetches a
fixed distance ahead of itself.
"""

from typing import NamedTuple

from llvmlite import ir

from meshllm.model.kernels.ir import BYTE, Code

LINE = 64  # bytes of a cache line; some CPUs fetch two at a time
AHEAD = 1 << 14  # bytes; prefetch distance of weights that are read in a single pass


class PassInfo(NamedTuple):
    """One of several passes over the same weights, all of the same number of steps."""

    number: ir.Value
    min_count: int
    """Lower bound of the number of passes."""
    steps: ir.Value


def prefetch_share(
    code: Code, following: ir.Value, lines: int, one: PassInfo, step: ir.Value
) -> None:
    """Prefetch a step's share of the weights at ``following``, ``lines`` cache lines per step.

    ``lines`` is a power of two. The weights may lie beyond mapped memory.
    """
    do, share = code.do, max(1, lines // (1 << one.min_count.bit_length() - 1))
    done = do.add(do.mul(one.number, one.steps), step)
    has_share = do.icmp_unsigned("<", one.number, code.index(lines // share))
    at = do.select(has_share, do.mul(done, code.index(share * LINE)), code.index(0))
    for line in range(share):
        place = do.add(at, code.index(line * LINE))
        code.prefetch(code.at(following, place, BYTE), is_far=True)
