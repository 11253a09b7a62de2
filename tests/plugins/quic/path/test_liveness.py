"""When a route is checked, and when it is dead."""

import pytest

from meshllm_quic.path.liveness import (
    CALM,
    GRACE,
    HEARTBEAT,
    MAX_CHECK_S,
    MIN_CHECK_S,
    SHORT_CHECK_S,
    Liveness,
    RouteVerdict,
)


def watch(round_trip_s: float = 0.01) -> Liveness:
    watched = Liveness(100.0, is_direct=True)
    watched.answered(100.0, round_trip_s)
    return watched


def fate(watched: Liveness) -> list[tuple[float, RouteVerdict]]:
    """Send no reply until the route is dead."""
    verdicts: list[tuple[float, RouteVerdict]] = []
    while not verdicts or verdicts[-1][1] is not RouteVerdict.DEAD:
        assert watched.deadline is not None
        now = watched.deadline
        verdicts.append((now, watched.expire(now)))
    return verdicts


def test_an_idle_route_is_checked_after_a_heartbeat_and_dead_when_nothing_answers() -> None:
    checked = 100.0 + HEARTBEAT

    assert fate(watch()) == [
        (checked, RouteVerdict.CHECK),
        (checked + MIN_CHECK_S, RouteVerdict.DEAD),
    ]


def test_silence_after_something_was_sent_is_checked_soon() -> None:
    watched = watch()
    watched.sent(101.0)
    watched.sent(101.2)

    checked, dead = fate(watched)

    assert checked == (101.0 + MIN_CHECK_S / 3, RouteVerdict.CHECK)
    assert dead == (101.0 + MIN_CHECK_S, RouteVerdict.DEAD)


def test_received_data_delays_the_check() -> None:
    watched = watch()
    watched.sent(101.0)
    watched.heard()

    assert watched.deadline == 100.0 + HEARTBEAT


def test_only_a_reply_ends_a_check() -> None:
    watched = watch()
    watched.expire(100.0 + HEARTBEAT)

    watched.heard()
    assert watched.since == 100.0 + HEARTBEAT
    watched.answered(105.1, 0.01)

    assert watched.deadline == 105.1 + HEARTBEAT


def test_a_reply_covers_all_data_sent_before_it() -> None:
    watched = watch()
    watched.sent(101.0)

    watched.answered(101.1, 0.01)

    assert watched.deadline == 101.1 + HEARTBEAT


@pytest.mark.parametrize(("round_trip_s", "patience"), [(0.8, 2.4), (60.0, MAX_CHECK_S)])
def test_the_timeout_is_three_round_trips_up_to_a_limit(
    round_trip_s: float, patience: float
) -> None:
    (checked, _), (dead, _) = fate(watch(round_trip_s))

    assert dead - checked == pytest.approx(patience)
    assert dead - 100.0 <= 15.0


def test_a_check_is_shorter_if_another_address_replies() -> None:
    watched = watch()
    watched.shorten()
    watched.expire(105.0)

    watched.shorten()

    assert watched.deadline == 105.0 + SHORT_CHECK_S


@pytest.mark.parametrize(
    ("round_trip_s", "least_s"), [(0.01, SHORT_CHECK_S), (0.2, 0.6), (60.0, MAX_CHECK_S)]
)
def test_a_check_that_begins_late_takes_a_short_while_at_least(
    round_trip_s: float, least_s: float
) -> None:
    watched = watch(round_trip_s)
    watched.sent(101.0)

    assert watched.expire(130.0) is RouteVerdict.CHECK

    assert watched.deadline == pytest.approx(130.0 + least_s)


def test_a_second_check_is_extended_too() -> None:
    watched = watch()
    for begun in (200.0, 300.0):
        watched.expire(begun)
        assert watched.expire(begun + 50.0) is RouteVerdict.CHECK
        watched.answered(begun + 51.0, 0.01)


def test_a_suspicion_starts_a_check_unless_a_reply_is_recent() -> None:
    watched = watch()

    watched.suspect(100.0 + CALM / 2)
    assert watched.deadline == 100.0 + HEARTBEAT
    watched.suspect(100.0 + CALM)

    assert watched.expire(100.0 + CALM) is RouteVerdict.CHECK


def test_a_check_is_extended_once_after_a_suspension() -> None:
    watched = watch()
    watched.expire(105.0)

    assert watched.expire(200.0) is RouteVerdict.CHECK
    assert watched.expire(200.0 + GRACE / 2) is RouteVerdict.FINE
    assert watched.expire(300.0) is RouteVerdict.DEAD


def test_after_death_the_state_is_reset() -> None:
    watched = watch()
    (_, _), (dead, _) = fate(watched)

    assert watched.since is None
    assert watched.deadline == dead + HEARTBEAT


def test_a_relayed_route_is_judged_by_silence_alone() -> None:
    watched = Liveness(100.0, is_direct=False)
    deadlines = [watched.deadline]
    watched.suspect(150.0)
    watched.sent(150.0)
    deadlines.append(watched.deadline)

    assert deadlines == [None, 150.0 + MIN_CHECK_S]
    assert watched.expire(150.9) is RouteVerdict.FINE
    assert watched.expire(152.0) is RouteVerdict.DEAD
    assert watched.expire(999.0) is RouteVerdict.FINE
