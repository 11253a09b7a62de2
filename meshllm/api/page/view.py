"""What the page shows of a mesh: no address, no key, and on a public door no name."""

from dataclasses import dataclass

from meshllm.names import Span
from meshllm.status import LossCounts, MeshStatus, NodeState, NodeStatus, RingState


@dataclass(frozen=True, slots=True)
class PageNode:
    """A node."""

    name: str
    state: NodeState
    reason: str
    rank: int | None
    layers: Span | None
    memory_bytes: int
    is_self: bool
    round_trip_ms: float | None = None
    """Of the link from the reporting node."""
    path: str = ""
    """`direct`, or `relayed`."""


@dataclass(frozen=True, slots=True)
class PageHop:
    """One rank of the ring, with times per token."""

    name: str
    layers: Span
    compute_ms: float | None
    wire_ms: float | None
    """To the next rank."""


@dataclass(frozen=True, slots=True)
class PageStatus:
    """The state of a mesh."""

    state: RingState
    reason: str
    epoch: int
    model: str
    layers: int
    context: int
    precision: str
    hops: tuple[PageHop, ...]
    nodes: tuple[PageNode, ...]
    measured_ms: float | None
    """Per token."""
    predicted_ms: float | None
    advice: str
    active: int
    served: int
    tokens: int
    losses: tuple[LossCounts, ...]
    is_public: bool
    """Names are hidden from those who ask."""


def view_of(status: MeshStatus, *, is_public: bool) -> PageStatus:
    """Return what the page shows; ``is_public`` hides names, memory and reasons."""
    ring, model = status.ring, status.model
    names = {
        each.node: each.short if is_public else each.name or each.short for each in status.nodes
    }
    measured = ring.measured
    times = {hop.rank: hop for hop in measured.hops} if measured else {}
    hops = tuple(
        PageHop(
            names.get(stage.node, stage.node[:7]),
            stage.layers,
            times[rank].compute_ms if rank in times else None,
            times[rank].wire_ms if rank in times else None,
        )
        for rank, stage in enumerate(ring.stages)
    )
    return PageStatus(
        ring.state,
        "" if is_public else ring.reason,
        ring.epoch,
        model.name if model else "",
        model.layers if model else 0,
        model.context if model else 0,
        f"{model.dtype}{'' if model.quant == 'none' else f', {model.quant}'}" if model else "",
        hops,
        tuple(_node(each, names[each.node], is_public=is_public) for each in status.nodes),
        measured.ms_per_token if measured else None,
        ring.predicted.ms_per_token if ring.predicted else None,
        "" if is_public else ring.advice,
        status.sessions.active,
        status.sessions.served,
        status.sessions.tokens,
        status.sessions.losses,
        is_public,
    )


def _node(node: NodeStatus, name: str, *, is_public: bool) -> PageNode:
    link = node.link
    return PageNode(
        name,
        node.state,
        "" if is_public else node.reason,
        node.rank,
        node.layers,
        0 if is_public else node.memory_bytes,
        node.is_self,
        link.round_trip_ms if link else None,
        link.path if link else "",
    )
