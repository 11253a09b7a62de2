"""Schedules a workload: searches placements, simulates the best ones, and keeps the fastest."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf

from meshllm.errors import ModelError
from meshllm.protocol.planning.explain import format_bytes
from meshllm.scheduler.cp_sat import is_installed, search_by_solver
from meshllm.scheduler.estimate import Estimate
from meshllm.scheduler.load import sample
from meshllm.scheduler.options import Options
from meshllm.scheduler.placement import ReplicaOption, Workload
from meshllm.scheduler.proportional import memory_proportional
from meshllm.scheduler.search import ReplicaSet, fill, improve, order, search
from meshllm.scheduler.simulator import Arrival, Latencies, SimulatedReplica, simulate

REQUESTS = 4000
"""Simulated for each finalist: a fraction of a second."""

SAMPLES = 6
"""Draws of the load by which placements are compared that are about as good: near its capacity the
queue of one draw says little."""

_FINALISTS = 6
_NEAR = 1.25  # times the mean time of the best one, by one draw


class SearchMethod(StrEnum):
    """How placements were found, on which depends whether another machine finds the same."""

    EXACT = "exact"
    """All were compared: the same on every machine."""
    LOCAL = "local"
    """Many were compared: the same on every machine without the solver."""
    SOLVER = "solver"
    """Many were compared, and what the solver found: the same where its version is the same."""


@dataclass(frozen=True, slots=True)
class Assessment:
    """A placement and what the simulator predicts for it."""

    replicas: tuple[ReplicaOption, ...]
    capacities: tuple[float, ...]
    """Requests per second that each replica can serve."""
    mean_s: float
    """Mean time of a request of any model; infinite if one has no replica."""
    tokens_per_s: float
    models: tuple[Latencies, ...]
    """By model."""

    @property
    def machines(self) -> int:
        """Count the machines that it takes."""
        return sum(each.machines for each in self.replicas)


@dataclass(frozen=True, slots=True)
class OneMore:
    """The effect of one more machine of a kind."""

    kind: str
    mean_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """The chosen placement, and those that it was compared with."""

    best: Assessment
    runner_up: Assessment | None
    """The best one that lacks a replica of the chosen one; None if there is no other."""
    proportional: Assessment
    """The placement by memory alone."""
    searched: SearchMethod


def schedule(workload: Workload, requests: Sequence[Arrival] | None = None) -> Schedule:
    """Choose a placement; the same on machines that search in the same way, see `SearchMethod`.

    Requests, in order of time, are drawn from the loads of the models if none are given.

    Raises:
        ModelError: there is no placement with all models.
    """
    asked = _requests(workload, requests)
    options = Options(workload)
    good, searched = candidates(options)
    found = finalists(options, good)
    by_memory = assess(workload, memory_proportional(workload), asked)
    assessed = [assess(workload, [options.all[at] for at in each.chosen], asked) for each in found]
    ranking = sorted([*assessed, by_memory], key=lambda each: each.mean_s)
    if ranking[0].mean_s == inf:
        raise _refusal(workload, options)
    if requests is None:
        ranking = _by_more_draws(workload, ranking)
    best = ranking[0]
    others = [each for each in ranking if each.mean_s < inf and not is_same_placement(each, best)]
    return Schedule(best, others[0] if others else None, by_memory, searched)


def one_more(
    workload: Workload, best: Assessment, requests: Sequence[Arrival] | None = None
) -> list[OneMore]:
    """Schedule with one more machine of each kind, which may stay unused."""
    asked = _requests(workload, requests)
    found = []
    for at, kind in enumerate(workload.kinds):
        kinds = list(workload.kinds)
        kinds[at] = replace(kind, count=kind.count + 1)
        options = Options(replace(workload, kinds=tuple(kinds)))
        assessed = [
            assess(options.workload, [options.all[at] for at in each.chosen], asked)
            for each in finalists(options, candidates(options)[0])
        ]
        better = min([best, *assessed], key=lambda each: each.mean_s)
        found.append(OneMore(kind.name, better.mean_s, better.tokens_per_s))
    return found


def candidates(options: Options) -> tuple[list[ReplicaSet], SearchMethod]:
    """Search for good placements, the best one first; by the solver too where it is installed."""
    found, is_exact = search(options)
    if is_exact:
        return found, SearchMethod.EXACT
    if not is_installed():
        return found, SearchMethod.LOCAL
    return sorted([*found, *search_by_solver(options)], key=order), SearchMethod.SOLVER


def finalists(options: Options, found: Sequence[ReplicaSet]) -> list[ReplicaSet]:
    """Return the best of these placements, and the best ones without one of its replicas."""
    best, *others = found
    for at in sorted(set(best.chosen)):
        rest, kept = options.without(at), tuple(each for each in best.chosen if each != at)
        others.append(improve(rest, fill(rest, kept))[-1])
    ranking = sorted({each.chosen: each for each in others}.values(), key=order)
    return [best, *(each for each in ranking if each.chosen != best.chosen)][:_FINALISTS]


def assess(
    workload: Workload, replicas: Sequence[ReplicaOption], requests: Sequence[Arrival]
) -> Assessment:
    """Simulate a placement."""
    capacities = [
        Estimate(each.engine, workload.models[each.model].load).capacity for each in replicas
    ]
    pairs = zip(replicas, capacities, strict=True)
    simulated = [SimulatedReplica(each.model, each.engine, speed) for each, speed in pairs]
    run = simulate(simulated, requests)
    is_whole = len({each.model for each in replicas}) == len(workload.models)
    return Assessment(
        replicas=tuple(replicas),
        capacities=tuple(capacities),
        mean_s=run.mean_s if is_whole else inf,  # no request may have come for a rare one
        tokens_per_s=run.tokens_per_s,
        models=tuple(run.latencies(model) for model in range(len(workload.models))),
    )


def _by_more_draws(workload: Workload, ranking: Sequence[Assessment]) -> list[Assessment]:
    """Rank those that are about as good as the first by further draws of the load, too."""
    near = [each for each in ranking if each.mean_s <= _NEAR * ranking[0].mean_s]
    if len(near) == 1:
        return list(ranking)
    loads = [each.load for each in workload.models]
    draws = [sample(loads, REQUESTS, seed=seed) for seed in range(2, SAMPLES + 1)]
    total_s = {
        id(each): each.mean_s + sum(assess(workload, each.replicas, draw).mean_s for draw in draws)
        for each in near
    }
    near.sort(key=lambda each: total_s[id(each)])
    return [*near, *ranking[len(near) :]]


def _requests(workload: Workload, given: Sequence[Arrival] | None) -> Sequence[Arrival]:
    return sample([each.load for each in workload.models], REQUESTS) if given is None else given


def is_same_placement(one: Assessment, other: Assessment) -> bool:
    """Return whether two placements have the same replicas."""
    return _spans(one) == _spans(other)


def _spans(assessed: Assessment) -> list[tuple[object, ...]]:
    return sorted((each.model, each.kinds, each.spans) for each in assessed.replicas)


def _needs(workload: Workload, model: int) -> str:
    """Say how much memory a model takes, and how much the machines have that may hold it."""
    sizes = workload.models[model].sizes
    layers = sum(sizes.layer_bytes) + sizes.context * sum(sizes.kv_bytes_per_token)
    kinds = [kind for at, kind in enumerate(workload.kinds) if workload.may_hold(at, model)]
    there = sum(kind.count * kind.memory_bytes for kind in kinds)
    return (
        f"it takes {format_bytes(layers + sizes.ends_bytes)} and workspace, and the machines that"
        f" may hold it have {format_bytes(there)}"
    )


def _refusal(workload: Workload, options: Options) -> ModelError:
    names = workload.names
    unplaceable = [model for model in range(len(names)) if not options.of(model)]
    if unplaceable:
        need = "; ".join(_needs(workload, model) for model in unplaceable)
        held = ", ".join(f"`{names[model]}`" for model in unplaceable)
        return ModelError(
            f"No set of machines holds {held} with its longest session: {need}",
            hint="add machines, quantise, or shorten its sessions",
        )
    return ModelError(
        f"The machines do not hold all {len(names)} models at once",
        hint="add machines, or leave out a model",
    )
