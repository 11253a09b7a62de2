"""Heads that share keys attend together as they would one by one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshllm.model import quant_attention
from meshllm.model.quant_attention import FEW, NAME, attend, share_keys
from meshllm.model.source import open_folder
from meshllm.testing.models import stock_model, tiny_model

S = 40


def tensors(tokens: int, *, heads: int = 8, shared: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(2, heads, tokens, 16, generator=generator),
        torch.randn(2, shared, S, 16, generator=generator),
        torch.randn(2, shared, S, 16, generator=generator),
    )


def one_by_one(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    result = nn.functional.scaled_dot_product_attention(
        query,
        key.repeat_interleave(groups, 1),
        value.repeat_interleave(groups, 1),
        attn_mask=mask,
        scale=0.5,
    )
    return result.transpose(1, 2)


def causal(tokens: int) -> Tensor:
    return torch.ones(tokens, S, dtype=torch.bool).tril(S - tokens)[None, None].expand(2, 1, -1, -1)


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note how many tokens stock attention is asked for."""
    asked: list[int] = []

    def forward(_module: nn.Module, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        asked.append(query.shape[2])
        return query, None

    monkeypatch.setattr(quant_attention, "sdpa_attention_forward", forward)
    return asked


@pytest.mark.parametrize("tokens", [1, 2, 5, FEW])
@pytest.mark.parametrize("shared", [1, 2, 4])
def test_the_result_is_that_of_each_head(tokens: int, shared: int, stock: list[int]) -> None:
    query, key, value = tensors(tokens, shared=shared)

    result, _ = attend(nn.Module(), query, key, value, causal(tokens), scaling=0.5)

    torch.testing.assert_close(result, one_by_one(query, key, value, causal(tokens)))
    assert result.is_contiguous()
    assert not stock


def test_one_token_needs_no_mask(stock: list[int]) -> None:
    query, key, value = tensors(1)

    result, _ = attend(nn.Module(), query, key, value, None, scaling=0.5)

    torch.testing.assert_close(result, one_by_one(query, key, value, None))
    assert not stock


def test_padding_is_not_seen(stock: list[int]) -> None:
    query, key, value = tensors(1)
    mask = torch.ones(2, 1, 1, S, dtype=torch.bool)
    mask[1, ..., :10] = False

    result, _ = attend(nn.Module(), query, key, value, mask, scaling=0.5)

    torch.testing.assert_close(result, one_by_one(query, key, value, mask))
    assert not stock


@pytest.mark.parametrize(
    ("tokens", "heads", "mask", "options"),
    [
        (FEW + 1, 8, causal(FEW + 1), {}),
        (2, 8, None, {}),  # causal without a mask
        (1, 2, None, {}),  # nothing is shared
        (1, 8, causal(1).expand(-1, 8, -1, -1), {}),  # a mask per head
        (1, 8, None, {"dropout": 0.1}),
        (1, 8, None, {"softcap": 30.0}),
        (1, 8, None, {"position_bias": torch.zeros(1)}),
    ],
)
def test_the_rest_is_left_to_stock_attention(
    tokens: int, heads: int, mask: Tensor | None, options: dict[str, Any], stock: list[int]
) -> None:
    query, key, value = tensors(tokens, heads=heads)

    attend(nn.Module(), query, key, value, mask, **options)

    assert stock == [tokens]


def test_a_stock_model_attends_in_this_way(tmp_path: Path) -> None:
    model: Any = stock_model(tiny_model(tmp_path, "qwen3"))
    ids = torch.arange(3, 9)[None]
    before = model(ids).logits

    share_keys(model)

    assert model.config._attn_implementation == NAME
    torch.testing.assert_close(model(ids).logits, before)


def test_a_model_that_attends_otherwise_is_left_alone(llama: Path) -> None:
    model: Any = stock_model(open_folder("llama", llama))
    model.set_attn_implementation("eager")

    share_keys(model)
    share_keys(nn.Linear(1, 1))

    assert model.config._attn_implementation == "eager"
