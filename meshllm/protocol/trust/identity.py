"""Node identity: keys and signatures.

A node id is an Ed25519 public key. The same key agrees on secrets: Ed25519 and X25519 are two forms
of one curve, and a point of the one is converted to the other (RFC 7748, 4.1), as libsodium does.
"""

from hashlib import sha512

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from meshllm.names import NodeId

SIGNATURE_BYTES = 64

_PRIME = 2**255 - 19  # of the field of Curve25519
_ORDER_8 = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7
_SMALL_ORDER = {0, 1, _PRIME - 1, _ORDER_8, _PRIME - _ORDER_8}  # the `y` of points of order <= 8


class NodeKey:
    """The private key of a node id, from the 32-byte seed in the state folder."""

    def __init__(self, seed: bytes) -> None:
        self.seed = seed
        """For transports with their own authentication."""
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.node = NodeId(self._key.public_key().public_bytes_raw())

    def sign(self, data: bytes) -> bytes:
        """Sign data, which must begin with a label of its purpose (domain separation)."""
        return self._key.sign(data)

    def agree(self, public: X25519PublicKey) -> bytes:
        """Return the X25519 secret with a key; raise `ValueError` for a low-order point."""
        private = sha512(self.seed).digest()[:32]  # the scalar of the Ed25519 key (RFC 8032, 5.1.5)
        return X25519PrivateKey.from_private_bytes(private).exchange(public)


def verify(node: NodeId, data: bytes, signature: bytes) -> bool:
    """Return whether ``node`` signed ``data``; False if ``node`` is not a valid public key.

    A point of small order is not valid: without a private key, signatures of it can be made (RFC
    8032, 5.1.7, accepts them; "Taming the many EdDSAs", Chalkias and others, 2020).
    """
    if _y(node) % _PRIME in _SMALL_ORDER:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(node).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def agreement_key(node: NodeId) -> X25519PublicKey:
    """Return the X25519 form of a node id, with which its `NodeKey.agree` agrees.

    It depends on ``y`` only: a node id that is not a valid point gives a key that nobody holds.
    """
    y = _y(node)
    u = (1 + y) * pow(1 - y, _PRIME - 2, _PRIME) % _PRIME
    return X25519PublicKey.from_public_bytes(u.to_bytes(32, "little"))


def _y(node: NodeId) -> int:
    return int.from_bytes(node, "little") & (1 << 255) - 1
