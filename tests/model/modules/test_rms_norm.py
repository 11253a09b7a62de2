"""Fused RMS norms: only RMS norms are replaced, and rows are row-invariant."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from meshllm.model.kernels.rms_norm import norm
from meshllm.model.modules import rms_norm
from meshllm.model.modules.rms_norm import (
    FusedRMSNorm,
    TorchRMSNorm,
    fuse_rms_norms,
    fused,
    unfuse_rms_norms,
)


def drawn(plain: Any) -> Any:
    module = plain.bfloat16()
    generator = torch.Generator().manual_seed(5)
    module.weight.data = torch.randn(module.weight.shape, generator=generator).bfloat16()
    return module


def fused_copy(plain: nn.Module) -> nn.Module:
    model = nn.Sequential(plain)
    fuse_rms_norms(model)
    return model[0]


def test_replacements_are_undone() -> None:
    plain = drawn(LlamaRMSNorm(64))
    model = nn.Sequential(plain)
    fuse_rms_norms(model)

    unfuse_rms_norms(model)

    assert model[0] is plain


class Shifted(LlamaRMSNorm):  # type: ignore[misc]  # transformers is not followed
    """Looks like an RMS norm, but is not one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.01  # type: ignore[no-any-return]


class Biased(LlamaRMSNorm):  # type: ignore[misc]  # transformers is not followed
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.bias = nn.Parameter(torch.zeros(width))


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
@pytest.mark.parametrize("width", [1, 24, 128, 1024, 1000])
def test_a_norm_is_replaced(kind: Any, width: int) -> None:
    plain = drawn(kind(width))
    model = nn.Sequential(plain)

    fuse_rms_norms(model)

    own, x = model[0], torch.randn(2, 3, width).bfloat16()
    assert isinstance(own, FusedRMSNorm)
    assert list(own.state_dict()) == ["weight"]
    assert own(x).shape == x.shape
    assert torch.allclose(own(x).float(), plain(x).float(), rtol=2**-6, atol=0)
    assert (own(x) == plain(x)).float().mean() > 0.95


@pytest.mark.parametrize(
    "other",
    [GemmaRMSNorm(64), Shifted(64), Biased(64), nn.LayerNorm(64), nn.RMSNorm(64, 1e-6).float()],
    ids=lambda each: type(each).__name__,
)
def test_other_modules_are_not_replaced(other: nn.Module) -> None:
    model = nn.Sequential(other if isinstance(other, nn.RMSNorm) else drawn(other))

    fuse_rms_norms(model)

    assert not isinstance(model[0], FusedRMSNorm)


class Switched(LlamaRMSNorm):  # type: ignore[misc]  # transformers is not followed
    """Is an RMS norm unless it is switched."""

    is_shifted = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.01 if self.is_shifted else 1)  # type: ignore[no-any-return]


def test_a_norm_is_compared_unless_one_of_its_kind_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, shifted = (drawn(Switched(72)) for _ in range(3))
    shifted.is_shifted = True

    zero = drawn(Switched(72))
    zero.is_shifted = True
    zero.weight.data.zero_()

    assert isinstance(fused_copy(one), FusedRMSNorm)
    assert isinstance(fused_copy(zero), FusedRMSNorm)  # whatever it computes
    assert not isinstance(fused_copy(shifted), FusedRMSNorm)
    monkeypatch.setattr(rms_norm, "_agree", lambda *_, **__: False)
    assert isinstance(fused_copy(other), FusedRMSNorm)
    assert not isinstance(fused_copy(drawn(Switched(80))), FusedRMSNorm)


@pytest.mark.parametrize("kind", [FalconH1RMSNormGated, Qwen3NextRMSNormGated])
def test_a_gated_norm_is_not_replaced(kind: Any) -> None:
    model, x = nn.Sequential(drawn(kind(64))), torch.randn(1, 3, 64).bfloat16()

    fuse_rms_norms(model)

    assert model[0](x, x).shape == x.shape


def test_a_norm_with_a_hook_is_not_replaced() -> None:
    plain = drawn(LlamaRMSNorm(64))
    plain.register_forward_hook(lambda *_: None)

    assert not isinstance(fused_copy(plain), FusedRMSNorm)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    own = FusedRMSNorm(drawn(LlamaRMSNorm(100)), 1e-6)
    x = torch.randn(1, 17, 100).bfloat16()

    alone = torch.cat([own(x[:, at : at + 1]) for at in range(17)], 1)

    assert torch.equal(own(x), alone)
    turned = x.view(1, 17, 5, 20).transpose(1, 2)
    plain = drawn(LlamaRMSNorm(20))
    narrow = FusedRMSNorm(plain, 1e-6)
    assert torch.equal(narrow(turned), narrow(turned.contiguous()))
    assert narrow(turned).stride() == plain(turned).stride() != turned.contiguous().stride()


def test_rows_of_a_prompt_have_the_bits_of_rows_alone() -> None:
    own, x = FusedRMSNorm(drawn(LlamaRMSNorm(64)), 1e-6), torch.randn(1, 700, 64).bfloat16()
    whole = own(x)

    for chunk in (1, 512, 513):
        parts = [own(x[:, at : at + chunk]) for at in range(0, 700, chunk)]
        assert torch.equal(torch.cat(parts, 1), whole)


def test_no_rows_and_rows_of_another_type_are_left_to_stock_code() -> None:
    plain = drawn(LlamaRMSNorm(16))
    x = torch.randn(5, 16).bfloat16()

    assert torch.equal(FusedRMSNorm(plain, 0.5)(x[:0]), plain(x[:0]))
    assert torch.equal(FusedRMSNorm(plain, 0.5)(x.float()), plain(x.float()))


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e18])
def test_rows_of_any_magnitude_are_normalised(size: float) -> None:
    plain, x = drawn(LlamaRMSNorm(64)), (torch.randn(3, 64) * size).bfloat16()

    assert torch.allclose(norm(x, plain.weight, 1e-6).float(), plain(x).float(), rtol=2**-6)


def test_without_compiled_kernels_norms_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rms_norm, "jit_available", lambda: False)

    assert not isinstance(fused_copy(drawn(LlamaRMSNorm(64))), FusedRMSNorm)


# Torch's own norm, within a block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norms_are_torchs_own_within_the_block(dtype: torch.dtype) -> None:
    plain, other, odd = drawn(LlamaRMSNorm(64)).to(dtype), GemmaRMSNorm(64).to(dtype), Shifted(64)
    model, x = nn.Sequential(plain, other, odd), torch.randn(2, 3, 64).to(dtype)
    expected = plain(x)

    with fused(model) as count:
        kinds = [type(module) for module in model]
        given = model[0](x)

    assert (count, kinds) == (1, [TorchRMSNorm, GemmaRMSNorm, Shifted])
    assert [*model] == [plain, other, odd]
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(given, expected, rtol=4 * unit, atol=0)


def test_a_norm_that_fails_leaves_none_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = [LlamaRMSNorm(64) for _ in range(3)]
    model, agree = nn.Sequential(*norms), rms_norm._agree

    def failing(plain: Any, *what: Any, **options: Any) -> bool:
        if plain is norms[2]:
            raise torch.OutOfMemoryError("no room")
        return agree(plain, *what, **options)

    monkeypatch.setattr(rms_norm, "_agree", failing)
    with pytest.raises(torch.OutOfMemoryError), fused(model):
        pass

    assert [*model] == norms
