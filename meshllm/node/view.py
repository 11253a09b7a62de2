"""A snapshot of a node: what its owner may be shown of it, at one moment."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshllm.names import MeshId, NodeId
from meshllm.node.requests.router import Counts
from meshllm.protocol.agreement.agreement import Agreement
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.records import Profile, State
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.trust.credential import Role
from meshllm.transport.contract import LinkStatistics, Network


@dataclass(frozen=True, slots=True)
class LinkView:
    """A link to another member."""

    role: Role
    issuers: tuple[NodeId, ...]
    """Those by whose word the peer is here."""
    instance: int
    """Which process of the peer it is."""
    round_trip_us: int
    """Smoothed; 0 until it is measured."""
    heard_s: float
    """Seconds since the peer was heard."""
    ahead_s: float | None
    """By how much the peer's clock is ahead; None until it told the time."""
    statistics: LinkStatistics
    address: str


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node, its ring and its mesh, as it knows them."""

    me: NodeId
    name: str
    version: str
    mesh: MeshId
    incarnation: int
    since_s: float
    """Seconds that it runs."""
    is_leaving: bool
    addresses: tuple[str, ...]
    networks: tuple[Network, ...]
    charter: Charter | None
    profiles: Mapping[NodeId, Profile]
    states: Mapping[NodeId, State]
    hosts: Mapping[NodeId, tuple[NodeId, ...]]
    """Those by whose word a node is here."""
    alive: frozenset[NodeId]
    removed: tuple[NodeId, ...]
    links: Mapping[NodeId, LinkView]
    agreement: Agreement | None
    advice: str
    """What would make the ring faster."""
    plan: Plan | None
    """The plan that it serves, or stands by for."""
    is_served: bool
    """The ring of the plan answers."""
    reason: str
    """Why no ring answers, where none does."""
    trouble: str
    """What keeps it from serving its span; empty when nothing does."""
    sessions: int
    """Under way on this rank."""
    counts: Counts
    execution: str = ""
    """How its engine runs, and why."""
    warnings: tuple[str, ...] = ()
    """What its owner should look after."""
