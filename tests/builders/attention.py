"""Random tensors for attention, and what torch computes from them."""

import torch
from torch import Tensor
from torch.nn import functional

Heads = tuple[int, int, int]


def drawn(heads: Heads, rows: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(keys)
    asking, groups, width = heads
    return (
        torch.randn(1, asking, rows, width).to(dtype),
        torch.randn(1, groups, keys, width).to(dtype),
        torch.randn(1, groups, keys, width).to(dtype),
    )


def reference(query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
    rows, keys = query.shape[2], key.shape[2]
    behind = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)
    seen = (behind >= 0) & (behind < (window or keys))
    attended = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, enable_gqa=True
    )
    return attended.transpose(1, 2)
