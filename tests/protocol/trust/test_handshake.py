"""The handshake: published vectors, and one error for every violation."""

import base64
import hmac
import json
from dataclasses import replace
from typing import Any

import pytest

from meshllm.errors import MeshError, NotAuthorised, PeerFault
from meshllm.names import MeshId, NodeId
from meshllm.protocol.session.messages import PROTOCOL_VERSION
from meshllm.protocol.trust.cipher import REKEY_MESSAGES, Seal
from meshllm.protocol.trust.credential import (
    Credential,
    Removal,
    Removals,
    Role,
    founder_credential,
    issue,
    remove,
)
from meshllm.protocol.trust.handshake import (
    ALL_FEATURES,
    MAX_REFUSAL,
    PRE_AUTH_BYTES,
    Established,
    Features,
    HandshakeDialer,
    HandshakeListener,
    HandshakeState,
    LocalIdentity,
    Purpose,
    UnknownClaim,
)
from meshllm.protocol.trust.identity import NodeKey
from meshllm.protocol.trust.ticket import TicketProof, guest_psk
from meshllm.protocol.trust.transcript import (
    HELLO_BYTES,
    VERSION,
    OtherVersion,
    Transcript,
)
from tests.bench.handshake import fuzz
from tests.builders.handshakes import (
    AS_HOST,
    AS_JOINER,
    AS_MEMBER,
    AS_STRANGER,
    FOUNDED,
    FRESH_DIALER,
    FRESH_LISTENER,
    GUEST,
    HOST,
    MEMBER,
    MESH,
    NOW,
    OTHER,
    OTHER_FRESH,
    TICKET,
    asked,
    known,
    make_dialer,
    make_listener,
    said,
)
from tests.protocol import handshake_vectors as vectors

