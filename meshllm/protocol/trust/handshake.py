"""The handshake: mutual authentication and key exchange in the first four messages of a link.

Theory of operation
-------------------
The dialer sends first; after the fourth message both sides hold the session keys.

::

    1  D > L   version, X25519 key, nonce, [node, signature, credential], MAC under the PSK
    2  L > D   version, X25519 key, nonce, {node, signature, capabilities}
    3  D > L   {node, signature, purpose, instance, capabilities, proof of a ticket}
    4  L > D   {refusal} or {welcome: instance, credential, and a new one for a ticket}

    Dialer    START -start-> HELLO_SENT -2-> PROVEN -4-> OPEN
    Listener  START -1-> ANSWERED -3-> JUDGING -admit-> OPEN
              any state but OPEN -fault, refusal or unexpected message-> GONE

The pre-shared key (PSK) of members is the mesh id. That of a joiner is derived from the secret of
its ticket; the inviter knows it as long as the ticket is open.

``[]`` is sent by members only, and only the listener that the dialer expects can read it: it is
sealed under the X25519 secret of the dialer's fresh key and the listener's node id, and the
signature covers both. A removed member knows the mesh id and everybody's credential, but it has the
key of nobody else, so it receives no byte. No secret is shared that a removal would have to renew:
a member that was away while others were removed needs nothing new to return, and neither removals
at the same time nor restarts leave anything to agree on. The price: a thief of the listener's key
who recorded first messages learns who dialled it, though nothing that they said.

``{}`` is sealed with AES-256-GCM under a single-use key: HKDF-SHA256 of the X25519 secret and the
PSK, salted with the transcript hash and labelled with the sender. The Ed25519 signatures cover this
hash and label too. A message that is replayed, reflected, taken from another link or sent in reply
to an altered one does not decrypt and is a fault. The session keys cover all four messages. A
low-order X25519 point is refused (RFC 7748, 6.1).

The first byte is the major version. A dialer that knows the PSK but speaks another version receives
ours, and both sides report the mismatch. Once a member was removed, only holders of tickets receive
it, since the mesh id proves nothing then. Within a major version, each side declares its minor
version and `Features`, encrypted and signed, so that a man in the middle cannot remove any. A side
never receives what it did not declare, and ignores appended fields that it does not know. A purpose
or role that a later version has added is refused like a ticket, with the reason: `UnknownClaim`.

What each side reveals, in this order. A dialer receives no byte, and the listener closes the link,
if it has no valid PSK, such as one with an expired ticket, or that of members and no membership.
One that replays the first message of another receives a reply that it cannot decrypt. A dialer that
is a member or holds an open ticket learns the listener's node id. The listener learns that of a
joiner, and its proof, only after it proved to be its inviter. The proof of a ticket is a MAC under
its secret over this handshake and the joiner's key, and is useless elsewhere. A joiner learns the
mesh id with the welcome.

The driver of the listener decides on the proof (`AuthorizeDialer`) and calls `admit` or `refuse`;
the text of a refusal is sent encrypted. The dialer itself checks the listener, which must be a
member in the role of a node. That comes after the listener has opened the link on its side, so one
that is known to be removed is sent nothing: it would take the link for one of a member until the
dialer closes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum, IntFlag, auto
from struct import Struct

from meshllm.errors import NotAuthorised, PeerFault
from meshllm.names import MeshId, NodeId, short
from meshllm.protocol.session.messages import PROTOCOL_MINOR
from meshllm.protocol.trust.credential import Credential, Removals, Role, check, refuse_removed
from meshllm.protocol.trust.identity import NodeKey
from meshllm.protocol.trust.ticket import Ticket, TicketProof
from meshllm.protocol.trust.transcript import HELLO_BYTES, HandshakeRandomness, Keys, Transcript

PRE_AUTH_BYTES = 64 * 1024  # received by one side; an honest handshake takes less than 8 KiB
FIRST_S = 2.0  # until the first message, which a dialer sends at once
PRE_AUTH_S = 10.0  # three round trips of the slowest link, and a busy machine
MAX_REFUSAL = 512  # bytes of UTF-8; longer text is truncated

_CAPABLE = Struct("<B Q")  # minor version, features
_SHOWN = Struct("<H")  # length of a credential
_CLAIM = Struct("<B Q B Q")  # purpose, instance, capabilities; a proof follows if it is a guest
_TICKET = Struct("<B 32s")  # role, MAC
_ANSWER = Struct("<B Q H H")  # welcome, instance, lengths of a credential and of a new one
_ROLES = tuple(Role)
_REFUSED, _WELCOME = 0, 1


class Purpose(IntEnum):
    """What a link is for; the number is the code on the wire."""

    MESH = 1
    """Gossip and requests."""
    RING = 2
    """Hidden states of one plan."""
    WEIGHTS = 3
    """Files of models."""
    TRAINING = 4
    """Batches through layers, and gradients back."""


class Features(IntFlag):
    """Optional parts of the protocol that a side supports; unknown bits are preserved."""

    HELP = auto()
    """Split LM head: the last rank sends its part of the logits to the entry."""
    INT8 = auto()
    """Hidden states quantised to 8 bits."""
    PACKED = auto()
    """Hidden states with lossless compression."""


ALL_FEATURES = ~Features(0)


class HandshakeState(Enum):
    """The progress of a handshake."""

    START = auto()
    HELLO_SENT = auto()
    PROVEN = auto()
    ANSWERED = auto()
    JUDGING = auto()
    OPEN = auto()
    GONE = auto()


_NEXT = {  # transition on a message; in START only a listener receives one
    HandshakeState.START: HandshakeState.ANSWERED,
    HandshakeState.ANSWERED: HandshakeState.JUDGING,
    HandshakeState.HELLO_SENT: HandshakeState.PROVEN,
    HandshakeState.PROVEN: HandshakeState.OPEN,
}
_ENDS = {HandshakeState.OPEN, HandshakeState.GONE}


class UnknownClaim(NotAuthorised):
    """A dialer claims what only a later version knows; only this link of the dialer ends."""

    def __init__(self, message: str, answer: bytes) -> None:
        super().__init__(message)
        self.answer = answer
        """The last message to the dialer, which has the reason."""


@dataclass(frozen=True, slots=True)
class LocalIdentity:
    """What this node presents in a handshake."""

    key: NodeKey
    instance: int
    """Counts the starts of this node, to tell its processes apart."""
    proof: Credential | Ticket
    """Its membership, or the ticket to join with; a listener needs a credential."""
    features: Features = ALL_FEATURES
    """The features that it supports."""

    @property
    def psk(self) -> bytes:
        """The pre-shared key of its handshakes."""
        return self.proof.psk if isinstance(self.proof, Ticket) else self.proof.mesh


@dataclass(frozen=True, slots=True)
class SendHandshake:
    """Send a message to the peer."""

    message: bytes


@dataclass(frozen=True, slots=True)
class AuthorizeDialer:
    """Decide on the dialer, then call `HandshakeListener.admit` or `HandshakeListener.refuse`."""

    peer: NodeId
    proof: Credential | TicketProof
    instance: int
    purpose: Purpose
    features: Features


@dataclass(frozen=True, slots=True)
class Established:
    """The handshake is complete: both sides are authenticated."""

    peer: NodeId
    role: Role
    instance: int
    purpose: Purpose
    credential: Credential
    """The peer's membership."""
    granted: Credential | None
    """The dialer's new credential, if it joined with a ticket."""
    features: Features
    """The features that the peer supports."""
    keys: Keys


