"""Row-invariant (batch-invariant) linear layers, by padding to a minimum number of rows.

Theory of operation: a kernel may sum the products of one row in another order than those of
several, and the last bit of the sum depends on the order. Which numbers of rows agree depends on
shape, dtype, CPU and library, so it is tried, with sums that cancel: what is left of them is the
rounding error of the order. Usually only a single row differs; it is then padded with rows of
zeros, which costs next to nothing, as most of the time is spent reading the matrix. Packed copies
(`meshllm.model.modules.linear_onednn`) give the same bits, and so need the same minimum: it is
tried with one, which may be a hundred times as fast.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshllm.model.modules.linear_bf16 import CompiledLinear, has_native, to_native
from meshllm.model.modules.linear_onednn import PackedLinear, keeps_bits
from meshllm.model.modules.probe import probe_matrix, probe_outputs

FLOORS = (1, 2, 3)
"""Minimum numbers of rows to try; larger ones would cost time."""


class PaddedLinear(nn.Module):
    """A linear module that pads its input to at least ``min_rows`` rows."""

    def __init__(self, plain: nn.Linear, min_rows: int) -> None:
        super().__init__()
        self.plain = plain
        self.min_rows = min_rows

    @property
    def weight(self) -> Tensor:
        """The matrix [N, K]; stock code reads its dtype."""
        return self.plain.weight

    @property
    def bias(self) -> Tensor | None:
        """The bias [N]."""
        return self.plain.bias

    def forward(self, x: Tensor) -> Tensor:
        """Multiply [..., T, K] to [..., T, N]."""
        rows = x.shape[-2]
        if rows >= self.min_rows:
            return self.plain.forward(x)
        return self.plain.forward(functional.pad(x, (0, 0, 0, self.min_rows - rows)))[..., :rows, :]


Floors = dict[tuple[int, int], int]
"""Minimum number of rows, by outputs (as many as a probe has) and inputs."""


def find_min_rows(model: nn.Module, dtype: torch.dtype, counts: Sequence[int]) -> Floors | None:
    """Find the minimum rows of every linear shape of a whole model, which may be on meta.

    None if ``counts`` of rows do not agree, or a linear module is a subclass or of another dtype.
    """
    floors: Floors = {}
    for module in model.modules():
        if not isinstance(module, nn.Linear):
            continue
        if type(module) is not nn.Linear or module.weight.dtype != dtype:
            return None
        if has_native(module):
            continue
        shape = _shape(module)
        min_rows = _min_rows(*shape, dtype, tuple(counts), torch.get_num_threads())
        if min_rows is None:
            return None
        floors[shape] = min_rows
    return floors


def pad_linears(model: nn.Module, floors: Floors) -> bool:
    """Replace linear modules that need padding or have a compiled form; False if one is unknown."""
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or module.weight.is_meta:
            continue
        if own := to_native(module):
            model.set_submodule(name, own)
            continue
        min_rows = floors.get(_shape(module))
        if min_rows is None:  # it has a hook, so it has no compiled form after all
            return False
        if min_rows > 1:
            model.set_submodule(name, PaddedLinear(module, min_rows))
    return True


def unpad_linears(model: nn.Module) -> None:
    """Undo `pad_linears`."""
    for name, module in list(model.named_modules()):
        if isinstance(module, PaddedLinear | CompiledLinear):
            model.set_submodule(name, module.plain)


def _shape(module: nn.Linear) -> tuple[int, int]:
    return probe_outputs(module.out_features, module.in_features), module.in_features


@cache
def _min_rows(
    outputs: int, inputs: int, dtype: torch.dtype, counts: Sequence[int], threads: int
) -> int | None:
    """Return the smallest number of rows from which on all of ``counts`` agree."""
    plain, x = probe_matrix(nn.Linear(inputs, outputs, bias=False, device="meta", dtype=dtype))
    linear = PackedLinear(plain) if keeps_bits(outputs, inputs, dtype, threads) else plain
    results = {rows: linear(x[None, :rows])[0] for rows in {*counts, *FLOORS}}
    return next((min_rows for min_rows in FLOORS if _agree(results, min_rows)), None)


def _agree(results: dict[int, Tensor], min_rows: int) -> bool:
    """Whether all results of at least ``min_rows`` rows are equal in the rows they share."""
    many = results[max(results)]
    return all(torch.equal(each, many[:rows]) for rows, each in results.items() if rows >= min_rows)
