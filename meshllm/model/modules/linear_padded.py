"""Matrices that give a row the same bits whatever rows are beside it.

Theory of operation: a kernel may add up the products of one row in another order than those of
several, and the last bit of the sum depends on the order. Which numbers of rows agree depends on
shape, dtype, processor and library, so it is tried, with sums that cancel: what is left of them is
the rounding of the order. Mostly one row is the exception; it is then computed with rows of zeros
beside it, which costs next to nothing, as the time goes into reading the matrix. Copies of a matrix
in another layout (`meshllm.model.modules.linear_onednn`) have its bits, and so its floor.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshllm.model.modules.linear_bf16 import NativeLinear, is_native, native_of
from meshllm.model.modules.specimen import specimen

FLOORS = (1, 2, 3)
"""Rows to which fewer are filled up; more would cost time."""

_OUTPUTS = 4096  # of a large matrix that are tried


class SteadyLinear(nn.Module):
    """A linear module that computes with ``floor`` rows at least."""

    def __init__(self, plain: nn.Linear, floor: int) -> None:
        super().__init__()
        self.plain = plain
        self.floor = floor

    @property
    def weight(self) -> Tensor:
        """The matrix [N, K], where stock code asks for its dtype."""
        return self.plain.weight

    @property
    def bias(self) -> Tensor | None:
        """Of the outputs [N]."""
        return self.plain.bias

    def forward(self, x: Tensor) -> Tensor:
        """Multiply [..., T, K] to [..., T, N]."""
        rows = x.shape[-2]
        if rows >= self.floor:
            return self.plain.forward(x)
        return self.plain.forward(functional.pad(x, (0, 0, 0, self.floor - rows)))[..., :rows, :]


Floors = dict[tuple[int, int], int]
"""Rows that matrices need, by outputs (`_OUTPUTS` at most) and inputs."""


def find_floors(model: nn.Module, dtype: torch.dtype, counts: Sequence[int]) -> Floors | None:
    """Try every shape of the linear modules of a whole model, which may be on meta.

    None where these numbers of rows do not agree, or a linear module is of the model's own kind.
    """
    floors: Floors = {}
    for module in model.modules():
        if not isinstance(module, nn.Linear):
            continue
        if type(module) is not nn.Linear or module.weight.dtype != dtype:
            return None
        if is_native(module):
            continue
        shape = _shape(module)
        floor = _floor(*shape, dtype, tuple(counts), torch.get_num_threads())
        if floor is None:
            return None
        floors[shape] = floor
    return floors


def steady(model: nn.Module, floors: Floors) -> bool:
    """Exchange the linear modules that need more rows, or are compiled; say if all are known."""
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or module.weight.is_meta:
            continue
        if own := native_of(module):
            model.set_submodule(name, own)
            continue
        floor = floors.get(_shape(module))
        if floor is None:  # one with a hook, where compiled ones were counted on
            return False
        if floor > 1:
            model.set_submodule(name, SteadyLinear(module, floor))
    return True


def loosen(model: nn.Module) -> None:
    """Take back what `steady` exchanged."""
    for name, module in list(model.named_modules()):
        if isinstance(module, SteadyLinear | NativeLinear):
            model.set_submodule(name, module.plain)


def _shape(module: nn.Linear) -> tuple[int, int]:
    return min(module.out_features, _OUTPUTS), module.in_features


@cache
def _floor(
    outputs: int, inputs: int, dtype: torch.dtype, counts: Sequence[int], _threads: int
) -> int | None:
    """Find the smallest number of rows from which on all of ``counts`` agree."""
    linear, x = specimen(nn.Linear(inputs, outputs, bias=False, device="meta", dtype=dtype))
    results = {rows: linear(x[None, :rows])[0] for rows in {*counts, *FLOORS}}
    return next((floor for floor in FLOORS if _agree(results, floor)), None)


def _agree(results: dict[int, Tensor], floor: int) -> bool:
    """Whether all from ``floor`` rows on are the same as far as they go."""
    many = results[max(results)]
    return all(torch.equal(each, many[:rows]) for rows, each in results.items() if rows >= floor)
