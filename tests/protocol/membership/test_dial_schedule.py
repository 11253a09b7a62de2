"""The dial schedule: order, backoff and jitter."""

import pytest

from meshllm.names import NodeId
from meshllm.protocol.membership.dial_schedule import (
    BACKOFF,
    DIAL_TIMEOUT,
    HIGHER_ID_DELAY,
    MAX_BACKOFF,
    MAX_COUNTED,
    DialSchedule,
)

LOW, ME, HIGH = (NodeId(bytes([number]) * 32) for number in range(3))


def wanted(*peers: NodeId) -> DialSchedule:
    schedule = DialSchedule(ME)
    schedule.want(peers, 10.0)
    return schedule


def test_without_peers_to_dial_there_is_no_deadline() -> None:
    assert DialSchedule(ME).deadline is None


def test_the_lower_id_dials_at_once_and_the_higher_later() -> None:
    schedule = wanted(LOW, HIGH)

    assert schedule.due(10.0) == [HIGH]
    assert schedule.deadline == 10.0 + HIGHER_ID_DELAY
    assert schedule.due(10.0 + HIGHER_ID_DELAY) == [LOW]


def test_a_time_of_zero_is_a_time() -> None:
    schedule = DialSchedule(ME)
    schedule.want([LOW], -HIGHER_ID_DELAY)
    schedule.want([LOW], 50.0)

    assert schedule.deadline == 0.0


def test_the_backoff_doubles_up_to_a_limit_with_jitter() -> None:
    schedule, now, backoffs = wanted(HIGH), 10.0, []
    for _ in range(8):
        assert schedule.due(now) == [HIGH]
        schedule.failed(HIGH, now)
        assert schedule.deadline is not None
        backoffs.append(schedule.deadline - now)
        now = schedule.deadline

    longest = [min(BACKOFF * 2**attempts, MAX_BACKOFF) for attempts in range(8)]
    for backoff, most in zip(backoffs, longest, strict=True):
        assert 0.75 * most <= backoff <= 1.25 * most
    assert len({backoff / most for backoff, most in zip(backoffs, longest, strict=True)}) == 8


def test_a_dial_without_an_outcome_is_retried() -> None:
    schedule = wanted(HIGH)
    schedule.due(10.0)

    assert schedule.due(10.0 + DIAL_TIMEOUT - 0.1) == []
    assert schedule.due(10.0 + DIAL_TIMEOUT) == [HIGH]


@pytest.mark.parametrize("lasted", [True, False])
def test_a_link_that_did_not_last_is_redialled_after_a_backoff(lasted: bool) -> None:
    schedule = wanted(HIGH)
    schedule.due(10.0)
    schedule.want([], 11.0)
    if lasted:
        schedule.reset(HIGH)
    schedule.want([HIGH], 12.0)

    assert bool(schedule.due(12.0)) is lasted


def test_a_failed_dial_of_an_unwanted_peer_is_ignored() -> None:
    schedule = wanted()

    schedule.failed(HIGH, 10.0)

    assert schedule.deadline is None


def test_only_the_latest_failed_dials_are_counted() -> None:
    schedule = wanted(HIGH)
    schedule.due(10.0)
    schedule.failed(HIGH, 10.0)
    schedule.due(20.0)  # twice: its backoff is longer than that of a new peer

    for number in range(MAX_COUNTED):
        schedule.want([NodeId(b"i" * 28 + number.to_bytes(4, "big"))], 20.0)
        schedule.due(30.0)
    schedule.want([HIGH], 30.0)

    assert schedule.deadline == 30.0
