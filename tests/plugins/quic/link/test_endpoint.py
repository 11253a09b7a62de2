"""Admission control, and the demultiplexing of datagrams on one socket."""

import asyncio
import errno
from typing import Any, cast

import pytest
from aioquic._buffer import Buffer
from aioquic.quic.packet import QuicPacketType, QuicProtocolVersion, pull_quic_header
from hypothesis import given
from hypothesis import strategies as st

from meshllm.transport.contract import Path, ReservesHandshakeSlots
from meshllm.transport.half_open import groups
from meshllm_quic.base.identity import Identity
from meshllm_quic.link.admission import (
    HOST_RATE,
    LIMITS,
    MAX_HALF_OPEN_PER_RELAY,
    RETRY_ABOVE,
    Admitted,
    ConnectionAdmission,
)
from meshllm_quic.link.endpoint import HOSTS_S, runs
from meshllm_quic.link.link import QuicLink
from meshllm_quic.link.machine import PEER, ConnectionMachine
from meshllm_quic.transport import QuicTransport
from meshllm_quic.wire.packets import AddressReply, AddressRequest, Register, Relayed, decode
from tests.plugins.quic.stranger import Stranger, somebody
from tests.plugins.quic.world import echo, relayed
from tests.simulation.ears import ear, virtual
from tests.simulation.internet import Internet

HERE = ("10.0.0.1", 5000)


def initial(seed: bytes = bytes(32)) -> bytes:
    """Return the first datagram of a client."""
    machine = ConnectionMachine(Identity(seed).configure(is_client=True))
    machine.connect(PEER, now=0.0)
    return machine.datagrams_to_send(now=0.0)[0][0]


def fill(admission: ConnectionAdmission[Any], count: int) -> None:
    for number in range(count):
        admission.count(number, f"host {number}")


def test_a_client_is_admitted() -> None:
    verdict = ConnectionAdmission[int]().decide(initial(), HERE, HERE[0], 0.0)

    assert isinstance(verdict, Admitted)
    assert verdict.retried_id is None


@pytest.mark.parametrize("size", [0, 1, 6, 50, 1199])
def test_a_short_datagram_is_ignored(size: int) -> None:
    assert (
        ConnectionAdmission[int]().decide(initial()[:size] or b"\x40", HERE, HERE[0], 0.0) is None
    )


def test_another_version_gets_a_version_negotiation() -> None:
    datagram = initial()
    other = datagram[:1] + b"\x1a\x2a\x3a\x4a" + datagram[5:]

    answer = ConnectionAdmission[int]().decide(other, HERE, HERE[0], 0.0)

    assert isinstance(answer, bytes)
    header = pull_quic_header(Buffer(data=answer), host_cid_length=8)
    assert header.packet_type is QuicPacketType.VERSION_NEGOTIATION
    assert header.supported_versions == [QuicProtocolVersion.VERSION_1]
    assert len(answer) < len(other)


def test_a_version_negotiation_is_not_answered() -> None:
    datagram = initial()

    assert (
        ConnectionAdmission[int]().decide(
            datagram[:1] + bytes(4) + datagram[5:], HERE, HERE[0], 0.0
        )
        is None
    )


def retried(admission: ConnectionAdmission[int]) -> tuple[ConnectionMachine, bytes]:
    """Send a client through Retry; return its second datagram."""
    fill(admission, RETRY_ABOVE)
    machine = ConnectionMachine(somebody())
    machine.connect(PEER, now=0.0)
    answer = admission.decide(machine.datagrams_to_send(now=0.0)[0][0], HERE, HERE[0], 0.0)
    assert isinstance(answer, bytes)
    machine.receive_datagram(answer, PEER, now=0.1)
    return machine, machine.datagrams_to_send(now=0.1)[0][0]


def test_under_load_a_client_must_validate_its_address() -> None:
    admission = ConnectionAdmission[int]()
    machine, again = retried(admission)

    verdict = admission.decide(again, HERE, HERE[0], 0.2)

    assert isinstance(verdict, Admitted)
    assert verdict.original_id == machine.original_destination_connection_id
    assert admission.decide(again, ("10.0.0.2", 5000), "10.0.0.2", 0.2) is None
    assert admission.decide(again, HERE, HERE[0], 60.0) is None


def test_a_newcomer_takes_the_place_of_the_oldest() -> None:
    admission = ConnectionAdmission[int]()
    dropped = [
        admission.count(number, f"10.{number // 200}.{number % 200}.1")
        for number in range(LIMITS.total + 1)
    ]

    assert dropped == [[]] * LIMITS.total + [[0]]
    assert len(admission) == LIMITS.total


async def test_a_listener_keeps_places_for_the_hosts_of_known_peers() -> None:
    transport = QuicTransport()
    async with transport.listen("127.0.0.1:0") as listener:
        assert isinstance(listener, ReservesHandshakeSlots)
        endpoint = transport._live
        assert endpoint is not None
        listener.reserve(["10.0.0.1"])
        admission = cast("ConnectionAdmission[Any]", endpoint.admission)
        admission.count("known", "10.0.0.1")

        dropped = [
            admission.count(number, f"10.{1 + number // 200}.{number % 200}.1")
            for number in range(LIMITS.total)
        ]

        assert dropped == [[]] * (LIMITS.total - 1) + [[0]]
        for number in ("known", *range(1, LIMITS.total)):
            admission.forget(number)


