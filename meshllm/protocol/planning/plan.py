"""What goes into a plan and what comes out of it.

Every node computes the plan from the same offers and compares the digest, so the bytes under the
digest are defined here to the last one. How long things take is not among them.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from math import inf, isfinite
from struct import Struct
from typing import Self

from blake3 import blake3

from meshllm.errors import PeerFault, UserError
from meshllm.names import NODE_ID_BYTES, Digest, NodeId, Span
from meshllm.protocol.session.messages import MAX_RANKS

MAX_NAME_BYTES = 512  # of UTF-8; a Hugging Face name has at most 96 characters on each side of `/`
MAX_EPOCH = (1 << 32) - 1  # what the messages of a ring can say
MAX_SECONDS = 3600.0  # of one layer or one hop; what is slower is no member of a ring

_MAGIC = b"meshllm plan 1\n"
_HEAD = Struct("<QBHHH")
"""Epoch, place of the ends, bytes of the model's name, stages, standbys."""
_STAGE = Struct(f"<{NODE_ID_BYTES}sII")


class Ends(StrEnum):
    """Who holds embedding, final norm and head."""

    ENTRY = "entry"
    """Rank 0, beside its layers."""
    CLIENT = "client"
    """Rank 0, which is the node that asks and holds no layers; the others see no token."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What one node brings: memory and measured speed."""

    node: NodeId
    memory_bytes: int
    """Memory it gives to models, in bytes."""
    layer_s: tuple[tuple[int, float], ...]
    """Seconds that one mean layer takes for so many rows: ``((1, 0.004), (8, 0.005))``."""
    head_s: float
    """Seconds that the final norm and head take for one row."""
    reserve_bytes: int = 0
    """Part of the memory that layers, caches and ends must leave free."""

    def __post_init__(self) -> None:
        rows = [0, *(count for count, _ in self.layer_s)]
        if not self.layer_s or any(low >= high for low, high in pairwise(rows)):
            raise UserError(f"Cost table of node `{self.node.hex()[:12]}` has rows {rows[1:]}")
        for _, seconds in self.layer_s:
            _check_seconds(seconds)
            if seconds == 0:
                raise UserError(f"A layer takes no time on node `{self.node.hex()[:12]}`")
        _check_seconds(self.head_s)

    def layer_seconds(self, rows: int) -> float:
        """Seconds of one mean layer for ``rows`` rows, on straight lines between those measured."""
        low_rows, low = 0, self.layer_s[0][1]
        for high_rows, high in self.layer_s:
            if rows <= high_rows:
                return low + (high - low) * (rows - low_rows) / (high_rows - low_rows)
            low_rows, low = high_rows, high
        return low * rows / low_rows


@dataclass(frozen=True, slots=True)
class Wire:
    """The way from one node to another."""

    latency_s: float
    """One way, in seconds: half of a round trip."""
    bytes_per_s: float = inf

    def __post_init__(self) -> None:
        _check_seconds(self.latency_s)
        if not self.bytes_per_s > 0:
            raise UserError(f"`{self.bytes_per_s}` is no bandwidth in bytes per second")

    def seconds(self, size: int) -> float:
        """Seconds until ``size`` bytes have arrived."""
        return self.latency_s + size / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Links:
    """The ways between all pairs of nodes."""

    wires: Mapping[tuple[NodeId, NodeId], Wire] = field(default_factory=dict)
    """From the first node to the second; also the way back, unless that one is given too."""
    default: Wire = field(default_factory=lambda: Wire(0.0))
    """The way between nodes that are not in ``wires``."""

    def between(self, here: NodeId, there: NodeId) -> Wire:
        """Return the way from one node to another."""
        back = self.wires.get((there, here), self.default)
        return self.wires.get((here, there), back)


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model matters for a plan."""

    name: str
    layer_bytes: tuple[int, ...]
    """Weights of each layer, in bytes."""
    kv_bytes_per_token: tuple[int, ...]
    """Cache that each layer keeps per token of a session, in bytes."""
    embed_bytes: int
    head_bytes: int
    """Final norm and head, in bytes, without what the head shares with the embedding."""
    tied: bool
    """Whether it shares the embedding's weights."""
    hidden_size: int
    itemsize: int
    """Bytes per element of the hidden state on the wire."""
    context: int
    """Tokens of one session for which there is to be room."""

    def __post_init__(self) -> None:
        counts = len(self.layer_bytes), len(self.kv_bytes_per_token)
        if counts[0] != counts[1] or min(self.layer_bytes, default=0) < 1:
            raise UserError(f"`{self.name}` has {counts[0]} layers and {counts[1]} caches")

    @property
    def layers(self) -> int:
        """Count the layers."""
        return len(self.layer_bytes)

    @property
    def ends_bytes(self) -> int:
        """Bytes of the ends where they are held."""
        return self.embed_bytes + self.head_bytes

    @property
    def head_read_bytes(self) -> int:
        """Bytes that the head reads for one row."""
        return self.head_bytes + (self.embed_bytes if self.tied else 0)