class HandshakeDialer:
    """The side that opened the link; ``now_s`` is the time of day in seconds since 1970."""

    def __init__(
        self,
        own: LocalIdentity,
        purpose: Purpose,
        fresh: HandshakeRandomness,
        *,
        expect: NodeId,
        now_s: float,
        removals: Removals,
    ) -> None:
        self.state = HandshakeState.START
        self._own = own
        self._purpose = purpose
        self._expect = own.proof.inviter if isinstance(own.proof, Ticket) else expect
        self._now_s = now_s
        self._removals = removals
        self._transcript = Transcript(own.psk, fresh)
        self._received = 0
        self._peer = NodeId(b"")
        self._features = Features(0)

    def start(self) -> list[SendHandshake | Established]:
        """Return the first message, once connected.

        Raises:
            NotAuthorised: the listener was removed, perhaps while this node connected.
        """
        self.state = HandshakeState.GONE
        refuse_removed(self._expect, self._removals)
        self.state = HandshakeState.HELLO_SENT
        own, introduction = self._own, b""
        if isinstance(own.proof, Credential):
            shown = own.proof.encode()
            payload = _SHOWN.pack(len(shown)) + shown
            introduction = self._transcript.introduce(own.key, self._expect, payload)
        return [SendHandshake(self._transcript.first(introduction))]

    def receive(self, message: bytes) -> list[SendHandshake | Established]:
        """Handle a message of the listener.

        Raises:
            PeerFault: it violates the protocol.
            NotAuthorised: the listener is an unexpected node or not a member, or it refused us.
        """
        if self.state in _ENDS:
            return []
        state, self.state = self.state, HandshakeState.GONE
        self._received = _count(self._received, message)
        if state is HandshakeState.START:
            raise PeerFault(f"Message of {len(message)} bytes before the dialer started")
        read = self._identify if state is HandshakeState.HELLO_SENT else self._complete
        action = read(message)
        self.state = _NEXT[state]
        return [action]

    def _identify(self, message: bytes) -> SendHandshake:
        transcript = self._transcript
        transcript.agree(transcript.add(message[:HELLO_BYTES]))
        self._peer, payload = transcript.recognise("listener", message[HELLO_BYTES:])
        if len(payload) < _CAPABLE.size:
            raise PeerFault(f"Capabilities of {len(payload)} bytes; expected {_CAPABLE.size}")
        self._features = Features(_CAPABLE.unpack_from(payload)[1])
        if self._expect != self._peer:
            raise NotAuthorised(
                f"Node `{short(self._peer)}` answered instead of node `{short(self._expect)}`"
            )
        capable = PROTOCOL_MINOR, self._own.features
        payload = _CLAIM.pack(self._purpose, self._own.instance, *capable) + self._proof()
        return SendHandshake(transcript.identify("dialer", self._own.key, payload))

    def _proof(self) -> bytes:
        if isinstance(self._own.proof, Credential):
            return b""  # shown in the first message
        proof = self._own.proof.prove(self._transcript.digest + self._own.key.node)
        return _TICKET.pack(_ROLES.index(proof.role), proof.mac)

    def _complete(self, message: bytes) -> Established:
        answer = self._transcript.unseal("listener", message)
        if answer[:1] == bytes([_REFUSED]):
            raise NotAuthorised(
                " ".join(answer[1 : 1 + MAX_REFUSAL].decode(errors="replace").split())
            )
        if len(answer) < _ANSWER.size or answer[0] != _WELCOME:
            raise PeerFault(f"Answer of {len(answer)} bytes is not a welcome")
        _, instance, length, new = _ANSWER.unpack_from(answer)
        shown, rest = answer[_ANSWER.size :][:length], answer[_ANSWER.size :][length:]
        credential = Credential.decode(shown)
        proof = self._own.proof
        mesh = proof.mesh if isinstance(proof, Credential) else credential.mesh
        role = self._check(credential, self._peer, mesh)
        granted = self._granted(rest[:new], mesh)
        if role is not Role.NODE:
            raise NotAuthorised(f"Node `{short(self._peer)}` is a client and cannot admit a peer")
        keys = self._transcript.keys("dialer", "listener")
        return Established(
            self._peer, role, instance, self._purpose, credential, granted, self._features, keys
        )

    def _granted(self, encoded: bytes, mesh: MeshId) -> Credential | None:
        if isinstance(self._own.proof, Credential):
            if encoded:
                raise PeerFault(f"Welcome with {len(encoded)} trailing bytes")
            return None
        granted = Credential.decode(encoded)
        role = self._check(granted, self._own.key.node, mesh)
        if role is not self._own.proof.role:
            raise PeerFault(f"Invited as a {self._own.proof.role}, admitted as a {role}")
        return granted

    def _check(self, credential: Credential, node: NodeId, mesh: MeshId) -> Role:
        return check(credential, node, mesh, self._now_s, self._removals)


