"""The KV cache of a session: grown in place, cropped, dropped behind a window."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, MambaConfig, MistralConfig, PreTrainedConfig
from transformers.cache_utils import DummyLayer, DynamicIndexedLayer

from meshllm.errors import ModelError
from meshllm.model.shape import BLOCK, MAX_ROWS, SLACK, rows_for
from meshllm.model.split.kv_cache import GrowingLayer, Rows, SpanCache, WindowLayer, max_crop_of
from meshllm.names import Span

WINDOW = 8


def llama() -> PreTrainedConfig:
    return LlamaConfig(num_hidden_layers=4)


def mistral() -> PreTrainedConfig:
    return MistralConfig(num_hidden_layers=4, sliding_window=WINDOW)


def rows(start: int, count: int) -> Tensor:
    """Return keys ``[1, 2, count, 3]`` whose values are their positions."""
    positions = torch.arange(start, start + count, dtype=torch.float32)
    return positions.view(1, 1, -1, 1).expand(1, 2, -1, 3)


def write(cache: SpanCache, count: int, layer: int = 1) -> Tensor:
    """Update the cache of one layer as a forward does; return the keys that it sees."""
    keys, _ = cache.update(rows(cache.length, count), rows(cache.length, count), layer)
    cache.length += count
    return torch.as_tensor(keys[0, 0, :, 0])


@given(
    st.lists(st.tuples(st.integers(1, 2 * BLOCK), st.integers(0, SLACK)), min_size=1, max_size=6)
)
def test_full_attention_sees_every_row_that_was_not_cropped(steps: list[tuple[int, int]]) -> None:
    cache = SpanCache(llama(), Span(1, 2))

    for count, taken in steps:
        seen = write(cache, count)
        assert torch.equal(seen, torch.arange(cache.length, dtype=torch.float32))
        cache.crop(max(0, cache.length - taken))


@given(
    st.lists(st.tuples(st.integers(1, 2 * BLOCK), st.integers(0, SLACK)), min_size=1, max_size=6)
)
def test_a_window_matches_the_mask_sizes_of_stock_code(steps: list[tuple[int, int]]) -> None:
    cache = SpanCache(mistral(), Span(1, 2))

    for count, taken in steps:
        length, offset = cache.get_mask_sizes(count, 1)
        seen = write(cache, count)
        assert torch.equal(seen, torch.arange(offset, offset + length, dtype=torch.float32))
        assert offset + length == cache.length
        cache.crop(max(cache.floor, cache.length - taken, 1))


def test_a_window_can_be_cropped_by_its_slack_and_no_further() -> None:
    cache = SpanCache(mistral(), Span(1, 2))
    write(cache, 500)
    write(cache, 5 * BLOCK + 1)  # reallocates, and drops rows far behind the window

    floor = cache.floor

    assert 0 < floor <= cache.length - SLACK
    with pytest.raises(
        ModelError, match=f"to {floor - 1}: the valid range is {floor} to {cache.length}"
    ):
        cache.crop(floor - 1)
    cache.crop(floor)
    assert write(cache, 1).tolist() == list(range(floor - WINDOW + 1, floor + 1))


def test_a_window_that_grows_keeps_exactly_its_slack() -> None:
    cache = SpanCache(mistral(), Span(1, 2))
    write(cache, 2 * BLOCK)
    layer = cache.layers[1].rows[0]
    write(cache, layer.buffer.shape[-2] - layer.used)
    full = cache.length
    assert cache.floor == 0

    write(cache, 1)  # reallocates

    assert cache.floor == full - SLACK
    cache.crop(cache.floor)
    assert write(cache, 1).tolist() == list(range(cache.length - WINDOW, cache.length))


def test_a_short_cache_of_a_window_forgets_nothing_when_it_grows() -> None:
    cache = SpanCache(mistral(), Span(1, 2))
    write(cache, 5)
    room = cache.layers[1].rows[0].buffer.shape[-2]

    write(cache, room)  # reallocates

    assert cache.floor == 0
    cache.crop(1)
    assert write(cache, 2).tolist() == [0, 1, 2]


def test_rows_are_appended_without_copying_the_others() -> None:
    cache = SpanCache(llama(), Span(1, 2))
    write(cache, 5)
    before = cache.layers[1].keys.data_ptr()

    for _ in range(BLOCK - 5):
        write(cache, 1)

    assert cache.layers[1].keys.data_ptr() == before
    write(cache, 1)
    assert cache.layers[1].keys.data_ptr() != before


@pytest.mark.parametrize("config", [llama(), mistral()], ids=["all", "window"])
@pytest.mark.parametrize("failing", [0, 1])
def test_running_out_of_memory_keeps_the_existing_rows(
    monkeypatch: pytest.MonkeyPatch, config: PreTrainedConfig, failing: int
) -> None:
    cache = SpanCache(config, Span(1, 2))
    write(cache, 5)
    while cache.layers[1].rows[0].used < cache.layers[1].rows[0].buffer.shape[-2]:
        seen = write(cache, 1)
    extend, calls = Rows.extend, list[Rows]()

    def run_out(rows: Rows, count: int, window: int = 0) -> None:
        calls.append(rows)
        extend(rows, count, window)
        if len(calls) > failing:
            raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Rows, "extend", run_out)
        with pytest.raises(RuntimeError):
            write(cache, 1)
    cache.crop(cache.length)

    last = int(seen[-1])
    assert write(cache, 1).tolist()[-WINDOW:] == list(range(last - WINDOW + 2, last + 2))
    assert [each.used for each in cache.layers[1].rows] == [cache.layers[1].rows[0].used] * 2


@pytest.mark.parametrize("config", [llama(), mistral()], ids=["all", "window"])
def test_rows_are_written_in_place_only(config: PreTrainedConfig) -> None:
    cache = SpanCache(config, Span(1, 2))
    layer = cache.layers[1]
    assert (layer.keys, layer.values) == (None, None)
    write(cache, 5)

    with pytest.raises(TypeError, match="in place"):
        layer.keys = layer.keys[..., :2, :]
    with pytest.raises(TypeError, match="in place"):
        layer.batch_repeat_interleave(2)

    assert layer.keys.shape[-2] == layer.values.shape[-2] == layer.get_seq_length() == 5


def test_only_the_layers_of_the_span_store_anything() -> None:
    cache = SpanCache(llama(), Span(1, 3))

    assert [type(layer) is GrowingLayer for layer in cache.layers] == [False, True, True, False]
    with pytest.raises(NotImplementedError):
        write(cache, 1, layer=0)


def test_sliding_layers_get_a_window() -> None:
    assert type(SpanCache(mistral(), Span(0, 4)).layers[3]) is WindowLayer


def test_stock_code_that_reads_layer_0_gets_the_length_of_the_session() -> None:
    cache = SpanCache(llama(), Span(2, 3))
    write(cache, 7, layer=2)

    assert cache.get_seq_length() == 7
    assert cache.get_seq_length(2) == cache.get_seq_length(4) == 7
    assert cache.get_mask_sizes(3, 4) == (10, 0)
    assert cache.get_mask_sizes(3, 0) == (10, 0)


def test_ends_without_layers_count_tokens_too() -> None:
    cache = SpanCache(llama(), Span(0, 0))
    cache.length = 9

    assert cache.get_seq_length() == 9
    assert cache.get_mask_sizes(2, 0) == (11, 0)
    assert cache.croppable
    cache.crop(4)
    assert (cache.length, cache.bytes) == (4, 0)


def test_ends_that_take_over_no_cache_start_at_0() -> None:
    cache = SpanCache(llama(), Span(2, 2))

    cache.take_over([])

    assert cache.length == 0


def test_ends_take_over_the_longest_cache() -> None:
    cache, lengths = SpanCache(llama(), Span(2, 2)), (3, 5, 4)
    others = [SpanCache(llama(), Span(0, 1)) for _ in lengths]
    for other, length in zip(others, lengths, strict=True):
        write(other, length, layer=0)

    cache.take_over(others)

    assert cache.length == 5


@pytest.mark.parametrize("length", [0, 5])
def test_layers_of_different_lengths_are_not_taken_over(length: int) -> None:
    one, other = SpanCache(llama(), Span(0, 1)), SpanCache(llama(), Span(1, 2))
    write(one, 3, layer=0)
    if length:
        write(other, length, layer=1)
    both = SpanCache(llama(), Span(0, 2))

    both.take_over([one, other])

    assert (both.length, both.bytes) == (0, 0)


def test_a_layer_that_no_other_cache_holds_leaves_all_empty() -> None:
    one, both = SpanCache(llama(), Span(0, 1)), SpanCache(llama(), Span(0, 2))
    write(one, 3, layer=0)

    both.take_over([one])

    assert (both.length, both.bytes) == (0, 0)


def test_layers_of_two_caches_are_taken_over_together() -> None:
    one, other = SpanCache(llama(), Span(0, 1)), SpanCache(llama(), Span(1, 3))
    one.update(rows(0, 3), rows(0, 3), 0)
    for layer in (1, 2):
        other.update(rows(0, 3), rows(0, 3), layer)
    one.length = other.length = 3
    both = SpanCache(llama(), Span(0, 2))

    both.take_over([one, other])

    assert both.length == 3
    assert both.layers[:2] == [one.layers[0], other.layers[1]]
    assert type(both.layers[2]) is DummyLayer


def test_a_forward_that_raised_at_the_first_token_is_not_taken_over() -> None:
    one, other = SpanCache(llama(), Span(0, 1)), SpanCache(llama(), Span(0, 1))
    one.update(rows(0, 3), rows(0, 3), 0)

    other.take_over([one])

    assert (other.length, other.bytes) == (0, 0)


def test_a_crop_after_a_forward_that_raised_makes_the_layers_agree() -> None:
    cache = SpanCache(llama(), Span(0, 2))
    for layer in (0, 1):
        cache.update(rows(0, 5), rows(0, 5), layer)
    cache.length = 5
    cache.update(rows(5, 3), rows(5, 3), 0)  # the forward stops before layer 1

    cache.crop(cache.length)

    assert [cache.get_seq_length(layer) for layer in (0, 1)] == [5, 5]


@pytest.mark.parametrize("indexed", [5, 8])
def test_a_crop_of_sparse_attention_after_a_forward_that_raised(indexed: int) -> None:
    """Its indexer appends its keys after attention has: memory may run out in between."""
    cache = SpanCache(llama(), Span(1, 2))
    layer = cache.layers[1] = DynamicIndexedLayer()
    layer.update(rows(0, 8), rows(0, 8))
    layer.update_indexer(torch.arange(float(indexed)).reshape(1, indexed, 1))
    layer.indexer_position_ids = torch.arange(indexed).reshape(1, 1, indexed)
    cache.length = 5

    cache.crop(5)

    assert [layer.keys.shape[2], layer.values.shape[2]] == [5, 5]
    assert layer.indexer_keys.flatten().tolist() == [0, 1, 2, 3, 4]
    assert layer.indexer_position_ids.flatten().tolist() == [0, 1, 2, 3, 4]


def test_a_layer_that_reads_the_rows_of_another_has_none_to_crop() -> None:
    cache = SpanCache(llama(), Span(1, 2))
    cache.layers[1] = DynamicIndexedLayer()
    cache.length = 3

    cache.crop(2)

    assert cache.length == 2


@pytest.mark.parametrize("length", [-1, 4])
def test_a_crop_to_an_invalid_length_is_refused(length: int) -> None:
    cache = SpanCache(llama(), Span(1, 2))
    write(cache, 3)

    with pytest.raises(ModelError, match=f"Cannot crop a cache of 3 tokens to {length}"):
        cache.crop(length)


def test_a_crop_to_0_frees_the_memory() -> None:
    cache = SpanCache(llama(), Span(1, 2))
    write(cache, 3)

    cache.crop(0)

    assert (cache.length, cache.bytes) == (0, 0)
    assert write(cache, 2).tolist() == [0, 1]


def test_bytes_are_those_of_the_capacity() -> None:
    cache = SpanCache(llama(), Span(1, 2))
    write(cache, 3)

    # keys and values, heads, rows, D, float32
    assert cache.bytes == 2 * 2 * BLOCK * 3 * 4


@pytest.mark.parametrize("config", [llama(), mistral()], ids=["full", "window"])
@pytest.mark.parametrize("step", [1, 17, 700, 2500])
def test_the_capacity_depends_only_on_the_tokens(config: PreTrainedConfig, step: int) -> None:
    cache = SpanCache(config, Span(1, 2))
    window = getattr(config, "sliding_window", None) or 0

    while cache.length < 5000:
        write(cache, step)
        bound = rows_for(cache.length, window)
        assert cache.layers[1].rows[0].buffer.shape[-2] <= bound
        assert window or cache.layers[1].rows[0].buffer.shape[-2] == bound


@given(st.integers(1, 1 << 22), st.integers(1, 1 << 12))
def test_spare_capacity_is_an_eighth_at_most(count: int, more: int) -> None:
    assert count <= rows_for(count) <= max(count + BLOCK, count * 9 // 8 + 1)
    assert rows_for(count) <= rows_for(count + more)


def test_the_capacity_of_a_window_is_bounded() -> None:
    assert rows_for(1 << 20, WINDOW) == rows_for(MAX_ROWS + WINDOW + SLACK, WINDOW)


def test_a_recurrent_state_cannot_be_cropped_but_can_be_reset() -> None:
    cache = SpanCache(MambaConfig(num_hidden_layers=4), Span(1, 2))
    cache.update_conv_state(torch.ones(1, 4, 3), 1)
    cache.length = 3

    assert not cache.croppable
    assert cache.bytes > 0
    with pytest.raises(ModelError, match="the valid range is 3 to 3"):
        cache.crop(2)
    cache.crop(3)
    cache.crop(0)
    assert (cache.length, cache.bytes) == (0, 0)


def test_it_is_a_dynamic_cache_of_transformers() -> None:
    assert isinstance(SpanCache(llama(), Span(0, 4)), DynamicCache)


@pytest.mark.parametrize("config", [llama(), mistral()], ids=["full", "window"])
@torch.inference_mode()
def test_a_branch_is_independent(config: PreTrainedConfig) -> None:
    cache = SpanCache(config, Span(1, 2))
    write(cache, 20)

    branch = cache.branch(15)

    assert (cache.length, branch.length) == (20, 15)
    seen = write(branch, 3)
    assert seen[-3:].tolist() == [15.0, 16.0, 17.0]
    branch.layers[1].keys.zero_()
    assert write(cache, 1).tolist()[-8:] == [13.0, 14.0, 15.0, 16.0, 17.0, 18.0, 19.0, 20.0]


@torch.inference_mode()
def test_a_branch_of_a_window_that_dropped_rows_goes_on_like_it() -> None:
    cache = SpanCache(mistral(), Span(1, 2))
    write(cache, 500)
    write(cache, 5 * BLOCK + 1)  # reallocates, and drops rows far behind the window

    branch = cache.branch(cache.length - 3)

    assert branch.floor == cache.floor > 0
    last = cache.length - 3
    assert write(branch, 1).tolist() == list(range(last - WINDOW + 1, last + 1))


@pytest.mark.parametrize("config", [llama(), mistral()], ids=["full", "window"])
@torch.inference_mode()
def test_a_branch_of_an_empty_cache_is_empty(config: PreTrainedConfig) -> None:
    cache = SpanCache(config, Span(1, 2))

    branch = cache.branch(0)

    assert (branch.length, branch.bytes) == (0, cache.bytes)
    assert write(branch, 2).tolist() == [0, 1]


def test_a_branch_of_full_attention_takes_only_the_memory_it_needs() -> None:
    cache = SpanCache(llama(), Span(1, 2))
    write(cache, 10 * BLOCK)

    assert cache.branch(BLOCK).bytes < cache.bytes / 4


def test_a_recurrent_state_branches_only_at_its_end() -> None:
    cache = SpanCache(MambaConfig(num_hidden_layers=4), Span(1, 2))
    cache.length = 7

    assert cache.branch(7).length == 7
    with pytest.raises(ModelError, match="7 tokens to 6"):
        cache.branch(6)


def test_slack_is_the_smallest_of_all_layers() -> None:
    assert max_crop_of(llama(), 4) is None
    assert max_crop_of(mistral(), 4) == SLACK // 2
    assert max_crop_of(MambaConfig(num_hidden_layers=4), 4) == 0
    for at in (0, 3):
        config = llama()
        config.sliding_window, config.layer_types = WINDOW, ["full_attention"] * 4
        config.layer_types[at] = "sliding_attention"
        assert max_crop_of(config, 4) == SLACK // 2
