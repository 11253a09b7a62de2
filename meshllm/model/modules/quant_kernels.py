"""The kernel of each kind of quantisation."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from meshllm.errors import ModelError
from meshllm.model.kernels.gemm_int4 import GROUP
from meshllm.model.modules import int4, int8
from meshllm.model.modules.quant_matrix import Form, Packed, QuantMatrix, Shape
from meshllm.names import Quant


@dataclass(frozen=True, slots=True)
class Kernel:
    """Functions that pack and multiply matrices."""

    pack: Callable[[Tensor], Packed]
    open: Callable[[Packed, Shape], QuantMatrix]
    form: Callable[[Shape, torch.dtype], Form]
    """Returns the shapes and dtypes of what `pack` returns."""
    limit: float
    """Largest relative error on sampled rows that is accepted."""


KERNELS = {
    # The limits are a few times the error of normally distributed weights: 0.008 and 0.09.
    Quant.INT8: Kernel(int8.pack, int8.open_packed, int8.form, 0.03),
    Quant.INT4: Kernel(int4.pack, int4.open_packed, int4.form, 0.15),
}


def kernel(kind: Quant) -> Kernel:
    """Return the kernel; raise `ModelError` if it does not work on this system."""
    found, shape = KERNELS[kind], (64, 64)
    try:
        found.open(found.pack(torch.ones(shape)), shape)(torch.ones(1, 64))
    except (RuntimeError, AttributeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"No {kind} kernel on this machine with torch {torch.__version__}: {reason}",
            hint="use `--quant none`",
        ) from None
    return found


def unsupported(kind: Quant, shape: Shape, dtype: torch.dtype) -> str:
    """Return why a kernel does not support a matrix; empty if it does."""
    outputs, inputs = shape
    if not outputs * inputs:
        return "it is empty"
    if not dtype.is_floating_point or dtype.itemsize not in (2, 4):
        return f"its weights are {dtype}"
    if kind is Quant.INT8:
        return ""
    return f"{inputs} inputs are not a multiple of {GROUP}" if inputs % GROUP else ""


def packed_bytes(kind: Quant, shape: Shape, dtype: torch.dtype) -> int:
    """Return the bytes that a matrix takes in memory."""
    outputs, inputs = shape
    if kind is Quant.NONE or unsupported(kind, shape, dtype):
        return outputs * inputs * dtype.itemsize
    return size_of(KERNELS[kind].form(shape, dtype))


def size_of(form: Form) -> int:
    """Return the bytes that tensors of a form take."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in form.values())
