"""Matrices laid out in memory as the processor's kernel reads them.

Theory of operation
-------------------
A matrix lies in its file row by row. The kernel for 16-bit numbers wants blocks of it turned round
and does that on the way, for every token; a copy that was laid out once saves the turning. The copy
takes memory as the weights do; their own pages are mapped from the file, are not read again, and go
when somebody else needs the room.

Whether that is sooner, and gives the same bits, is a matter of the processor and the shape. So one
matrix of each shape is tried on load, and all of the shape are exchanged or none.
"""

import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshllm.model.modules.linear_bf16 import is_native
from meshllm.model.modules.specimen import MOST_ROWS, specimen

SMALLEST = 1 << 18  # values; a smaller matrix stays in the processor's cache as it is
LARGEST = 1 << 26  # values; of a larger one no second is made to try, its many outputs are enough
ROWS = (1, 2, 5, 8, 17, MOST_ROWS)
"""Rows that are compared: of a token, a draft and a prompt, even and odd."""
GAIN = 0.9  # of the time; for less a copy is not worth its memory
TRIALS = 5

Apply = Callable[[Tensor], Tensor]
_Kind = tuple[int, int, torch.dtype, bool]


class PackedLinear(nn.Linear):
    """A linear module that computes with a copy of its matrix."""

    def __init__(self, plain: nn.Linear) -> None:
        """Copy; raise `RuntimeError` where no kernel knows this dtype on this processor."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), 1)
        self._packed: tuple[Any, ...] = packed, plain.bias, "none", [], ""
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- the name that stock code may use
        """Multiply [..., K] to [..., N], as the plain module does."""
        if not input.is_contiguous():  # then the bias is added to what was rounded already
            return super().forward(input)
        result: Tensor = self._multiply(input, *self._packed)
        return result


@torch.inference_mode()
def pack(model: nn.Module, skip: Collection[str] = ()) -> None:
    """Exchange the linear modules whose copies are faster; none in or under ``skip``."""
    gains: dict[_Kind, bool] = {}
    for name, plain in list(_candidates(model)):
        if any(f"{name}.".startswith(f"{outer}.") for outer in skip):
            continue
        kind = *plain.weight.shape, plain.weight.dtype, plain.bias is not None
        if kind not in gains:
            gains[kind] = not is_native(plain) and _gains(plain)
        if gains[kind]:
            model.set_submodule(name, PackedLinear(plain))


@torch.inference_mode()
def same(one: Apply, other: Apply, x: Tensor) -> bool:
    """Whether two modules give the same bits for the first rows of ``x`` [M, K], however many."""
    batches = [x[:rows][None] for rows in ROWS]
    return all(torch.equal(one(batch), other(batch)) for batch in batches)


def sooner(one: Apply, other: Apply, x: Tensor) -> bool:
    """Whether the second of two modules takes at most `GAIN` of the time of the first."""
    times = [(_seconds(one, x), _seconds(other, x)) for _ in range(TRIALS)]
    return min(mine for _, mine in times) <= GAIN * min(theirs for theirs, _ in times)


def _gains(plain: nn.Linear) -> bool:
    """Whether copies of this shape give the same bits, and sooner."""
    sample, x = specimen(plain) if plain.weight.numel() <= LARGEST else _itself(plain)
    try:
        packed = PackedLinear(sample)
        return same(sample, packed, x) and sooner(sample, packed, x[:1])
    except (RuntimeError, AttributeError):  # this processor, or this build of torch, has no kernel
        return False


def _itself(plain: nn.Linear) -> tuple[nn.Linear, Tensor]:
    """Take a matrix as it is, with a few rows [M, K]: those that a head is asked for."""
    generator = torch.Generator().manual_seed(0)
    return plain, torch.randn(8, plain.in_features, generator=generator).to(plain.weight.dtype)


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Find large 16-bit matrices that nothing else is attached to.

    Those of float32 are multiplied by another library, with other bits.
    """
    for name, module in model.named_modules():
        if (
            type(module) is nn.Linear
            and module.weight.device.type == "cpu"
            and module.weight.dtype.itemsize == 2
            and module.weight.numel() >= SMALLEST
            and not module._forward_hooks
            and not module._forward_pre_hooks
        ):
            yield name, module


def _seconds(apply: Apply, x: Tensor) -> float:
    begin = time.perf_counter()
    apply(x)
    return time.perf_counter() - begin
