"""A peer with many invalid requests is refused for a while."""

from meshllm.names import NodeId
from meshllm.protocol.membership.strikes import (
    FAULTS_S,
    MAX_FAULTS,
    MAX_STRIKES,
    MAX_STRUCK,
    WINDOW_S,
    FaultCounter,
)

A, B = NodeId(b"a" * 32), NodeId(b"b" * 32)


def test_a_peer_is_out_after_many_strikes_in_a_window() -> None:
    strikes = FaultCounter()
    for number in range(MAX_STRIKES):
        assert not strikes.is_out(A, now=number)
        strikes.strike(A, now=number)

    assert strikes.is_out(A, now=MAX_STRIKES)
    assert not strikes.is_out(B, now=MAX_STRIKES)
    assert not strikes.is_out(A, now=WINDOW_S)


def test_few_faults_are_too_many_if_the_limit_is_low() -> None:
    strikes = FaultCounter(MAX_FAULTS, FAULTS_S)
    for number in range(MAX_FAULTS):
        assert strikes.out(now=number) == ()
        strikes.strike(B, now=number)
        strikes.strike(A, now=number + FAULTS_S / 2)

    assert strikes.out(now=MAX_FAULTS) == (A, B)
    assert strikes.out(now=FAULTS_S) == (A,)


def test_a_peer_can_be_put_out_at_once() -> None:
    strikes = FaultCounter(MAX_FAULTS, FAULTS_S)

    strikes.put_out(A, now=1.0)

    assert strikes.out(now=FAULTS_S) == (A,)
    assert not strikes.out(now=FAULTS_S + 1)


def test_rare_strikes_are_forgiven() -> None:
    strikes = FaultCounter()
    for number in range(10 * MAX_STRIKES):
        strikes.strike(A, now=number * WINDOW_S / 8)

        assert not strikes.is_out(A, now=number * WINDOW_S / 8)


def test_the_list_is_bounded() -> None:
    strikes = FaultCounter()
    for _ in range(MAX_STRIKES):
        strikes.strike(A, now=0.0)
    for number in range(MAX_STRUCK):
        strikes.strike(NodeId(number.to_bytes(32)), now=0.0)

    assert not strikes.is_out(A, now=0.0)
