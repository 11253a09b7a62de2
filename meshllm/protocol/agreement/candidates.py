"""Who of a mesh may be in its ring, and how far apart they are; plans nothing."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from meshllm.names import NodeId, Span
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.records import (
    DIGEST_PART_BYTES,
    ENDS,
    Lifecycle,
    Profile,
    State,
    alive,
)
from meshllm.protocol.planning.plan import MAX_SECONDS, Ends, Links, Offer, Wire
from meshllm.protocol.trust.identity import short

NEAR_US = 250  # round trips below this are alike: they are noise beside the layers of any node
NO_WAY = Wire(MAX_SECONDS)
"""Between nodes without a measured link; no ring goes this way."""

_ABSENT = bytes(DIGEST_PART_BYTES)


@dataclass(frozen=True, slots=True)
class View:
    """What one node knows of its mesh: the items of its store."""

    me: NodeId
    charter: Charter
    author: NodeId
    """Who wrote the charter."""
    profiles: Mapping[NodeId, Profile]
    states: Mapping[NodeId, State]
    """A node says what it followed last for as long as it runs, whether there is a ring or not."""
    removed: Collection[NodeId] = ()

    def alive(self) -> frozenset[NodeId]:
        """Return the members that are here."""
        states = {node: at for node, at in self.states.items() if node not in self.removed}
        state = states.get(self.me)
        is_here = self.me not in self.removed and not (state and state.lifecycle is Lifecycle.LEFT)
        return alive(states, self.me) if is_here else frozenset()


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a ring can be made of."""

    offers: tuple[Offer, ...]
    """In order of node id."""
    links: Links
    refused: Mapping[NodeId, str]
    """Nodes that other nodes would not compute with, and why: half a sentence."""
    waiting: Mapping[NodeId, str]
    """Nodes that cannot hold layers yet, or not those they want, and why: half a sentence."""
    spans: Mapping[NodeId, Span] = field(default_factory=dict)
    """Nodes that hold exactly this span."""


def find_candidates(view: View, here: Collection[NodeId], ring: Sequence[NodeId]) -> Candidates:
    """Tell which nodes that are here can be planned with.

    Where nodes contradict each other, those that are in the ring already are believed first, in
    rank order, then the author of the charter, then lower ids.
    """
    believed = list(dict.fromkeys((*(node for node in ring if node in here), view.author)))
    believed += sorted(set(here).difference(believed))
    accepted, refused, waiting = _sift(view, here, believed)
    usable = [node for node in accepted if node in here]
    # A short span in the middle would keep out two that tile the layers.
    wishes = {node: span for node in usable if (span := view.profiles[node].span)}
    order = sorted(wishes, key=lambda node: (node not in ring, -len(wishes[node])))
    spans, idle = _spans({node: wishes[node] for node in order}, view.charter)
    return Candidates(
        tuple(_offer(node, view.profiles[node]) for node in sorted(set(usable) - set(idle))),
        _links(view.states, here),
        {node: why for node, why in refused.items() if node in here},
        {node: why for node, why in (waiting | idle).items() if node in here},
        spans,
    )


def count_lacking(view: View, here: Collection[NodeId]) -> int:
    """Count the members that the charter asks for and that are not here, or not ready yet.

    A node that is ready counts even where the ring cannot have it: none is to come in its place.
    """
    charter = view.charter
    most = charter.shape.layers + (charter.ends is Ends.CLIENT)
    ready = [
        node
        for node in here
        if (profile := view.profiles.get(node)) is not None and not _unready(profile, None)
    ]
    return max(0, min(charter.members or 0, most) - len(ready))


def conflicts(one: Sequence[bytes], other: Sequence[bytes]) -> str | None:
    """Name the first part in which two manifests differ; what one of them lacks does not count."""
    if len(one) != len(other):
        return "number of layers"
    layers = len(one) - ENDS
    names = [*(f"layer {index}" for index in range(layers)), "embedding", "head", "configuration"]
    pairs = zip(names, one, other, strict=True)
    return next((name for name, a, b in pairs if a != b and _ABSENT not in (a, b)), None)


