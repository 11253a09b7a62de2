"""The link table: timeouts, round trips, and which of two links is kept."""

from itertools import pairwise
from math import inf

import pytest

from meshllm.names import NodeId
from meshllm.protocol.membership.codec import (
    MAX_HELD_US,
    MAX_SLOTS,
    MAX_WALL_MS,
    CloseReason,
    MeshHeartbeat,
)
from meshllm.protocol.membership.link_table import (
    BEAT,
    FRESH,
    ITEMS_PER_S,
    LINKS_INTERVAL,
    MAX_CLIENTS,
    MAX_SUMMARY_PAUSE,
    MIN_CHANGE_US,
    ROUND_TRIPS_INTERVAL,
    SILENCE,
    LinkTable,
    PeerLink,
    republish_delay,
)
from meshllm.protocol.membership.records import MAX_MEMBERS
from meshllm.protocol.trust.credential import Role
from tests.builders.identities import FOUNDED

A, B, C = (NodeId(bytes([number]) * 32) for number in range(3))


def contact(
    now: float = 0.0, *, instance: int = 1, role: Role = Role.NODE, is_favoured: bool = True
) -> PeerLink:
    return PeerLink(instance, role, FOUNDED, is_favoured, now, now)


def links(**contacts: PeerLink) -> LinkTable:
    made = LinkTable(A)
    for name, at in contacts.items():
        made.add({"b": B, "c": C}[name], at)
    return made


def test_a_round_trip_is_without_the_time_that_the_peer_held_the_stamp() -> None:
    here, there = contact(), contact()

    there.receive_beat(here.beat(1.0, 0.0, b""), 1.010, 0.0)
    here.receive_beat(there.beat(1.5, 0.0, b""), 1.512, 0.0)

    assert here.round_trip_us == 22_000
    assert there.round_trip_us == 0


def test_round_trips_are_smoothed() -> None:
    at = contact()
    at.receive_beat(MeshHeartbeat(5, 1_000_000, 0, 0, b""), 1.008, 0.0)
    at.receive_beat(MeshHeartbeat(6, 2_000_000, 0, 0, b""), 2.016, 0.0)

    assert at.round_trip_us == 9_000


def test_a_round_trip_that_was_measured_is_not_zero() -> None:
    at = contact()

    at.receive_beat(MeshHeartbeat(5, 1_000_000, 0, 0, b""), 1.0, 0.0)

    assert at.round_trip_us == 1


@pytest.mark.parametrize(("echo", "held"), [(0, 0), (9, 0), (1, 10**7)])
def test_an_implausible_stamp_is_ignored(echo: int, held: int) -> None:
    at = contact()

    at.receive_beat(MeshHeartbeat(5, echo, held, 0, b""), 9.0, 0.0)

    assert at.round_trip_us == 0


def test_the_clock_of_a_peer_is_compared_over_half_a_round_trip() -> None:
    here, there = contact(), contact()
    there.receive_beat(here.beat(1.0, 5_000.0, b""), 1.010, 4_970.0)

    here.receive_beat(there.beat(1.5, 4_970.5, b""), 1.510, 5_000.51)

    assert here.round_trip_us == 20_000
    assert here.ahead_s == pytest.approx(-30.0)
    assert there.ahead_s == pytest.approx(30.0)  # before a round trip is measured


def test_before_the_first_beat_no_clock_is_known() -> None:
    assert contact().ahead_s is None


@pytest.mark.parametrize(("wall_s", "published"), [(-1.0, 0), (1e15, MAX_WALL_MS)])
def test_an_extreme_time_of_day_is_clamped(wall_s: float, published: int) -> None:
    assert contact().beat(1.0, wall_s, b"").wall_ms == published


def test_the_time_that_a_stamp_was_held_is_clamped() -> None:
    at = contact()
    at.receive_beat(MeshHeartbeat(5, 0, 0, 0, b""), 1.0, 0.0)

    assert at.beat(1e6, 0.0, b"").held == MAX_HELD_US


def test_summaries_wait_for_two_beats_and_back_off() -> None:
    at = contact()
    beats = (tick * BEAT for tick in range(100))

    sent = [now for now in beats if at.wants_summary(differs=True, now=now)]

    assert sent[0] == BEAT
    pauses = [later - earlier for earlier, later in pairwise(sent)]
    assert pauses[:5] == [1.0, 2.0, 4.0, MAX_SUMMARY_PAUSE, MAX_SUMMARY_PAUSE]
    assert not at.wants_summary(differs=False, now=100.0)
    assert not at.wants_summary(differs=True, now=100.0)
    assert at.wants_summary(differs=True, now=100.5)