@dataclass(frozen=True, slots=True)
class Terms:
    """What binds a plan, whatever the policy."""

    ends: Ends = Ends.ENTRY
    """Who holds embedding and head."""
    entry: NodeId | None = None
    """The node of rank 0; the policy chooses one when it is not given."""
    sessions: int = 1
    """Sessions of full context for which there is to be room."""
    members: int | None = None
    """Nodes of the ring, rank 0 included; the policy chooses when it is not given."""
    spans: Mapping[NodeId, Span] = field(default_factory=dict)
    """Nodes that hold exactly this span."""
    exclude: Collection[NodeId] = ()
    """Nodes that hold no span."""
    prefer: Collection[NodeId] = ()
    """Nodes that hold a span if one layer fits, even where the ring is slower for it."""
    memory: Mapping[NodeId, int] = field(default_factory=dict)
    """Bytes that a node gives at most, where that is less than it offers."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One rank: a node and its layers."""

    node: NodeId
    span: Span


@dataclass(frozen=True, slots=True)
class Standby:
    """A node of the mesh without a span, and why."""

    node: NodeId
    reason: str = field(compare=False)
    """For people: half a sentence that has the node as its subject."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Who holds which layers, in rank order, for one epoch.

    Raises:
        UserError: the spans do not follow each other from layer 0, one is empty, or a node is named
            twice.
    """

    epoch: int
    model: str
    ends: Ends
    stages: tuple[Stage, ...]
    standbys: tuple[Standby, ...] = ()
    """In order of node id."""

    def __post_init__(self) -> None:
        nodes = [*(at.node for at in self.stages), *(at.node for at in self.standbys)]
        holders = self.stages[self.ends is Ends.CLIENT :]
        stop = 0
        for stage in holders:
            if stage.span.start != stop or not stage.span:
                raise UserError(f"Span `{stage.span}` does not go on from layer {stop}")
            stop = stage.span.stop
        if len(holders) < len(self.stages) and self.stages[0].span:
            raise UserError(f"The client holds no layers, not `{self.stages[0].span}`")
        if not holders or len(self.stages) > MAX_RANKS or len(set(nodes)) < len(nodes):
            raise UserError(f"{len(self.stages)} stages on {len(set(nodes))} nodes are no ring")
        if len(self.model.encode()) > MAX_NAME_BYTES:
            raise UserError(f"The name of a model is at most {MAX_NAME_BYTES} bytes long")

    @property
    def layers(self) -> int:
        """Count the layers of the model."""
        return self.stages[-1].span.stop

    @property
    def digest(self) -> Digest:
        """Hash what `encode` writes: equal on two nodes that hold the same plan."""
        return Digest(blake3(self.encode()).digest())

    @property
    def precedence(self) -> tuple[int, Digest]:
        """Rank plans that are followed at the same time: the highest is followed by all."""
        return self.epoch, self.digest

    def encode(self) -> bytes:
        """Write the plan, without the reasons of standbys, as the same bytes on every machine."""
        name = self.model.encode()
        places = len(self.stages), len(self.standbys)
        return b"".join(
            (
                _MAGIC,
                _HEAD.pack(self.epoch, self.ends is Ends.CLIENT, len(name), *places),
                name,
                *(_STAGE.pack(at.node, at.span.start, at.span.stop) for at in self.stages),
                *(at.node for at in self.standbys),
            )
        )

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read what `encode` wrote; standbys come without their reasons.

        Raises:
            PeerFault: it is anything else, or its epoch is above `MAX_EPOCH`.
        """
        head = len(_MAGIC) + _HEAD.size
        if len(data) < head:
            raise PeerFault(f"A plan of {len(data)} bytes")
        epoch, client, length, stages, standbys = _HEAD.unpack_from(data, len(_MAGIC))
        first = head + length
        last = first + stages * _STAGE.size
        if len(data) != last + standbys * NODE_ID_BYTES or epoch > MAX_EPOCH:
            raise PeerFault(f"A plan of epoch {epoch} in {len(data)} bytes")
        try:
            plan = cls(
                epoch,
                data[head:first].decode(),
                Ends.CLIENT if client else Ends.ENTRY,
                tuple(
                    Stage(NodeId(node), Span(*span))
                    for node, *span in _STAGE.iter_unpack(data[first:last])
                ),
                tuple(
                    Standby(NodeId(data[at : at + NODE_ID_BYTES]), "")
                    for at in range(last, len(data), NODE_ID_BYTES)
                ),
            )
        except (UnicodeDecodeError, UserError) as error:
            raise PeerFault(f"A plan that is none: {error}") from None
        if plan.encode() != data:
            raise PeerFault("A plan that is written in another way")
        return plan

    def rank(self, node: NodeId) -> int | None:
        """Return the rank of a node; None for one without a stage."""
        ranks = (rank for rank, stage in enumerate(self.stages) if stage.node == node)
        return next(ranks, None)


def _check_seconds(seconds: float) -> None:
    if not (isfinite(seconds) and 0 <= seconds <= MAX_SECONDS):
        raise UserError(f"`{seconds}` is no time between 0 and {MAX_SECONDS:.0f} s")
