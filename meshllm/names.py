"""The glossary, and the types of identifiers and spans.

node
    one process with an identity.
ring
    the nodes that together hold every layer of one model, in rank order.
rank
    position in the ring; rank 0 is the **entry**, which tokenises, samples and detokenises.
span
    contiguous layers ``[start, stop)``.
ends
    embedding, final norm and LM head: what comes before and after the layers.
session
    one generation; a **step** is one trip round the ring, a **hop** one link of it.
blob
    the bytes of a tensor with a header and a keyed hash.
plan
    which node holds which span, in which order, for one **epoch**.
standby
    a node without a span in the current plan.
mesh
    the nodes that share a mesh id; a **member** holds a credential for it, in the **role** of a
    node, which serves, or of a client, which only sends requests.
ingress
    the node that received a request; any node of the mesh can be the ingress.
charter
    the configuration of the whole mesh: the models and how their rings are chosen.
replica
    one of several rings of the same model; its **group** are the nodes that it can use.
API server
    the HTTP API of a node or client: on a unix socket that only its owner can open, or on TCP.
relay
    a server or node that forwards encrypted datagrams for nodes that cannot be dialled directly.
path
    how the bytes of a link travel: **direct** or through a relay.
"""

import binascii
from base64 import b32decode, b32encode
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Self

from meshllm.errors import UserError

MAX_SPAN_CHARS = 20

NodeId = NewType("NodeId", bytes)
"""32 bytes, the public key of a node."""

SessionId = NewType("SessionId", bytes)
"""16 random bytes."""

MeshId = NewType("MeshId", bytes)
"""16 bytes, a shared secret of the members of a mesh and the holders of a ticket."""

Digest = NewType("Digest", bytes)
"""32 bytes, a BLAKE3 hash."""

ModelKey = NewType("ModelKey", bytes)
"""8 bytes that identify a served model: its name, configuration and quantisation."""

GroupId = NewType("GroupId", bytes)
"""Identifies a replica of a served model: its key and a byte; empty for the first of a mesh."""

FIRST_GROUP = GroupId(b"")
"""The first replica of a mesh's first model, the only group of earlier versions."""

NODE_ID_BYTES = 32
SHORT_LETTERS = 7  # of a node id in its short form
MODEL_KEY_BYTES = 8
GROUP_BYTES = MODEL_KEY_BYTES + 1
SESSION_ID_BYTES = 16
MESH_ID_BYTES = 16
DIGEST_BYTES = 32

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"  # of node ids as text: RFC 4648
_GROUP = 7  # characters between two dashes
_CHECKED = 13  # characters before their check digit


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Contiguous layers ``[start, stop)``; empty when both are equal."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise UserError(f"Invalid layer span `{self.start}:{self.stop}`")

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, layer: int) -> bool:
        return self.start <= layer < self.stop

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"

    def overlaps(self, other: "Span") -> bool:
        """Return whether both have a layer in common."""
        return max(self.start, other.start) < min(self.stop, other.stop)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``start:stop``; raise `UserError` for anything else."""
        start, colon, stop = text.partition(":")
        if not (colon and start.isdecimal() and stop.isdecimal() and len(text) <= MAX_SPAN_CHARS):
            raise UserError(f"Invalid layer span `{text}`", hint="write it as `0:14`")
        return cls(int(start), int(stop))


@dataclass(frozen=True, slots=True)
class RingEntry:
    """A node as the entry of one ring; it may be that of several."""

    node: NodeId
    group: GroupId | None = None
    """The ring; None leaves the choice to the node, which may also be a provider, in no ring."""


class LossCause(StrEnum):
    """Why the ring of an answer was lost."""

    NODE_LOST = "node_lost"
    """Its connections closed: its process was killed."""
    NODE_SILENT = "node_silent"
    """Nothing arrived from it: it was stopped, without power, or cut off."""
    NODE_HUNG = "node_hung"
    NODE_REFUSED = "node_refused"
    NODE_LEFT = "node_left"
    LINK_LOST = "link_lost"
    REPLANNED = "replanned"


class Quant(StrEnum):
    """Quantisation of the weights of linear layers."""

    NONE = "none"
    """As stored; bit-identical to transformers."""
    INT8 = "int8"
    """8 bits with a scale per output row: half the memory of bfloat16, about twice as fast."""
    INT4 = "int4"
    """4 bits with a scale and a zero point per group of 64 inputs: 3.5 times less memory."""


_BITS = {
    "int4": 4, "int8": 8, "fp8": 8, "bf16": 16, "bfloat16": 16, "fp16": 16, "float16": 16,
    "fp32": 32, "float32": 32,
}  # fmt: skip


def bits_of(precision: str) -> int:
    """Return the bits of a weight; 0 if the precision is unknown."""
    return _BITS.get(precision.lower(), 0)


class WireMode(StrEnum):
    """Encoding of the hidden states sent to the next rank."""

    EXACT = "exact"
    """As computed; losslessly compressed on links slow enough for that to pay."""
    PLAIN = "plain"
    """As computed, never compressed."""
    INT8 = "int8"
    """8 bits with a scale per 32 values: half the bytes of bfloat16, lossy."""
    AUTO = "auto"
    """`INT8` on links slow enough for that to pay, unless the model is a mixture of experts."""


def counted(count: int, noun: str) -> str:
    """Return a number of things for people: `1 node`, `2 nodes`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def short(node: NodeId) -> str:
    """Return the start of a node id as text, for display only: look-alikes can be generated."""
    return b32encode(node[:SHORT_LETTERS]).decode()[:SHORT_LETTERS].rstrip("=").lower()


def show(node: NodeId) -> str:
    """Return a node id as text, 63 characters that `parse_node` reads.

    It is base32 in eight groups of seven; every second group ends with a check digit over the
    thirteen characters before it, which detects one wrong letter and a swap of two adjacent letters
    (except ``a`` and ``7``).
    """
    digits = b32encode(node).decode().rstrip("=").lower()
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
        node = NodeId(b32decode(digits.upper() + "===="))
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
