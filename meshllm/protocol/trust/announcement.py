"""Announcements that only certain nodes can read, on a medium that everybody hears.

The content is encrypted with a random key, and that key for each reader, under the X25519 secret of
a fresh key and the reader's node id. Readers are found by tags that others cannot link to them. The
whole is encrypted under a pre-shared key, so that strangers cannot tell what it is. The author
signs the content and the fresh key. Without a list of readers, all who know the pre-shared key are.

::

    sealed under the PSK: fresh X25519 key, count, count x {tag 8 B, key 16 B}, sealed content
    content: node, signature, payload
"""

import hmac
from collections.abc import Sequence
from hashlib import sha256

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from meshllm.names import NODE_ID_BYTES, NodeId
from meshllm.protocol.trust.cipher import TAG_BYTES, derive
from meshllm.protocol.trust.identity import SIGNATURE_BYTES, NodeKey, agreement_key, verify

_POINT_BYTES = 32
_MARK_BYTES = 8
_KEY_BYTES = 16
_ENTRY_BYTES = _MARK_BYTES + _KEY_BYTES
_AUTHOR_BYTES = NODE_ID_BYTES + SIGNATURE_BYTES
_LABEL = "meshllm announcement 1"


def sealed_bytes(readers: int, payload: int) -> int:
    """Return the length of an announcement."""
    body = TAG_BYTES + _AUTHOR_BYTES + payload
    return TAG_BYTES + _POINT_BYTES + 1 + readers * _ENTRY_BYTES + body


def announce(
    key: NodeKey, psk: bytes, readers: Sequence[NodeId], payload: bytes, random: bytes
) -> bytes:
    """Seal a payload for these nodes, 255 at most; ``random`` is 60 bytes, used once.

    The first 12 bytes are those of the nonce, which the reader must know. Readers whose node id is
    a point of small order are left out.
    """
    nonce, ephemeral, content = random[:12], random[12:44], random[44:60]
    if not readers:
        content = _outer(psk, b"open")[:_KEY_BYTES]
    private = X25519PrivateKey.from_private_bytes(ephemeral)
    point = private.public_key().public_bytes_raw()
    entries = []
    for reader in readers:
        try:
            shared = private.exchange(agreement_key(reader))
        except ValueError:
            continue
        mark, pad = _slot(shared, nonce + point)
        entries.append(mark + _xor(pad, content))
    signed = key.node + key.sign(_signed(nonce + point, payload)) + payload
    head = point + bytes([len(entries)]) + b"".join(entries)
    body = AESGCM(content).encrypt(nonce, signed, head)
    return AESGCM(_outer(psk)).encrypt(nonce, head + body, None)


def is_announcement(psk: bytes, nonce: bytes, sealed: bytes) -> bool:
    """Return whether an announcement is sealed under a pre-shared key; that takes microseconds."""
    try:
        AESGCM(_outer(psk)).decrypt(nonce, sealed, None)
    except (InvalidTag, ValueError):
        return False
    return True


def read_announcement(
    key: NodeKey, psk: bytes, nonce: bytes, sealed: bytes
) -> tuple[NodeId, bytes] | None:
    """Return the author and its payload; None if it is not one for the node of this key."""
    try:
        opened = AESGCM(_outer(psk)).decrypt(nonce, sealed, None)
        point, rest = opened[:_POINT_BYTES], opened[_POINT_BYTES:]
        mark, pad = _slot(key.agree(X25519PublicKey.from_public_bytes(point)), nonce + point)
        end = 1 + rest[0] * _ENTRY_BYTES
        places = range(1, end, _ENTRY_BYTES)
        own = next((at for at in places if hmac.compare_digest(rest[at:][:_MARK_BYTES], mark)), 0)
        content = _xor(pad, rest[own + _MARK_BYTES :][:_KEY_BYTES])
        if end == 1:
            content = _outer(psk, b"open")[:_KEY_BYTES]
        signed = AESGCM(content).decrypt(nonce, rest[end:], point + rest[:end])
    except (InvalidTag, ValueError, IndexError):  # not sealed so, short, or a low-order point
        return None
    author, payload = NodeId(signed[:NODE_ID_BYTES]), signed[_AUTHOR_BYTES:]
    signature = signed[NODE_ID_BYTES:_AUTHOR_BYTES]
    return (author, payload) if verify(author, _signed(nonce + point, payload), signature) else None


def _slot(secret: bytes, salt: bytes) -> tuple[bytes, bytes]:
    """Return what marks the entry of a reader, and what hides its key."""
    derived = derive(secret, salt, _LABEL)
    return derived[:_MARK_BYTES], derived[_MARK_BYTES:_ENTRY_BYTES]


def _outer(psk: bytes, use: bytes = b"") -> bytes:
    return sha256(_LABEL.encode() + use + psk).digest()


def _signed(context: bytes, payload: bytes) -> bytes:
    return _LABEL.encode() + context + payload


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))