PUBLISHED = json.loads(vectors.PATH.read_text())
LOW_ORDER = (  # Curve25519 points with all-zero shared secrets (RFC 7748, 6.1; cr.yp.to/ecdh)
    bytes(32),
    bytes([1]) + bytes(31),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    bytes.fromhex("ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
    bytes.fromhex("edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
    bytes.fromhex("eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
)


class Talk:
    """A handshake advanced by ``until`` messages."""

    def __init__(
        self, own: LocalIdentity = AS_MEMBER, host: LocalIdentity = AS_HOST, until: int = 4
    ) -> None:
        self.dialer = make_dialer(own)
        self.listener = make_listener(host, guests=(TICKET.psk, MESH))
        self.messages = [said(self.dialer.start())]
        if until > 1:
            self.messages.append(said(self.listener.receive(self.messages[0])))
        if until > 2:
            self.messages.append(said(self.dialer.receive(self.messages[1])))
        if until > 3:
            self.judged = asked(self.listener.receive(self.messages[2]))

    def admit(self, credential: Credential = MEMBER) -> tuple[Established, Established]:
        """Admit the dialer; return the result of each side."""
        welcome, at_listener = self.listener.admit(credential)
        self.messages.append(welcome.message)
        return known(self.dialer.receive(welcome.message)), at_listener


def expect_end(
    machine: HandshakeDialer | HandshakeListener, message: bytes, error: type[MeshError]
) -> str:
    """Expect an error, after which the machine ignores every message; return its text."""
    with pytest.raises(error) as caught:
        machine.receive(message)
    assert machine.state is HandshakeState.GONE
    assert machine.receive(message) == []
    return str(caught.value)


def test_the_published_vectors_match_the_reference_implementation() -> None:
    assert vectors.make() == PUBLISHED


@pytest.mark.parametrize("vector", PUBLISHED["talks"][:2], ids=lambda vector: vector["proof"])
def test_the_machines_reproduce_the_published_vectors(vector: dict[str, Any]) -> None:
    talk = Talk(AS_JOINER if vector["proof"] == "ticket" else AS_MEMBER)

    at_dialer, at_listener = talk.admit()

    assert [message.hex() for message in talk.messages] == vector["messages"]
    keys = [key.hex() for key in (*at_listener.keys.outgoing, *at_dialer.keys.outgoing)]
    assert keys == [link["key"] for link in vector["links"].values()]
    assert at_dialer.keys.incoming == at_listener.keys.outgoing
    assert at_dialer.keys.outgoing == at_listener.keys.incoming


def test_a_refusal_is_as_published() -> None:
    talk = Talk(AS_JOINER)

    refusal = talk.listener.refuse(vectors.REFUSAL)

    assert refusal.message.hex() == PUBLISHED["talks"][2]["messages"][3]
    assert expect_end(talk.dialer, refusal.message, NotAuthorised) == vectors.REFUSAL
    assert talk.listener.receive(b"?") == []


@pytest.mark.no_cover
@pytest.mark.parametrize("number", [0, REKEY_MESSAGES])
def test_links_seal_as_published(number: int) -> None:
    for link in PUBLISHED["talks"][0]["links"].values():
        seal = Seal(bytes.fromhex(link["key"]))
        for _ in range(number):
            seal.seal([])
            seal.sent()

        head, body = seal.seal([b"hidden ", b"state"])

        assert (head + body).hex() == link[f"sealed {number}"]


def test_both_sides_say_how_far_they_are() -> None:
    talks = [Talk(until=messages) for messages in range(1, 5)]
    pairs = [(talk.dialer.state, talk.listener.state) for talk in talks]

    assert pairs == [
        (HandshakeState.HELLO_SENT, HandshakeState.START),
        (HandshakeState.HELLO_SENT, HandshakeState.ANSWERED),
        (HandshakeState.PROVEN, HandshakeState.ANSWERED),
        (HandshakeState.PROVEN, HandshakeState.JUDGING),
    ]


def test_a_listener_that_decides_takes_no_message() -> None:
    text = expect_end(Talk().listener, b"again", PeerFault)

    assert text == "Message of 5 bytes while the decision is pending"


def test_both_sides_are_authenticated() -> None:
    talk = Talk()

    at_dialer, at_listener = talk.admit()

    assert (at_dialer.peer, at_dialer.instance, at_dialer.credential) == (HOST.node, 7, FOUNDED)
    assert at_dialer.role is Role.NODE
    assert (at_listener.peer, at_listener.instance) == (GUEST.node, 3)
    assert (at_listener.credential, at_listener.role) == (MEMBER, Role.NODE)
    assert at_dialer.purpose is at_listener.purpose is Purpose.MESH
    assert at_dialer.granted is at_listener.granted is None
    assert len({*at_dialer.keys.outgoing, *at_dialer.keys.incoming}) == 4


def test_a_ticket_is_exchanged_for_a_credential() -> None:
    talk = Talk(AS_JOINER)
    assert isinstance(talk.judged.proof, TicketProof)
    assert talk.judged.proof.proves(vectors.SECRET)
    assert not talk.judged.proof.proves(bytes(16))

    at_dialer, at_listener = talk.admit(MEMBER)

    assert at_dialer.granted == at_listener.granted == MEMBER


def test_a_ticket_proof_is_valid_in_one_handshake_only() -> None:
    proof = Talk(AS_JOINER).judged.proof
    other = Talk(replace(AS_JOINER, key=OTHER)).judged.proof
    assert isinstance(proof, TicketProof)
    assert isinstance(other, TicketProof)

    assert not replace(proof, context=other.context).proves(vectors.SECRET)
    assert not replace(proof, role=Role.CLIENT).proves(vectors.SECRET)


def test_a_stranger_receives_no_byte() -> None:
    first = said(make_dialer(AS_STRANGER).start())

    text = expect_end(make_listener(), first, NotAuthorised)

    assert text == "The dialer knows neither this mesh nor an open ticket"


def test_a_dialer_with_a_closed_ticket_is_a_stranger() -> None:
    first = said(make_dialer(AS_JOINER).start())
    others = [guest_psk(bytes([number]) * 16) for number in range(256)]

    for guests in ((), others):
        assert "nor an open ticket" in expect_end(
            make_listener(guests=guests), first, NotAuthorised
        )


def test_open_tickets_are_iterated_once_and_only_for_non_members() -> None:
    looks = iter([TICKET.psk])

    make_listener(guests=looks).receive(said(make_dialer().start()))
    assert next(looks) == TICKET.psk  # not iterated for a member

    listener = make_listener(guests=iter([bytes(32), TICKET.psk]))
    assert listener.receive(said(make_dialer(AS_JOINER).start()))


def test_a_first_message_shows_whether_it_is_of_a_member() -> None:
    member, guest = make_dialer(), make_dialer(AS_JOINER)

    assert make_listener().is_of_member(said(member.start()))
    assert not make_listener().is_of_member(said(guest.start()))
    assert not make_listener().is_of_member(b"")


def test_the_welcome_reveals_the_mesh_but_the_ticket_does_not() -> None:
    talk = Talk(AS_JOINER)

    at_dialer, _ = talk.admit()

    digits = TICKET.encode()[8:].upper()
    assert bytes(MESH) not in base64.b32decode(digits + "=" * (-len(digits) % 8))
    assert at_dialer.credential.mesh == MESH
    assert at_dialer.granted is not None
    assert at_dialer.granted.mesh == MESH


def test_an_inviter_grants_a_membership_of_its_own_mesh_only() -> None:
    talk = Talk(AS_JOINER)
    other = issue(OTHER, founder_credential(OTHER, bytes(16)), GUEST.node, Role.NODE)

    welcome, _ = talk.listener.admit(other)

    assert "another mesh" in expect_end(talk.dialer, welcome.message, NotAuthorised)


def test_only_the_expected_node_can_read_who_dials() -> None:
    first = said(make_dialer(expect=OTHER.node).start())

    assert "was not sealed" in expect_end(make_listener(), first, PeerFault)


def test_a_dialer_sends_nothing_more_to_an_unexpected_node() -> None:
    dialer = make_dialer(expect=OTHER.node)
    transcript = host(dialer)

    second = transcript.hello + transcript.identify("listener", HOST, vectors.CAPABLE)

    assert "answered instead of" in expect_end(dialer, second, NotAuthorised)


def test_a_ticket_is_proven_to_its_inviter_only() -> None:
    impostor = make_listener(LocalIdentity(GUEST, 1, MEMBER))
    dialer = make_dialer(replace(AS_JOINER, key=OTHER))

    second = said(impostor.receive(said(dialer.start())))

    expect_end(dialer, second, NotAuthorised)


def test_a_dialer_may_expect_the_node_that_answers() -> None:
    dialer, listener = make_dialer(expect=HOST.node), make_listener()

    assert said(dialer.receive(said(listener.receive(said(dialer.start())))))


CLIENT = issue(HOST, FOUNDED, OTHER.node, Role.CLIENT)
EXPIRED = issue(HOST, FOUNDED, OTHER.node, Role.NODE, NOW)


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        (CLIENT, "is a client"),
        (EXPIRED, "expired"),
        (MEMBER, "shows the credential of"),
        (replace(FOUNDED, mesh=MeshId(bytes(16))), "another mesh"),
    ],
)
def test_a_dialer_refuses_an_invalid_listener(shown: Credential, words: str) -> None:
    dialer = make_dialer(expect=OTHER.node)
    transcript = host(dialer, OTHER)
    second = transcript.hello + transcript.identify("listener", OTHER, vectors.CAPABLE)
    transcript.recognise("dialer", said(dialer.receive(second)))
    welcome = b"\1" + bytes(8) + len(shown.encode()).to_bytes(2, "little") + b"\0\0"

    answer = transcript.seal("listener", welcome + shown.encode())

    assert words in expect_end(dialer, answer, NotAuthorised)


REMOVAL = remove(HOST, MESH, GUEST.node, NOW)
OF_GUEST = issue(GUEST, MEMBER, OTHER.node, Role.NODE)


@pytest.mark.parametrize(
    ("own", "removals", "words"),
    [
        (AS_MEMBER, {GUEST.node: REMOVAL}, "is removed"),
        (LocalIdentity(OTHER, 1, OF_GUEST), {GUEST.node: REMOVAL}, "which was removed"),
        (LocalIdentity(OTHER, 1, MEMBER), {GUEST.node: REMOVAL}, "shows the credential of"),
        (LocalIdentity(OTHER, 1, MEMBER), {}, "shows the credential of"),
        (LocalIdentity(OTHER, 1, EXPIRED), {}, "expired"),
        (
            LocalIdentity(OTHER, 1, replace(founder_credential(OTHER, bytes(16)), mesh=MESH)),
            {},
            "another mesh",
        ),
    ],
)
def test_a_former_member_receives_no_byte(
    own: LocalIdentity, removals: Removals, words: str
) -> None:
    first = said(make_dialer(own).start())

    assert words in expect_end(make_listener(removals=removals), first, NotAuthorised)


def test_a_member_that_a_removal_spares_is_answered() -> None:
    spared = {GUEST.node: remove(HOST, MESH, GUEST.node, NOW, (OTHER.node,))}
    dialer = make_dialer(LocalIdentity(OTHER, 1, OF_GUEST))

    second = said(make_listener(removals=spared).receive(said(dialer.start())))

    assert said(dialer.receive(second))


def test_the_credential_of_another_is_of_no_use_to_who_knows_the_mesh() -> None:
    transcript = Transcript(MESH, FRESH_DIALER)
    shown = len(MEMBER.encode()).to_bytes(2, "little") + MEMBER.encode()
    forged = transcript.introduce(OTHER, HOST.node, shown)
    recorded = said(make_dialer(fresh=OTHER_FRESH).start())[HELLO_BYTES:-32]

    for introduction, error in ((forged, NotAuthorised), (recorded, PeerFault), (b"", PeerFault)):
        first = Transcript(MESH, FRESH_DIALER).first(introduction)
        expect_end(make_listener(), first, error)


REMOVED_HOST = remove(GUEST, MESH, HOST.node, NOW, (GUEST.node,))


def test_a_removed_listener_gets_no_byte() -> None:
    dialer = make_dialer(removals={HOST.node: REMOVED_HOST})

    with pytest.raises(NotAuthorised, match="is removed from the mesh"):
        dialer.start()

    assert dialer.state is HandshakeState.GONE
    assert dialer.receive(b"?") == []


def test_a_listener_that_is_removed_during_the_handshake_is_refused() -> None:
    removals = dict[NodeId, Removal]()
    dialer, listener = make_dialer(removals=removals), make_listener()
    listener.receive(said(dialer.receive(said(listener.receive(said(dialer.start()))))))

    removals[HOST.node] = REMOVED_HOST
    welcome, _ = listener.admit(MEMBER)

    assert "is removed" in expect_end(dialer, welcome.message, NotAuthorised)


@pytest.mark.parametrize(
    ("granted", "error", "words"),
    [
        (issue(HOST, FOUNDED, GUEST.node, Role.CLIENT), PeerFault, "admitted as a client"),
        (issue(HOST, FOUNDED, GUEST.node, Role.NODE, 1), NotAuthorised, "expired"),
        (CLIENT, NotAuthorised, "shows the credential of"),
    ],
)
def test_a_joiner_refuses_an_invalid_credential(
    granted: Credential, error: type[MeshError], words: str
) -> None:
    talk = Talk(AS_JOINER)

    welcome, _ = talk.listener.admit(granted)

    assert words in expect_end(talk.dialer, welcome.message, error)


def test_a_node_that_is_not_yet_a_member_cannot_listen() -> None:
    with pytest.raises(NotAuthorised, match="not yet a member"):
        make_listener(AS_JOINER)


def test_a_long_refusal_is_truncated_to_one_line() -> None:
    talk = Talk()

    refusal = talk.listener.refuse("no\nentry " + MAX_REFUSAL * "é")

    text = expect_end(talk.dialer, refusal.message, NotAuthorised)
    assert text.startswith("no entry é")
    assert len(text.encode()) <= MAX_REFUSAL + 3  # half a character becomes U+FFFD


@pytest.mark.parametrize("due", [1, 2, 3, 4])
def test_a_truncated_message_is_refused(due: int) -> None:
    whole = Talk(AS_JOINER)
    whole.admit()
    message = whole.messages[due - 1]

    for length in range(len(message)):
        expect_end(waiting_for(due), message[:length], PeerFault)
    expect_end(waiting_for(due), message + b"\0", NotAuthorised if due == 1 else PeerFault)


@pytest.mark.parametrize("due", [1, 2, 3, 4])
def test_an_altered_message_is_refused(due: int) -> None:
    whole = Talk(AS_JOINER)
    whole.admit()

    for place in range(len(whole.messages[due - 1])):
        message = bytearray(whole.messages[due - 1])
        message[place] ^= 1 << place % 8
        error = NotAuthorised if due == 1 and place > 0 else PeerFault
        expect_end(waiting_for(due), bytes(message), error)


def waiting_for(due: int) -> HandshakeDialer | HandshakeListener:
    """Return the machine that expects the message of this number."""
    if due == 1:
        return make_listener()
    talk = Talk(AS_JOINER, until=due - 1)
    return talk.listener if due == 3 else talk.dialer


@pytest.mark.parametrize("version", [0, 1, 2, 4])
def test_another_version_is_refused_with_a_hint(version: int) -> None:
    talk = Talk(until=2)

    machines: tuple[HandshakeDialer | HandshakeListener, ...] = (make_listener(), talk.dialer)
    for machine, message in zip(machines, talk.messages, strict=True):
        with pytest.raises(PeerFault, match=f"version `0{version}`, this node `03`") as caught:
            machine.receive(bytes([version]) + message[1:])
        assert caught.value.hint is not None


@pytest.mark.parametrize("due", [2, 3, 4])
def test_a_reflected_message_is_refused(due: int) -> None:
    talk = Talk(until=due - 1)
    machine = talk.listener if due == 3 else talk.dialer

    expect_end(machine, talk.messages[-1], PeerFault)


def test_a_replayed_dialer_is_refused() -> None:
    talk = Talk()
    listener = make_listener(fresh=OTHER_FRESH)

    answer = said(listener.receive(talk.messages[0]))

    assert len(answer) < len(talk.messages[0])  # a member's; nothing is amplified
    expect_end(listener, talk.messages[2], PeerFault)


def test_a_replayed_listener_is_refused() -> None:
    talk = Talk()
    dialer = make_dialer(fresh=OTHER_FRESH)
    dialer.start()

    expect_end(dialer, talk.messages[1], PeerFault)


def test_two_handshakes_cannot_be_spliced() -> None:
    one, listener = Talk(until=2), make_listener(fresh=OTHER_FRESH)
    second = said(listener.receive(one.messages[0]))

    third = said(one.dialer.receive(second))  # from another listener of the same node

    expect_end(one.listener, third, PeerFault)


def test_the_last_message_of_another_handshake_is_refused() -> None:
    one, other = Talk(), Talk(AS_JOINER)

    refusal = other.listener.refuse("no")

    expect_end(one.dialer, refusal.message, PeerFault)


@pytest.mark.parametrize("point", LOW_ORDER, ids=lambda point: point.hex()[:8])
def test_a_low_order_point_is_refused(point: bytes) -> None:
    dialer, forger = make_dialer(), Transcript(MESH, OTHER_FRESH)
    dialer.start()
    forger.hello = forger.hello[:1] + point + forger.hello[33:]

    assert "low-order" in expect_end(make_listener(), forger.first(), PeerFault)
    assert "low-order" in expect_end(dialer, forger.hello + bytes(112), PeerFault)


def insider(own: LocalIdentity = AS_MEMBER) -> tuple[HandshakeListener, Transcript]:
    """Return a listener, and the transcript of a dialer that it answers."""
    listener, transcript = make_listener(), Transcript(own.psk, FRESH_DIALER)
    first = said(make_dialer(own).start())
    transcript.add(first)
    second = said(listener.receive(first))
    transcript.agree(transcript.add(second[:HELLO_BYTES]))
    transcript.recognise("listener", second[HELLO_BYTES:])
    return listener, transcript


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        (b"", "Claim of 0 bytes"),
        (b"\1" + bytes(17), "Proof of a ticket of 0 bytes"),
        (b"\1" + bytes(17) + bytes(32), "Proof of a ticket of 32 bytes"),
    ],
)
def test_a_malformed_claim_is_refused(claim: bytes, words: str) -> None:
    listener, transcript = insider(AS_JOINER)

    assert words in expect_end(listener, transcript.identify("dialer", GUEST, claim), PeerFault)


