"""All replicas worth considering: rings of few machines, of every mix of kinds."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Self

from meshllm.scheduler.estimate import Estimate, mean_time
from meshllm.scheduler.placement import (
    LayerAllocation,
    ReplicaOption,
    Workload,
    make_option,
    most_layers,
)

MAX_RING = 8
"""Machines of one replica; more only add wires, as a replica needs no more than fit the model."""
MAX_MIXES = 1600
"""Mixes of kinds that have the memory and are tried, smallest first, for all models together.

All of them take up to a minute.
"""

_SPARE = 2  # machines beyond the fewest that hold a model


class Options:
    """The replicas that a placement may consist of, and what sets of them are worth."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._banned: frozenset[int] = frozenset()
        self.lookups = 0
        """Of costs: the measure of the work of a search."""
        self._times: dict[tuple[int, tuple[int, ...]], float] = {}

    @cached_property
    def all(self) -> tuple[ReplicaOption, ...]:
        """List all options; a search names them by their place."""
        models = range(len(self.workload.models))
        return tuple(option for model in models for option in self._of(model))

    @cached_property
    def estimates(self) -> tuple[Estimate, ...]:
        """The speeds of each option."""
        loads = [served.load for served in self.workload.models]
        return tuple(Estimate(each.engine, loads[each.model]) for each in self.all)

    def of(self, model: int) -> list[int]:
        """Return the options of a model."""
        return [at for at in self._by_model[model] if at not in self._banned]

    def without(self, at: int) -> Self:
        """Return the same options, by the same numbers, of which one may not be chosen."""
        others = copy(self)
        others._banned |= {at}
        return others

    def cost(self, model: int, chosen: Sequence[int]) -> float:
        """Return the mean number of requests for a model on these of its replicas.

        By Little's law that is its rate times their mean time; smaller is better. A model without
        replicas costs more than the longest queues of all others.
        """
        self.lookups += 1
        key = model, tuple(sorted(chosen))
        if key not in self._times:
            rate = self.workload.models[model].load.rate if chosen else self._rate
            self._times[key] = rate * mean_time([self.estimates[at] for at in key[1]], rate)
        return self._times[key]

    def mean_s(self, chosen: Sequence[int]) -> float:
        """Return the mean time of all requests on these replicas."""
        models = range(len(self.workload.models))
        requests = sum(
            self.cost(model, [at for at in chosen if self.all[at].model == model])
            for model in models
        )
        return requests / self._rate

    @cached_property
    def _rate(self) -> float:
        return sum(served.load.rate for served in self.workload.models)

    @cached_property
    def _by_model(self) -> list[list[int]]:
        models = range(len(self.workload.models))
        return [[at for at, each in enumerate(self.all) if each.model == one] for one in models]

    def _of(self, model: int) -> Iterator[ReplicaOption]:
        """Yield the options of a model that no other with fewer machines dominates."""
        kinds, most = range(len(self.workload.kinds)), MAX_MIXES // len(self.workload.models)
        kept: list[_Candidate] = []
        fewest = [self._add(kept, model, self._alone(kind)) for kind in kinds]
        self._add(kept, model, islice(self._mixed(model), most), min(fewest, default=MAX_RING))
        yield from (each.option for each in kept)

    def _add(
        self,
        kept: list["_Candidate"],
        model: int,
        mixes: Iterable[tuple[int, ...]],
        fewest: int = MAX_RING,
    ) -> int:
        """Add the options of mixes of rising size, up to `_SPARE` more than the fewest that fit.

        Return how many these are.
        """
        for mix in mixes:
            if len(mix) > fewest + _SPARE:
                break
            best = self._best(model, mix)
            if best:
                fewest = min(fewest, len(mix))
            kept += [each for each in best if not any(each.is_dominated(other) for other in kept)]
        return fewest

    def _alone(self, kind: int) -> Iterator[tuple[int, ...]]:
        count = min(MAX_RING, self.workload.kinds[kind].count)
        return ((kind,) * size for size in range(1, count + 1))

    def _mixed(self, model: int) -> Iterator[tuple[int, ...]]:
        """Yield the mixes of several kinds whose memory holds the layers of a model."""
        served = self.workload.models[model]
        kinds = {
            at: (most_layers(served, kind), kind.count)
            for at, kind in enumerate(self.workload.kinds)
            if not kind.is_provider
        }
        largest = sorted(kinds, key=lambda at: -kinds[at][0])
        ordered = {at: kinds[at] for at in largest if kinds[at][0]}
        for size in range(2, MAX_RING + 1):
            for mix in _holding(ordered, size, served.sizes.layers):
                if len(set(mix)) > 1:
                    yield tuple(sorted(mix))

    def _best(self, model: int, mix: tuple[int, ...]) -> list["_Candidate"]:
        """Return the option with the most capacity, and the one with the least time if idle."""
        spreads = (
            (LayerAllocation.BALANCED, LayerAllocation.FASTEST)
            if len(set(mix)) > 1
            else (LayerAllocation.BALANCED,)
        )
        load = self.workload.models[model].load
        found: list[_Candidate] = []
        for entry in sorted(set(mix)):
            others = list(mix)
            others.remove(entry)
            for spread in spreads:
                option = make_option(self.workload, model, (entry, *others), spread)
                if option is not None:
                    estimate = Estimate(option.engine, load)
                    found.append(
                        _Candidate(option, estimate.capacity, estimate.service_time_s(0.0))
                    )
        if not found:
            return []
        widest = min(found, key=lambda each: (-each.capacity, each.idle_s))
        quickest = min(found, key=lambda each: (each.idle_s, -each.capacity))
        return [widest] if widest is quickest else [widest, quickest]


def _holding(
    kinds: Mapping[int, tuple[int, int]], size: int, layers: int
) -> Iterator[tuple[int, ...]]:
    """Yield the mixes of this many machines that hold this many layers together.

    Each kind has the layers that a machine holds, those with the most first, and its machines.
    """
    if not size:
        yield ()
        return
    left = dict(kinds)
    for kind, (held, count) in kinds.items():
        if size * held < layers:  # as for all after it
            return
        left[kind] = held, count - 1
        if count:
            for rest in _holding(left, size - 1, layers - held):
                yield (kind, *rest)
        del left[kind]


@dataclass(frozen=True, slots=True)
class _Candidate:
    option: ReplicaOption
    capacity: float
    idle_s: float
    """Time of a request, without others."""

    def is_dominated(self, other: "_Candidate") -> bool:
        """Return whether another takes no more of any machines and is as good at any load."""
        pairs = zip(other.option.uses, self.option.uses, strict=True)
        return (
            other.capacity >= self.capacity
            and other.idle_s <= self.idle_s
            and all(fewer <= more for fewer, more in pairs)
        )
