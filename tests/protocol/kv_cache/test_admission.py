"""Admission control: turns by asker, FIFO order for each, and every generation gets its chance."""

from collections import Counter
from contextlib import suppress
from random import Random

import pytest

from meshllm.errors import Busy, UserError
from meshllm.names import NodeId, SessionId
from meshllm.protocol.kv_cache.admission import (
    OPEN_PER_PLACE,
    OWNER_S,
    QUANTUM,
    SHORT_ANSWER,
    SHORT_ROOM,
    Admission,
    queue_key_of,
    requester_of,
)
from meshllm.protocol.kv_cache.budget import BLOCK, KvBudget
from meshllm.protocol.kv_cache.prefix_scope import OWN, OWNERS, PrefixScope
from tests.builders.rooms import room

A, B, C, D = (SessionId(name * 16) for name in (b"a", b"b", b"c", b"d"))
NOW = 1000.0
GREEDY_KEY = "greedy"
GREEDY, MODEST = (NodeId(name * 32) for name in (b"g", b"m"))


def admission(blocks: int = 4, most: int = 8, waiting: int = 2) -> Admission:
    return Admission(KvBudget([room(9), room(blocks)]), most, waiting)


def test_a_generation_that_fits_starts_at_once_and_others_wait() -> None:
    entry = admission()

    assert entry.ask(A, 3 * BLOCK, NOW) == [A]
    assert not entry.ask(B, 2 * BLOCK, NOW)
    assert entry.leave(A, NOW) == [B]


def test_a_short_one_does_not_overtake() -> None:
    entry = admission()
    entry.ask(A, 2 * BLOCK, NOW)
    entry.ask(B, 4 * BLOCK, NOW)

    assert not entry.ask(C, BLOCK, NOW)
    assert entry.leave(A, NOW) == [B]
    assert entry.leave(B, NOW) == [C]


def test_several_can_start_when_one_leaves() -> None:
    entry = admission()
    entry.ask(A, 4 * BLOCK, NOW)
    entry.ask(B, 2 * BLOCK, NOW)
    entry.ask(C, 2 * BLOCK, NOW)

    assert entry.leave(A, NOW) == [B, C]


def test_who_asks_after_a_release_lets_in_those_before_it() -> None:
    budget = KvBudget([room(4)])
    entry = Admission(budget, 8)
    entry.ask(A, 3 * BLOCK, NOW)
    entry.ask(B, 3 * BLOCK, NOW)
    budget.release(A)

    assert entry.ask(C, BLOCK, NOW) == [B, C]
    assert entry.leave(A, NOW) == []


def test_the_number_of_running_generations_is_limited() -> None:
    entry = admission(most=1)
    entry.ask(A, 1, NOW)

    assert not entry.ask(B, 1, NOW)
    assert entry.leave(A, NOW) == [B]
    assert entry.leave(B, NOW) == []


def test_leaving_the_queue_admits_the_next_one() -> None:
    entry = admission()
    entry.ask(A, 2 * BLOCK, NOW)
    entry.ask(B, 4 * BLOCK, NOW)
    entry.ask(C, 2 * BLOCK, NOW)

    assert entry.leave(B, NOW) == [C]


def test_a_full_queue_rejects_until_one_has_left() -> None:
    entry = admission(most=1, waiting=1)
    entry.ask(A, 1, NOW)
    entry.ask(B, 1, NOW)

    with pytest.raises(
        Busy, match="queue is full: 1 generations are running and 1 are waiting"
    ) as refused:
        entry.ask(C, 1, NOW)
    assert refused.value.hint == "retry later"
    entry.leave(A, NOW)
    assert not entry.ask(D, 1, NOW)


def test_a_generation_that_can_never_fit_is_rejected_with_numbers() -> None:
    entry = admission()
    entry.ask(A, 4 * BLOCK, NOW)

    with pytest.raises(UserError) as refused:
        entry.ask(B, 5 * BLOCK, NOW)

    assert str(refused.value) == (
        "This model's maximum context length is 1024 tokens, for which the KV caches have room;"
        " prompt and answer take at least 1280: one node would need 1280 bytes and has 1024"
    )
    assert "shorter prompt" in str(refused.value.hint)
    assert not entry.ask(C, 4 * BLOCK, NOW)


