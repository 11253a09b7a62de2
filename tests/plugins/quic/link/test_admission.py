"""Which datagrams begin a connection, and which half-open connections make room."""

import pytest
from aioquic._buffer import Buffer
from aioquic.buffer import encode_uint_var
from aioquic.quic.packet import pull_quic_header

from meshllm_quic.link.admission import (
    HOST_RATE,
    ID_BYTES,
    LIMITS,
    RETRY_ABOVE,
    Admitted,
    ConnectionAdmission,
)
from meshllm_quic.net.network import Address

HOME: Address = ("192.0.2.1", 4000)
CAFE: Address = ("192.0.2.77", 5000)
ID = b"original"
INITIAL, HANDSHAKE, SHORT = 0xC0, 0xE0, 0x40


def packet(
    kind: int = INITIAL, *, version: int = 1, destination: bytes = ID, token: bytes = b""
) -> bytes:
    head = bytes([kind]) + version.to_bytes(4) + bytes([len(destination)]) + destination
    source = bytes([ID_BYTES]) + bytes(ID_BYTES)
    return (head + source + encode_uint_var(len(token)) + token).ljust(1200, b"\0")


def validated(admission: ConnectionAdmission[str], source: Address) -> bytes:
    """Return the packet that follows a Retry."""
    retry = admission.decide(packet(), source, source[0], 0.0)
    assert isinstance(retry, bytes)
    header = pull_quic_header(Buffer(data=retry), host_cid_length=ID_BYTES)
    return packet(destination=header.source_cid, token=header.token)


@pytest.mark.parametrize(
    "datagram",
    [
        packet()[:-1], packet(HANDSHAKE), packet(SHORT), packet(destination=ID[1:]),
        packet(version=0) + bytes(3), packet(INITIAL & ~SHORT),
    ],
)  # fmt: skip
def test_only_a_whole_initial_packet_begins_a_connection(datagram: bytes) -> None:
    admission = ConnectionAdmission[str]()

    assert admission.decide(datagram, HOME, HOME[0], 0.0) is None
    assert admission.decide(packet(), HOME, HOME[0], 0.0) == Admitted(ID, None)


def test_each_host_has_its_own_rate_of_validated_connections() -> None:
    admission = ConnectionAdmission[str]()
    for _ in range(RETRY_ABOVE):
        admission.decide(packet(), HOME, HOME[0], 0.0)
    home, cafe = validated(admission, HOME), validated(admission, CAFE)

    verdicts = [admission.decide(home, HOME, HOME[0], 0.0) for _ in range(int(2 * HOST_RATE) + 1)]

    assert {type(each) for each in verdicts[:-1]} == {Admitted}
    assert verdicts[-1] is None
    assert admission.decide(home, CAFE, CAFE[0], 0.0) is None
    assert isinstance(admission.decide(cafe, CAFE, CAFE[0], 0.0), Admitted)


def test_an_authenticated_connection_is_no_longer_half_open() -> None:
    admission = ConnectionAdmission[str]()
    admission.count("direct", HOME[0])
    admission.count("relayed", "tag", relay="relay")

    for each in ("direct", "relayed"):
        admission.authenticated(each)

    assert len(admission) == 0


@pytest.mark.parametrize("relay", ["", "relay"])
def test_strangers_take_no_place_of_a_host_that_was_authenticated_directly(relay: str) -> None:
    admission = ConnectionAdmission[str]()
    admission.count("first", HOME[0], relay=relay)
    admission.authenticated("first")
    admission.count("second", HOME[0])

    hosts = [f"10.{number // 256}.{number % 256}.1" for number in range(LIMITS.total)]
    dropped = [each for host in hosts for each in admission.count(host, host)]

    assert dropped == (["second"] if relay else hosts[:1])
