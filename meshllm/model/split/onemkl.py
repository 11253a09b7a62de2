"""Makes torch's oneMKL give the same bits wherever and whenever it is called.

oneMKL adds up the products of a small float32 matrix in an order that depends on the addresses of
its operands (modulo 16 bytes with AVX2). Weights lie at any offset of their file, keys at any
stride of a cache: parts of a model and the whole would differ in their last bits. With
``MKL_CBWR=AUTO`` (conditional numerical reproducibility) addresses do not matter, and no product
takes longer. The library reads that variable in its first call.

torch computes functions like the cosine with oneMKL, some numbers in each thread. The library looks
for the code that suits the processor when a function is first called; where several threads do that
at once, one of them may run code of half the digits, that one time (oneMKL before 2025.0, see
https://github.com/pytorch/pytorch/issues/188792). A process would read its first prompt with other
bits than all others, once in twenty times. One number is computed by one thread.
"""

import logging
import os

import torch
from torch import Tensor
from torch.nn.functional import linear

log = logging.getLogger(__name__)

FUNCTIONS = (
    "abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor",
    "log", "log10", "log1p", "log2", "round", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip


@torch.inference_mode()
def settle() -> None:
    """Ask for reproducible products, and call each function once; it takes some milliseconds."""
    os.environ.setdefault("MKL_CBWR", "AUTO")
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for name in FUNCTIONS:
            getattr(torch, name)(one)
    if has_onemkl() and rounds_by_alignment():
        log.warning(
            "oneMKL rounds by the alignment of matrices, so parts of a float32 model may differ"
            " from the whole by about 1e-6: set `MKL_CBWR=AUTO`, or import meshllm before torch"
            " multiplies"
        )


def has_onemkl() -> bool:
    """Whether torch multiplies float32 matrices with oneMKL."""
    return bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]  # of torch


@torch.inference_mode()
def rounds_by_alignment() -> bool:
    """Whether products of float32 matrices depend on where these lie in memory."""
    generator = torch.Generator().manual_seed(0)
    x, matrix = (torch.randn(rows, 60, generator=generator) for rows in (7, 84))
    return any(
        not torch.equal(linear(_at(x[:rows], here), _at(matrix, there)), linear(x[:rows], matrix))
        for rows in (1, 2, 3, 7)
        for here, there in ((0, 1), (1, 0), (0, 2), (2, 0), (0, 4), (4, 0), (0, 8), (8, 0))
    )


def _at(values: Tensor, offset: int) -> Tensor:
    """Copy so many values behind an address that is a multiple of 64 bytes."""
    room = values.new_empty(values.numel() + offset)
    return room[offset:].view(values.shape).copy_(values)
