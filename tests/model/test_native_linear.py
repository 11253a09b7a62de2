"""Which modules are exchanged for compiled ones, and that these have torch's bits."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from meshllm.model import native_linear
from meshllm.model.native_bf16 import Matrix
from meshllm.model.native_linear import (
    SMALLEST,
    Bits,
    Mode,
    NativeLinear,
    TurnedLinear,
    adopt,
    is_native,
    native_of,
    turned_of,
)
from meshllm.model.packed import pack, turn
from meshllm.model.specimen import specimen

SHAPES = [(64, 64), (256, 128), (512, 896), (100, 192), (64, 2048), (64, 3072)]


@pytest.fixture(autouse=True)
def _asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Try it on every processor, and forget what was found."""
    monkeypatch.setattr(native_linear, "suits", lambda: True)
    monkeypatch.setattr(native_linear, "turns", lambda: True)
    monkeypatch.setattr(native_linear, "SMALLEST", 1)
    native_linear._find_orders.cache_clear()
    native_linear._find_part.cache_clear()
    yield
    native_linear._find_orders.cache_clear()
    native_linear._find_part.cache_clear()


def linear(outputs: int = 64, inputs: int = 64, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias, dtype=torch.bfloat16)


def native(plain: nn.Linear) -> NativeLinear:
    module = native_of(plain)
    if module is None:
        pytest.skip("this processor adds in another order")
    return module


def mixed(outputs: int, inputs: int, *, bias: bool = False) -> tuple[nn.Linear, Tensor]:
    """Draw a matrix and rows [64, K] whose products leave nothing but their rounding."""
    like = nn.Linear(inputs, outputs, bias, device="meta", dtype=torch.bfloat16)
    plain, x = specimen(like)
    places = torch.randperm(inputs, generator=torch.Generator().manual_seed(1))
    plain.weight.data = plain.weight[:, places]
    return plain, x[:, places]


def alone(plain: nn.Linear, x: Tensor) -> Tensor:
    return torch.cat([plain(row[None]) for row in x])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@torch.inference_mode()
def test_bits_are_those_of_torch(outputs: int, inputs: int, bias: bool) -> None:
    plain, x = mixed(outputs, inputs, bias=bias)
    module = native(plain)

    prompt, one = module(x[None]), module(x[None, :1])
    module.mode.bits = Bits.STEP
    steps = [module(x[None, :17]), module(x[None, 17:20])]

    assert torch.equal(prompt, plain(x)[None])
    assert torch.equal(one, alone(plain, x[:1])[None])
    assert torch.equal(torch.cat(steps, 1), alone(plain, x[:20])[None])


@pytest.mark.parametrize("bits", Bits)
@torch.inference_mode()
def test_rows_of_any_shape_and_layout_are_taken(bits: Bits) -> None:
    plain, x = mixed(128, 192, bias=True)
    module = native(plain)
    module.mode.bits = bits

    expected = alone(plain, x) if bits is Bits.STEP else plain(x)
    assert torch.equal(module(x.view(4, 16, 192)), expected.view(4, 16, 128))
    with_gaps = torch.cat([x, x], 1)[None, :, :192]
    assert torch.equal(
        module(with_gaps), plain(with_gaps) if bits is Bits.STOCK else expected[None]
    )
    assert torch.equal(module(x[3]), alone(plain, x[3:4])[0])
    assert module(x[:0]).shape == (0, 128)


@pytest.mark.parametrize(("bits", "is_ours"), [(Bits.STOCK, False), (Bits.PROMPT, True)])
@torch.inference_mode()
def test_several_threads_leave_prompts_to_torch_where_its_bits_are_wanted(
    monkeypatch: pytest.MonkeyPatch, bits: Bits, is_ours: bool
) -> None:
    plain, x = mixed(512, 512)
    asked: list[int] = []

    def many(_self: Matrix, rows: Tensor, part: int) -> Tensor:
        asked.append(part)
        return nn.functional.linear(rows, plain.weight)

    monkeypatch.setattr(Matrix, "many", many)
    module, threads = NativeLinear(plain, 32), torch.get_num_threads()
    module.mode.bits = bits
    try:
        torch.set_num_threads(2)
        assert torch.equal(module(x[:33]), plain(x[:33]))
    finally:
        torch.set_num_threads(threads)

    assert asked == [32] * is_ours


@torch.inference_mode()
def test_what_is_found_does_not_depend_on_the_threads() -> None:
    plain, threads = linear(256, 128), torch.get_num_threads()
    native(plain)

    try:
        found = []
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            native_linear._find_orders.cache_clear()
            found.append(str(native_linear._orders_of(plain)))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)

    assert len(set(found)) == 1


