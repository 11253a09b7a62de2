"""Short closed tours through places (travelling salesman), given all pairwise costs."""

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, pairwise, permutations

Costs = Sequence[Sequence[int]]
"""``costs[a][b]``: cost of the hop from place ``a`` to place ``b``."""

Tour = tuple[int, ...]
"""Places in order; the last hop leads back to the first one."""


def length(costs: Costs, tour: Sequence[int]) -> int:
    """Return the cost of a closed tour."""
    return sum(costs[here][there] for here, there in zip(tour, (*tour[1:], tour[0]), strict=True))


def all_tours(start: int, others: Collection[int]) -> Iterator[Tour]:
    """Yield every order of every subset of the others, from ``start``: 326 for five."""
    for count in range(len(others) + 1):
        for rest in permutations(others, count):
            yield (start, *rest)


def shortest_tours(costs: Costs, start: int, others: Sequence[int]) -> Iterator[Tour]:
    """Yield the shortest tour from ``start`` through each subset of the others: 2048 for eleven.

    Held and Karp, 1962: the shortest path through a set to ``last`` is a shortest path through the
    set without ``last``, and one more hop.
    """
    paths: list[list[tuple[int, Tour]]] = [[(0, (start,))]]
    # By set, a bit mask of places: the shortest path through it to each of its places.
    for places in range(1, 1 << len(others)):
        paths.append([])
        for bit, last in enumerate(others):
            if places >> bit & 1:
                shorter = paths[places ^ 1 << bit]
                cost, path = min((cost + costs[path[-1]][last], path) for cost, path in shorter)
                paths[places].append((cost, (*path, last)))
    for ends in paths:
        yield min((cost + costs[tour[-1]][start], tour) for cost, tour in ends)[1]


def short_tour(costs: Costs, start: int, others: Collection[int]) -> Tour:
    """Return a short tour from ``start`` through all others: nearest insertion, then 2-opt."""
    tour = [start]
    waiting = set(others)
    while waiting:
        _, place = min((costs[here][there], there) for here in tour for there in waiting)
        waiting.remove(place)
        grown = ([*tour[:at], place, *tour[at:]] for at in range(1, len(tour) + 1))
        tour = min(grown, key=lambda tour: length(costs, tour))
    return tuple(_two_opt(costs, tour))


def _two_opt(costs: Costs, tour: list[int]) -> list[int]:
    """Reverse the section whose reversal gains most, until none gains (2-opt)."""
    sections = [(low, high) for high in range(3, len(tour) + 1) for low in range(1, high - 1)]
    while sections:
        ring = [*tour, tour[0]]
        there = [0, *accumulate(costs[a][b] for a, b in pairwise(ring))]
        back = [0, *accumulate(costs[b][a] for a, b in pairwise(ring))]
        gains = [
            there[high]
            - there[low - 1]
            - costs[ring[low - 1]][ring[high - 1]]
            - (back[high - 1] - back[low])
            - costs[ring[low]][ring[high]]
            for low, high in sections
        ]
        most = max(gains)
        if most <= 0:
            break
        low, high = sections[gains.index(most)]
        tour[low:high] = reversed(tour[low:high])
    return tour
