"""Generations begin in the order in which they came, and none waits for what cannot be."""

import pytest

from meshllm.errors import Busy, UserError
from meshllm.names import SessionId
from meshllm.protocol.kv_cache.admission import Admission
from meshllm.protocol.kv_cache.budget import BLOCK, KvBudget
from tests.protocol.kv_cache.test_budget import room

A, B, C, D = (SessionId(name * 16) for name in (b"a", b"b", b"c", b"d"))


def admission(blocks: int = 4, most: int = 8, waiting: int = 2) -> Admission:
    return Admission(KvBudget([room(9), room(blocks)]), most, waiting)


def test_who_fits_begins_at_once_and_others_wait() -> None:
    entry = admission()

    assert entry.ask(A, 3 * BLOCK)
    assert not entry.ask(B, 2 * BLOCK)
    assert entry.leave(A) == [B]


def test_a_short_one_does_not_overtake() -> None:
    entry = admission()
    entry.ask(A, 2 * BLOCK)
    entry.ask(B, 4 * BLOCK)

    assert not entry.ask(C, BLOCK)
    assert entry.leave(A) == [B]
    assert entry.leave(B) == [C]


def test_several_begin_in_the_place_of_one() -> None:
    entry = admission()
    entry.ask(A, 4 * BLOCK)
    entry.ask(B, 2 * BLOCK)
    entry.ask(C, 2 * BLOCK)

    assert entry.leave(A) == [B, C]


def test_no_more_than_the_most_run_however_short() -> None:
    entry = admission(most=1)
    entry.ask(A, 1)

    assert not entry.ask(B, 1)
    assert entry.leave(A) == [B]
    assert entry.leave(B) == []


def test_who_gives_up_waiting_lets_the_next_one_go() -> None:
    entry = admission()
    entry.ask(A, 2 * BLOCK)
    entry.ask(B, 4 * BLOCK)
    entry.ask(C, 2 * BLOCK)

    assert entry.leave(B) == [C]


def test_a_full_queue_refuses_until_one_has_gone() -> None:
    entry = admission(most=1, waiting=1)
    entry.ask(A, 1)
    entry.ask(B, 1)

    with pytest.raises(Busy, match="1 answers are being made and 1 wait") as refused:
        entry.ask(C, 1)
    assert refused.value.hint == "ask again later"
    entry.leave(A)
    assert not entry.ask(D, 1)


def test_what_can_never_fit_is_refused_with_numbers() -> None:
    entry = admission()
    entry.ask(A, 4 * BLOCK)

    with pytest.raises(UserError) as refused:
        entry.ask(B, 5 * BLOCK)

    assert str(refused.value) == (
        "The prompt and its answer may come to 1280 tokens, and there is room for 1024: one node"
        " would need 1280 bytes for their cache and has 1024"
    )
    assert "--max-tokens" in str(refused.value.hint)
    assert not entry.ask(C, 4 * BLOCK)