@pytest.mark.parametrize("outputs", [1, 2, 64])
@torch.inference_mode()
def test_another_order_of_one_row_is_found_out(
    monkeypatch: pytest.MonkeyPatch, outputs: int
) -> None:
    def one_by_one(self: Matrix, x: Tensor) -> Tensor:
        weight = self._kept[0].float()
        products, total = x.float()[:, None] * weight, torch.zeros(len(x), outputs)
        for place in range(x.shape[1]):
            total = total + products[..., place]
        return total.bfloat16()

    native(linear(outputs))
    native_linear._find_orders.cache_clear()
    monkeypatch.setattr(Matrix, "few", one_by_one)

    assert native_of(linear(outputs)) is None


@torch.inference_mode()
def test_an_unknown_order_of_many_rows_stays_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, x = mixed(256, 64)
    native(plain)
    native_linear._find_orders.cache_clear()
    real = Matrix.few

    def only_few(self: Matrix, x: Tensor) -> Tensor:
        return real(self, x) if len(x) < 64 else torch.zeros(len(x), 256)

    monkeypatch.setattr(Matrix, "few", only_few)
    monkeypatch.setattr(Matrix, "many", lambda _, x, part: x.new_zeros(1))

    module = native(plain)

    assert module._part is None
    assert torch.equal(module(x), plain(x))


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


def turned(plain: nn.Linear) -> TurnedLinear:
    module = turned_of(plain)
    if module is None:
        pytest.skip("this processor adds in another order")
    return module


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (256, 1024), (64, 2048), (64, 3072)])
@torch.inference_mode()
def test_a_turned_copy_has_the_bits_of_torch_for_many_rows(
    outputs: int, inputs: int, bias: bool
) -> None:
    plain, x = mixed(outputs, inputs, bias=bias)
    module = turned(plain)

    for module.mode.bits in (Bits.PROMPT, Bits.STEP):
        whole = module(x[None])
        assert torch.equal(whole, plain(x)[None])
        for count in (1, 2, 3, 17):
            assert torch.equal(module(x[None, :count]), whole[:, :count])
    assert module(x[:0]).shape == (0, outputs)
    module.mode.bits = Bits.STOCK
    assert torch.equal(module(x[None, :1]), plain(x[None, :1]))


@torch.inference_mode()
def test_a_turned_copy_takes_rows_of_any_shape_and_layout() -> None:
    plain, x = mixed(128, 192, bias=True)
    module = turned(plain)
    module.mode.bits = Bits.STEP
    expected = plain(x)

    assert torch.equal(module(x.view(4, 16, 192)), expected.view(4, 16, 128))
    assert torch.equal(module(torch.cat([x, x], 1)[None, :, :192]), expected[None])
    assert torch.equal(module(x[3]), expected[3])


@torch.inference_mode()
def test_an_unknown_order_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Matrix, "many", lambda _, x, part: x.new_zeros(len(x), 64))

    assert turned_of(linear(64, 64)) is None


@torch.inference_mode()
def test_a_large_matrix_of_another_order_than_its_part_is_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turned(linear(256, 64))
    monkeypatch.setattr(native_linear, "_OUTPUTS", 64)
    assert type(turned_of(linear(256, 64))) is TurnedLinear

    monkeypatch.setattr(TurnedLinear, "forward", lambda _, x: torch.zeros(len(x), 256).bfloat16())

    assert turned_of(linear(256, 64)) is None


def test_what_is_of_another_kind_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    turned(linear())
    hooked = linear()
    hooked.register_forward_hook(lambda *_: None)
    others = [
        nn.Linear(64, 64), linear(65, 64), linear(64, 96), hooked,
        nn.Linear(64, 64, device="meta", dtype=torch.bfloat16),
    ]  # fmt: skip

    assert [turned_of(other) for other in others] == [None] * 5
    monkeypatch.setattr(native_linear, "SMALLEST", SMALLEST)
    assert turned_of(linear()) is None
    monkeypatch.setattr(native_linear, "turns", lambda: False)
    assert turned_of(linear(512, 512)) is None


def test_all_modules_are_told_what_to_compute() -> None:
    model, mode = nn.Sequential(linear(512, 512), nn.ReLU()), Mode(Bits.STEP)
    turned(linear(512, 512))

    turn(model)
    adopt(model, mode)
    once = model[0]
    turn(model)

    assert type(once) is TurnedLinear
    assert once is model[0]
    assert once.mode is mode


def test_a_linear_module_of_the_model_s_own_kind_is_not_exchanged() -> None:
    class Own(nn.Linear):
        pass

    turned(linear(512, 512))
    model = nn.Sequential(Own(512, 512, dtype=torch.bfloat16))

    turn(model)

    assert type(model[0]) is Own
