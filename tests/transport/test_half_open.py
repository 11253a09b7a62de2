"""A full table of half-open connections makes room, at the expense of who crowds it."""

import pytest

from meshllm.transport.half_open import MAX_KNOWN, HalfOpen, Limits, groups

LIMITS = Limits(total=8, host=2, network=4)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.1", (True, True)),
        ("192.0.2.1", "192.0.2.9", (False, True)),
        ("192.0.2.1", "192.0.3.1", (False, False)),
        ("::ffff:192.0.2.1", "192.0.2.1", (True, True)),
        ("2001:db8:0:1::1", "2001:db8:0:1::2", (True, True)),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", (False, True)),
        ("2001:db8:0:1::1", "2001:db8:1:1::1", (False, False)),
        ("fe80::1%eth0", "fe80::1", (True, True)),
    ],
)
def test_hosts_are_grouped_by_prefix(one: str, other: str, same: tuple[bool, bool]) -> None:
    assert tuple(a == b for a, b in zip(groups(one), groups(other), strict=True)) == same


def test_a_host_makes_room_for_itself() -> None:
    table = HalfOpen[int](LIMITS)

    dropped = [table.add(number, "192.0.2.1") for number in range(4)]

    assert dropped == [None, None, 0, 1]
    assert list(table) == [2, 3]


def test_a_network_makes_room_for_itself() -> None:
    table = HalfOpen[int](LIMITS)

    dropped = [table.add(number, f"192.0.2.{number}") for number in range(6)]

    assert dropped == [None] * 4 + [0, 1]


def test_a_full_table_drops_the_oldest_of_the_network_that_has_most() -> None:
    table = HalfOpen[str](LIMITS)
    table.add("honest", "198.51.100.1")
    for network in (1, 2):
        for number in range(LIMITS.network - network + 1):
            table.add(f"{network}.{number}", f"10.0.{network}.{number}")

    assert table.add("newcomer", "203.0.113.1") == "1.0"
    assert "honest" in table
    assert len(table) == LIMITS.total


def test_strangers_take_no_place_of_a_known_host() -> None:
    table = HalfOpen[str](LIMITS)
    table.add("member", "10.0.1.1")
    table.authenticated("member")
    table.authenticated("nobody")
    assert len(table) == 0
    for number in range(20):
        table.add(f"10.{number}", f"10.0.1.{2 + number}")

    assert table.add("again", "10.0.1.1") is None
    dropped = [table.add(f"{number}", f"10.{number}.1.1") for number in range(40)]

    assert "again" not in dropped
    assert "again" in table


def test_a_known_host_makes_room_for_itself_and_a_full_table_of_known_ones_for_any() -> None:
    table = HalfOpen[str](LIMITS)
    for number in range(LIMITS.total // LIMITS.host):
        for place in range(LIMITS.host):
            table.add(f"{number}.{place}", f"10.{number}.1.1")
        table.authenticated(f"{number}.0")
        table.add(f"{number}.0", f"10.{number}.1.1")

    assert table.add("own", "10.3.1.1") == "3.1"
    assert table.add("newcomer", "10.9.1.1") == "0.1"


def test_the_known_hosts_are_bounded() -> None:
    table = HalfOpen[str](LIMITS)
    for number in range(MAX_KNOWN + 1):
        table.add("member", f"10.0.{number // 250}.{number % 250}")
        table.authenticated("member")
    table.add("first", "10.0.0.0")
    for number in range(LIMITS.network):
        table.add(f"stranger {number}", f"10.0.1.{200 + number}")

    dropped = [table.add(f"{number}", f"10.{1 + number}.1.1") for number in range(LIMITS.total)]

    assert "first" in dropped


def test_hosts_known_from_earlier_have_places_too() -> None:
    table = HalfOpen[str](LIMITS)
    table.reserve(["2001:db8:0:1::5", "10.0.1.1"])
    table.add("member", "10.0.1.1")
    table.add("other", "2001:db8:0:1::7")

    dropped = [table.add(f"{number}", f"10.{number}.1.1") for number in range(40)]

    assert not {"member", "other"} & {*dropped}


def test_of_too_many_known_hosts_the_first_count_and_those_of_peers_that_come_replace_them() -> (
    None
):
    table = HalfOpen[str](LIMITS)
    table.reserve([f"10.0.{number // 250}.{number % 250}" for number in range(MAX_KNOWN + 9)])
    table.add("member", "10.9.9.9")
    table.authenticated("member")
    places = "10.0.0.0", "10.0.0.126", "10.0.0.127", "10.0.0.128", "10.9.9.9"

    for host in places:
        table.add(host, host)
    dropped = [table.add(f"{number}", f"10.{1 + number}.1.1") for number in range(LIMITS.total)]

    assert {each for each in places if each in dropped} == {"10.0.0.127", "10.0.0.128"}


def test_expected_hosts_share_the_limit_of_their_network() -> None:
    table = HalfOpen[str](LIMITS)
    hosts = [f"2001:db8:0:{number}::1" for number in range(6)]
    table.reserve(hosts)
    for number in range(LIMITS.network):
        table.add(f"stranger {number}", f"2001:db8:0:a{number}::1")

    dropped = [table.add(host, host) for host in hosts]

    assert dropped == [None] * LIMITS.network + hosts[:2]


def test_expected_hosts_keep_half_of_the_places_at_most() -> None:
    table = HalfOpen[str](LIMITS)
    hosts = [f"10.{number}.1.1" for number in range(LIMITS.total)]
    table.reserve(hosts)
    for number, host in enumerate(hosts * LIMITS.host):
        table.add(f"silent {number}", host)
    guests = [f"guest {number}" for number in range(LIMITS.total // 2 - 1)]

    dropped = [table.add(guest, f"192.0.{2 + at}.1") for at, guest in enumerate(guests)]
    dropped += [table.add(f"again {number}", host) for number, host in enumerate(hosts)]

    assert not {*guests} & {*dropped}
    assert len(table) == LIMITS.total


def test_a_host_that_was_expected_is_known_once_a_peer_is_authenticated_there() -> None:
    table = HalfOpen[str](LIMITS)
    hosts = [f"10.0.1.{number}" for number in range(LIMITS.network + 1)]
    table.reserve(hosts)
    table.add("member", hosts[0])
    table.authenticated("member")
    table.reserve(hosts)

    dropped = [table.add(host, host) for host in [*hosts[1:], hosts[0]]]

    assert dropped == [None] * len(hosts)


def test_a_connection_is_counted_once_and_forgotten() -> None:
    table = HalfOpen[int](LIMITS)
    table.add(1, "192.0.2.1")

    assert table.add(1, "192.0.2.1") is None
    table.remove(1)
    table.remove(1)
    assert len(table) == 0


def test_names_without_a_network_are_limited_as_hosts_only() -> None:
    table = HalfOpen[int](LIMITS)

    dropped = [table.add(number, f"tag {number}") for number in range(LIMITS.total)]

    assert dropped == [None] * LIMITS.total
    assert table.add(99, "tag 99") == 0
