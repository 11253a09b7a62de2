"""Which addresses are probed, how often, and when one is validated."""

from itertools import pairwise

import pytest

from meshllm_quic.net.network import Address
from meshllm_quic.path.candidates import (
    ANSWERS,
    FIRST_PAUSE,
    FRESH,
    IPV6_BONUS,
    MAX_OFFERED,
    MAX_PAUSE,
    MAX_PROBES,
    MAX_REFLEXIVE,
    MAX_TRUST,
    SERIES_S,
    Candidate,
    PathCandidates,
    probeable,
)

ADDRESS: Address = ("203.0.113.2", 7000)


def silent_series(candidate: Candidate, now: float) -> list[float]:
    candidate.start(now)
    times = []
    while candidate.due is not None:
        times.append(candidate.due)
        candidate.probe_sent(candidate.due)
    return times


def test_a_silent_address_is_probed_with_backoff_for_ten_seconds() -> None:
    times = silent_series(Candidate(ADDRESS, is_offered=True), 5.0)

    pauses = [later - sooner for sooner, later in pairwise(times)]
    assert times[0] == 5.0
    assert pauses[0] == pytest.approx(FIRST_PAUSE)
    assert pauses == pytest.approx(sorted(pauses))
    assert max(pauses) == pytest.approx(MAX_PAUSE)
    assert 5.0 + SERIES_S - MAX_PAUSE <= times[-1] < 5.0 + SERIES_S
    assert 50 < len(times) <= MAX_PROBES


def test_a_series_ends_with_its_most_probes() -> None:
    candidate = Candidate(ADDRESS, is_offered=True)
    candidate.start(5.0)

    for _ in range(MAX_PROBES - 1):
        candidate.probe_sent(5.0)
    before = candidate.due
    candidate.probe_sent(5.0)

    assert before is not None
    assert candidate.due is None


def test_the_probe_interval_of_a_slow_path_is_limited() -> None:
    candidate = Candidate(ADDRESS, is_offered=True, round_trip_s=3.0)

    candidate.start(5.0)
    candidate.probe_sent(5.0)

    assert candidate.due == 5.0 + MAX_PAUSE


def test_a_series_ends_with_enough_answers() -> None:
    candidate = Candidate(ADDRESS, is_offered=True)
    candidate.start(5.0)

    for _ in range(ANSWERS):
        assert candidate.due is not None
        candidate.probe_sent(5.0)
        candidate.answer(5.1, 0.1)

    assert candidate.due is None


def test_the_probe_interval_is_at_least_the_round_trip() -> None:
    candidate = Candidate(ADDRESS, is_offered=True, round_trip_s=0.1)

    candidate.start(5.0, wanted=1)
    candidate.probe_sent(5.0)

    assert candidate.due == pytest.approx(5.125)


def test_a_probe_outside_of_a_series_begins_none() -> None:
    candidate = Candidate(ADDRESS, is_offered=False)

    candidate.probe_sent(5.0)

    assert (candidate.due, candidate.probes) == (None, 1)


def test_the_round_trip_is_smoothed() -> None:
    candidate = Candidate(ADDRESS, is_offered=True)

    for sample in (0.1, 0.2):
        candidate.answer(5.0, sample)

    assert candidate.round_trip_s == pytest.approx(0.125)
    assert candidate.is_fresh(5.0 + FRESH - 0.1)
    assert not candidate.is_fresh(5.0 + FRESH)


def test_ipv6_is_favoured_and_unmeasured_addresses_are_not() -> None:
    four = Candidate(ADDRESS, is_offered=True, round_trip_s=0.1)
    six = Candidate(("2001:db8::1", 7), is_offered=True, round_trip_s=0.1)

    assert six.cost_s == pytest.approx(four.cost_s - IPV6_BONUS)
    assert Candidate(ADDRESS, is_offered=True).cost_s == float("inf")


def test_each_timeout_doubles_the_required_replies() -> None:
    candidate = Candidate(ADDRESS, is_offered=True)
    candidate.answer(5.0, 0.01)
    trusts = []

    for _ in range(20):
        trusts.append(candidate.trust)
        candidate.timed_out()

    assert trusts[:6] == [1, 2, 4, 8, 16, 16]
    assert (candidate.answers, candidate.answered) == (0, None)
    assert trusts[-1] == MAX_TRUST