def test_one_host_cannot_lock_out_others() -> None:
    admission = ConnectionAdmission[int]()
    admission.count(-1, "10.0.0.2")

    dropped = [admission.count(number, HERE[0]) for number in range(LIMITS.host + 2)]

    assert dropped == [[]] * LIMITS.host + [[0], [1]]
    assert admission.decide(initial(), ("10.0.0.2", 1), "10.0.0.2", 0.0) is not None
    admission.forget(3)
    admission.forget(3)
    assert len(admission) == LIMITS.host


def test_one_relay_cannot_lock_out_others() -> None:
    admission = ConnectionAdmission[str]()
    for number in range(2 * MAX_HALF_OPEN_PER_RELAY):
        admission.count(f"{number}", f"tag {number}", relay="relay")

    assert len(admission) == MAX_HALF_OPEN_PER_RELAY
    assert isinstance(admission.decide(initial(), HERE, HERE[0], 0.0), bytes)
    assert admission.count("direct", HERE[0]) == []


def test_one_node_cannot_lock_out_others_behind_its_relay() -> None:
    admission = ConnectionAdmission[str]()
    crowd = LIMITS.host, MAX_HALF_OPEN_PER_RELAY - LIMITS.host - 1
    admission.count("honest", "tag", relay="relay")
    for tag, count in zip("ab", crowd, strict=True):
        for number in range(count):
            assert admission.count(f"{tag}{number}", tag, relay="relay") == []

    verdict = admission.decide(initial(), HERE, "another tag", 0.0)
    dropped = admission.count("newcomer", "another tag", relay="relay")
    again = [admission.count(f"b+{number}", "b", relay="relay") for number in range(3)]

    assert isinstance(verdict, bytes)
    assert dropped == ["a0"]
    assert again == [["b0"], ["b1"], ["b2"]]
    assert admission.count("newcomer", "another tag", relay="relay") == []
    assert admission.count("elsewhere", "another tag", relay="other relay") == []


def test_a_node_behind_two_relays_makes_room_at_both() -> None:
    admission = ConnectionAdmission[str]()
    for number in range(LIMITS.host):
        admission.count(f"a{number}", "a", relay="other relay")
    for number in range(MAX_HALF_OPEN_PER_RELAY):
        admission.count(f"{number}", f"tag {number % 2}", relay="relay")

    assert admission.count("newcomer", "a", relay="relay") == ["0", "a0"]
    admission.forget("newcomer")
    assert admission.count("later", "tag 2", relay="relay") == []


def test_short_connections_are_rate_limited() -> None:
    admission = ConnectionAdmission[int]()

    verdicts = [admission.decide(initial(), HERE, HERE[0], 0.0) for _ in range(10 * RETRY_ABOVE)]

    assert sum(isinstance(each, Admitted) for each in verdicts) == RETRY_ABOVE
    assert sum(isinstance(each, bytes) for each in verdicts) == 9 * RETRY_ABOVE
    assert isinstance(admission.decide(initial(), HERE, HERE[0], 1.0), Admitted)


def test_validated_clients_are_rate_limited_too() -> None:
    admission = ConnectionAdmission[int]()
    _, again = retried(admission)

    verdicts = [admission.decide(again, HERE, HERE[0], 0.2) for _ in range(1000)]

    assert sum(verdict is not None for verdict in verdicts) == 2 * HOST_RATE
    assert admission.decide(again, HERE, HERE[0], 1.2) is not None


@virtual
async def test_all_addresses_of_one_network_of_ipv6_are_one_host() -> None:
    transport = QuicTransport(Internet().host("node"))
    async with transport.listen():
        endpoint = transport._endpoint
        assert endpoint is not None

        endpoint._receive([(initial(), (f"2600:1::{number:x}", 5000)) for number in range(1, 200)])

        assert len(endpoint.table) == len(endpoint.admission) == RETRY_ABOVE
        assert len({groups(f"2600:1::{number:x}")[0] for number in range(1, 200)}) == 1


@given(sizes=st.lists(st.integers(1, 5), max_size=30))
def test_a_run_has_equal_sizes_and_may_end_shorter(sizes: list[int]) -> None:
    datagrams = [bytes([number % 256]) * size for number, size in enumerate(sizes)]

    cut = list(runs(datagrams))

    assert [datagram for run in cut for datagram in run] == datagrams
    for run in cut:
        assert {len(each) for each in run[:-1]} <= {len(run[0])}
        assert len(run[-1]) <= len(run[0])


@virtual
async def test_a_handshake_under_load_takes_one_more_round_trip() -> None:
    internet = Internet()
    near, far = internet.host("near"), internet.host("far")
    transport = QuicTransport(far)
    async with transport.listen() as listener:
        endpoint = transport._endpoint
        assert endpoint is not None
        fill(endpoint.admission, RETRY_ABOVE)

        link = await QuicTransport(near).dial(listener.address)
        other = await anext(aiter(listener.links()))

        assert isinstance(link, QuicLink)
        assert isinstance(other, QuicLink)
        await echo(link, other)
        await asyncio.gather(link.close(), other.close())


