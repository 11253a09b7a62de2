"""Admission control: FIFO order, and no generation waits without a chance."""

import pytest

from meshllm.errors import Busy, UserError
from meshllm.names import SessionId
from meshllm.protocol.kv_cache.admission import Admission
from meshllm.protocol.kv_cache.budget import BLOCK, KvBudget
from tests.protocol.kv_cache.test_budget import room

A, B, C, D = (SessionId(name * 16) for name in (b"a", b"b", b"c", b"d"))


def admission(blocks: int = 4, most: int = 8, waiting: int = 2) -> Admission:
    return Admission(KvBudget([room(9), room(blocks)]), most, waiting)


def test_a_generation_that_fits_starts_at_once_and_others_wait() -> None:
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


def test_several_can_start_when_one_leaves() -> None:
    entry = admission()
    entry.ask(A, 4 * BLOCK)
    entry.ask(B, 2 * BLOCK)
    entry.ask(C, 2 * BLOCK)

    assert entry.leave(A) == [B, C]


def test_the_number_of_running_generations_is_limited() -> None:
    entry = admission(most=1)
    entry.ask(A, 1)

    assert not entry.ask(B, 1)
    assert entry.leave(A) == [B]
    assert entry.leave(B) == []


def test_leaving_the_queue_admits_the_next_one() -> None:
    entry = admission()
    entry.ask(A, 2 * BLOCK)
    entry.ask(B, 4 * BLOCK)
    entry.ask(C, 2 * BLOCK)

    assert entry.leave(B) == [C]


def test_a_full_queue_rejects_until_one_has_left() -> None:
    entry = admission(most=1, waiting=1)
    entry.ask(A, 1)
    entry.ask(B, 1)

    with pytest.raises(
        Busy, match="queue is full: 1 generations are running and 1 are waiting"
    ) as refused:
        entry.ask(C, 1)
    assert refused.value.hint == "retry later"
    entry.leave(A)
    assert not entry.ask(D, 1)


def test_a_generation_that_can_never_fit_is_rejected_with_numbers() -> None:
    entry = admission()
    entry.ask(A, 4 * BLOCK)

    with pytest.raises(UserError) as refused:
        entry.ask(B, 5 * BLOCK)

    assert str(refused.value) == (
        "The prompt and its answer may take 1280 tokens, and the KV cache has room for 1024: one"
        " node would need 1280 bytes and has 1024"
    )
    assert "--max-tokens" in str(refused.value.hint)
    assert not entry.ask(C, 4 * BLOCK)
