from asyncio import Task, Transport, gather
from http import HTTPStatus

import pytest
from websockets.datastructures import Headers
from websockets.http11 import Request
from websockets.server import ServerProtocol

from meshllm_quic.path.rate_limit import host_of
from meshllm_quic.relay.relay_limiter import ConnectionLimiter, CountedConnection, stream_source


class LimitedRelay:
    """Connections to a limiter, by number."""

    def __init__(self, limiter: ConnectionLimiter) -> None:
        self.limiter = limiter
        self.made: list[Visitor] = []
        self.dropped: list[int] = []

    def enter(self, host: str) -> bool:
        visitor = Visitor(self, len(self.made))
        self.made.append(visitor)
        return self.limiter.enter(visitor, host)

    def leave(self, number: int) -> None:
        self.limiter.leave(self.made[number])


class Visitor:
    """One of them."""

    def __init__(self, relay: LimitedRelay, number: int) -> None:
        self.relay, self.number = relay, number

    def drop(self) -> None:
        self.relay.dropped.append(self.number)


def test_connections_per_host_are_limited() -> None:
    limiter = LimitedRelay(ConnectionLimiter(most=10, most_of_host=2))

    assert [limiter.enter("192.0.2.1") for _ in range(3)] == [True, True, False]
    assert limiter.enter("192.0.2.2")
    limiter.leave(0)
    assert [limiter.enter("192.0.2.1") for _ in range(2)] == [True, False]


def test_all_addresses_of_one_network_of_ipv6_are_one_host() -> None:
    limiter = LimitedRelay(ConnectionLimiter(most=10, most_of_host=2))

    entered = [limiter.enter(f"2001:db8::{number}") for number in range(1, 4)]

    assert entered == [True, True, False]
    limiter.leave(0)
    assert limiter.enter("2001:db8::9")
    assert limiter.enter("2001:db8:0:1::1")


def test_connections_per_network_are_limited() -> None:
    limiter = LimitedRelay(ConnectionLimiter(most_of_network=2))

    assert [limiter.enter(f"192.0.2.{number}") for number in range(3)] == [True, True, False]
    assert limiter.enter("192.0.3.1")


def test_connections_in_total_are_limited() -> None:
    limiter = LimitedRelay(ConnectionLimiter(most=2, most_of_host=2))

    assert [limiter.enter(host) for host in ("192.0.2.1", "192.0.2.2", "192.0.2.3")] == [
        True,
        True,
        False,
    ]
    limiter.leave(1)
    assert limiter.enter("192.0.2.3")


def test_when_all_places_are_taken_the_most_crowded_network_makes_room() -> None:
    relay = LimitedRelay(ConnectionLimiter(most=4))
    for host in ("198.51.100.1", "192.0.2.1", "192.0.2.2", "192.0.2.3"):
        assert relay.enter(host)
    relay.limiter.use(relay.made[1])

    assert relay.enter("203.0.113.1")
    assert relay.dropped == [2]
    assert not relay.enter("198.51.100.2")  # two networks of two would not be fairer
    relay.limiter.use(relay.made[3])
    relay.leave(4)
    assert relay.enter("192.0.2.4")
    relay.limiter.use(relay.made[-1])
    assert relay.enter("203.0.113.2")
    assert relay.dropped == [2, 1]
    assert len(relay.limiter._hosts) == 4


@pytest.mark.parametrize(("networks", "enters"), [(1, True), (3, True), (4, False)])
def test_strangers_of_fewer_networks_than_places_keep_no_other_network_out(
    networks: int, enters: bool
) -> None:
    relay = LimitedRelay(ConnectionLimiter(most=4))
    for number in range(4):
        assert relay.enter(f"192.0.{number % networks}.{number}")

    assert relay.enter("203.0.113.1") is enters


def test_one_that_has_left_is_not_used() -> None:
    relay = LimitedRelay(ConnectionLimiter(most=1))
    assert relay.enter("192.0.2.1")
    relay.leave(0)

    relay.limiter.use(relay.made[0])  # a stream notes it until it is closed

    assert relay.limiter._used == set()


def test_one_that_leaves_is_no_longer_used() -> None:
    relay = LimitedRelay(ConnectionLimiter(most=1))
    assert relay.enter("192.0.2.1")
    relay.limiter.use(relay.made[0])

    relay.leave(0)

    assert relay.limiter._used == set()


class Wire(Transport):
    """A connection from a host, as accepted."""

    def __init__(self, host: str) -> None:
        super().__init__({"peername": (host, 40000)})
        self.is_aborted = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def abort(self) -> None:
        self.is_aborted = True


class Quiet:
    """A server that does nothing with its connections."""

    def __init__(self) -> None:
        self.handler_tasks: set[Task[None]] = set()

    async def handler(self, _: CountedConnection) -> None:
        pass


async def test_a_connection_counts_from_its_accept_on() -> None:
    limiter, server = ConnectionLimiter(most_of_host=1), Quiet()
    wires = [Wire(host) for host in ("192.0.2.1", "::ffff:192.0.2.1", "192.0.2.2")]
    connections = [CountedConnection(limiter, ServerProtocol(), server) for _ in wires]

    for connection, wire in zip(connections, wires, strict=True):
        connection.connection_made(wire)
    await gather(*server.handler_tasks)

    assert [each.host for each in connections] == ["192.0.2.1", "192.0.2.1", "192.0.2.2"]
    assert [wire.is_aborted for wire in wires] == [False, True, False]


@pytest.mark.parametrize(
    ("peer", "host"), [("192.0.2.1", "192.0.2.1"), ("127.0.0.1", "198.51.100.7")]
)
async def test_forwarded_for_is_trusted_only_from_this_machine(peer: str, host: str) -> None:
    connection = CountedConnection(ConnectionLimiter(), ServerProtocol(), None)
    connection._enter(peer)
    headers = Headers({"X-Forwarded-For": "198.51.100.7"})

    assert connection.apply_forwarded_for(Request("/relay", headers)) is None
    assert connection.host == host


@pytest.mark.parametrize(
    ("said", "host"),
    [
        (["198.51.100.7, 198.51.100.8"], "198.51.100.8"),
        (["198.51.100.7", "198.51.100.9"], "198.51.100.9"),
        (["::ffff:198.51.100.7"], "198.51.100.7"),
    ],
)
async def test_the_last_host_forwarded_for_counts(said: list[str], host: str) -> None:
    limiter = ConnectionLimiter()
    connection = CountedConnection(limiter, ServerProtocol(), None)
    connection._enter("::1")
    headers = Headers([("X-Forwarded-For", each) for each in said])

    assert connection.apply_forwarded_for(Request("/relay", headers)) is None

    assert connection.host == host
    assert list(limiter._hosts.values()) == [host_of((host, 0))]


async def test_a_host_forwarded_for_is_limited_and_must_be_an_address() -> None:
    limiter = ConnectionLimiter(most_of_host=1)
    first, second, third = (CountedConnection(limiter, ServerProtocol(), None) for _ in range(3))
    headers = Headers({"X-Forwarded-For": "198.51.100.7"})

    first._enter("127.0.0.1")
    assert first.apply_forwarded_for(Request("/relay", headers)) is None
    second._enter("127.0.0.1")
    refused = second.apply_forwarded_for(Request("/relay", headers))
    third._enter("127.0.0.1")
    unread = third.apply_forwarded_for(Request("/relay", Headers({"X-Forwarded-For": "nobody"})))

    assert refused is HTTPStatus.TOO_MANY_REQUESTS
    assert unread is HTTPStatus.BAD_REQUEST
    assert second not in limiter._hosts


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
