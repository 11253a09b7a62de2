"""Row-invariant bf16 linear layers for CPUs without bf16 instructions.

Theory of operation: on such CPUs torch multiplies a single row slower than memory delivers the
weights, two rows three times as slow, and prompts at a fraction of the peak rate. There
`meshllm.model.kernels.gemm_bf16` multiplies instead: up to `MOST_ROWS` rows in one order of
summation, more (prompts) in another. So a row of a decode step has the same bits in any batch. On
other CPUs torch's kernels are as fast, see `meshllm.model.modules.linear_padded`.
"""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshllm.model.kernels import jit
from meshllm.model.kernels.gemm_bf16 import GEMV_LANES, OUTPUTS, Bf16Matrix
from meshllm.model.kernels.ir import PAIRS_FEATURE
from meshllm.model.modules.int8 import multiplies_matrices

MOST_ROWS = 17
"""Rows of a batched step, of all its sessions, that have the bits of a single row."""


class CompiledLinear(nn.Linear):
    """A linear module with a compiled GEMM that reads its weights in place."""

    def __init__(self, plain: nn.Linear) -> None:
        """Take over weights, which must not change or move afterwards.

        Raises:
            ValueError: as for `Bf16Matrix`.
        """
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        self._plain = (plain,)  # not a submodule, so that the weights keep their names
        bias = None if self.bias is None else self.bias.detach()
        self._matrix = Bf16Matrix(self.weight.detach(), bias)

    @property
    def plain(self) -> nn.Linear:
        """The module that it replaces."""
        return self._plain[0]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- the name that stock code may use
        """Multiply [..., K] to [..., N]."""
        x, count = input, input.numel() // self.in_features
        is_odd = count > MOST_ROWS and self.out_features % OUTPUTS
        if x.dtype != torch.bfloat16 or is_odd:
            return functional.linear(x, self.weight, self.bias)
        rows, matrix = x.reshape(count, self.in_features), self._matrix
        products = matrix.gemv(rows) if count <= MOST_ROWS else matrix.gemm(rows)
        return products.view(*x.shape[:-1], self.out_features)


def to_native(plain: nn.Linear) -> CompiledLinear | None:
    """Return a replacement with the same weights; None where torch is as fast.

    Hooks would be lost, so modules with hooks are not replaced either.
    """
    weight, hooks = plain.weight, plain._forward_hooks | plain._forward_pre_hooks
    if weight.device.type != "cpu" or not weight.is_contiguous() or hooks or not has_native(plain):
        return None
    return CompiledLinear(plain)


def has_native(like: nn.Linear) -> bool:
    """Whether `CompiledLinear` supports such modules on the CPU; ``like`` may be on meta."""
    return (
        type(like) is nn.Linear
        and like.weight.dtype == torch.bfloat16
        and like.in_features % GEMV_LANES == 0
        and like.weight.numel() > 0
        and use_own_gemm()
    )


@cache
def has_bf16_dot() -> bool:
    """Whether the CPU has an instruction that multiplies and adds pairs of bfloat16."""
    return jit.has_cpu_feature(PAIRS_FEATURE)


@cache
def use_own_gemm() -> bool:
    """Whether this CPU has no bf16 instructions and can run compiled kernels."""
    return jit.jit_available() and not has_bf16_dot() and not multiplies_matrices()
