"""Compiled functions that replace torch operations.

Only for operations that take torch longer to dispatch than to compute. The caller compares their
bits with torch's: an operation may do more than is modelled here.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from meshllm.model.device import CPU
from meshllm.model.kernels.elementwise import DTYPES, NUMBERS, ElementwiseOp, StridedView, call_for
from meshllm.model.kernels.program import Call

aten = torch.ops.aten

_BINARY = {
    aten.add.Tensor: ElementwiseOp.ADD,
    aten.sub.Tensor: ElementwiseOp.SUBTRACT,
    aten.mul.Tensor: ElementwiseOp.MULTIPLY,
    aten.mul.Scalar: ElementwiseOp.MULTIPLY,
}
_UNARY = {
    getattr(aten, name)
    for name in ("neg", "silu", "gelu", "relu", "sigmoid", "tanh", "exp", "pow", "square", "rsqrt")
}
_COPIES = {
    getattr(aten, name)
    for name in ("clone", "contiguous", "reshape", "_reshape_copy", "to", "_to_copy", "copy_")
}


def calls_for(
    function: Any, args: Sequence[Any], kwargs: dict[str, Any], outs: Sequence[Tensor]
) -> list[Call] | None:
    """Return calls that compute ``function`` into ``outs``, on one thread; None if none do."""
    if len(outs) != 1 or not _are_supported((*args, *outs), outs[0].dtype):
        return None
    (out,) = outs
    found: list[Any]
    kept: list[Tensor] = []
    if function in _BINARY and not kwargs and len(args) == 2:
        task = _BINARY[function]
        kept = [_operand(each, task, out.dtype) for each in args]
        found = [call_for(task, _view(out), *map(_view, kept))]
    elif function is aten.cat.default:
        found = _concatenated(args[0], args[1] if len(args) > 1 else 0, out)
    elif function.overloadpacket in _COPIES:
        source = args[1] if function.overloadpacket is aten.copy_ else args[0]
        found = [_copy(source, out)]
    elif is_elementwise(function, args, kwargs) and args[0].dtype == out.dtype == torch.bfloat16:
        kept = [args[0], _table(function, tuple(args[1:]), tuple(kwargs.items()))]
        found = [call_for(ElementwiseOp.LOOK_UP, _view(out), *map(_view, kept))]
    else:
        return None
    if None in found:
        return None
    return [Call.of(native, 1, 1, values, kept) for native, values in found]


def _are_supported(values: Sequence[Any], dtype: torch.dtype) -> bool:
    """Return whether compiled functions support these tensors with a result of ``dtype``.

    Scalar tensors of another dtype are excluded: torch may round them first.
    """
    return all(
        each.device == CPU and each.dtype in DTYPES and (each.dim() or each.dtype == dtype)
        for each in values
        if isinstance(each, Tensor)
    )


def is_elementwise(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation maps each element of one tensor independently."""
    first, *others = *args, *kwargs.values()
    return (
        function.overloadpacket in _UNARY
        and isinstance(first, Tensor)
        and not any(isinstance(each, Tensor) for each in others)
    )


def all_bfloat16() -> Tensor:
    """Return all bfloat16 values [NUMBERS], in the order of their bits."""
    return torch.arange(NUMBERS, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def _concatenated(parts: Sequence[Tensor], dim: int, out: Tensor) -> list[Any]:
    found, at = [], 0
    for part in parts:
        if not part.numel():
            return [None]
        found.append(_copy(part, out.narrow(dim, at, part.shape[dim])))
        at += part.shape[dim]
    return found


def _copy(source: Tensor, out: Tensor) -> Any:
    """Copy elements in order; the shapes may differ if ``out`` is contiguous."""
    if source.shape != out.shape:
        if source.numel() != out.numel() or not out.is_contiguous():
            return None
        out = out.view(source.shape)
    return call_for(ElementwiseOp.COPY, _view(out), _view(source))


def _view(tensor: Tensor) -> StridedView:
    return StridedView(tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _operand(value: Any, task: ElementwiseOp, dtype: torch.dtype) -> Tensor:
    """Return a tensor, made from a number if needed: torch rounds addends, but not factors."""
    if isinstance(value, Tensor):
        return value
    return torch.tensor([value], dtype=torch.float32 if task is ElementwiseOp.MULTIPLY else dtype)


@cache
def _table(
    function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: tuple[Any, ...]
) -> Tensor:
    """Tabulate a function of torch for all bfloat16 values; cached."""
    return function(all_bfloat16(), *args, **dict(kwargs))
