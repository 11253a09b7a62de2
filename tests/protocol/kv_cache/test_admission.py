"""Admission control: turns by asker, FIFO order for each, and every generation gets its chance."""

from collections import Counter
from contextlib import suppress

import pytest

from meshllm.errors import Busy, UserError
from meshllm.names import NodeId, SessionId
from meshllm.protocol.kv_cache.admission import QUANTUM, Admission, asker_of
from meshllm.protocol.kv_cache.budget import BLOCK, KvBudget
from meshllm.protocol.kv_cache.prefix_scope import OWN, OWNERS, PrefixScope
from tests.protocol.kv_cache.test_budget import room

A, B, C, D = (SessionId(name * 16) for name in (b"a", b"b", b"c", b"d"))
GREEDY, MODEST = (NodeId(name * 32) for name in (b"g", b"m"))


def admission(blocks: int = 4, most: int = 8, waiting: int = 2) -> Admission:
    return Admission(KvBudget([room(9), room(blocks)]), most, waiting)


def test_a_generation_that_fits_starts_at_once_and_others_wait() -> None:
    entry = admission()

    assert entry.ask(A, 3 * BLOCK) == [A]
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


def test_who_asks_after_a_release_lets_in_those_before_it() -> None:
    budget = KvBudget([room(4)])
    entry = Admission(budget, 8)
    entry.ask(A, 3 * BLOCK)
    entry.ask(B, 3 * BLOCK)
    budget.release(A)

    assert entry.ask(C, BLOCK) == [B, C]
    assert entry.leave(A) == []


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
        "This model's maximum context length is 1024 tokens, for which the KV caches have room;"
        " prompt and answer may take 1280: one node would need 1280 bytes and has 1024"
    )
    assert "--max-tokens" in str(refused.value.hint)
    assert not entry.ask(C, 4 * BLOCK)


def order_of(entry: Admission, first: SessionId) -> list[SessionId]:
    """End one generation after the other, and return the order in which the others started."""
    order, ends = [], first
    while begun := entry.leave(ends):
        (ends,) = begun
        order.append(ends)
    return order


def test_askers_take_turns_however_many_requests_one_sends() -> None:
    entry = admission(most=1, waiting=9)
    entry.ask(A, 1, GREEDY)
    many = [SessionId(bytes([number]) * 16) for number in range(4)]
    for session in many:
        entry.ask(session, QUANTUM, GREEDY)

    entry.ask(B, QUANTUM, MODEST)
    entry.ask(C, QUANTUM, MODEST)

    assert order_of(entry, A) == [many[0], B, many[1], C, many[2], many[3]]


def test_turns_are_fair_in_tokens_not_in_requests() -> None:
    entry = admission(most=1, waiting=9)
    entry.ask(A, 1, GREEDY)
    long = SessionId(b"l" * 16)
    entry.ask(long, 2 * QUANTUM, GREEDY)

    for session in (B, C, D):
        entry.ask(session, QUANTUM, MODEST)

    assert order_of(entry, A) == [B, long, C, D]


def test_an_asker_collects_no_credit_while_it_asks_nothing() -> None:
    entry = admission(most=1, waiting=9)
    entry.ask(A, 1, GREEDY)
    entry.ask(B, 1, MODEST)  # uses little of its credit
    entry.leave(A)
    entry.ask(C, QUANTUM, GREEDY)
    entry.ask(D, QUANTUM, MODEST)

    assert entry.leave(B) == [C]


def test_the_owner_is_served_before_all_others() -> None:
    entry = admission(most=1, waiting=9)
    entry.ask(A, 1, GREEDY)
    entry.ask(B, QUANTUM, GREEDY)
    entry.ask(C, 2 * QUANTUM)

    assert order_of(entry, A) == [C, B]


def test_others_cannot_fill_the_queue_of_the_owner() -> None:
    entry = admission(most=1, waiting=1)
    entry.ask(A, 1, GREEDY)
    entry.ask(B, 1, GREEDY)
    with pytest.raises(Busy, match="1 are waiting"):
        entry.ask(C, 1, GREEDY)

    assert not entry.ask(D, 1)
    assert order_of(entry, A) == [D, B]


def test_an_asker_leaves_places_of_the_queue_to_the_next_one() -> None:
    entry = admission(most=1, waiting=4)
    entry.ask(A, 1, GREEDY)
    asked: Counter[NodeId | str] = Counter()

    for asker in (GREEDY, MODEST, "a key"):
        with suppress(Busy):
            for number in range(9):
                entry.ask(SessionId(f"{asker!r} {number}".encode()), 1, asker)
                asked[asker] += 1

    assert asked == {GREEDY: 4, MODEST: 2, "a key": 1}


def test_others_leave_a_place_to_the_owner() -> None:
    entry = admission(most=2)
    entry.ask(A, 1, GREEDY)

    assert not entry.ask(B, 1, MODEST)
    assert entry.ask(C, 1) == [C]
    assert entry.leave(C) == []
    assert entry.leave(A) == [B]


@pytest.mark.parametrize(
    ("scope", "asker"),
    [
        (OWN, None),
        ((None, OWNERS + "door"), None),
        ((None, "key"), "key"),
        ((GREEDY, ""), GREEDY),
        ((GREEDY, OWNERS), GREEDY),
        ((GREEDY, "key"), GREEDY),
    ],
)
def test_a_key_takes_turns_of_its_own_and_a_node_those_of_all_who_ask_it(
    scope: PrefixScope, asker: NodeId | str | None
) -> None:
    assert asker_of(scope) == asker


def test_one_whose_turn_it_is_is_not_overtaken_until_it_fits() -> None:
    entry = admission()
    entry.ask(A, 2 * BLOCK, GREEDY)
    entry.ask(B, 4 * BLOCK, GREEDY)

    assert not entry.ask(C, BLOCK, MODEST)
    assert entry.leave(A) == [B]
    assert entry.leave(B) == [C]