def _sift(
    view: View, here: Collection[NodeId], believed: Iterable[NodeId]
) -> tuple[list[NodeId], dict[NodeId, str], dict[NodeId, str]]:
    """Divide nodes into those accepted, refused and not ready; the accepted in order of belief."""
    accepted: list[NodeId] = []
    refused: dict[NodeId, str] = {}
    waiting: dict[NodeId, str] = {}
    for node in believed:
        profile = view.profiles.get(node)
        if profile is None:
            waiting[node] = "its profile has not come yet"
        elif why := _unready(profile, view.states.get(node)):
            waiting[node] = why
        elif why := _objection(view, here, accepted, profile):
            refused[node] = why
        else:
            accepted.append(node)
    return accepted, refused, waiting


def _unready(profile: Profile, state: State | None) -> str | None:
    if state and state.obstacle:
        return state.obstacle
    if state and state.lifecycle is Lifecycle.OTHER:
        return "it is in a state that this version does not have; update meshllm"
    if not profile.weights:
        return "it has no model yet"
    if not profile.layer_s:
        return "it has not measured its speed yet"
    return None


def _objection(
    view: View, here: Collection[NodeId], accepted: Sequence[NodeId], profile: Profile
) -> str | None:
    """Say why the ring cannot have a node; those accepted before it are right.

    The author is believed about weights even while it is away, but not about the program.
    """
    charter = view.charter
    if profile.weights[-1] != charter.config_digest[:DIGEST_PART_BYTES]:
        return f"its `{profile.model}` is another model than the mesh's `{charter.shape.name}`"
    if len(profile.weights) != charter.shape.layers + ENDS:
        held = len(profile.weights) - ENDS
        return f"it has digests of {held} layers, and the model has {charter.shape.layers}"
    for node in accepted:
        other = view.profiles[node]
        if other.version != profile.version and node in here:
            return f"it runs version {profile.version}, and `{short(node)}` {other.version}"
        if part := conflicts(other.weights, profile.weights):
            return f"its {part} differs from that of `{short(node)}`"
    return None


def _spans(
    wishes: Mapping[NodeId, Span], charter: Charter
) -> tuple[dict[NodeId, Span], dict[NodeId, str]]:
    """Keep the wishes that do not overlap one before them; say of the others why not."""
    layers, spans, idle = charter.shape.layers, dict[NodeId, Span](), dict[NodeId, str]()
    for node, span in wishes.items():
        if node in charter.exclude:
            continue
        if span.stop > layers:
            idle[node] = f"it holds `{span}`, and the model has {layers} layers"
        elif taken := [at for at in spans if _overlap(spans[at], span)]:
            idle[node] = f"`{short(taken[0])}` holds layers of its `{span}`"
        else:
            spans[node] = span
    return spans, idle


def _overlap(one: Span, other: Span) -> bool:
    return one.start < other.stop and other.start < one.stop


def _offer(node: NodeId, profile: Profile) -> Offer:
    return Offer(node, profile.memory_bytes, profile.layer_s, profile.head_s, profile.reserve_bytes)


def _links(states: Mapping[NodeId, State], here: Collection[NodeId]) -> Links:
    """Take the shorter of the two round trips that the ends of a link measured."""
    named = {node: dict(states[node].links) for node in here if node in states}
    wires = {}
    for node, peers in named.items():
        for peer, round_trip in peers.items():
            if node < peer and node in named.get(peer, ()):
                measured = [us for us in (round_trip, named[peer][node]) if us]
                if measured:
                    wires[node, peer] = Wire(_coarse(min(measured)) / 2e6)
    return Links(wires, NO_WAY)


def _coarse(round_trip_us: int) -> int:
    """Round to three binary digits, steps of 14 to 25 %, so that noise changes few plans."""
    round_trip_us = max(round_trip_us, NEAR_US)
    step = 1 << round_trip_us.bit_length() - 3
    return (round_trip_us + step // 2) // step * step
