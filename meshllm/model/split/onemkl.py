"""Makes torch's oneMKL reproducible: the same bits for any address and any call.

oneMKL sums the products of a small float32 matrix in an order that depends on the addresses of its
operands (modulo 16 bytes with AVX2). Weights are stored at any offset of their file, keys at any
stride of a cache: shards and the whole model would differ in their last bits. With
``MKL_CBWR=AUTO`` (conditional numerical reproducibility) addresses do not matter, and no product
takes longer. The library reads that variable on its first call. It is not a setting of a user, so
it is set here, beside that call, and not in `config`.

torch computes functions like the cosine with oneMKL, on several threads. The library selects the
code for the CPU when a function is first called; if several threads do that at once, one of them
may run code of half the precision, that one time (oneMKL before 2025.0, see
https://github.com/pytorch/pytorch/issues/188792). One process in twenty would compute its first
prompt with other bits than the rest. A call with a single number uses a single thread.
"""

import logging
import os
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

log = logging.getLogger(__name__)

FUNCTIONS = (
    "abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor",
    "log", "log10", "log1p", "log2", "round", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip


@cache
@torch.inference_mode()
def warm_up_onemkl() -> None:
    """Enable reproducible products and call each function, once per process; takes milliseconds.

    Everything that may compute first calls it: building or loading a model, stock ones too, and
    the compute thread when it starts.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO")
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for name in FUNCTIONS:
            getattr(torch, name)(one)
    if has_onemkl() and rounds_by_alignment():
        log.warning(
            "oneMKL products depend on the alignment of matrices, so shards of a float32 model may"
            " differ from the whole by about 1e-6: set `MKL_CBWR=AUTO`, or load a model before"
            " torch's first product"
        )


def has_onemkl() -> bool:
    """Whether torch multiplies float32 matrices with oneMKL."""
    return bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]  # of torch


@torch.inference_mode()
def rounds_by_alignment() -> bool:
    """Whether products of float32 matrices depend on their alignment in memory."""
    generator = torch.Generator().manual_seed(0)
    x, matrix = (torch.randn(rows, 60, generator=generator) for rows in (7, 84))
    return any(
        not torch.equal(linear(_at(x[:rows], here), _at(matrix, there)), linear(x[:rows], matrix))
        for rows in (1, 2, 3, 7)
        for here, there in ((0, 1), (1, 0), (0, 2), (2, 0), (0, 4), (4, 0), (0, 8), (8, 0))
    )


def _at(values: Tensor, offset: int) -> Tensor:
    """Copy values to an address ``offset`` elements past a multiple of 64 bytes."""
    room = values.new_empty(values.numel() + offset)
    return room[offset:].view(values.shape).copy_(values)