def test_there_may_be_less_room_as_long_as_what_runs_and_waits_fits() -> None:
    entry = admission(blocks=6)
    entry.ask(A, 2 * BLOCK, NOW)
    entry.ask(B, 5 * BLOCK, NOW)

    less = [9 * BLOCK, 4 * BLOCK]
    assert entry.resize(less, NOW) is None  # the one that waits could never start
    assert entry.resize([9 * BLOCK, 5 * BLOCK], NOW) == []
    assert entry.leave(A, NOW) == [B]
    assert entry.resize(less, NOW) is None
    entry.leave(B, NOW)
    assert entry.resize(less, NOW) == []
    with pytest.raises(UserError):
        entry.ask(C, 5 * BLOCK, NOW)


def test_what_waits_starts_once_there_is_more_room() -> None:
    entry = admission(blocks=4)
    entry.ask(A, 3 * BLOCK, NOW)
    assert not entry.ask(B, 3 * BLOCK, NOW)

    assert entry.resize([6 * BLOCK, 6 * BLOCK], NOW) == [B]


def order_of(entry: Admission, first: SessionId) -> list[SessionId]:
    """End one generation after the other, and return the order in which the others started."""
    order, ends = [], first
    while begun := entry.leave(ends, NOW):
        (ends,) = begun
        order.append(ends)
    return order


def test_askers_take_turns_however_many_requests_one_sends() -> None:
    entry = admission(most=1, waiting=9)
    entry.ask(A, 1, NOW, GREEDY)
    many = [SessionId(bytes([number]) * 16) for number in range(4)]
    for session in many:
        entry.ask(session, QUANTUM, NOW, GREEDY)

    entry.ask(B, QUANTUM, NOW, MODEST)
    entry.ask(C, QUANTUM, NOW, MODEST)

    assert order_of(entry, A) == [many[0], B, many[1], C, many[2], many[3]]


def test_turns_are_fair_in_tokens_not_in_requests() -> None:
    entry = admission(most=1, waiting=9)
    entry.ask(A, 1, NOW, GREEDY)
    long = SessionId(b"l" * 16)
    entry.ask(long, 2 * QUANTUM, NOW, GREEDY)

    for session in (B, C, D):
        entry.ask(session, QUANTUM, NOW, MODEST)

    assert order_of(entry, A) == [B, long, C, D]


def test_a_turn_is_found_at_once_however_long_the_generations() -> None:
    entry = Admission(KvBudget([]), most=1)
    entry.ask(A, 1, NOW, GREEDY)
    entry.ask(B, 1 << 60, NOW, GREEDY)
    entry.ask(C, (1 << 60) - QUANTUM, NOW, MODEST)
    entry.ask(D, QUANTUM, NOW, MODEST)

    assert order_of(entry, A) == [C, B, D]


def by_deficit_round_robin(asked: dict[str, list[int]]) -> list[str]:
    """Return the order of those who have a generation, as Shreedhar and Varghese find it."""
    order, queues, credit = (
        list[str](),
        {who: [*each] for who, each in asked.items()},
        Counter[str](),
    )
    while queues:
        who = next(iter(queues))
        while queues[who] and credit[who] >= queues[who][0]:
            credit[who] -= queues[who].pop(0)
            order.append(who)
        credit[who] += QUANTUM
        rest = queues.pop(who)
        if rest:
            queues[who] = rest
    return order


@pytest.mark.parametrize("seed", range(20))
def test_turns_are_those_of_deficit_round_robin(seed: int) -> None:
    random = Random(seed)
    entry, requesters = Admission(KvBudget([]), most=1), dict[SessionId, str]()
    entry.ask(A, 1, NOW)
    asked = {who: random.choices(range(1, 5 * QUANTUM), k=random.randint(1, 4)) for who in "abcd"}
    for who, lengths in asked.items():
        for number, tokens in enumerate(lengths):
            session = SessionId(f"{who}{number}".encode() * 8)
            requesters[session] = who
            entry.ask(session, tokens, NOW, who)

    started = [requesters[session] for session in order_of(entry, A)]

    assert started == by_deficit_round_robin(asked)


