"""Candidate rings: sets of nodes and their orders, of which a policy chooses one.

For up to `EXACT` nodes, every set is a candidate: small ones in every order, larger ones in the
order of the shortest tour. For more, the node whose loss costs least is dropped repeatedly, and
every remainder is a candidate: good, but not proven optimal. Nodes with fixed spans come in the
order of these; of the others, each comes where it costs least, first where layers lack a node.
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
                if problem.pins and not _fits(problem, ring):
                    continue
                if (bound := fill.token(ring)) is not None:
                    yield bound, len(ring), ring


def _tours(problem: Problem, fill: GreedyFill) -> Iterator[Tour]:
    """Yield candidate tours, each from one of its nodes."""
    clients, holders = fill.entries if problem.client else [], fill.holders
    if problem.pins and len(clients) + len(holders) > ANY_ORDER:
        yield from _pinned_tours(problem, clients[:1], fill)
        return
    if len(holders) <= EXACT:
        yield from _every_tour(problem, [*clients, *holders])
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


def _fits(problem: Problem, ring: Sequence[int]) -> bool:
    """Return whether fixed spans follow each other in a ring, and leave layers to other nodes."""
    stop, is_fixed = 0, True  # where the nodes so far end, at the least
    for node in ring[problem.client :]:
        if pin := problem.pins.get(node):
            if pin.start < stop or (is_fixed and pin.start > stop):
                return False
            stop, is_fixed = pin.stop, True
        else:
            stop, is_fixed = stop + 1, False
    return stop == problem.layers if is_fixed else stop <= problem.layers


def _pinned_tours(problem: Problem, client: Sequence[int], fill: GreedyFill) -> Iterator[Tour]:
    """Yield a tour through all nodes with a fixed span and every set of the free ones.

    It begins with the client. Of more free ones than `EXACT`, those with the most room are tried.
    """
    free = [node for node in fill.holders if node not in problem.pins]
    free = sorted(free, key=lambda node: -problem.room(node, entry=False))[:EXACT]
    for places in range(1 << len(free)):
        some = [node for bit, node in enumerate(free) if places >> bit & 1]
        if tour := _pinned_tour(problem, client, some, fill.entries):
            yield tour


def _pinned_tour(
    problem: Problem,
    client: Sequence[int],
    free: Sequence[int],
    entries: Sequence[int],
) -> Tour:
    """Return a tour through these nodes; an empty one if none of them can be the entry."""
    tour = sorted(problem.pins, key=lambda node: problem.pins[node].start)
    if not client and problem.pins[tour[0]].start:  # a free node has to be the entry
        able = [node for node in free if node in entries]
        if not able:
            return ()
        entry = min(able, key=lambda node: problem.layer_ns[node])
        free = [node for node in free if node != entry]
        tour = [entry, *tour]
    tour = [*client, *tour]
    for node in free:
        tour.insert(_place(problem, tour, node), node)
    return tuple(tour)


def _place(problem: Problem, tour: Sequence[int], node: int) -> int:
    """Return where a free node costs least: where layers lack a node, else beside a free one."""
    costs = problem.hops

    def cost(at: int) -> tuple[int, int]:
        before, after = tour[at - 1], tour[at % len(tour)]
        more = costs[before][node] + costs[node][after] - costs[before][after]
        start = 0 if problem.is_client(before) else _end(problem, before, is_stop=True)
        end = _end(problem, after, is_stop=False) if at < len(tour) else problem.layers
        if start is None or end is None:
            return 1, more
        return 0 if start < end else 2, more

    return min(range(1, len(tour) + 1), key=cost)


def _end(problem: Problem, node: int, *, is_stop: bool) -> int | None:
    """Return where the fixed span of a node begins or ends; None if it has none."""
    pin = problem.pins.get(node)
    return None if pin is None else pin.stop if is_stop else pin.start


def _prune(problem: Problem, fill: GreedyFill, tour: Tour) -> Tour:
    """Drop the node whose loss costs least; return an empty tour when few are left."""
    if len(tour) <= max(_PRUNE_TO, problem.members or 0):
        return ()
    gone = [node for node in tour[1:] if node not in problem.required]
    shorter = [tuple(node for node in tour if node != one) for one in gone]
    timed = [(fill.token(tour, every=False), tour) for tour in shorter]
    return min(((time, tour) for time, tour in timed if time is not None), default=(0, ()))[1]
