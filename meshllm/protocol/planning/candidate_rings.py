"""Candidate rings: sets of nodes and their orders, of which a policy chooses one.

For up to `EXACT` nodes, every set is a candidate: small ones in every order, larger ones in the
order of the shortest tour. For more, the node whose loss costs least is dropped repeatedly, and
every remainder is a candidate: good, but not proven optimal.
"""

from collections.abc import Iterator, Sequence

from meshllm.protocol.planning.partition import Filling
from meshllm.protocol.planning.problem import Problem
from meshllm.protocol.planning.tours import Trip, all_trips, good_trip, shortest_trips

ANY_ORDER = 6  # nodes of which every order is tried: 415 tours
EXACT = 12  # nodes of which every set is tried: 24,576 rings with every entry, half a second
_MANY = 64  # of more nodes, those with the most room, from which nodes are dropped
_THIN = 9  # nodes that are left at the end
_ENTRIES = 3  # of more nodes, the fastest that are tried as the entry


def rings(problem: Problem, filling: Filling) -> Iterator[tuple[int, int, Trip]]:
    """Yield rings that satisfy the terms: lower bound of the token time, size, nodes."""
    for trip in filter(problem.allows, _trips(problem, filling)):
        for entry in filling.entries:
            if entry in trip:
                at = trip.index(entry)
                ring = (*trip[at:], *trip[:at])
                if (bound := filling.token(ring)) is not None:
                    yield bound, len(ring), ring


def _trips(problem: Problem, filling: Filling) -> Iterator[Trip]:
    """Yield candidate tours, each from one of its nodes."""
    if len(filling.holders) <= EXACT:
        clients = filling.entries if problem.client else []
        yield from _every_trip(problem, [*clients, *filling.holders])
        return
    most = problem.members or problem.layers + problem.client
    alone = sorted(filling.entries, key=lambda node: (problem.layer_ns[node], problem.head[node]))
    for entry in alone[:_ENTRIES]:
        rooms = filling.rooms(entry)
        others = [node for node in filling.holders if node != entry]
        others.sort(key=lambda node: (node not in problem.required, -rooms[node]))
        yield good_trip(problem.hops, entry, others[: most - 1])
        trip = good_trip(problem.hops, entry, others[:_MANY])
        while trip:
            yield trip
            last, trip = trip, _without_one(problem, filling, trip)
        if len(last) <= EXACT:
            yield from _every_trip(problem, last)


def _every_trip(problem: Problem, nodes: Sequence[int]) -> Iterator[Trip]:
    """Yield tours through every set of nodes, each from its first node; all include the client."""
    for at, start in enumerate(nodes[:1] if problem.client else nodes):
        others = nodes[at + 1 :]
        if len(others) < ANY_ORDER:
            yield from all_trips(start, others)
        else:
            yield from shortest_trips(problem.hops, start, others)


def _without_one(problem: Problem, filling: Filling, trip: Trip) -> Trip:
    """Drop the node whose loss costs least; return an empty tour when few are left."""
    if len(trip) <= max(_THIN, problem.members or 0):
        return ()
    gone = [node for node in trip[1:] if node not in problem.required]
    shorter = [tuple(node for node in trip if node != one) for one in gone]
    timed = [(filling.token(trip, every=False), trip) for trip in shorter]
    return min(((time, trip) for time, trip in timed if time is not None), default=(0, ()))[1]