def test_an_asker_collects_no_credit_while_it_asks_nothing() -> None:
    entry = admission(most=1, waiting=9)
    entry.ask(A, 1, NOW, GREEDY)
    entry.ask(B, 1, NOW, MODEST)  # uses little of its credit
    entry.leave(A, NOW)
    entry.ask(C, QUANTUM, NOW, GREEDY)
    entry.ask(D, QUANTUM, NOW, MODEST)

    assert entry.leave(B, NOW) == [C]


def test_those_who_ask_at_one_node_take_turns_however_many_requests_one_sends() -> None:
    entry = admission(most=1, waiting=9)
    entry.ask(A, 1, NOW, GREEDY, "key")
    many = [SessionId(bytes([number]) * 16) for number in range(3)]
    for session in many:
        entry.ask(session, QUANTUM, NOW, GREEDY, "key")

    entry.ask(B, QUANTUM, NOW, GREEDY, "other")
    entry.ask(C, QUANTUM, NOW, GREEDY, "other")

    assert order_of(entry, A) == [many[0], B, many[1], C, many[2]]


def test_a_node_gets_no_more_turns_by_more_names() -> None:
    entry = admission(most=1, waiting=9)
    entry.ask(A, 1, NOW, GREEDY)
    many = [SessionId(bytes([number]) * 16) for number in range(4)]
    for number, session in enumerate(many):
        entry.ask(session, QUANTUM, NOW, GREEDY, f"{number}")

    entry.ask(B, QUANTUM, NOW, MODEST)
    entry.ask(C, QUANTUM, NOW, MODEST)

    assert order_of(entry, A) == [many[0], B, many[1], C, *many[2:]]


@pytest.mark.parametrize("seed", range(20))
def test_turns_within_a_node_are_those_of_deficit_round_robin(seed: int) -> None:
    random = Random(seed)
    entry, names = Admission(KvBudget([]), most=1), dict[SessionId, str]()
    entry.ask(A, 1, NOW)
    asked = {who: random.choices(range(1, 5 * QUANTUM), k=random.randint(1, 4)) for who in "abcd"}
    for who, lengths in asked.items():
        for number, tokens in enumerate(lengths):
            session = SessionId(f"{who}{number}".encode() * 8)
            names[session] = who
            entry.ask(session, tokens, NOW, GREEDY, who)

    started = [names[session] for session in order_of(entry, A)]

    assert started == by_deficit_round_robin(asked)


def test_one_that_leaves_the_queue_leaves_the_turns_of_others_as_they_are() -> None:
    entry = admission(most=1, waiting=9)
    entry.ask(A, 1, NOW, GREEDY)
    entry.ask(B, QUANTUM, NOW, GREEDY, "key")
    entry.ask(C, QUANTUM, NOW, GREEDY, "other")
    entry.ask(D, QUANTUM, NOW, MODEST)

    assert entry.leave(B, NOW) == []
    assert order_of(entry, A) == [C, D]


def test_the_owner_is_served_before_all_others() -> None:
    entry = admission(most=1, waiting=9)
    entry.ask(A, 1, NOW, GREEDY)
    entry.ask(B, QUANTUM, NOW, GREEDY)
    entry.ask(C, 2 * QUANTUM, NOW)

    assert order_of(entry, A) == [C, B]


def test_others_cannot_fill_the_queue_of_the_owner() -> None:
    entry = admission(most=1, waiting=1)
    entry.ask(A, 1, NOW, GREEDY)
    entry.ask(B, 1, NOW, GREEDY)
    with pytest.raises(Busy, match="1 are waiting"):
        entry.ask(C, 1, NOW, GREEDY)

    assert not entry.ask(D, 1, NOW)
    assert order_of(entry, A) == [D, B]


