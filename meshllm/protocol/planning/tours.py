"""Short closed tours through places (travelling salesman), given all pairwise costs."""

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, pairwise, permutations

Ways = Sequence[Sequence[int]]
"""``ways[a][b]``: cost of the hop from place ``a`` to place ``b``."""

Trip = tuple[int, ...]
"""Places in order; the last hop leads back to the first one."""


def length(ways: Ways, trip: Sequence[int]) -> int:
    """Return the cost of a closed tour."""
    return sum(ways[here][there] for here, there in zip(trip, (*trip[1:], trip[0]), strict=True))


def all_trips(start: int, others: Collection[int]) -> Iterator[Trip]:
    """Yield every order of every subset of the others, from ``start``: 326 for five."""
    for count in range(len(others) + 1):
        for rest in permutations(others, count):
            yield (start, *rest)


def shortest_trips(ways: Ways, start: int, others: Sequence[int]) -> Iterator[Trip]:
    """Yield the shortest tour from ``start`` through each subset of the others: 2048 for eleven.

    Held and Karp, 1962: the shortest path through a set to ``last`` is a shortest path through the
    set without ``last``, and one more hop.
    """
    paths: list[list[tuple[int, Trip]]] = [[(0, (start,))]]
    # By set, a bit mask of places: the shortest path through it to each of its places.
    for places in range(1, 1 << len(others)):
        paths.append([])
        for bit, last in enumerate(others):
            if places >> bit & 1:
                shorter = paths[places ^ 1 << bit]
                cost, path = min((cost + ways[path[-1]][last], path) for cost, path in shorter)
                paths[places].append((cost, (*path, last)))
    for ends in paths:
        yield min((cost + ways[trip[-1]][start], trip) for cost, trip in ends)[1]


def good_trip(ways: Ways, start: int, others: Collection[int]) -> Trip:
    """Return a short tour from ``start`` through all others: nearest insertion, then 2-opt."""
    trip = [start]
    waiting = set(others)
    while waiting:
        _, place = min((ways[here][there], there) for here in trip for there in waiting)
        waiting.remove(place)
        grown = ([*trip[:at], place, *trip[at:]] for at in range(1, len(trip) + 1))
        trip = min(grown, key=lambda trip: length(ways, trip))
    return tuple(_uncrossed(ways, trip))


def _uncrossed(ways: Ways, trip: list[int]) -> list[int]:
    """Reverse the section whose reversal gains most, until none gains (2-opt)."""
    turns = [(low, high) for high in range(3, len(trip) + 1) for low in range(1, high - 1)]
    while turns:
        ring = [*trip, trip[0]]
        there = [0, *accumulate(ways[a][b] for a, b in pairwise(ring))]
        back = [0, *accumulate(ways[b][a] for a, b in pairwise(ring))]
        gains = [
            there[high]
            - there[low - 1]
            - ways[ring[low - 1]][ring[high - 1]]
            - (back[high - 1] - back[low])
            - ways[ring[low]][ring[high]]
            for low, high in turns
        ]
        most = max(gains)
        if most <= 0:
            break
        low, high = turns[gains.index(most)]
        trip[low:high] = reversed(trip[low:high])
    return trip