@pytest.mark.parametrize(
    ("own", "claim", "what"),
    [
        (AS_MEMBER, b"\x09" + bytes(17), "Purpose 9 of a link"),
        (AS_JOINER, b"\x09" + bytes(17), "Purpose 9 of a link"),
        (AS_JOINER, b"\1" + bytes(17) + b"\2" + bytes(32), "Role 2 of a ticket"),
    ],
    ids=["purpose", "purpose of a guest", "role"],
)
def test_what_only_a_later_version_knows_is_refused_with_the_reason(
    own: LocalIdentity, claim: bytes, what: str
) -> None:
    listener, transcript = insider(own)

    with pytest.raises(UnknownClaim) as refused:
        listener.receive(transcript.identify("dialer", GUEST, claim))

    reason = f"{what} is unknown to the dialled node; a newer version of meshllm may know it"
    assert str(refused.value) == reason
    assert transcript.unseal("listener", refused.value.answer) == b"\0" + reason.encode()
    assert listener.state is HandshakeState.GONE
    assert listener.receive(b"?") == []


@pytest.mark.parametrize("payload", [b"", b"\0\0", b"\x10\0" + bytes(16)])
def test_a_malformed_introduction_is_refused(payload: bytes) -> None:
    transcript = Transcript(MESH, FRESH_DIALER)

    first = transcript.first(transcript.introduce(GUEST, HOST.node, payload))

    assert "Credential of" in expect_end(make_listener(), first, PeerFault)


