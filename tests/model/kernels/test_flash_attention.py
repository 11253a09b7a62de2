"""Attention of many rows by the instruction for pairs: values, invariance, bounds."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from meshllm.model.kernels import jit
from meshllm.model.kernels.flash_attention import BLOCK, ROWS, attend, takes
from meshllm.model.modules.kernel_choice import has_bf16_dot

pytestmark = pytest.mark.skipif(
    not (jit.jit_available() and has_bf16_dot()),
    reason="this CPU has no instruction for pairs of bf16",
)

Heads = tuple[int, int, int, int]
HEADS = [(4, 2, 64, 64), (3, 3, 32, 96), (16, 2, 128, 128), (1, 1, 256, 32)]
"""Query heads, KV heads, width of keys and of values."""


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def drawn(heads: Heads, rows: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(keys)
    asking, groups, width, width_out = heads
    return (
        torch.randn(1, rows, asking, width).bfloat16().transpose(1, 2),
        torch.randn(1, groups, keys, width).bfloat16(),
        torch.randn(1, groups, keys, width_out).bfloat16(),
    )


def reference(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor:
    rows, keys, each = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    behind = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)
    seen = (behind >= 0) & (behind < (window or keys))
    key, value = (part.double().repeat_interleave(each, 1) for part in (key, value))
    scores = (query.double() @ key.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(
    ("rows", "keys", "window"),
    [
        (1, 1, None), (ROWS, ROWS, None), (31, 33, None), (40, BLOCK, None), (25, BLOCK + 1, 7),
        (13, 2 * BLOCK + 90, None), (70, 3 * BLOCK, BLOCK), (5, 1200, 1), (90, 700, 10_000),
    ],
)  # fmt: skip
def test_it_is_causal_attention_within_rounding(
    heads: Heads, rows: int, keys: int, window: int | None
) -> None:
    query, key, value = drawn(heads, rows, keys)

    attended = attend(query, key, value, 0.3, window)

    exact = reference(query, key, value, 0.3, window)
    assert attended.shape == exact.shape
    assert float((attended - exact).norm() / exact.norm()) < 2**-8


@pytest.mark.parametrize("window", [None, 40, BLOCK + 30])
def test_a_row_has_the_same_bits_in_any_chunk(window: int | None) -> None:
    query, key, value = drawn((4, 2, 64, 64), 130, 1300)
    whole = attend(query, key, value, 0.2, window)

    for threads in (1, 2):
        torch.set_num_threads(threads)
        for start, stop in ((0, 1), (0, 130), (5, 18), (60, 97), (129, 130)):
            seen = 1300 - 130 + stop
            part = attend(
                query[:, :, start:stop], key[:, :, :seen], value[:, :, :seen], 0.2, window
            )
            assert torch.equal(part, whole[:, start:stop]), (threads, start, stop)


def test_rows_may_have_any_strides_and_nothing_behind_them_is_read() -> None:
    query, key, value = drawn((4, 2, 64, 64), 21, 45)
    plain = attend(query, key, value, 0.2, None)
    room = [torch.full((1, 2, 80, 64), torch.nan, dtype=torch.bfloat16) for _ in range(2)]
    for held, given in zip(room, (key, value), strict=True):
        held[:, :, 20:65] = given

    keys, values = (held[:, :, 20:65] for held in room)
    assert torch.equal(attend(query, keys, values, 0.2, None), plain)


def test_large_scores_do_not_overflow() -> None:
    query, key, value = drawn((4, 2, 64, 64), 30, 600)

    attended = attend(query * 1e18, key * 1e18, value, 1.0, None)

    assert attended.isfinite().all()


def test_a_nan_stays_in_the_head_and_rows_that_see_it() -> None:
    query, key, value = drawn((4, 2, 64, 64), 40, 640)
    key[0, 1, 635] = torch.nan

    attended = attend(query, key, value, 0.2, None)

    assert attended[:, :, :2].isfinite().all()
    assert attended[:, :35, 2:].isfinite().all()
    assert attended[:, 35:, 2:].isnan().all()


def test_unsupported_tensors_are_not_taken() -> None:
    query, key, value = drawn((4, 2, 64, 64), 4, 9)

    assert takes(query, key, value)
    for others in (
        (query.float(), key.float(), value.float()),
        (query[..., :48], key[..., :48], value),
        (query, key, value[..., :40]),
        (query, key, value.transpose(2, 3).contiguous().transpose(2, 3)),
        (query, key[:, :, :3], value[:, :, :3]),
        (query[:, :, :0], key, value),
        (query, key.to("meta"), value),
    ):
        assert not takes(*others)
