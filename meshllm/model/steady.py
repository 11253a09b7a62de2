"""Matrices that give a row the same bits whatever rows are beside it; knows no model and no text.

Theory of operation: a kernel may add up the products of one row in another order than those of
several, and the last bit of the sum depends on the order. Which numbers of rows agree depends on
shape, dtype, processor and library, so it is tried, with sums that cancel: what is left of them is
the rounding of the order. Mostly one row is the exception; it is then computed with rows of zeros
beside it, which costs next to nothing, as the time goes into reading the matrix.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshllm.model.packed import PackedLinear, specimen

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


def steady(model: nn.Module, counts: Sequence[int]) -> bool:
    """Exchange the linear modules that need it, for these numbers of rows; say if all agree then.

    Where some do not, nothing is exchanged.
    """
    floors: dict[tuple[type, int, int, torch.dtype], int | None] = {}
    found: list[tuple[str, nn.Linear, int]] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or module.weight.is_meta:
            continue
        outputs = min(module.out_features, _OUTPUTS)
        kind = type(module), outputs, module.in_features, module.weight.dtype
        if kind not in floors:
            floors[kind] = _floor(*kind, counts)
        if (floor := floors[kind]) is None:
            return False
        if floor > 1:
            found.append((name, module, floor))
    for name, module, floor in found:
        model.set_submodule(name, SteadyLinear(module, floor))
    return True


def _floor(
    kind: type, outputs: int, inputs: int, dtype: torch.dtype, counts: Sequence[int]
) -> int | None:
    """Find the smallest number of rows from which on all of ``counts`` agree."""
    linear, x = specimen(nn.Linear(inputs, outputs, bias=False, device="meta", dtype=dtype))
    if issubclass(kind, PackedLinear):
        linear = kind(linear)
    elif kind is not nn.Linear:  # somebody's own: it may do anything
        return None
    results = {rows: linear(x[None, :rows])[0] for rows in {*counts, *FLOORS}}
    for floor in FLOORS:
        rows = [count for count in results if count >= floor]
        if all(_agree(results[few], results[max(rows)]) for few in rows):
            return floor
    return None


def _agree(few: Tensor, many: Tensor) -> bool:
    return torch.equal(few, many[: len(few)])