def test_a_member_introduces_and_identifies_itself_alike() -> None:
    listener, transcript = insider()

    third = transcript.identify("dialer", OTHER, b"\1" + bytes(17))

    assert "introduced itself as" in expect_end(listener, third, PeerFault)


def test_a_claim_to_be_another_node_is_refused() -> None:
    listener, transcript = insider()
    honest = Transcript(MESH, FRESH_LISTENER)
    words = OTHER.node + GUEST.sign(honest.digest) + bytes(10)

    assert "did not sign" in expect_end(listener, transcript.seal("dialer", words), PeerFault)


def test_an_identity_too_short_is_refused() -> None:
    listener, transcript = insider()

    assert "expected 96" in expect_end(listener, transcript.seal("dialer", b"me"), PeerFault)


def host(dialer: HandshakeDialer, key: NodeKey = HOST) -> Transcript:
    """Return the transcript of a listener that knows the mesh, after the first message."""
    transcript, first = Transcript(MESH, FRESH_LISTENER), said(dialer.start())
    transcript.check_first(first)
    transcript.agree(first[:HELLO_BYTES])
    if key is not HOST:
        assert transcript.introduced(first, key)[0] == GUEST.node
    transcript.add(transcript.hello)
    return transcript


def test_a_listener_without_capabilities_is_refused() -> None:
    dialer = make_dialer()
    transcript = host(dialer)

    second = transcript.hello + transcript.identify("listener", HOST, b"more")

    assert "Capabilities of 4 bytes" in expect_end(dialer, second, PeerFault)


