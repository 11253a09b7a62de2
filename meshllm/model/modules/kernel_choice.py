"""Chooses the kernel of bf16 matrices by measurement.

Theory of operation: which kernel is fastest depends on the processor, the library and the number of
inputs, and names of processors do not predict it. So on the first use of a machine the candidates
multiply matrices, more than fit in the CPU cache, by one row and by a few, in turns. The number of
outputs has no part in it, so that a part of an LM head is multiplied as the whole one is.
What counts is the median of the CPU time on one thread: other programs change it least, and the
bits of a model do not depend on the number of threads. Ours wins a near tie, because it reads the
weights in place: the other needs a packed copy. A packed copy is used, and timed, only if it gives
the bits of the plain matrix, see `meshllm.model.modules.linear_onednn`.

Matrices of few inputs stay in the CPU cache, where kernels differ little: they get the fixed choice
of their CPU, so that it does not depend on what else ran meanwhile.

Prompts are bound by arithmetic. The instruction for pairs does twice as much as float32 arithmetic
where it is issued as often. Where it is not, as on a Xeon of the Emerald Rapids kind without its
matrix instructions, it is slower, so that is measured, too (`meshllm doctor` shows the ratio).
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import StrEnum
from functools import cache, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshllm.model.device import using_threads
from meshllm.model.kernels import jit
from meshllm.model.kernels.gemm_bf16 import Bf16Matrix
from meshllm.model.kernels.ir import PAIRS_FEATURE
from meshllm.model.kernels.measured import Times, measure_once, rounds_in_time, seconds_of
from meshllm.model.modules.probe import probe_matrix
from meshllm.model.modules.quant_matrix import multiplies_matrices
from meshllm.model.pages import huge_zeros

FEWEST = 768
"""Inputs from which on matrices are measured."""
MOST = 1 << 18
"""Inputs up to which they are measured: more, which a config may say, take gigabytes."""

_OUTPUTS = 2048  # of a matrix that is measured
_PROBED = 256  # outputs of a matrix by which orders of summation are compared
_BYTES = 64 << 20  # of the matrices of a measurement: more than most CPU caches hold
_ROWS = 1, 5  # of a token, and of a token with drafts
_ROUNDS = 6
_TIE = 1.15  # times the time of torch's kernel, up to which ours is chosen
_PROMPT = 96, 512, 2048  # rows, and outputs and inputs of a matrix: some 5 ms
_PROMPT_ROUNDS = 4
_GAIN = 0.9  # of the time of the instruction for pairs, which has one order for all rows


class LinearKernel(StrEnum):
    """A kernel for a few rows."""

    TORCH = "torch"
    FMA = "own bf16"
    """`Bf16Matrix` with float32 arithmetic."""
    DOT = "own bf16 pairs"
    """`Bf16Matrix` with the instruction for pairs of bf16."""


@cache
def has_bf16_dot() -> bool:
    """Whether the CPU has an instruction that multiplies and adds pairs of bfloat16."""
    return jit.has_cpu_feature(PAIRS_FEATURE)


@cache
def fastest(inputs: int) -> LinearKernel:
    """Return the fastest kernel for bf16 matrices on this CPU, measured once per machine."""
    if not FEWEST <= inputs <= MOST:
        return LinearKernel.DOT if has_bf16_dot() else LinearKernel.TORCH
    found = measure_once("few rows of bf16", str(inputs), 1, partial(_measure, inputs), choose)
    return LinearKernel(found.best)


def choose(times: Times) -> LinearKernel:
    """Choose the fastest kernel; torch's only if it is clearly faster."""
    best = min(times, key=lambda kernel: times[kernel])
    own = min((each for each in times if each != LinearKernel.TORCH), key=lambda each: times[each])
    is_tie = times[own] <= _TIE * times[best]
    return LinearKernel(own if is_tie else best)


@cache
def has_slow_dot() -> bool:
    """Whether float32 arithmetic multiplies prompts faster than the instruction for pairs."""
    if not has_bf16_dot() or multiplies_matrices():
        return False
    shape = "x".join(map(str, _PROMPT))
    found = measure_once("a prompt of bf16", shape, 1, _measure_prompt, choose_for_prompts)
    return found.best == LinearKernel.FMA


def choose_for_prompts(times: Times) -> LinearKernel:
    """Choose the kernel of prompts; that for pairs unless the other is clearly faster."""
    is_slow = times[LinearKernel.FMA] < _GAIN * times[LinearKernel.DOT]
    return LinearKernel.FMA if is_slow else LinearKernel.DOT


@torch.inference_mode()
def _measure_prompt() -> dict[str, float]:
    """Multiply the rows of a prompt by both kernels."""
    count, outputs, inputs = _PROMPT
    weights = torch.full((outputs, inputs), 0.01, dtype=torch.bfloat16)
    rows = torch.ones(count, inputs, dtype=torch.bfloat16)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        LinearKernel.DOT: Bf16Matrix(weights, dot=True).gemv,
        LinearKernel.FMA: Bf16Matrix(weights).gemm,
    }
    times: dict[str, list[float]] = {kernel: [] for kernel in ways}
    with using_threads(1):
        for _ in rounds_in_time(_PROMPT_ROUNDS):
            for kernel, multiply in ways.items():
                times[kernel].append(seconds_of(partial(multiply, rows), 1))
    return {kernel: median(each[1:]) for kernel, each in times.items()}


@torch.inference_mode()
def _measure(inputs: int) -> dict[str, float]:
    """Multiply matrices by each kernel."""
    count = max(1, _BYTES // (2 * _OUTPUTS * inputs))
    weights = huge_zeros(count, _OUTPUTS, inputs, dtype=torch.bfloat16).fill_(0.01)
    rows = [torch.ones(rows, inputs, dtype=torch.bfloat16) for rows in _ROWS]
    with using_threads(1):
        candidates = dict(_candidates(weights))
        totals = dict.fromkeys(map(str, candidates), 0.0)
        for x in rows:
            times: dict[LinearKernel, list[float]] = {kernel: [] for kernel in candidates}
            for _ in rounds_in_time(_ROUNDS):
                for kernel, products in candidates.items():
                    times[kernel] += [seconds_of(partial(each, x), 1) for each in products]
            for kernel, each in times.items():
                totals[kernel] += median(each[count:])
    return totals


Multiply = Callable[[Tensor], Any]


def _candidates(weights: Tensor) -> Iterator[tuple[LinearKernel, list[Multiply]]]:
    """Yield the kernels with what multiplies rows by each of ``weights`` [count, N, K]."""
    if not has_bf16_dot() or multiplies_matrices():  # else a prompt would not have its bits
        yield LinearKernel.FMA, [Bf16Matrix(each).gemv for each in weights]
    if has_bf16_dot():
        yield LinearKernel.DOT, [Bf16Matrix(each, dot=True).gemv for each in weights]
    plain: list[Multiply] = [partial(functional.linear, weight=each) for each in weights]
    with suppress(RuntimeError, AttributeError):  # then this torch packs no matrices
        if _keeps_bits(weights.shape[2]):
            plain = [_packed(each) for each in weights]
    yield LinearKernel.TORCH, plain


def _keeps_bits(inputs: int) -> bool:
    """Whether packed copies have the bits of torch's plain matrices."""
    like = nn.Linear(inputs, _PROBED, bias=False, device="meta", dtype=torch.bfloat16)
    plain, x = probe_matrix(like)
    packed = _packed(plain.weight.detach())
    return all(torch.equal(packed(x[:rows]), plain(x[:rows])) for rows in _ROWS)


def _packed(weight: Tensor) -> Multiply:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
