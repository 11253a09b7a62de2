"""Profile and state records of nodes, their encoding, and which nodes are alive.

A record is a version byte and fields in a fixed order; later versions only append fields, which are
ignored here. Decoding bounds every count, text and number, so that no record of a peer can make a
computation raise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise
from struct import Struct
from typing import Self

from meshllm.names import (
    DIGEST_BYTES,
    FIRST_GROUP,
    GROUP_BYTES,
    MODEL_KEY_BYTES,
    NODE_ID_BYTES,
    GroupId,
    ModelKey,
    NodeId,
    Span,
)
from meshllm.protocol.binary import Reader, open_record, sized, start_record
from meshllm.protocol.planning.plan import MAX_NAME_BYTES, MAX_SECONDS

MAX_MEMBERS = 64  # nodes of one mesh, which is fully connected
MAX_LAYERS = 1024  # of a model; the largest published has 126
MAX_BYTES = 1 << 50  # of memory or of one layer: 1 PiB
MAX_ADDRESSES = 16
MAX_ADDRESS_BYTES = 256
MAX_OBSTACLE_BYTES = 512
MAX_LABEL_BYTES = 64  # name of a node, version of its program
MAX_COSTS = 16  # entries of a cost table
MAX_ROWS = 4096  # of one step, as on the wire
MIN_SECONDS = 1e-12  # of one layer; excludes zero
MAX_ROUND_TRIP_US = 60_000_000  # a minute, far beyond the idle timeout
MAX_OFFERS = 32  # models of one provider
MAX_CONTEXT = 1 << 30  # tokens
MAX_PLAN_BYTES = 16 * 1024  # 64 stages and the name of the model take 3.1 KiB
MAX_RINGS = 8  # in which one node takes part
MAX_HELD = 64  # models that a node has locally, of those that its mesh serves or served
MAX_REVOKED = 256  # API keys revoked by one node
DIGEST_PART_BYTES = 16
KEY_TAG_BYTES = 16
MACHINE_BYTES = 16
ENDS = 3
"""Parts of a manifest after the layers: embedding, head, configuration."""

_PROFILE = Struct("<QQd II BB")
"""Memory, reserve, head, span, entries of the cost table, addresses."""
_COST = Struct("<Hd")
_STATE = Struct("<BBBH")
_LINK = Struct(f"<{NODE_ID_BYTES}sI")
_COUNT = Struct("<B")
_CONTEXT = Struct("<I")
_SHARE = Struct("<QdI")
"""Memory, head, entries of the cost table."""
_FLAGS = Struct("<BB")


class Lifecycle(IntEnum):
    """The life cycle of a node within one incarnation."""

    OTHER = 0
    """A phase added by a later version: alive, and holds no layers."""

    JOIN = 1
    """Measuring or loading."""
    SERVING = 2
    LEFT = 3
    """Left the mesh deliberately."""
    LEAVING = 4
    """Finishing its requests and leaving its ring before it leaves the mesh."""


_LIFECYCLES = set(Lifecycle)


@dataclass(frozen=True, slots=True)
class RingShare:
    """What a node offers to a further ring, out of its memory, and what it measured for it."""

    group: GroupId
    memory_bytes: int
    layer_s: tuple[tuple[int, float], ...] = ()
    head_s: float = 0.0
    model: str = ""
    weights: tuple[bytes, ...] = ()

    def encode(self) -> bytes:
        """Encode the share."""
        return b"".join(
            (
                sized(self.group),
                _SHARE.pack(self.memory_bytes, self.head_s, len(self.layer_s)),
                *(_COST.pack(rows, seconds) for rows, seconds in self.layer_s),
                sized(self.model.encode()),
                sized(b"".join(self.weights)),
            )
        )

    @classmethod
    def read(cls, reader: Reader) -> Self:
        """Read a share; raise `PeerFault` if it is malformed."""
        group = GroupId(reader.sized(GROUP_BYTES))
        memory, head_s, count = reader.unpack(_SHARE)
        return cls(
            group,
            reader.bounded("bytes of a share", memory, 0, MAX_BYTES),
            _costs(reader, count),
            reader.bounded("seconds for the head", head_s, 0, MAX_SECONDS),
            reader.text(MAX_NAME_BYTES),
            _manifest(reader),
        )


@dataclass(frozen=True, slots=True)
class Profile:
    """The resources of a node; changes rarely."""

    name: str
    """Display name, chosen by the owner; not authenticated."""
    version: str
    """Of the program."""
    addresses: tuple[str, ...]
    """Where others may reach it, likeliest first."""
    memory_bytes: int
    """Memory for models."""
    layer_s: tuple[tuple[int, float], ...] = ()
    """Cost table: rows (ascending), and seconds of an average layer; empty until measured."""
    head_s: float = 0.0
    """Seconds of the final norm and head for one row."""
    reserve_bytes: int = 0
    """Part of the memory that must stay free."""
    span: Span | None = None
    """The layers to hold, if its owner fixed them."""
    model: str = ""
    """The model whose weights it has; empty for none."""
    weights: tuple[bytes, ...] = ()
    """16 bytes of blake3 for each layer, then embedding, head and configuration; zeros for parts
    that are not on this machine."""
    machine: bytes = b""
    """A tag that nodes on the same machine can verify; empty of earlier versions."""
    models: tuple[ModelKey, ...] = ()
    """The models of the mesh that it has locally; empty while the mesh serves one ring."""
    revoked: tuple[bytes, ...] = ()
    """Tags of API keys that its owner revoked, the newest last."""
    is_exact: bool = False
    """Whether it computes bit-identically to transformers what is not quantised."""
    shares: tuple[RingShare, ...] = ()
    """What of its memory further rings may use, in order of their groups; never more than it has.
    The other fields are those of the first ring, which has the rest."""

    @property
    def is_retracted(self) -> bool:
        """Whether its node has a model, of which it cannot load layers now."""
        return bool(self.weights) and not self.layer_s

    def in_ring(self, group: GroupId, *, is_further: bool) -> Self:
        """Return the profile as one ring sees it, with the memory that is for this ring."""
        if not is_further:
            if not self.shares:
                return self
            rest = self.memory_bytes - sum(each.memory_bytes for each in self.shares)
            return replace(self, memory_bytes=rest, shares=())
        share = next((each for each in self.shares if each.group == group), RingShare(group, 0))
        return replace(
            self,
            memory_bytes=share.memory_bytes,
            layer_s=share.layer_s,
            head_s=share.head_s,
            reserve_bytes=0,  # that of the node is in the memory of its first ring
            span=None,
            model=share.model,
            weights=share.weights,
            shares=(),
        )

    def by_ring(self) -> "list[Profile]":
        """Return the profile as each ring of the node sees it."""
        first = self.in_ring(FIRST_GROUP, is_further=False)
        return [first, *(self.in_ring(each.group, is_further=True) for each in self.shares)]

    def encode(self) -> bytes:
        """Encode the record."""
        start, stop = (self.span.start, self.span.stop) if self.span else (0, 0)
        texts = self.name, self.version, self.model, *self.addresses
        numbers = self.memory_bytes, self.reserve_bytes, self.head_s, start, stop
        return b"".join(
            (
                start_record(),
                _PROFILE.pack(*numbers, len(self.layer_s), len(self.addresses)),
                *(_COST.pack(rows, seconds) for rows, seconds in self.layer_s),
                *(sized(text.encode()) for text in texts),
                sized(b"".join(self.weights)),
                sized(self.machine),
                sized(b"".join(self.models)),
                sized(b"".join(self.revoked)),
                _COUNT.pack(self.is_exact),
                _COUNT.pack(len(self.shares)),
                *(share.encode() for share in self.shares),
            )
        )

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode the record; raise `PeerFault` if it is malformed."""
        reader = open_record(data, "Profile")
        memory, reserve, head_s, start, stop, *counts = reader.unpack(_PROFILE)
        costs = _costs(reader, counts[0])
        name, version = reader.text(MAX_LABEL_BYTES), reader.text(MAX_LABEL_BYTES)
        model = reader.text(MAX_NAME_BYTES)
        reader.bounded("addresses", counts[1], 0, MAX_ADDRESSES)
        addresses = tuple(reader.text(MAX_ADDRESS_BYTES) for _ in range(counts[1]))
        weights = _manifest(reader)
        reader.bounded("first layer", start, 0, reader.bounded("layers", stop, 0, MAX_LAYERS))
        return cls(
            name,
            version,
            addresses,
            reader.bounded("bytes of memory", memory, 0, MAX_BYTES),
            costs,
            reader.bounded("seconds for the head", head_s, 0, MAX_SECONDS),
            reader.bounded("bytes of reserve", reserve, 0, MAX_BYTES),
            Span(start, stop) if start < stop else None,
            model,
            weights,
            reader.sized(MACHINE_BYTES) if reader.left else b"",
            _keys(reader) if reader.left else (),
            _revoked(reader) if reader.left else (),
            _flag(reader) if reader.left else False,
            _shares(reader, memory) if reader.left else (),
        )


