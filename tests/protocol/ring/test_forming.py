"""Taking one's place in a ring: loaded, linked both ways, at work, and again when it breaks."""

import pytest

from meshllm.errors import ModelError
from meshllm.names import NodeId, Span
from meshllm.protocol.planning.plan import Ends, Plan, Stage
from meshllm.protocol.ring.forming import (
    ARRIVE_S,
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    Begin,
    Close,
    Dial,
    Failed,
    Forming,
    Load,
    Release,
    Report,
    State,
    Stop,
)
from meshllm.protocol.session.link import SILENCE
from meshllm.protocol.session.messages import Hello
from tests.builders.offers import A, B, C


def plan_of(*places: tuple[NodeId, str], epoch: int = 1) -> Plan:
    stages = tuple(Stage(node, Span.parse(span)) for node, span in places)
    return Plan(epoch, "tiny", Ends.ENTRY, stages)


ALONE = plan_of((A, "0:6"))
RING = plan_of((A, "0:2"), (B, "2:4"), (C, "4:6"))
LATER = plan_of((A, "0:2"), (B, "2:4"), (C, "4:6"), epoch=2)
LOADED, UNLOADED = Report(is_loaded=True), Report(is_loaded=False)


def hello(node: NodeId = C, plan: Plan = RING) -> Hello:
    return Hello(node, plan.epoch, plan.digest)


def dialing(now: float = 0.0) -> Forming:
    """Return node A, which dials B; C is the rank before it."""
    machine = Forming(A)
    machine.follow(RING, now)
    machine.loaded(now)
    machine.formed(now, is_formed=True)
    return machine


def half(now: float = 0.0) -> Forming:
    machine = dialing(now)
    machine.dialled(7, now)
    return machine


def test_a_ring_of_one_opens_when_it_has_loaded() -> None:
    machine = Forming(A)

    assert machine.follow(ALONE, 0.0) == [Stop(), UNLOADED, Load(ALONE)]
    assert machine.loaded(1.0) == [LOADED, Begin(ALONE, None, None)]
    assert (machine.state, machine.deadline) == (State.OPEN, None)


def test_the_same_plan_again_changes_nothing() -> None:
    machine = half()

    assert machine.follow(RING, 1.0) == []
    assert machine.state is State.HALF


def test_a_node_dials_once_all_have_loaded() -> None:
    machine = Forming(A)
    machine.follow(RING, 0.0)

    assert machine.formed(0.0, is_formed=True) == []  # it has not loaded itself
    assert machine.loaded(1.0) == [LOADED, Dial(B)]

    machine = Forming(A)
    machine.follow(RING, 0.0)
    assert machine.loaded(1.0) == [LOADED]
    assert machine.formed(2.0, is_formed=False) == []
    assert machine.formed(3.0, is_formed=True) == [Dial(B)]
    assert machine.formed(4.0, is_formed=True) == []


def test_a_node_is_at_work_when_both_links_are_here() -> None:
    machine = half()

    assert machine.arrived(C, hello(), 8, 1.0) == [Begin(RING, 8, 7)]
    assert machine.state is State.OPEN


def test_the_rank_before_may_link_first() -> None:
    machine = Forming(A)

    assert machine.arrived(C, hello(), 8, 0.0) == []
    machine.follow(RING, 1.0)
    machine.loaded(1.0)
    machine.formed(1.0, is_formed=True)

    assert machine.dialled(7, 2.0) == [Begin(RING, 8, 7)]


def test_another_node_does_not_open_the_ring() -> None:
    machine = half()

    assert machine.arrived(B, hello(B), 8, 1.0) == []
    assert machine.state is State.HALF


def test_a_link_that_greets_for_another_node_or_an_older_plan_is_closed() -> None:
    machine = Forming(A)
    machine.follow(LATER, 0.0)

    assert machine.arrived(C, hello(B, LATER), 1, 0.0) == [Close(1)]
    assert machine.arrived(C, hello(C, RING), 2, 0.0) == [Close(2)]


def test_the_later_of_two_links_stays() -> None:
    machine = Forming(A)
    machine.arrived(C, hello(), 1, 0.0)

    assert machine.arrived(C, hello(), 2, 1.0) == [Close(1)]
    assert machine.close() == [Stop(), Close(2)]


def test_a_rank_before_with_a_later_plan_ends_the_attempt_and_waits_for_that_plan() -> None:
    machine = half()

    assert machine.arrived(C, hello(C, LATER), 8, 1.0) == [
        Failed("The rank before follows a later plan"), Close(7),
    ]  # fmt: skip
    assert machine.follow(LATER, 2.0) == [Stop(), UNLOADED, Load(LATER)]
    machine.loaded(3.0)
    machine.formed(3.0, is_formed=True)
    assert machine.dialled(9, 3.0) == [Begin(LATER, 8, 9)]


