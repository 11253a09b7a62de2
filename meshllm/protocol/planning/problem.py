"""The planning problem: what every node can hold and how long it takes, in integers.

Theory of operation
-------------------
Two nodes that plan from the same offers must reach the same plan, so nothing here depends on the
order of additions: seconds are rounded to whole nanoseconds once, and all that follows is exact.
Layers may differ in size. The time of a layer is taken to be proportional to its weights, which
decoding reads once per token: ``work`` counts millionths of an average layer, so that nanoseconds
per layer times work are femtoseconds, the unit of every time here.

Nodes are numbered in order of their ids.
"""

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

from meshllm.errors import UserError
from meshllm.names import NodeId, Span, short
from meshllm.protocol.planning.plan import Ends, Links, ModelSizes, Offer, Plan, PlanConstraints

HEADROOM_PERCENT = 20  # of a node's memory: activations, fragmentation, what its offer missed
NANOSECOND = 10**6  # in the unit of time
MILLISECOND = 10**12
_WORK = 10**6  # of an average layer


@dataclass(frozen=True, slots=True)
class Problem:
    """Offers, links, shape and terms, ready to be solved."""

    nodes: Sequence[NodeId]
    memory: Sequence[int]
    """Usable bytes of each node."""
    ends_bytes: int
    """Bytes that rank 0 holds in addition to its layers."""
    sizes: Sequence[int]
    """Bytes of the first 0, 1, ... layers with their caches."""
    works: Sequence[int]
    """Work of the first 0, 1, ... layers."""
    layer_ns: Sequence[int]
    """Nanoseconds of an average layer on each node, for one row."""
    head: Sequence[int]
    """Time of the head on each node, for one row."""
    hops: Sequence[Sequence[int]]
    """Time of one row from a node to another; 0 to itself."""
    client: bool
    """Whether rank 0 holds no layers."""
    entries: Sequence[int]
    """Nodes that may be rank 0."""
    required: frozenset[int]
    """Nodes that must be members."""
    members: int | None
    pins: Mapping[int, Span]
    limit: int | None = None
    """Upper limit of a stage's time; None means no limit."""

    @property
    def layers(self) -> int:
        """Count the layers."""
        return len(self.sizes) - 1

    def limited(self, limit: int) -> Self:
        """Return the same problem with an upper limit of a stage's time."""
        return replace(self, limit=limit)

    def allows(self, ring: Collection[int]) -> bool:
        """Return whether a ring has the required nodes, and the required number of them."""
        return self.required.issubset(ring) and self.members in {None, len(ring)}

    def usable(self, node: int, *, entry: bool) -> int:
        """Return the bytes for layers on a node; negative if it cannot hold the ends."""
        return self.memory[node] - (self.ends_bytes if entry else 0)

    def time(self, node: int, span: Span) -> int:
        """Return the time of a span on a node, for one row."""
        return self.layer_ns[node] * (self.works[span.stop] - self.works[span.start])

    def stops(self, node: int, start: int, *, entry: bool) -> range:
        """Return every valid ``stop`` of a span of the node that begins at ``start``."""
        last = self._reach(node, start, entry=entry)
        pin = self.pins.get(node)
        if pin is None:
            return range(start + 1, last + 1)
        fits = pin.start == start and pin.stop <= last
        return range(pin.stop, pin.stop + fits)

    def is_client(self, node: int) -> bool:
        """Return whether the node is the client, which holds no layers."""
        return self.client and node in self.entries

    def can_enter(self, node: int) -> bool:
        """Return whether the node can hold the ends, and a layer unless it is the client."""
        if not self.client:
            return self.room(node, entry=True) > 0
        in_time = self.limit is None or self.head[node] <= self.limit
        return in_time and self.usable(node, entry=True) >= 0

    def room(self, node: int, *, entry: bool) -> int:
        """Return the most work of any span that the node can hold; 0 if no layer fits."""
        if entry and self.client:
            return 0
        work = 0
        for start in range(1 if entry else self.layers):
            if stops := self.stops(node, start, entry=entry):
                work = max(work, self.works[stops[-1]] - self.works[start])
        return work

    def _reach(self, node: int, start: int, *, entry: bool) -> int:
        most = self.sizes[start] + self.usable(node, entry=entry)
        stop = bisect_right(self.sizes, most) - 1
        if self.limit is None:
            return stop
        spare = self.limit - (self.head[node] if entry else 0)
        most = self.works[start] + spare // self.layer_ns[node]
        return min(stop, bisect_right(self.works, most) - 1)


