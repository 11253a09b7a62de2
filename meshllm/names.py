"""The words of the house: identifiers and spans.

node
    one process with an identity.
ring
    the nodes that together hold every layer of one model, in rank order.
rank
    place in the ring; rank 0 is the **entry**, where text becomes tokens and back.
span
    contiguous layers ``[start, stop)``.
ends
    embedding, final norm and head: what stands before and after the layers.
session
    one generation; **step** one trip round the ring; **hop** one link of it.
blob
    a tensor's bytes with a header and a keyed hash.
plan
    who holds which span, in which order, for one **epoch**.
standby
    a node to which the plan gives no span.
mesh
    the nodes that share a mesh id; a **member** holds a credential for it, in the **role** of a
    node, which serves, or of a client, which only asks.
ingress
    the node that took a request; any node of the mesh can be it.
charter
    what the whole mesh agreed on: the model and how its ring is to be chosen.
door
    the HTTP application of a node, on a unix socket of its owner.
relay
    a server, or a node, that forwards datagrams for nodes that no other can dial; it reads none.
path
    how the bytes of a link travel: **direct**, or through a relay.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Self

from meshllm.errors import UserError

NodeId = NewType("NodeId", bytes)
"""32 bytes that name a node."""

SessionId = NewType("SessionId", bytes)
"""16 random bytes that name a session."""

MeshId = NewType("MeshId", bytes)
"""16 bytes that name a mesh; only its members and who was invited know them."""

Digest = NewType("Digest", bytes)
"""32 bytes of blake3."""

NODE_ID_BYTES = 32
SESSION_ID_BYTES = 16
MESH_ID_BYTES = 16
DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Contiguous layers ``[start, stop)``; empty when both are equal."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise UserError(f"`{self.start}:{self.stop}` is no span of layers")

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, layer: int) -> bool:
        return self.start <= layer < self.stop

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``a:b``; raise `UserError` for anything else."""
        start, colon, stop = text.partition(":")
        if not (colon and start.isdecimal() and stop.isdecimal()):
            raise UserError(f"`{text}` is no span of layers", hint="write it as `0:14`")
        return cls(int(start), int(stop))


class Quant(StrEnum):
    """How the weights of linear modules are held."""

    NONE = "none"
    """As stored; the same bits as transformers."""
    INT8 = "int8"
    """8 bits with a scale per output: half the memory of bfloat16, and about twice as fast."""
    INT4 = "int4"
    """4 bits with a scale and a zero per 64 inputs: 3.5 times less memory than bfloat16."""


class WireMode(StrEnum):
    """How hidden states travel to the next rank."""

    EXACT = "exact"
    """As the model computes them; packed without loss where a link is slow enough for that."""
    PLAIN = "plain"
    """As the model computes them, packed nowhere."""
    INT8 = "int8"
    """In 8 bits with a scale per 32 values: half the bytes of bfloat16, not quite the same."""
    AUTO = "auto"
    """In 8 bits where a link is slow enough for that to matter, and the model no mixture."""
