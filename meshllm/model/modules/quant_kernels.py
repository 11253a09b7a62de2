"""The ways to hold weights, and the kernel for each."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from meshllm.errors import ModelError
from meshllm.model.modules import int4, int8
from meshllm.model.modules.quant_form import Form, Matrix, Packed, Shape
from meshllm.names import Quant


@dataclass(frozen=True, slots=True)
class Kernel:
    """How matrices are packed and multiplied."""

    pack: Callable[[Tensor], Packed]
    open: Callable[[Packed, Shape], Matrix]
    form: Callable[[Shape, torch.dtype], Form]
    """What `pack` makes of a matrix of such a shape and dtype."""
    order: Callable[[Shape], str]
    """Names how its bytes are ordered on this processor."""
    limit: float
    """Relative error of a good matrix on sampled rows."""


KERNELS = {
    # The limits are a few times the error of normally distributed weights: 0.008 and 0.09.
    Quant.INT8: Kernel(int8.pack, int8.Int8Matrix, int8.form, int8.order, 0.03),
    Quant.INT4: Kernel(int4.pack, int4.Int4Matrix, int4.form, int4.order, 0.15),
}


def kernel(kind: Quant) -> Kernel:
    """Find the kernel; raise `ModelError` where none works on this system."""
    found, shape = KERNELS[kind], (64, 64)
    try:
        found.open(found.pack(torch.ones(shape)), shape)(torch.ones(1, 64))
    except (RuntimeError, AttributeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"There is no {kind} kernel here, with torch {torch.__version__}: {reason}",
            hint="use `--quant none`",
        ) from None
    return found


def unfit(kind: Quant, shape: Shape, dtype: torch.dtype) -> str:
    """Say why a kernel does not take a matrix; empty when it does."""
    outputs, inputs = shape
    if not outputs * inputs:
        return "it is empty"
    if not dtype.is_floating_point or dtype.itemsize not in (2, 4):
        return f"its weights are {dtype}"
    if kind is Quant.INT8:
        return ""
    if inputs % int4.GROUP:
        return f"{inputs} inputs are no multiple of {int4.GROUP}"
    if outputs % int4.OUTPUTS:
        return f"{outputs} outputs are no multiple of {int4.OUTPUTS}"
    return ""


def packed_bytes(kind: Quant, shape: Shape, dtype: torch.dtype) -> int:
    """Tell the memory that a matrix takes."""
    outputs, inputs = shape
    if kind is Quant.NONE or unfit(kind, shape, dtype):
        return outputs * inputs * dtype.itemsize
    return size_of(KERNELS[kind].form(shape, dtype))


def size_of(form: Form) -> int:
    """Tell the memory that tensors of a form take."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in form.values())
