"""The dial schedule: order, backoff and jitter."""

import pytest

from meshllm.names import NodeId
from meshllm.protocol.membership.redial import HIGHER, MAX_PAUSE, PATIENCE, PAUSE, Dialling

LOW, ME, HIGH = (NodeId(bytes([number]) * 32) for number in range(3))


def wanted(*peers: NodeId) -> Dialling:
    dialling = Dialling(ME)
    dialling.want(peers, 10.0)
    return dialling


def test_without_peers_to_dial_there_is_no_deadline() -> None:
    assert Dialling(ME).deadline is None


def test_the_lower_id_dials_at_once_and_the_higher_later() -> None:
    dialling = wanted(LOW, HIGH)

    assert dialling.due(10.0) == [HIGH]
    assert dialling.deadline == 10.0 + HIGHER
    assert dialling.due(10.0 + HIGHER) == [LOW]


def test_a_time_of_zero_is_a_time() -> None:
    dialling = Dialling(ME)
    dialling.want([LOW], -HIGHER)
    dialling.want([LOW], 50.0)

    assert dialling.deadline == 0.0


def test_the_backoff_doubles_up_to_a_limit_with_jitter() -> None:
    dialling, now, pauses = wanted(HIGH), 10.0, []
    for _ in range(8):
        assert dialling.due(now) == [HIGH]
        dialling.refused(HIGH, now)
        assert dialling.deadline is not None
        pauses.append(dialling.deadline - now)
        now = dialling.deadline

    longest = [min(PAUSE * 2**tries, MAX_PAUSE) for tries in range(8)]
    for pause, most in zip(pauses, longest, strict=True):
        assert 0.75 * most <= pause <= 1.25 * most
    assert len({pause / most for pause, most in zip(pauses, longest, strict=True)}) == 8


def test_a_dial_without_an_outcome_is_retried() -> None:
    dialling = wanted(HIGH)
    dialling.due(10.0)

    assert dialling.due(10.0 + PATIENCE - 0.1) == []
    assert dialling.due(10.0 + PATIENCE) == [HIGH]


@pytest.mark.parametrize("lasted", [True, False])
def test_a_link_that_did_not_last_is_redialled_after_a_backoff(lasted: bool) -> None:
    dialling = wanted(HIGH)
    dialling.due(10.0)
    dialling.want([], 11.0)
    if lasted:
        dialling.settled(HIGH)
    dialling.want([HIGH], 12.0)

    assert bool(dialling.due(12.0)) is lasted


def test_a_failed_dial_of_an_unwanted_peer_is_ignored() -> None:
    dialling = wanted()

    dialling.refused(HIGH, 10.0)

    assert dialling.deadline is None
