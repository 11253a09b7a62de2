"""Forming a ring: loading, linking to both neighbours, serving, and backoff after a loss."""

from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest

from meshllm.errors import ModelError
from meshllm.names import NodeId, Span
from meshllm.protocol.planning.plan import Ends, Plan, PlanStage
from meshllm.protocol.ring.forming import (
    ARRIVE_S,
    FIRST_BACKOFF_S,
    LAST_BACKOFF_S,
    LINK_S,
    MAX_ARRIVALS,
    MAX_HISTORY,
    NEXT,
    AttemptEnded,
    Begin,
    CloseLink,
    Forming,
    FormingEvent,
    FormingState,
    Load,
    OpenLink,
    Release,
    ReportLoad,
    Stop,
)
from meshllm.protocol.session.link import SILENCE
from meshllm.protocol.session.messages import Hello
from tests.builders.offers import A, B, C


def plan_of(*places: tuple[NodeId, str], epoch: int = 1) -> Plan:
    stages = tuple(PlanStage(node, Span.parse(span)) for node, span in places)
    return Plan(epoch, "tiny", Ends.ENTRY, stages)


ALONE = plan_of((A, "0:6"))
RING = plan_of((A, "0:2"), (B, "2:4"), (C, "4:6"))
OTHERS = plan_of((B, "0:3"), (C, "3:6"))
LATER = plan_of((A, "0:2"), (B, "2:4"), (C, "4:6"), epoch=2)
LOADED, UNLOADED = ReportLoad(is_loaded=True), ReportLoad(is_loaded=False)


def hello(node: NodeId = C, plan: Plan = RING) -> Hello:
    return Hello(node, plan.epoch, plan.digest)


def dialing(now: float = 0.0) -> Forming:
    """Return node A, which dials B; C is the previous rank."""
    machine = Forming(A)
    machine.follow(RING, now)
    machine.loaded(now)
    machine.formed(now, is_formed=True)
    return machine


def half(now: float = 0.0) -> Forming:
    machine = dialing(now)
    machine.dialled(7, now)
    return machine


class Recorded(Forming):
    """Records the changes of its state during a call."""

    def __init__(self) -> None:
        super().__init__(A)
        self.changes: list[tuple[FormingState, FormingEvent, FormingState]] = []

    @property
    def key(self) -> tuple[object, ...]:
        """Everything that decides what it does next, but for the time."""
        return self.state, self.plan, self._is_formed, tuple(self._arrivals.values())

    def after(self, call: Callable[[Forming, float], object], now: float) -> "Recorded":
        after = deepcopy(self)
        after.changes = []
        call(after, now)
        return after

    def _enter(self, event: FormingEvent, state: FormingState, now: float) -> None:
        self.changes.append((self.state, event, state))
        super()._enter(event, state, now)


CALLS: list[tuple[FormingEvent, Callable[[Forming, float], object]]] = [
    (FormingEvent.FOLLOW, lambda each, now: each.follow(RING, now)),
    (FormingEvent.FOLLOW, lambda each, now: each.follow(ALONE, now)),
    (FormingEvent.FOLLOW, lambda each, now: each.follow(OTHERS, now)),
    (FormingEvent.FOLLOW, lambda each, now: each.follow(None, now)),
    (FormingEvent.LOADED, lambda each, now: each.loaded(now)),
    (FormingEvent.UNLOADABLE, lambda each, now: each.unloadable(ModelError("no memory"), now)),
    (FormingEvent.RELOAD, lambda each, now: each.reload(now)),
    (FormingEvent.FORMED, lambda each, now: each.formed(now, is_formed=True)),
    (FormingEvent.FORMED, lambda each, now: each.formed(now, is_formed=False)),
    (FormingEvent.DIALLED, lambda each, now: each.dialled(7, now)),
    (FormingEvent.FAILED, lambda each, now: each.failed("no answer", now)),
    (FormingEvent.ARRIVED, lambda each, now: each.arrived(C, hello(), 8, now)),
    (FormingEvent.ARRIVED, lambda each, now: each.arrived(C, hello(C, LATER), 8, now)),
    (FormingEvent.GONE, lambda each, now: each.gone(7, now)),
    (FormingEvent.GONE, lambda each, now: each.gone(8, now)),
    (FormingEvent.BROKE, lambda each, now: each.broke("lost", now)),
    (FormingEvent.EXPIRE, lambda each, now: each.expire(now)),
]


