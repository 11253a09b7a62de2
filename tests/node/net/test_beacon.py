"""Beacons on the local network, and datagrams of unknown senders."""

import asyncio
import json
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.names import NODE_ID_BYTES, MeshId, NodeId
from meshllm.node.net import beacon as module
from meshllm.node.net.beacon import (
    ANSWER_S,
    FIRST_S,
    LAST_S,
    MAGIC,
    MAX_ADDRESSES,
    MAX_BEACON_BYTES,
    MAX_READS,
    READS_PER_S,
    Beacon,
    Guests,
    JoinerBeacons,
    MemberBeacons,
    ReadLimit,
    open_beacon,
)
from meshllm.protocol.trust.credential import (
    Credential,
    Removals,
    Role,
    founder_credential,
    issue,
    remove,
)
from meshllm.protocol.trust.identity import NodeKey
from meshllm.testing.clock import run_virtual
from tests.builders.waiting import until

MESH = MeshId(b"m" * 16)
GUEST = b"g" * 32
ME, PEER = NodeId(b"a" * NODE_ID_BYTES), NodeId(b"b" * NODE_ID_BYTES)
CODE = JoinerBeacons(MESH, ME)
AT = ("ws://10.0.0.7:7700", "ws://[fd00::1]:7700")
Heard = list[tuple[NodeId, tuple[str, ...]]]


class FakeTransport(asyncio.DatagramTransport):
    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[float, bytes, object]] = []

    def sendto(self, data: object, addr: object = None) -> None:
        assert isinstance(data, bytes)
        self.sent.append((asyncio.get_running_loop().time(), data, addr))


def beacon_of(
    heard: Heard, *addresses: str, guests: Guests = tuple
) -> tuple[Beacon, FakeTransport]:
    beacon = Beacon(JoinerBeacons(MESH, ME), ME, lambda node, at: heard.append((node, at)), guests)
    beacon.addresses = addresses
    transport = FakeTransport()
    beacon.add(transport, "239.255.77.77")
    return beacon, transport


def write(node: NodeId, addresses: Sequence[str], psk: bytes = MESH) -> bytes:
    (beacon,) = JoinerBeacons(psk, node).seal(addresses, None)
    return beacon


def seal(plain: bytes) -> bytes:
    """Encrypt any content as a member can."""
    nonce = os.urandom(module.NONCE_BYTES)
    return MAGIC + nonce + CODE._cipher.encrypt(nonce, plain, MAGIC)


@given(st.lists(st.text(max_size=300), max_size=40))
def test_a_beacon_is_read_as_it_was_written(addresses: list[str]) -> None:
    beacon = write(PEER, addresses)

    read = CODE.read(beacon)

    assert len(beacon) <= MAX_BEACON_BYTES
    assert read is not None
    assert read[0] == PEER
    assert list(read[1]) == addresses[: len(read[1])]


def test_a_beacon_has_as_many_addresses_as_fit() -> None:
    assert CODE.read(write(PEER, AT)) == (PEER, AT)
    assert CODE.read(write(PEER, AT * 50)) == (PEER, (AT * 50)[:MAX_ADDRESSES])


def test_long_addresses_are_left_out_from_the_end() -> None:
    long = "ws://" + "x" * 400

    assert CODE.read(write(PEER, [*AT, long, long])) == (PEER, (*AT, long))


def test_another_mesh_cannot_decrypt_a_beacon() -> None:
    assert JoinerBeacons(MeshId(bytes(16)), ME).read(write(PEER, AT)) is None


def test_no_two_beacons_have_the_same_bytes() -> None:
    one, other = write(PEER, AT), write(PEER, AT)

    assert one[len(MAGIC) :] != other[len(MAGIC) :]
    assert not any(secret in one for secret in (PEER, MESH, b"10.0.0.7"))


def test_every_flipped_bit_is_detected() -> None:
    beacon = write(PEER, AT)

    for place in range(len(beacon)):
        changed = bytearray(beacon)
        changed[place] ^= 1
        assert CODE.read(bytes(changed)) is None


@given(st.binary(max_size=MAX_BEACON_BYTES + 9))
def test_noise_is_ignored(noise: bytes) -> None:
    assert CODE.read(noise) is None
    assert CODE.read(MAGIC + noise) is None