def test_appended_fields_are_ignored_in_every_message() -> None:
    dialer = make_dialer()
    transcript = host(dialer)
    second = transcript.hello + transcript.identify("listener", HOST, b"\5" + bytes(8) + b"later")
    _, claim = transcript.recognise("dialer", said(dialer.receive(second)))
    shown = FOUNDED.encode()
    welcome = b"\1" + bytes(8) + len(shown).to_bytes(2, "little") + b"\0\0" + shown + b"later"

    established = known(dialer.receive(transcript.seal("listener", welcome)))
    listener, other = insider()
    judged = asked(listener.receive(other.identify("dialer", GUEST, claim + b"later")))

    assert established.features == Features(0)
    assert (judged.peer, judged.proof) == (GUEST.node, MEMBER)


def test_each_side_learns_the_features_of_the_other() -> None:
    later = Features(1 << 40)
    talk = Talk(replace(AS_MEMBER, features=Features.INT8 | later), replace(AS_HOST))

    at_dialer, at_listener = talk.admit()

    assert at_dialer.features == ALL_FEATURES
    assert at_listener.features == Features.INT8 | later
    assert not at_listener.features & Features.HELP


def test_our_version_is_sent_to_members_and_not_to_strangers() -> None:
    later = bytes([VERSION + 1]) + said(make_dialer().start())[1:HELLO_BYTES] + b"more"
    mac = hmac.digest(MESH, b"meshllm dialer hail 1" + later, "sha256")

    with pytest.raises(OtherVersion) as known_one:
        make_listener().receive(later + mac)
    with pytest.raises(OtherVersion) as stranger:
        make_listener().receive(later + bytes(32))
    with pytest.raises(OtherVersion) as former:
        make_listener(removals={OTHER.node: REMOVAL}).receive(later + mac)
    by_ticket = hmac.digest(TICKET.psk, b"meshllm dialer hail 1" + later, "sha256")
    with pytest.raises(OtherVersion) as guest:
        make_listener(removals={OTHER.node: REMOVAL}).receive(later + by_ticket)
    dialer = make_dialer()
    dialer.start()

    assert stranger.value.answer == former.value.answer == b""
    assert guest.value.answer == bytes([VERSION])
    assert known_one.value.answer == bytes([VERSION])
    assert "version `01`, this node `03`" in expect_end(dialer, b"\1", PeerFault)