def build_problem(
    offers: Sequence[Offer], links: Links, shape: ModelSizes, terms: PlanConstraints
) -> Problem:
    """Build the problem from offers in order of node id.

    Raises:
        UserError: the terms contradict each other or name a node that made no offer.
    """
    nodes = [offer.node for offer in offers]
    numbers = {node: number for number, node in enumerate(nodes)}
    _check(terms, numbers, shape)
    if terms.entry is None and terms.entries and numbers.keys().isdisjoint(terms.entries):
        raise UserError("No node that may be the entry can take part", hint="see `--entry`")
    row = shape.hidden_size * shape.itemsize
    tokens = shape.context * terms.sessions
    growth = shape.context * max(shape.kv_bytes_per_token)  # of one layer of one session, copied
    caches = (per_token * tokens for per_token in shape.kv_bytes_per_token)
    problem = Problem(
        nodes=nodes,
        memory=[_usable(offer, terms, growth) for offer in offers],
        ends_bytes=shape.ends_bytes,
        sizes=[0, *accumulate(map(sum, zip(shape.layer_bytes, caches, strict=True)))],
        works=[0, *accumulate(_work(size, shape) for size in shape.layer_bytes)],
        layer_ns=[max(1, round(offer.layer_seconds(1) * 10**9)) for offer in offers],
        head=[_time(offer.head_s) for offer in offers],
        hops=[[_hop(links, here, there, row) for there in nodes] for here in nodes],
        client=terms.ends is Ends.CLIENT,
        entries=_entries(terms, numbers),
        required=frozenset(numbers[node] for node in terms.spans),
        members=terms.members,
        pins={numbers[node]: span for node, span in terms.spans.items()},
    )
    wished = {numbers[node] for node in terms.prefer if node in numbers}
    fitting = {node for node in wished if problem.room(node, entry=False)}
    return replace(problem, required=problem.required | fitting)


