"""A secure link keeps the contract of a link, and rejects unknown peers and tampering."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import pytest

from meshllm.errors import LinkLost, MeshError, NotAuthorised, PeerFault
from meshllm.names import NodeId
from meshllm.node.net.secure import (
    MAX_EARLY,
    MAX_SECURE_BYTES,
    HandshakeClosed,
    SecureLink,
    secure_accept,
    secure_dial,
)
from meshllm.protocol.trust import cipher
from meshllm.protocol.trust.credential import Credential, Role, check, issue, remove
from meshllm.protocol.trust.handshake import (
    FIRST_S,
    PRE_AUTH_BYTES,
    PRE_AUTH_S,
    LocalIdentity,
    Purpose,
)
from meshllm.protocol.trust.ticket import TicketProof, guest_psk
from meshllm.testing import links
from meshllm.testing.clock import run_virtual
from meshllm.testing.links import Terms
from meshllm.transport.contract import (
    MAX_MESSAGE_BYTES,
    Buffer,
    Channel,
    ImmediateSender,
    Link,
    LinkStatistics,
)
from meshllm_loopback import LoopbackTransport, TrafficShape
from tests.builders.handshakes import (
    AS_HOST,
    AS_JOINER,
    AS_MEMBER,
    AS_STRANGER,
    FOUNDED,
    GUEST,
    HOST,
    MEMBER,
    MESH,
    NOBODY,
    NOW,
    OTHER,
    TICKET,
)

CONTROL, DATA = Channel
Arrived = tuple[Channel, Buffer]
Promise = Callable[[Link, Link, Terms], Awaitable[None]]


class MeshMember:
    """A admission with one invitation, and one dropped meanwhile."""

    removals = NOBODY
    refusal: NotAuthorised | None = None

    def __init__(self) -> None:
        self.known: tuple[bytes, ...] = (guest_psk(bytes(16)),)

    async def refresh(self) -> None:
        self.known = (TICKET.psk, *self.known)

    def guests(self) -> Iterator[bytes]:
        yield from self.known

    async def authorize(
        self, peer: NodeId, proof: Credential | TicketProof, purpose: Purpose, instance: int
    ) -> Credential:
        if self.refusal:
            raise self.refusal
        if isinstance(proof, Credential):
            check(proof, peer, MESH, NOW, NOBODY)
            return proof
        if not proof.proves(TICKET.secret):
            raise NotAuthorised("The ticket is not one of this node")
        return issue(HOST, FOUNDED, peer, proof.role)


class Wire:
    """A link whose incoming messages are set by the test."""

    peer_host = "192.0.2.7"

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: list[Arrived] = []
        self.limits: list[int | None] = []
        self.meddle: Callable[[Arrived], list[Arrived]] = lambda arrived: [arrived]
        """Maps an incoming message to the messages that are read."""
        self.send, self.close = link.send, link.close
        assert isinstance(link, ImmediateSender)
        self.offer = link.offer

    def limit_unread(self, size: int | None) -> None:
        self.limits.append(size)

    async def receive(self) -> Arrived:
        while not self._waiting:
            self._waiting = self.meddle(await self._link.receive())
        return self._waiting.pop(0)

    @property
    def statistics(self) -> LinkStatistics:
        return self._link.statistics


async def plain(shape: TrafficShape | None = None) -> tuple[Wire, Wire]:
    """Link two ends; the first dials."""
    transport = LoopbackTransport(shape)
    async with transport.listen("loopback:b") as listener:
        dialled = await transport.dial("loopback:b")
        return Wire(dialled), Wire(await anext(aiter(listener.links())))


def dial(
    link: Link, own: LocalIdentity = AS_MEMBER, expect: NodeId = HOST.node
) -> Awaitable[SecureLink]:
    return secure_dial(link, own, Purpose.MESH, expect=expect, now_s=NOW, removals=NOBODY)


def accept(link: Link, own: LocalIdentity = AS_HOST) -> Awaitable[SecureLink]:
    return secure_accept(link, own, MeshMember())


async def secured(
    shape: TrafficShape | None = None, own: LocalIdentity = AS_MEMBER
) -> tuple[SecureLink, SecureLink]:
    one, other = await plain(shape)
    dialled, accepted = await asyncio.gather(dial(one, own), accept(other))
    return dialled, accepted


async def test_a_link_tells_where_its_peer_is_if_the_transport_knows() -> None:
    for link in await secured():
        assert link.host == "192.0.2.7"

    transport = LoopbackTransport()
    async with transport.listen("loopback:c") as listener:
        here, there = await transport.dial("loopback:c"), await anext(aiter(listener.links()))
    for link in await asyncio.gather(dial(here), accept(there)):
        assert link.host == ""


async def ends(*attempts: Awaitable[SecureLink]) -> list[MeshError]:
    """Return the errors of attempts that all fail."""
    outcomes = await asyncio.gather(*attempts, return_exceptions=True)
    errors = [outcome for outcome in outcomes if isinstance(outcome, MeshError)]
    assert len(errors) == len(outcomes), outcomes
    return errors


async def is_closed(link: Wire) -> bool:
    try:
        await link.send([b"?"])
    except LinkLost:
        return True
    return False


@pytest.mark.parametrize("promise", links.PROMISES, ids=lambda promise: promise.__name__)
@pytest.mark.parametrize("dialer_first", [True, False])
async def test_a_secure_link_keeps_the_promise(promise: Promise, dialer_first: bool) -> None:
    one, other = await secured()
    terms = Terms(longest_bytes=MAX_SECURE_BYTES, settle_s=0.01)

    async with asyncio.timeout(60):
        await promise(*((one, other) if dialer_first else (other, one)), terms)


@pytest.mark.parametrize("promise", links.PROMISES, ids=lambda promise: promise.__name__)
def test_a_slow_secure_link_keeps_the_promise(promise: Promise) -> None:
    async def main() -> None:
        shape = TrafficShape(delay_s=0.05, jitter_s=0.2, bytes_per_s=12.5e6, loss=0.2, seed=1)
        one, other = await secured(shape)
        await promise(one, other, Terms(longest_bytes=2**20, settle_s=100))

    run_virtual(main())


async def test_both_ends_know_each_other() -> None:
    dialled, accepted = await secured()

    assert (dialled.peer, dialled.role, dialled.instance) == (HOST.node, Role.NODE, 7)
    assert (accepted.peer, accepted.role, accepted.instance) == (GUEST.node, Role.NODE, 3)
    assert (dialled.credential, accepted.credential) == (FOUNDED, MEMBER)
    assert dialled.purpose is accepted.purpose is Purpose.MESH
    assert dialled.granted is None


async def test_a_ticket_admits_and_issues_a_credential() -> None:
    dialled, accepted = await secured(own=AS_JOINER)

    assert dialled.granted is not None
    assert dialled.granted == accepted.credential
    assert check(dialled.granted, GUEST.node, MESH, NOW, NOBODY) is Role.NODE


@pytest.mark.parametrize(("own", "tickets"), [(AS_MEMBER, 1), (AS_JOINER, 2)])
async def test_tickets_are_read_for_guests_only(own: LocalIdentity, tickets: int) -> None:
    (one, other), member_node = await plain(), MeshMember()

    await asyncio.gather(dial(one, own), secure_accept(other, AS_HOST, member_node))

    assert len(member_node.known) == tickets


async def test_messages_are_encrypted() -> None:
    one, other = await plain()
    seen = bytearray()

    def look(arrived: Arrived) -> list[Arrived]:
        seen.extend(arrived[1])
        return [arrived]

    one.meddle = other.meddle = look
    dialled, accepted = await asyncio.gather(dial(one, AS_JOINER), accept(other))
    await dialled.send([b"a secret word"])
    await accepted.receive()

    secrets = (b"a secret word", MESH, TICKET.secret, HOST.node, GUEST.node, FOUNDED.salt)
    assert not any(secret in seen for secret in secrets)


async def test_an_unknown_peer_gets_no_byte() -> None:
    one, other = await plain()

    stranger, host = await ends(dial(one, AS_STRANGER), accept(other))

    assert isinstance(stranger, LinkLost)
    assert str(stranger) == "The peer closed the connection during the handshake"
    assert stranger.hint is not None
    assert isinstance(host, NotAuthorised)
    assert other.statistics.messages_sent == 0


@pytest.mark.parametrize(
    "own",
    [
        AS_MEMBER,
        replace(AS_MEMBER, proof=issue(HOST, FOUNDED, GUEST.node, Role.NODE, 1)),
        replace(AS_MEMBER, key=OTHER),
    ],
    ids=["removed", "expired", "of another"],
)
async def test_a_former_member_gets_no_byte(own: LocalIdentity) -> None:
    member_node = MeshMember()
    member_node.removals = {GUEST.node: remove(HOST, MESH, GUEST.node, NOW)}
    one, other = await plain()

    former, host = await ends(dial(one, own), secure_accept(other, AS_HOST, member_node))

    assert isinstance(former, HandshakeClosed)
    assert isinstance(host, NotAuthorised)
    assert other.statistics.messages_sent == 0


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (replace(AS_JOINER, proof=replace(TICKET, secret=bytes(16))), "not one of this node"),
        (AS_JOINER, "late"),
        (AS_MEMBER, "late"),
    ],
)
async def test_both_sides_get_the_reason_of_a_rejection(own: LocalIdentity, words: str) -> None:
    member_node = MeshMember()
    member_node.refusal = NotAuthorised("late") if words == "late" else None
    one, other = await plain()

    guest, host = await ends(dial(one, own), secure_accept(other, AS_HOST, member_node))

    assert type(guest) is type(host) is NotAuthorised
    assert words in str(guest) == str(host)
    assert await is_closed(one)
    assert await is_closed(other)


class Proven(Wire):
    """A link whose transport has authenticated the peer."""

    peer_key: bytes


@pytest.mark.parametrize("liar", ["dialer", "listener"])
async def test_a_peer_that_differs_from_the_transports_is_rejected(liar: str) -> None:
    transport = LoopbackTransport()
    async with transport.listen("loopback:b") as listener:
        dialled = Proven(await transport.dial("loopback:b"))
        accepted = Proven(await anext(aiter(listener.links())))
    dialled.peer_key = OTHER.node if liar == "listener" else AS_HOST.key.node
    accepted.peer_key = OTHER.node if liar == "dialer" else AS_MEMBER.key.node

    outcomes = await asyncio.gather(dial(dialled), accept(accepted), return_exceptions=True)

    who_notices = outcomes[0 if liar == "listener" else 1]
    assert isinstance(who_notices, NotAuthorised)
    assert "than the transport has authenticated" in str(who_notices)


async def test_another_node_than_expected_learns_nothing() -> None:
    one, other = await plain()

    guest, host = await ends(dial(one, expect=OTHER.node), accept(other))

    assert isinstance(guest, HandshakeClosed)
    assert isinstance(host, PeerFault)
    assert one.statistics.messages_sent == 1
    assert other.statistics.messages_sent == 0


def test_silence_ends_a_handshake() -> None:
    async def main() -> None:
        clock = asyncio.get_running_loop().time
        for side, most_s in ((dial, PRE_AUTH_S), (accept, FIRST_S)):
            link, _ = await plain()
            began = clock()

            (error,) = await ends(side(link))

            assert isinstance(error, LinkLost)
            assert clock() - began == most_s
            assert await is_closed(link)

    run_virtual(main())


@pytest.mark.parametrize("side", [dial, accept])
@pytest.mark.parametrize(
    ("message", "channel"),
    [
        (b"GET / HTTP/1.1", CONTROL),
        (bytes(PRE_AUTH_BYTES + 1), CONTROL),
        (b"", CONTROL),
        (b"", DATA),
    ],
)
async def test_a_protocol_violation_in_the_handshake_closes_the_link(
    side: Callable[[Link], Awaitable[SecureLink]], message: bytes, channel: Channel
) -> None:
    link, stranger = await plain()
    await stranger.send([message], channel)

    (error,) = await ends(side(link))

    assert isinstance(error, PeerFault)
    assert await is_closed(link)
    assert link.statistics.messages_sent == (side is dial)


async def test_a_cancelled_handshake_closes_its_link() -> None:
    for side in (dial, accept):
        link, _ = await plain()
        attempt = asyncio.ensure_future(side(link))
        await asyncio.sleep(0)

        attempt.cancel()
        await asyncio.wait([attempt])

        assert attempt.cancelled()
        assert await is_closed(link)


async def test_a_bug_while_a_link_is_accepted_closes_the_link() -> None:
    class Broken(MeshMember):
        async def authorize(self, *_: object) -> Credential:
            raise ZeroDivisionError

    one, other = await plain()
    guest, host = await asyncio.gather(
        dial(one), secure_accept(other, AS_HOST, Broken()), return_exceptions=True
    )

    assert isinstance(host, ZeroDivisionError)
    assert isinstance(guest, LinkLost)
    assert "closed the connection" not in str(guest)


async def test_only_unauthenticated_peers_are_limited() -> None:
    one, other = await plain()

    await asyncio.gather(dial(one), accept(other))

    assert one.limits == other.limits == [PRE_AUTH_BYTES, None]


async def test_data_that_overtakes_the_welcome_is_kept() -> None:
    one, other = await plain()
    held: list[Arrived] = []

    def overtake(arrived: Arrived) -> list[Arrived]:
        if one.statistics.messages_received == 2:  # the welcome
            held.append(arrived)
            return []
        return [arrived, *(held.pop() for _ in held[:])]

    one.meddle = overtake
    dialling = asyncio.ensure_future(dial(one))
    accepted = await accept(other)
    await accepted.send([b"early"])
    dialled = await dialling
    await accepted.send([b"later"])

    assert dialled.statistics.messages_received == 1
    assert [await dialled.receive() for _ in range(2)] == [(DATA, b"early"), (DATA, b"later")]
    assert dialled.statistics.bytes_received == 10


async def test_not_much_data_may_overtake_the_welcome() -> None:
    one, other = await plain()

    def flood(arrived: Arrived) -> list[Arrived]:
        if one.statistics.messages_received < 2:
            return [arrived]
        return [(DATA, bytes(MAX_MESSAGE_BYTES)), (DATA, b"+"), arrived]

    one.meddle = flood
    outcome, _ = await asyncio.gather(dial(one), accept(other), return_exceptions=True)

    assert isinstance(outcome, PeerFault)


async def test_only_some_messages_may_overtake_the_welcome_even_if_empty() -> None:
    one, other = await plain()

    def flood(arrived: Arrived) -> list[Arrived]:
        if one.statistics.messages_received < 2:
            return [arrived]
        return [*[(DATA, b"")] * (MAX_EARLY + 1), arrived]

    one.meddle = flood
    outcome, _ = await asyncio.gather(dial(one), accept(other), return_exceptions=True)

    assert isinstance(outcome, PeerFault)


async def test_a_closed_link_drops_what_came_early() -> None:
    one, other = await plain()
    one.meddle = lambda arrived: (
        [arrived] if one.statistics.messages_received < 2 else [(DATA, b"?"), arrived]
    )
    dialled, _ = await asyncio.gather(dial(one), accept(other))

    await dialled.close()

    with pytest.raises(LinkLost):
        await dialled.receive()


def change(message: Buffer) -> list[bytes]:
    return [bytes(message[:-1]) + bytes([message[-1] ^ 1])]


@pytest.mark.parametrize(
    "meddle",
    [
        change,
        lambda message: [bytes(message[:20])],
        lambda message: [bytes(message)] * 2,
        lambda message: [] if message[0] == 1 else [bytes(message)],
    ],
    ids=["changed", "cut", "repeated", "left out"],
)
@pytest.mark.parametrize("channel", Channel)
async def test_tampering_closes_the_link(
    meddle: Callable[[Buffer], list[bytes]], channel: Channel
) -> None:
    one, other = await plain()
    dialled, accepted = await asyncio.gather(dial(one), accept(other))
    other.meddle = lambda arrived: [(arrived[0], message) for message in meddle(arrived[1])]

    for number in range(3):
        await dialled.send([bytes([number]) * 20], channel)

    async def read_all() -> None:
        for _ in range(3):
            await accepted.receive()

    with pytest.raises(PeerFault):
        await read_all()
    for link in (accepted, dialled):
        with pytest.raises(LinkLost):
            await link.receive()


async def test_a_message_one_byte_too_long_is_refused() -> None:
    dialled, accepted = await secured()

    with pytest.raises(ValueError, match=f"{MAX_SECURE_BYTES + 1} B is longer"):
        await dialled.send([bytes(MAX_SECURE_BYTES), b"+"])

    await dialled.send([b"next"])
    assert await accepted.receive() == (DATA, b"next")


async def test_a_link_without_limits_is_made_secure_too() -> None:
    async with (transport := LoopbackTransport()).listen("loopback:b") as listener:
        one, other = await transport.dial("loopback:b"), await anext(aiter(listener.links()))

    dialled, accepted = await asyncio.gather(dial(one), accept(other))

    assert (dialled.peer, accepted.peer) == (HOST.node, GUEST.node)


async def test_a_message_of_another_channel_is_refused() -> None:
    one, other = await plain()
    dialled, accepted = await asyncio.gather(dial(one), accept(other))
    other.meddle = lambda arrived: [(CONTROL, arrived[1])]

    await dialled.send([b"data"], DATA)

    with pytest.raises(PeerFault, match="failed authentication"):
        await accepted.receive()


async def test_offers_keep_their_order_among_sends_and_refusals() -> None:
    dialled, accepted = await secured()
    chunk = bytes(2**21)
    assert all(dialled.offer([bytes([number])]) for number in range(5))
    assert dialled.offer([b"c"], Channel.CONTROL)
    while dialled.offer([chunk]):
        pass
    assert not dialled.offer([chunk])  # sealed, and skipped
    blocked = [asyncio.ensure_future(dialled.send([word + chunk])) for word in (b"1", b"2")]
    await asyncio.sleep(0)

    got, offers = [await accepted.receive()], []
    while not blocked[1].done():
        asyncio.get_running_loop().call_soon(lambda: offers.append(dialled.offer([b"overtakes"])))
        got.append(await accepted.receive())
        await asyncio.sleep(0)
    assert not any(offers[:-1])
    while not dialled.offer([b"last"]):
        got.append(await accepted.receive())
    while got[-1][1] != b"last":
        got.append(await accepted.receive())

    assert got[0] == (Channel.CONTROL, b"c")
    assert [message for _, message in got[1:6]] == [bytes([number]) for number in range(5)]
    words = [bytes(message[:1]) for _, message in got[6:] if message != chunk]
    assert words.index(b"1") < words.index(b"2") < words.index(b"l")
    assert b"o" not in words[: words.index(b"2")]


async def test_offers_leave_no_unconfirmed_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cipher, "MAX_DOUBTFUL", 8)
    dialled, accepted = await secured()

    for number in range(20):
        assert dialled.offer([number.to_bytes(4)])
        assert await accepted.receive() == (Channel.DATA, number.to_bytes(4))


async def test_a_link_that_takes_no_offers_is_offered_nothing() -> None:
    dialled, _ = await secured()
    dialled._immediate = None

    assert not dialled.offer([b"no"])
    with pytest.raises(ValueError, match="longer than"):
        dialled.offer([bytes(MAX_SECURE_BYTES), b"+"])


async def test_cancelled_sends_do_no_harm() -> None:
    dialled, accepted = await secured()
    chunk, turns = bytes(2**20), 40
    for _ in range(turns):
        sending = asyncio.ensure_future(dialled.send([chunk]))
        await asyncio.sleep(0)
        sending.cancel()
        await asyncio.wait([sending])

    last = asyncio.ensure_future(dialled.send([b"last"]))
    got = 0
    while (await accepted.receive())[1] != b"last":
        got += 1

    await last
    assert 0 < got < turns


async def test_a_send_cancelled_behind_another_does_no_harm() -> None:
    dialled, accepted = await secured()
    sends = [asyncio.ensure_future(dialled.send([bytes([n]) * 2**20])) for n in range(16)]
    await asyncio.sleep(0)
    blocked = sum(not send.done() for send in sends)
    await accepted.receive()  # unblocks the first sender
    await asyncio.sleep(0)

    for send in sends[1 - blocked :]:
        send.cancel()
    last = asyncio.ensure_future(dialled.send([b"last"]))

    got = [(await accepted.receive())[1][0] for _ in range(16 - blocked + 1)]
    await last
    assert got == [*range(1, 16 - blocked + 1), ord("l")]
