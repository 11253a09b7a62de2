"""Candidate nodes for a ring, and the latency of the links between them."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

from meshllm.errors import PeerFault
from meshllm.names import FIRST_GROUP, Digest, GroupId, NodeId, Span, short
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.records import (
    DIGEST_PART_BYTES,
    ENDS,
    Lifecycle,
    Profile,
    StateRecord,
    alive,
)
from meshllm.protocol.planning.plan import (
    MAX_EPOCH,
    MAX_JUMP,
    MAX_SECONDS,
    Ends,
    Links,
    LinkSpeed,
    ModelSizes,
    Offer,
    Plan,
)
from meshllm.protocol.weights.holders import awaits_weights

NEAR_US = 250  # shorter round trips count as this: the difference is noise next to compute time
MAX_BYTES_PER_S = 1 << 48  # 35 times the fastest memory of 2026; sparse layers read only a part
MIN_LAYER_S = 1e-6  # whatever its size: the launch of one kernel takes longer
MAX_MEMORY_BYTES = 1 << 46  # 64 TiB, more than the largest single machine
NO_LINK = LinkSpeed(MAX_SECONDS)
"""Stands for a link that is missing or unmeasured; no ring uses it."""

_ABSENT = bytes(DIGEST_PART_BYTES)


@dataclass(frozen=True, slots=True)
class MeshView:
    """One node's view of its mesh: the records of its store."""

    me: NodeId
    charter: Charter
    """Of the whole mesh, or of the model of one ring."""
    author: NodeId
    """The founder, who wrote the charter."""
    profiles: Mapping[NodeId, Profile]
    states: Mapping[NodeId, StateRecord]
    """While it runs, a node reports the plan that it followed last, even without a ring."""
    removed: Collection[NodeId] = ()
    group: GroupId = FIRST_GROUP
    """The ring to plan; a plan uses nodes that take part in it."""
    ending: frozenset[NodeId] = frozenset()
    """Nodes that serve in the ring until a plan without them can replace the one in force."""
    eases: bool = True
    """Whether terms of members yield where no ring satisfies them, see `Charter.eased`."""

    def alive(self) -> frozenset[NodeId]:
        """Return the members that are alive."""
        states = {node: at for node, at in self.states.items() if node not in self.removed}
        state = states.get(self.me)
        is_here = self.me not in self.removed and not (state and state.lifecycle is Lifecycle.LEFT)
        return alive(states, self.me) if is_here else frozenset()

    def group_of(self, node: NodeId) -> GroupId:
        """Return the group in which a node takes part; that of this view if it is unknown."""
        state = self.states.get(node)
        return state.group if state else self.group


@dataclass(frozen=True, slots=True)
class Candidates:
    """The nodes that a ring can use, and why the others cannot be used."""

    offers: tuple[Offer, ...]
    """Ordered by node id."""
    links: Links
    refused: Mapping[NodeId, str]
    """Nodes incompatible with the others, and why (a phrase)."""
    waiting: Mapping[NodeId, str]
    """Nodes that cannot hold layers yet, or not their fixed span, and why (a phrase)."""
    spans: Mapping[NodeId, Span] = field(default_factory=dict)
    """The fixed span of each node that has one and stays."""
    leaving: frozenset[NodeId] = frozenset()
    """Nodes that a new plan must not use."""
    faulty: Mapping[NodeId, str] = field(default_factory=dict)
    """Nodes that another one refuses as a neighbour, and why (a phrase)."""


def followed_plans(view: MeshView) -> dict[NodeId, Plan]:
    """Return the plan that each node follows.

    Ignores plans with an absurd epoch: no member uses up the epochs, and what one has used up is
    forgotten with it.
    """
    encoded = {node: at.followed for node, at in view.states.items() if node not in view.removed}
    plans = decode_plans(encoded.values())
    followed = {node: plans[data] for node, data in encoded.items() if data in plans}
    most = highest_epoch(followed.get(node) for node in view.alive())
    return {node: plan for node, plan in followed.items() if plan.epoch <= most}