def reachable() -> list[Recorded]:
    """Make any sequence of calls, soon or late; return the machine after each, by what differs."""
    start = Recorded()
    seen, open_, after = {start.key}, [start], list[Recorded]()
    while open_:
        machine = open_.pop()
        for event, call in CALLS:
            for seconds in (0.0, SILENCE + ARRIVE_S + LAST_BACKOFF_S):
                now = machine.history[-1][1] + seconds if machine.history else seconds
                made = machine.after(call, now)
                assert all(each[1] is event for each in made.changes[:1])
                after.append(made)
                if made.key not in seen:
                    seen.add(made.key)
                    open_.append(made)
    return after


def test_the_table_has_every_change_of_state_and_no_other() -> None:
    found: dict[FormingState, dict[FormingEvent, set[FormingState]]] = defaultdict(dict)
    for machine in reachable():
        for before, event, after in machine.changes:
            found[before].setdefault(event, set()).add(after)

    assert found == {
        state: {event: set(states) for event, states in row.items()} for state, row in NEXT.items()
    }


def test_states_with_a_deadline_are_those_that_expire() -> None:
    machines = reachable()

    assert {each.state for each in machines} == set(FormingState)
    for each in machines:
        assert (each.deadline is not None) == (FormingEvent.EXPIRE in NEXT[each.state])


def test_a_change_that_is_not_in_the_table_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        half()._enter(FormingEvent.ARRIVED, FormingState.WAITING, 1.0)


def test_a_ring_of_one_opens_when_it_has_loaded() -> None:
    machine = Forming(A)

    assert machine.follow(ALONE, 0.0) == [Stop(), UNLOADED, Load(ALONE)]
    assert machine.loaded(1.0) == [LOADED, Begin(ALONE, None, None)]
    assert (machine.state, machine.deadline) == (FormingState.OPEN, None)


def test_a_ring_of_one_that_ended_opens_again_without_a_link() -> None:
    machine = Forming(A)
    machine.follow(ALONE, 0.0)
    machine.loaded(0.0)
    machine.formed(0.0, is_formed=True)

    assert machine.broke("there is less memory", 1.0) == [AttemptEnded("there is less memory")]
    assert machine.expire(1.0 + FIRST_BACKOFF_S) == [Begin(ALONE, None, None)]
    assert machine.state is FormingState.OPEN


def test_the_same_plan_again_changes_nothing() -> None:
    machine = half()

    assert machine.follow(RING, 1.0) == []
    assert machine.state is FormingState.HALF


def test_a_node_dials_once_all_have_loaded() -> None:
    machine = Forming(A)
    machine.follow(RING, 0.0)

    assert machine.formed(0.0, is_formed=True) == []  # not loaded itself
    assert machine.loaded(1.0) == [LOADED, OpenLink(B)]

    machine = Forming(A)
    machine.follow(RING, 0.0)
    assert machine.loaded(1.0) == [LOADED]
    assert machine.formed(2.0, is_formed=False) == []
    assert machine.formed(3.0, is_formed=True) == [OpenLink(B)]
    assert machine.formed(4.0, is_formed=True) == []


def test_a_span_is_loaded_once() -> None:
    machine = dialing()

    assert machine.loaded(1.0) == []
    assert machine.state is FormingState.DIALING


@pytest.mark.parametrize(("me", "before", "after"), [(B, A, C), (C, B, A)])
def test_each_rank_dials_the_next_and_waits_for_the_previous(
    me: NodeId, before: NodeId, after: NodeId
) -> None:
    machine = Forming(me)
    machine.follow(RING, 0.0)
    machine.loaded(0.0)

    assert machine.formed(0.0, is_formed=True) == [OpenLink(after)]
    assert machine.dialled(7, 1.0) == []
    assert machine.arrived(before, hello(before), 8, 1.0) == [Begin(RING, 8, 7)]


def test_the_ring_opens_when_both_links_exist() -> None:
    machine = half()

    assert machine.arrived(C, hello(), 8, 1.0) == [Begin(RING, 8, 7)]
    assert machine.state is FormingState.OPEN


def test_the_previous_rank_may_connect_first() -> None:
    machine = Forming(A)

    assert machine.arrived(C, hello(), 8, 0.0) == []
    machine.follow(RING, 1.0)
    machine.loaded(1.0)
    machine.formed(1.0, is_formed=True)

    assert machine.dialled(7, 2.0) == [Begin(RING, 8, 7)]