def _work(size: int, shape: ModelSizes) -> int:
    return max(1, size * shape.layers * _WORK // sum(shape.layer_bytes))


def kv_capacities(plan: Plan, offers: Sequence[Offer], shape: ModelSizes) -> list[int]:
    """Return the bytes of each rank of a plan for KV caches: what the weights leave free.

    A plan made from these offers has room for at least its sessions of full context.

    Raises:
        UserError: a node of the plan made no offer.
    """
    by_node = {offer.node: offer for offer in offers}
    if missing := [stage.node for stage in plan.stages if stage.node not in by_node]:
        raise UserError(f"Node `{short(missing[0])}` is in the plan but made no offer")
    rooms = []
    for rank, stage in enumerate(plan.stages):
        weights = sum(shape.layer_bytes[stage.span.start : stage.span.stop])
        ends = 0 if rank else shape.ends_bytes
        rooms.append(usable_bytes(by_node[stage.node]) - weights - ends)
    return rooms


def room_tokens(plan: Plan, offers: Sequence[Offer], shape: ModelSizes) -> list[int | None]:
    """Return the tokens, of all sessions together, for which each rank of a plan has room.

    None is a rank without layers, or whose layers keep no cache.

    Raises:
        UserError: a node of the plan made no offer.
    """
    rooms = kv_capacities(plan, offers, shape)
    spans = (slice(stage.span.start, stage.span.stop) for stage in plan.stages)
    costs = (sum(shape.kv_bytes_per_token[span]) for span in spans)
    return [max(0, room) // cost if cost else None for room, cost in zip(rooms, costs, strict=True)]


def usable_bytes(offer: Offer) -> int:
    """Return the bytes that weights and caches may take."""
    return usable_of(offer.memory_bytes, offer.reserve_bytes)


def usable_of(memory: int, reserve: int) -> int:
    """Return what weights and caches may take of some memory, of which a part is reserved."""
    return max(0, memory - reserve) * (100 - HEADROOM_PERCENT) // 100


def memory_for(plan: Plan, node: NodeId, shape: ModelSizes, *, sessions: int, reserve: int) -> int:
    """Return the least memory with which a node can hold its layers of a plan, as planned.

    A node without layers takes its reserve.
    """
    if (rank := plan.rank(node)) is None:
        return reserve
    span = plan.stages[rank].span
    return least_memory(shape, span, is_entry=rank == 0, sessions=sessions, reserve=reserve)


def least_memory(
    shape: ModelSizes, span: Span, *, is_entry: bool, sessions: int, reserve: int
) -> int:
    """Return the least memory with which a node can hold a span and its caches."""
    layers = slice(span.start, span.stop)
    caches = sum(shape.kv_bytes_per_token[layers]) * shape.context * sessions
    growth = shape.context * max(shape.kv_bytes_per_token)
    size = sum(shape.layer_bytes[layers]) + caches + growth
    size += shape.ends_bytes if is_entry else 0
    return reserve - (-size * 100 // (100 - HEADROOM_PERCENT))  # rounded up


def _usable(offer: Offer, terms: PlanConstraints, growth: int) -> int:
    if offer.node in terms.exclude:
        return -1
    return max(0, usable_bytes(offer) - growth)


def _entries(terms: PlanConstraints, numbers: Mapping[NodeId, int]) -> list[int]:
    if terms.entry is not None:
        return [numbers[terms.entry]]
    first = [numbers[node] for node, span in terms.spans.items() if span.start == 0]
    allowed = {numbers[node] for node in terms.entries or numbers if node in numbers}
    return [number for number in first or numbers.values() if number in allowed]


def _hop(links: Links, here: NodeId, there: NodeId, row: int) -> int:
    return 0 if here == there else _time(links.between(here, there).seconds(row))


def _time(seconds: float) -> int:
    return round(seconds * 10**9) * NANOSECOND


def _check(terms: PlanConstraints, numbers: Mapping[NodeId, int], shape: ModelSizes) -> None:
    for node in {*terms.spans, *filter(None, [terms.entry])}:
        if node not in numbers or node in terms.exclude:
            raise UserError(f"Node `{short(node)}` is required but excluded, or made no offer")
    _check_counts(terms, shape)
    _check_spans(terms, shape)
    if terms.ends is Ends.CLIENT:
        if terms.entry is None or terms.entry in terms.spans:
            raise UserError("The client that holds the ends must be the entry, without a span")
    elif terms.entry is not None:
        for node, span in terms.spans.items():
            if (span.start == 0) != (node == terms.entry):
                raise UserError(
                    f"Node `{short(node)}` cannot hold `{span}`: layer 0 is on the entry"
                )


def _check_counts(terms: PlanConstraints, shape: ModelSizes) -> None:
    if terms.sessions < 1:
        raise UserError(f"Cannot plan for {terms.sessions} sessions")
    if terms.members is None:
        return
    if not 1 <= terms.members - (terms.ends is Ends.CLIENT) <= shape.layers:
        raise UserError(
            f"`{shape.name}` has {shape.layers} layers for a ring of {terms.members} nodes",
            hint="every node of a ring holds at least one layer",
        )


def _check_spans(terms: PlanConstraints, shape: ModelSizes) -> None:
    stop = 0
    for span in sorted(terms.spans.values()):
        if not span or span.start < stop or span.stop > shape.layers:
            raise UserError(
                f"Span `{span}` is empty, overlaps another, or ends above layer {shape.layers}"
            )
        stop = span.stop
