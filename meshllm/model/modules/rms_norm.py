"""Fused RMS norms.

A stock norm is six operations, each of which takes longer to call than to compute, and a layer may
have four norms. Whether a module is an RMS norm is tested on rows of several magnitudes: its
results must agree with ours within two ulp, as each is rounded twice. On a GPU torch's own fused
norm is used; it rounds once where stock code may round twice.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshllm.model.kernels.jit import jit_available
from meshllm.model.kernels.rms_norm import norm

_SIZES = (0.01, 1.0, 100.0)
_ROWS = 4
_ULP = 2**-7  # an ulp of bfloat16, relative to the number
_MAX_ULPS = 2  # that rounding twice may change
_MAX_ERROR = 2**-10  # largest relative error of all numbers together
_MAX_TORCH_ULPS = 4  # that different rounding, three times, may change
_AGREEING = set[tuple[Any, ...]]()  # kinds of norms that agree with the compiled one


class FusedRMSNorm(nn.Module):
    """A replacement of a norm by the compiled kernel, with nearly the same results."""

    def __init__(self, plain: Any, eps: float) -> None:
        super().__init__()
        self._plain = (plain,)  # not a submodule, so that the weights keep their names
        self.eps = eps
        self.weight: nn.Parameter = plain.weight
        self.width = plain.weight.shape[0]

    @property
    def plain(self) -> nn.Module:
        """The module that it replaces."""
        module: nn.Module = self._plain[0]
        return module

    def forward(self, x: Tensor) -> Tensor:
        """Normalise rows [..., D]."""
        if x.numel() and x.dtype == torch.bfloat16 and x.device.type == "cpu":
            if x.is_contiguous():
                return norm(x, self.weight, self.eps)
            # With the strides of stock code: with others, a product may use another kernel.
            return torch.empty_like(x).copy_(norm(x.contiguous(), self.weight, self.eps))
        result: Tensor = self._plain[0](x)
        return result


class TorchRMSNorm(nn.Module):
    """A replacement of a norm by torch's own fused norm."""

    def __init__(self, plain: Any, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight: nn.Parameter = plain.weight

    def forward(self, x: Tensor) -> Tensor:
        """Normalise rows [..., D]."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


@contextmanager
def fused(model: nn.Module) -> Iterator[int]:
    """Replace RMS norms by torch's own within the block; yield their number.

    A module is replaced only if its results differ by no more than rounding.
    """
    replaced: dict[str, nn.Module] = {}
    try:
        for name, module, eps in _norms(model):
            own, unit = TorchRMSNorm(module, eps), torch.finfo(module.weight.dtype).eps
            if _agree(module, own, most=_MAX_TORCH_ULPS * unit, mean=unit):
                replaced[name] = module
                model.set_submodule(name, own)
        yield len(replaced)
    finally:
        for name, module in replaced.items():
            model.set_submodule(name, module)


@torch.inference_mode()
def fuse_rms_norms(model: nn.Module) -> None:
    """Replace RMS norms by the compiled kernel, if their results agree with it."""
    if not jit_available():
        return
    for name, module, eps in _norms(model):
        if module.weight.dtype != torch.bfloat16 or module.weight.device.type != "cpu":
            continue
        own, kind = FusedRMSNorm(module, eps), _kind(module)
        if kind in _AGREEING or _agree(module, own, most=_MAX_ULPS * _ULP, mean=_MAX_ERROR):
            if bool(module.weight.all()):  # anything agrees where weights are zero
                _AGREEING.add(kind)
            model.set_submodule(name, own)


def unfuse_rms_norms(model: nn.Module) -> None:
    """Undo `fuse_rms_norms`."""
    for name, module in list(model.named_modules()):
        if isinstance(module, FusedRMSNorm):
            model.set_submodule(name, module.plain)


def _norms(model: nn.Module) -> list[tuple[str, Any, float]]:
    """Find modules that look like RMS norms: name, module, epsilon."""
    found = []
    for name, module in model.named_modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if isinstance(eps, float) and _is_plain(module):
            found.append((name, module, eps))
    return found


def _is_plain(module: nn.Module) -> bool:
    """Whether a module takes rows and has one vector of weights, and nothing else.

    The norms of recurrent layers may take a gate, too.
    """
    parameters = dict(module.named_parameters())
    weight = parameters.pop("weight", None)
    return (
        weight is not None
        and not parameters
        and not list(module.buffers())
        and len(signature(module.forward).parameters) == 1
        and weight.dim() == 1
        and weight.dtype.is_floating_point
        and not weight.is_meta
        and weight.is_contiguous()
        and not module._forward_hooks | module._forward_pre_hooks
    )


def _kind(module: Any) -> tuple[Any, ...]:
    """Return the class of a norm, its width and its numbers and switches."""
    plain = (each for each in vars(module).items() if isinstance(each[1], bool | int | float | str))
    return type(module), module.weight.shape, *sorted(plain)


@torch.inference_mode()
def _agree(plain: Any, own: nn.Module, *, most: float, mean: float) -> bool:
    """Compare two norms; ``most`` is the largest relative error of a number, ``mean`` of all."""
    generator, weight = torch.Generator().manual_seed(0), plain.weight
    for size in _SIZES:
        drawn = torch.randn(1, _ROWS, weight.shape[0], generator=generator) * size
        x = drawn.to(weight.device, weight.dtype)
        mine, its = own(x).double(), plain(x).double()
        error = (mine - its).abs()
        if not bool((error <= most * its.abs()).all()):
            return False
        if not float(error.norm()) <= mean * float(its.norm()):
            return False
    return True
