"""Input and output of the planner: offers, links, model shape, terms, and the plan.

Every node computes the plan from the same offers and compares the digest, so the bytes that are
hashed are defined here to the last one. They contain no measured times.
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
from meshllm.names import NODE_ID_BYTES, Digest, NodeId, Span, short
from meshllm.protocol.session.messages import MAX_RANKS

MAX_NAME_BYTES = 512  # of UTF-8; a Hugging Face name has at most 96 characters on each side of `/`
MAX_EPOCH = (1 << 32) - 1  # largest value of the field in ring messages
MAX_JUMP = 1 << 16  # most that an epoch may exceed the median: a mesh may be partitioned for long
MAX_SECONDS = 3600.0  # of one layer or one hop; a slower node cannot join a ring

_MAGIC = b"meshllm plan 1\n"
_HEAD = Struct("<QBHHH")
"""Epoch, whether the client holds the ends, bytes of the model's name, stages, standbys."""
_STAGE = Struct(f"<{NODE_ID_BYTES}sII")


class Ends(StrEnum):
    """Which node holds the ends: embedding, final norm and head."""

    ENTRY = "entry"
    """Rank 0, in addition to its layers."""
    CLIENT = "client"
    """Rank 0, which is the requesting node and holds no layers; the others see no token."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What one node offers: memory and measured speed."""

    node: NodeId
    memory_bytes: int
    """Memory for models, in bytes."""
    layer_s: tuple[tuple[int, float], ...]
    """Seconds of one average layer by number of rows: ``((1, 0.004), (8, 0.005))``."""
    head_s: float
    """Seconds of the final norm and head for one row."""
    reserve_bytes: int = 0
    """Part of the memory that layers, caches and ends must leave free."""

    def __post_init__(self) -> None:
        rows = [0, *(count for count, _ in self.layer_s)]
        if not self.layer_s or any(low >= high for low, high in pairwise(rows)):
            raise UserError(
                f"Cost table of node `{short(self.node)}` needs rising rows, not {rows[1:]}"
            )
        for _, seconds in self.layer_s:
            _check_seconds(seconds)
            if seconds == 0:
                raise UserError(f"Node `{short(self.node)}` offers layers that take 0 s")
        _check_seconds(self.head_s)

    def layer_seconds(self, rows: int) -> float:
        """Interpolate the seconds of one average layer; proportional to rows above the table."""
        low_rows, low = 0, self.layer_s[0][1]
        for high_rows, high in self.layer_s:
            if rows <= high_rows:
                return low + (high - low) * (rows - low_rows) / (high_rows - low_rows)
            low_rows, low = high_rows, high
        return low * rows / low_rows


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """One direction between two nodes."""

    latency_s: float
    """One way, in seconds: half of a round trip."""
    bytes_per_s: float = inf

    def __post_init__(self) -> None:
        _check_seconds(self.latency_s)
        if not self.bytes_per_s > 0:
            raise UserError(f"Invalid bandwidth of `{self.bytes_per_s}` bytes per second")

    def seconds(self, size: int) -> float:
        """Return the seconds until ``size`` bytes have arrived."""
        return self.latency_s + size / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Links:
    """The wires between all pairs of nodes."""

    speeds: Mapping[tuple[NodeId, NodeId], LinkSpeed] = field(default_factory=dict)
    """From the first node to the second; also used for the way back unless that is given."""
    default: LinkSpeed = field(default_factory=lambda: LinkSpeed(0.0))
    """Between nodes that are not in ``wires``."""

    def between(self, here: NodeId, there: NodeId) -> LinkSpeed:
        """Return the wire from one node to another."""
        back = self.speeds.get((there, here), self.default)
        return self.speeds.get((here, there), back)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model, as far as planning needs them."""

    name: str
    layer_bytes: tuple[int, ...]
    """Weights of each layer, in bytes."""
    kv_bytes_per_token: tuple[int, ...]
    """KV cache of each layer per token of a session, in bytes."""
    embed_bytes: int
    head_bytes: int
    """Final norm and head, in bytes, without weights that the head shares with the embedding."""
    tied: bool
    """Whether the head shares the weights of the embedding."""
    hidden_size: int
    itemsize: int
    """Bytes per element of the hidden state on the wire."""
    context: int
    """Tokens of one session for which the caches need room."""
    workspace_bytes: int = 0
    """The most bytes that a rank needs besides weights and caches: of a forward, and of rows that
    wait, see `meshllm.protocol.session.waiting`."""

    def __post_init__(self) -> None:
        counts = len(self.layer_bytes), len(self.kv_bytes_per_token)
        if counts[0] != counts[1] or min(self.layer_bytes, default=0) < 1:
            raise UserError(
                f"`{self.name}` has {counts[0]} layers and {counts[1]} caches, or an empty layer"
            )

    @property
    def layers(self) -> int:
        """Count the layers."""
        return len(self.layer_bytes)

    @property
    def ends_bytes(self) -> int:
        """Bytes of embedding, final norm and head."""
        return self.embed_bytes + self.head_bytes

    @property
    def head_read_bytes(self) -> int:
        """Bytes that the head reads for one row."""
        return self.head_bytes + (self.embed_bytes if self.tied else 0)


@dataclass(frozen=True, slots=True)
class PlanConstraints:
    """Constraints on a plan, whatever the policy."""

    ends: Ends = Ends.ENTRY
    """Which node holds embedding and head."""
    entry: NodeId | None = None
    """The node of rank 0; chosen by the policy if not given."""
    sessions: int = 1
    """Sessions of full context for which the caches need room."""
    members: int | None = None
    """Nodes of the ring, rank 0 included; chosen by the policy if not given."""
    spans: Mapping[NodeId, Span] = field(default_factory=dict)
    """Nodes that must hold exactly this span."""
    exclude: Collection[NodeId] = ()
    """Nodes that must not hold a span."""
    prefer: Collection[NodeId] = ()
    """Nodes that get a span if one layer fits, even if the ring is slower for it."""
    entries: Collection[NodeId] = ()
    """Nodes that may be rank 0, beside ``entry``; empty for all."""


@dataclass(frozen=True, slots=True)
class PlanStage:
    """One rank: a node and its layers."""

    node: NodeId
    span: Span


@dataclass(frozen=True, slots=True)
class Standby:
    """A node of the mesh without a span."""

    node: NodeId
    reason: str = field(compare=False)
    """For people: a clause about the node, which it calls "it"."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Which node holds which layers, in rank order, for one epoch.

    Raises:
        UserError: the spans are not contiguous from layer 0, one is empty, or a node occurs twice.
    """

    epoch: int
    model: str
    ends: Ends
    stages: tuple[PlanStage, ...]
    standbys: tuple[Standby, ...] = ()
    """In order of node id."""

    def __post_init__(self) -> None:
        nodes = [*(at.node for at in self.stages), *(at.node for at in self.standbys)]
        holders = self.stages[self.ends is Ends.CLIENT :]
        stop = 0
        for stage in holders:
            if stage.span.start != stop or not stage.span:
                raise UserError(f"Span `{stage.span}` is empty or does not start at layer {stop}")
            stop = stage.span.stop
        if len(holders) < len(self.stages) and self.stages[0].span:
            raise UserError(f"The client cannot hold layers `{self.stages[0].span}`")
        if not holders or len(self.stages) > MAX_RANKS or len(set(nodes)) < len(nodes):
            raise UserError(f"Invalid ring: {len(self.stages)} stages, {len(set(nodes))} nodes")
        if len(self.model.encode()) > MAX_NAME_BYTES:
            raise UserError(f"The name of a model is at most {MAX_NAME_BYTES} bytes long")

    @property
    def layers(self) -> int:
        """Count the layers of the model."""
        return self.stages[-1].span.stop

    @property
    def digest(self) -> Digest:
        """Hash of `encode`: equal on two nodes that hold the same plan."""
        return Digest(blake3(self.encode()).digest())

    @property
    def precedence(self) -> tuple[int, Digest]:
        """Order of conflicting plans: later ones are higher."""
        return self.epoch, self.digest

    def encode(self) -> bytes:
        """Encode the plan, without the reasons of standbys; the same bytes on every machine."""
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
        """Decode the output of `encode`; standbys come without their reasons.

        Raises:
            PeerFault: the bytes are anything else, or the epoch is above `MAX_EPOCH`.
        """
        head = len(_MAGIC) + _HEAD.size
        if len(data) < head:
            raise PeerFault(f"Plan of {len(data)} bytes; its header takes {head}")
        epoch, client, length, stages, standbys = _HEAD.unpack_from(data, len(_MAGIC))
        first = head + length
        last = first + stages * _STAGE.size
        if len(data) != last + standbys * NODE_ID_BYTES or epoch > MAX_EPOCH:
            raise PeerFault(f"Invalid length or epoch of a plan: {len(data)} bytes, epoch {epoch}")
        try:
            plan = cls(
                epoch,
                data[head:first].decode(),
                Ends.CLIENT if client else Ends.ENTRY,
                tuple(
                    PlanStage(NodeId(node), Span(*span))
                    for node, *span in _STAGE.iter_unpack(data[first:last])
                ),
                tuple(
                    Standby(NodeId(data[at : at + NODE_ID_BYTES]), "")
                    for at in range(last, len(data), NODE_ID_BYTES)
                ),
            )
        except (UnicodeDecodeError, UserError) as error:
            raise PeerFault(f"Invalid plan: {error}") from None
        if plan.encode() != data:
            raise PeerFault("Plan with a non-canonical encoding")
        return plan

    def rank(self, node: NodeId) -> int | None:
        """Return the rank of a node; None if it has no stage."""
        ranks = (rank for rank, stage in enumerate(self.stages) if stage.node == node)
        return next(ranks, None)


def _check_seconds(seconds: float) -> None:
    if not (isfinite(seconds) and 0 <= seconds <= MAX_SECONDS):
        raise UserError(f"Invalid time of `{seconds}` s; allowed are 0 to {MAX_SECONDS:.0f} s")