def test_another_node_does_not_open_the_ring() -> None:
    machine = half()

    assert machine.arrived(B, hello(B), 8, 1.0) == []
    assert machine.state is FormingState.HALF


def test_a_hello_of_another_node_or_an_older_plan_closes_the_link() -> None:
    machine = Forming(A)
    machine.follow(LATER, 0.0)

    assert machine.arrived(C, hello(B, LATER), 1, 0.0) == [CloseLink(1)]
    assert machine.arrived(C, hello(C, RING), 2, 0.0) == [CloseLink(2)]


def test_the_later_of_two_links_is_kept() -> None:
    machine = Forming(A)
    machine.arrived(C, hello(), 1, 0.0)

    assert machine.arrived(C, hello(), 2, 1.0) == [CloseLink(1)]
    assert machine.close() == [Stop(), CloseLink(2)]


def test_a_previous_rank_with_a_later_plan_ends_the_attempt_and_its_link_is_kept() -> None:
    machine = half()

    assert machine.arrived(C, hello(C, LATER), 8, 1.0) == [
        AttemptEnded("The previous rank follows another plan"), CloseLink(7),
    ]  # fmt: skip
    assert machine.follow(LATER, 2.0) == [Stop(), UNLOADED, Load(LATER)]
    machine.loaded(3.0)
    machine.formed(3.0, is_formed=True)
    assert machine.dialled(9, 3.0) == [Begin(LATER, 8, 9)]


def test_links_for_older_plans_are_closed() -> None:
    machine = Forming(A)
    machine.arrived(C, hello(C, RING), 1, 0.0)
    machine.arrived(B, hello(B, LATER), 2, 0.0)

    assert machine.follow(LATER, 1.0) == [Stop(), CloseLink(1), UNLOADED, Load(LATER)]
    assert machine.follow(None, 2.0) == [Stop(), CloseLink(2), UNLOADED, Release()]
    assert (machine.state, machine.plan) == (FormingState.IDLE, None)


def test_a_link_for_a_later_plan_is_kept_while_there_is_none() -> None:
    machine = dialing()
    machine.arrived(C, hello(C, LATER), 1, 0.0)

    assert machine.follow(None, 1.0) == [Stop(), UNLOADED, Release()]
    assert machine.close() == [Stop(), CloseLink(1)]


def test_a_node_without_a_stage_unloads() -> None:
    machine = Forming(A)

    assert machine.follow(plan_of((B, "0:6")), 0.0) == [Stop(), UNLOADED, Release()]
    assert machine.state is FormingState.IDLE


def test_a_dialled_link_is_closed_with_the_plan() -> None:
    assert half().follow(None, 1.0) == [Stop(), CloseLink(7), UNLOADED, Release()]


def test_links_of_a_job_that_may_not_have_started_are_closed_with_the_plan() -> None:
    machine = half()
    machine.arrived(C, hello(), 8, 1.0)

    assert machine.follow(None, 1.0) == [Stop(), CloseLink(8), CloseLink(7), UNLOADED, Release()]


def test_links_of_a_broken_ring_are_left_to_its_job() -> None:
    machine = half()
    machine.arrived(C, hello(), 8, 1.0)

    assert machine.broke("gone", 2.0) == [AttemptEnded("gone")]
    assert machine.follow(None, 3.0) == [Stop(), UNLOADED, Release()]


def test_a_span_that_cannot_be_loaded_waits_for_another_plan() -> None:
    machine, trouble = Forming(A), ModelError("damaged")
    machine.follow(RING, 0.0)

    assert machine.unloadable(trouble, 1.0) == [ReportLoad(is_loaded=False, trouble=trouble)]
    assert machine.formed(2.0, is_formed=True) == []
    assert machine.deadline is None
    assert machine.follow(ALONE, 3.0)[-1] == Load(ALONE)


def test_loading_is_retried_on_request() -> None:
    machine = Forming(A)
    machine.follow(RING, 0.0)
    assert machine.reload(0.5) == []
    machine.unloadable(ModelError("damaged"), 1.0)

    assert machine.reload(2.0) == [Load(RING)]
    assert machine.loaded(3.0) == [LOADED]


def test_a_close_by_the_next_rank_ends_the_attempt() -> None:
    machine = half(now=10.0)

    assert machine.gone(7, 11.0) == [AttemptEnded("The next rank closed the link"), CloseLink(7)]
    assert machine.state is FormingState.BACKOFF


