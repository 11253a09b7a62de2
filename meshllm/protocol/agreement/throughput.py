"""How many tokens rings give together, some of whose nodes are in several: predicted from records.

Theory of operation
-------------------
A ring gives as many tokens per second as its slowest node, if enough sessions keep all of them
busy. A node that is in several rings computes in turn: a token of any of them waits for a token of
each other one. So the time of a node is the sum of its layers and heads in all its rings, and rings
give together the sum of one token per time of the slowest node of each.

No ring can be faster than one of all nodes whose layers are divided for this: what a node holds in
several rings, weighted by their tokens, is a division of the layers too. But policies make answers
fast, and leave a node out that only adds a hop; such a node is worth a ring of its own with a part
of the layers elsewhere. So the comparison is with the ring that the policy of the charter would
make with this node.

All numbers are integers or quotients of integers, so that they are the same on every node.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from meshllm.errors import UserError
from meshllm.names import NodeId, Span
from meshllm.protocol.agreement.best_plan import build_planning_input, find_best
from meshllm.protocol.agreement.candidates import NO_LINK, Candidates, MeshView
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.planning.plan import Ends, Links, LinkSpeed, ModelSizes, Offer, Plan


@dataclass(frozen=True, slots=True)
class TimedRing:
    """A ring, and what its nodes published of the speed of its layers."""

    plan: Plan
    shape: ModelSizes
    offers: Mapping[NodeId, Offer]

    def times(self) -> dict[NodeId, int]:
        """Return the time of each node for a token, in nanoseconds; 0 where it is unknown."""
        sizes, found = self.shape.layer_bytes, dict[NodeId, int]()
        whole = sum(sizes)
        for rank, stage in enumerate(self.plan.stages):
            if (offer := self.offers.get(stage.node)) is None:
                found[stage.node] = 0
                continue
            span, layer_ns = stage.span, round(offer.layer_seconds(1) * 10**9)
            size = sum(sizes[span.start : span.stop])
            head_ns = 0 if rank else round(offer.head_s * 10**9)
            found[stage.node] = head_ns + max(1, layer_ns) * size * len(sizes) // whole
        return found


def loads(rings: Iterable[TimedRing]) -> Counter[NodeId]:
    """Return the time of each node for one token of each of its rings, in nanoseconds."""
    found = Counter[NodeId]()
    for ring in rings:
        found.update(ring.times())
    return found


def throughput(rings: Collection[TimedRing], others: Collection[TimedRing] = ()) -> Fraction:
    """Return the tokens per nanosecond of rings together, whose nodes may be in others as well."""
    load = loads([*rings, *others])
    slowest = (max(load[stage.node] for stage in ring.plan.stages) for ring in rings)
    return sum((Fraction(1, max(1, each)) for each in slowest), Fraction(0))


def limit(offers: Collection[Offer], layers: int) -> Fraction:
    """Return the tokens per nanosecond that nodes cannot exceed together, whatever their rings."""
    times = (max(1, round(offer.layer_seconds(1) * 10**9)) for offer in offers)
    return sum((Fraction(1, each) for each in times), Fraction(0)) / layers


def plan_ring(
    charter: Charter, offers: Sequence[Offer], links: Links, spans: Mapping[NodeId, Span]
) -> Plan | None:
    """Return the plan that nodes would make for a ring of their own; None if they cannot.

    The model has its ends at the entry. ``spans`` are those that the owners of nodes fixed.
    """
    assert charter.ends is Ends.ENTRY  # else the author counts, among the nodes or not
    here = {offer.node for offer in offers}
    known = ((at, speed) for at, speed in links.speeds.items() if here.issuperset(at))
    speeds = tuple(sorted(known, key=lambda wire: wire[0]))
    ordered = tuple(sorted(offers, key=lambda offer: offer.node))
    return _planned(charter, ordered, speeds, tuple(sorted(spans.items())))


@lru_cache(256)
def _planned(
    charter: Charter,
    offers: tuple[Offer, ...],
    speeds: tuple[tuple[tuple[NodeId, NodeId], LinkSpeed], ...],
    spans: tuple[tuple[NodeId, Span], ...],
) -> Plan | None:
    found = Candidates(offers, Links(dict(speeds), NO_LINK), {}, {}, dict(spans))
    nobody = offers[0].node  # no author takes part in this
    try:
        case = build_planning_input(MeshView(nobody, charter, nobody, {}, {}), found)
    except UserError:
        return None
    return find_best(case).plan