def test_the_item_allowance_refills_with_time() -> None:
    at = contact()

    burst = sum(at.spend() for _ in range(2 * MAX_SLOTS))
    at.refill(0.5)
    more = sum(at.spend() for _ in range(MAX_SLOTS))
    at.refill(1e9)

    assert (burst, more, at.allowance) == (MAX_SLOTS, ITEMS_PER_S / 2, MAX_SLOTS)


def test_without_links_there_is_no_deadline() -> None:
    assert links().deadline == inf
    assert links().timed_out(9.0) == []


def test_only_the_silent_link_times_out() -> None:
    both = links(b=contact(1.0), c=contact(2.0))

    assert both.deadline == 1.0 + SILENCE
    assert both.timed_out(1.0 + SILENCE - 0.01) == []
    assert both.timed_out(1.0 + SILENCE) == [B]


def test_after_a_suspension_peers_get_one_more_beat() -> None:
    both = links(b=contact(), c=contact(59.9))

    for each in both.values():
        each.wake(60.0)

    assert both.timed_out(60.0) == []
    assert both.timed_out(60.0 + BEAT / 2) == []
    assert both.timed_out(60.0 + BEAT) == [B]
    assert both.deadline == 60.0 + BEAT
    assert both[C].heard == 59.9


def test_beats_that_may_have_waited_for_this_process_say_nothing_of_the_link() -> None:
    at = contact()
    at.receive_beat(MeshHeartbeat(5, 1_000_000, 0, 1_000, b""), 1.01, 1.0)

    at.wake(5.0)
    at.receive_beat(MeshHeartbeat(6, 1_500_000, 0, 1_500, b""), 5.01, 5.0)

    assert (at.round_trip_us, at.echo) == (10_000, (5, 1.01))
    assert at.ahead_s == pytest.approx(0.005)

    at.receive_beat(MeshHeartbeat(7, 5_500_000, 0, 5_500, b""), 5.0 + BEAT + 0.01, 5.5)

    assert (at.round_trip_us, at.echo) == (10_000, (7, 5.51))


def test_a_link_to_itself_is_refused() -> None:
    assert links().refusal(A, contact(), 0.0) is CloseReason.DUPLICATE


def test_the_first_link_to_a_peer_is_accepted() -> None:
    assert links(c=contact()).refusal(B, contact(), 0.0) is None


def test_another_process_with_the_same_key_is_refused_while_the_first_is_active() -> None:
    one = links(b=contact(0.0, instance=1, is_favoured=False))
    other = contact(1.0, instance=2)

    assert one.refusal(B, other, FRESH - 0.01) is CloseReason.DUPLICATE
    assert one.refusal(B, other, FRESH) is None


@pytest.mark.parametrize(
    ("standing", "newcomer", "why"),
    [
        (False, True, None),
        (True, False, CloseReason.CROSSED),
        (True, True, CloseReason.CROSSED),
        (False, False, CloseReason.CROSSED),
    ],
)
def test_of_two_crossing_links_the_favoured_one_is_kept(
    standing: bool, newcomer: bool, why: CloseReason | None
) -> None:
    one = links(b=contact(is_favoured=standing))

    assert one.refusal(B, contact(1.0, is_favoured=newcomer), 1.0) is why
    assert one.refusal(B, contact(1.0, is_favoured=newcomer), FRESH) is None


@pytest.mark.parametrize(
    ("role", "most"), [(Role.NODE, MAX_MEMBERS - 1), (Role.CLIENT, MAX_CLIENTS)]
)
def test_links_to_nodes_and_clients_have_separate_limits(role: Role, most: int) -> None:
    many, other = LinkTable(A), Role.CLIENT if role is Role.NODE else Role.NODE
    for number in range(most):
        many.add(NodeId(bytes([9, number]) * 16), contact(role=role))

    assert many.refusal(B, contact(role=role), 0.0) is CloseReason.FULL
    assert many.refusal(B, contact(role=other), 0.0) is None


def test_links_of_clients_are_not_published() -> None:
    both = links(c=contact(), b=contact(role=Role.CLIENT))
    both[C].round_trip_us = 7

    assert both.round_trips() == ((C, 7),)
    assert both.remove(C) is not None
    assert both.remove(C) is None
    assert both.round_trips() == ()
    assert len(both) == 1


def test_links_are_published_again_when_they_change() -> None:
    assert republish_delay((), ()) == inf
    assert republish_delay((), ((B, 0),)) == republish_delay(((B, 0),), ()) == LINKS_INTERVAL
    assert republish_delay(((B, 0),), ((B, 5),)) == LINKS_INTERVAL
    assert republish_delay(((B, 0),), ((B, 0),)) == inf
    assert republish_delay(((B, 10_000),), ((B, 12_000),)) == inf
    assert republish_delay(((B, 10_000),), ((B, 13_000),)) == ROUND_TRIPS_INTERVAL
    assert republish_delay(((B, 10),), ((B, 10 + MIN_CHANGE_US),)) == inf