@dataclass(frozen=True, slots=True)
class ModelOffer:
    """A whole model that a node provides with an engine of its own."""

    model: str
    precision: str = ""
    """Such as ``bf16`` or ``int4``; empty if unknown."""
    context: int = 0
    """Maximum tokens of a prompt and its answer; 0 if unknown."""

    def encode(self) -> bytes:
        """Encode the offer."""
        texts = sized(self.model.encode()) + sized(self.precision.encode())
        return texts + _CONTEXT.pack(self.context)

    @classmethod
    def read(cls, reader: Reader) -> Self:
        """Read an offer; raise `PeerFault` if it is malformed."""
        model, precision = reader.text(MAX_NAME_BYTES), reader.text(MAX_LABEL_BYTES)
        (context,) = reader.unpack(_CONTEXT)
        return cls(model, precision, reader.bounded("tokens of context", context, 0, MAX_CONTEXT))


@dataclass(frozen=True, slots=True)
class RingMembership:
    """What a node does in a further ring in which it takes part."""

    group: GroupId
    followed: bytes = b""
    is_loaded: bool = False
    may_change: bool = True
    obstacle: str = ""
    prepared: bytes = b""

    def encode(self) -> bytes:
        """Encode the membership."""
        texts = sized(self.group) + sized(self.followed) + sized(self.obstacle.encode())
        return texts + sized(self.prepared) + _FLAGS.pack(self.is_loaded, self.may_change)

    @classmethod
    def read(cls, reader: Reader) -> Self:
        """Read a membership; raise `PeerFault` if it is malformed."""
        group, followed = GroupId(reader.sized(GROUP_BYTES)), reader.sized(MAX_PLAN_BYTES)
        obstacle, prepared = reader.text(MAX_OBSTACLE_BYTES), reader.sized(DIGEST_BYTES)
        flags = (reader.bounded("for a flag", flag, 0, 1) for flag in reader.unpack(_FLAGS))
        is_loaded, may_change = map(bool, flags)
        return cls(group, followed, is_loaded, may_change, obstacle, prepared)


