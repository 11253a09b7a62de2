"""Packets survive a round trip, and invalid ones raise `PeerFault`."""

import random
from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshllm.errors import PeerFault
from meshllm_quic.wire.packets import (
    ASK_BYTES,
    MAX_INNER_BYTES,
    AddressReply,
    AddressRequest,
    Cookie,
    Packet,
    Probe,
    ProbeReply,
    Register,
    Registered,
    Relayed,
    UnknownTag,
    decode,
    is_quic,
    pack_address,
    unpack_address,
)

KINDS: list[type[Packet]] = [
    AddressRequest,
    AddressReply,
    Relayed,
    Register,
    Cookie,
    Registered,
    UnknownTag,
    Probe,
    ProbeReply,
]
MUTATIONS = 100_000

u16 = st.integers(0, 65535)
hosts = st.integers(0, 2**32 - 1).map(lambda number: str(IPv4Address(number))) | st.integers(
    0, 2**128 - 1
).map(IPv6Address).map(lambda host: str(host.ipv4_mapped or host))
addresses = st.tuples(hosts, u16)


def raw(size: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=size, max_size=size)


packets: st.SearchStrategy[Packet] = st.one_of(
    st.builds(AddressRequest, raw(8)),
    st.builds(AddressReply, raw(8), addresses),
    st.builds(Relayed, raw(12), raw(12), st.binary(max_size=MAX_INNER_BYTES)),
    st.builds(Register, raw(32), raw(8), raw(16), raw(64)),
    st.builds(Cookie, raw(8), raw(16)),
    st.builds(Registered, raw(8), addresses, u16, u16),
    st.builds(UnknownTag, raw(12)),
    st.builds(Probe, raw(8), raw(8), raw(16), st.integers(Probe.SIZE, 16000)),
    st.builds(ProbeReply, raw(8), raw(8), addresses, u16, raw(16)),
)


@settings(deadline=None)
@given(packets)
def test_packets_survive_a_round_trip(packet: Packet) -> None:
    datagram = packet.encode()

    assert decode(datagram) == packet
    assert not is_quic(datagram)
    assert len(datagram) >= packet.SIZE


@settings(deadline=None)
@given(packets, st.binary(max_size=40))
def test_padding_matters_only_for_probes_and_relayed_packets(
    packet: Packet, padding: bytes
) -> None:
    read = decode(packet.encode() + padding)

    match packet:
        case Probe():
            assert read == replace(packet, length=packet.length + len(padding))
        case Relayed():
            assert read == replace(packet, inner=packet.inner + padding)
        case _:
            assert read == packet


@settings(deadline=None)
@given(addresses)
def test_addresses_take_18_bytes(address: tuple[str, int]) -> None:
    data = pack_address(address)

    assert len(data) == 18
    assert unpack_address(data) == address


def test_ipv4_is_never_read_as_ipv6() -> None:
    mapped = pack_address(("::ffff:192.0.2.1", 7))

    assert mapped == pack_address(("192.0.2.1", 7))
    assert unpack_address(mapped) == ("192.0.2.1", 7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_packet_is_rejected(kind: type[Packet]) -> None:
    with pytest.raises(PeerFault, match=f"{kind.SIZE - 1} bytes$"):
        decode(bytes([kind.KIND]).ljust(kind.SIZE - 1, b"\0"))


@pytest.mark.parametrize("first", [0x00, 0x03, 0x1F, 0x29, 0x40, 0xC3, 0xFF])
def test_unknown_first_bytes_are_rejected(first: int) -> None:
    with pytest.raises(PeerFault):
        decode(bytes([first]) * 200)
    assert is_quic(bytes([first])) == bool(first & 0x40)


def test_an_empty_datagram_is_rejected() -> None:
    assert not is_quic(b"")
    with pytest.raises(PeerFault):
        decode(b"")


def test_kinds_are_distinct_from_each_other_quic_and_stun() -> None:
    numbers = [kind.KIND for kind in KINDS]

    assert sorted(numbers) == list(range(0x20, 0x29))


@pytest.mark.parametrize(
    ("question", "answers"),
    [(AddressRequest, [AddressReply]), (Register, [Cookie, Registered]), (Relayed, [UnknownTag])],
)
def test_a_reply_is_not_longer_than_its_request(
    question: type[Packet], answers: list[type[Packet]]
) -> None:
    assert all(answer.SIZE <= question.SIZE for answer in answers)
    assert AddressRequest(bytes(8)).encode() == bytes([0x20]).ljust(ASK_BYTES, b"\0")


def test_the_answer_to_a_probe_is_not_twice_as_long() -> None:
    assert ProbeReply.SIZE < 2 * Probe.SIZE


def test_relayed_datagrams_fit_the_minimum_ipv6_mtu() -> None:
    assert Relayed.SIZE + MAX_INNER_BYTES + 8 + 40 <= 1280


def test_a_registration_is_signed_for_its_cookie() -> None:
    register = Register(b"k" * 32, b"n" * 8, b"c" * 16, bytes(64))

    assert register.tag == b"k" * 12
    assert register.signed == replace(register, signature=b"s" * 64).signed
    assert register.signed != replace(register, cookie=b"d" * 16).signed


def test_the_mac_covers_every_field_of_probes_and_replies() -> None:
    probe = Probe(b"p" * 8, b"n" * 8, b"m" * 16)
    answer = ProbeReply(b"p" * 8, b"n" * 8, ("192.0.2.1", 7), 33, b"m" * 16)

    for other in (replace(probe, path=b"q" * 8), replace(probe, nonce=b"o" * 8)):
        assert other.sealed != probe.sealed
    for seen in (
        replace(answer, path=b"q" * 8),
        replace(answer, nonce=b"o" * 8),
        replace(answer, address=("192.0.2.1", 8)),
        replace(answer, length=34),
    ):
        assert seen.sealed != answer.sealed
    assert probe.sealed != answer.sealed[: len(probe.sealed)]


def test_garbage_is_decoded_or_rejected() -> None:
    chance = random.Random(20)
    noise = chance.randbytes(200_000)
    read = 0

    for number in range(MUTATIONS):
        start, size = chance.randrange(150_000), chance.randrange(140)
        datagram = bytes([0x1F + number % 11]) + noise[start : start + size]
        try:
            packet = decode(datagram)
        except PeerFault:
            continue
        read += 1
        assert (
            packet.encode()[: packet.SIZE] == datagram[: packet.SIZE]
            or type(packet) is AddressRequest
        )

    assert read > MUTATIONS // 4
