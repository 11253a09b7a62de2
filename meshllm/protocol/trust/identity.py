"""Node identity: keys, signatures, and the text form of node ids.

A node id is an Ed25519 public key. Its text form is base32 in eight groups of seven; every second
group ends with a check digit over the thirteen characters before it, which detects one wrong letter
and a swap of two adjacent letters (except ``a`` and ``7``).

The same key agrees on secrets: Ed25519 and X25519 are two forms of one curve, and a point of the
one is converted to the other (RFC 7748, 4.1), as libsodium does.
"""

import base64
import binascii
from hashlib import sha512

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from meshllm.errors import UserError
from meshllm.names import NODE_ID_BYTES, NodeId

SIGNATURE_BYTES = 64

_PRIME = 2**255 - 19  # of the field of Curve25519
_ORDER_8 = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7
_SMALL_ORDER = {0, 1, _PRIME - 1, _ORDER_8, _PRIME - _ORDER_8}  # the `y` of points of order <= 8
_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"  # RFC 4648
_GROUP = 7  # characters between two dashes
_CHECKED = 13  # characters before their check digit


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

    A point of small order is none: without a private key, signatures of it can be made (RFC 8032,
    5.1.7, accepts them; "Taming the many EdDSAs", Chalkias and others, 2020).
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


def show(node: NodeId) -> str:
    """Return a node id as text, 63 characters that `parse_node` reads."""
    digits = base64.b32encode(node).decode().rstrip("=").lower()
    blocks = [digits[place : place + _CHECKED] for place in range(0, len(digits), _CHECKED)]
    checked = "".join(block + _check_digit(block) for block in blocks)
    return "-".join(checked[place : place + _GROUP] for place in range(0, len(checked), _GROUP))


def parse_node(text: str) -> NodeId:
    """Parse the output of `show`, in upper or lower case, with or without dashes and spaces.

    Raises:
        UserError: the length or a check digit is wrong.
    """
    typed = "".join(text.split()).replace("-", "").lower()
    digits = "".join(
        typed[place : place + _CHECKED] for place in range(0, len(typed), _CHECKED + 1)
    )
    try:
        node = NodeId(base64.b32decode(digits.upper() + "===="))
    except (binascii.Error, ValueError):
        raise _no_node(text) from None
    if len(node) != NODE_ID_BYTES or show(node).replace("-", "") != typed:
        raise _no_node(text)
    return node


def _no_node(text: str) -> UserError:
    return UserError(
        f"Invalid node id `{text[:80]}`",
        hint="copy all 63 characters as `meshllm id` prints them; the check digits do not match",
    )


def _check_digit(block: str) -> str:
    """Return the Luhn mod N check character (N = 32, weights 2, 1, 2, ...)."""
    total = 0
    for place, character in enumerate(block):
        product = _ALPHABET.index(character) * (2 - place % 2)
        total += product // 32 + product % 32
    return _ALPHABET[-total % 32]
