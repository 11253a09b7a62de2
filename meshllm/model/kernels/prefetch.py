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
AMD EPYC of the Zen 4 kind reads 33 GB/s without them, 22 with them). So that is measured once per
machine, unless all matrices are small. None of this changes a result.
"""

import time
from collections.abc import Mapping
from functools import cache
from statistics import median
from typing import NamedTuple

import llvmlite
import torch
from llvmlite import ir

from meshllm.model.json_cache import load_cached, locked, store_cached
from meshllm.model.kernels import jit
from meshllm.model.kernels.ir import BYTE, LANES, WORD, Code

LINE = 64  # bytes of a cache line; some CPUs fetch two at a time
AHEAD = 1 << 14  # bytes; prefetch distance of weights that are read in a single pass
NARROW = 768
"""Inputs below which the matrices of a model stay in a CPU cache, unless they have `_LARGE` or more
numbers, as an LM head may."""
FEW = 2
"""Rows up to which a stream of weights may be read without prefetches."""

_LARGE = 2 << 20
_BYTES = 64 << 20  # of memory that is read to measure: more than most CPU caches hold
_PART = 2 << 20  # bytes that are read at a time
_ROUNDS = 3
_GAIN = 0.95  # of the time; with a smaller gain, prefetches are left out
_RUN = 1 << 19  # bytes that a thread reads in a stream, if a matrix is that large
_RUNS = 4  # of each thread at least, so that a delayed one delays the others little


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


def helps_to_read(outputs: int, inputs: int) -> bool:
    """Whether prefetches make this CPU read a bf16 matrix faster; a small one needs none."""
    return (inputs >= NARROW or outputs * inputs >= _LARGE) and helps()


@cache
def helps() -> bool:
    """Whether prefetches make this CPU read a stream faster, measured once per machine."""
    folder, key = jit.private_folder(), ("prefetch", llvmlite.__version__, *jit.machine())
    if folder is None:
        return _measure()
    with locked(folder, *key):  # of two processes, one measures
        known = load_cached(folder, *key)
        if not isinstance(known, bool):
            known = _measure()
            store_cached(folder, known, *key)
    return known


def _measure() -> bool:
    """Read memory with and without prefetches in turns; compare the CPU time of this thread.

    Between two reads of a part all others are read, so that none is in the CPU cache.
    """
    memory = torch.ones(_BYTES, dtype=torch.uint8)
    found = torch.empty(LANES, dtype=torch.int32)
    times: dict[bool, list[float]] = {False: [], True: []}
    with jit.observe_calls(None):  # these are part of no step
        for turn in range(_ROUNDS):
            for number, start in enumerate(range(0, _BYTES, _PART)):
                ahead = bool((turn + number) % 2)
                read, place = _reader(ahead), memory.data_ptr() + start
                begin = time.thread_time()
                read(1, 1, place, found.data_ptr(), _PART // LINE)
                times[ahead].append(time.thread_time() - begin)
    return median(times[True]) < _GAIN * median(times[False])


@cache
def _reader(ahead: bool) -> jit.JitFunction:
    """Compile a kernel that only reads."""

    def write(code: Code, fields: Mapping[str, ir.Value], _block: ir.Value, _: ir.Value) -> None:
        do = code.do
        nothing = ir.Constant(ir.VectorType(WORD, LANES), [0] * LANES)
        with code.loop(fields["lines"], nothing) as loop:
            at = do.mul(loop.index, code.index(LINE))
            if ahead:
                place = do.add(at, code.index(AHEAD))
                code.prefetch(code.at(fields["memory"], place, BYTE), is_far=True)
            words = code.load(WORD, code.at(fields["memory"], at, BYTE), code.index(0), LANES)
            loop.next = [do.or_(loop.carried[0], words)]
        code.store(WORD, loop.next[0], fields["found"], code.index(0))

    return jit.JitFunction(("*memory", "*found", "lines"), write)
