"""Which modules are replaced by compiled ones, and that they are row-invariant."""

from math import inf

import pytest
import torch
from torch import Tensor, nn

from meshllm.model.kernels import jit
from meshllm.model.kernels.gemm_bf16 import Bf16Matrix
from meshllm.model.modules import linear_bf16
from meshllm.model.modules.kernel_choice import FEWEST, LinearKernel, has_bf16_dot
from meshllm.model.modules.linear_bf16 import (
    DOT_ROWS,
    DOT_TILE,
    MAX_ROWS,
    CompiledLinear,
    choose_kernel,
    has_native,
    to_native,
    use_own_gemm,
)
from meshllm.model.modules.quant_matrix import multiplies_matrices

pytestmark = pytest.mark.skipif(
    not jit.jit_available(), reason="executable memory is forbidden here"
)


KERNELS = [LinearKernel.FMA, *([LinearKernel.DOT] if has_bf16_dot() else [])]


@pytest.fixture(autouse=True, params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LinearKernel:
    """Enable the replacement on every CPU, with each kernel."""
    kernel: LinearKernel = request.param
    monkeypatch.setattr(linear_bf16, "use_own_gemm", lambda: kernel is LinearKernel.FMA)
    monkeypatch.setattr(linear_bf16, "fastest", lambda *_: kernel)
    return kernel


def linear(outputs: int = 64, inputs: int = 64, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias, dtype=torch.bfloat16)


def made(plain: nn.Linear) -> CompiledLinear:
    module = to_native(plain)
    assert module is not None
    return module


@pytest.mark.parametrize(("outputs", "inputs", "bias"), [(64, 64, True), (100, 192, False)])
@torch.inference_mode()
def test_rows_of_a_step_are_row_invariant_and_close_to_torch(
    outputs: int, inputs: int, bias: bool
) -> None:
    plain = linear(outputs, inputs, bias=bias)
    module, x = made(plain), torch.randn(1, 40, inputs).bfloat16()
    alone = torch.cat([module(x[:, at : at + 1]) for at in range(MAX_ROWS)], 1)

    for rows in (2, 7, MAX_ROWS):
        assert torch.equal(module(x[:, :rows]), alone[:, :rows])
    for rows in (1, MAX_ROWS, 40):
        torch.testing.assert_close(module(x[:, :rows]), plain(x[:, :rows]), rtol=0.02, atol=0.02)


@torch.inference_mode()
def test_a_prompt_has_the_bits_of_its_rows_with_the_instruction_for_pairs(
    kernel: LinearKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_bf16, "multiplies_matrices", lambda: False)
    rows = DOT_TILE + DOT_ROWS + 3
    module, x = made(linear(100, 192)), torch.randn(1, rows, 192).bfloat16()
    whole = module(x)

    if kernel is LinearKernel.DOT:
        for chunk in (1, MAX_ROWS, DOT_ROWS, DOT_TILE + 1):
            parts = [module(each) for each in torch.split(x, chunk, 1)]
            assert torch.equal(torch.cat(parts, 1), whole)
    torch.testing.assert_close(whole, module.plain(x), rtol=0.02, atol=0.02)


@torch.inference_mode()
def test_a_prompt_is_multiplied_in_float32_where_the_instruction_for_pairs_is_slower(
    kernel: LinearKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_bf16, "multiplies_matrices", lambda: False)
    plain = linear(64, FEWEST)
    x = torch.randn(1, DOT_ROWS + 1, FEWEST).bfloat16()
    monkeypatch.setattr(linear_bf16, "has_slow_dot", lambda: False)
    before = made(plain)
    monkeypatch.setattr(linear_bf16, "has_slow_dot", lambda: True)
    module, uneven, small = made(plain), made(linear(100, FEWEST)), made(linear(64, 64))

    few = x[:, :DOT_ROWS]
    assert torch.equal(module(few), before(few))
    rows = x.view(-1, FEWEST)
    assert torch.equal(module(x)[0], Bf16Matrix(plain.weight.detach()).gemm(rows))
    torch.testing.assert_close(module(x), plain(x), rtol=0.02, atol=0.02)
    if kernel is LinearKernel.DOT:
        assert (before.most_rows, module.most_rows) == (inf, DOT_ROWS)
        assert (uneven.most_rows, small.most_rows) == (inf, inf)


@torch.inference_mode()
def test_rows_of_any_shape_and_layout_are_supported(kernel: LinearKernel) -> None:
    module, x = made(linear(128, 192, bias=True)), torch.randn(64, 192).bfloat16()

    assert module.kernel is kernel
    expected = module(x)
    assert torch.equal(module(x.view(4, 16, 192)), expected.view(4, 16, 128))
    assert torch.equal(module(torch.cat([x, x], 1)[None, :, :192]), expected[None])
    assert torch.equal(module(x[3]), module(x[3:4])[0])
    assert module(x[:0]).shape == (0, 128)
    assert module(x[:2].float().to(torch.bfloat16)).dtype == torch.bfloat16


@torch.inference_mode()
def test_many_rows_with_an_incomplete_output_block_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, x = linear(100, 64), torch.randn(DOT_ROWS + 1, 64).bfloat16()
    monkeypatch.setattr(Bf16Matrix, "gemm", None)
    monkeypatch.setattr(linear_bf16, "multiplies_matrices", lambda: True)

    assert torch.equal(made(plain)(x), plain(x))


def test_unsupported_modules_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class LocalIdentity(nn.Linear):
        pass

    hooked = linear()
    hooked.register_forward_hook(lambda *_: None)
    others = [
        nn.Linear(64, 64), LocalIdentity(64, 64, dtype=torch.bfloat16), linear(64, 96), hooked,
        nn.Linear(64, 64, device="meta", dtype=torch.bfloat16),
    ]  # fmt: skip

    assert [to_native(other) for other in others] == [None] * 5
    assert not any(has_native(other) for other in others[:3])
    monkeypatch.setattr(linear_bf16, "use_own_gemm", lambda: False)
    monkeypatch.setattr(linear_bf16, "fastest", lambda *_: LinearKernel.TORCH)
    assert not has_native(linear())


def test_without_executable_memory_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "jit_available", lambda: False)

    assert choose_kernel(linear()) is LinearKernel.TORCH


