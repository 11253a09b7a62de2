"""What the page shows of a mesh: no address, no key, and to guests of a public door no name."""

from dataclasses import dataclass, replace

from meshllm.api.v1.precision import precision_of
from meshllm.names import Span
from meshllm.status import (
    LossCounts,
    Measured,
    MemoryStatus,
    MeshStatus,
    ModelStatus,
    NodeState,
    NodeStatus,
    Planned,
    RingState,
    RingStatus,
)

MEBIBYTE = 20  # bits


@dataclass(frozen=True, slots=True)
class PageNode:
    """A node."""

    id: str
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
class PageTimes:
    """Times of one rank per token; None is unknown."""

    compute_ms: float | None = None
    wire_ms: float | None = None
    """To the next rank."""


@dataclass(frozen=True, slots=True)
class PageHop:
    """One rank of the ring."""

    id: str
    """Of the node, as `PageNode.id`."""
    name: str
    layers: Span
    measured: PageTimes
    predicted: PageTimes


@dataclass(frozen=True, slots=True)
class PageSpeed:
    """The speed of the ring."""

    ms_per_token: float
    ttft_ms: float
    """Time to the first token."""


@dataclass(frozen=True, slots=True)
class PageModel:
    """A model that is served."""

    name: str
    precision: str
    context: int
    layers: int
    """0 for a provider's."""
    holders: tuple[str, ...]
    """The ring in rank order, or the providers; hidden from guests."""
    count: int
    """Of the holders."""
    is_provided: bool


@dataclass(frozen=True, slots=True)
class PageStatus:
    """The state of a mesh."""

    state: RingState
    reason: str
    epoch: int
    policy: str
    model: str
    precision: str
    layers: int
    context: int
    models: tuple[PageModel, ...]
    hops: tuple[PageHop, ...]
    nodes: tuple[PageNode, ...]
    measured: PageSpeed | None
    """Of the latest answer."""
    predicted: PageSpeed | None
    advice: str
    warnings: tuple[str, ...]
    memory: MemoryStatus | None
    """Of the reporting node."""
    active: int
    waiting: int
    served: int
    tokens: int
    losses: tuple[LossCounts, ...]
    is_public: bool
    """Names, memory and reasons are hidden from this guest."""


def view_of(status: MeshStatus, *, is_public: bool) -> PageStatus:
    """Return what the page shows; ``is_public`` hides names, memory and reasons."""
    ring, model = status.ring, status.model
    names = {
        each.node: each.short if is_public else each.name or each.short for each in status.nodes
    }
    hops = _hops(ring, {each.node: (each.short, names[each.node]) for each in status.nodes})
    held = tuple(hop.name for hop in hops)
    served = [(model, held)] if model else []
    models = [*served, *((each, each.providers) for each in status.provided)]
    return PageStatus(
        state=ring.state,
        reason="" if is_public else ring.reason,
        epoch=ring.epoch,
        policy=ring.policy,
        model=model.name if model else "",
        precision=precision_of(model) if model else "",
        layers=model.layers if model else 0,
        context=model.context if model else 0,
        models=tuple(_model(each, () if is_public else who, len(who)) for each, who in models),
        hops=hops,
        nodes=tuple(_node(each, names[each.node], is_public=is_public) for each in status.nodes),
        measured=_speed(ring.measured),
        predicted=_speed(ring.predicted),
        advice="" if is_public else ring.advice,
        warnings=() if is_public else status.warnings,
        memory=None if is_public else _rounded(status.memory),
        active=status.sessions.active,
        waiting=status.sessions.waiting,
        served=status.sessions.served,
        tokens=status.sessions.tokens,
        losses=status.sessions.losses,
        is_public=is_public,
    )


def _hops(ring: RingStatus, names: dict[str, tuple[str, str]]) -> tuple[PageHop, ...]:
    last = ring.measured.hops if ring.measured else ()
    # The latest answer may be that of an earlier ring.
    measured = {(hop.rank, hop.layers): PageTimes(hop.compute_ms, hop.wire_ms) for hop in last}
    planned = ring.predicted.hops if ring.predicted else ()
    predicted = {hop.rank: PageTimes(hop.compute_ms, hop.wire_ms) for hop in planned}
    unknown = PageTimes()
    return tuple(
        PageHop(
            *names.get(stage.node, (stage.node[:7], stage.node[:7])),
            stage.layers,
            measured.get((rank, stage.layers), unknown),
            predicted.get(rank, unknown),
        )
        for rank, stage in enumerate(ring.stages)
    )


def _rounded(memory: MemoryStatus) -> MemoryStatus:
    """Round what changes all the time, so that no event is sent for it."""
    return replace(memory, process=memory.process >> MEBIBYTE << MEBIBYTE)


def _speed(times: Measured | Planned | None) -> PageSpeed | None:
    return PageSpeed(times.ms_per_token, times.ttft_ms) if times else None


def _model(model: ModelStatus, holders: tuple[str, ...], count: int) -> PageModel:
    return PageModel(
        model.name,
        precision_of(model),
        model.context,
        model.layers,
        holders,
        count,
        is_provided=bool(model.providers),
    )


def _node(node: NodeStatus, name: str, *, is_public: bool) -> PageNode:
    link = node.link
    return PageNode(
        node.short,
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
