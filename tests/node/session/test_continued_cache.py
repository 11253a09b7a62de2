"""What a session continues from: a cache of its own or a copy, and the misses of either."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from meshllm.errors import ModelError
from meshllm.model.split.session_cache import SessionCache
from meshllm.model.steps.runner import SpanRunner
from meshllm.names import SessionId
from meshllm.node.session.continued_cache import CacheMiss, crop_cache, recompute, start_from
from meshllm.protocol.kv_cache.prefix_index import PrefixHit
from tests.builders.session import CountedCache

ROW = torch.zeros(1, 1, 2)


def counted(length: int) -> SessionCache:
    return cast("SessionCache", CountedCache(length))


def hit(length: int, *, whole: bool) -> PrefixHit:
    return PrefixHit(SessionId(bytes(16)), length, whole)


class Layers:
    """Layers that know the input of the rows of a cache, or do not."""

    def __init__(self, *, is_known: bool) -> None:
        self.is_known = is_known
        self.asked: list[tuple[range, bool, bool]] = []

    def recompute(self, x: Tensor, _cache: object, places: range, **kind: Any) -> Tensor:
        self.asked.append((places, kind["is_step"], kind["is_sent"]))
        if not self.is_known:
            raise ModelError("the rows before are unknown")
        return x + 1


def test_without_a_hit_a_session_begins_with_an_empty_cache() -> None:
    empty = counted(0)

    start = start_from(None, lambda: empty)

    assert (start.base, start.cache) == (None, None)
    assert start.make() is empty


def test_a_cache_that_nobody_else_will_want_is_taken_over() -> None:
    kept = counted(9)

    start = start_from((hit(7, whole=True), kept), lambda: counted(0))

    assert start.cache is kept
    assert start.base == hit(7, whole=True)


def test_a_shared_cache_is_copied_once_it_is_needed() -> None:
    kept = counted(9)

    start = start_from((hit(7, whole=False), kept), lambda: counted(0))

    assert start.cache is None
    copy = start.make()
    assert copy.length == 7
    assert copy is not kept


def test_a_cache_is_cropped_to_what_a_job_continues_from() -> None:
    cache = counted(9)

    crop_cache(cache, 4)

    assert cache.length == 4


def test_a_cache_that_is_shorter_is_missed() -> None:
    with pytest.raises(CacheMiss, match="A cache of 9 tokens has no 10"):
        crop_cache(counted(9), 10)


def test_layers_that_lack_rows_are_recomputed() -> None:
    layers = Layers(is_known=True)

    rows = recompute(
        cast("SpanRunner", layers), ROW, counted(9), range(3, 4), is_step=True, is_sent=False
    )

    assert rows is not None
    assert torch.equal(rows, ROW + 1)
    assert layers.asked == [(range(3, 4), True, False)]


def test_rows_whose_input_is_unknown_are_missed() -> None:
    layers = cast("SpanRunner", Layers(is_known=False))

    with pytest.raises(CacheMiss, match="unknown"):
        recompute(layers, ROW, counted(9), range(3, 4), is_step=False, is_sent=True)