@pytest.mark.parametrize(
    "plain",
    [
        b"",
        PEER,
        PEER[:10],
        PEER + b"{",
        PEER + b'"text"',
        PEER + b"{}",
        PEER + b"[1]",
        PEER + b'["a", null]',
        PEER + b"[" * 1100,
        PEER + b"\xff",
        PEER + b"null",
    ],
    ids=repr,
)
def test_invalid_content_of_a_member_is_ignored(plain: bytes) -> None:
    assert CODE.read(seal(plain)) is None


def test_a_too_long_beacon_is_ignored() -> None:
    assert CODE.read(seal(PEER + json.dumps(["a" * MAX_BEACON_BYTES]).encode())) is None


def test_an_unknown_node_gets_one_reply() -> None:
    heard: Heard = []

    async def scenario() -> list[bytes]:
        beacon, transport = beacon_of(heard, "ws://me")
        for _ in range(3):
            beacon.datagram_received(write(PEER, AT), ("10.0.0.7", 7701))
        return [data for _, data, _ in transport.sent]

    (answer,) = run_virtual(scenario())
    assert CODE.read(answer) == (ME, ("ws://me",))
    assert heard == [(PEER, AT)] * 3


def test_own_beacons_and_noise_are_ignored() -> None:
    heard: Heard = []

    async def scenario() -> FakeTransport:
        beacon, transport = beacon_of(heard, "ws://me")
        for data in (
            write(ME, AT),
            b"",
            b"noise",
            write(PEER, AT, bytes(16)),
        ):
            beacon.datagram_received(data, ("10.0.0.7", 7701))
        beacon.error_received(OSError("no route"))
        return transport

    assert run_virtual(scenario()).sent == []
    assert heard == []


def test_invented_nodes_get_a_limited_number_of_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KNOWN", 5)
    heard: Heard = []

    async def scenario() -> FakeTransport:
        beacon, transport = beacon_of(heard, "ws://me")
        for number in range(20):
            beacon.datagram_received(write(NodeId(number.to_bytes(32)), AT), ("10.0.0.7", 7701))
        return transport

    assert len(run_virtual(scenario()).sent) == 5
    assert len(heard) == 20


