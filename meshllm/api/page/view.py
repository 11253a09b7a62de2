"""What the page shows of a mesh: no address and no key.

Guests of a public API server see models, layers and speeds, but neither names, memory, links and
software of nodes nor how much others ask.
"""

from dataclasses import dataclass, replace

from meshllm.names import SHORT_LETTERS, Span
from meshllm.status import (
    PASSING_MEMORY,
    UNANSWERED_HINT,
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
    ServedRing,
    SessionCounts,
    unanswered,
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
    """The nodes of its rings, or the providers; hidden from guests."""
    count: int
    """Of the holders."""
    replicas: int
    """Rings that are wanted; 0 for a provider's."""
    serving: int
    """Rings that serve."""


@dataclass(frozen=True, slots=True)
class PageRing:
    """One of the rings of a mesh: a replica of a model."""

    model: str
    replica: int
    """From 1."""
    state: RingState
    reason: str
    """What it waits for."""
    is_own: bool
    """The reporting node takes part in it."""
    stages: tuple[str, ...]
    """Each with its node and its layers, in rank order."""
    policy: str
    """Known of the rings of the reporting node, as what follows."""
    execution: str
    """How it computes its layers."""
    speed: PageSpeed | None
    """Measured, else predicted."""


@dataclass(frozen=True, slots=True)
class PageStatus:
    """The state of a mesh."""

    state: RingState
    reason: str
    epoch: int
    policy: str
    members: int | None
    """Nodes that the ring should have; null lets the policy choose."""
    exclude: tuple[str, ...]
    """Nodes that hold no layers, as `PageNode.id`; hidden from guests."""
    model: str
    precision: str
    layers: int
    context: int
    models: tuple[PageModel, ...]
    rings: tuple[PageRing, ...]
    """All of the mesh; `hops` are those of the own one."""
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
    """A guest sees it, from whom all else is hidden."""
    is_client: bool
    """The API server runs on a client of the mesh, which knows neither nodes nor plans."""


def view_of(status: MeshStatus, *, is_public: bool) -> PageStatus:
    """Return what the page shows; ``is_public`` hides what guests do not need."""
    counts = SessionCounts(0, 0, 0, 0, 0) if is_public else status.sessions
    ring, model = status.ring, status.model
    names = {
        each.node: each.short if is_public else each.name or each.short for each in status.nodes
    }
    served = status.models or ((model,) if model else ())
    models = (*served, *status.provided)
    return PageStatus(
        state=ring.state,
        reason="" if is_public else ring.reason,
        epoch=ring.epoch,
        policy=ring.policy,
        members=ring.members,
        exclude=() if is_public else tuple(each[:SHORT_LETTERS] for each in ring.exclude),
        model=model.name if model else "",
        precision=model.weight_precision if model else "",
        layers=model.layers if model else 0,
        context=model.context if model else 0,
        models=tuple(_model(each, status, names, is_public=is_public) for each in models),
        rings=tuple(_ring(each, names, is_public=is_public) for each in status.rings),
        hops=_hops(ring, {each.node: (each.short, names[each.node]) for each in status.nodes}),
        nodes=tuple(_node(each, names[each.node], is_public=is_public) for each in status.nodes),
        measured=_speed(ring.measured),
        predicted=_speed(ring.predicted),
        advice="" if is_public else ring.advice,
        warnings=() if is_public else _warnings(status),
        memory=None if is_public or status.is_client else _rounded(status.memory),
        active=counts.active,
        waiting=counts.waiting,
        served=counts.served,
        tokens=counts.tokens,
        losses=counts.losses,
        is_public=is_public,
        is_client=status.is_client,
    )


def _warnings(status: MeshStatus) -> tuple[str, ...]:
    alone = (f"{found}: {UNANSWERED_HINT}",) if (found := unanswered(status)) else ()
    return (*alone, *status.warnings)


def _hops(ring: RingStatus, names: dict[str, tuple[str, str]]) -> tuple[PageHop, ...]:
    last = ring.measured.hops if ring.measured else ()
    # The latest answer may be that of an earlier ring.
    measured = {
        (hop.rank, hop.node[:SHORT_LETTERS], hop.layers): PageTimes(hop.compute_ms, hop.wire_ms)
        for hop in last
    }
    planned = ring.predicted.hops_with_head if ring.predicted else ()
    predicted = {hop.rank: PageTimes(hop.compute_ms, hop.wire_ms) for hop in planned}
    unknown = PageTimes()
    return tuple(
        PageHop(
            *names.get(stage.node, (stage.node[:7], stage.node[:7])),
            stage.layers,
            measured.get((rank, stage.node[:SHORT_LETTERS], stage.layers), unknown),
            predicted.get(rank, unknown),
        )
        for rank, stage in enumerate(ring.stages)
    )


def _rounded(memory: MemoryStatus) -> MemoryStatus:
    """Round what changes all the time, so that no event is sent for it."""
    changed = {name: getattr(memory, name) >> MEBIBYTE << MEBIBYTE for name in PASSING_MEMORY}
    return replace(memory, **changed)


def _speed(times: Measured | Planned | None) -> PageSpeed | None:
    return PageSpeed(times.ms_per_token, times.ttft_ms) if times else None


def _model(
    model: ModelStatus, status: MeshStatus, names: dict[str, str], *, is_public: bool
) -> PageModel:
    rings = [each for each in status.rings if each.model == model.name]
    is_own = not rings and model == status.model  # of a node that knows no other ring
    spans = status.ring.stages if is_own else [stage for each in rings for stage in each.stages]
    held = dict.fromkeys(names.get(each.node, each.node[:7]) for each in spans)
    holders = model.providers or tuple(held)
    states = [status.ring.state] if is_own else [each.state for each in rings]
    if status.is_client:  # it knows whether there is a ring, not how many
        states, model = [RingState.SERVING] if model.rings else [], replace(model, replicas=1)
    return PageModel(
        model.name,
        model.weight_precision,
        model.context,
        model.layers,
        () if is_public else holders,
        len(holders),
        0 if model.providers else max(model.replicas, 1),
        states.count(RingState.SERVING),
    )


def _ring(ring: ServedRing, names: dict[str, str], *, is_public: bool) -> PageRing:
    return PageRing(
        ring.model,
        ring.replica + 1,
        ring.state,
        "" if is_public else ring.reason,
        ring.is_own,
        tuple(f"{names.get(each.node, each.node[:7])} {each.layers}" for each in ring.stages),
        ring.status.policy if ring.status else "",
        ring.status.execution if ring.status and not is_public else "",
        _speed(ring.status.measured or ring.status.predicted) if ring.status else None,
    )


def _node(node: NodeStatus, name: str, *, is_public: bool) -> PageNode:
    link = None if is_public else node.link
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
