"""The handshake transcript, and the keys derived from it.

Each key is HKDF-SHA256 of the X25519 secret and a pre-shared key, salted with the hash of every
byte sent before, and labelled with its user: two sides with different transcripts share no key, and
no key or signature of one side is valid for the other.
"""

import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain
from struct import Struct
from typing import Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from meshllm.errors import NotAuthorised, PeerFault
from meshllm.names import NodeId
from meshllm.protocol.trust.cipher import derive
from meshllm.protocol.trust.identity import NodeKey, agreement_key, verify

VERSION = 3
"""The major version of the protocol, and the first byte that each side sends."""
CHANNELS = 2  # per link; each direction of each has its own key

Side = Literal["dialer", "listener"]

_HELLO = Struct("<B 32s 16s")  # version, X25519 key, nonce
_IDENTITY = Struct("<32s 64s")  # node, signature
_MAC_BYTES = 32
_ONCE = bytes(12)  # nonce of a single-use key
_INTRODUCTION = "introducing dialer"  # the label of its keys and signatures

HELLO_BYTES = _HELLO.size
FIRST_BYTES = HELLO_BYTES + _MAC_BYTES


@dataclass(frozen=True, slots=True)
class HandshakeRandomness:
    """Random bytes for one handshake; must never be reused."""

    ephemeral: bytes = field(repr=False)
    """The X25519 secret, 32 bytes."""
    nonce: bytes
    """16 bytes."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The session keys of a link, by channel."""

    outgoing: tuple[bytes, ...] = field(repr=False)
    incoming: tuple[bytes, ...] = field(repr=False)


class OtherVersion(PeerFault):
    """The peer speaks another major version of the protocol."""

    def __init__(self, version: str, *, is_known: bool) -> None:
        super().__init__(
            f"The peer speaks protocol version `{version}`, this node `{VERSION:02x}`",
            hint="update meshllm on the one with the lower version",
        )
        self.answer = bytes([VERSION]) if is_known else b""
        """The bytes that report our version to the peer; empty if it does not know the PSK."""


class Transcript:
    """One side's view of a handshake; the pre-shared key is the mesh id or that of a ticket."""

    def __init__(self, psk: bytes, fresh: HandshakeRandomness) -> None:
        self.digest = _first_digest(psk)
        """Hash of every byte sent so far by either side."""
        self._psk = psk
        self._secret = b""  # until both hellos are known
        self._private = X25519PrivateKey.from_private_bytes(fresh.ephemeral)
        public = self._private.public_key().public_bytes_raw()
        self.hello = _HELLO.pack(VERSION, public, fresh.nonce)

    def first(self, introduction: bytes = b"") -> bytes:
        """Return the first message: hello, introduction of a member, MAC under the PSK."""
        shown = self.hello + introduction
        return self.add(shown + _mac(self._psk, shown))

    def introduce(self, key: NodeKey, to: NodeId, payload: bytes) -> bytes:
        """Return the introduction of the node with this key, which only node ``to`` can read."""
        shared = _shared(self._private.exchange, agreement_key(to))
        digest = _bound(self._psk, self.hello, to)
        signature = key.sign(_signed(_INTRODUCTION, digest, key.node, payload))
        opened = _IDENTITY.pack(key.node, signature) + payload
        return AESGCM(_introducing(shared + self._psk, digest)).encrypt(_ONCE, opened, None)

    def introduced(self, first: bytes, key: NodeKey) -> tuple[NodeId, bytes]:
        """Verify the introduction in a first message; return the dialer and its payload."""
        hello, sealed = first[:HELLO_BYTES], first[HELLO_BYTES:-_MAC_BYTES]
        public = X25519PublicKey.from_public_bytes(_HELLO.unpack(hello)[1])
        digest = _bound(self._psk, hello, key.node)
        secret = _shared(key.agree, public) + self._psk
        opened = _open(_introducing(secret, digest), "dialer", sealed)
        return _recognise(_INTRODUCTION, digest, opened)

    def is_ours(self, message: bytes) -> bool:
        """Return whether the MAC of a first message was made with our own pre-shared key."""
        return _fits(self._psk, message[:-_MAC_BYTES], message[-_MAC_BYTES:])

    def check_first(
        self, message: bytes, others: Iterable[bytes] = (), *, is_quiet: bool = False
    ) -> bool:
        """Verify the first message, and adopt the pre-shared key that its MAC was made with.

        Return whether it is our own, that of members. If ``is_quiet``, a mismatch of versions is
        reported to the holders of ``others`` only.

        Raises:
            PeerFault: it is malformed.
            NotAuthorised: its MAC matches neither our own key nor any of ``others``.
        """
        # In every version the MAC comes last and covers everything before it.
        hello, mac = message[:-_MAC_BYTES], message[-_MAC_BYTES:]
        keys = (psk for psk in chain((self._psk,), others) if _fits(psk, hello, mac))
        psk = next(keys, None)
        is_member = psk == self._psk
        _check_version(message, is_known=psk is not None and not (is_member and is_quiet))
        if len(message) < FIRST_BYTES:
            raise PeerFault(f"First message of {len(message)} bytes; at least {FIRST_BYTES}")
        if psk is None:
            raise NotAuthorised("The dialer knows neither this mesh nor an open ticket")
        self._psk, self.digest = psk, _first_digest(psk)
        self.add(message)
        return is_member

    def add(self, message: bytes) -> bytes:
        """Add a message of either side to the transcript hash, and return it."""
        self.digest = sha256(self.digest + message).digest()
        return message

    def agree(self, hello: bytes) -> None:
        """Derive the X25519 secret; raise `PeerFault` for a short ``hello`` or low-order key."""
        _check_version(hello)
        if len(hello) < HELLO_BYTES:
            raise PeerFault(f"Hello of {len(hello)} bytes; expected {HELLO_BYTES}")
        _, public, _ = _HELLO.unpack(hello)
        shared = _shared(self._private.exchange, X25519PublicKey.from_public_bytes(public))
        self._secret = shared + self._psk

    def seal(self, side: Side, payload: bytes) -> bytes:
        """Encrypt the next message, sent by ``side``."""
        return self.add(AESGCM(self._key(side)).encrypt(_ONCE, payload, None))

    def unseal(self, side: Side, message: bytes) -> bytes:
        """Decrypt the next message, sent by ``side``; raise `PeerFault` if that fails."""
        payload = _open(self._key(side), side, message)
        self.add(message)
        return payload

    def identify(self, side: Side, key: NodeKey, payload: bytes) -> bytes:
        """Return the next message, in which the node at ``side`` signs the transcript."""
        signature = key.sign(_signed(side, self.digest, key.node, payload))
        return self.seal(side, _IDENTITY.pack(key.node, signature) + payload)

    def recognise(self, side: Side, message: bytes) -> tuple[NodeId, bytes]:
        """Verify the message that `identify` made; return the node at ``side`` and its payload."""
        digest = self.digest
        return _recognise(side, digest, self.unseal(side, message))

    def keys(self, own: Side, other: Side) -> Keys:
        """Derive the session keys of the link."""
        outgoing, incoming = (
            tuple(self._key(f"{side} channel {channel}") for channel in range(CHANNELS))
            for side in (own, other)
        )
        return Keys(outgoing, incoming)

    def _key(self, label: str) -> bytes:
        return derive(self._secret, self.digest, f"meshllm {label} 1")


