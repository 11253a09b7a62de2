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
AMD EPYC of the Zen 4 kind reads bf16 weights at 33 GB/s without them, at 22 with them). On others
they help (Zen 5: 43 GB/s with them, 38 without; int4 weights 40 and 30). So each kernel is measured
once per machine and number of threads with its own weights, see `reading_times`; that of bf16 also
with several rows, which may be read as one stream or as four. None of this changes a result.
"""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from llvmlite import ir

from meshllm.model.kernels import jit
from meshllm.model.kernels.ir import BYTE, Code
from meshllm.model.kernels.measured import Times, measure_once, rounds_in_time, seconds_of

LINE = 64  # bytes of a cache line; some CPUs fetch two at a time
AHEAD = 1 << 14  # bytes; prefetch distance of weights that are read in a single pass
FEW = 2
"""Rows up to which a stream of weights may be read without prefetches."""
PLAIN, PREFETCHED = "plain", "prefetched"
"""Ways to read a stream of weights."""

_ROUNDS = 6
_RUN = 1 << 19  # bytes that a thread reads in a stream, if a matrix is that large
_RUNS = 4  # of each thread at least, so that a delayed one delays the others little

Prepare = Callable[[], tuple[int, Callable[[str, int], object]]]
"""Makes matrices that together no CPU cache holds. Returns their number, and what multiplies rows
in a way to read weights by one of them."""


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


def prefetches(what: str, shape: str, threads: int, prepare: Prepare) -> bool:
    """Whether prefetches make a kernel faster with a single row; about as fast, either is right."""
    times = reading_times(what, shape, threads, (PLAIN, PREFETCHED), prepare)
    return times[PREFETCHED] < times[PLAIN]


def reading_times(
    what: str, shape: str, threads: int, ways: Sequence[str], prepare: Prepare
) -> Times:
    """Return the times of ways to read weights, measured once per machine and number of threads.

    ``threads`` is how many torch uses now.
    """
    return measure_once(what, shape, threads, partial(_measure, threads, ways, prepare)).seconds


def _measure(threads: int, ways: Sequence[str], prepare: Prepare) -> Times:
    """Multiply by all matrices in each way, in turns; return the time of one.

    Of a single thread it is the median, in CPU time. Of several it is the shortest, since other
    programs only make them slower.
    """
    times: dict[str, list[float]] = {way: [] for way in ways}
    with torch.inference_mode(), jit.observe_calls(None):  # these are of no step
        count, multiply = prepare()
        for _ in rounds_in_time(_ROUNDS):
            for way, seconds in times.items():
                calls = (partial(multiply, way, each) for each in range(count))
                seconds += [seconds_of(call, threads) for call in calls]
    typical = median if threads == 1 else min
    return {way: typical(each[count:]) for way, each in times.items()}