def test_links_for_older_plans_are_closed() -> None:
    machine = Forming(A)
    machine.arrived(C, hello(C, RING), 1, 0.0)
    machine.arrived(B, hello(B, LATER), 2, 0.0)

    assert machine.follow(LATER, 1.0) == [Stop(), Close(1), UNLOADED, Load(LATER)]
    assert machine.follow(None, 2.0) == [Stop(), Close(2), UNLOADED, Release()]
    assert (machine.state, machine.plan) == (State.IDLE, None)


def test_a_node_without_a_span_holds_nothing() -> None:
    machine = Forming(A)

    assert machine.follow(plan_of((B, "0:6")), 0.0) == [Stop(), UNLOADED, Release()]
    assert machine.state is State.IDLE


def test_what_was_dialled_is_closed_with_the_plan() -> None:
    assert half().follow(None, 1.0) == [Stop(), Close(7), UNLOADED, Release()]


def test_links_whose_job_may_not_have_begun_are_closed_with_the_plan() -> None:
    machine = half()
    machine.arrived(C, hello(), 8, 1.0)

    assert machine.follow(None, 1.0) == [Stop(), Close(8), Close(7), UNLOADED, Release()]


def test_links_of_a_ring_that_broke_are_those_of_its_job() -> None:
    machine = half()
    machine.arrived(C, hello(), 8, 1.0)

    assert machine.broke("gone", 2.0) == [Failed("gone")]
    assert machine.follow(None, 3.0) == [Stop(), UNLOADED, Release()]


def test_a_span_that_cannot_be_loaded_waits_for_another_plan() -> None:
    machine, trouble = Forming(A), ModelError("damaged")
    machine.follow(RING, 0.0)

    assert machine.unloadable(trouble, 1.0) == [Report(is_loaded=False, trouble=trouble)]
    assert machine.formed(2.0, is_formed=True) == []
    assert machine.deadline is None
    assert machine.follow(ALONE, 3.0)[-1] == Load(ALONE)


def test_what_could_not_be_loaded_is_tried_again_on_request() -> None:
    machine = Forming(A)
    machine.follow(RING, 0.0)
    assert machine.reload(0.5) == []
    machine.unloadable(ModelError("damaged"), 1.0)

    assert machine.reload(2.0) == [Load(RING)]
    assert machine.loaded(3.0) == [LOADED]


def test_an_end_of_the_rank_after_ends_the_attempt() -> None:
    machine = half(now=10.0)

    assert machine.gone(7, 11.0) == [Failed("The rank after gave up"), Close(7)]
    assert machine.state is State.BACKOFF


def test_a_waiting_link_whose_end_is_gone_is_not_taken() -> None:
    machine = dialing()
    machine.arrived(C, hello(), 8, 0.0)

    assert machine.gone(8, 1.0) == [Close(8)]
    assert machine.dialled(7, 2.0) == []
    assert machine.state is State.HALF


def test_the_rank_before_is_waited_for_only_so_long() -> None:
    machine = half(now=10.0)

    assert machine.deadline == 10.0 + ARRIVE_S
    assert machine.expire(10.0) == []
    assert machine.expire(10.0 + ARRIVE_S) == [
        Failed("The rank before did not link in time"), Close(7),
    ]  # fmt: skip


def test_pauses_grow_until_a_ring_was_open_for_a_while() -> None:
    machine, now, pauses = dialing(), 0.0, []
    for _ in range(7):
        assert machine.failed("No answer", now) == [Failed("No answer")]
        assert machine.deadline is not None
        pauses.append(machine.deadline - now)
        now = machine.deadline
        assert machine.expire(now) == [Dial(B)]

    assert pauses[:2] == pytest.approx([FIRST_PAUSE_S, 2 * FIRST_PAUSE_S])
    assert pauses[-1] == pytest.approx(LAST_PAUSE_S)
    machine.dialled(7, now)
    machine.arrived(C, hello(), 8, now)
    assert machine.broke("gone", now + SILENCE + 1) == [Failed("gone")]
    assert machine.deadline == now + SILENCE + 1 + FIRST_PAUSE_S


def test_a_ring_that_breaks_at_once_backs_off_further() -> None:
    machine = half()
    machine.gone(7, 0.0)
    machine.expire(LAST_PAUSE_S)
    machine.dialled(7, 3.0)
    machine.arrived(C, hello(), 8, 3.0)

    machine.broke("gone", 3.5)

    assert machine.deadline == 3.5 + 2 * FIRST_PAUSE_S


def test_after_a_pause_others_may_have_to_load_again() -> None:
    machine = dialing()
    machine.failed("No answer", 0.0)
    machine.formed(0.0, is_formed=False)

    assert machine.expire(LAST_PAUSE_S) == []
    assert machine.state is State.WAITING
    assert machine.formed(3.0, is_formed=True) == [Dial(B)]


def test_what_comes_of_a_job_that_was_stopped_is_dropped() -> None:
    machine = Forming(A)

    assert machine.loaded(0.0) == []
    assert machine.unloadable(ModelError("late"), 0.0) == []
    assert machine.failed("late", 0.0) == []
    assert machine.broke("late", 0.0) == []
    assert machine.dialled(5, 0.0) == [Close(5)]
    assert machine.expire(100.0) == []