def test_the_interval_of_beacons_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "own_hosts", frozenset)

    async def scenario() -> list[float]:
        beacon, transport = beacon_of([], "ws://me")
        sending = asyncio.ensure_future(beacon.run())
        await asyncio.sleep(200)
        sending.cancel()
        await asyncio.wait([sending])
        assert {to for _, _, to in transport.sent} == {("239.255.77.77", module.PORT)}
        return [at for at, _, _ in transport.sent]

    times = run_virtual(scenario())

    pauses = [after - before for before, after in pairwise(times)]
    assert pauses[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    assert pauses[-1] == max(pauses) == LAST_S


def test_a_node_without_addresses_queries_and_does_not_answer() -> None:
    heard: Heard = []

    async def scenario() -> FakeTransport:
        beacon, transport = beacon_of(heard)
        beacon.send()
        for data in (
            write(PEER, AT),
            write(PEER, ()),
            write(PEER, (), GUEST),
        ):
            beacon.datagram_received(data, ("10.0.0.7", 7701))
        return transport

    ((_, question, _),) = run_virtual(scenario()).sent
    assert CODE.read(question) == (ME, ())
    assert heard == [(PEER, AT)]


@pytest.mark.parametrize(
    ("source", "kept"), [("10.9.9.9", AT[:1]), ("127.0.0.1", (*AT[:1], "ws://127.0.0.1:80"))]
)
def test_only_this_machine_names_its_own_addresses(source: str, kept: tuple[str, ...]) -> None:
    heard: Heard = []
    addresses = (*AT[:1], "ws://127.0.0.1:80", "ws://desk:80", "ws://10.0.0.9:80/admin")

    async def scenario() -> None:
        beacon, _ = beacon_of(heard)
        beacon.datagram_received(write(PEER, addresses), (source, 7701))

    run_virtual(scenario())

    assert heard == [(PEER, kept)]


def test_queries_are_answered_with_a_rate_limit() -> None:
    heard: Heard = []

    async def scenario() -> list[bytes]:
        beacon, transport = beacon_of(heard, "ws://me")
        for _ in range(3):
            for _ in range(100):
                beacon.datagram_received(write(PEER, ()), ("10.0.0.7", 7701))
            await asyncio.sleep(ANSWER_S)
        return [data for _, data, _ in transport.sent]

    answers = run_virtual(scenario())

    assert [CODE.read(answer) for answer in answers] == [(ME, ("ws://me",))] * 3
    assert heard == []


def test_a_guest_is_answered_under_the_key_of_its_ticket() -> None:
    heard: Heard = []
    others = [bytes([number]) * 32 for number in range(255)]

    async def scenario() -> list[bytes]:
        beacon, transport = beacon_of(heard, "ws://me", guests=lambda: [*others, GUEST])
        beacon.datagram_received(write(PEER, (), GUEST), ("10.0.0.7", 7701))
        return [data for _, data, _ in transport.sent]

    (answer,) = run_virtual(scenario())
    assert JoinerBeacons(GUEST, ME).read(answer) == (ME, ("ws://me",))
    assert CODE.read(answer) is None
    assert heard == []


def test_unknown_datagrams_are_decrypted_with_a_rate_limit() -> None:
    looks: list[float] = []

    def guests() -> list[bytes]:
        looks.append(asyncio.get_running_loop().time())
        return [bytes(32)]

    async def scenario() -> FakeTransport:
        beacon, transport = beacon_of([], "ws://me", guests=guests)
        for _ in range(5):
            for noise in (b"noise", write(PEER, (), GUEST), MAGIC + bytes(99)):
                beacon.datagram_received(noise, ("10.0.0.7", 7701))
            await asyncio.sleep(ANSWER_S)
        return transport

    assert run_virtual(scenario()).sent == []
    assert len(looks) == 5


@pytest.mark.socket
async def test_two_nodes_on_one_network_discover_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("", 0))
        monkeypatch.setattr(module, "PORT", free.getsockname()[1])
    heard: dict[NodeId, tuple[str, ...]] = {}
    both = asyncio.Event()

    def note(node: NodeId, addresses: tuple[str, ...]) -> None:
        heard[node] = addresses
        if len(heard) == 2:
            both.set()

    async with (
        open_beacon(JoinerBeacons(MESH, ME), ME, note) as one,
        open_beacon(JoinerBeacons(MESH, PEER), PEER, note) as other,
    ):
        if not (one._transports and other._transports):
            pytest.skip("no interface of this machine takes multicast")
        one.addresses, other.addresses = ("ws://10.9.9.1",), ("ws://10.9.9.2",)
        one.send()
        try:
            async with asyncio.timeout(60):
                await both.wait()
        except TimeoutError:
            if not heard:
                pytest.skip("this machine carries no multicast to itself")
            raise

    assert heard == {ME: ("ws://10.9.9.1",), PEER: ("ws://10.9.9.2",)}


@pytest.mark.socket
async def test_a_port_in_use_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "meshllm")
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as v4,
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as v6,
    ):
        v6.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        v4.bind(("", 0))
        monkeypatch.setattr(module, "PORT", v4.getsockname()[1])
        v6.bind(("::", module.PORT))
        async with open_beacon(JoinerBeacons(MESH, ME), ME, lambda *_: None) as beacon:
            beacon.send()

            assert beacon._transports == {}
    assert "cannot receive beacons" in caplog.text


@pytest.mark.socket
async def test_interfaces_that_appear_or_change_later_are_used_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "meshllm")
    hosts: list[str] = []
    opened: list[socket.socket] = []
    is_open, looks = asyncio.Event(), 0

    def own_hosts() -> frozenset[str]:
        nonlocal looks
        looks += 1
        return frozenset(hosts)

    def sockets() -> Iterator[tuple[str, socket.socket, list[socket.socket]]]:
        if hosts == ["starting"]:
            hosts[:] = ["10.0.0.7"]
            raise OSError("no such device")
        if hosts:
            both = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
            opened.extend(both)
            is_open.set()
            yield "127.0.0.1", both[0], both[1:]

    inbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    inbox.setblocking(False)
    inbox.bind(("127.0.0.1", 0))
    for name, value in {
        "PORT": inbox.getsockname()[1],
        "FIRST_S": 0.01,
        "own_hosts": own_hosts,
        "_sockets": sockets,
    }.items():
        monkeypatch.setattr(module, name, value)
    loop, heard = asyncio.get_running_loop(), []

    with inbox:
        async with open_beacon(JoinerBeacons(MESH, ME), ME, lambda *_: None) as beacon:
            beacon.addresses = AT
            running = asyncio.ensure_future(beacon.run(0.01))
            await until(lambda: looks > 2)  # it runs without an interface
            for change in (["starting"], ["10.0.0.8"]):
                hosts[:] = change
                is_open.clear()
                await is_open.wait()
                heard.append(CODE.read(await loop.sock_recv(inbox, MAX_BEACON_BYTES)))
        running.cancel()
        await asyncio.wait([running])

    assert heard == [(ME, AT)] * 2
    assert [each.fileno() for each in opened] == [-1] * 4
    assert "no such device" in caplog.text


