"""Which modules are exchanged for compiled ones, and that these have torch's bits."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshllm.model import native_linear
from meshllm.model.native_bf16 import multiply_few
from meshllm.model.native_linear import Bits, Mode, NativeLinear, is_native, native_of
from meshllm.model.packed import pack

SHAPES = [(64, 64), (256, 128), (512, 896), (100, 192), (64, 2048), (64, 3072)]


@pytest.fixture(autouse=True)
def _asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Try it on every processor, and forget what was found."""
    monkeypatch.setattr(native_linear, "suits", lambda: True)
    native_linear._find_orders.cache_clear()
    yield
    native_linear._find_orders.cache_clear()


def linear(outputs: int = 64, inputs: int = 64, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias, dtype=torch.bfloat16)


def native(plain: nn.Linear) -> NativeLinear:
    module = native_of(plain)
    if module is None:
        pytest.skip("this processor adds in another order")
    return module


def rows(count: int, inputs: int) -> Tensor:
    """Draw rows; two halves of a matrix that is drawn so, too, would leave their rounding."""
    return torch.randn(1, count, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@torch.inference_mode()
def test_bits_are_those_of_torch(outputs: int, inputs: int, bias: bool) -> None:
    plain = linear(outputs, inputs, bias=bias)
    half = inputs // 2
    plain.weight[:, half:] = -plain.weight[:, :half]
    module, x = native(plain), rows(64, inputs)
    x[..., half:] = x[..., :half] * (1 + 2**-7)

    prompt, one = module(x), module(x[:, :1])
    module.mode.bits = Bits.STEP
    steps = [module(x[:, :17]), module(x[:, 17:20])]

    alone = torch.cat([plain(x[0, at : at + 1]) for at in range(20)])[None]
    assert torch.equal(prompt, plain(x))
    assert torch.equal(one, alone[:, :1])
    assert torch.equal(torch.cat(steps, 1), alone)


@torch.inference_mode()
def test_rows_of_any_shape_and_layout_are_taken() -> None:
    plain = linear(128, 64, bias=True)
    module = native(plain)

    for x in (
        rows(12, 64)[0],
        rows(12, 64).view(3, 4, 64),
        rows(24, 64)[:, ::2],
        rows(1, 64)[0, 0],
    ):
        assert torch.equal(module(x), plain(x))
    assert module(rows(1, 64)[:, :0]).shape == (1, 0, 128)


@torch.inference_mode()
def test_several_threads_leave_prompts_to_torch_where_its_bits_are_wanted() -> None:
    plain, threads = linear(512, 512), torch.get_num_threads()
    module, x = native(plain), rows(33, 512)
    try:
        torch.set_num_threads(2)
        stock, expected = module(x), plain(x)
        module.mode.bits = Bits.PROMPT
        prompt = module(x)
    finally:
        torch.set_num_threads(threads)

    assert torch.equal(stock, expected)
    assert torch.equal(prompt, module(x))


@torch.inference_mode()
def test_an_unknown_order_of_many_rows_stays_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = linear()
    native(plain)
    native_linear._find_orders.cache_clear()
    real = multiply_few

    def only_one(x: Tensor, *others: Any) -> Tensor:
        return real(x, *others) if len(x) == 1 else torch.zeros(len(x), 64)

    monkeypatch.setattr(native_linear, "multiply_few", only_one)
    monkeypatch.setattr(native_linear, "multiply_many", lambda x, *_, part: x.new_zeros(1))

    module = native(plain)

    assert module._many is None
    assert torch.equal(module(rows(64, 64)), plain(rows(64, 64)))


def test_an_unknown_order_of_one_row_leaves_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_linear, "multiply_few", lambda x, *_: x.new_zeros(1, 64))

    assert native_of(linear()) is None


def test_what_is_of_another_kind_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Linear):
        pass

    hooked = linear()
    hooked.register_forward_hook(lambda *_: None)
    others = [
        nn.Linear(64, 64), Own(64, 64, dtype=torch.bfloat16), linear(64, 96), hooked,
        nn.Linear(64, 64, device="meta", dtype=torch.bfloat16),
    ]  # fmt: skip

    assert [native_of(other) for other in others] == [None] * 5
    assert not any(is_native(other) for other in others[:3])
    monkeypatch.setattr(native_linear, "suits", lambda: False)
    assert not is_native(linear())


def test_large_matrices_are_exchanged_on_load() -> None:
    model = nn.Sequential(linear(512, 512), nn.ReLU(), linear(64, 64))
    native(linear(512, 512))
    weight = model[0].weight

    pack(model)

    assert type(model[0]) is NativeLinear
    assert model[0].weight is weight
    assert type(model[2]) is nn.Linear
    assert model[0].mode == Mode()
