"""KV caches that another node hands over: they continue as its own would have."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshllm.errors import ModelError
from meshllm.model.files.source import Source, resolve
from meshllm.model.split.kv_cache import Rows, SpanCache
from meshllm.model.split.received_rows import ReceivedRows
from meshllm.model.split.session_cache import SessionCache
from meshllm.model.steps.runner import SpanRunner
from meshllm.names import Span
from tests.builders.pieces import TOKENS, span_runner

COUNT = TOKENS.shape[1]
STEP = TOKENS[:, :1]


@pytest.fixture
def source(llama: Path) -> Source:
    return resolve(str(llama))


def handed(cache: SessionCache, layers: range, blocks: int, stop: int = COUNT) -> ReceivedRows:
    """Hand over the rows of some layers in blocks, and what entered the layer behind."""
    received = ReceivedRows()
    for pos in range(0, stop, blocks):
        end = min(pos + blocks, stop)
        for layer in layers:
            copied = cache.copied_rows(layer, pos, end)
            assert copied is not None
            received.add(layer, pos, copied[1], copied[0])
        if (rows := cache.recorded(layers.stop, pos, end)) is not None:
            received.add(layers.stop, pos, 0, rows[:, None])
    return received


def hidden(source: Source) -> Tensor:
    """The rows that enter layer 2."""
    first = span_runner(source, "0:2")
    return first.prefill(TOKENS, first.new_cache())


def left(source: Source, x: Tensor) -> tuple[SpanRunner, SessionCache]:
    """The rank of layers 2 to 4 that leaves, and the cache of its session."""
    before = span_runner(source, "2:4")
    cache = before.new_cache()
    before.prefill(x, cache)
    return before, cache


@pytest.mark.parametrize("blocks", [1, 3, COUNT])
def test_the_next_step_has_the_same_bits(source: Source, blocks: int) -> None:
    x = hidden(source)
    before, cache = left(source, x)
    after = span_runner(source, "2:4")
    mine = after.new_cache()

    after.adopt([(mine, handed(cache, range(2, 4), blocks))])

    assert mine.length == COUNT
    sent, known = mine.recorded(4, 0, COUNT), cache.recorded(4, 0, COUNT)
    assert sent is not None
    assert known is not None
    assert torch.equal(sent, known)
    step = x[:, -1:]
    assert torch.equal(after.step(step, mine), before.step(step, cache))
    assert mine.recorded(4, 0, COUNT + 1) is not None


def test_what_was_not_handed_over_is_recomputed(source: Source) -> None:
    x = hidden(source)
    before, cache = left(source, x[:, :6])
    before.step(x[:, 6:], cache)
    after = span_runner(source, "2:4")
    mine = after.new_cache()
    after.adopt([(mine, handed(cache, range(2, 4), 4, stop=6))])

    assert mine.length == 6
    after.recompute(x[:, 6:], mine, range(6, COUNT), is_step=True, is_sent=False)

    assert after.recomputed == (COUNT - 6) * 2
    step = x[:, -1:]
    assert torch.equal(after.step(step, mine), before.step(step, cache))


def test_a_new_piece_takes_them_beside_what_the_rank_had(source: Source) -> None:
    x = hidden(source)
    _, cache = left(source, x)
    before, after = span_runner(source, "0:2"), span_runner(source, "0:2", "2:3")
    whole = span_runner(source, "0:3")
    mine, right = before.new_cache(), whole.new_cache()
    before.prefill(TOKENS, mine)
    whole.prefill(TOKENS, right)
    after.regroup(mine)

    after.adopt([(mine, handed(cache, range(2, 4), COUNT))])

    assert mine.length == COUNT
    assert torch.equal(after.step(STEP, mine), whole.step(STEP, right))
    # What entered layer 3 is recorded from here on; before, it is computed in the new layer.
    assert mine.recorded(3, COUNT, COUNT + 1) is not None
    assert mine.recorded(3, 0, 1) is None
    again = after.recompute(None, mine, range(COUNT), is_step=False, is_sent=True)
    assert again is not None
    assert torch.equal(again, whole.prefill(TOKENS, whole.new_cache()))
    assert after.recomputed == COUNT


def test_a_layer_that_was_not_handed_over_leaves_the_piece_empty(source: Source) -> None:
    _, cache = left(source, hidden(source))
    after = span_runner(source, "2:4")
    mine = after.new_cache()

    after.adopt([(mine, handed(cache, range(2, 3), COUNT))])

    assert mine.length == 0
    assert mine.parts[0].get_seq_length(2) == 0


def test_rows_that_do_not_continue_those_before_them_are_refused() -> None:
    received, rows = ReceivedRows(), torch.ones(1, 2, 3, 8)
    received.add(2, 0, 4, rows)

    with pytest.raises(
        ModelError, match=r"float32 rows of shape \[1, 2, 3, 4\] at 4 do not continue 3 rows of"
    ):
        received.add(2, 4, 4, rows)
    received.add(2, 3, 4, rows)

    assert received.layers[2][0].used == 6


@pytest.mark.parametrize("change", ["heads", "width", "values", "type"])
def test_rows_of_another_form_are_not_used(source: Source, change: str) -> None:
    _, cache = left(source, hidden(source))
    received = ReceivedRows()
    for layer in (2, 3):
        rows, split = cache.copied_rows(layer, 0, COUNT) or (torch.empty(0), 0)
        if layer == 3:
            match change:
                case "heads":
                    rows = rows[:, :1]
                case "width":
                    rows = rows[..., 2:]
                case "values":
                    split -= 1
                case _:
                    rows = rows.half()
        received.add(layer, 0, split, rows.contiguous())
    after = span_runner(source, "2:4")
    mine = after.new_cache()

    after.adopt([(mine, received)])

    assert mine.length == 0


def test_what_a_rank_holds_is_not_replaced(source: Source) -> None:
    x = hidden(source)
    before, cache = left(source, x)
    mine = before.new_cache()
    before.prefill(x[:, :3], mine)

    before.adopt([(mine, handed(cache, range(2, 4), COUNT))])

    assert mine.length == 3


def test_layers_with_a_window_are_not_copied(source: Source) -> None:
    config = source.config
    config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    config.sliding_window = 4
    cache = SpanCache(config, Span(2, 4))
    rows = torch.zeros(1, 2, 3, 8)
    cache.update(rows, rows, 2)

    assert cache.copied_rows(2, 0, 3) is None


def test_fewer_rows_than_asked_for_are_not_copied(source: Source) -> None:
    _, cache = left(source, hidden(source))

    assert cache.copied_rows(2, 0, COUNT + 1) is None
    assert cache.copied_rows(5, 0, 1) is None


def test_keys_and_values_of_other_heads_are_not_copied(source: Source) -> None:
    cache = SpanCache(source.config, Span(2, 4))
    cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 1, 3, 8), 2)

    assert cache.copied_rows(2, 0, 3) is None


def test_a_record_behind_rows_that_were_handed_over_is_cropped_and_copied(source: Source) -> None:
    x = hidden(source)
    _, cache = left(source, x)
    after = span_runner(source, "2:3")
    mine = after.new_cache()
    after.adopt([(mine, handed(cache, range(2, 4), COUNT))])
    for _ in range(3):
        after.step(x[:, -1:], mine)

    other, short = mine.branch(COUNT + 2), mine.branch(COUNT - 1)
    mine.crop(COUNT + 1)

    assert mine.recorded(3, COUNT, COUNT + 1) is not None
    assert mine.recorded(3, COUNT, COUNT + 2) is None
    assert other.recorded(3, COUNT, COUNT + 2) is not None
    assert other.recorded(3, COUNT - 1, COUNT) is None
    assert short.sent == {}
    mine.crop(COUNT - 2)
    assert mine.recorded(3, COUNT - 3, COUNT - 2) is None
    assert mine.recorded(3, COUNT, COUNT + 1) is None
    mine.crop(0)
    after.prefill(x, mine)
    assert mine.recorded(3, 0, COUNT) is not None


def test_rows_move_to_the_device_of_the_model(source: Source) -> None:
    _, cache = left(source, hidden(source))
    received, config = handed(cache, range(2, 4), 3), source.config
    like, mine = SpanCache(config, Span(2, 4)), SpanCache(config, Span(2, 4))
    keys, split = cache.copied_rows(2, 0, 1) or (torch.empty(0), 0)
    for layer in (2, 3):
        like.update(keys[..., :split].to("meta"), keys[..., split:].to("meta"), layer)

    mine.adopt(received.layers, like)

    assert mine.length == COUNT
    for layer in (2, 3):
        found = mine.layers[layer].keys, mine.layers[layer].values
        assert [(each.device.type, each.shape[-2]) for each in found] == [("meta", COUNT)] * 2
    assert received.layers[2][0].buffer.device.type == "cpu"


def test_without_memory_a_piece_stays_empty(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = hidden(source)
    _, cache = left(source, x)
    after = span_runner(source, "2:4")
    mine, received = after.new_cache(), handed(cache, range(2, 4), COUNT)
    on, left_over = Rows.on, iter(range(3))

    def fail(rows: Rows, device: torch.device) -> Rows:
        if next(left_over, None) is None:
            raise MemoryError
        return on(rows, device)

    monkeypatch.setattr(Rows, "on", fail)

    with pytest.raises(MemoryError):
        after.adopt([(mine, received)])

    assert mine.length == 0
    after.prefill(x, mine)
    assert mine.parts[0].get_seq_length(2) == COUNT


@pytest.mark.parametrize("fails_at", [1, 2])
def test_rows_without_memory_change_nothing(monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    received, rows = ReceivedRows(), torch.zeros(1, 2, 3, 8)
    received.add(2, 0, 4, rows)
    extend, count = Rows.extend, 0

    def fail(self: Rows, more: int, window: int = 0) -> None:
        nonlocal count
        count += 1
        if count == fails_at:
            raise MemoryError
        extend(self, more, window)

    monkeypatch.setattr(Rows, "extend", fail)
    with pytest.raises(MemoryError):
        received.add(2, 3, 4, rows)

    assert [each.used for each in received.layers[2]] == [3, 3]


def test_rows_of_two_nodes_are_joined() -> None:
    one, other, rows = ReceivedRows(), ReceivedRows(), torch.zeros(1, 2, 3, 8)
    one.add(2, 0, 4, rows)
    other.add(3, 0, 4, rows)
    other.add(4, 0, 0, rows[:, :1])
    one.add(5, 0, 0, rows[:, :1])

    one.join(other)

    assert sorted(one.layers) == [2, 3]
    assert sorted(one.sent) == [4, 5]


@pytest.mark.parametrize("change", ["width", "type"])
def test_hidden_states_of_another_form_are_not_recorded(source: Source, change: str) -> None:
    x = hidden(source)
    _, cache = left(source, x)
    received = handed(cache, range(2, 4), COUNT)
    sent = received.sent[4].held
    received.sent[4] = Rows(sent[..., 1:] if change == "width" else sent.half())
    received.sent[4].extend(COUNT)
    after = span_runner(source, "2:4")
    mine = after.new_cache()

    after.adopt([(mine, received)])

    assert mine.length == COUNT
    assert mine.recorded(4, 0, 1) is None
    after.step(x[:, -1:], mine)
    assert mine.recorded(4, COUNT, COUNT + 1) is not None
