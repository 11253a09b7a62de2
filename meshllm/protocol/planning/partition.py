"""Optimal partition of the layers over nodes in a given order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshllm.names import Span
from meshllm.protocol.planning.problem import Problem
from meshllm.protocol.planning.tours import length

Weigh = Callable[[int, Span], int]
"""Cost of a span on a node; a partition costs the sum."""


@dataclass(frozen=True, slots=True)
class Division:
    """Nodes in rank order, each with its span."""

    order: tuple[int, ...]
    spans: tuple[Span, ...]


def divide(problem: Problem, order: tuple[int, ...], weigh: Weigh) -> Division | None:
    """Partition the layers at the least cost, by dynamic programming; None if impossible.

    Ties go to the shorter last span, then the shorter second last, and so on.
    """
    costs = {0: 0}  # by the number of layers assigned so far
    # For each rank: the start of its span, by its stop.
    steps: list[dict[int, int]] = [{0: 0}] if problem.client else []
    for node in order[len(steps) :]:
        grown: dict[int, int] = {}
        starts: dict[int, int] = {}
        for start, cost in costs.items():
            for stop in problem.stops(node, start, entry=not steps):
                total = cost + weigh(node, Span(start, stop))
                if total <= grown.get(stop, total):
                    grown[stop], starts[stop] = total, start
        costs = grown
        steps.append(starts)
    if problem.layers not in costs:
        return None
    spans: list[Span] = []
    stop = problem.layers
    for starts in reversed(steps):
        spans.append(Span(starts[stop], stop))
        stop = starts[stop]
    return Division(order, tuple(reversed(spans)))


def token_time(problem: Problem, division: Division) -> int:
    """Return the time of a token: layers, hops and head."""
    layers = zip(division.order, division.spans, strict=True)
    compute = sum(problem.time(node, span) for node, span in layers)
    return compute + length(problem.hops, division.order) + problem.head[division.order[0]]


def stage_time(problem: Problem, division: Division) -> int:
    """Return the time of the slowest stage, which bounds prefill and concurrent sessions."""
    layers = zip(division.order, division.spans, strict=True)
    entry, *others = (problem.time(node, span) for node, span in layers)
    return max(entry + problem.head[division.order[0]], *others, 0)


class GreedyFill:
    """Lower bound of a ring's time: each member gets one layer, then the fastest are filled.

    It is exact if all layers are alike and no span is fixed.
    """

    def __init__(self, problem: Problem) -> None:
        nodes = range(len(problem.nodes))
        self.entries = [node for node in problem.entries if problem.can_enter(node)]
        """Nodes that can be rank 0."""
        self._problem = problem
        self._rooms = [problem.room(node, entry=False) for node in nodes]
        self._entry_rooms = {node: problem.room(node, entry=True) for node in self.entries}
        self.holders = [node for node in nodes if self._rooms[node] and not problem.is_client(node)]
        """Nodes that can hold a layer."""
        self._fastest_first = sorted(nodes, key=lambda node: problem.layer_ns[node])
        self._layer = min(high - low for low, high in pairwise(problem.works))

    def rooms(self, entry: int) -> list[int]:
        """Return the most work that each node can hold if ``entry`` is rank 0."""
        rooms = self._rooms.copy()
        rooms[entry] = self._entry_rooms[entry]
        return rooms

    def token(self, ring: Sequence[int], *, every: bool = True) -> int | None:
        """Return the time of a token on this ring; None if the model does not fit.

        Without ``every``, members may be left without a layer.
        """
        compute = self.compute(ring, every=every)
        if compute is None:
            return None
        return compute + length(self._problem.hops, ring) + self._problem.head[ring[0]]

    def compute(self, ring: Sequence[int], *, every: bool = True) -> int | None:
        """Return the part of `token` that is spent in layers."""
        problem, rooms = self._problem, self.rooms(ring[0])
        spare, time = problem.works[-1], 0
        if every:
            for node in ring:
                least = self._least(node, rooms[node])
                rooms[node] -= least
                spare -= least
                time += least * problem.layer_ns[node]
        if spare < 0:
            return None
        for node in self._fastest_first:
            if spare and node in ring:
                more = min(spare, rooms[node])
                spare -= more
                time += more * problem.layer_ns[node]
        return None if spare else time

    def _least(self, node: int, room: int) -> int:
        return room if node in self._problem.pins else min(self._layer, room)
