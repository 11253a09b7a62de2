"""NAT detection from observed addresses."""

import pytest

from meshllm_quic.net.network import Address
from meshllm_quic.path.observation import (
    AGAIN,
    MAX_OBSERVERS,
    RETRY,
    TRIES,
    NatKind,
    Observations,
)

ONE: Address = ("203.0.113.1", 7700)
OTHER: Address = ("203.0.113.2", 7700)
THIRD: Address = ("2001:db8::3", 7700)
OWN: list[Address] = [("192.168.1.5", 7000), ("2001:db8::5", 7000)]
SEEN: Address = ("198.51.100.7", 40001)
ELSE: Address = ("198.51.100.7", 40002)


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        ([], NatKind.UNKNOWN),
        ([(ONE, OWN[0])], NatKind.NONE),
        ([(ONE, SEEN)], NatKind.UNKNOWN),
        ([(ONE, SEEN), (OTHER, SEEN)], NatKind.EASY),
        ([(ONE, SEEN), (OTHER, ELSE)], NatKind.HARD),
        ([(ONE, SEEN), (("203.0.113.1", 7701), ELSE)], NatKind.HARD),
        ([(ONE, SEEN), (OTHER, SEEN), (THIRD, OWN[1])], NatKind.EASY),  # IPv6 has no NAT
        ([(ONE, SEEN), (OTHER, SEEN), (THIRD, ("2001:db8::99", 1))], NatKind.EASY),
        ([(THIRD, OWN[1])], NatKind.NONE),
        ([(ONE, OWN[0]), (OTHER, SEEN)], NatKind.UNKNOWN),  # one of them is in the same house
        ([(ONE, ("10.0.0.9", 1)), (OTHER, ("9.9.9.9", 2))], NatKind.UNKNOWN),  # a NAT in a NAT
    ],
)
def test_the_nat_kind_follows_from_the_reports(
    told: list[tuple[Address, Address]], kind: NatKind
) -> None:
    observations = Observations()

    for now, (observer, seen) in enumerate(told):
        observations.report(observer, seen, now)

    assert observations.kind(OWN) is kind


def test_candidates_are_unique_and_latest_first() -> None:
    observations = Observations()
    observations.report(ONE, SEEN, 1.0)
    observations.report(OTHER, ELSE, 2.0)
    observations.report(THIRD, OWN[1], 3.0)
    observations.report(("203.0.113.3", 1), ELSE, 4.0)

    assert observations.candidates() == [ELSE, OWN[1], SEEN]


def test_an_observer_is_asked_at_once_and_before_nat_mappings_expire() -> None:
    assert Observations().deadline is None
    observations = Observations()
    observations.add(ONE, 10.0)
    observations.add(ONE, 11.0)

    assert observations.deadline == 10.0
    assert observations.expire(10.0) == [ONE]
    observations.report(ONE, SEEN, 10.1)
    assert observations.deadline == 10.1 + AGAIN
    assert observations.expire(10.1 + AGAIN - 1) == []
    assert observations.expire(10.1 + AGAIN) == [ONE]


def test_a_report_is_dropped_after_three_missed_requests() -> None:
    observations = Observations()
    observations.report(ONE, SEEN, 0.0)
    now = AGAIN

    for _ in range(TRIES):
        assert observations.expire(now) == [ONE]
        assert observations.candidates() == [SEEN]
        now += RETRY

    assert observations.expire(now) == [ONE]
    assert observations.candidates() == []
    assert observations.deadline == now + AGAIN


def test_udp_is_blocked_if_no_observer_answers() -> None:
    observations = Observations()
    blocked = [observations.is_blocked]
    observations.add(ONE, 0.0)
    observations.add(OTHER, 0.0)

    for now in (0.0, RETRY):
        observations.expire(now)
        blocked.append(observations.is_blocked)
    assert observations.describe(OWN) == "blocked: none of 2 observers answers over UDP"
    observations.report(OTHER, SEEN, RETRY + 0.1)
    blocked.append(observations.is_blocked)

    assert blocked == [False, False, True, False]


def test_a_network_change_drops_all_reports_and_asks_again() -> None:
    observations = Observations()
    observations.report(ONE, SEEN, 0.0)
    observations.report(OTHER, SEEN, 0.0)

    observations.network_changed(5.0)

    assert observations.kind(OWN) is NatKind.UNKNOWN
    assert observations.candidates() == []
    blocked = [observations.is_blocked]
    for now in (5.0, 5.0 + RETRY):
        assert observations.expire(now) == [ONE, OTHER]
        blocked.append(observations.is_blocked)
    assert blocked == [False, False, True]


def test_a_changed_report_outdates_the_others() -> None:
    observations = Observations()
    observations.report(ONE, SEEN, 0.0)
    observations.report(OTHER, SEEN, 0.0)
    observations.report(THIRD, OWN[1], 0.0)

    observations.report(ONE, ELSE, 20.0)

    assert observations.candidates() == [ELSE, OWN[1]]
    assert observations.expire(20.0) == [OTHER]
    observations.report(OTHER, ELSE, 20.1)
    assert observations.kind(OWN) is NatKind.EASY
    observations.report(THIRD, ("2001:db8::99", 1), 21.0)
    assert observations.candidates() == [("2001:db8::99", 1), ELSE]


def test_the_observer_with_the_oldest_report_is_evicted() -> None:
    observations = Observations()

    for number in range(3 * MAX_OBSERVERS):
        observations.report(("203.0.113.1", 1000 - number), ("198.51.100.7", number + 1), number)

    assert len(observations.candidates()) == MAX_OBSERVERS
    assert observations.candidates()[0] == ("198.51.100.7", 3 * MAX_OBSERVERS)


def test_a_report_without_numeric_host_raises() -> None:
    with pytest.raises(ValueError, match="does not appear"):
        Observations().report(ONE, ("nowhere", 1), 0.0)


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ([], "unknown: no observer has reported this node's address yet"),
        (
            [(ONE, SEEN)],
            "unknown: seen as 198.51.100.7:40001; a second observer is needed",
        ),
        (
            [(THIRD, OWN[1])],
            "none: seen as [2001:db8::5]:7000; no address translation",
        ),
        (
            [(ONE, SEEN), (OTHER, SEEN)],
            "endpoint-independent: seen as 198.51.100.7:40001;"
            " peers can connect directly by hole punching",
        ),
        (
            [(ONE, SEEN), (OTHER, ELSE)],
            "address-dependent: seen as 198.51.100.7:40002, 198.51.100.7:40001;"
            " direct only to peers that are reachable themselves",
        ),
    ],
)
def test_the_nat_is_described_in_one_line(told: list[tuple[Address, Address]], text: str) -> None:
    observations = Observations()

    for now, (observer, seen) in enumerate(told):
        observations.report(observer, seen, now)

    assert observations.describe(OWN) == text
