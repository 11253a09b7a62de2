"""Norms of a few rows in one call; knows no family by name.

A stock norm is six operations, each of which takes longer to call than to compute, four norms in a
layer. Whether a module is what it looks like is tried, on rows of several sizes: beside quantised
matrices it has to give the same numbers but for a unit in the last place; beside plain ones the
same bits, of so many numbers that another order of adding would show in some.
"""

from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from meshllm.model.native import works
from meshllm.model.native_norm import norm

FEW = 512  # rows, heads counted; stock code works on more of them at a time

_SIZES = (0.01, 1.0, 100.0)
_ROWS = 4
_MANY = 1 << 19  # numbers; of these an order of adding changes some ten by rounding
_UNIT = 2**-7  # of the last place of a bfloat16 number, relative to it
_ALIKE = 2**-10  # of all numbers together


class QuickNorm(nn.Module):
    """What stands for a norm: the same call, and the same numbers or nearly, as was tried."""

    def __init__(self, plain: Any, eps: float) -> None:
        super().__init__()
        self._plain = (plain,)  # no module of this one, whose weights have the names that they had
        self.eps = eps
        self.weight: nn.Parameter = plain.weight
        self.width = plain.weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """Norm rows [..., D]."""
        few = 0 < x.numel() <= FEW * self.width
        if few and x.dtype == torch.bfloat16 and x.device.type == "cpu":
            if x.is_contiguous():
                return norm(x, self.weight, self.eps)
            # Laid out as stock code leaves it: products may take another way with other strides.
            return torch.empty_like(x).copy_(norm(x.contiguous(), self.weight, self.eps))
        result: Tensor = self._plain[0](x)
        return result


@torch.inference_mode()
def quicken(model: nn.Module, *, exact: bool = False) -> int:
    """Exchange the norms that are what they look like, to the last bit if ``exact``; say how many.

    One of each class, width and epsilon is tried with many rows, each with a few.
    """
    count, verdicts = 0, dict[tuple[type, int, float], bool]()
    if not works():
        return count
    for name, module in list(model.named_modules()):
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not isinstance(eps, float) or not _is_plain(module):
            continue
        quick = QuickNorm(module, eps)
        kind = type(module), quick.weight.shape[0], eps
        if exact and kind not in verdicts:
            verdicts[kind] = all(_agree(module, quick, *many) for many in _draws(kind[1]))
        if verdicts.get(kind, True) and _agree(module, quick, _ROWS, 0, exact=exact):
            model.set_submodule(name, quick)
            count += 1
    return count


def _draws(width: int) -> Iterator[tuple[int, int]]:
    """Tell of how many rows, and by which seed, to draw so that an order shows."""
    rows = max(1, min(FEW, _MANY // width))
    for seed in range(-(-_MANY // (rows * width))):
        yield rows, seed


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
        and not module._forward_hooks | module._forward_pre_hooks
    )


def _agree(plain: nn.Module, quick: QuickNorm, rows: int, seed: int, *, exact: bool = True) -> bool:
    generator = torch.Generator().manual_seed(seed)
    for size in _SIZES:
        x = (torch.randn(1, rows, quick.weight.shape[0], generator=generator) * size).bfloat16()
        mine, its = quick(x), plain(x)
        if exact:
            if not torch.equal(mine, its):
                return False
            continue
        error = (mine.double() - its.double()).abs()
        if not bool((error <= _UNIT * its.double().abs()).all()):
            return False
        if not float(error.norm()) <= _ALIKE * float(its.double().norm()):
            return False
    return True
