"""The choice of a ring for a request."""

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

import pytest

from meshllm.errors import LinkLost
from meshllm.names import FIRST_GROUP, GroupId, NodeId, RingEntry
from meshllm.node.requests.replica_choice import (
    FRESH_S,
    MARGIN,
    MAX_KNOWN,
    MAX_TIMED,
    AttemptHistory,
    ReplicaChoice,
    _beginning,
    step_ms,
)
from meshllm.protocol.kv_cache.admission import MIN_SESSIONS
from meshllm.request import Request, Turn
from tests.builders import offers
from tests.builders.fake_ring import answer_of
from tests.builders.offers import node

A, B, C = (RingEntry(each) for each in (offers.A, offers.B, offers.C))
RINGS = (A, B, C)


def user(text: str) -> Turn:
    return {"role": "user", "content": text}


def test_requests_that_begin_alike_go_to_the_same_ring() -> None:
    choice = ReplicaChoice()
    system: Turn = {"role": "system", "content": "Be brief."}
    answer: Turn = {"role": "assistant", "content": "a"}

    for number in range(20):
        first = Request(turns=(system, user(f"question {number}")))
        second = Request(turns=(*first.turns, answer, user("and then?")))
        long = Request(raw="x" * 300 + str(number))
        ids = Request(ids=(number, 2, 3))
        assert choice.choose(RINGS, first, AttemptHistory()) == choice.choose(
            RINGS[::-1], second, AttemptHistory()
        )
        assert choice.choose(RINGS, long, AttemptHistory()) == choice.choose(
            RINGS, Request(raw="x" * 300), AttemptHistory()
        )
        assert choice.choose(RINGS, ids, AttemptHistory()) == choice.choose(
            RINGS[1:] + RINGS[:1], ids, AttemptHistory()
        )
        assert choice.choose(RINGS, Request(turns=(answer,)), AttemptHistory()) in RINGS


def test_requests_of_one_affinity_go_to_the_same_ring() -> None:
    choice = ReplicaChoice()
    asked = [Request(raw=f"{number}", affinity="manual.pdf") for number in range(20)]
    scoped = [Request(raw="a", affinity=f"{number}", scope="key") for number in range(20)]

    assert len({choice.choose(RINGS, each, AttemptHistory()) for each in asked}) == 1
    assert {choice.choose(RINGS, each, AttemptHistory()) for each in scoped} == {*RINGS}
    assert _beginning(scoped[0]) != _beginning(replace(scoped[0], scope="of another key"))


def test_nodes_choose_alike_while_all_rings_are_idle() -> None:
    for number in range(20):
        request = Request(raw=f"{number}, please")
        chosen = {
            ReplicaChoice().choose(rings, request, AttemptHistory())
            for rings in (RINGS, RINGS[::-1])
        }
        assert len(chosen) == 1


def test_new_chats_go_to_the_least_busy_ring_and_stay_where_they_went() -> None:
    choice = ReplicaChoice()
    requests = [Request(turns=(user(f"question {number}"),)) for number in range(30)]
    chosen = list[RingEntry]()

    with ExitStack() as stack:
        for request in requests:
            chosen.append(choice.choose(RINGS, request, AttemptHistory()))
            stack.enter_context(choice.asking(chosen[-1], AttemptHistory()))

    assert {*Counter(chosen).values()} == {10}
    later = [Request(turns=(*each.turns, *each.turns)) for each in requests]
    assert [choice.choose(RINGS, each, AttemptHistory()) for each in later] == chosen


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def spread(choice: ReplicaChoice, chats: int, model: str = "", begin: str = "") -> list[int]:
    """Begin chats at the same time; return how many went to each ring."""
    counts = Counter[RingEntry]()
    with ExitStack() as stack:
        for number in range(chats):
            request = Request(raw=f"{begin}{number}", model=model)
            entry = choice.choose(RINGS, request, AttemptHistory())
            counts[entry] += 1
            stack.enter_context(choice.asking(entry, AttemptHistory()))
    return [counts[each] for each in RINGS]


def test_a_ring_gets_as_many_new_chats_as_it_is_fast() -> None:
    choice = ReplicaChoice(Clock())
    for entry, step_time in ((A, 10.0), (B, 30.0), (C, 10.0), (C, 999.0)):
        choice.note(entry, "", step_time)

    assert spread(choice, 28) == [12, 4, 12]
    assert spread(choice, 27, model="another") == [9, 9, 9]


def choose_in(
    rings: Mapping[RingEntry, tuple[NodeId, ...]], choice: ReplicaChoice, request: Request
) -> RingEntry:
    return choice.choose(list(rings), request, AttemptHistory(), rings.__getitem__)


