import pytest
from websockets.datastructures import Headers
from websockets.http11 import Request
from websockets.server import ServerProtocol

from meshllm_quic.path.rate_limit import host_of
from meshllm_quic.relay.relay_limiter import ConnectionLimiter, CountedConnection, stream_source


def test_connections_per_host_are_limited() -> None:
    limiter = ConnectionLimiter(most=10, most_of_host=2)

    assert [limiter.enter("192.0.2.1") for _ in range(3)] == [True, True, False]
    assert limiter.enter("192.0.2.2")
    limiter.leave("192.0.2.1")
    assert [limiter.enter("192.0.2.1") for _ in range(2)] == [True, False]


def test_all_addresses_of_one_network_of_ipv6_are_one_host() -> None:
    limiter = ConnectionLimiter(most=10, most_of_host=2)

    entered = [limiter.enter(f"2001:db8::{number}") for number in range(1, 4)]

    assert entered == [True, True, False]
    limiter.leave("2001:db8::1")
    assert limiter.enter("2001:db8::9")
    assert limiter.enter("2001:db8:0:1::1")


def test_connections_per_network_are_limited() -> None:
    limiter = ConnectionLimiter(most_of_network=2)

    assert [limiter.enter(f"192.0.2.{number}") for number in range(3)] == [True, True, False]
    assert limiter.enter("192.0.3.1")


def test_connections_in_total_are_limited() -> None:
    limiter = ConnectionLimiter(most=2, most_of_host=2)

    assert [limiter.enter(host) for host in ("192.0.2.1", "192.0.2.2", "192.0.2.3")] == [
        True,
        True,
        False,
    ]
    limiter.leave("192.0.2.2")
    assert limiter.enter("192.0.2.3")


@pytest.mark.parametrize(
    ("peer", "host"), [("192.0.2.1", "192.0.2.1"), ("127.0.0.1", "198.51.100.7")]
)
async def test_forwarded_for_is_trusted_only_from_this_machine(peer: str, host: str) -> None:
    connection = CountedConnection(ConnectionLimiter(), ServerProtocol(), None)
    connection._enter(peer)
    headers = Headers({"X-Forwarded-For": "198.51.100.7"})

    assert connection.apply_forwarded_for(Request("/relay", headers)) is None
    assert connection.host == host


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1"])
def test_each_stream_has_a_unique_address(host: str) -> None:
    one, other = stream_source(host, 1), stream_source(host, 2)

    assert one != other
    assert one[1] == other[1] == 0
    assert host_of(one) == host_of(other)


def test_streams_of_two_hosts_count_separately() -> None:
    hosts = ["192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8:0:1::1"]

    assert len({host_of(stream_source(host, 1)) for host in hosts}) == 4


def test_an_address_within_a_network_is_of_its_host() -> None:
    assert stream_source("192.0.2.1", 7) == ("2002:c000:201::7", 0)
    assert stream_source("2001:db8:0:1:2:3:4:5", 7) == ("2001:db8:0:1::7", 0)