@dataclass(frozen=True, slots=True)
class StateRecord:
    """The current activity of a node; changes often."""

    lifecycle: Lifecycle = Lifecycle.JOIN
    links: tuple[tuple[NodeId, int], ...] = ()
    """Nodes that it is linked to, with the round trip in microseconds (0 until it is measured)."""
    followed: bytes = b""
    """The plan that it follows, encoded; empty for none."""
    is_loaded: bool = False
    """Whether it has loaded its layers of that plan."""
    may_change: bool = True
    """Whether, as the entry of that plan, it has no session that a change would hurt."""
    obstacle: str = ""
    """Why it cannot hold layers (a phrase); empty if it can."""
    faulty: tuple[NodeId, ...] = ()
    """Nodes that it refuses in a ring: their data was invalid too often, or they did not load."""
    offers: tuple[ModelOffer, ...] = ()
    """Models that it provides with an engine of its own."""
    group: GroupId = FIRST_GROUP
    """The ring in which it takes part, if only as a standby: the model and the replica."""
    used: tuple[ModelKey, ...] = ()
    """The models of the mesh that were asked for here lately; empty while it serves one."""
    prepared: bytes = b""
    """The digest of the plan for which it has loaded in advance what it can; empty for none."""
    further: tuple[RingMembership, ...] = ()
    """The further rings in which it takes part, in order of their groups; the fields above are
    those of the first."""

    @property
    def memberships(self) -> tuple[RingMembership, ...]:
        """All rings in which the node takes part, the first one first."""
        own = RingMembership(
            *(self.group, self.followed, self.is_loaded, self.may_change, self.obstacle),
            self.prepared,
        )
        return own, *self.further

    def has_loaded(self, followed: bytes) -> bool:
        """Return whether the node has loaded its span of a plan, given as it is published."""
        return any(each.is_loaded and each.followed == followed for each in self.memberships)

    def is_further(self, group: GroupId) -> bool:
        """Return whether a ring is one of the further ones of this node."""
        return any(each.group == group for each in self.further)

    def in_ring(self, group: GroupId) -> Self:
        """Return the state as one ring sees it: if the node takes part in it, what it does there.

        Else it is the state in the first ring of the node.
        """
        for each in self.further:
            if each.group == group:
                return replace(
                    self,
                    followed=each.followed,
                    is_loaded=each.is_loaded,
                    may_change=each.may_change,
                    obstacle=each.obstacle,
                    prepared=each.prepared,
                    group=group,
                    further=(),
                )
        return replace(self, further=()) if self.further else self

    def encode(self) -> bytes:
        """Encode the record."""
        flags = self.is_loaded, self.may_change, len(self.links)
        links = b"".join(_LINK.pack(node, round_trip) for node, round_trip in self.links)
        texts = sized(self.followed) + sized(self.obstacle.encode())
        faulty = sized(b"".join(self.faulty))
        offers = _COUNT.pack(len(self.offers)) + b"".join(each.encode() for each in self.offers)
        state = _STATE.pack(self.lifecycle, *flags)
        models = sized(self.group) + sized(b"".join(self.used)) + sized(self.prepared)
        further = _COUNT.pack(len(self.further)) + b"".join(each.encode() for each in self.further)
        return start_record() + state + links + texts + faulty + offers + models + further

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode the record; raise `PeerFault` if it is malformed."""
        reader = open_record(data, "State")
        lifecycle, is_loaded, may_change, count = reader.unpack(_STATE)
        reader.bounded("links", count, 0, MAX_MEMBERS)
        links = [reader.unpack(_LINK) for _ in range(count)]
        for _, round_trip in links:
            reader.bounded("microseconds of a round trip", round_trip, 0, MAX_ROUND_TRIP_US)
        followed = reader.sized(MAX_PLAN_BYTES)
        return cls(
            Lifecycle(lifecycle) if lifecycle in _LIFECYCLES else Lifecycle.OTHER,
            tuple((NodeId(node), round_trip) for node, round_trip in links),
            followed,
            bool(reader.bounded("for a flag", is_loaded, 0, 1)),
            bool(reader.bounded("for a flag", may_change, 0, 1)),
            reader.text(MAX_OBSTACLE_BYTES),
            _node_ids(reader) if reader.left else (),
            _offers(reader) if reader.left else (),
            group := GroupId(reader.sized(GROUP_BYTES)) if reader.left else FIRST_GROUP,
            _keys(reader) if reader.left else (),
            reader.sized(DIGEST_BYTES) if reader.left else b"",
            _memberships(reader, group) if reader.left else (),
        )


def alive(states: Mapping[NodeId, StateRecord], me: NodeId) -> frozenset[NodeId]:
    """Return the living nodes: those connected to ``me`` by links that both ends list.

    No node can declare another dead. A node that has not left is alive while it and another living
    node list each other.
    """
    here = {node: state for node, state in states.items() if state.lifecycle is not Lifecycle.LEFT}
    named = {node: {peer for peer, _ in state.links} for node, state in here.items()}
    found, wave = {me}, {me}
    while wave:
        pairs = ((node, peer) for node in wave for peer in named.get(node, ()))
        wave = {peer for node, peer in pairs if node in named.get(peer, ())} - found
        found |= wave
    return frozenset(found)


def _offers(reader: Reader) -> tuple[ModelOffer, ...]:
    (count,) = reader.unpack(_COUNT)
    reader.bounded("offers of models", count, 0, MAX_OFFERS)
    return tuple(ModelOffer.read(reader) for _ in range(count))


def _shares(reader: Reader, memory: int) -> tuple[RingShare, ...]:
    (count,) = reader.unpack(_COUNT)
    reader.bounded("shares", count, 0, MAX_RINGS - 1)
    shares = tuple(RingShare.read(reader) for _ in range(count))
    _check_order(reader, [each.group for each in shares])
    reader.bounded("bytes in shares", sum(each.memory_bytes for each in shares), 0, memory)
    return shares


def _memberships(reader: Reader, first: GroupId) -> tuple[RingMembership, ...]:
    (count,) = reader.unpack(_COUNT)
    reader.bounded("further rings", count, 0, MAX_RINGS - 1)
    found = tuple(RingMembership.read(reader) for _ in range(count))
    groups = [each.group for each in found]
    _check_order(reader, groups)
    reader.bounded("memberships more in its first ring", groups.count(first), 0, 0)
    return found


def _check_order(reader: Reader, groups: Sequence[GroupId]) -> None:
    """Check that groups ascend, so that each is there once."""
    disorder = sum(one >= other for one, other in pairwise(groups))
    reader.bounded("groups out of order", disorder, 0, 0)


def _manifest(reader: Reader) -> tuple[bytes, ...]:
    most = (MAX_LAYERS + ENDS) * DIGEST_PART_BYTES
    return _parts(reader, "weights", DIGEST_PART_BYTES, most)


def _keys(reader: Reader) -> tuple[ModelKey, ...]:
    most = MAX_HELD * MODEL_KEY_BYTES
    return tuple(map(ModelKey, _parts(reader, "models", MODEL_KEY_BYTES, most)))


def _node_ids(reader: Reader) -> tuple[NodeId, ...]:
    most = MAX_MEMBERS * NODE_ID_BYTES
    return tuple(map(NodeId, _parts(reader, "faulty nodes", NODE_ID_BYTES, most)))


def _flag(reader: Reader) -> bool:
    (value,) = reader.unpack(_COUNT)
    return bool(reader.bounded("for a flag", value, 0, 1))


def _revoked(reader: Reader) -> tuple[bytes, ...]:
    return _parts(reader, "revoked keys", KEY_TAG_BYTES, MAX_REVOKED * KEY_TAG_BYTES)


def _parts(reader: Reader, what: str, size: int, most: int) -> tuple[bytes, ...]:
    """Read at most this many bytes, in parts of one size."""
    data = reader.sized(most)
    reader.bounded(f"bytes at the end of its {what}", len(data) % size, 0, 0)
    return tuple(data[at : at + size] for at in range(0, len(data), size))


def _costs(reader: Reader, count: int) -> tuple[tuple[int, float], ...]:
    reader.bounded("rows of its cost table", count, 0, MAX_COSTS)
    costs, last = [], 0
    for rows, seconds in (reader.unpack(_COST) for _ in range(count)):
        last = reader.bounded("rows", rows, last + 1, MAX_ROWS)
        costs.append((last, reader.bounded("seconds", seconds, MIN_SECONDS, MAX_SECONDS)))
    return tuple(costs)