def test_the_requests_of_a_node_that_is_in_two_rings_count_for_both() -> None:
    choice, counts = ReplicaChoice(Clock()), Counter[RingEntry]()
    rings = {A: (A.node, node(9)), B: (B.node, node(9)), C: (C.node,)}
    with ExitStack() as stack:
        for number in range(24):
            entry = choose_in(rings, choice, Request(raw=str(number)))
            counts[entry] += 1
            stack.enter_context(choice.asking(entry, AttemptHistory()))

    assert counts == {A: 6, B: 6, C: 12}


def test_a_chat_leaves_a_ring_with_many_more_of_its_own_though_both_have_a_node() -> None:
    choice, request = ReplicaChoice(Clock()), Request(raw="x")
    rings = {A: (A.node, node(9)), B: (B.node, node(9))}
    first = choose_in(rings, choice, request)
    with ExitStack() as stack:
        for _ in range(MARGIN - 1):
            stack.enter_context(choice.asking(first, AttemptHistory()))
        assert choose_in(rings, choice, request) == first

        stack.enter_context(choice.asking(first, AttemptHistory()))

        assert choose_in(rings, choice, request) != first


def test_the_time_of_a_step_does_not_depend_on_accepted_drafts() -> None:
    plain = replace(answer_of("x", 64), ms_per_token=40.0, tokens_per_step=1.0)
    drafted = replace(plain, ms_per_token=10.0, tokens_per_step=4.0)

    assert step_ms(plain) == 40.0
    assert step_ms(replace(drafted, counted=68)) == 40.0
    assert step_ms(drafted) == 0.0  # of 16 steps and no more
    assert step_ms(replace(plain, tokens_per_step=0.0)) == 0.0


def test_rings_that_differ_a_little_are_alike() -> None:
    choice = ReplicaChoice(Clock())
    for entry, step_time in ((A, 10.0), (B, 14.9), (C, 0.0)):
        choice.note(entry, "", step_time)

    assert spread(choice, 27) == [9, 9, 9]


def test_a_ring_without_late_answers_is_tried_again() -> None:
    clock = Clock()
    choice = ReplicaChoice(clock)
    choice.note(B, "", 30.0)
    clock.now = FRESH_S
    for entry in (A, C):
        choice.note(entry, "", 10.0)

    assert spread(choice, 28) == [12, 4, 12]
    clock.now += 1.0
    assert spread(choice, 27, begin="later ") == [9, 9, 9]


@pytest.mark.parametrize("step_time", [1e-300, -1.0, float("inf"), float("nan")])
def test_no_time_that_an_entry_tells_gets_it_all_chats(step_time: float) -> None:
    choice = ReplicaChoice(Clock())
    for entry, told in ((A, 10.0), (B, step_time), (C, 10.0)):
        choice.note(entry, "", told)

    assert spread(choice, 24) in ([4, 16, 4], [8, 8, 8])


def test_a_chat_stays_at_a_slow_ring_that_has_its_beginning() -> None:
    choice, request = ReplicaChoice(Clock()), Request(raw="hello")
    first = choice.choose(RINGS, request, AttemptHistory())
    for entry in RINGS:
        choice.note(entry, "", 40.0 if entry == first else 10.0)

    with ExitStack() as stack:
        for _ in range(MARGIN):
            assert choice.choose(RINGS, request, AttemptHistory()) == first
            stack.enter_context(choice.asking(first, AttemptHistory()))
        assert choice.choose(RINGS, request, AttemptHistory()) != first


@pytest.mark.parametrize("queue", [-MIN_SESSIONS, -1, 0, 1, MARGIN, 3 * MARGIN])
def test_a_chat_stays_longer_where_all_rings_are_busy(queue: int) -> None:
    choice, request = ReplicaChoice(Clock()), Request(raw="hello")
    first = choice.choose(RINGS, request, AttemptHistory())
    others = MIN_SESSIONS + queue
    stays = others + MARGIN + max(0, queue) // 2  # fewer requests than its ring has
    with ExitStack() as stack:
        for entry in RINGS:
            for _ in range(stays - 1 if entry == first else others):
                stack.enter_context(choice.asking(entry, AttemptHistory()))
        assert choice.choose(RINGS, request, AttemptHistory()) == first

        stack.enter_context(choice.asking(first, AttemptHistory()))
        assert choice.choose(RINGS, request, AttemptHistory()) != first


def timed(steps: Mapping[RingEntry, float]) -> ReplicaChoice:
    """Return a choice that knows the time of a step of some rings."""
    choice = ReplicaChoice(Clock())
    for entry, step_time in steps.items():
        choice.note(entry, "", step_time)
    return choice


def due(deadline_ms: int, text: str = "x") -> Request:
    return Request(raw=text, max_tokens=100, deadline_ms=deadline_ms)


