"""Searches for the set of replicas with the least mean time of a request.

Theory of operation
-------------------
The time of a model depends on its own replicas only; models compete for machines. So the exact
search finds for each model the best set of replicas for every number of machines of each kind, and
then, model after model, the best way to share the machines (dynamic programming). It is used if
there are at most `MAX_SETS` sets of replicas of each model.

For more, replicas are added greedily, the one first that saves most per machine, to each single
replica. The best results are improved by replacing one or two replicas with another and filling the
gap greedily, until no such change helps. Both searches are deterministic: `MAX_LOOKUPS` limits
work, not time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

from meshllm.scheduler.options import Options

MAX_SETS = 3000
MAX_LOOKUPS = 300_000
"""Of costs, by all greedy searches and by each improvement: about a second."""

_IMPROVED = 3  # of the greedy results
_WORTH = 1e-9  # of a cost: less is rounding

Uses: TypeAlias = tuple[int, ...]
"""Machines of each kind."""

Sets: TypeAlias = dict[Uses, tuple[float, tuple[int, ...]]]
"""Cost and replicas of the best set that uses these machines."""


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """A set of replicas."""

    mean_s: float
    """Estimated mean time of a request."""
    chosen: tuple[int, ...]
    """Places of the replicas in `Options.all`, in ascending order."""


def search(options: Options) -> tuple[list[ReplicaSet], bool]:
    """Return good sets of replicas, the best one first, and whether all sets were compared."""
    found = search_exactly(options)
    return (found, True) if found else (search_locally(options), False)


def search_exactly(options: Options) -> list[ReplicaSet]:
    """Return the best set of replicas as the only one; empty if there are too many to try."""
    counts = options.workload.counts
    shared: Sets = {(0,) * len(counts): (0.0, ())}
    for model in range(len(options.workload.models)):
        best: Sets = {}
        for number, (uses, chosen) in enumerate(_sets(options, options.of(model), counts)):
            if number >= MAX_SETS:
                return []
            cost = options.cost(model, chosen)
            best[uses] = min(best.get(uses, (cost, chosen)), (cost, chosen))
        shared = _share(shared, improving(best), counts)
    _, chosen = min(shared.values())
    return [found_of(options, chosen)]


def search_locally(options: Options) -> list[ReplicaSet]:
    """Return sets of replicas that no small change improves, and those on the way to them."""
    models = range(len(options.workload.models))
    starts = [(), *((at,) for model in models for at in options.of(model))]
    last = options.lookups + MAX_LOOKUPS
    greedy = {fill(options, start) for start in starts if options.lookups < last}
    likeliest = sorted((found_of(options, chosen) for chosen in greedy), key=order)[:_IMPROVED]
    found = {each for start in likeliest for each in improve(options, start.chosen)}
    return sorted(found, key=order)


def fill(options: Options, chosen: tuple[int, ...]) -> tuple[int, ...]:
    """Add replicas greedily, while one helps; each time the one that saves most per machine."""
    while True:
        free = _free(options, chosen)
        gains: list[tuple[float, int]] = []
        for model in range(len(options.workload.models)):
            own = [at for at in chosen if options.all[at].model == model]
            before = options.cost(model, own)
            for at in options.of(model):
                if fits(options.all[at].uses, free):
                    saved = before - options.cost(model, [*own, at])
                    gains.append((saved / _weight(options, at), -at))
        gain, at = max(gains, default=(0.0, 0))
        if gain <= _WORTH:
            return tuple(sorted(chosen))
        chosen = (*chosen, -at)


def improve(options: Options, chosen: tuple[int, ...]) -> list[ReplicaSet]:
    """Replace replicas while that helps; return all sets on the way, of which the last is best."""
    way = [found_of(options, chosen)]
    starts = _starts(options, chosen)
    last = options.lookups + MAX_LOOKUPS
    while options.lookups < last and (start := next(starts, None)) is not None:
        found = found_of(options, fill(options, start))
        if found.mean_s < way[-1].mean_s * (1 - _WORTH):
            way.append(found)
            starts = _starts(options, found.chosen)
    return way


def _without(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield a set without one replica, then without two; equal ones once."""
    for count in (1, 2):
        seen = set()
        for gone in combinations(range(len(chosen)), count):
            kept = tuple(at for place, at in enumerate(chosen) if place not in gone)
            if kept not in seen:
                seen.add(kept)
                yield kept


def _starts(options: Options, chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield sets to fill greedily: without one or two replicas, as they are and with another."""
    for kept in _without(chosen):
        yield kept
        free = _free(options, kept)
        for model in range(len(options.workload.models)):
            for at in options.of(model):
                if fits(options.all[at].uses, free):
                    yield tuple(sorted((*kept, at)))


def _sets(
    options: Options, allowed: Sequence[int], free: Uses
) -> Iterator[tuple[Uses, tuple[int, ...]]]:
    """Yield every set of replicas of a model that fits, with the machines that it uses."""
    yield (0,) * len(free), ()
    for place, at in enumerate(allowed):
        uses = options.all[at].uses
        if fits(uses, free):
            rest = tuple(have - use for have, use in zip(free, uses, strict=True))
            for more, chosen in _sets(options, allowed[place:], rest):
                yield tuple(map(sum, zip(uses, more, strict=True))), (at, *chosen)


def improving(
    best: Sets,
) -> Sets:
    """Drop sets for which fewer machines give as much."""
    kept: Sets = {}
    for uses, found in sorted(best.items(), key=lambda item: (item[1][0], sum(item[0]))):
        if not any(fits(fewer, uses) for fewer in kept):
            kept[uses] = found
    return kept


def _share(
    shared: Sets,
    best: Sets,
    counts: Uses,
) -> Sets:
    """Add one more model to the best sets by machines used."""
    grown: Sets = {}
    for used, (cost, chosen) in shared.items():
        for uses, (more, added) in best.items():
            both = tuple(map(sum, zip(used, uses, strict=True)))
            if fits(both, counts):
                total = cost + more, (*chosen, *added)
                grown[both] = min(grown.get(both, total), total)
    return improving(grown)


def order(found: ReplicaSet) -> tuple[float, tuple[int, ...]]:
    """Return what to sort by: the fastest first, ties by number."""
    return found.mean_s, found.chosen


def found_of(options: Options, chosen: tuple[int, ...]) -> ReplicaSet:
    """Describe a set of replicas."""
    chosen = tuple(sorted(chosen))
    return ReplicaSet(options.mean_s(chosen), chosen)


def _free(options: Options, chosen: Sequence[int]) -> Uses:
    return tuple(
        count - sum(options.all[at].uses[kind] for at in chosen)
        for kind, count in enumerate(options.workload.counts)
    )


def fits(uses: Uses, free: Uses) -> bool:
    """Return whether this many machines of each kind are free."""
    return all(use <= have for use, have in zip(uses, free, strict=True))


def _weight(options: Options, at: int) -> float:
    """Return the share of all machines that a replica takes, in machines of its kinds."""
    pairs = zip(options.all[at].uses, options.workload.counts, strict=True)
    return sum(use / count for use, count in pairs if use)
