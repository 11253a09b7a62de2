"""Views of small meshes, fully connected unless a test cuts links."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from meshllm.names import FIRST_GROUP, Digest, GroupId, NodeId, Span
from meshllm.protocol.agreement.agreement import Agreement, agree
from meshllm.protocol.agreement.candidates import MeshView
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.records import ENDS, Lifecycle, Profile, StateRecord
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.session.messages import DType
from meshllm.protocol.weights.holders import FETCHES
from tests.builders.offers import model

CONFIG = Digest(b"c" * 32)


def charter(layers: int = 4) -> Charter:
    """Make a charter with a model of small layers."""
    return Charter(1, model(layers), DType.BFLOAT16, CONFIG)


def weights(layers: int = 4, changed: Mapping[int, bytes] | None = None) -> tuple[bytes, ...]:
    """Make the manifest of a model, with other digests for some of its parts."""
    parts = [bytes([index + 1]) * 16 for index in range(layers + ENDS - 1)]
    for index, digest in (changed or {}).items():
        parts[index] = digest
    return (*parts, CONFIG[:16])


def profile(layers: float, *, ms: float = 1.0, span: Span | None = None) -> Profile:
    """Make a profile with memory for ``layers`` of four layers, each of which takes ``ms``."""
    return Profile(
        "name",
        "1.0",
        (),
        round(layers * 100),
        ((1, ms / 1e3),),
        span=span,
        model="tiny",
        weights=weights(),
    )


@dataclass(frozen=True)
class World:
    """The true state of a mesh; every node of one component has the same view of it."""

    profiles: Mapping[NodeId, Profile]
    charter: Charter = field(default_factory=charter)
    apart_ms: Mapping[frozenset[NodeId], float] = field(default_factory=dict)
    """Round trips that are not 1 ms."""
    cut: Collection[frozenset[NodeId]] = ()
    """Pairs without a link."""
    followed: Mapping[NodeId, Plan] = field(default_factory=dict)
    busy: Collection[NodeId] = ()
    """Entries with sessions that a change would hurt."""
    leaving: Collection[NodeId] = ()
    left: Collection[NodeId] = ()
    gone: Collection[NodeId] = ()
    """Dead nodes, which have no links."""
    removed: Collection[NodeId] = ()
    faulty: Mapping[NodeId, tuple[NodeId, ...]] = field(default_factory=dict)
    """Nodes that each node refuses as neighbours."""
    groups: Mapping[NodeId, GroupId] = field(default_factory=dict)
    """Nodes that take part in other groups than the first."""
    fetching: Collection[NodeId] = ()
    """Nodes that await weights."""

    def view(self, me: NodeId, author: NodeId | None = None) -> MeshView:
        """Return the view of a node; the author of the charter is the lowest id unless given."""
        states = {node: self._state(node) for node in self.profiles}
        author = author or min(self.profiles)
        return MeshView(me, self.charter, author, self.profiles, states, self.removed)

    def agree(self, me: NodeId | None = None) -> Agreement:
        """Run `agree` on one node, the lowest living one unless given."""
        return agree(self.view(me or min(set(self.profiles).difference(self.gone, self.left))))

    def follow(self, agreement: Agreement) -> "World":
        """Let every living node follow the plan."""
        if agreement.plan is None:
            return self
        return replace(
            self, followed={**self.followed, **dict.fromkeys(agreement.alive, agreement.plan)}
        )

    def _state(self, node: NodeId) -> StateRecord:
        plan = self.followed.get(node)
        lifecycle = Lifecycle.LEAVING if node in self.leaving else Lifecycle.SERVING
        return StateRecord(
            Lifecycle.LEFT if node in self.left else lifecycle,
            tuple(
                (peer, round(self.apart_ms.get(frozenset({node, peer}), 1.0) * 1e3))
                for peer in self.profiles
                if peer != node
                and frozenset({node, peer}) not in self.cut
                and not {node, peer} & {*self.gone, *self.left}
            ),
            plan.encode() if plan else b"",
            may_change=node not in self.busy,
            obstacle=FETCHES if node in self.fetching else "",
            faulty=self.faulty.get(node, ()),
            group=self.groups.get(node, FIRST_GROUP),
        )
