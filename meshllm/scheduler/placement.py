"""The choices of a placement: replicas of a model, each on some machines, and how fast each is.

Machines of one kind are alike, so a replica is chosen by how many of each kind it takes. All layers
of a model are alike too, so the best spans are found by giving layer after layer to a machine.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from meshllm.errors import UserError
from meshllm.names import NODE_ID_BYTES, NodeId, Span
from meshllm.protocol.planning.chunking import ring_times
from meshllm.protocol.planning.plan import (
    Ends,
    Links,
    LinkSpeed,
    ModelSizes,
    Offer,
    Plan,
    PlanStage,
)
from meshllm.protocol.planning.problem import room_tokens, usable_bytes
from meshllm.protocol.planning.tours import short_tour
from meshllm.scheduler.architecture import Architecture
from meshllm.scheduler.engine import MAX_PROVIDER_SESSIONS, ReplicaEngine
from meshllm.scheduler.load import ModelLoad
from meshllm.scheduler.machine import MachineKind

_STEP_ROWS = 8  # of a step under load, by which the spans of unequal machines are weighed


class LayerAllocation(StrEnum):
    """How the layers of a replica are given to its machines."""

    BALANCED = "balanced"
    """The slowest machine is as fast as possible."""
    FASTEST = "fastest"
    """As many as fit on the fastest machines."""
    PROPORTIONAL = "proportional"
    """In proportion to memory."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model and its load."""

    architecture: Architecture
    load: ModelLoad
    sizes: ModelSizes = field(init=False)

    def __post_init__(self) -> None:
        sizes = self.architecture.sizes(self.load.context)
        object.__setattr__(self, "sizes", sizes)


