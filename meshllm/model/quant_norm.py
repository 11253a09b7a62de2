"""Norms of a few rows in one call; knows no family by name.

A stock norm is six operations, each of which takes longer to call than to compute, four norms in a
layer. Whether a module is what it looks like is tried: on rows of several sizes it has to give the
same numbers but for a unit in the last place. So this goes with quantised weights only.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from meshllm.model.native import works
from meshllm.model.native_norm import norm

FEW = 512  # rows, heads counted; stock code works on more of them at a time

_SIZES = (0.01, 1.0, 100.0)
_ROWS = 4
_UNIT = 2**-7  # of the last place of a bfloat16 number, relative to it
_ALIKE = 2**-10  # of all numbers together


class QuickNorm(nn.Module):
    """What stands for a norm: the same call, and nearly the same numbers."""

    def __init__(self, plain: Any, eps: float) -> None:
        super().__init__()
        self.plain, self.eps = plain, eps
        self.weight: nn.Parameter = plain.weight

    def forward(self, x: Tensor) -> Tensor:
        """Norm rows [..., D]."""
        few = 0 < x.numel() <= FEW * x.shape[-1]
        if few and x.dtype == torch.bfloat16 and x.device.type == "cpu":
            return norm(x.contiguous(), self.weight, self.eps)
        result: Tensor = self.plain(x)
        return result


@torch.inference_mode()
def quicken(model: nn.Module) -> int:
    """Exchange the norms that are what they look like; say how many."""
    count = 0
    if not works():
        return count
    for name, module in list(model.named_modules()):
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if isinstance(eps, float) and _is_plain(module):
            quick = QuickNorm(module, eps)
            if _agree(module, quick):
                model.set_submodule(name, quick)
                count += 1
    return count


def _is_plain(module: nn.Module) -> bool:
    """Whether it takes rows and has weights for one, on the CPU, and nothing else.

    The norms of recurrent layers may take a gate besides.
    """
    parameters = dict(module.named_parameters())
    weight = parameters.pop("weight", None)
    return (
        weight is not None
        and not parameters
        and not list(module.buffers())
        and len(signature(module.forward).parameters) == 1
        and weight.dim() == 1
        and weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and weight.is_contiguous()
    )


def _agree(plain: nn.Module, quick: QuickNorm) -> bool:
    generator = torch.Generator().manual_seed(0)
    width = len(quick.weight)
    for size in _SIZES:
        x = (torch.randn(1, _ROWS, width, generator=generator) * size).bfloat16()
        mine, its = quick(x).double(), plain(x).double()
        error = (mine - its).abs()
        if not bool((error <= _UNIT * its.abs()).all()):
            return False
        if not float(error.norm()) <= _ALIKE * float(its.norm()):
            return False
    return True
