"""The relay machine, with hosts in the documentation ranges 192.0.2.0/24 and 2001:db8::/32."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from meshllm.errors import PeerFault
from meshllm_quic.net.network import Address
from meshllm_quic.relay.relay import (
    BURST_S,
    HOST_ANSWERS,
    HOST_VERIFICATIONS,
    LASTS_S,
    MAX_ADDRESSES,
    SHARE,
    Refusal,
    Relay,
    RelayLimits,
)
from meshllm_quic.wire.packets import (
    MAX_INNER_BYTES,
    TAG_BYTES,
    ZERO_COOKIE,
    AddressReply,
    AddressRequest,
    Cookie,
    Packet,
    Probe,
    Register,
    Registered,
    Relayed,
    UnknownTag,
    decode,
)

HOME, CAFE, OFFICE = ("192.0.2.1", 4000), ("192.0.2.77", 5000), ("2001:db8::1", 6000)
NONCE = b"nonce567"
QUIC = b"\x40" + bytes(99)


class Node:
    """A key, and the packets that it sends to a relay."""

    def __init__(self, seed: int) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed.to_bytes(32))
        self.id = self._key.public_key().public_bytes_raw()
        self.tag = self.id[:TAG_BYTES]

    def ask(self) -> Register:
        return Register(self.id, NONCE, ZERO_COOKIE, bytes(64))

    def sign(self, cookie: bytes) -> Register:
        bare = replace(self.ask(), cookie=cookie)
        return replace(bare, signature=self._key.sign(bare.signed))

    def to(self, other: "Node", inner: bytes = QUIC) -> Relayed:
        return Relayed(other.tag, self.tag, inner)


A, B, C, D = Node(1), Node(2), Node(3), Node(4)


def make(
    limits: RelayLimits | None = None, allow: Callable[[bytes], bool] = lambda _: True
) -> Relay:
    seeded = random.Random(1)
    return Relay(allow, limits=limits, observer_port=8791, random=seeded.randbytes)


def give(relay: Relay, packet: Packet, source: Address, now: float = 0.0) -> list[Packet]:
    """Pass a packet to the relay; return its replies to the source."""
    sent = relay.receive(packet, source, len(packet.encode()), now)
    assert all(to == source for _, to in sent)
    return [decode(datagram) for datagram, _ in sent]


def get_cookie(relay: Relay, source: Address, now: float = 0.0) -> bytes:
    """Request a cookie as an unregistered client."""
    (answer,) = give(relay, A.ask(), source, now)
    assert isinstance(answer, Cookie)
    return answer.cookie


def register(relay: Relay, node: Node, source: Address, now: float = 0.0) -> list[Packet]:
    return give(relay, node.sign(get_cookie(relay, source, now)), source, now)


def send(relay: Relay, packet: Relayed, source: Address, now: float = 0.0) -> list[Address]:
    """Forward a packet; return its destinations, and check that it is unchanged."""
    datagram = packet.encode()
    sent = relay.receive(packet, source, len(datagram), now)
    forwarded = [(data, to) for data, to in sent if to != source]
    assert all(data == datagram for data, _ in forwarded)
    return [to for _, to in forwarded]


def test_a_registration_needs_a_cookie_and_a_signature() -> None:
    relay = make()

    (cookie,) = give(relay, A.ask(), HOME)
    assert isinstance(cookie, Cookie)
    (answer,) = give(relay, A.sign(cookie.cookie), HOME)

    assert cookie.nonce == NONCE
    assert answer == Registered(NONCE, HOME, LASTS_S, 8791)
    assert relay.statistics.registered == 1


def test_a_relay_without_a_second_port_names_none() -> None:
    assert register(Relay(lambda _: True), A, HOME) == [Registered(NONCE, HOME, LASTS_S, 0)]


def test_relayed_datagrams_are_forwarded_unchanged() -> None:
    relay = make()
    register(relay, A, HOME)
    register(relay, B, CAFE)
    packet = A.to(B, b"\x40" + bytes(MAX_INNER_BYTES - 1))

    assert send(relay, packet, HOME) == [CAFE]
    assert send(relay, B.to(A), CAFE) == [HOME]
    assert relay.statistics.forwarded == 2
    assert relay.statistics.forwarded_bytes == len(packet.encode()) + len(B.to(A).encode())


def test_unauthenticated_clients_leave_no_state() -> None:
    relay = make()

    for number in range(2000):
        give(relay, A.ask(), (f"192.0.2.{number % 256}", 1024 + number))

    kept = [len(relay._registrations), len(relay._hosts), len(relay._quotas._budgets)]
    assert relay.statistics.registered == 0
    assert kept == [0, 0, 0]


@pytest.mark.parametrize("source", [CAFE, (HOME[0], HOME[1] + 1)])
def test_a_cookie_of_another_address_gets_a_new_one(source: Address) -> None:
    relay = make()

    (answer,) = give(relay, A.sign(get_cookie(relay, HOME)), source)

    assert isinstance(answer, Cookie)
    assert relay.statistics.registered == 0


def test_an_old_cookie_gets_a_new_one() -> None:
    relay = make()
    old = get_cookie(relay, HOME, 0.0)

    (answer,) = give(relay, A.sign(old), HOME, 120.0)

    assert isinstance(answer, Cookie)
    assert answer.cookie != old


@pytest.mark.parametrize("field", ["key", "nonce", "signature"])
def test_a_signature_of_other_data_is_refused(field: str) -> None:
    relay = make()
    good = A.sign(get_cookie(relay, HOME))
    forged = replace(good, **{field: bytes(len(getattr(good, field)))})

    assert give(relay, forged, HOME) == []
    assert relay.statistics.refused == {Refusal.SIGNATURE: 1}
    assert relay.statistics.registered == 0


def test_an_invalid_key_is_refused() -> None:
    relay = make()
    no_point = b"\x02" + bytes(31)

    assert give(relay, replace(A.sign(get_cookie(relay, HOME)), key=no_point), HOME) == []
    assert relay.statistics.refused == {Refusal.SIGNATURE: 1}


def test_a_key_that_is_not_allowed_is_refused() -> None:
    relay = make(allow=lambda key: key == A.id)

    assert len(register(relay, A, HOME)) == 1
    assert register(relay, B, CAFE) == []
    assert relay.statistics.refused == {Refusal.KEY: 1}


def test_allow_is_checked_at_each_refresh() -> None:
    allowed = {A.id}
    relay = make(allow=allowed.__contains__)
    register(relay, A, HOME)

    allowed.clear()

    assert register(relay, A, HOME, 20.0) == []


def test_another_key_with_the_same_tag_is_refused() -> None:
    relay = make()
    register(relay, A, HOME)
    twin = replace(B.sign(get_cookie(relay, CAFE)), key=A.tag + B.id[TAG_BYTES:])

    assert give(relay, twin, CAFE) == []
    assert relay.statistics.refused == {Refusal.TAKEN: 1}
    assert send(relay, A.to(A), HOME) == []
    assert relay.statistics.forwarded == 1


def test_a_registration_moves_with_its_key() -> None:
    relay = make()
    register(relay, A, HOME)
    register(relay, B, OFFICE)

    register(relay, A, CAFE, 5.0)

    assert relay.statistics.registered == 2
    assert send(relay, B.to(A), OFFICE, 5.0) == [CAFE]
    assert send(relay, A.to(B), CAFE, 5.0) == [OFFICE]


def test_a_node_that_registers_by_two_addresses_of_the_relay_sends_from_both() -> None:
    relay = make()
    register(relay, B, OFFICE)

    for now in (0.0, 20.0, 40.0):
        register(relay, A, HOME, now)
        register(relay, A, CAFE, now)

        assert send(relay, A.to(B), HOME, now) == [OFFICE]
        assert send(relay, A.to(B), CAFE, now) == [OFFICE]
        assert send(relay, B.to(A), OFFICE, now) == [CAFE]

    assert relay.statistics.registered == 2
    assert relay.is_registered(HOME, 40.0)


def test_an_address_that_is_no_longer_refreshed_may_not_send() -> None:
    relay = make()
    register(relay, A, HOME)
    register(relay, A, CAFE, 30.0)
    register(relay, B, OFFICE, 30.0)

    assert send(relay, A.to(B), HOME, LASTS_S - 0.1) == [OFFICE]
    assert give(relay, A.to(B), HOME, LASTS_S) == [UnknownTag(A.tag)]
    assert send(relay, A.to(B), CAFE, LASTS_S) == [OFFICE]
    register(relay, A, CAFE, LASTS_S)
    assert not relay.is_registered(HOME, LASTS_S)


def test_only_the_latest_addresses_of_a_node_are_kept() -> None:
    relay = make()
    register(relay, B, OFFICE)
    homes = [(HOME[0], 4000 + number) for number in range(MAX_ADDRESSES + 1)]
    for home in homes:
        register(relay, A, home)

    assert [bool(send(relay, A.to(B), home)) for home in homes] == [False] + [True] * MAX_ADDRESSES

    relay.expire(LASTS_S)
    assert not relay._sources


def test_a_replayed_register_is_useless_elsewhere() -> None:
    relay = make()
    overheard = A.sign(get_cookie(relay, HOME))
    give(relay, overheard, HOME)
    register(relay, B, OFFICE)

    (answer,) = give(relay, overheard, CAFE, 1.0)

    assert isinstance(answer, Cookie)
    assert send(relay, B.to(A), OFFICE, 1.0) == [HOME]


def test_a_registration_expires_unless_refreshed() -> None:
    relay = make()
    register(relay, A, HOME, 0.0)
    register(relay, B, CAFE, 0.0)

    register(relay, A, HOME, 30.0)
    relay.expire(LASTS_S - 0.1)
    assert relay.statistics.registered == 2

    relay.expire(LASTS_S)
    assert relay.statistics.registered == 1
    (answer,) = give(relay, A.to(B), HOME, 61.0)
    assert answer == UnknownTag(B.tag)

    relay.expire(30.0 + LASTS_S)
    assert relay.statistics.registered == 0
    assert len(relay._hosts) == 0


def test_registrations_expire_without_input() -> None:
    relay = make()
    register(relay, A, HOME, 0.0)

    (answer,) = give(relay, A.to(A), HOME, LASTS_S)

    assert answer == UnknownTag(A.tag)


def test_a_full_relay_makes_room_in_the_most_crowded_network() -> None:
    relay = make(RelayLimits(registrations=3))
    register(relay, A, HOME)
    register(relay, B, CAFE)  # of the same /24
    register(relay, C, OFFICE)
    send(relay, A.to(C), HOME)
    for node, place in ((A, HOME), (B, CAFE)):
        register(relay, node, place)  # B is still the one that was never used

    assert len(register(relay, D, ("198.51.100.1", 9))) == 1

    assert relay.statistics.registered == 3
    assert {node for node in (A, B, C, D) if node.tag in relay._registrations} == {A, C, D}
    assert not relay.is_registered(CAFE, 0.0)
    assert relay.is_registered(HOME, 0.0)


def test_a_full_relay_makes_no_room_for_a_network_that_would_have_as_many() -> None:
    relay = make(RelayLimits(registrations=3))
    register(relay, A, HOME)
    register(relay, B, CAFE)
    register(relay, C, OFFICE)

    assert register(relay, D, ("2001:db8::2", 9)) == []
    assert relay.statistics.refused == {Refusal.FULL: 1}


def test_of_a_crowded_network_in_use_the_oldest_registration_goes() -> None:
    relay = make(RelayLimits(registrations=2))
    register(relay, A, HOME)
    register(relay, B, CAFE)
    send(relay, A.to(B), HOME)

    assert len(register(relay, C, OFFICE)) == 1
    assert {node for node in (A, B, C) if node.tag in relay._registrations} == {B, C}


def test_registrations_per_network_are_limited() -> None:
    relay = make(RelayLimits(network_registrations=1))
    register(relay, A, HOME)

    assert register(relay, B, CAFE) == []
    assert relay.statistics.refused == {Refusal.HOST: 1}
    assert len(register(relay, C, OFFICE)) == 1


def test_a_registration_that_expires_makes_room_in_its_network() -> None:
    relay = make(RelayLimits(network_registrations=1))
    register(relay, A, HOME)

    assert len(register(relay, B, CAFE, LASTS_S + 1)) == 1
    assert register(relay, C, HOME, LASTS_S + 1) == []


def test_a_full_relay_keeps_its_registrations() -> None:
    relay = make(RelayLimits(registrations=1))
    register(relay, A, HOME)

    assert register(relay, B, CAFE) == []
    assert relay.statistics.refused == {Refusal.FULL: 1}
    assert len(register(relay, A, HOME, 20.0)) == 1
    assert len(register(relay, B, CAFE, 20.0 + LASTS_S)) == 1


@pytest.mark.parametrize(
    ("other", "is_same_host"),
    [(("192.0.2.1", 9), True), (("192.0.2.2", 9), False)],
)
def test_registrations_per_host_are_limited(other: Address, is_same_host: bool) -> None:
    relay = make(RelayLimits(host_registrations=1))
    register(relay, A, HOME)

    assert (register(relay, B, other) == []) is is_same_host
    assert relay.statistics.refused[Refusal.HOST] == is_same_host
    assert len(register(relay, A, HOME, 1.0)) == 1


def test_a_network_of_ipv6_counts_as_one_host() -> None:
    relay = make(RelayLimits(host_registrations=1))
    register(relay, A, OFFICE)

    assert register(relay, B, ("2001:db8::ffff", 9)) == []
    assert len(register(relay, B, ("2001:db8:0:1::1", 9))) == 1


def test_a_moved_registration_frees_room_at_its_host() -> None:
    relay = make(RelayLimits(host_registrations=1))
    register(relay, A, HOME)
    register(relay, A, CAFE)

    assert len(register(relay, B, HOME)) == 1


def test_a_host_keeps_its_unexpired_registrations() -> None:
    relay = make(RelayLimits(host_registrations=2))
    register(relay, A, HOME, 0.0)
    register(relay, B, (HOME[0], 9), 30.0)

    relay.expire(LASTS_S)

    assert len(register(relay, A, HOME, LASTS_S)) == 1
    assert register(relay, C, (HOME[0], 10), LASTS_S) == []


def test_signature_checks_per_host_are_limited() -> None:
    relay = make()
    wrong = replace(A.sign(get_cookie(relay, HOME)), signature=bytes(64))
    most = round(HOST_VERIFICATIONS * 8)

    for _ in range(most + 5):
        give(relay, wrong, HOME)

    assert relay.statistics.refused == {Refusal.SIGNATURE: most, Refusal.BUSY: 5}
    assert register(relay, A, HOME) == []
    assert len(register(relay, B, CAFE)) == 1
    assert len(register(relay, A, HOME, 1.0)) == 1


def test_signature_checks_in_total_are_limited() -> None:
    relay = make()
    relay._verifications.left, relay._verifications.at = 1.0, 0.0

    assert len(register(relay, A, HOME)) == 1
    assert register(relay, B, CAFE) == []
    assert len(register(relay, B, CAFE, 1.0)) == 1


def test_a_sender_must_be_registered_from_its_source_address() -> None:
    relay = make()
    register(relay, B, CAFE)

    assert give(relay, A.to(B), HOME) == [UnknownTag(A.tag)]
    register(relay, A, HOME)
    assert give(relay, A.to(B), OFFICE) == [UnknownTag(A.tag)]
    assert relay.statistics.refused == {Refusal.SENDER: 2}
    assert relay.statistics.forwarded == 0


def test_an_unknown_recipient_is_reported() -> None:
    relay = make()
    register(relay, A, HOME)

    assert give(relay, A.to(B), HOME) == [UnknownTag(B.tag)]
    assert relay.statistics.refused == {Refusal.RECIPIENT: 1}


def test_unknown_replies_per_host_are_limited() -> None:
    relay = make()

    told = [len(give(relay, A.to(B), HOME)) for _ in range(100)]
    elsewhere = give(relay, A.to(B), CAFE)

    assert sum(told) == HOST_ANSWERS * BURST_S
    assert told == sorted(told, reverse=True)
    assert elsewhere == [UnknownTag(A.tag)]
    assert give(relay, A.to(B), HOME, 1.0) == [UnknownTag(A.tag)]


@pytest.mark.parametrize(
    "inner", [b"", b"\x20" + bytes(99), b"\x40" + bytes(MAX_INNER_BYTES)], ids=len
)
def test_only_quic_of_the_right_size_is_relayed(inner: bytes) -> None:
    relay = make()
    register(relay, A, HOME)
    register(relay, B, CAFE)

    assert send(relay, A.to(B, inner), HOME) == []
    assert relay.statistics.refused == {Refusal.INNER: 1}


def test_the_rate_of_a_sender_is_limited() -> None:
    size = len(A.to(B).encode())
    relay = make(RelayLimits(rate=10 * size))
    register(relay, A, HOME)
    register(relay, B, CAFE)
    burst = round(10 * BURST_S)

    at_once = [send(relay, A.to(B), HOME, 1.0) for _ in range(burst + 3)]
    later = [send(relay, A.to(B), HOME, 2.0) for _ in range(13)]

    assert at_once == [[CAFE]] * burst + [[]] * 3
    assert later == [[CAFE]] * 10 + [[]] * 3
    assert relay.statistics.refused == {Refusal.RATE: 6}
    assert send(relay, B.to(A), CAFE, 2.0) == [HOME]


def test_a_refresh_does_not_renew_the_burst() -> None:
    size = len(A.to(B).encode())
    relay = make(RelayLimits(rate=size))
    register(relay, A, HOME)
    register(relay, B, CAFE)
    for _ in range(round(BURST_S)):
        send(relay, A.to(B), HOME)

    register(relay, A, HOME)

    assert send(relay, A.to(B), HOME) == []


def test_the_quota_of_a_host_outlasts_its_keys() -> None:
    size = len(A.to(B).encode())
    relay = make(RelayLimits(quota=2 * size))
    register(relay, A, HOME)
    register(relay, B, CAFE)

    spent = [send(relay, A.to(B), HOME) for _ in range(3)]
    register(relay, C, (HOME[0], 9), LASTS_S)
    register(relay, B, CAFE, LASTS_S)

    assert spent == [[CAFE], [CAFE], []]
    assert send(relay, C.to(B), (HOME[0], 9), LASTS_S) == []
    assert relay.statistics.refused == {Refusal.QUOTA: 2}
    assert send(relay, B.to(C), CAFE, LASTS_S) == [(HOME[0], 9)]


def test_the_total_rate_is_limited() -> None:
    size = len(A.to(B).encode())
    relay = make(RelayLimits(rate=size))
    nodes = [Node(10 + number) for number in range(SHARE + 1)]
    places = [(f"192.0.2.{number}", 7) for number in range(len(nodes))]
    for node, place in zip(nodes, places, strict=True):
        register(relay, node, place)

    for node, place in zip(nodes, places, strict=True):
        for _ in range(round(BURST_S)):
            send(relay, node.to(nodes[0]), place)

    assert relay.statistics.forwarded == SHARE * BURST_S
    assert relay.statistics.refused == {Refusal.TOTAL: BURST_S}


def test_the_observed_address_is_reported() -> None:
    assert give(make(), AddressRequest(NONCE), OFFICE) == [AddressReply(NONCE, OFFICE)]


@pytest.mark.parametrize(
    "packet",
    [
        AddressReply(NONCE, HOME), Cookie(NONCE, bytes(16)), Registered(NONCE, HOME, 60, 0),
        UnknownTag(A.tag), Probe(NONCE, NONCE, bytes(16)),
    ],
)  # fmt: skip
def test_packets_for_clients_are_ignored(packet: Packet) -> None:
    assert give(make(), packet, HOME) == []


SOURCES = [(f"198.51.100.{number % 250}", 1024 + number) for number in range(500)] + [
    (f"2001:db8:{number:x}::1", 7) for number in range(500)
]


def mutate(seeded: random.Random, datagram: bytes) -> bytes:
    """Change some bytes, or the length."""
    data = bytearray(datagram)
    for _ in range(seeded.choice((0, 1, 1, 3))):
        data[seeded.randrange(len(data))] = seeded.randrange(256)
    return bytes(data[: seeded.randrange(1, len(data) + 1)] if seeded.random() < 0.1 else data)


def test_a_relay_never_amplifies() -> None:
    """100,000 datagrams, most of them damaged, from 1,000 addresses and two members."""
    seeded = random.Random(5)
    limits = RelayLimits(registrations=3, host_registrations=2)
    relay = make(limits)
    register(relay, A, HOME)
    register(relay, B, OFFICE)
    seeds = [
        A.to(B).encode(), B.to(C).encode(), C.to(A).encode(),
        A.ask().encode(), AddressRequest(NONCE).encode(),
        A.sign(get_cookie(relay, HOME)).encode(), C.sign(get_cookie(relay, SOURCES[0])).encode(),
        Probe(NONCE, NONCE, bytes(16), 500).encode(), UnknownTag(A.tag).encode(),
    ]  # fmt: skip
    heard: Counter[Address] = Counter()
    told: Counter[Address] = Counter()

    for step in range(100_000):
        source = seeded.choice(SOURCES) if step % 8 else seeded.choice((HOME, OFFICE))
        datagram = mutate(seeded, seeded.choice(seeds))
        heard[source] += len(datagram)
        try:
            packet = decode(datagram)
        except PeerFault:
            continue
        for answer, to in relay.receive(packet, source, len(datagram), step / 1e4):
            told[to] += len(answer)
            assert len(answer) <= len(datagram)
            assert to in {source, HOME, OFFICE, SOURCES[0]}

    assert relay.statistics.forwarded > 100
    assert all(told[source] <= heard[source] for source in SOURCES[1:])
    assert len(relay._registrations) <= limits.registrations
    assert len(relay._hosts) <= limits.registrations
    assert set(relay.statistics.refused) <= set(Refusal)


def test_a_host_has_its_own_limit_before_a_full_relay_looks_at_all_networks() -> None:
    relay = make(RelayLimits(registrations=1))
    register(relay, A, HOME)

    for _ in range(1000):
        register(relay, B, CAFE)

    refused = relay.statistics.refused
    assert refused[Refusal.FULL] > 0
    assert refused[Refusal.BUSY] > 900
