"""Linear modules that give torch's bits sooner, by compiled functions; knows no family by name.

Theory of operation
-------------------
Where a processor has no instructions for bfloat16, torch multiplies one row slower than its weights
come from memory, two rows three times as slow, and prompts at a fraction of what the processor can.
`meshllm.model.native_bf16` adds in the same orders. Which ones they are is tried for each shape:

- Rows of a step each have the bits of torch's product with one row, in any company.
- Rows of a prompt have the bits that torch gives a row among many. Where several of its threads
  share out rows, torch takes one that is left over in the order of one row; so where its own bits
  are wanted, several threads leave prompts to torch.

What torch adds in no known order stays with torch. On other processors its kernels are as fast.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshllm.model import native
from meshllm.model.native_bf16 import LANES_OF_ROW, OUTPUTS, multiply_few, multiply_many
from meshllm.model.native_int8 import adds_pairs
from meshllm.model.quant_int8 import multiplies_matrices
from meshllm.model.specimen import specimen

_OUTPUTS = 4096  # of a large matrix that are tried
_PART = 768  # inputs that oneDNN takes at a time; up to twice as many are halved

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Bits(Enum):
    """What rows are to have the bits of; one that comes by itself has those of a row alone."""

    STOCK = auto()
    """Of torch."""
    PROMPT = auto()
    """Of a row among many, where that order is known."""
    STEP = auto()
    """Of a row alone."""


@dataclass(slots=True)
class Mode:
    """What a model computes, told to all of its modules at once."""

    bits: Bits = Bits.STOCK


class NativeLinear(nn.Linear):
    """A linear module that multiplies its weights where they lie."""

    def __init__(self, plain: nn.Linear, many: Multiply | None) -> None:
        """Take over weights; ``many`` rows are multiplied so, or by torch."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        self.mode = Mode()
        self._many = many

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- the name that stock code may use
        """Multiply [..., K] to [..., N]."""
        x, count = input, input.numel() // self.in_features
        multiply = self._find(x, count) if x.dtype == torch.bfloat16 else None
        if multiply is None:
            return functional.linear(x, self.weight, self.bias)
        products = multiply(x.reshape(count, self.in_features), self.weight, self.bias)
        return products.view(*x.shape[:-1], self.out_features)

    def _find(self, x: Tensor, count: int) -> Multiply | None:
        """Choose what multiplies so many rows; None is torch."""
        if count == 1 or self.mode.bits is Bits.STEP:
            return multiply_few
        if self.mode.bits is Bits.STOCK and (torch.get_num_threads() > 1 or not x.is_contiguous()):
            return None  # the bias is added to what was rounded already where rows have gaps
        return self._many


def adopt(model: nn.Module, mode: Mode) -> None:
    """Let all modules of a model heed a mode."""
    for module in model.modules():
        if isinstance(module, NativeLinear):
            module.mode = mode


def native_of(plain: nn.Linear) -> NativeLinear | None:
    """Make a module of the same weights and bits; None where torch has others, or is as fast.

    It takes no hooks over, so modules that have some stay, too.
    """
    if isinstance(plain, NativeLinear):
        return plain
    weight, hooks = plain.weight, plain._forward_hooks | plain._forward_pre_hooks
    if weight.device.type != "cpu" or not weight.is_contiguous() or hooks or not is_native(plain):
        return None
    return NativeLinear(plain, _orders_of(plain).many)


def is_native(like: nn.Linear) -> bool:
    """Whether there is a `NativeLinear` for such modules on the CPU; ``like`` may be on meta."""
    return (
        type(like) in (nn.Linear, NativeLinear)
        and like.weight.dtype == torch.bfloat16
        and like.in_features % LANES_OF_ROW == 0
        and like.weight.numel() > 0
        and suits()
        and _orders_of(like).has_few
    )


@cache
def suits() -> bool:
    """Whether this processor has no instructions for bfloat16, and runs what is compiled."""
    return native.works() and not adds_pairs() and not multiplies_matrices()


@dataclass(frozen=True, slots=True)
class _Orders:
    """What is known of how torch multiplies by matrices of a shape."""

    has_few: bool
    """Whether one row is added up as by `multiply_few`."""
    many: Multiply | None


def _orders_of(like: nn.Linear) -> _Orders:
    outputs = min(like.out_features, _OUTPUTS)
    if like.out_features % OUTPUTS and outputs % OUTPUTS == 0:
        outputs -= 1  # a part is no more whole than all of it
    return _find_orders(outputs, like.in_features, like.bias is not None)


@cache
@torch.inference_mode()
def _find_orders(outputs: int, inputs: int, has_bias: bool) -> _Orders:
    """Try a shape, with sums of which nothing but their rounding is left, on one thread."""
    like = nn.Linear(inputs, outputs, has_bias, device="meta", dtype=torch.bfloat16)
    plain, x = specimen(like)
    # What cancels is mixed: halves of a sum that are the same, but for the sign, leave nothing.
    places = torch.randperm(inputs, generator=torch.Generator().manual_seed(0))
    plain.weight.data, x = plain.weight[:, places], x[:, places]
    weight, bias = plain.weight, plain.bias if has_bias else None
    single = x[: max(1, _OUTPUTS // outputs)]  # many for a small matrix: some sums are alike
    with _one_thread():
        alone = torch.cat([plain(row[None]) for row in single])
        many = plain(x)
    if not torch.equal(alone, multiply_few(single, weight, bias)):
        return _Orders(False, None)
    ways: list[Multiply] = [multiply_few]
    if outputs % OUTPUTS == 0:
        parts = {inputs, inputs // 2, _PART}
        ways += [partial(multiply_many, part=part) for part in sorted(parts) if part % 32 == 0]
    same = (way for way in ways if torch.equal(way(x, weight, bias), many))
    return _Orders(True, next(same, None))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch share out nothing."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
