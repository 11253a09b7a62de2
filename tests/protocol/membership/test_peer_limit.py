"""A peer with many invalid requests is refused for a while."""

from meshllm.names import NodeId
from meshllm.protocol.membership.peer_limit import (
    FAULTS_S,
    MAX_COUNTED,
    MAX_FAULTS,
    MAX_INVALID,
    WINDOW_S,
    PeerLimit,
)

A, B = NodeId(b"a" * 32), NodeId(b"b" * 32)


def test_a_peer_is_excluded_after_many_faults_in_a_window() -> None:
    peer_limit = PeerLimit()
    for number in range(MAX_INVALID):
        assert not peer_limit.is_excluded(A, now=number)
        peer_limit.record(A, now=number)

    assert peer_limit.is_excluded(A, now=MAX_INVALID)
    assert not peer_limit.is_excluded(B, now=MAX_INVALID)
    assert not peer_limit.is_excluded(A, now=WINDOW_S)


def test_few_faults_are_too_many_if_the_limit_is_low() -> None:
    peer_limit = PeerLimit(MAX_FAULTS, FAULTS_S)
    for number in range(MAX_FAULTS):
        assert peer_limit.excluded(now=number) == ()
        peer_limit.record(B, now=number)
        peer_limit.record(A, now=number + FAULTS_S / 2)

    assert peer_limit.excluded(now=MAX_FAULTS) == (A, B)
    assert peer_limit.excluded(now=FAULTS_S) == (A,)


def test_a_peer_can_be_put_out_at_once() -> None:
    peer_limit = PeerLimit(MAX_FAULTS, FAULTS_S)

    peer_limit.exclude(A, now=1.0)

    assert peer_limit.excluded(now=FAULTS_S) == (A,)
    assert not peer_limit.excluded(now=FAULTS_S + 1)


def test_rare_faults_are_forgiven() -> None:
    peer_limit = PeerLimit()
    for number in range(10 * MAX_INVALID):
        peer_limit.record(A, now=number * WINDOW_S / 8)

        assert not peer_limit.is_excluded(A, now=number * WINDOW_S / 8)


def test_the_list_is_bounded() -> None:
    peer_limit = PeerLimit()
    for _ in range(MAX_INVALID):
        peer_limit.record(A, now=0.0)
    for number in range(MAX_COUNTED):
        peer_limit.record(NodeId(number.to_bytes(32)), now=0.0)

    assert not peer_limit.is_excluded(A, now=0.0)
