"""Row-invariant bf16 linear layers with our own kernels.

Theory of operation: on CPUs without bf16 instructions torch multiplies a single row slower than
memory delivers the weights, two rows three times as slow, and prompts at a fraction of the peak
rate. There `meshllm.model.kernels.gemm_bf16` multiplies instead: up to `MAX_ROWS` rows in one
order of summation, more (prompts) in another. On CPUs with an instruction for pairs of bf16, and
none for matrices, our kernel multiplies any number of rows in one order: a prompt has the same bits
whole and in chunks. Where that instruction was measured to be slower than float32 arithmetic, this
holds for chunks of up to `DOT_ROWS` rows: longer ones are multiplied in float32. On other CPUs our
kernel multiplies few rows of the matrices for which it was measured to be faster, see
`meshllm.model.modules.kernel_choice`; torch the rest. So a row of a decode step has the same bits
in any batch. Weights are read in place.
"""

from functools import cache
from math import inf

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshllm.model.kernels import jit
from meshllm.model.kernels.gemm_bf16 import GEMV_LANES, OUTPUTS, Bf16Matrix
from meshllm.model.modules.kernel_choice import (
    FEWEST,
    LinearKernel,
    fastest,
    has_bf16_dot,
    has_slow_dot,
)
from meshllm.model.modules.quant_matrix import multiplies_matrices

MAX_ROWS = 17
"""Rows of a batched step, of all its sessions, that have the bits of a single row."""
DOT_ROWS = 128
"""Rows up to which CPUs that multiply more of them faster otherwise use the pair instruction."""
DOT_TILE = 240
"""Rows of a prompt that the instruction for pairs multiplies together: they fit in a CPU cache."""


class CompiledLinear(nn.Linear):
    """A linear module with a compiled GEMM that reads its weights in place."""

    def __init__(self, plain: nn.Linear, kernel: LinearKernel) -> None:
        """Take over weights, which must not change or move afterwards.

        Raises:
            ValueError: as for `Bf16Matrix`.
        """
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        self._plain = (plain,)  # not a submodule, so that the weights keep their names
        bias = None if self.bias is None else self.bias.detach()
        has_dot = kernel is LinearKernel.DOT
        self.kernel = kernel
        self._matrix = Bf16Matrix(self.weight.detach(), bias, dot=has_dot)
        is_slow = has_dot and self.in_features >= FEWEST and has_slow_dot()
        self._has_gemm = (use_own_gemm() or is_slow) and not self.out_features % OUTPUTS
        self._most = _most_rows(has_dot=has_dot, has_gemm=self._has_gemm)

    @property
    def most_rows(self) -> float:
        """Rows up to which each has the bits of a single one."""
        return self._most

    @property
    def plain(self) -> nn.Linear:
        """The module that it replaces."""
        return self._plain[0]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- the name that stock code may use
        """Multiply [..., K] to [..., N]."""
        x, count = input, input.numel() // self.in_features
        if x.dtype != torch.bfloat16 or (count > self._most and not self._has_gemm):
            return functional.linear(x, self.weight, self.bias)
        rows, matrix = x.reshape(count, self.in_features), self._matrix
        products = _in_tiles(matrix, rows) if count <= self._most else matrix.gemm(rows)
        return products.view(*x.shape[:-1], self.out_features)


def _most_rows(*, has_dot: bool, has_gemm: bool) -> float:
    """Return the rows up to which the kernel for few rows multiplies."""
    if not has_dot:
        return MAX_ROWS
    return DOT_ROWS if has_gemm or multiplies_matrices() else inf


def _in_tiles(matrix: Bf16Matrix, rows: Tensor) -> Tensor:
    if len(rows) <= DOT_TILE:
        return matrix.gemv(rows)
    return torch.cat([matrix.gemv(each) for each in torch.split(rows, DOT_TILE)])


def to_native(plain: nn.Linear) -> CompiledLinear | None:
    """Return a replacement with the same weights; None where torch is as fast.

    Hooks would be lost, so modules with hooks are not replaced either.
    """
    weight, hooks = plain.weight, plain._forward_hooks | plain._forward_pre_hooks
    if weight.device.type != "cpu" or not weight.is_contiguous() or hooks:
        return None
    kernel = choose_kernel(plain)
    return None if kernel is LinearKernel.TORCH else CompiledLinear(plain, kernel)


def has_native(like: nn.Linear) -> bool:
    """Whether such modules are replaced on this CPU; ``like`` may be on meta."""
    return choose_kernel(like) is not LinearKernel.TORCH


def choose_kernel(like: nn.Linear) -> LinearKernel:
    """Return the kernel for few rows of such modules on this CPU; ``like`` may be on meta."""
    is_supported = (
        type(like) is nn.Linear
        and like.weight.dtype == torch.bfloat16
        and like.in_features % GEMV_LANES == 0
        and like.weight.numel() > 0
    )
    if not is_supported or not jit.jit_available():
        return LinearKernel.TORCH
    if use_own_gemm():
        return LinearKernel.FMA
    return fastest(like.in_features)


@cache
def use_own_gemm() -> bool:
    """Whether this CPU has no bf16 instructions and runs compiled kernels fast."""
    is_able = jit.jit_available() and jit.has_fma()
    return is_able and not has_bf16_dot() and not multiplies_matrices()
