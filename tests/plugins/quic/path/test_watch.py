"""When a route is checked, and when it is given up."""

import pytest

from meshllm_quic.path.watch import (
    CALM,
    GRACE,
    HASTE,
    HEARTBEAT,
    MAX_PATIENCE,
    PATIENCE,
    Verdict,
    Watch,
)


def watch(round_trip_s: float = 0.01) -> Watch:
    watched = Watch(100.0, is_direct=True)
    watched.answered(100.0, round_trip_s)
    return watched


def fate(watched: Watch) -> list[tuple[float, Verdict]]:
    """Let nothing answer until it is dead."""
    verdicts: list[tuple[float, Verdict]] = []
    while not verdicts or verdicts[-1][1] is not Verdict.DEAD:
        assert watched.deadline is not None
        now = watched.deadline
        verdicts.append((now, watched.expire(now)))
    return verdicts


def test_an_idle_route_is_checked_after_a_heartbeat_and_dead_when_nothing_answers() -> None:
    checked = 100.0 + HEARTBEAT

    assert fate(watch()) == [(checked, Verdict.CHECK), (checked + PATIENCE, Verdict.DEAD)]


def test_silence_after_something_was_sent_is_checked_soon() -> None:
    watched = watch()
    watched.sent(101.0)
    watched.sent(101.2)

    checked, dead = fate(watched)

    assert checked == (101.0 + PATIENCE / 3, Verdict.CHECK)
    assert dead == (101.0 + PATIENCE, Verdict.DEAD)


def test_what_is_heard_puts_the_check_off() -> None:
    watched = watch()
    watched.sent(101.0)
    watched.heard()

    assert watched.deadline == 100.0 + HEARTBEAT


def test_only_an_answer_ends_a_check() -> None:
    watched = watch()
    watched.expire(100.0 + HEARTBEAT)

    watched.heard()
    assert watched.since == 100.0 + HEARTBEAT
    watched.answered(105.1, 0.01)

    assert watched.deadline == 105.1 + HEARTBEAT


def test_an_answer_is_news_of_what_was_sent_before_it() -> None:
    watched = watch()
    watched.sent(101.0)

    watched.answered(101.1, 0.01)

    assert watched.deadline == 101.1 + HEARTBEAT


@pytest.mark.parametrize(("round_trip_s", "patience"), [(0.8, 2.4), (60.0, MAX_PATIENCE)])
def test_a_far_route_gets_three_round_trips_but_not_for_ever(
    round_trip_s: float, patience: float
) -> None:
    (checked, _), (dead, _) = fate(watch(round_trip_s))

    assert dead - checked == pytest.approx(patience)
    assert dead - 100.0 <= 15.0


def test_a_check_is_short_where_another_address_answers() -> None:
    watched = watch()
    watched.hurry()
    watched.expire(105.0)

    watched.hurry()

    assert watched.deadline == 105.0 + HASTE


def test_a_suspicion_leads_to_a_check_but_not_right_after_an_answer() -> None:
    watched = watch()

    watched.suspect(100.0 + CALM / 2)
    assert watched.deadline == 100.0 + HEARTBEAT
    watched.suspect(100.0 + CALM)

    assert watched.expire(100.0 + CALM) is Verdict.CHECK


def test_who_slept_through_a_check_waits_a_moment_longer_once() -> None:
    watched = watch()
    watched.expire(105.0)

    assert watched.expire(200.0) is Verdict.CHECK
    assert watched.expire(200.0 + GRACE / 2) is Verdict.FINE
    assert watched.expire(300.0) is Verdict.DEAD


def test_after_death_everything_begins_anew() -> None:
    watched = watch()
    (_, _), (dead, _) = fate(watched)

    assert watched.since is None
    assert watched.deadline == dead + HEARTBEAT


def test_through_a_relay_silence_is_all_there_is() -> None:
    watched = Watch(100.0, is_direct=False)
    deadlines = [watched.deadline]
    watched.suspect(150.0)
    watched.sent(150.0)
    deadlines.append(watched.deadline)

    assert deadlines == [None, 150.0 + PATIENCE]
    assert watched.expire(150.9) is Verdict.FINE
    assert watched.expire(152.0) is Verdict.DEAD
    assert watched.expire(999.0) is Verdict.FINE
