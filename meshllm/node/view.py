"""A snapshot of a node, from which its status is made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshllm.names import FIRST_GROUP, GroupId, LossCause, MeshId, NodeId
from meshllm.node.requests.counts import RequestCounters
from meshllm.protocol.agreement.agreement import Agreement
from meshllm.protocol.agreement.groups import Group
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.records import Profile, StateRecord
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.trust.credential import Role
from meshllm.transport.contract import LinkStatistics, Network


@dataclass(frozen=True, slots=True)
class LinkView:
    """A link to another member."""

    role: Role
    issuers: tuple[NodeId, ...]
    """The chain of inviters of the peer."""
    instance: int
    """The incarnation of the peer: which process it is."""
    round_trip_us: int
    """Smoothed; 0 until measured."""
    heard_s: float
    """Seconds since the last message from the peer."""
    ahead_s: float | None
    """Offset of the peer's clock, positive if ahead; None if unknown."""
    statistics: LinkStatistics
    address: str


@dataclass(frozen=True, slots=True)
class OwnRing:
    """What a node knows of a ring in which it takes part; see `NodeView`."""

    agreement: Agreement | None = None
    advice: str = ""
    reason: str = ""
    execution: str = ""
    history: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True, slots=True)
class RingView:
    """One ring of the mesh, as known to a node."""

    group: Group
    plan: Plan | None
    """The plan that its nodes have loaded; of the own ring, the one that it follows."""
    is_served: bool
    lacks_bytes: int = 0
    """Memory that it lacks; 0 if its nodes have enough."""
    is_unused: bool = False
    """Whether only other models were asked for lately."""
    own: OwnRing | None = None
    """Known if this node takes part in it."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node, its ring and its mesh, as known to it."""

    me: NodeId
    name: str
    version: str
    mesh: MeshId
    incarnation: int
    since_s: float
    """Uptime in seconds."""
    is_leaving: bool
    addresses: tuple[str, ...]
    networks: tuple[Network, ...]
    charter: Charter | None
    """Of the own ring; of the first model while it has none."""
    profiles: Mapping[NodeId, Profile]
    states: Mapping[NodeId, StateRecord]
    inviters: Mapping[NodeId, tuple[NodeId, ...]]
    """The chain of inviters of each node."""
    alive: frozenset[NodeId]
    removed: tuple[NodeId, ...]
    links: Mapping[NodeId, LinkView]
    agreement: Agreement | None
    advice: str
    """A change that would make the ring faster; may be empty."""
    plan: Plan | None
    """The plan that it follows, with or without a span."""
    is_served: bool
    """Whether the ring of the plan serves."""
    reason: str
    """Why no ring serves, if none does."""
    trouble: str
    """The error that keeps it from serving its span; may be empty."""
    sessions: int
    """Running on the ranks of this node."""
    recomputed: Mapping[LossCause, int]
    """See `OwnState.recomputed`."""
    counts: RequestCounters
    group: GroupId = FIRST_GROUP
    """The ring in which it takes part."""
    rings: tuple[RingView, ...] = ()
    """All rings of the mesh, its own included, in their order."""
    execution: str = ""
    """The execution mode of its model, and why."""
    history: Sequence[tuple[str, float]] = ()
    """See `RingRuntime.history`."""
    warnings: tuple[str, ...] = ()
    """Conditions that need the owner's attention."""
    unanswered: int = 0
    """See `MeshStatus.unanswered`."""

    def of_ring(self, ring: RingView) -> "NodeView | None":
        """Return this view with another ring of the node as its own; None if it is in no such."""
        if (own := ring.own) is None:
            return None
        return replace(
            self,
            charter=ring.group.charter,
            group=ring.group.id,
            plan=ring.plan,
            is_served=ring.is_served,
            agreement=own.agreement,
            advice=own.advice,
            reason=own.reason,
            execution=own.execution,
            history=own.history,
        )
