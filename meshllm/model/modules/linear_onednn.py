"""Linear layers with weights prepacked in the layout of oneDNN.

Theory of operation
-------------------
A matrix is stored in its file row by row. oneDNN's kernel for 16-bit numbers needs transposed
blocks and reorders them on the fly, for every token; a copy that is packed once saves that. The
copy takes as much memory as the weights; their own pages are mapped from the file, are not read
again, and are reclaimed when memory is short.

Whether that is faster, and gives the same bits, depends on the CPU and the shape. So each shape is
tried once per process, the bits by a small probe and the time by a matrix that is read from memory,
and either all matrices of that shape are replaced or none.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from meshllm.model.device import is_out_of_memory
from meshllm.model.hardware import uncached_bytes
from meshllm.model.modules.linear_bf16 import has_native
from meshllm.model.modules.probe import MAX_ROWS, probe_matrix, probe_outputs
from meshllm.model.pauses import pause

SMALLEST = 1 << 18  # values; a smaller matrix fits in the CPU cache anyway
ROWS = (1, 2, 5, 8, 17, MAX_ROWS)
"""Numbers of rows to compare: of a token, a draft and a prompt, even and odd."""
GAIN = 0.9  # of the time; a smaller gain is not worth the memory of a copy
CLEAR_GAIN = 0.5  # of the time; two trials show it
TRIALS = 5
_TIMED = 1 << 25  # values of a matrix that is timed: of a larger one, its first outputs

Apply = Callable[[Tensor], Tensor]


class PackedLinear(nn.Linear):
    """A linear module that computes with a packed copy of its matrix."""

    def __init__(self, plain: nn.Linear) -> None:
        """Pack a copy; raise `RuntimeError` if this CPU has no kernel for the dtype."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), 1)
        self._packed: tuple[Any, ...] = packed, plain.bias, "none", [], ""
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    @property
    def packed(self) -> Sequence[Tensor]:
        """The copy of its matrix, in a layout without an address."""
        return self._packed[:1]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- the name that stock code may use
        """Multiply [..., K] to [..., N], as the plain module does."""
        if not input.is_contiguous():  # stock code then adds the bias to rounded sums
            return super().forward(input)
        result: Tensor = self._multiply(input, *self._packed)
        return result


@torch.inference_mode()
def replace_linears(model: nn.Module, skip: Collection[str] = (), *, exact: bool = False) -> None:
    """Replace the linear modules whose packed copies are faster; none in or under ``skip``.

    Unless steps are to be ``exact``, those that have a compiled form are left to it.
    """
    for name, plain in list(_candidates(model)):
        if any(f"{name}.".startswith(f"{outer}.") for outer in skip):
            continue
        pause()
        kind = *plain.weight.shape, plain.weight.dtype, torch.get_num_threads()
        has_bias = plain.bias is not None
        if (exact or not has_native(plain)) and _gains(*kind, has_bias=has_bias):
            model.set_submodule(name, PackedLinear(plain))


@cache
def keeps_bits(
    outputs: int, inputs: int, dtype: torch.dtype, _threads: int, *, has_bias: bool = False
) -> bool:
    """Whether packed copies of this shape multiply with the same bits."""
    if dtype.itemsize != 2:  # another library multiplies float32, with other bits
        return False
    probe, x = probe_matrix(nn.Linear(inputs, outputs, has_bias, device="meta", dtype=dtype))
    try:
        return same_bits(probe, PackedLinear(probe), x)
    except (RuntimeError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        return False  # this CPU, or this build of torch, has no kernel


@torch.inference_mode()
def same_bits(one: Apply, other: Apply, x: Tensor) -> bool:
    """Whether two modules give the same bits for the first `ROWS` rows of ``x`` [M, K]."""
    batches = [x[:rows][None] for rows in ROWS]
    return all(torch.equal(one(batch), other(batch)) for batch in batches)


def is_faster(one: Apply, other: Apply, x: Tensor) -> bool:
    """Whether the second of two modules takes at most `GAIN` of the time of the first."""
    cold = torch.empty(uncached_bytes(), dtype=torch.uint8)
    theirs, mine = list[float](), list[float]()
    while len(theirs) < TRIALS:
        for apply, times in ((one, theirs), (other, mine)):
            cold.fill_(len(times))
            times.append(_seconds(apply, x))
        if len(theirs) > 1 and max(mine) <= CLEAR_GAIN * min(theirs):
            break
    return min(mine) <= GAIN * min(theirs)


@cache
def _gains(outputs: int, inputs: int, dtype: torch.dtype, threads: int, *, has_bias: bool) -> bool:
    """Whether packed copies of this shape give the same bits, faster."""
    probed = probe_outputs(outputs, inputs)
    if not keeps_bits(probed, inputs, dtype, threads, has_bias=has_bias):
        return False
    timed = min(outputs, max(1, _TIMED // inputs))
    plain = nn.Linear(inputs, timed, has_bias, device="meta", dtype=dtype)
    plain.weight = nn.Parameter(torch.full((timed, inputs), 0.01, dtype=dtype))
    if has_bias:
        plain.bias = nn.Parameter(torch.zeros(timed, dtype=dtype))
    return is_faster(plain, PackedLinear(plain), torch.ones(1, inputs, dtype=dtype))


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield linear modules with large 16-bit matrices and without hooks.

    Matrices of float32 are multiplied by another library, with other bits.
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