@pytest.mark.socket
async def test_interfaces_without_multicast_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        assert module._join_v4(listener, "203.0.113.7") is None  # not of this machine
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as listener:
        assert module._join_v6(listener, "no such interface") is None


A, B, C, D = (NodeKey(bytes([number]) * 32) for number in range(1, 5))
FOUNDED = founder_credential(A, bytes(16))
OF_B, OF_C = (issue(A, FOUNDED, each.node, Role.NODE) for each in (B, C))
CLIENT = issue(A, FOUNDED, D.node, Role.CLIENT)
GONE = {C.node: remove(A, FOUNDED.mesh, C.node, 1)}


def beacons(
    key: NodeKey, credential: Credential, *members: NodeKey, removals: Removals | None = None
) -> MemberBeacons:
    known = [each.node for each in members]
    return MemberBeacons(key, credential, lambda: known, removals or {})


def test_members_read_the_beacons_of_members() -> None:
    (data,) = beacons(A, FOUNDED, A, B, C).seal(AT, None)

    assert beacons(B, OF_B).read(data) == (A.node, AT)
    assert beacons(C, OF_C).read(data) == (A.node, AT)
    assert beacons(D, CLIENT).read(data) is None
    assert beacons(A, FOUNDED).read(data) is None
    assert JoinerBeacons(FOUNDED.mesh, ME).read(data) is None
    assert len(data) <= MAX_BEACON_BYTES


def test_a_removed_member_reads_no_beacon_and_is_not_heard() -> None:
    a = beacons(A, FOUNDED, B, C, removals=GONE)
    (data,) = a.seal(AT, None)
    (query,) = beacons(C, OF_C, A, B).seal((), None)

    assert beacons(B, OF_B).read(data) == (A.node, AT)
    assert beacons(C, OF_C).read(data) is None
    assert a.seal(AT, C.node) == []
    assert a.read(query) is None
    assert beacons(B, OF_B).read(query) == (C.node, ())  # it has not heard of the removal


def test_a_node_that_knows_nobody_sends_nothing() -> None:
    assert beacons(A, FOUNDED, A).seal(AT, None) == []


def test_the_query_of_a_client_is_read_by_nodes_that_do_not_know_it() -> None:
    (query,) = beacons(D, CLIENT, A).seal((), None)

    assert beacons(B, OF_B).read(query) == (D.node, ())
    (answer,) = beacons(B, OF_B).seal(AT, D.node)
    assert beacons(D, CLIENT).read(answer) == (B.node, AT)


def test_many_members_share_as_many_datagrams_as_needed() -> None:
    crowd = [NodeKey(number.to_bytes(32, "big")) for number in range(100, 163)]

    parts = beacons(A, FOUNDED, *crowd).seal(["ws://" + "x" * 60] * 16, None)

    assert len(parts) <= 5
    assert all(len(each) <= MAX_BEACON_BYTES for each in parts)
    reader = beacons(crowd[62], issue(A, FOUNDED, crowd[62].node, Role.NODE))
    assert sum(reader.read(each) is not None for each in parts) == 1


def test_a_credential_that_is_too_long_is_left_out() -> None:
    credential, issuer = OF_B, B
    for number in range(100, 104):
        key = NodeKey(number.to_bytes(32, "big"))
        credential, issuer = issue(issuer, credential, key.node, Role.NODE), key

    (data,) = beacons(issuer, credential, A).seal(AT, None)

    assert beacons(A, FOUNDED, issuer).read(data) == (issuer.node, AT)
    assert beacons(A, FOUNDED).read(data) is None