def highest_epoch(followed: Iterable[Plan | None]) -> int:
    """Return the highest epoch that is not absurd, from the plans of all living nodes.

    It is `MAX_JUMP` above the lower median of their epochs; no plan counts as 0.
    """
    epochs = sorted(plan.epoch if plan else 0 for plan in followed)
    return MAX_JUMP + (epochs[(len(epochs) - 1) // 2] if epochs else 0)


def decode_plans(encoded: Iterable[bytes]) -> dict[bytes, Plan]:
    """Decode plans, except for malformed ones and those that no later epoch could replace."""
    plans = ((data, decoded(data)) for data in set(encoded))
    return {data: plan for data, plan in plans if plan and plan.epoch < MAX_EPOCH}


@lru_cache(512)
def decoded(followed: bytes) -> Plan | None:
    """Return the plan of a state record; None if it is not one."""
    try:
        return Plan.decode(followed)
    except PeerFault:
        return None


def plan_in_force(
    followed: Mapping[NodeId, Plan],
    author: NodeId,
    works: Callable[[Plan], bool] = lambda plan: True,
) -> Plan | None:
    """Return the plan in force of those that living nodes follow; None if none follows one.

    A plan that works and that all its nodes follow takes precedence over those of which this is not
    true: a node can claim to follow a later plan that names others. While nodes follow the next
    plan, one by one, it is the latest.
    """
    plans = set(followed.values())
    whole = [
        plan
        for plan in plans
        if all(followed.get(at.node) == plan for at in plan.stages) and works(plan)
    ]
    latest = max(plans, key=lambda plan: plan.precedence, default=None)
    return max(whole, key=partial(ring_precedence, author), default=latest)


def ring_precedence(author: NodeId | None, plan: Plan) -> tuple[int, bool, tuple[int, Digest]]:
    """Order rings of one model that all their nodes claim to serve: the highest is in force.

    That is the one with the most stages, as a node can claim one of itself alone, then one with the
    author of the charter, then the latest.
    """
    is_of_author = any(stage.node == author for stage in plan.stages)
    return len(plan.stages), is_of_author, plan.precedence


def is_of_group(view: MeshView, plan: Plan) -> bool:
    """Return whether no node of a plan takes part in another group than that of the view."""
    return all(view.group_of(stage.node) == view.group for stage in plan.stages)


def find_candidates(view: MeshView, here: Collection[NodeId], ring: Sequence[NodeId]) -> Candidates:
    """Find the living nodes that can be planned with.

    If nodes contradict each other, the nodes of the current ring take precedence, in rank order,
    then the author of the charter, then lower ids.
    """
    precedence = list(dict.fromkeys((*(node for node in ring if node in here), view.author)))
    precedence += sorted(set(here).difference(precedence))
    accepted, refused, waiting = _classify(view, here, precedence)
    usable = [node for node in accepted if node in here]
    # Longer spans first: a short one in the middle would exclude two that tile the layers.
    leaving = _leaving(view, here)
    staying = [node for node in usable if node not in leaving]
    wanted = {node: span for node in staying if (span := view.profiles[node].span)}
    order = sorted(wanted, key=lambda node: (node not in ring, -len(wanted[node])))
    spans, idle = _spans({node: wanted[node] for node in order}, view.charter)
    return Candidates(
        tuple(
            offer_of(node, view.profiles[node], view.charter.shape)
            for node in sorted(set(usable) - set(idle))
        ),
        links_of(view.states, here),
        {node: why for node, why in refused.items() if node in here},
        {node: why for node, why in (waiting | idle).items() if node in here},
        spans,
        leaving,
        _faulty(view.states, here),
    )


def ready_members(view: MeshView, here: Collection[NodeId]) -> frozenset[NodeId]:
    """Return the nodes that have measured the model and have its weights.

    A ready node counts even if the ring cannot use it: no other node will replace it.
    """
    return frozenset(
        node
        for node in here
        if (profile := view.profiles.get(node)) is not None
        and not _unready(profile, None)
        and not awaits_weights(view.states.get(node, StateRecord()))
    )


def count_lacking(charter: Charter, ready: Collection[NodeId]) -> int:
    """Count the members requested by the charter that are absent or not ready yet."""
    most = charter.shape.layers + (charter.ends is Ends.CLIENT)
    return max(0, min(charter.members or 0, most) - len(ready))


def first_mismatch(one: Sequence[bytes], other: Sequence[bytes]) -> str | None:
    """Return the first part in which two manifests differ, ignoring parts that either lacks."""
    if len(one) != len(other):
        return "number of layers"
    layers = len(one) - ENDS
    names = [*(f"layer {index}" for index in range(layers)), "embedding", "head", "configuration"]
    pairs = zip(names, one, other, strict=True)
    return next((name for name, a, b in pairs if a != b and _ABSENT not in (a, b)), None)


def offer_of(node: NodeId, profile: Profile, shape: ModelSizes) -> Offer:
    """Make an offer of what a node says of itself, within what any machine could do."""
    layer_s = max(MIN_LAYER_S, sum(shape.layer_bytes) / shape.layers / MAX_BYTES_PER_S)
    head_s = shape.head_read_bytes / MAX_BYTES_PER_S
    return Offer(
        node,
        min(profile.memory_bytes, MAX_MEMORY_BYTES),
        tuple((rows, max(seconds, layer_s)) for rows, seconds in profile.layer_s),
        max(profile.head_s, head_s),
        profile.reserve_bytes,
    )


def links_of(states: Mapping[NodeId, StateRecord], here: Collection[NodeId]) -> Links:
    """Return the links that both ends name, with the shorter of the two measured round trips.

    Nodes that refuse each other have none: a false accusation costs only links of its author. A
    node that the author of the charter refuses is not a candidate, not even for a ring of its own.
    """
    named = {node: dict(states[node].links) for node in here if node in states}
    speeds = {}
    for node, peers in named.items():
        for peer, round_trip in peers.items():
            if node < peer and node in named.get(peer, ()) and not _refuse(states, node, peer):
                measured = [us for us in (round_trip, named[peer][node]) if us]
                if measured:
                    speeds[node, peer] = LinkSpeed(_quantise(min(measured)) / 2e6)
    return Links(speeds, NO_LINK)


def _classify(
    view: MeshView, here: Collection[NodeId], precedence: Iterable[NodeId]
) -> tuple[list[NodeId], dict[NodeId, str], dict[NodeId, str]]:
    """Split nodes into accepted (in order of precedence), refused and not ready."""
    author = view.states.get(view.author) if view.author in here else None
    refused_by_author = author.faulty if author else ()
    accepted: list[NodeId] = []
    refused: dict[NodeId, str] = {}
    waiting: dict[NodeId, str] = {}
    for node in precedence:
        profile = view.profiles.get(node)
        if profile is None:
            waiting[node] = "its profile has not arrived yet"
        elif why := _unready(profile, view.states.get(node)):
            waiting[node] = why
        elif node in refused_by_author:
            waiting[node] = _why_faulty(view.author)
        elif why := _incompatibility(view, here, accepted, profile):
            refused[node] = why
        else:
            accepted.append(node)
    return accepted, refused, waiting


def _unready(profile: Profile, state: StateRecord | None) -> str | None:
    if state and state.obstacle:
        return state.obstacle
    if state and state.lifecycle is Lifecycle.OTHER:
        return "its state is unknown to this version; update meshllm"
    if not profile.weights:
        return "it has no model yet"
    if not profile.layer_s:
        return "it has measured no speed, or cannot load layers now"
    return None


def _incompatibility(
    view: MeshView, here: Collection[NodeId], accepted: Sequence[NodeId], profile: Profile
) -> str | None:
    """Return why a node is incompatible with the nodes accepted before it; None if it is not.

    The author's weights are the reference even while it is away, but its version is not.
    """
    charter = view.charter
    if profile.weights[-1] != charter.config_digest[:DIGEST_PART_BYTES]:
        return f"its model `{profile.model}` differs from `{charter.shape.name}` of the mesh"
    if len(profile.weights) != charter.shape.layers + ENDS:
        held = len(profile.weights) - ENDS
        return f"it has digests of {held} layers, but the model has {charter.shape.layers}"
    for node in accepted:
        other = view.profiles[node]
        if other.version != profile.version and node in here:
            return f"it runs version {profile.version}, but `{short(node)}` runs {other.version}"
        if part := first_mismatch(other.weights, profile.weights):
            return f"its {part} differs from that of `{short(node)}`"
    return None


def _leaving(view: MeshView, here: Collection[NodeId]) -> frozenset[NodeId]:
    return frozenset(
        node
        for node in here
        if (state := view.states.get(node)) and state.lifecycle is Lifecycle.LEAVING
    )


def _spans(
    wanted: Mapping[NodeId, Span], charter: Charter
) -> tuple[dict[NodeId, Span], dict[NodeId, str]]:
    """Keep the spans that do not overlap an earlier one; return why the others are dropped."""
    layers, spans, idle = charter.shape.layers, dict[NodeId, Span](), dict[NodeId, str]()
    for node, span in wanted.items():
        if node in charter.exclude:
            continue
        if span.stop > layers:
            idle[node] = f"it holds `{span}`, but the model has {layers} layers"
        elif taken := [at for at in spans if span.overlaps(spans[at])]:
            idle[node] = f"its span `{span}` overlaps that of `{short(taken[0])}`"
        else:
            spans[node] = span
    return spans, idle


def _refuse(states: Mapping[NodeId, StateRecord], one: NodeId, other: NodeId) -> bool:
    return other in states[one].faulty or one in states[other].faulty


def _faulty(states: Mapping[NodeId, StateRecord], here: Collection[NodeId]) -> dict[NodeId, str]:
    pairs = (
        (node, peer) for node in sorted(here) if node in states for peer in states[node].faulty
    )
    return {peer: _why_faulty(node) for node, peer in pairs}


def _why_faulty(node: NodeId) -> str:
    return f"`{short(node)}` refuses it: its data was invalid, or it did not load in time"


def _quantise(round_trip_us: int) -> int:
    """Round to three significant bits (steps of 14 to 25 %), so that noise changes few plans."""
    round_trip_us = max(round_trip_us, NEAR_US)
    step = 1 << round_trip_us.bit_length() - 3
    return (round_trip_us + step // 2) // step * step
