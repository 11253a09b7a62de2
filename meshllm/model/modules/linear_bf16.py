"""Linear modules of bfloat16 with one order of adding, compiled.

Theory of operation: where a processor has no instructions for bfloat16, torch multiplies one row
slower than its weights come from memory, two rows three times as slow, and prompts at a fraction of
what the processor can. There `meshllm.model.kernels.gemm_bf16` multiplies instead: up to
`MOST_ROWS` rows in one way, and more, of prompts, in another. A row of a step has the same bits in
any company. On other processors torch's kernels are as fast, see
`meshllm.model.modules.linear_padded`.
"""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshllm.model.kernels import jit
from meshllm.model.kernels.gemm_bf16 import LANES_OF_ROW, OUTPUTS, Matrix
from meshllm.model.kernels.ir import PAIRS_FEATURE
from meshllm.model.modules.int8 import multiplies_matrices

MOST_ROWS = 17
"""Of all sessions that compute together; so many are multiplied as one is."""


class NativeLinear(nn.Linear):
    """A linear module that multiplies its weights where they lie."""

    def __init__(self, plain: nn.Linear) -> None:
        """Take over weights, which may change and move no more.

        Raises:
            ValueError: as of `Matrix`.
        """
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        self._plain = (plain,)  # no module of this one, whose weights have the names that they had
        bias = None if self.bias is None else self.bias.detach()
        self._matrix = Matrix(self.weight.detach(), bias)

    @property
    def plain(self) -> nn.Linear:
        """What it stands for."""
        return self._plain[0]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- the name that stock code may use
        """Multiply [..., K] to [..., N]."""
        x, count = input, input.numel() // self.in_features
        is_odd = count > MOST_ROWS and self.out_features % OUTPUTS
        if x.dtype != torch.bfloat16 or is_odd:
            return functional.linear(x, self.weight, self.bias)
        rows, matrix = x.reshape(count, self.in_features), self._matrix
        products = matrix.few(rows) if count <= MOST_ROWS else matrix.many(rows)
        return products.view(*x.shape[:-1], self.out_features)


def native_of(plain: nn.Linear) -> NativeLinear | None:
    """Make a module of the same weights; None where torch is as fast.

    It takes no hooks over, so modules that have some stay, too.
    """
    weight, hooks = plain.weight, plain._forward_hooks | plain._forward_pre_hooks
    if weight.device.type != "cpu" or not weight.is_contiguous() or hooks or not is_native(plain):
        return None
    return NativeLinear(plain)


def is_native(like: nn.Linear) -> bool:
    """Whether there is a `NativeLinear` for such modules on the CPU; ``like`` may be on meta."""
    return (
        type(like) is nn.Linear
        and like.weight.dtype == torch.bfloat16
        and like.in_features % LANES_OF_ROW == 0
        and like.weight.numel() > 0
        and use_own_gemm()
    )


@cache
def adds_pairs() -> bool:
    """Whether the processor has an instruction that multiplies and adds pairs of bfloat16."""
    return jit.can(PAIRS_FEATURE)


@cache
def use_own_gemm() -> bool:
    """Whether this processor has no instructions for bfloat16, and runs what is compiled."""
    return jit.works() and not adds_pairs() and not multiplies_matrices()