def test_a_waiting_link_that_was_closed_is_not_used() -> None:
    machine = dialing()
    machine.arrived(C, hello(), 8, 0.0)

    assert machine.gone(8, 1.0) == [CloseLink(8)]
    assert machine.dialled(7, 2.0) == []
    assert machine.state is FormingState.HALF


def test_waiting_for_the_previous_rank_times_out() -> None:
    machine = half(now=10.0)

    assert machine.deadline == 10.0 + ARRIVE_S
    assert machine.expire(10.0) == []
    assert machine.expire(10.0 + ARRIVE_S) == [
        AttemptEnded("The previous rank did not connect in time"), CloseLink(7),
    ]  # fmt: skip


def test_after_a_ring_was_open_for_a_while_the_next_is_formed_at_once() -> None:
    machine, now, backoffs = dialing(), 0.0, []
    for _ in range(7):
        assert machine.failed("No answer", now) == [AttemptEnded("No answer")]
        assert machine.deadline is not None
        backoffs.append(machine.deadline - now)
        now = machine.deadline
        assert machine.expire(now) == [OpenLink(B)]

    assert backoffs[:2] == pytest.approx([FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S])
    assert backoffs[-1] == pytest.approx(LAST_BACKOFF_S)
    machine.dialled(7, now)
    machine.arrived(C, hello(), 8, now)
    now += SILENCE + 1
    assert machine.broke("gone", now) == [AttemptEnded("gone"), OpenLink(B)]
    assert machine.failed("No answer", now) == [AttemptEnded("No answer")]
    assert machine.deadline == now + FIRST_BACKOFF_S


def test_a_ring_that_was_open_no_longer_than_a_silent_link_backs_off() -> None:
    machine = half(now=1.0)
    machine.arrived(C, hello(), 8, 1.0)

    assert machine.broke("gone", 1.0 + SILENCE) == [AttemptEnded("gone")]
    assert machine.state is FormingState.BACKOFF


def test_a_ring_that_breaks_while_its_nodes_do_not_all_serve_waits_for_them() -> None:
    machine = half()
    machine.arrived(C, hello(), 8, 0.0)
    machine.formed(1.0, is_formed=False)

    assert machine.broke("gone", SILENCE + 1) == [AttemptEnded("gone")]
    assert machine.state is FormingState.WAITING
    assert machine.formed(SILENCE + 2, is_formed=True) == [OpenLink(B)]


def test_a_ring_that_breaks_at_once_backs_off_further() -> None:
    machine = half()
    machine.gone(7, 0.0)
    machine.expire(LAST_BACKOFF_S)
    machine.dialled(7, 3.0)
    machine.arrived(C, hello(), 8, 3.0)

    machine.broke("gone", 3.5)

    assert machine.deadline == 3.5 + 2 * FIRST_BACKOFF_S


def test_after_a_backoff_the_ring_may_not_be_formed() -> None:
    machine = dialing()
    machine.failed("No answer", 0.0)
    machine.formed(0.0, is_formed=False)

    assert machine.expire(LAST_BACKOFF_S) == []
    assert machine.state is FormingState.WAITING
    assert machine.formed(3.0, is_formed=True) == [OpenLink(B)]


def test_outcomes_of_a_stopped_job_are_ignored() -> None:
    machine = Forming(A)

    assert machine.loaded(0.0) == []
    assert machine.unloadable(ModelError("late"), 0.0) == []
    assert machine.failed("late", 0.0) == []
    assert machine.broke("late", 0.0) == []
    assert machine.dialled(5, 0.0) == [CloseLink(5)]
    assert machine.expire(100.0) == []


def test_a_next_rank_that_cannot_be_dialled_is_missing_after_a_while() -> None:
    machine = dialing(now=1.0)
    machine.failed("no answer", LINK_S)
    assert machine.missing(LINK_S) is None

    assert machine.missing(1.0 + LINK_S) == B


def test_a_next_rank_that_closes_the_link_is_not_missing_for_an_earlier_failure() -> None:
    machine = dialing(now=1.0)
    machine.failed("no answer", 2.0)
    machine.expire(8.0)
    machine.dialled(7, 9.0)
    machine.gone(7, 10.0)

    assert machine.missing(1.0 + LINK_S) is None


def test_a_node_is_missing_since_all_have_loaded_however_often_that_is_said() -> None:
    machine = dialing(now=1.0)
    machine.failed("no answer", 2.0)
    machine.formed(3.0, is_formed=True)

    assert machine.missing(1.0 + LINK_S) == B