@pytest.mark.parametrize("feature", ["avx512bf16", "amx-bf16", "bf16"])
def test_a_cpu_with_bf16_instructions_is_detected(
    monkeypatch: pytest.MonkeyPatch, feature: str
) -> None:
    monkeypatch.undo()
    for known in ("", feature):
        monkeypatch.setattr(jit, "has_cpu_feature", lambda *names, known=known: known in names)
        tried = has_bf16_dot.__wrapped__(), multiplies_matrices.__wrapped__()
        assert any(tried) == bool(known)


def test_nan_affects_only_its_row() -> None:
    module, x = made(linear(64, 128)), torch.randn(3, 128).bfloat16()
    clean: Tensor = module(x)
    x[1] = torch.nan

    given = module(x)

    assert given[1].isnan().all()
    assert torch.equal(given[::2], clean[::2])


@pytest.mark.parametrize("has_fma", [True, False])
def test_without_an_instruction_to_multiply_and_add_kernels_are_measured(
    monkeypatch: pytest.MonkeyPatch, *, has_fma: bool
) -> None:
    monkeypatch.setattr(linear_bf16, "has_bf16_dot", lambda: False)
    monkeypatch.setattr(linear_bf16, "multiplies_matrices", lambda: False)
    monkeypatch.setattr(jit, "jit_available", lambda: True)
    monkeypatch.setattr(jit, "has_fma", lambda: has_fma)

    assert use_own_gemm.__wrapped__() is has_fma