@pytest.mark.parametrize(
    ("steps", "deadline_ms", "taken"),
    [
        ({A: 10.0, B: 30.0, C: 20.0}, 1000, {A}),
        ({A: 10.0, B: 14.0, C: 12.0}, 1200, {A, C}),
        ({A: 10.0, B: 14.9, C: 15.1}, 999, {A, B}),
        ({A: 10.0, B: 14.0, C: 12.0}, 0, {A, B, C}),
        ({A: 10.0, B: 30.0}, 1000, {A, C}),
        ({A: 10.0, B: 30.0}, 500, {C}),
        ({}, 1, {A, B, C}),
    ],
    ids=[
        "one is", "two are", "none is", "no deadline", "unknown too", "only unknown", "all unknown",
    ],
)  # fmt: skip
def test_a_request_with_a_deadline_goes_to_rings_that_are_fast_enough(
    steps: dict[RingEntry, float], deadline_ms: int, taken: set[RingEntry]
) -> None:
    choice, asked = timed(steps), [due(deadline_ms, f"{number}") for number in range(40)]

    assert {choice.choose(RINGS, each, AttemptHistory()) for each in asked} == taken


def test_every_ring_is_fast_enough_for_no_tokens() -> None:
    choice = timed({A: 10.0, B: 14.0, C: 12.0})
    asked = [replace(due(1, f"{number}"), max_tokens=0) for number in range(40)]

    assert {choice.choose(RINGS, each, AttemptHistory()) for each in asked} == {A, B, C}


def test_a_chat_with_a_deadline_leaves_only_a_ring_that_is_too_slow() -> None:
    choice, asked = ReplicaChoice(Clock()), due(0)
    first = choice.choose(RINGS, asked, AttemptHistory())
    for entry in RINGS:
        choice.note(entry, "", 14.0 if entry == first else 10.0)

    assert choice.choose(RINGS, due(1400), AttemptHistory()) == first
    moved = choice.choose(RINGS, due(1399), AttemptHistory())
    assert moved != first
    assert choice.choose(RINGS, due(1399), AttemptHistory()) == moved
    # Its cache has the beginning, too.
    assert choice.choose(RINGS, asked, AttemptHistory()) == moved


def test_the_rings_that_are_fast_enough_share_the_requests_with_a_deadline() -> None:
    choice, counts = timed({A: 10.0, B: 14.0, C: 40.0}), Counter[RingEntry]()
    with ExitStack() as stack:
        for number in range(2 * MIN_SESSIONS):
            entry = choice.choose(RINGS, due(1500, f"{number}"), AttemptHistory())
            counts[entry] += 1
            stack.enter_context(choice.asking(entry, AttemptHistory()))

    assert counts == {A: MIN_SESSIONS, B: MIN_SESSIONS}


def test_a_ring_in_which_a_request_would_wait_is_not_as_fast() -> None:
    choice, rings = timed({A: 10.0, B: 19.0}), (A, B)
    with ExitStack() as stack:
        for entry in (*[A] * MIN_SESSIONS, *[B] * (MIN_SESSIONS - 1)):
            stack.enter_context(choice.asking(entry, AttemptHistory()))

        assert choice.choose(rings, due(0, "a"), AttemptHistory()) == A
        assert choice.choose(rings, due(1900, "b"), AttemptHistory()) == B
        assert choice.choose(rings, due(2000, "c"), AttemptHistory()) == A


def test_a_ring_that_is_fast_enough_but_failed_is_avoided() -> None:
    choice, tried = timed({A: 10.0, B: 30.0}), AttemptHistory(failed=[A])

    assert choice.choose((A, B), due(1000), tried) == B


def test_the_times_of_few_rings_are_kept() -> None:
    choice = ReplicaChoice(Clock())
    for number in range(MAX_TIMED + 1):
        choice.note(A, f"{number}", 1.0)
        choice.note(A, f"{number}", 1.0)

    assert len(choice._times) == MAX_TIMED
    assert ("0", A) not in choice._times


def test_a_chat_that_moved_stays_where_it_moved_to() -> None:
    choice, request = ReplicaChoice(), Request(raw="hello")
    first = choice.choose(RINGS, request, AttemptHistory())
    with ExitStack() as stack:
        for _ in range(MARGIN):
            stack.enter_context(choice.asking(first, AttemptHistory()))
        second = choice.choose(RINGS, request, AttemptHistory())

    assert second != first
    assert choice.choose(RINGS, request, AttemptHistory()) == second


def test_the_oldest_beginning_is_forgotten() -> None:
    choice = ReplicaChoice()
    requests = [Request(raw=str(number)) for number in range(MAX_KNOWN + 1)]
    for each in requests:
        choice.choose(RINGS, each, AttemptHistory())

    assert len(choice._known) == MAX_KNOWN
    assert _beginning(requests[0]) not in choice._known
    assert _beginning(requests[-1]) in choice._known


