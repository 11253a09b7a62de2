"""What a rank holds of a session: caches that move between pieces, and the rows it sent."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from meshllm.errors import ModelError
from meshllm.model.files.source import Source, resolve
from meshllm.model.split.kv_cache import Rows, SpanCache
from meshllm.model.split.received_rows import ReceivedRows
from meshllm.model.split.session_cache import SentRows, SessionCache
from meshllm.model.steps.runner import SpanRunner
from meshllm.names import Span
from tests.builders.pieces import TOKENS, runner_of, span_runner

WIDTH = 4


def rows_of(start: int, stop: int) -> Tensor:
    """Rows ``[1, T, D]`` that tell their position."""
    return torch.arange(start, stop, dtype=torch.float32)[None, :, None].expand(1, -1, WIDTH)


def recorded(cache: SessionCache, start: int, stop: int) -> list[int] | None:
    rows = cache.recorded(3, start, stop)
    return None if rows is None else [int(row[0]) for row in rows[0]]


@pytest.fixture
def empty() -> SessionCache:
    return SessionCache([])


def test_recorded_rows_are_found_by_layer_and_position(empty: SessionCache) -> None:
    empty.record(3, 0, rows_of(0, 5))
    empty.record(3, 5, rows_of(5, 6))

    assert recorded(empty, 2, 6) == [2, 3, 4, 5]
    assert recorded(empty, 2, 7) is None
    assert empty.recorded(4, 0, 1) is None


def test_recorded_rows_that_grow_keep_all(empty: SessionCache) -> None:
    empty.record(3, 0, rows_of(0, 300))
    empty.record(3, 300, rows_of(300, 600))

    assert recorded(empty, 0, 600) == [*range(600)]


def test_rows_that_replace_others_drop_what_followed(empty: SessionCache) -> None:
    empty.record(3, 0, rows_of(0, 6))
    empty.record(3, 4, rows_of(90, 91))

    assert recorded(empty, 0, 5) == [0, 1, 2, 3, 90]
    assert recorded(empty, 5, 6) is None


def test_rows_that_begin_late_are_replaced_at_their_position() -> None:
    config = LlamaConfig(num_hidden_layers=3)
    cache = SessionCache([SpanCache(config, Span(0, 3))])
    cache.adopt(ReceivedRows(), [SpanCache(config, Span(0, 3))])

    cache.record(3, 5, rows_of(5, 8))
    cache.record(3, 6, rows_of(90, 91))

    assert recorded(cache, 5, 7) == [5, 90]
    assert recorded(cache, 7, 8) is None


def test_rows_behind_a_gap_are_not_recorded(empty: SessionCache) -> None:
    empty.record(3, 2, rows_of(2, 4))
    assert empty.sent == {}

    empty.record(3, 0, rows_of(0, 2))
    empty.record(3, 4, rows_of(4, 5))
    assert recorded(empty, 0, 2) == [0, 1]
    assert recorded(empty, 4, 5) is None


def test_rows_are_copied(empty: SessionCache) -> None:
    rows = rows_of(0, 2).clone()
    empty.record(3, 0, rows)
    rows.zero_()

    assert recorded(empty, 0, 2) == [0, 1]


def test_a_crop_takes_recorded_rows_away_and_gives_none(empty: SessionCache) -> None:
    empty.record(3, 0, rows_of(0, 6))

    empty.crop(4)
    empty.crop(9)

    assert recorded(empty, 0, 4) == [0, 1, 2, 3]
    assert recorded(empty, 0, 5) is None


def test_a_branch_has_its_own_rows_up_to_its_length(empty: SessionCache) -> None:
    empty.record(3, 0, rows_of(0, 6))

    short, long, none = (empty.branch(length) for length in (4, 9, 0))
    short.record(3, 3, rows_of(90, 92))

    assert recorded(short, 0, 5) == [0, 1, 2, 90, 91]
    assert recorded(empty, 0, 6) == recorded(long, 0, 6) == [0, 1, 2, 3, 4, 5]
    assert recorded(long, 0, 7) is None
    assert none.sent == {}


def test_recorded_rows_are_found_by_their_positions(empty: SessionCache) -> None:
    empty.sent[3] = 4, Rows(rows_of(4, 12))
    empty.record(3, 4, rows_of(4, 12))

    assert recorded(empty, 5, 7) == [5, 6]
    assert recorded(empty, 3, 5) is None


def test_only_rows_at_the_layers_of_the_new_pieces_are_kept() -> None:
    config = LlamaConfig(num_hidden_layers=6)
    cache = SessionCache([SpanCache(config, Span(0, 6))])
    for layer in range(1, 7):
        cache.record(layer, 0, rows_of(0, 2))

    cache.regroup([SpanCache(config, Span(2, 3)), SpanCache(config, Span(3, 5))])

    assert sorted(cache.sent) == [2, 3, 4, 5]


def test_sessions_that_recorded_longest_ago_lose_their_rows(empty: SessionCache) -> None:
    empty.record(3, 0, rows_of(0, 1))
    running, kept, new = SessionCache([]), SessionCache([]), SessionCache([])
    sent = SentRows(int(empty.sent_bytes * 2.5))
    for cache in (running, kept):
        sent.record(cache, 3, 0, rows_of(0, 1))
    sent.record(running, 3, 1, rows_of(1, 2))

    sent.record(new, 3, 0, rows_of(0, 1))

    assert recorded(running, 0, 2) == [0, 1]
    assert recorded(kept, 0, 1) is None
    assert recorded(new, 0, 1) == [0]
    assert sent.bytes == 2 * empty.sent_bytes
    sent.record(kept, 3, 1, rows_of(1, 2))
    assert kept.sent_bytes == 0


def test_a_session_that_grows_too_large_loses_its_rows(empty: SessionCache) -> None:
    empty.record(3, 0, rows_of(0, 1))
    sent, cache, other = SentRows(2 * empty.sent_bytes), SessionCache([]), SessionCache([])
    sent.record(other, 3, 0, rows_of(0, 1))

    for start in (0, 1):
        sent.record(cache, 3, start, rows_of(start, start + 1))
    assert recorded(cache, 0, 2) == [0, 1]
    sent.record(cache, 3, 2, rows_of(2, 1000))

    assert cache.sent == {}
    assert recorded(other, 0, 1) == [0]


def test_the_rows_of_the_last_session_may_take_all_memory(empty: SessionCache) -> None:
    empty.record(3, 0, rows_of(0, 1))
    sent, first, last = SentRows(empty.sent_bytes), SessionCache([]), SessionCache([])
    sent.record(first, 3, 0, rows_of(0, 1))

    sent.record(last, 3, 0, rows_of(0, 1))

    assert recorded(last, 0, 1) == [0]
    assert first.sent == {}


def test_the_rows_of_a_branch_count(empty: SessionCache) -> None:
    empty.record(3, 0, rows_of(0, 1))
    sent = SentRows(int(empty.sent_bytes * 1.5))
    first = SessionCache([])
    sent.record(first, 3, 0, rows_of(0, 1))
    branch = first.branch(1)

    sent.record(branch, 3, 1, rows_of(1, 2))

    assert recorded(branch, 0, 2) == [0, 1]
    assert first.sent_bytes == 0


def test_rows_of_a_dropped_session_make_room(empty: SessionCache) -> None:
    empty.record(3, 0, rows_of(0, 1))
    sent = SentRows(empty.sent_bytes)
    for _ in range(3):
        cache = SessionCache([])
        sent.record(cache, 3, 0, rows_of(0, 1))
        assert recorded(cache, 0, 1) == [0]
        assert sent.bytes == empty.sent_bytes
        del cache


@pytest.fixture
def source(llama: Path) -> Source:
    return resolve(str(llama))


@pytest.mark.parametrize("spans", [("0:2", "2:4"), ("0:1", "1:3", "3:4")])
def test_pieces_compute_what_one_piece_does(source: Source, spans: tuple[str, ...]) -> None:
    whole, pieces = span_runner(source, "0:4"), span_runner(source, *spans)
    one, other = whole.new_cache(), pieces.new_cache()

    assert pieces.span == Span(0, 4)
    for chunk in torch.split(TOKENS, 4, 1):
        assert torch.equal(pieces.prefill(chunk, other), whole.prefill(chunk, one))
    step = TOKENS[:, :1]
    assert torch.equal(pieces.step(step, other), whole.step(step, one))
    assert (other.length, other.branch(3).length) == (11, 3)


def test_caches_move_to_other_pieces_layer_by_layer(source: Source) -> None:
    before, after = span_runner(source, "0:4"), span_runner(source, "0:2", "2:4")
    cache, plain = before.new_cache(), before.new_cache()
    before.prefill(TOKENS, cache)
    before.prefill(TOKENS, plain)

    after.regroup(cache)
    assert cache.length == TOKENS.shape[1]
    step = TOKENS[:, :1]
    assert torch.equal(after.step(step, cache), before.step(step, plain))


def test_a_branch_lacks_the_layers_that_its_cache_lacks(source: Source) -> None:
    before, after = span_runner(source, "0:2"), span_runner(source, "0:2", "2:4")
    cache, upper = before.new_cache(), span_runner(source, "2:4")
    rows = before.prefill(TOKENS, cache)[:, :4]  # of fewer tokens they may have other bits
    after.regroup(cache)

    branch = cache.branch(4)

    assert [part.length for part in branch.parts] == [4, 0]
    again = after.recompute(None, branch, range(4), is_step=False, is_sent=True)
    assert again is not None
    assert torch.equal(again, upper.prefill(rows, upper.new_cache()))


def test_rows_of_moved_sessions_count_and_those_of_no_layer_here_go(source: Source) -> None:
    before = span_runner(source, "0:2", "2:4")
    cache = before.new_cache()
    before.prefill(TOKENS, cache)
    piece = runner_of(source, Span(2, 4))

    narrow = SpanRunner([piece], SentRows(cache.sent_bytes - 1))
    narrow.regroup(cache)
    assert narrow.sent_bytes == 0
    assert cache.sent == {}  # as they exceed

    cache = before.new_cache()
    before.prefill(TOKENS, cache)
    SpanRunner([runner_of(source, Span(0, 2))], SentRows(1 << 30)).regroup(cache)
    assert cache.sent == {}  # behind layer 4


def test_recomputation_computes_only_the_pieces_that_lack_the_rows(source: Source) -> None:
    before, after = span_runner(source, "0:2"), span_runner(source, "0:2", "2:4")
    whole = span_runner(source, "0:4")
    cache, right = before.new_cache(), whole.new_cache()
    before.prefill(TOKENS, cache)
    rows = whole.prefill(TOKENS, right)
    keys = cache.parts[0].layers[1].keys.data_ptr()

    after.regroup(cache)
    assert cache.length == 0
    again = after.recompute(None, cache, range(TOKENS.shape[1]), is_step=False, is_sent=True)
    assert again is not None
    assert torch.equal(again, rows)
    assert cache.parts[0].layers[1].keys.data_ptr() == keys
    step = TOKENS[:, :1]
    assert torch.equal(after.step(step, cache), whole.step(step, right))
    assert cache.recorded(4, 0, 11) is not None  # for the next loss


def test_an_output_that_nobody_needs_is_not_computed(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, before = span_runner(source, "0:1"), span_runner(source, "2:4")
    after, whole = span_runner(source, "1:2", "2:4"), span_runner(source, "1:4")
    rows, step = first.prefill(TOKENS, first.new_cache()), torch.ones(1, 1, 64)
    cache, right = before.new_cache(), whole.new_cache()
    lost = span_runner(source, "1:2")
    before.prefill(lost.prefill(rows, lost.new_cache()), cache)
    whole.prefill(rows, right)
    after.regroup(cache)
    filled, fill = list[int](), after.pieces[0].fill

    def noted(x: Tensor, cache: SpanCache, *, is_step: bool) -> None:
        filled.append(x.shape[1])
        fill(x, cache, is_step=is_step)

    monkeypatch.setattr(after.pieces[0], "fill", noted)
    places = range(TOKENS.shape[1])
    assert after.recompute(rows, cache, places, is_step=False, is_sent=False) is None

    assert filled == [len(places)]
    assert torch.equal(after.step(step, cache), whole.step(step, right))


def test_an_output_is_recorded_for_the_next_loss_even_if_nobody_needs_it_now(
    source: Source,
) -> None:
    before, after = span_runner(source, "0:2"), span_runner(source, "0:2", "2:4")
    whole, places = span_runner(source, "0:4"), range(TOKENS.shape[1])
    cache = before.new_cache()
    before.prefill(TOKENS, cache)
    after.regroup(cache)

    assert after.recompute(None, cache, places, is_step=False, is_sent=False) is None

    known = cache.recorded(4, 0, len(places))
    assert known is not None
    assert torch.equal(known, whole.prefill(TOKENS, whole.new_cache()))


def test_recomputation_without_the_rows_before_a_lost_layer_is_refused(source: Source) -> None:
    before, after = span_runner(source, "0:2"), span_runner(source, "0:2", "2:4")
    cache = before.new_cache()
    before.prefill(TOKENS, cache)
    cache.sent.clear()
    after.regroup(cache)

    with pytest.raises(ModelError, match="layers 0:2"):
        after.recompute(None, cache, range(4), is_step=False, is_sent=True)


def test_recomputation_that_was_cut_off_goes_on(source: Source) -> None:
    before, after = span_runner(source, "0:2"), span_runner(source, "0:2", "2:4")
    whole = span_runner(source, "0:4")
    cache, right = before.new_cache(), whole.new_cache()
    before.prefill(TOKENS, cache)
    whole.prefill(TOKENS[:, :4], right)
    after.regroup(cache)
    after.recompute(None, cache, range(2), is_step=False, is_sent=True)

    rows = after.recompute(None, cache, range(4), is_step=False, is_sent=True)
    assert rows is not None
    assert rows.shape == (1, 4, 64)
    with pytest.raises(ModelError, match="Cannot crop"):
        after.recompute(None, cache, range(7, 9), is_step=False, is_sent=True)


def test_an_output_that_is_not_sent_need_not_be_known(source: Source) -> None:
    runner = span_runner(source, "0:2")
    cache = runner.new_cache()
    runner.prefill(TOKENS, cache)
    cache.sent.clear()

    assert runner.recompute(None, cache, range(4), is_step=False, is_sent=False) is None
    assert runner.recomputed == 0
    with pytest.raises(ModelError, match="Nothing to compute layers 0:2"):
        runner.recompute(None, cache, range(4), is_step=False, is_sent=True)


@pytest.mark.parametrize("is_sent", [True, False])
def test_layers_run_again_for_an_output_that_is_sent_and_was_not_recorded(
    source: Source, *, is_sent: bool
) -> None:
    first, before = span_runner(source, "0:1"), span_runner(source, "1:3")
    after, whole = span_runner(source, "0:1", "1:2"), span_runner(source, "0:2")
    cache, count = before.new_cache(), TOKENS.shape[1]
    before.prefill(first.prefill(TOKENS, first.new_cache()), cache)
    after.regroup(cache)

    output = after.recompute(TOKENS, cache, range(count), is_step=False, is_sent=is_sent)

    assert after.recomputed == count * (2 if is_sent else 1)
    assert cache.length == count
    if is_sent:
        assert output is not None
        assert torch.equal(output, whole.prefill(TOKENS, whole.new_cache()))


def test_a_piece_without_layers_takes_over_the_length(source: Source) -> None:
    whole = span_runner(source, "0:2")
    cache = whole.new_cache()
    whole.prefill(TOKENS, cache)
    empty = SpanCache(whole.pieces[0].shard.model.config, Span(0, 0))

    empty.take_over(cache.parts)
    assert empty.length == TOKENS.shape[1]
