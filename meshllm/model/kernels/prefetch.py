"""How weights are read: in which order by several threads, and with which prefetches.

Theory of operation
-------------------
Each thread claims a run of adjacent blocks of weights, so that it reads one long stream. Where
threads take turns at blocks of 32 KiB, the hardware prefetcher of each starts again at every block,
beyond which it has fetched what another thread reads: two threads of an AMD EPYC of the Zen 4 kind
read bf16 weights 1.2 to 1.6 times as fast in runs of half a MiB (`python -m tests.bench.step`).

A single row is bound by memory bandwidth. Of many rows only some fit their sums in registers, so a
kernel makes several passes over each block of weights. Without prefetch the first pass would wait
for memory, and memory would idle during the others. So every pass prefetches its share of the next
block, which spreads the loads evenly and overlaps them with arithmetic. A single pass prefetches a
fixed distance ahead of itself.

With one or two rows there is hardly any arithmetic, and on some CPUs the hardware prefetcher reads
a stream by itself: there prefetches only compete with it for the buffers of outstanding loads (an
AMD EPYC of the Zen 4 kind reads bf16 weights at 33 GB/s without them, at 22 with them; one of the
Zen 5 kind at 38 and 43, and int4 weights at 30 and 40). So each kernel is measured once per machine
with its own weights, see `reading_times`. None of this changes a result.
"""

from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from llvmlite import ir

from meshllm.model.kernels import jit
from meshllm.model.kernels.ir import BYTE, Code
from meshllm.model.kernels.measured import Times, cpu_seconds, measure_once, one_thread

LINE = 64  # bytes of a cache line; some CPUs fetch two at a time
AHEAD = 1 << 14  # bytes; prefetch distance of weights that are read in a single pass
FEW = 2
"""Rows up to which a stream of weights may be read without prefetches."""
MEASURED_BYTES = 64 << 20
"""Of the weights of a measurement: more than most CPU caches hold."""

_ROUNDS = 6
_RUN = 1 << 19  # bytes that a thread reads in a stream, if a matrix is that large
_RUNS = 4  # of each thread at least, so that a delayed one delays the others little

Multiply = Callable[[int], object]
"""Multiplies a row by one of the matrices of a measurement, given its number."""


def claim(blocks: int, size: int, threads: int) -> int:
    """Return how many adjacent blocks, of ``size`` bytes each, a thread should claim at once."""
    return max(1, min(_RUN // size, blocks // (_RUNS * threads)))


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


def reading_times(kernel: str, name: str, ways: Mapping[str, Multiply], count: int) -> Times:
    """Return the times of ways to read weights, measured once per machine.

    Each multiplies a row by one of ``count`` matrices, together of `MEASURED_BYTES` or more.
    """
    return measure_once((kernel, *ways), name, partial(_measure, ways, count))


def _measure(ways: Mapping[str, Multiply], count: int) -> Times:
    """Multiply by all matrices in each way, in turns; return the median CPU time of one."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    with torch.inference_mode(), one_thread(), jit.observe_calls(None):  # these are of no step
        for _ in range(1 + _ROUNDS):  # the first one compiles
            for way, multiply in ways.items():
                times[way] += [cpu_seconds(partial(multiply, each)) for each in range(count)]
    return {way: median(each[count:]) for way, each in times.items()}
