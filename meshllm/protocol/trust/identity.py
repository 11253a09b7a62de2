"""Who a node is: its key, its signatures, and how its id is written.

A node id is an Ed25519 public key. People see its base32 in eight groups of seven; each second
group ends with a check digit of the thirteen before it, so one wrong letter, or two neighbours that
changed places (but for ``a`` and ``7``), do not name another node.
"""

import base64
import binascii

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from meshllm.errors import UserError
from meshllm.names import NODE_ID_BYTES, NodeId

SIGNATURE_BYTES = 64

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"  # RFC 4648
_GROUP = 7  # characters between two dashes
_CHECKED = 13  # characters before their check digit


class NodeKey:
    """The secret half of a node id; made of the 32 bytes that a state folder keeps."""

    def __init__(self, seed: bytes) -> None:
        self.seed = seed
        """For a transport that proves by itself who this node is."""
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.node = NodeId(self._key.public_key().public_bytes_raw())

    def sign(self, data: bytes) -> bytes:
        """Sign what begins with a label of its own, so that no signature serves twice."""
        return self._key.sign(data)


def verify(node: NodeId, data: bytes, signature: bytes) -> bool:
    """Tell whether ``node`` signed ``data``; a node id that is no key has signed nothing."""
    try:
        Ed25519PublicKey.from_public_bytes(node).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def show(node: NodeId) -> str:
    """Write a node id for people: 63 characters, which `parse_node` reads."""
    digits = base64.b32encode(node).decode().rstrip("=").lower()
    blocks = [digits[place : place + _CHECKED] for place in range(0, len(digits), _CHECKED)]
    checked = "".join(block + _check_digit(block) for block in blocks)
    return "-".join(checked[place : place + _GROUP] for place in range(0, len(checked), _GROUP))


def short(node: NodeId) -> str:
    """Write the beginning of a node id, for display only: others can be made to look alike."""
    return show(node)[:_GROUP]


def parse_node(text: str) -> NodeId:
    """Read what `show` wrote, in any case, with or without dashes and spaces.

    Raises:
        UserError: it is too long or too short, or mistyped.
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
        f"`{text[:80]}` is no node id",
        hint="copy all 63 characters as `meshllm id` prints them; the check digits do not fit",
    )


def _check_digit(block: str) -> str:
    """Close the sum with weights 2, 1, 2... over the alphabet (Luhn mod N, N = 32)."""
    total = 0
    for place, character in enumerate(block):
        product = _ALPHABET.index(character) * (2 - place % 2)
        total += product // 32 + product % 32
    return _ALPHABET[-total % 32]