def test_an_asker_leaves_places_of_the_queue_to_the_next_one() -> None:
    entry = admission(most=1, waiting=4)
    entry.ask(A, 1, NOW, GREEDY)
    asked: Counter[NodeId | str] = Counter()

    for requester in (GREEDY, MODEST, "a key"):
        with suppress(Busy):
            for number in range(9):
                entry.ask(SessionId(f"{requester!r} {number}".encode()), 1, NOW, requester)
                asked[requester] += 1

    assert asked == {GREEDY: 4, MODEST: 2, "a key": 1}


def test_who_waits_for_nothing_keeps_no_credit() -> None:
    entry = Admission(KvBudget([]), 1)
    entry.ask(A, 1, NOW, GREEDY)
    entry.ask(B, 1, NOW, GREEDY)
    entry.ask(C, 2 * QUANTUM, NOW, MODEST)
    assert entry.leave(A, NOW) == [B]

    entry.ask(D, QUANTUM - 1, NOW, GREEDY)
    assert entry.leave(B, NOW) == [C]


def test_what_the_owner_waits_for_takes_no_places_of_others_in_the_queue() -> None:
    entry = admission(most=1, waiting=2)
    entry.ask(A, 1, NOW, GREEDY)
    entry.ask(B, 1, NOW)
    entry.ask(C, 1, NOW, MODEST)
    entry.ask(D, 1, NOW, MODEST)

    with pytest.raises(Busy, match="3 are waiting"):
        entry.ask(SessionId(bytes(16)), 1, NOW, MODEST)


def test_others_leave_a_place_to_the_owner_who_asks() -> None:
    entry = admission(most=2)
    entry.ask(A, 1, NOW)
    entry.ask(B, 1, NOW, GREEDY)
    assert entry.leave(A, NOW + 9) == []

    assert not entry.ask(C, 1, NOW + 9, MODEST)
    assert entry.ask(D, 1, NOW + 9 + OWNER_S / 2) == [D]


def test_an_owner_who_gave_up_waiting_has_asked() -> None:
    entry = admission(most=2)
    entry.ask(A, 1, NOW, GREEDY)
    entry.ask(B, 1, NOW, GREEDY)
    entry.ask(C, 1, NOW)
    entry.leave(C, NOW)
    entry.ask(D, 1, NOW, MODEST)

    assert entry.leave(B, NOW) == []


def test_others_have_all_places_where_the_owner_does_not_ask() -> None:
    entry = admission(most=2)

    assert entry.ask(A, 1, NOW, GREEDY) == [A]
    assert entry.ask(B, 1, NOW, MODEST) == [B]


@pytest.mark.parametrize("ends", ["answer", "queue"])
def test_the_place_is_left_for_a_while_after_the_owner(ends: str) -> None:
    entry = admission(most=2)
    entry.ask(A, 1, NOW)
    entry.ask(B, 1, NOW, GREEDY)
    entry.leave(A, NOW + OWNER_S)
    until = NOW + 2 * OWNER_S

    assert entry.ask(C, 1, until - 1, MODEST) == []
    if ends == "answer":
        assert entry.leave(B, until) == [C]
        assert entry.ask(D, 1, until, MODEST) == [D]
    else:
        assert entry.ask(D, 1, until, MODEST) == [C]


@pytest.mark.parametrize(("requester", "idle_at"), [(None, NOW + OWNER_S), (GREEDY, NOW)])
def test_it_is_idle_when_none_runs_or_waits_and_no_place_is_left(
    requester: NodeId | None, idle_at: float
) -> None:
    entry = admission(most=1)
    entry.ask(A, 1, NOW, requester)
    entry.ask(B, 1, NOW, requester)
    assert not entry.is_idle(idle_at)

    entry.leave(A, NOW)
    assert not entry.is_idle(idle_at)
    entry.leave(B, NOW)

    assert entry.is_idle(idle_at)
    assert entry.is_idle(idle_at - 1) == (requester is not None)


@pytest.mark.parametrize(
    ("scope", "requester"),
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
    scope: PrefixScope, requester: NodeId | str | None
) -> None:
    assert requester_of(scope) == requester