def test_a_previous_rank_that_does_not_link_is_missing_after_a_while() -> None:
    machine = half(now=1.0)
    machine.expire(1.0 + ARRIVE_S)

    assert machine.missing(1.0 + LINK_S) == C
    assert machine.formed(1.0 + LINK_S, is_formed=False) == []
    assert machine.missing(1.0 + LINK_S) is None  # it may have restarted


@pytest.mark.parametrize(
    "false",
    [
        Hello(C, 2**32 - 1, RING.digest),
        Hello(C, RING.epoch, LATER.digest),
    ],
)
def test_a_previous_rank_that_links_for_another_plan_is_missing_after_a_while(false: Hello) -> None:
    machine = half(now=1.0)

    assert machine.arrived(C, false, 8, 2.0) == [
        AttemptEnded("The previous rank follows another plan"), CloseLink(7),
    ]  # fmt: skip
    assert machine.missing(LINK_S) is None
    assert machine.missing(1.0 + LINK_S) == C


def test_a_previous_rank_is_not_missing_for_what_it_said_before_this_node_followed() -> None:
    machine = half(now=1.0)
    machine.arrived(C, hello(C, LATER), 8, 2.0)
    machine.follow(LATER, 3.0)
    machine.loaded(3.0)
    machine.formed(LINK_S, is_formed=True)

    assert machine.missing(9 * LINK_S) is None


def test_a_previous_rank_that_says_that_it_left_the_plan_is_not_missing() -> None:
    machine = half(now=1.0)
    machine.arrived(C, hello(C, LATER), 8, 2.0)

    machine.formed(3.0, is_formed=False)
    assert machine.missing(9 * LINK_S) is None

    machine.formed(9 * LINK_S, is_formed=True)
    assert machine.missing(99 * LINK_S) is None


def test_neighbours_of_a_ring_that_opens_are_not_missing() -> None:
    machine = half(now=1.0)
    machine.expire(1.0 + ARRIVE_S)
    machine.expire(2.0 + ARRIVE_S)
    machine.dialled(8, 2.0 + ARRIVE_S)
    machine.arrived(C, hello(), 9, 3.0 + ARRIVE_S)
    assert machine.state is FormingState.OPEN
    assert machine.missing(2 * LINK_S) is None

    machine.broke("gone", 2 * LINK_S)
    machine.expire(2 * LINK_S + 1)
    machine.failed("no answer", 2 * LINK_S + 1)

    assert machine.missing(3 * LINK_S - 1) is None
    assert machine.missing(3 * LINK_S) == B


def test_a_node_whose_link_was_closed_by_the_next_rank_blames_nobody() -> None:
    machine = half(now=1.0)
    machine.gone(7, 2.0)

    assert machine.missing(1.0 + LINK_S) is None


def test_another_plan_blames_nobody() -> None:
    machine = dialing(now=1.0)
    machine.failed("no answer", 2.0)
    machine.follow(LATER, 3.0)
    machine.loaded(4.0)
    machine.formed(5.0, is_formed=True)

    assert machine.missing(9 * LINK_S) is None


def test_the_latest_states_are_kept_with_their_times() -> None:
    machine = half(now=1.0)
    machine.arrived(C, hello(), 8, 2.0)
    machine.broke("lost", 3.0)
    states = FormingState
    assert list(machine.history) == [
        (states.LOADING, 1.0), (states.WAITING, 1.0), (states.DIALING, 1.0), (states.HALF, 1.0),
        (states.OPEN, 2.0), (states.BACKOFF, 3.0),
    ]  # fmt: skip
    for epoch in range(2, 2 + MAX_HISTORY):
        machine.follow(replace(RING, epoch=epoch), 4.0)
    assert [*machine.history] == [(states.LOADING, 4.0)] * MAX_HISTORY


@pytest.mark.parametrize("follows", [True, False])
def test_of_too_many_waiting_links_the_oldest_is_closed_but_not_the_awaited(
    *, follows: bool
) -> None:
    machine = dialing() if follows else Forming(A)
    machine.arrived(C, hello(), 0, 0.0)
    nodes = [NodeId(bytes([number]) * 32) for number in range(MAX_ARRIVALS)]

    actions = [machine.arrived(node, hello(node), 1 + at, 0.0) for at, node in enumerate(nodes)]

    assert actions == [[]] * (MAX_ARRIVALS - 1) + [[CloseLink(1 if follows else 0)]]
