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

What torch adds in no known order stays with torch.

Some processors have such instructions, but are sooner without them (see
`meshllm.model.native_pairs`). There rows of a step have the bits of a row among many, too, and a
copy of the weights is read, which was turned round for that: torch needs one as well to be as fast
as it can. On other processors its kernels are as fast.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshllm.model import native
from meshllm.model.native_bf16 import LANES_OF_ROW, OUTPUTS, Matrix, Turned
from meshllm.model.native_pairs import adds_pairs, pairs_pay
from meshllm.model.quant_int8 import multiplies_matrices
from meshllm.model.specimen import specimen

SMALLEST = 1 << 18  # values; a smaller matrix stays in the processor's cache as it is
_OUTPUTS = 4096  # of a large matrix that are tried
_PART = 768  # inputs that oneDNN takes at a time; up to twice as many are halved
_PART_OF_PAIRS = 1024  # the same where it has instructions for pairs
_COUNTS = 3, 5, 17, 64  # rows of a specimen that are tried


class Bits(Enum):
    """What rows are to have the bits of.

    A row that comes by itself has those of a row alone; of a `TurnedLinear`, but for `STOCK`, those
    of a row among many.
    """

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


class _Compiled(nn.Linear):
    """A linear module that takes over weights, which may change no more."""

    def __init__(self, plain: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        self.mode = Mode()

    def _held(self) -> tuple[Tensor, Tensor | None]:
        return self.weight.detach(), None if self.bias is None else self.bias.detach()


class NativeLinear(_Compiled):
    """A linear module that multiplies its weights where they lie."""

    def __init__(self, plain: nn.Linear, part: int | None) -> None:
        """Take over weights, which may move no more either.

        Many rows are multiplied in blocks of ``part`` inputs, with 0 as one is, with None by torch.

        Raises:
            ValueError: as of `Matrix`.
        """
        super().__init__(plain)
        self._part = part
        self._matrix = Matrix(*self._held())

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- the name that stock code may use
        """Multiply [..., K] to [..., N]."""
        x, count = input, input.numel() // self.in_features
        part = 0 if count == 1 or self.mode.bits is Bits.STEP else self._part
        if part is None or x.dtype != torch.bfloat16 or (count > 1 and self._is_for_torch(x)):
            return functional.linear(x, self.weight, self.bias)
        rows = x.reshape(count, self.in_features)
        products = self._matrix.many(rows, part) if part else self._matrix.few(rows)
        return products.view(*x.shape[:-1], self.out_features)

    def _is_for_torch(self, x: Tensor) -> bool:
        """Whether torch might add up these rows in several orders, and its bits are wanted.

        Where rows have gaps it adds the bias to what was rounded already.
        """
        is_stock = self.mode.bits is Bits.STOCK
        return is_stock and (torch.get_num_threads() > 1 or not x.is_contiguous())


class TurnedLinear(_Compiled):
    """A linear module that multiplies a copy of its weights; torch does where its bits are wanted.

    Each row has the bits of a row among many.
    """

    def __init__(self, plain: nn.Linear, part: int) -> None:
        """Copy weights; ``part`` inputs are a block.

        Raises:
            ValueError: as of `Turned`.
        """
        super().__init__(plain)
        self._part = part
        self._copy = Turned(*self._held())

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- the name that stock code may use
        """Multiply [..., K] to [..., N]."""
        if self.mode.bits is Bits.STOCK or input.dtype != torch.bfloat16:
            return functional.linear(input, self.weight, self.bias)
        rows = input.reshape(-1, self.in_features)
        return self._copy.many(rows, self._part).view(*input.shape[:-1], self.out_features)


def adopt(model: nn.Module, mode: Mode) -> None:
    """Let all modules of a model heed a mode."""
    for module in model.modules():
        if isinstance(module, _Compiled):
            module.mode = mode


def turned_of(plain: nn.Linear) -> TurnedLinear | None:
    """Make a module of a copy; None where torch has other bits, or is as fast."""
    weight = plain.weight
    if (
        not turns()
        or weight.dtype != torch.bfloat16
        or weight.device.type != "cpu"
        or not weight.is_contiguous()
        or weight.numel() < SMALLEST
        or weight.shape[0] % OUTPUTS
        or weight.shape[1] % LANES_OF_ROW
        or plain._forward_hooks
        or plain._forward_pre_hooks
    ):
        return None
    part = _find_part(min(weight.shape[0], _OUTPUTS), weight.shape[1], plain.bias is not None)
    made = part and TurnedLinear(plain, part)
    return made if made and (weight.shape[0] <= _OUTPUTS or _agree(made, plain)) else None


@torch.inference_mode()
def _agree(made: TurnedLinear, plain: nn.Linear) -> bool:
    """Whether a large matrix gives the bits of torch, which a part of it does."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, plain.in_features, generator=generator).bfloat16()
    made.mode = Mode(Bits.STEP)
    return torch.equal(made(x), functional.linear(x, plain.weight, plain.bias))


@cache
def turns() -> bool:
    """Whether this processor has instructions for bfloat16, and is sooner without them."""
    return native.works() and adds_pairs() and not pairs_pay() and not multiplies_matrices()


@cache
@torch.inference_mode()
def _find_part(outputs: int, inputs: int, has_bias: bool) -> int | None:
    """Try a shape as `_find_orders` does, for rows among many; None is that they have no order."""
    plain, x = specimen(nn.Linear(inputs, outputs, has_bias, device="meta", dtype=torch.bfloat16))
    places = torch.randperm(inputs, generator=torch.Generator().manual_seed(0))
    plain.weight.data, x = plain.weight[:, places], x[:, places]
    matrix = Matrix(plain.weight.detach(), plain.bias.detach() if has_bias else None)
    with _one_thread():
        found = {count: plain(x[:count]) for count in _COUNTS}
    parts = sorted({inputs, inputs // 2, _PART, _PART_OF_PAIRS}, reverse=True)
    for part in parts:
        if part % 32 == 0 and all(
            torch.equal(rows, matrix.many(x[:count], part)) for count, rows in found.items()
        ):
            return part
    return None


def native_of(plain: nn.Linear) -> NativeLinear | None:
    """Make a module of the same weights and bits; None where torch has others, or is as fast.

    It takes no hooks over, so modules that have some stay, too.
    """
    if isinstance(plain, NativeLinear):
        return plain
    weight, hooks = plain.weight, plain._forward_hooks | plain._forward_pre_hooks
    if weight.device.type != "cpu" or not weight.is_contiguous() or hooks or not is_native(plain):
        return None
    return NativeLinear(plain, _orders_of(plain).part)


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
    """Whether one row is added up as by `Matrix.few`."""
    part: int | None
    """Inputs of a block of many; 0 if these are added up as one is; None if it is another way."""


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
    matrix = Matrix(plain.weight.detach(), plain.bias.detach() if has_bias else None)
    single = x[: max(1, _OUTPUTS // outputs)]  # many for a small matrix: some sums are alike
    with _one_thread():
        alone = torch.cat([plain(row[None]) for row in single])
        many = plain(x)
    if not torch.equal(alone, matrix.few(single)):
        return _Orders(False, None)
    if torch.equal(many, matrix.few(x)):
        return _Orders(True, 0)
    parts = [part for part in sorted({inputs, inputs // 2, _PART}) if part % 32 == 0]
    same = (part for part in parts if torch.equal(many, matrix.many(x, part)))
    return _Orders(True, None if outputs % OUTPUTS else next(same, None))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch share out nothing."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