@pytest.mark.parametrize(
    "host",
    [
        "0.0.0.0",
        "0.1.2.3",
        "224.0.0.251",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "ff02::fb",
        "fe80::1",  # without a zone
        "::ffff:127.0.0.1",
        "::ffff:192.0.2.1",
    ],
)
def test_addresses_that_are_not_unicast_are_not_probed(host: str) -> None:
    assert probeable([(host, 7000)]) == []
    assert PathCandidates().find_or_add((host, 7000), None, 5.0) is None


@pytest.mark.parametrize("host", ["192.0.2.1", "10.0.0.1", "169.254.7.7", "fd00::1", "fe80::1%2"])
def test_unicast_addresses_are_probed(host: str) -> None:
    assert probeable([(host, 7000)]) == [(host, 7000)]


def test_invalid_ports_are_dropped() -> None:
    addresses = [("192.0.2.1", port) for port in (-1, 0, 1, 65535, 65536)]

    assert probeable(addresses) == [("192.0.2.1", 1), ("192.0.2.1", 65535)]


def test_hosts_that_are_not_allowed_are_dropped() -> None:
    addresses = [("192.0.2.1", 7000), ("192.0.2.2", 7000)]

    assert probeable(addresses, lambda host: host != "192.0.2.1") == addresses[1:]


def test_offers_are_truncated_and_deduplicated() -> None:
    addresses = [("192.0.2.1", 1 + number // 2) for number in range(1000)]

    assert probeable(addresses) == [("192.0.2.1", 1 + number) for number in range(MAX_OFFERED)]


@pytest.mark.parametrize(("useless", "count"), [(4 * MAX_OFFERED - 1, 1), (4 * MAX_OFFERED, 0)])
def test_of_a_long_offer_only_the_first_addresses_are_read(useless: int, count: int) -> None:
    addresses: list[Address] = [("224.0.0.1", 1 + number) for number in range(useless)]

    assert len(probeable([*addresses, ADDRESS])) == count


def test_a_new_offer_replaces_the_old_one_but_not_the_route() -> None:
    candidates = PathCandidates()
    candidates.offer([("192.0.2.1", 1), ("192.0.2.1", 2)], None)
    for port in (8, 9):
        candidates.find_or_add(("192.0.2.9", port), None, 5.0)

    candidates.offer([("192.0.2.1", 3), ("192.0.2.9", 9)], ("192.0.2.1", 2))

    ports = {each.address[1]: each.is_offered for each in candidates}
    assert ports == {2: True, 3: True, 8: False, 9: True}


def test_unverified_addresses_do_not_evict_those_that_replied() -> None:
    candidates = PathCandidates()
    friend = candidates.find_or_add(ADDRESS, None, 5.0)
    assert friend is not None
    friend.answer(5.0, 0.01)

    for port in range(1, 1000):
        candidates.find_or_add(("198.51.100.1", port), None, 6.0)

    assert candidates.get(ADDRESS) is friend
    assert len(list(candidates)) == MAX_REFLEXIVE


def test_of_silent_addresses_the_one_that_never_replied_is_evicted_first() -> None:
    candidates = PathCandidates()
    for port in range(1, 1 + MAX_REFLEXIVE):
        known = candidates.find_or_add(("198.51.100.1", port), None, 5.0)
        assert known is not None
        if port != 3:
            known.answer(5.0 + port, 0.01)

    candidates.find_or_add(ADDRESS, None, 90.0)
    candidates.find_or_add(("192.0.2.9", 1), ADDRESS, 90.0)

    ports = [each.address[1] for each in candidates if each.address[0] == "198.51.100.1"]
    assert ports == [1, 2, 4, 5, 6, 7, 8]
    assert MAX_REFLEXIVE == 8

    candidates.find_or_add(("192.0.2.9", 2), ADDRESS, 90.0)
    assert candidates.get(("192.0.2.9", 1)) is None  # the newest, but it never replied


def test_no_address_is_evicted_while_all_reply() -> None:
    candidates = PathCandidates()
    for port in range(1, 1 + MAX_REFLEXIVE):
        known = candidates.find_or_add(("198.51.100.1", port), None, 5.0)
        assert known is not None
        known.answer(5.0, 0.01)

    assert candidates.find_or_add(ADDRESS, None, 6.0) is None
    assert candidates.find_or_add(ADDRESS, None, 5.0 + FRESH) is not None


def test_the_route_is_not_evicted() -> None:
    candidates = PathCandidates()
    route = candidates.find_or_add(ADDRESS, None, 5.0)

    for port in range(1, 1000):
        candidates.find_or_add(("198.51.100.1", port), ADDRESS, 90.0)

    assert candidates.get(ADDRESS) is route
