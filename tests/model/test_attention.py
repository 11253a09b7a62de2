"""A few rows attend together, and each as if alone."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from meshllm.model import attention
from meshllm.model.attention import BLOCK, RowAttention

COUNTS = (2, 3, 5, 9, 17)
Heads = tuple[int, int, int]
HEADS = [(4, 2, 16), (8, 2, 64), (4, 4, 64)]
"""Heads, heads of keys, width."""


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


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 40), (5, 5), (9, 300), (3, 2 * BLOCK + 7)])
@pytest.mark.parametrize("window", [None, 16], ids=["full", "window"])
def test_it_is_attention(heads: Heads, rows: int, keys: int, window: int | None) -> None:
    query, key, value = drawn(heads, rows, keys, torch.float32)

    attended = RowAttention(COUNTS).attend(query, key, value, heads[2] ** -0.5, window)

    assert attended.shape == (1, rows, heads[0], heads[2])
    assert torch.allclose(attended, reference(query, key, value, window), atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("keys", [18, 20, 31, 201, BLOCK + 3, 2 * BLOCK + 9])
@pytest.mark.parametrize("window", [None, 19], ids=["full", "window"])
def test_rows_together_are_the_rows_alone(
    heads: Heads, keys: int, dtype: torch.dtype, window: int | None
) -> None:
    rowwise = RowAttention(COUNTS)
    query, key, value = drawn(heads, 17, keys, dtype)
    half = keys // 2
    key[:, :, half : 2 * half], value[:, :, half : 2 * half] = key[:, :, :half], -value[:, :, :half]

    for rows in (*COUNTS, 4):
        together = rowwise.attend(query[:, :, :rows], key, value, 0.2, window)
        for row in range(rows):
            seen = slice(keys - rows + row + 1)
            one = query[:, :, row : row + 1]
            alone = rowwise.attend(one, key[:, :, seen], value[:, :, seen], 0.2, window)
            assert torch.equal(together[:, row : row + 1], alone), (rows, row)


def test_where_a_kernel_minds_company_rows_go_one_by_one() -> None:
    query, key, value = drawn((4, 2, 16), 5, 40, torch.bfloat16)
    rowwise = RowAttention(COUNTS)
    attend = attention._attend

    def moody(query: Tensor, *others: Tensor | float) -> Tensor:
        return attend(query, *others) + query.shape[2] * 2**-7  # type: ignore[arg-type]  # as given

    with patch.object(attention, "_attend", moody):
        together = rowwise.attend(query, key, value, 0.25)
        alone = rowwise.attend(query[:, :, 4:], key, value, 0.25)

    assert torch.equal(together[:, 4:], alone)


@pytest.mark.parametrize("window", [None, 1, 7, 40, 500])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (33, 33), (20, 90), (65, 300)])
@pytest.mark.parametrize("room", [1 << 12, 1 << 15, 2 << 20])
@pytest.mark.parametrize("heads", HEADS)
def test_a_chunk_is_attention_whatever_is_made_at_a_time(
    heads: Heads, room: int, rows: int, keys: int, window: int | None
) -> None:
    query, key, value = drawn(heads, rows, keys, torch.float32)

    with patch.object(attention, "SCORE_BYTES", room):
        mixed = attention.attend_chunk(query, key, value, heads[2] ** -0.5, window)

    assert torch.allclose(mixed, reference(query, key, value, window), atol=1e-5)
