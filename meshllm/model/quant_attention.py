"""Attention of a few tokens, quicker where several heads share keys; knows no family by name.

Stock attention on a CPU multiplies every head's query of one row with the keys by itself. The
queries of heads that share keys are one matrix with a row for each: the keys are read once, by the
kernel for matrices. Their sums may be rounded in another order, so this goes with quantised
weights only.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from meshllm.model.skeleton import quiet

NAME = "meshllm_shared_keys"
"""Under which transformers finds it."""
FEW = 8  # tokens; of more, stock attention makes matrices that are large enough


def share_keys(model: Any) -> None:
    """Let a stock model that attends by `sdpa` attend in this way; others stay as they are."""
    if getattr(getattr(model, "config", None), "_attn_implementation", None) == "sdpa":
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        with quiet():  # some have attention of their own, and say so
            model.set_attn_implementation(NAME)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend: queries [B, H, T, D] to keys and values [B, H / G, S, D]; [B, T, H, D]."""
    batch, heads, tokens, width = query.shape
    shared = key.shape[1]
    clear = tokens == 1 if attention_mask is None else attention_mask.shape[1] == 1
    if heads == shared or tokens > FEW or not clear or _unusual(options):
        stock: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )
        return stock
    groups = heads // shared
    if attention_mask is not None and tokens > 1:
        attention_mask = attention_mask.repeat(1, 1, groups, 1)
    result = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch, shared, groups * tokens, width),
        key,
        value,
        attn_mask=attention_mask,
        scale=options.get("scaling"),
    )
    return result.reshape(batch, heads, tokens, -1).transpose(1, 2).contiguous(), None


def _unusual(options: dict[str, Any]) -> bool:
    """Whether anything is asked for that only stock attention knows."""
    return any(options.get(name) for name in ("dropout", "softcap")) or any(
        options.get(name) is not None for name in ("position_bias", "cache")
    )