@dataclass(frozen=True, slots=True)
class Workload:
    """Models, machines and links: what a placement is made for."""

    models: tuple[ServedModel, ...]
    kinds: tuple[MachineKind, ...]
    wires: dict[tuple[str, str], LinkSpeed] = field(default_factory=dict)
    """By the names of two kinds, or twice the same."""
    default_wire: LinkSpeed = field(default_factory=lambda: LinkSpeed(0.0005))

    def __post_init__(self) -> None:
        names = [kind.name for kind in self.kinds]
        if len(set(names)) < len(names):
            raise UserError("Two kinds of machines have the same name", hint="rename one of them")

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each model, with the precision where several have that name."""
        models = [each.architecture for each in self.models]
        counts = Counter(each.name for each in models)
        return tuple(it.name if counts[it.name] == 1 else it.precise_name for it in models)

    @property
    def counts(self) -> tuple[int, ...]:
        """Count the machines of each kind."""
        return tuple(kind.count for kind in self.kinds)

    def may_hold(self, kind: int, model: int) -> bool:
        """Return whether machines of a kind may hold layers of a model."""
        return self.kinds[kind].may_hold(self.models[model].architecture)

    def wire(self, here: int, there: int) -> LinkSpeed:
        """Return the link between machines of two kinds."""
        pair = self.kinds[here].name, self.kinds[there].name
        return self.wires.get(pair) or self.wires.get(pair[::-1]) or self.default_wire


@dataclass(frozen=True, slots=True)
class ReplicaOption:
    """One replica of a model: a ring of machines of some kinds, and its speeds."""

    model: int
    kinds: tuple[int, ...]
    """The kind of each rank."""
    spans: tuple[Span, ...]
    uses: tuple[int, ...]
    """Machines of each kind."""
    engine: ReplicaEngine = field(compare=False)

    @property
    def machines(self) -> int:
        """Count its machines."""
        return len(self.kinds)


def make_option(
    workload: Workload, model: int, machines: Sequence[int], spread: LayerAllocation
) -> ReplicaOption | None:
    """Make a replica of the machines of these kinds, the entry first; None if it does not fit."""
    order = _tour(workload, machines)
    kinds = [workload.kinds[kind] for kind in order]
    served = workload.models[model]
    if len(order) > 1 and any(kind.is_provider for kind in kinds):
        return None
    if not all(kind.may_hold(served.architecture) for kind in kinds):
        return None
    nodes = [NodeId(number.to_bytes(NODE_ID_BYTES)) for number in range(len(order))]
    offers = [_offer(served, kind, node) for kind, node in zip(kinds, nodes, strict=True)]
    rooms = [_room(served, *pair) for pair in zip(kinds, offers, strict=True)]
    counts = _allot(served, offers, rooms, spread)
    if counts is None:
        return None
    spans = _spans(counts)
    stages = tuple(PlanStage(node, span) for node, span in zip(nodes, spans, strict=True))
    plan = Plan(1, served.architecture.name, Ends.ENTRY, stages)
    links = Links(
        {
            (here, there): workload.wire(order[at], order[to])
            for at, here in enumerate(nodes)
            for to, there in enumerate(nodes)
            if at != to
        }
    )
    engine = _engine(served, kinds, plan, offers, links)
    uses = tuple(order.count(kind) for kind in range(len(workload.kinds)))
    return ReplicaOption(model, tuple(order), spans, uses, engine)


def most_layers(served: ServedModel, kind: MachineKind) -> int:
    """Return how many layers a machine of a kind can hold if it is not the entry."""
    if not kind.may_hold(served.architecture):
        return 0
    offer = _offer(served, kind, NodeId(bytes(NODE_ID_BYTES)))
    return _room(served, kind, offer) // _layer_bytes(served.sizes)


def _offer(served: ServedModel, kind: MachineKind, node: NodeId) -> Offer:
    """Return what a machine offers; a node keeps memory for what a forward computes."""
    offer = kind.offer(node, served.architecture)
    if kind.is_provider:
        return offer
    return replace(offer, reserve_bytes=served.sizes.workspace_bytes)


def _room(served: ServedModel, kind: MachineKind, offer: Offer) -> int:
    """Return the bytes for layers and their caches; a node copies that of one layer as it grows."""
    growth = 0 if kind.is_provider else served.sizes.context * served.sizes.kv_bytes_per_token[0]
    return max(0, usable_bytes(offer) - growth)


def _layer_bytes(sizes: ModelSizes) -> int:
    """Return the bytes of a layer with the cache of one session."""
    return sizes.layer_bytes[0] + sizes.kv_bytes_per_token[0] * sizes.context


def _engine(
    served: ServedModel,
    kinds: Sequence[MachineKind],
    plan: Plan,
    offers: Sequence[Offer],
    links: Links,
) -> ReplicaEngine:
    times = ring_times(plan, offers, links, served.sizes)
    rooms = (room for room in room_tokens(plan, offers, served.sizes) if room is not None)
    is_provider = kinds[0].is_provider
    cached = served.architecture.kv_bytes_per_token
    return ReplicaEngine(
        times,
        [
            len(stage.span) * cached / kind.whole_bandwidth
            for stage, kind in zip(plan.stages, kinds, strict=True)
        ],
        room_tokens=min(rooms),
        chunk=times.best_pace(round(served.load.prompt.mean), others=1).chunk,
        max_sessions=MAX_PROVIDER_SESSIONS if is_provider else times.best_sessions,
        mixes_prefill_and_decode=is_provider,
    )


def _tour(workload: Workload, machines: Sequence[int]) -> tuple[int, ...]:
    """Order machines, the first of which stays the first, by a short tour."""
    costs = [[round(workload.wire(a, b).latency_s * 1e9) for b in machines] for a in machines]
    return tuple(machines[at] for at in short_tour(costs, 0, range(1, len(machines))))


def _allot(
    served: ServedModel, offers: Sequence[Offer], rooms: Sequence[int], spread: LayerAllocation
) -> list[int] | None:
    """Return how many layers each machine gets, one at least; None if they do not fit."""
    sizes = served.sizes
    layer = _layer_bytes(sizes)
    rooms = [rooms[0] - sizes.ends_bytes, *rooms[1:]]
    most = [max(0, room) // layer for room in rooms]
    if min(most) < 1 or sum(most) < sizes.layers or len(offers) > sizes.layers:
        return None
    counts = [1] * len(offers)
    works = [_request_s(served, offer) for offer in offers]
    shared = offers[0].layer_seconds(_STEP_ROWS) / offers[0].layer_seconds(1) / _STEP_ROWS
    head_s = offers[0].head_s * shared * served.load.answer.mean
    total = sum(rooms)

    def after(at: int) -> float:
        """Return how bad it is to give a machine one layer more."""
        if spread is LayerAllocation.BALANCED:
            return works[at] * (counts[at] + 1) + (0.0 if at else head_s)
        if spread is LayerAllocation.FASTEST:
            return works[at]
        return counts[at] - sizes.layers * rooms[at] / total

    for _ in range(sizes.layers - len(offers)):
        free = [at for at in range(len(offers)) if counts[at] < most[at]]
        counts[min(free, key=after)] += 1
    return counts


def _request_s(served: ServedModel, offer: Offer) -> float:
    """Return the seconds of a mean request in one layer, its steps shared with others."""
    prompt = max(1, round(served.load.prompt.mean))
    step_s = offer.layer_seconds(_STEP_ROWS) / _STEP_ROWS
    return offer.layer_seconds(prompt) + served.load.answer.mean * step_s


def _spans(counts: Sequence[int]) -> tuple[Span, ...]:
    starts = [sum(counts[:at]) for at in range(len(counts))]
    return tuple(Span(at, at + count) for at, count in zip(starts, counts, strict=True))