def test_a_client_shows_a_longer_credential_in_its_query() -> None:
    credential, issuer = OF_B, B
    for number in range(100, 104):
        key = NodeKey(number.to_bytes(32, "big"))
        credential, issuer = issue(issuer, credential, key.node, Role.NODE), key
    client = issue(issuer, credential, D.node, Role.CLIENT)

    (query,) = beacons(D, client).seal((), None)

    assert beacons(A, FOUNDED).read(query) == (D.node, ())
    assert len(query) <= MAX_BEACON_BYTES


def test_who_was_met_reads_beacons_but_is_not_believed_without_a_credential(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met = [B.node]
    a = MemberBeacons(A, FOUNDED, tuple, {}, lambda: met)
    (data,) = a.seal(AT, None)
    silent = MemberBeacons(B, OF_B, lambda: [A.node], {})
    monkeypatch.setattr(silent, "_payload", lambda _: b"\0\0[]")  # it shows nothing
    (query,) = silent.seal((), None)

    assert beacons(B, OF_B).read(data) == (A.node, AT)
    assert a.read(query) is None
    assert beacons(A, FOUNDED, B).read(query) == (B.node, ())


def test_no_beacon_is_read_twice() -> None:
    (data,) = beacons(A, FOUNDED, B).seal(AT, None)
    reader = beacons(B, OF_B)

    assert [reader.read(data) for _ in range(3)] == [(A.node, AT), None, None]


def test_a_flood_of_beacons_is_read_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("meshllm.node.net.beacon.time.monotonic", lambda: now)
    limit = ReadLimit()

    def read(first: int) -> int:
        return sum(limit.admits(number.to_bytes(12)) for number in range(first, first + 1000))

    assert read(0) == MAX_READS
    now += 2.0
    assert read(1000) == 2 * READS_PER_S
    now += 1e6
    monkeypatch.setattr(module, "MAX_SEEN", 10)
    assert read(5000) == MAX_READS
    now += 1e6
    assert read(0) == MAX_READS  # long ago: forgotten


def test_a_member_that_is_a_point_of_small_order_does_no_harm() -> None:
    odd = NodeId((1).to_bytes(32, "little"))
    code = MemberBeacons(A, FOUNDED, lambda: [odd, B.node], {})

    (data,) = code.seal(AT, None)

    assert beacons(B, OF_B).read(data) == (A.node, AT)
    assert len(code.seal(AT, odd)) <= 1


def test_only_members_are_heard() -> None:
    stranger = issue(D, founder_credential(D, bytes(16)), D.node, Role.NODE)
    odd = MemberBeacons(D, replace(stranger, mesh=FOUNDED.mesh), lambda: [B.node], {})
    for code in (odd, beacons(D, OF_B, B)):
        (data,) = code.seal(AT, None)
        assert beacons(B, OF_B).read(data) is None


@pytest.mark.parametrize("payload", [b"", b"\1", b"\1\0x[]", b"\0\0", b"\0\0{}", b"\0\0[1]"])
def test_malformed_content_of_a_member_is_ignored(payload: bytes) -> None:
    data = beacons(A, FOUNDED)._sealed((B.node,), payload)

    assert beacons(B, OF_B, A).read(data) is None


@given(st.binary(max_size=MAX_BEACON_BYTES + 9))
def test_noise_is_not_a_beacon_of_a_member(noise: bytes) -> None:
    assert beacons(B, OF_B).read(noise) is beacons(B, OF_B).read(MAGIC + noise) is None


def test_a_query_of_a_member_is_answered_to_it() -> None:
    async def scenario() -> list[bytes]:
        beacon = Beacon(beacons(A, FOUNDED), A.node, lambda *_: None)
        beacon.addresses = AT
        transport = FakeTransport()
        beacon.add(transport, "239.255.77.77")
        for code in (beacons(D, CLIENT), beacons(B, OF_B, A)):
            beacon.datagram_received(code.seal((), None)[0], ("10.0.0.7", 7701))
            await asyncio.sleep(ANSWER_S)
        return [data for _, data, _ in transport.sent]

    first, second = run_virtual(scenario())

    assert beacons(D, CLIENT).read(first) == beacons(B, OF_B).read(second) == (A.node, AT)
    assert beacons(D, CLIENT).read(second) is None