def test_one_whose_turn_it_is_is_not_overtaken_until_it_fits() -> None:
    entry = admission()
    entry.ask(A, 2 * BLOCK, NOW, GREEDY)
    entry.ask(B, 4 * BLOCK, NOW, GREEDY)

    assert not entry.ask(C, BLOCK, NOW, MODEST)
    assert entry.leave(A, NOW) == [B]
    assert entry.leave(B, NOW) == [C]


THOUGHT = 40 * BLOCK  # 10,240 tokens of an answer with long reasoning
LONG_ROOM = 3 * THOUGHT + SHORT_ROOM  # of three of them, and what they leave


def lengthen(entry: Admission, session: SessionId) -> list[SessionId]:
    """Let an answer become long; return those that may go on, this one included."""
    first = entry.grow(session, SHORT_ANSWER, NOW)
    return entry.grow(session, THOUGHT, NOW) if session in first else first


def thoughts(entry: Admission, count: int, requester: str | None = GREEDY_KEY) -> list[SessionId]:
    """Ask for answers that become long once they have started; return those that go on."""
    started, going = set[SessionId](), list[SessionId]()
    for number in range(count):
        session = SessionId(f"{requester} {number:2}".encode().ljust(16))
        begun = entry.ask(session, THOUGHT, NOW, requester, answer=THOUGHT)
        while begun:
            if (one := begun.pop()) in started:
                going.append(one)
            else:
                started.add(one)
                begun += lengthen(entry, one)
    return going