@virtual
async def test_without_a_listener_clients_are_ignored() -> None:
    internet = Internet()
    near, far, server = (internet.host(name) for name in ("near", "far", "server"))
    dialling = QuicTransport(far)
    async with QuicTransport(server).listen() as listener:
        link = await dialling.dial(listener.address)
        endpoint = dialling._endpoint
        assert endpoint is not None
        stranger = Stranger((far.hosts()[0], endpoint.port), somebody())
        await stranger.open(near)

        assert stranger.heard == []
        await link.close()


@virtual
async def test_interfaces_that_cannot_be_listed_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    internet = Internet()
    near, far = internet.host("near"), internet.host("far")
    transport = QuicTransport(far)
    async with transport.listen() as listener:
        endpoint = transport._endpoint
        assert endpoint is not None

        def fail() -> list[str]:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(endpoint._socket, "hosts", fail)
        failed = list[object]()
        asyncio.get_running_loop().set_exception_handler(lambda _, what: failed.append(what))
        await asyncio.sleep(3 * HOSTS_S)
        assert failed == []

        link = await QuicTransport(near).dial(listener.address)
        await link.close()


@virtual
async def test_a_node_relays_for_authenticated_peers() -> None:
    internet = Internet()
    hub, one, other = (QuicTransport(internet.host(name)) for name in ("hub", "one", "other"))
    async with hub.listen() as middle, other.listen() as listener:
        to_hub = [await transport.dial(middle.address) for transport in (one, other)]
        met = [await anext(aiter(middle.links())) for _ in to_hub]
        await asyncio.sleep(2.0)
        (address,) = (each for each in listener.addresses if "@" in each)

        link = await one.dial(address)
        across = await anext(aiter(listener.links()))
        began = link.statistics.path
        await asyncio.sleep(1.0)

        assert began is Path.RELAY
        assert link.statistics.path is Path.DIRECT
        await asyncio.gather(*(each.close() for each in (*to_hub, *met, link, across)))


@virtual
async def test_the_address_of_a_nat_is_not_a_relay() -> None:
    async with relayed("full cone", "full cone") as nodes:
        await nodes.until(Path.DIRECT)
        dialling = nodes.transports[0]

        again = await dialling.dial(nodes.address)
        assert again.statistics.path is Path.DIRECT
        await asyncio.sleep(2.0)

        survey = dialling.survey()
        assert survey is not None
        assert [f"quic://{relay}" for relay, _ in survey.relays] == [nodes.relay.address]
        await again.close()


@virtual
async def test_a_node_does_not_relay_for_unauthenticated_peers() -> None:
    internet = Internet()
    async with QuicTransport(internet.host("node")).listen() as listener:
        host, port = listener.address.removeprefix("quic://").split(":")
        near = await ear(internet.host("near"))
        register = Register(bytes(32), bytes(8), bytes(16), bytes(64)).encode()

        near.send((host, int(port)), Relayed(bytes(12), b"s" * 12, b"\x40" * 50).encode())
        near.send((host, int(port)), register)
        await asyncio.sleep(1.0)

        assert all(len(answer) <= len(register) for answer in near.said)
        assert {type(decode(answer)).__name__ for answer in near.said} <= {"Cookie", "UnknownTag"}


@virtual
async def test_a_node_reports_observed_addresses() -> None:
    internet = Internet()
    async with QuicTransport(internet.host("node")).listen() as listener:
        host, port = listener.address.removeprefix("quic://").split(":")
        near = await ear(internet.host("near"))

        near.send((host, int(port)), AddressRequest(b"12345678").encode())
        await asyncio.sleep(1.0)

        assert list(map(decode, near.said)) == [AddressReply(b"12345678", near.address)]


@virtual
async def test_after_a_network_change_a_node_registers_and_observes_again() -> None:
    async with relayed("port-restricted", "port-restricted") as nodes:
        await nodes.until(Path.DIRECT)
        before = nodes.transports[1].survey()

        nodes.hosts[1].move(nodes.internet.behind("full cone"))
        await asyncio.sleep(10.0)
        after = nodes.transports[1].survey()

        assert before is not None
        assert after is not None
        assert set(before.observed).isdisjoint(after.observed)
        assert [state for _, state in after.relays] == ["registered over UDP"]
        await echo(nodes.one, nodes.other)


@virtual
async def test_a_survey_contains_nat_and_relays() -> None:
    async with relayed("symmetric", "port-restricted") as nodes:
        await asyncio.sleep(15.0)

        survey = nodes.transports[0].survey()

        assert survey is not None
        assert survey.nat == "address-dependent"
        assert len(survey.observed) == 2
        assert survey.line.startswith("address-dependent: seen as ")
        assert [state for _, state in survey.relays] == ["registered over UDP"]
        assert nodes.one.statistics.path_reason.startswith("no answer to ")