def test_the_same_question_to_two_models_stays_where_each_went() -> None:
    choice, others = ReplicaChoice(), (RingEntry(node(5)), RingEntry(node(6)))
    one, two = (Request(raw="hello", model=name) for name in ("one", "two"))
    first = choice.choose(RINGS, one, AttemptHistory())
    with ExitStack() as stack:
        for _ in range(MARGIN):
            stack.enter_context(choice.asking(first, AttemptHistory()))
        moved = choice.choose(RINGS, one, AttemptHistory())

    choice.choose(others, two, AttemptHistory())

    assert moved != first
    assert choice.choose(RINGS, one, AttemptHistory()) == moved


def test_beginnings_are_spread_and_a_ring_that_goes_moves_only_its_share() -> None:
    choice = ReplicaChoice()
    requests = [Request(raw=f"{number}, please") for number in range(300)]
    rings = [RingEntry(node(number)) for number in range(1, 5)]

    before = [choice.choose(rings, each, AttemptHistory()) for each in requests]
    after = [choice.choose(rings[1:], each, AttemptHistory()) for each in requests]

    assert min(Counter(before).values()) > 40
    moved = [old for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {rings[0]}


def test_a_ring_that_is_busier_by_a_margin_is_passed_over() -> None:
    choice, request = ReplicaChoice(), Request(raw="hello")
    first = choice.choose(RINGS, request, AttemptHistory())

    with ExitStack() as stack:
        for _ in range(MARGIN - 1):
            stack.enter_context(choice.asking(first, AttemptHistory()))
        assert choice.choose(RINGS, request, AttemptHistory()) == first
        stack.enter_context(choice.asking(first, AttemptHistory()))
        second = choice.choose(RINGS, request, AttemptHistory())
        assert second != first
        assert choice.choose((first,), request, AttemptHistory()) == first
        for _ in range(MARGIN):
            stack.enter_context(choice.asking(second, AttemptHistory()))
        (third,) = {*RINGS} - {first, second}
        assert choice.choose(RINGS, request, AttemptHistory()) == third
        stack.enter_context(choice.asking(third, AttemptHistory()))
        # It is busier by less than the margin.
        assert choice.choose(RINGS, request, AttemptHistory()) == third


def test_the_ring_that_failed_last_is_avoided_while_there_is_another() -> None:
    choice, request, tried = ReplicaChoice(), Request(raw="hello"), AttemptHistory()
    first = choice.choose(RINGS, request, tried)

    with pytest.raises(LinkLost), choice.asking(first, tried):
        raise LinkLost("gone")

    assert tried.failed == [first]
    assert choice.choose(RINGS, request, tried) != first
    assert choice.choose((first,), request, tried) == first


def test_each_ring_is_tried_before_one_is_tried_again() -> None:
    choice, request, tried = ReplicaChoice(), Request(raw="hello"), AttemptHistory()

    for _ in RINGS:
        entry = choice.choose(RINGS, request, tried)
        assert tried.has_other
        tried.failed.append(entry)

    assert {*tried.failed} == {*RINGS}
    assert not tried.has_other
    assert choice.choose(RINGS, request, tried) == tried.failed[0]
    choice.choose((*RINGS, RingEntry(node(4))), request, tried)
    assert tried.has_other


def test_rings_of_one_entry_are_chosen_counted_and_tried_each_for_itself() -> None:
    choice, tried = ReplicaChoice(Clock()), AttemptHistory()
    rings = tuple(RingEntry(A.node, group) for group in (FIRST_GROUP, GroupId(b"x" * 9)))
    counts = Counter[RingEntry]()
    with ExitStack() as stack:
        for number in range(24):
            entry = choice.choose(rings, Request(raw=str(number)), AttemptHistory())
            counts[entry] += 1
            stack.enter_context(choice.asking(entry, AttemptHistory()))
    assert counts == dict.fromkeys(rings, 12)

    choice.note(rings[0], "", 10.0)
    choice.note(rings[1], "", 30.0)
    slow = Counter(
        choice.choose(rings, Request(raw=f"x{number}"), AttemptHistory()) for number in range(9)
    )
    assert slow == {rings[0]: 9}

    with pytest.raises(LinkLost), choice.asking(rings[0], tried):
        raise LinkLost("gone")
    assert choice.choose(rings, Request(raw="x"), tried) == rings[1]
    assert tried.has_other


def test_beginnings_are_spread_over_rings_of_one_entry() -> None:
    rings = [RingEntry(A.node, GroupId(bytes([number]) * 9)) for number in range(3)]
    requests = [Request(raw=f"{number}, please") for number in range(300)]

    chosen = Counter(ReplicaChoice().choose(rings, each, AttemptHistory()) for each in requests)

    assert min(chosen[each] for each in rings) > 60