def of_tokens(tokens: int, most: int = 8) -> Admission:
    return Admission(KvBudget([room(-(-tokens // BLOCK))]), most, waiting=64)


@pytest.mark.parametrize("short", [None, GREEDY_KEY, "another key"])
@pytest.mark.parametrize("thinker", [None, GREEDY_KEY])
def test_long_thoughts_leave_a_place_to_a_short_answer(
    thinker: str | None, short: str | None
) -> None:
    entry = Admission(KvBudget([]), 8)

    started = thoughts(entry, 20, thinker)

    assert len(started) == 7
    assert entry.ask(A, QUANTUM, NOW, short, answer=SHORT_ANSWER) == [A]


def test_long_thoughts_of_others_leave_a_place_besides_that_of_the_owner() -> None:
    entry = Admission(KvBudget([]), 8)
    entry.ask(A, 1, NOW)
    entry.leave(A, NOW)

    assert len(thoughts(entry, 9)) == 6
    assert entry.ask(B, QUANTUM, NOW, MODEST) == [B]
    assert entry.ask(C, THOUGHT, NOW, answer=THOUGHT) == [C]
    assert lengthen(entry, C) == [C]


def test_a_short_answer_waits_for_short_ones_only() -> None:
    entry = Admission(KvBudget([]), 8)
    thoughts(entry, 20)
    entry.ask(A, QUANTUM, NOW, MODEST)

    assert entry.ask(B, QUANTUM, NOW, MODEST) == []
    assert entry.leave(A, NOW) == [B]


def test_long_thoughts_leave_room_to_a_short_answer() -> None:
    entry = of_tokens(LONG_ROOM)

    started = thoughts(entry, 5)

    assert len(started) == 3
    assert entry.ask(A, SHORT_ROOM, NOW, MODEST, answer=SHORT_ANSWER) == [A]
    assert entry.leave(A, NOW) == []
    assert entry.ask(B, SHORT_ROOM, NOW, MODEST, answer=SHORT_ANSWER) == [B]


def test_short_answers_do_not_starve_a_long_thought_that_waits_for_room() -> None:
    entry = of_tokens(LONG_ROOM)
    running = thoughts(entry, 4)  # the fourth waits
    short = [SessionId(f"short {number:2}".encode() * 2) for number in range(20)]
    begun = [each for session in short for each in entry.ask(session, BLOCK, NOW, MODEST)]

    assert begun == short[:1]  # one at a time
    assert entry.leave(short[0], NOW) == [short[1]]
    fourth, *_ = entry.leave(running[0], NOW)
    assert fourth not in short


def test_a_short_answer_with_a_long_prompt_does_not_take_the_room_that_a_thought_waits_for() -> (
    None
):
    entry = of_tokens(LONG_ROOM)
    thoughts(entry, 4)
    entry.ask(A, SHORT_ROOM + 1, NOW, MODEST, answer=1)

    assert entry.ask(B, BLOCK, NOW, MODEST, answer=1) == [B]
    assert entry.leave(B, NOW) == []


def test_a_thought_that_can_leave_no_room_keeps_its_turn() -> None:
    entry = of_tokens(THOUGHT)
    running = thoughts(entry, 2)

    assert len(running) == 1
    assert entry.ask(A, BLOCK, NOW, MODEST) == []
    second, short = entry.leave(running[0], NOW)
    assert short == A
    assert lengthen(entry, second) == []
    assert entry.ask(B, BLOCK, NOW, MODEST) == []
    assert entry.leave(A, NOW) == [second]


def test_who_used_least_overtakes_first() -> None:
    entry = Admission(KvBudget([]), 2)
    thoughts(entry, 2)
    entry.ask(A, QUANTUM, NOW, GREEDY)
    entry.ask(B, QUANTUM, NOW, GREEDY)
    entry.ask(C, QUANTUM, NOW, GREEDY)
    entry.ask(D, QUANTUM, NOW, MODEST)

    assert order_of(entry, A) == [B, D, C]


def test_of_those_who_ask_at_one_node_who_used_least_overtakes_first() -> None:
    entry = Admission(KvBudget([]), 2)
    thoughts(entry, 2, None)  # the second one has the turn
    entry.ask(A, QUANTUM, NOW, MODEST, "z key")
    entry.ask(B, QUANTUM, NOW, MODEST, "z key")
    entry.ask(C, QUANTUM, NOW, MODEST, "z key")
    entry.ask(D, QUANTUM, NOW, MODEST, "a key")

    assert order_of(entry, A) == [B, D, C]


def test_answers_start_with_room_for_their_first_tokens_and_ask_for_more() -> None:
    entry = of_tokens(2 * THOUGHT)
    for session in (A, B, C, D):
        assert entry.ask(session, THOUGHT, NOW, answer=THOUGHT) == [session]

    assert entry.grow(A, 2 * QUANTUM, NOW) == [A]


def with_a_paused_one() -> Admission:
    """Answers A and B, of which B is paused: if it had more room, neither could end."""
    entry = of_tokens(THOUGHT + 2 * QUANTUM)
    for session in (A, B):
        entry.ask(session, THOUGHT, NOW, answer=THOUGHT)
    assert entry.grow(A, 3 * QUANTUM, NOW) == [A]
    assert entry.grow(B, 3 * QUANTUM, NOW) == []
    return entry


def test_an_answer_pauses_where_the_others_could_not_end_and_goes_on_when_one_has() -> None:
    entry = with_a_paused_one()

    assert lengthen(entry, A) == [A]
    assert entry.leave(A, NOW) == [B]
    assert entry.leave(B, NOW) == []


def test_a_paused_answer_that_leaves_needs_nothing() -> None:
    entry = with_a_paused_one()

    assert entry.leave(B, NOW) == []
    assert entry.grow(B, 4 * QUANTUM, NOW) == []
    assert entry.leave(A, NOW) == []
    assert entry.is_idle(NOW + OWNER_S)


def test_those_that_are_paused_go_on_in_order_and_before_others_start() -> None:
    entry = Admission(KvBudget([]), 2)
    for session in (A, B, C, D):
        entry.ask(session, THOUGHT, NOW, answer=THOUGHT)
    assert lengthen(entry, A) == [A]  # the only long one that may run
    assert lengthen(entry, B) == [C]
    assert lengthen(entry, C) == [D]

    assert entry.leave(A, NOW) == [B]
    assert entry.ask(A, QUANTUM, NOW, answer=QUANTUM) == []
    assert entry.leave(B, NOW) == [C]
    assert entry.leave(D, NOW) == [A]


def test_a_paused_answer_of_another_leaves_the_place_of_the_owner() -> None:
    entry = Admission(KvBudget([]), 4)
    entry.ask(A, QUANTUM, NOW)
    entry.leave(A, NOW)
    for session in (B, C, D):
        assert entry.ask(session, THOUGHT, NOW, MODEST, answer=THOUGHT) == [session]

    assert lengthen(entry, B) == [B]
    assert lengthen(entry, C) == [C]
    assert lengthen(entry, D) == []
    assert entry.ask(A, QUANTUM, NOW, MODEST, answer=QUANTUM) == [A]
    assert entry.grow(A, 2 * QUANTUM, NOW) == [A]


def test_a_ring_has_so_many_caches_at_most() -> None:
    entry = Admission(KvBudget([]), 2, waiting=9)
    sessions = [SessionId(number.to_bytes(16, "big")) for number in range(6)]
    begun = list[SessionId]()
    for session in sessions:
        for one in entry.ask(session, THOUGHT, NOW, answer=THOUGHT):
            begun += [one, *lengthen(entry, one)]

    count = OPEN_PER_PLACE * 2 + 1
    assert set(begun) == set(sessions[:count])
    assert entry.leave(sessions[0], NOW) == [sessions[1], sessions[count]]


def test_paused_answers_of_others_leave_caches_to_short_ones_and_to_the_owner() -> None:
    entry = Admission(KvBudget([]), 2, waiting=9)
    thoughts(entry, 9)

    assert entry.ask(A, QUANTUM, NOW, MODEST, answer=QUANTUM) == [A]
    entry.leave(A, NOW)
    assert entry.ask(B, THOUGHT, NOW, answer=THOUGHT) == [B]
    assert lengthen(entry, B) == []
    assert entry.ask(C, QUANTUM, NOW, answer=QUANTUM) == [C]


def test_paused_answers_of_the_owner_go_on_first() -> None:
    entry, last = Admission(KvBudget([]), 2, waiting=9), SessionId(b"z" * 16)
    started = thoughts(entry, 2)
    entry.ask(last, THOUGHT, NOW, answer=THOUGHT)
    assert lengthen(entry, last) == []

    assert entry.leave(started[0], NOW) == [last]


def test_an_answer_of_another_that_waits_for_room_does_not_hold_up_the_owner() -> None:
    entry = of_tokens(LONG_ROOM)
    for number in range(4):
        entry.ask(SessionId(bytes([number]) * 16), THOUGHT, NOW, GREEDY, answer=THOUGHT)
    for number in range(3):
        entry.grow(SessionId(bytes([number]) * 16), THOUGHT - 2 * QUANTUM, NOW)
    assert entry.grow(SessionId(bytes([3]) * 16), 7 * QUANTUM, NOW) == []

    assert entry.ask(A, 2 * SHORT_ANSWER, NOW, MODEST, answer=2 * SHORT_ANSWER) == []
    assert entry.ask(B, 2 * SHORT_ANSWER, NOW, answer=2 * SHORT_ANSWER) == [B]


def test_room_without_a_place_lets_no_paused_answer_go_on() -> None:
    entry = of_tokens(THOUGHT + SHORT_ROOM, most=2)
    for session in (A, B):
        entry.ask(session, THOUGHT, NOW, answer=THOUGHT)
    assert entry.grow(A, 5 * QUANTUM, NOW) == [A]
    assert entry.grow(B, 5 * QUANTUM, NOW) == []
    assert entry.ask(C, QUANTUM, NOW, answer=QUANTUM) == [C]

    assert entry.resize([3 * THOUGHT], NOW) == []
    assert entry.leave(C, NOW) == [B]


@pytest.mark.parametrize(
    ("answer", "has_ended", "goes_on"),
    [(QUANTUM, False, True), (SHORT_ROOM, True, True), (SHORT_ROOM, False, False)],
)
def test_a_paused_answer_may_take_all_room_beside_what_is_short_or_has_ended(
    answer: int, has_ended: bool, goes_on: bool
) -> None:
    entry = of_tokens(THOUGHT + SHORT_ROOM)
    for session in (A, B):
        entry.ask(session, THOUGHT, NOW, GREEDY, answer=THOUGHT)
    assert entry.grow(A, THOUGHT - 4 * QUANTUM, NOW) == [A]
    assert entry.ask(C, answer, NOW, answer=answer) == [C]
    if has_ended:
        entry.end(C, NOW)
        assert entry.grow(C, SHORT_ROOM, NOW) == []
    assert entry.grow(B, 3 * QUANTUM, NOW) == [B]
    assert entry.grow(B, 5 * QUANTUM, NOW) == []

    assert entry.grow(A, THOUGHT - 3 * QUANTUM, NOW) == [A] * goes_on


def test_a_paused_answer_that_has_ended_needs_no_room() -> None:
    entry = with_a_paused_one()

    assert entry.end(B, NOW) == []
    assert entry.leave(A, NOW) == []
    assert entry.end(A, NOW) == []


def test_who_has_written_more_waits_longer() -> None:
    entry = Admission(KvBudget([]), 1)
    entry.ask(A, THOUGHT, NOW, GREEDY, answer=THOUGHT)
    for session, requester in ((B, GREEDY), (C, MODEST)):
        entry.ask(session, 1, NOW, requester)
    entry.grow(A, 2 * QUANTUM, NOW)
    entry.grow(A, 3 * QUANTUM, NOW)

    assert order_of(entry, A) == [C, B]


class Answers:
    """Answers that start, grow and end as an admission lets them."""

    def __init__(self, entry: Admission, budget: KvBudget) -> None:
        self.entry, self.budget = entry, budget
        self.asked: dict[SessionId, tuple[int, int]] = {}
        """The length that each gets, and the one that it may get, with its prompt."""
        self.going: set[SessionId] = set()
        self.ended: set[SessionId] = set()

    def ask(self, prompt: int, length: int, most: int, requester: str | None, now: float) -> None:
        session = SessionId(len(self.asked).to_bytes(16, "big"))
        self.asked[session] = prompt + length, prompt + most
        self.going.update(self.entry.ask(session, prompt + most, now, requester, answer=most))

    def step(self, session: SessionId, now: float) -> None:
        """Write all that there is room for; then end, or ask for more room."""
        (length, most), room = self.asked[session], self.budget.reserved(session)
        self.going.remove(session)
        if room >= length:
            self.ended.add(session)
            self.going.update(self.entry.leave(session, now))
        else:
            self.going.update(self.entry.grow(session, min(most, room + QUANTUM), now))


@pytest.mark.parametrize("seed", range(60))
def test_every_answer_ends_however_long_it_gets(seed: int) -> None:
    random = Random(seed)
    blocks = random.choice((THOUGHT, THOUGHT + 2 * QUANTUM, LONG_ROOM)) // BLOCK
    budget = KvBudget([room(blocks), room(2 * blocks, growth=random.choice((0, 1)))])
    entry = Admission(budget, random.randint(1, 8), waiting=99)
    answers, now = Answers(entry, budget), NOW
    for _ in range(40):
        prompt = random.choice((1, 8 * BLOCK))
        most = min(random.choice((1, SHORT_ANSWER, THOUGHT)), budget.tokens - prompt)
        requester = random.choice((None, "a", "b", "c"))
        answers.ask(prompt, random.choice((1, most // 2 + 1, most)), most, requester, now)
        while random.random() < 0.7:
            now += 1
            answers.step(random.choice(sorted(answers.going)), now)
            if not answers.going:
                break
    while answers.going:
        answers.step(random.choice(sorted(answers.going)), now)

    assert answers.ended == set(answers.asked)


def test_who_asks_at_another_node_takes_its_turns_by_name() -> None:
    node = NodeId(b"n" * 32)

    assert queue_key_of((node, "key")) == (node, "key")
    assert queue_key_of((None, "key")) == ("key", "")
    assert queue_key_of((None, "")) == (None, "")
