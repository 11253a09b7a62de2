"""Searches for the set of replicas with the least mean time of a request.

Theory of operation
-------------------
The time of a model depends on its own replicas only; models compete for machines. Hence the exact
search: for each model the best set of replicas for every number of machines of each kind, and then,
model after model, the best way to share the machines (dynamic programming). It is used if there are
at most `MOST_SETS` sets of replicas of each model.

For more, replicas are added greedily, the one first that saves most per machine, to each single
replica. The best results are improved by replacing one or two replicas with another and filling the
gap greedily, until no such change helps or `MOST_TRIES` were tried. Both searches are
deterministic: limits count work, not time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from meshllm.scheduler.options import Options

MOST_SETS = 3000
MOST_TRIES = 1000

_IMPROVED = 3  # of the greedy results

_WORTH = 1e-9  # of a cost: less is rounding
_Uses = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """A set of replicas."""

    mean_s: float
    """Estimated mean time of a request."""
    chosen: tuple[int, ...]
    """Places of the replicas in `Options.all`, in ascending order."""


def search(options: Options) -> list[Found]:
    """Return good sets of replicas, the best one first."""
    return search_exactly(options) or search_locally(options)


def search_exactly(options: Options) -> list[Found]:
    """Return the best set of replicas as the only one; empty if there are too many to try."""
    counts = options.mesh.counts
    shared: dict[_Uses, tuple[float, tuple[int, ...]]] = {(0,) * len(counts): (0.0, ())}
    for model in range(len(options.mesh.models)):
        best: dict[_Uses, tuple[float, tuple[int, ...]]] = {}
        for number, (uses, chosen) in enumerate(_sets(options, options.of(model), counts)):
            if number >= MOST_SETS:
                return []
            cost = options.cost(model, chosen)
            best[uses] = min(best.get(uses, (cost, chosen)), (cost, chosen))
        shared = _share(shared, _improving(best), counts)
    _, chosen = min(shared.values())
    return [_found(options, chosen)]


def search_locally(options: Options) -> list[Found]:
    """Return sets of replicas that no small change improves, and those on the way to them."""
    models = range(len(options.mesh.models))
    starts = [(), *((at,) for model in models for at in options.of(model))]
    greedy = {fill(options, start) for start in starts}
    likeliest = sorted((_found(options, chosen) for chosen in greedy), key=_order)[:_IMPROVED]
    found = {each for start in likeliest for each in improve(options, start.chosen)}
    return sorted(found, key=_order)


def fill(options: Options, chosen: tuple[int, ...]) -> tuple[int, ...]:
    """Add replicas greedily, while one helps; each time the one that saves most per machine."""
    while True:
        free = _free(options, chosen)
        gains: list[tuple[float, int]] = []
        for model in range(len(options.mesh.models)):
            own = [at for at in chosen if options.all[at].model == model]
            before = options.cost(model, own)
            for at in options.of(model):
                if _fits(options.all[at].uses, free):
                    saved = before - options.cost(model, [*own, at])
                    gains.append((saved / _weight(options, at), -at))
        gain, at = max(gains, default=(0.0, 0))
        if gain <= _WORTH:
            return tuple(sorted(chosen))
        chosen = (*chosen, -at)


def improve(options: Options, chosen: tuple[int, ...]) -> list[Found]:
    """Replace replicas while that helps; return all sets on the way, the last one being best."""
    way = [_found(options, chosen)]
    tries, starts = 0, _starts(options, chosen)
    while tries < MOST_TRIES and (start := next(starts, None)) is not None:
        tries += 1
        found = _found(options, fill(options, start))
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
        for model in range(len(options.mesh.models)):
            for at in options.of(model):
                if _fits(options.all[at].uses, free):
                    yield tuple(sorted((*kept, at)))


def _sets(
    options: Options, allowed: Sequence[int], free: _Uses
) -> Iterator[tuple[_Uses, tuple[int, ...]]]:
    """Yield every set of replicas of a model that fits, with the machines that it uses."""
    yield (0,) * len(free), ()
    for place, at in enumerate(allowed):
        uses = options.all[at].uses
        if _fits(uses, free):
            rest = tuple(have - use for have, use in zip(free, uses, strict=True))
            for more, chosen in _sets(options, allowed[place:], rest):
                yield tuple(map(sum, zip(uses, more, strict=True))), (at, *chosen)


def _improving(
    best: dict[_Uses, tuple[float, tuple[int, ...]]],
) -> dict[_Uses, tuple[float, tuple[int, ...]]]:
    """Drop sets for which fewer machines give as much."""
    kept: dict[_Uses, tuple[float, tuple[int, ...]]] = {}
    for uses, found in sorted(best.items(), key=lambda item: (item[1][0], sum(item[0]))):
        if not any(_fits(fewer, uses) for fewer in kept):
            kept[uses] = found
    return kept


def _share(
    shared: dict[_Uses, tuple[float, tuple[int, ...]]],
    best: dict[_Uses, tuple[float, tuple[int, ...]]],
    counts: _Uses,
) -> dict[_Uses, tuple[float, tuple[int, ...]]]:
    """Add one more model to the best sets by machines used."""
    grown: dict[_Uses, tuple[float, tuple[int, ...]]] = {}
    for used, (cost, chosen) in shared.items():
        for uses, (more, added) in best.items():
            both = tuple(map(sum, zip(used, uses, strict=True)))
            if _fits(both, counts):
                total = cost + more, (*chosen, *added)
                grown[both] = min(grown.get(both, total), total)
    return _improving(grown)


def _order(found: Found) -> tuple[float, tuple[int, ...]]:
    return found.mean_s, found.chosen


def _found(options: Options, chosen: tuple[int, ...]) -> Found:
    chosen = tuple(sorted(chosen))
    return Found(options.mean_s(chosen), chosen)


def _free(options: Options, chosen: Sequence[int]) -> _Uses:
    return tuple(
        count - sum(options.all[at].uses[kind] for at in chosen)
        for kind, count in enumerate(options.mesh.counts)
    )


def _fits(uses: _Uses, free: _Uses) -> bool:
    return all(use <= have for use, have in zip(uses, free, strict=True))


def _weight(options: Options, at: int) -> float:
    """Return the share of the mesh that a replica takes, in machines of its kinds."""
    pairs = zip(options.all[at].uses, options.mesh.counts, strict=True)
    return sum(use / count for use, count in pairs if use)
