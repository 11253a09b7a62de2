"""Attention of a few rows is row-invariant; a chunk is attention within rounding."""

from collections.abc import Callable, Sequence
from itertools import product
from math import inf
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from meshllm.model.kernels import attention as native_attention
from meshllm.model.kernels import jit, measured
from meshllm.model.kernels.softmax import COLUMNS, causal_softmax_
from meshllm.model.modules import quant_matrix
from meshllm.model.modules.kernel_choice import has_bf16_dot
from meshllm.model.steps import attention
from meshllm.model.steps.attention import PrefillKernel, decode_attention
from tests.builders.attention import Heads, drawn, reference

HEADS = [(4, 2, 16), (8, 2, 64), (4, 4, 64)]
"""Query heads, KV heads, width of a head."""
ODD = [*HEADS, (3, 3, 10), (6, 2, 24), (5, 1, 80), (32, 8, 128), (4, 1, 256)]


def by_torch(*asked: object) -> Tensor:
    with patch.object(native_attention, "takes", lambda _: False):
        return decode_attention(*asked)  # type: ignore[arg-type]  # as given


WAYS = [decode_attention, by_torch]


def mixed(first: Sequence[Any], second: Sequence[Any], *rest: Sequence[Any]) -> list[Any]:
    """Pair each of the first with each of the second; each of the second meets many others."""
    others = list(product(*rest))
    step = -(-len(others) // len(first))
    return [
        (one, other, *others[(row * step + column) % len(others)])
        for row, one in enumerate(first)
        for column, other in enumerate(second)
    ]


@pytest.mark.parametrize(
    ("heads", "shape", "window", "attend"),
    mixed(ODD, [(1, 1), (1, 40), (5, 5), (9, 300), (3, 2055)], [None, None, 16], WAYS),
)
def test_it_is_attention(
    attend: Callable[..., Tensor], heads: Heads, shape: tuple[int, int], window: int | None
) -> None:
    rows, keys = shape
    query, key, value = drawn(heads, rows, keys, torch.float32)

    attended = attend(query, key, value, heads[2] ** -0.5, window)

    assert attended.shape == (1, rows, heads[0], heads[2])
    assert torch.allclose(attended, reference(query, key, value, window), atol=2e-6)


@pytest.mark.parametrize("widths", [(64, 8), (64, 24), (32, 4), (192, 128), (64, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_may_have_another_width_than_keys(
    widths: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    query, key = (torch.randn(1, heads, 37, widths[0]).to(dtype) for heads in (4, 2))
    value = torch.randn(1, 2, 37, widths[1]).to(dtype)

    attended = decode_attention(query[:, :, -3:], key, value, widths[0] ** -0.5)

    expected = reference(query[:, :, -3:].float(), key.float(), value.float())
    limit = 1e-5 if dtype == torch.float32 else 0.02
    assert (attended.float() - expected).abs().max() < limit


@pytest.mark.parametrize("heads", ODD, ids=str)
def test_only_the_output_is_rounded(heads: Heads) -> None:
    query, key, value = drawn(heads, 3, 150, torch.bfloat16)

    attended = decode_attention(query, key, value, heads[2] ** -0.5)

    exact = reference(query.double(), key.double(), value.double())
    assert attended.dtype == torch.bfloat16
    assert float((attended - exact).norm() / exact.norm()) < 2**-8.5


@pytest.mark.parametrize(
    ("heads", "keys", "dtype", "window", "attend"),
    mixed(
        HEADS, [18, 20, 31, 201, 1027, 2057], [torch.bfloat16, torch.float32], [None, 19, 19], WAYS
    ),
)
def test_rows_in_one_pass_equal_single_rows(
    attend: Callable[..., Tensor],
    heads: Heads,
    keys: int,
    dtype: torch.dtype,
    window: int | None,
) -> None:
    query, key, value = drawn(heads, 17, keys, dtype)
    half = keys // 2
    key[:, :, half : 2 * half], value[:, :, half : 2 * half] = key[:, :, :half], -value[:, :, :half]

    for rows in (2, 3, 4, 9, 17):
        together = attend(query[:, :, :rows], key, value, 0.2, window)
        for row in range(rows):
            seen = slice(keys - rows + row + 1)
            one = query[:, :, row : row + 1]
            alone = attend(one, key[:, :, seen], value[:, :, seen], 0.2, window)
            assert torch.equal(together[:, row : row + 1], alone), (rows, row)


def test_rows_may_have_any_strides() -> None:
    query, key, value = drawn((4, 2, 64), 3, 50, torch.bfloat16)
    plain = decode_attention(query, key, value, 0.2)
    room = torch.full((1, 2, 90, 64), torch.nan, dtype=torch.bfloat16)
    room[:, :, 20:70] = value

    for asked in (query, query.transpose(1, 2).contiguous().transpose(1, 2)):
        turned = key.transpose(2, 3).contiguous().transpose(2, 3)
        assert torch.equal(decode_attention(asked, turned, room[:, :, 20:70], 0.2), plain)


def test_nan_stays_nan() -> None:
    query, key, value = drawn((2, 1, 16), 2, 40, torch.bfloat16)
    key[:, :, 39] = torch.nan

    attended = decode_attention(query, key, value, 1.0)

    assert attended[:, 0].isfinite().all()
    assert attended[:, 1].isnan().all()


@pytest.mark.parametrize(
    ("window", "shape", "room", "heads"),
    mixed(
        [None, 1, 7, 40, 500],
        [(1, 1), (33, 33), (20, 90), (65, 300)],
        [1 << 10, 1 << 13, 1 << 20],
        HEADS,
    ),
)
def test_a_chunk_is_attention_for_any_block_size(
    heads: Heads, room: int, shape: tuple[int, int], window: int | None
) -> None:
    rows, keys = shape
    query, key, value = drawn(heads, rows, keys, torch.float32)

    with patch.object(attention, "SCORES", room):
        found = attention.prefill_attention(query, key, value, heads[2] ** -0.5, window)

    assert torch.allclose(found, reference(query, key, value, window), atol=1e-5)


@pytest.mark.parametrize("has_matrices", [False, True])
def test_a_bfloat16_chunk_is_rounded_once_without_matrix_instructions(has_matrices: bool) -> None:
    query, key, value = drawn((8, 2, 64), 65, 300, torch.bfloat16)
    exact = attention.prefill_attention(query.float(), key.float(), value.float(), 0.125)

    with (
        patch.object(quant_matrix, "multiplies_matrices", lambda: has_matrices),
        patch.object(attention, "prefill_kernel", lambda *_: PrefillKernel.BLOCKS),
    ):
        found = attention.prefill_attention(query, key, value, 0.125)

    assert found.dtype == torch.bfloat16
    assert torch.equal(found, exact.bfloat16()) != has_matrices
    assert float((found.float() - exact).norm() / exact.norm()) < 2**-7


@pytest.mark.parametrize(
    ("window", "shape", "heads", "kernel"),
    mixed(
        [None, 1, 7, 40, 500],
        [(1, 1), (33, 33), (20, 90), (65, 300), (48, 48)],
        [(8, 2, 64), (6, 2, 24), (4, 4, 32)],
        list(PrefillKernel),
    ),
)
def test_a_bfloat16_chunk_is_attention_by_each_kernel(
    heads: Heads, shape: tuple[int, int], window: int | None, kernel: PrefillKernel
) -> None:
    if kernel is PrefillKernel.OWN and not has_bf16_dot():
        pytest.skip("no instruction for pairs of bf16 here")
    query, key, value = drawn(heads, *shape, torch.bfloat16)
    exact = reference(query.double() / 2, key.double(), value.double(), window)

    with (
        patch.object(attention, "prefill_kernel", lambda *_: kernel),
        patch.object(attention, "FUSED_ROWS", 16),
    ):
        found = attention.prefill_attention(query, key, value, heads[2] ** -0.5 / 2, window)

    assert found.shape == exact.shape
    assert found.dtype == torch.bfloat16
    assert float((found.double() - exact).norm() / exact.norm()) < 2**-7


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    ("heads", "shape", "room", "rows"),
    [
        ((8, 2, 16), (60, 300), 1 << 14, 6),  # 16,384 / 300 keys / 2 KV heads / 4 queries of each
        ((8, 2, 16), (60, 300), 1, COLUMNS // 4),
        ((8, 8, 16), (60, 300), 1 << 14, COLUMNS),
        ((8, 8, 16), (60, 300), 1 << 20, 60),
        ((32, 1, 8), (20, 90), 1, 1),
    ],
)
def test_blocks_have_few_scores_and_only_the_keys_that_they_see(
    heads: Heads, shape: tuple[int, int], room: int, rows: int, window: int | None
) -> None:
    query, key, value = drawn(heads, *shape, torch.float32)
    blocks = list[tuple[int, int, int]]()

    def noted(scores: Tensor, count: int, window: int | None) -> None:
        blocks.append((count, *scores.shape[1:]))
        causal_softmax_(scores, count, window)

    with patch.object(attention, "SCORES", room), patch.object(attention, "causal_softmax_", noted):
        attention.prefill_attention(query, key, value, 0.2, window)

    counts = [count for count, _, _ in blocks]
    assert sum(counts) == shape[0]
    assert len(counts) == -(-shape[0] // rows)
    assert max(counts) - min(counts) <= 1
    stop = shape[1] - shape[0]
    for count, seen, columns in blocks:
        stop += count
        assert seen == (stop if window is None else min(stop, count - 1 + window))
        assert columns == -(-count * heads[0] // heads[1] // COLUMNS) * COLUMNS


@pytest.mark.parametrize(
    ("shape", "window", "seen", "is_causal"),
    [
        ((48, 48), None, [48], True),
        ((48, 48), 48, [48], True),
        ((48, 48), 47, [16, 32, 48], False),
        ((48, 48), 20, [16, 32, 35], False),
        ((20, 90), None, [86, 90], False),
        ((20, 90), 30, [45, 33], False),
    ],
)
def test_the_fused_kernel_gets_a_whole_prompt_or_the_keys_that_a_few_rows_see(
    shape: tuple[int, int], window: int | None, seen: list[int], is_causal: bool
) -> None:
    asked = drawn((4, 2, 32), *shape, torch.bfloat16)
    spy = Mock(wraps=functional.scaled_dot_product_attention)

    with (
        patch.object(attention, "prefill_kernel", lambda *_: PrefillKernel.FUSED),
        patch.object(attention, "FUSED_ROWS", 16),
        patch.object(functional, "scaled_dot_product_attention", spy),
    ):
        attention.prefill_attention(*asked, 0.2, window)

    assert [call.args[1].shape[2] for call in spy.call_args_list] == seen
    assert {call.kwargs["is_causal"] for call in spy.call_args_list} == {is_causal}
    assert {call.kwargs["attn_mask"] is None for call in spy.call_args_list} == {is_causal}


def test_the_kernel_is_chosen_by_the_query_heads_of_bfloat16() -> None:
    chosen = Mock(return_value=PrefillKernel.BLOCKS)

    with patch.object(attention, "prefill_kernel", chosen):
        for dtype in (torch.bfloat16, torch.float32):
            attention.prefill_attention(*drawn((8, 2, 64), 3, 9, dtype), 0.2)

    assert [call.args for call in chosen.call_args_list] == [(8, 64)]


def test_values_of_another_width_are_not_given_to_the_fused_kernel() -> None:
    query, key, _ = drawn((4, 2, 32), 40, 90, torch.bfloat16)
    value = torch.randn(1, 2, 90, 16).bfloat16()
    exact = reference(query.double(), key.double(), value.double(), 40)

    with (
        patch.object(attention, "prefill_kernel", lambda *_: PrefillKernel.FUSED),
        patch.object(functional, "scaled_dot_product_attention", side_effect=AssertionError),
    ):
        found = attention.prefill_attention(query, key, value, 32**-0.5, 40)

    assert float((found.double() - exact).norm() / exact.norm()) < 2**-7


@pytest.mark.parametrize(
    ("times", "kernel"),
    [
        ({"own": 1.0, "torch fused": 2.0, "torch": 3.0}, PrefillKernel.OWN),
        ({"own": 1.2, "torch fused": 1.0, "torch": 3.0}, PrefillKernel.OWN),
        ({"own": 1.21, "torch fused": 1.0, "torch": 3.0}, PrefillKernel.FUSED),
        ({"torch fused": 2.0, "torch": 1.0}, PrefillKernel.BLOCKS),
    ],
)
def test_the_fastest_kernel_reads_prompts_and_ours_in_a_tie(
    times: dict[str, float], kernel: PrefillKernel
) -> None:
    assert attention.choose_prefill(times) is kernel


@pytest.mark.parametrize("has_dot", [False, True])
def test_kernels_of_narrow_models_are_not_measured(has_dot: bool) -> None:
    measured = Mock(return_value=PrefillKernel.FUSED)
    with (
        patch.object(attention, "has_bf16_dot", lambda: has_dot),
        patch.object(attention, "fastest_prefill", measured),
    ):
        narrow = attention.prefill_kernel(1, attention.NARROW // 2)
        count = measured.call_count
        wide = attention.prefill_kernel(8, attention.NARROW // 8)

    own = has_dot and jit.jit_available()
    assert narrow is (PrefillKernel.OWN if own else PrefillKernel.BLOCKS)
    assert (count, wide) == (0, PrefillKernel.FUSED)


def test_heads_of_a_width_that_ours_does_not_take_get_the_fastest_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {PrefillKernel.OWN: 1.0, PrefillKernel.FUSED: 2.0, PrefillKernel.BLOCKS: 3.0}
    monkeypatch.setattr(attention, "measure_once", lambda *_: Mock(seconds=times))
    attention.fastest_prefill.cache_clear()
    try:
        assert attention.prefill_kernel(32, 64) is PrefillKernel.OWN
        assert attention.prefill_kernel(32, 80) is PrefillKernel.FUSED
        assert attention.prefill_kernel(2, 80) is PrefillKernel.BLOCKS  # narrow: not measured
    finally:
        attention.fastest_prefill.cache_clear()


@pytest.mark.parametrize("has_dot", [False, True])
def test_only_kernels_that_this_processor_has_are_measured(has_dot: bool) -> None:
    if has_dot and not has_bf16_dot():
        pytest.skip("no instruction for pairs of bf16 here")
    with patch.object(attention, "has_bf16_dot", lambda: has_dot):
        times = attention._measure()

    assert set(times) == {"torch fused", "torch"} | ({"own"} if has_dot else set())
    assert all(seconds > 0 for seconds in times.values())


def test_kernels_are_measured_on_one_thread_by_the_median_of_the_rounds_after_the_first() -> None:
    asked = list[tuple[object, ...]]()
    kernels = (PrefillKernel.FUSED, PrefillKernel.BLOCKS)
    clock = iter([9.0, 0.1, 3.0, 4.0, 1.0, 9.0, 1.5, 5.0])  # the first and the second by turns

    def kernel(query: Tensor, key: Tensor, value: Tensor, _: float, window: int | None) -> None:
        shapes = [tuple(each.shape) for each in (query, key, value)]
        asked.append((*shapes, query.dtype, window, torch.get_num_threads()))

    def timed(attend: Callable[[], None], threads: int) -> float:
        assert threads == 1
        attend()
        return next(clock)

    with (
        patch.object(attention, "has_bf16_dot", lambda: False),
        patch.dict(attention._KERNELS, dict.fromkeys(kernels, kernel)),
        patch.object(attention, "seconds_of", timed),
        patch.object(measured, "ENOUGH_S", inf),
    ):
        times = attention._measure()

    assert times == {"torch fused": 1.5, "torch": 5.0}
    keys = (1, 4, 1024, 128)
    assert asked == [((1, 8, 256, 128), keys, keys, torch.bfloat16, None, 1)] * 8


@pytest.mark.parametrize("kernel", list(PrefillKernel))
def test_shapes_that_the_kernel_does_not_take_are_computed_too(kernel: PrefillKernel) -> None:
    query, key, value = drawn((6, 2, 24), 40, 90, torch.bfloat16)
    exact = reference(query.double(), key.double(), value.double(), 40)

    with patch.object(attention, "prefill_kernel", lambda *_: kernel):
        found = attention.prefill_attention(query, key, value, 24**-0.5, 40)

    assert float((found.double() - exact).norm() / exact.norm()) < 2**-7


@pytest.mark.parametrize("window", [None, 7])
def test_copies_of_long_keys_are_of_one_head_at_a_time(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    torch.manual_seed(0)
    query = torch.randn(1, 8, 5, 16, dtype=torch.bfloat16)
    key, value = torch.randn(2, 1, 4, 40, 16, dtype=torch.bfloat16)
    monkeypatch.setattr(quant_matrix, "multiplies_matrices", lambda: False)
    whole = attention._in_blocks(query, key, value, 0.25, window)
    sizes = list[int]()

    def seen(own: Tensor, rows: int, last: int | None) -> None:
        sizes.append(own.shape[0])
        causal_softmax_(own, rows, last)

    monkeypatch.setattr(attention, "causal_softmax_", seen)
    monkeypatch.setattr(attention, "FLOAT_BYTES", 4 * key.numel())

    assert torch.allclose(attention._in_blocks(query, key, value, 0.25, window), whole)
    assert set(sizes) == {1}