class HandshakeListener:
    """The side that accepted the link.

    ``guests`` are the pre-shared keys of the open tickets; it is iterated once, and only if the
    dialer does not use the mesh id. ``now_s`` is the time of day in seconds since 1970.
    """

    def __init__(
        self,
        own: LocalIdentity,
        fresh: HandshakeRandomness,
        guests: Iterable[bytes],
        *,
        now_s: float,
        removals: Removals,
    ) -> None:
        self.state = HandshakeState.START
        if not isinstance(own.proof, Credential):
            raise NotAuthorised("A node that is not yet a member cannot admit a peer")
        self._own = own
        self._credential = own.proof
        self._guests = guests
        self._now_s = now_s
        self._removals = removals
        self._member: tuple[NodeId, Credential] | None = None
        self._transcript = Transcript(own.psk, fresh)
        self._received = 0
        self._judged: AuthorizeDialer | None = None

    def is_of_member(self, message: bytes) -> bool:
        """Return whether a first message was made with the mesh id; else `guests` are needed."""
        return self._transcript.is_ours(message)

    def receive(self, message: bytes) -> list[SendHandshake | AuthorizeDialer]:
        """Handle a message of the dialer.

        Raises:
            PeerFault: it violates the protocol.
            UnknownClaim: see there; its ``answer`` is yet to be sent.
            NotAuthorised: the dialer is not a member and knows no open ticket.
        """
        if self.state in _ENDS:
            return []
        state, self.state = self.state, HandshakeState.GONE
        self._received = _count(self._received, message)
        if state is HandshakeState.JUDGING:
            raise PeerFault(f"Message of {len(message)} bytes while the decision is pending")
        action = self._answer(message) if state is HandshakeState.START else self._claim(message)
        self.state = _NEXT[state]
        return [action]

    def admit(self, credential: Credential) -> tuple[SendHandshake, Established]:
        """Admit the dialer, with its own credential or a new one for its ticket."""
        judged, self._judged = self._judged, None
        assert judged is not None, "no decision is pending"
        self.state = HandshakeState.OPEN
        own = self._credential.encode()
        granted = None if isinstance(judged.proof, Credential) else credential
        new = b"" if granted is None else granted.encode()
        payload = _ANSWER.pack(_WELCOME, self._own.instance, len(own), len(new)) + own + new
        welcome = SendHandshake(self._transcript.seal("listener", payload))
        established = Established(
            judged.peer,
            credential.role,
            judged.instance,
            judged.purpose,
            credential,
            granted,
            judged.features,
            self._transcript.keys("listener", "dialer"),
        )
        return welcome, established

    def refuse(self, why: str) -> SendHandshake:
        """Refuse the dialer, and send it the reason, one line."""
        assert self._judged is not None, "no decision is pending"
        self._judged, self.state = None, HandshakeState.GONE
        return SendHandshake(self._refusal(why))

    def _refusal(self, why: str) -> bytes:
        line = why.encode(errors="ignore")[:MAX_REFUSAL]
        return self._transcript.seal("listener", bytes([_REFUSED]) + line)

    def _unknown(self, what: str) -> UnknownClaim:
        why = f"{what} is unknown to the dialled node; a newer version of meshllm may know it"
        return UnknownClaim(why, self._refusal(why))

    def _answer(self, message: bytes) -> SendHandshake:
        transcript = self._transcript
        is_quiet = bool(self._removals)
        is_member = transcript.check_first(message, self._guests, is_quiet=is_quiet)
        transcript.agree(message[:HELLO_BYTES])
        if is_member:
            self._member = self._introduced(message)
        hello = transcript.add(transcript.hello)
        payload = _CAPABLE.pack(PROTOCOL_MINOR, self._own.features)
        return SendHandshake(hello + transcript.identify("listener", self._own.key, payload))

    def _introduced(self, message: bytes) -> tuple[NodeId, Credential]:
        """Return who dials, a member; a refusal here sends nothing."""
        peer, payload = self._transcript.introduced(message, self._own.key)
        size = int.from_bytes(payload[: _SHOWN.size], "little")
        credential = Credential.decode(payload[_SHOWN.size :][:size])
        check(credential, peer, self._credential.mesh, self._now_s, self._removals)
        return peer, credential

    def _claim(self, message: bytes) -> AuthorizeDialer:
        digest = self._transcript.digest
        peer, payload = self._transcript.recognise("dialer", message)
        if len(payload) < _CLAIM.size:
            raise PeerFault(f"Claim of {len(payload)} bytes; expected {_CLAIM.size}")
        purpose, instance, _, features = _CLAIM.unpack_from(payload)
        if purpose not in set(Purpose):
            raise self._unknown(f"Purpose {purpose} of a link")
        shown = payload[_CLAIM.size :][: _TICKET.size]
        proof = self._shown_by(peer) or self._read_proof(shown, digest + peer)
        self._judged = AuthorizeDialer(peer, proof, instance, Purpose(purpose), Features(features))
        return self._judged

    def _shown_by(self, peer: NodeId) -> Credential | None:
        if self._member is None:
            return None
        introduced, credential = self._member
        if introduced != peer:
            raise PeerFault(f"Node `{short(peer)}` introduced itself as `{short(introduced)}`")
        return credential

    def _read_proof(self, shown: bytes, context: bytes) -> TicketProof:
        if len(shown) != _TICKET.size:
            raise PeerFault(f"Proof of a ticket of {len(shown)} bytes; expected {_TICKET.size}")
        role, mac = _TICKET.unpack(shown)
        if role >= len(_ROLES):
            raise self._unknown(f"Role {role} of a ticket")
        return TicketProof(_ROLES[role], mac, context)


def _count(received: int, message: bytes) -> int:
    if received + len(message) > PRE_AUTH_BYTES:
        raise PeerFault(f"Handshake of more than {PRE_AUTH_BYTES} bytes")
    return received + len(message)
