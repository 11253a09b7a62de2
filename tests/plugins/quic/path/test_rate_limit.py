import random

import pytest

from meshllm_quic.path.rate_limit import SLOTS, HostBuckets, TokenBucket, host_of, network_of


def test_tokens_can_be_spent_once() -> None:
    budget = TokenBucket(rate=10.0, burst=20.0)

    spent = [budget.take(10, now) for now in (0.0, 0.0, 0.0, 0.9, 1.0, 1.1)]

    assert spent == [True, True, False, False, True, False]


def test_the_capacity_limits_the_tokens() -> None:
    budget = TokenBucket(rate=10.0, burst=20.0, left=0.0, at=0.0)

    assert not budget.take(21, 1000.0)
    assert budget.take(20, 1000.0)


def test_each_host_has_its_own_bucket() -> None:
    shares = HostBuckets(1.0, 1.0, random.Random(1).randbytes)

    assert shares.of(b"one").take(1, 0.0)
    assert not shares.of(b"one").take(1, 0.0)
    assert shares.of(b"two").take(1, 0.0)


def test_memory_is_bounded_for_any_number_of_hosts() -> None:
    shares = HostBuckets(1.0, 1.0, random.Random(1).randbytes)

    budgets = {id(shares.of(number.to_bytes(4))) for number in range(3 * SLOTS)}

    assert SLOTS / 2 < len(budgets) <= SLOTS


def test_collisions_depend_on_a_secret() -> None:
    hosts = [number.to_bytes(4) for number in range(SLOTS)]

    def alike(seed: int) -> set[bytes]:
        shares = HostBuckets(1.0, 1.0, random.Random(seed).randbytes)
        return {host for host in hosts[1:] if shares.of(host) is shares.of(hosts[0])}

    assert len({frozenset(alike(seed)) for seed in range(8)}) > 1


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8::1", "2001:db8::ffff:0:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%3", "fe80::2", True),
    ],
)
def test_a_host_of_ipv6_is_a_network(one: str, other: str, is_same: bool) -> None:
    assert (host_of((one, 1)) == host_of((other, 2))) is is_same


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("192.0.2.1", "192.0.2.9", True),
        ("192.0.2.1", "192.0.3.1", False),
        ("2001:db8:0:100::1", "2001:db8:0:2::1", True),
        ("2001:db8:0:1::1", "2001:db8:1:1::1", False),
        ("2002:c000:201::1", "192.0.2.9", True),
    ],
)
def test_hosts_are_in_networks(one: str, other: str, is_same: bool) -> None:
    assert (network_of(host_of((one, 1))) == network_of(host_of((other, 1)))) is is_same