def _first_digest(psk: bytes) -> bytes:
    return sha256(b"meshllm handshake 1" + psk).digest()


def _mac(psk: bytes, hello: bytes) -> bytes:
    return hmac.digest(psk, b"meshllm dialer hail 1" + hello, "sha256")


def _fits(psk: bytes, hello: bytes, mac: bytes) -> bool:
    return hmac.compare_digest(_mac(psk, hello), mac)


def _bound(psk: bytes, hello: bytes, to: NodeId) -> bytes:
    """Return the hash to which the introduction of a dialer is bound."""
    return sha256(_first_digest(psk) + hello + to).digest()


def _introducing(secret: bytes, digest: bytes) -> bytes:
    return derive(secret, digest, f"meshllm {_INTRODUCTION} 1")


def _shared(exchange: Callable[[X25519PublicKey], bytes], public: X25519PublicKey) -> bytes:
    try:
        return exchange(public)
    except ValueError:  # low-order point: the shared secret is all zeros (RFC 7748, 6.1)
        raise PeerFault("Hello with a low-order X25519 key") from None


def _open(key: bytes, side: Side, message: bytes) -> bytes:
    try:
        return AESGCM(key).decrypt(_ONCE, message, None)
    except InvalidTag:
        raise PeerFault(f"Message of {len(message)} bytes was not sealed by the {side}") from None


def _recognise(side: str, digest: bytes, opened: bytes) -> tuple[NodeId, bytes]:
    if len(opened) < _IDENTITY.size:
        raise PeerFault(f"Identity of {len(opened)} bytes; expected {_IDENTITY.size}")
    node, signature = _IDENTITY.unpack_from(opened)
    payload = opened[_IDENTITY.size :]
    if not verify(node, _signed(side, digest, node, payload), signature):
        raise PeerFault(f"The {side} did not sign this handshake")
    return NodeId(node), payload


def _signed(side: str, digest: bytes, node: NodeId, payload: bytes) -> bytes:
    return b"meshllm " + side.encode() + b" identity 1" + digest + node + payload


def _check_version(message: bytes, *, is_known: bool = False) -> None:
    if message[:1] != bytes([VERSION]):
        raise OtherVersion(message[:1].hex(), is_known=is_known)
