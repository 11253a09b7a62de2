"""What the whole mesh agreed on, and its bytes; knows not how a ring is chosen by it."""

from dataclasses import dataclass
from struct import Struct
from typing import Self

from meshllm.names import DIGEST_BYTES, NODE_ID_BYTES, Digest, NodeId, Quant
from meshllm.protocol.codec import MAX_POSITION
from meshllm.protocol.layout import Reader, open_record, sized, start_record
from meshllm.protocol.messages import DType
from meshllm.protocol.plan import MAX_NAME_BYTES, Ends, Policy, Shape
from meshllm.protocol.records import MAX_BYTES, MAX_LAYERS, MAX_MEMBERS

MAX_WIDTH = 1 << 20  # of a hidden state; the largest published is 18432
MAX_SESSIONS = 4096
MAX_VERSION = 1 << 32  # of a charter; a change each second for a century

_HEAD = Struct(f"<Q BBBBB HH HIIB QQ {DIGEST_BYTES}s")
"""Version; dtype, policy, ends, tied, quantisation; layers, members; sessions, hidden size,
context, item size; embedding, head; configuration."""
_LAYER = Struct("<QQ")
_POLICIES = tuple(Policy)
_ENDS = tuple(Ends)
_QUANTS = tuple(Quant)


@dataclass(frozen=True, slots=True)
class Charter:
    """What the whole mesh agreed on; the highest version binds."""

    version: int
    shape: Shape
    """The model, and how long a session there is to be room for."""
    dtype: DType
    """Of the model as it is run, and of the hidden states on the wire."""
    config_digest: Digest
    """blake3 of the model's configuration."""
    policy: Policy = Policy.AUTO
    members: int | None = None
    """Nodes of the ring; the policy chooses when it is None."""
    sessions: int = 1
    """Sessions of full context for which there is to be room."""
    ends: Ends = Ends.ENTRY
    exclude: tuple[NodeId, ...] = ()
    """Nodes that hold no layers."""
    prefer: tuple[NodeId, ...] = ()
    """Nodes that hold layers if one fits."""
    quant: Quant = Quant.NONE
    """How every node holds the weights: with others, a text would depend on who holds a layer."""

    def encode(self) -> bytes:
        """Write the record."""
        shape = self.shape
        codes = self.dtype, _POLICIES.index(self.policy), _ENDS.index(self.ends), shape.tied
        quant = _QUANTS.index(self.quant)
        counts = shape.layers, self.members or 0, self.sessions, shape.hidden_size, shape.context
        ends = shape.itemsize, shape.embed_bytes, shape.head_bytes
        layers = zip(shape.layer_bytes, shape.kv_bytes_per_token, strict=True)
        return b"".join(
            (
                start_record(),
                _HEAD.pack(self.version, *codes, quant, *counts, *ends, self.config_digest),
                *(_LAYER.pack(*layer) for layer in layers),
                *(sized(b"".join(nodes)) for nodes in (self.exclude, self.prefer)),
                sized(shape.name.encode()),
            )
        )

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read the record; raise `PeerFault` for anything else."""
        reader = open_record(data, "Charter")
        version, *fields, config = reader.unpack(_HEAD)
        dtype, policy, ends, tied, quant, layers, members, sessions, *sizes = fields
        reader.bounded("layers", layers, 1, MAX_LAYERS)
        each = [reader.unpack(_LAYER) for _ in range(layers)]
        exclude, prefer = _nodes(reader), _nodes(reader)
        shape = _shape(reader, each, bool(reader.bounded("for a flag", tied, 0, 1)), sizes)
        reader.end()
        return cls(
            reader.bounded("as version", version, 0, MAX_VERSION),
            shape,
            DType(reader.bounded("as dtype", dtype, 1, DType.FLOAT16)),
            Digest(config),
            _POLICIES[reader.bounded("as policy", policy, 0, len(Policy) - 1)],
            reader.bounded("members", members, 0, MAX_MEMBERS) or None,
            reader.bounded("sessions", sessions, 1, MAX_SESSIONS),
            _ENDS[reader.bounded("as ends", ends, 0, len(Ends) - 1)],
            exclude,
            prefer,
            _QUANTS[reader.bounded("as quantisation", quant, 0, len(Quant) - 1)],
        )


def _shape(reader: Reader, each: list[tuple[int, ...]], tied: bool, sizes: list[int]) -> Shape:
    hidden_size, context, itemsize, embed_bytes, head_bytes = sizes
    for weights, cache in each:
        reader.bounded("bytes of a layer", weights, 1, MAX_BYTES)
        reader.bounded("bytes of cache per token", cache, 0, MAX_BYTES)
    return Shape(
        reader.text(MAX_NAME_BYTES),
        tuple(weights for weights, _ in each),
        tuple(cache for _, cache in each),
        reader.bounded("bytes of the embedding", embed_bytes, 0, MAX_BYTES),
        reader.bounded("bytes of the head", head_bytes, 0, MAX_BYTES),
        tied,
        reader.bounded("as hidden size", hidden_size, 1, MAX_WIDTH),
        reader.bounded("bytes per element", itemsize, 1, 8),
        reader.bounded("tokens of context", context, 1, MAX_POSITION),
    )


def _nodes(reader: Reader) -> tuple[NodeId, ...]:
    data = reader.sized(MAX_MEMBERS * NODE_ID_BYTES)
    reader.bounded("bytes at the end of its nodes", len(data) % NODE_ID_BYTES, 0, 0)
    return tuple(NodeId(data[at : at + NODE_ID_BYTES]) for at in range(0, len(data), NODE_ID_BYTES))
