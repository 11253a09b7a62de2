"""Candidate rings: sets of nodes and their orders, of which a policy chooses one.

For up to `EXACT` nodes, every set is a candidate: small ones in every order, larger ones in the
order of the shortest tour. For more, the node whose loss costs least is dropped repeatedly, and
every remainder is a candidate: good, but not proven optimal.
"""

from collections.abc import Iterator, Sequence

from meshllm.protocol.planning.partition import GreedyFill
from meshllm.protocol.planning.problem import Problem
from meshllm.protocol.planning.tours import Tour, all_tours, short_tour, shortest_tours

ANY_ORDER = 6  # nodes of which every order is tried: 415 tours
EXACT = 12  # nodes of which every set is tried: 24,576 rings with every entry, half a second
_PRUNE_FROM = 64  # of more nodes, those with the most room, from which nodes are dropped
_PRUNE_TO = 9  # nodes that are left at the end
_MAX_ENTRIES = 3  # of more nodes, the fastest that are tried as the entry


def rings(problem: Problem, fill: GreedyFill) -> Iterator[tuple[int, int, Tour]]:
    """Yield rings that satisfy the terms: lower bound of the token time, size, nodes."""
    for tour in filter(problem.allows, _tours(problem, fill)):
        for entry in fill.entries:
            if entry in tour:
                at = tour.index(entry)
                ring = (*tour[at:], *tour[:at])
                if (bound := fill.token(ring)) is not None:
                    yield bound, len(ring), ring


def _tours(problem: Problem, fill: GreedyFill) -> Iterator[Tour]:
    """Yield candidate tours, each from one of its nodes."""
    if len(fill.holders) <= EXACT:
        clients = fill.entries if problem.client else []
        yield from _every_tour(problem, [*clients, *fill.holders])
        return
    most = problem.members or problem.layers + problem.client
    alone = sorted(fill.entries, key=lambda node: (problem.layer_ns[node], problem.head[node]))
    for entry in alone[:_MAX_ENTRIES]:
        rooms = fill.rooms(entry)
        others = [node for node in fill.holders if node != entry]
        others.sort(key=lambda node: (node not in problem.required, -rooms[node]))
        yield short_tour(problem.hops, entry, others[: most - 1])
        tour = short_tour(problem.hops, entry, others[:_PRUNE_FROM])
        while tour:
            yield tour
            last, tour = tour, _prune(problem, fill, tour)
        if len(last) <= EXACT:
            yield from _every_tour(problem, last)


def _every_tour(problem: Problem, nodes: Sequence[int]) -> Iterator[Tour]:
    """Yield tours through every set of nodes, each from its first node; all include the client."""
    for at, start in enumerate(nodes[:1] if problem.client else nodes):
        others = nodes[at + 1 :]
        if len(others) < ANY_ORDER:
            yield from all_tours(start, others)
        else:
            yield from shortest_tours(problem.hops, start, others)


def _prune(problem: Problem, fill: GreedyFill, tour: Tour) -> Tour:
    """Drop the node whose loss costs least; return an empty tour when few are left."""
    if len(tour) <= max(_PRUNE_TO, problem.members or 0):
        return ()
    gone = [node for node in tour[1:] if node not in problem.required]
    shorter = [tuple(node for node in tour if node != one) for one in gone]
    timed = [(fill.token(tour, every=False), tour) for tour in shorter]
    return min(((time, tour) for time, tour in timed if time is not None), default=(0, ()))[1]