def test_there_is_one_major_version() -> None:
    assert VERSION == PROTOCOL_VERSION


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "of 0 bytes is not a welcome"),
        (b"\2" + bytes(20), "not a welcome"),
        (b"\1" + bytes(11), "not a welcome"),
        (b"\1" + bytes(12), "Credential of 0 bytes"),
        (b"\1" + bytes(8) + b"\x20\0\4\0" + FOUNDED.encode() + b"more", "4 trailing bytes"),
    ],
)
def test_a_malformed_welcome_is_refused(answer: bytes, words: str) -> None:
    dialer = make_dialer()
    transcript = host(dialer)
    second = transcript.hello + transcript.identify("listener", HOST, vectors.CAPABLE)
    transcript.recognise("dialer", said(dialer.receive(second)))

    assert words in expect_end(dialer, transcript.seal("listener", answer), PeerFault)


def test_an_unexpected_message_is_refused() -> None:
    expect_end(make_dialer(), b"early", PeerFault)
    expect_end(Talk().listener, b"more", PeerFault)


def test_messages_after_completion_are_ignored() -> None:
    talk = Talk()
    talk.admit()

    assert talk.dialer.receive(b"more") == talk.listener.receive(b"more") == []
    assert talk.dialer.state is talk.listener.state is HandshakeState.OPEN


def test_the_size_of_a_handshake_is_limited() -> None:
    talk = Talk(until=2)
    room = PRE_AUTH_BYTES - len(talk.messages[0])

    assert "was not sealed" in expect_end(Talk(until=2).listener, bytes(room), PeerFault)
    assert "more than 65536" in expect_end(talk.listener, bytes(room + 1), PeerFault)


def test_secrets_are_not_in_the_repr() -> None:
    at_dialer, _ = Talk(AS_JOINER).admit()

    shown = f"{at_dialer} {AS_JOINER} {FRESH_DIALER}"

    for secret in (*at_dialer.keys.outgoing, vectors.SECRET, FRESH_DIALER.ephemeral):
        assert repr(secret) not in shown


@pytest.mark.no_cover
@pytest.mark.property
def test_mutated_handshakes_end_in_one_refusal() -> None:
    outcomes = fuzz(3000, seed=1)

    assert sum(outcomes.values()) == 3000
