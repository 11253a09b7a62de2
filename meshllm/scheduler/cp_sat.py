"""The search by a constraint solver, OR-tools CP-SAT, where that is installed (`meshllm[plan]`).

Theory of operation
-------------------
The time of a model is not linear in its replicas, but it is a number for each set of them. So each
model gets a pool of good sets, and the solver chooses one set of each pool, such that all fit on
the machines and the sum of the costs is least. A pool is grown replica by replica: of sets that use
the same machines the best is kept, and of those with as many replicas and machines the `KEPT` best.

One thread, a fixed seed and a limit of deterministic time give the same answer on every machine
that has the same version of the solver.
"""

from importlib.util import find_spec

from meshllm.scheduler.options import Options
from meshllm.scheduler.search import ReplicaSet, Sets, fits, found_of, improving

KEPT = 30
MAX_WORK_S = 10.0
"""Of the solver's deterministic time, which about equals seconds on one core."""

_SCALE = 10**6  # the solver takes integers
_MAX_COST = 10**12  # of one set; a sum of 16 fits into 64 bits after scaling


def is_installed() -> bool:
    """Return whether the solver can be imported."""
    return find_spec("ortools") is not None


def search_by_solver(options: Options) -> list[ReplicaSet]:
    """Return the best choice from the pools, with all models, as the only one; empty if none."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    costs, sets = [], []
    used: list[list[object]] = [[] for _ in options.workload.counts]
    for number in range(len(options.workload.models)):
        pool = {uses: found for uses, found in pool_of(options, number).items() if found[1]}
        chosen = [model.new_bool_var("") for _ in pool]
        model.add_exactly_one(chosen)
        for take, (uses, (cost, replicas)) in zip(chosen, pool.items(), strict=True):
            sets.append((take, replicas))
            costs.append(take * round(min(cost * _SCALE, _MAX_COST)))
            for kind, use in enumerate(uses):
                used[kind].append(take * use)
    for terms, count in zip(used, options.workload.counts, strict=True):
        model.add(cp_model.LinearExpr.sum(terms) <= count)
    model.minimize(cp_model.LinearExpr.sum(costs))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    solver.parameters.max_deterministic_time = MAX_WORK_S
    if solver.solve(model) not in {cp_model.OPTIMAL, cp_model.FEASIBLE}:
        return []
    taken = [at for take, replicas in sets if solver.value(take) for at in replicas]
    return [found_of(options, tuple(taken))]


def pool_of(options: Options, model: int) -> Sets:
    """Return good sets of replicas of a model by the machines that they use, the empty one too."""
    counts = options.workload.counts
    allowed = options.of(model)
    level: Sets = {(0,) * len(counts): (options.cost(model, ()), ())}
    pool = dict(level)
    while level:
        grown: Sets = {}
        for uses, (_, chosen) in level.items():
            for at in allowed:
                both = tuple(map(sum, zip(uses, options.all[at].uses, strict=True)))
                if fits(both, counts) and (not chosen or at >= chosen[-1]):
                    replicas = (*chosen, at)
                    found = options.cost(model, replicas), replicas
                    grown[both] = min(grown.get(both, found), found)
        level = _best_of_each_size(grown)
        for uses, found in level.items():
            pool[uses] = min(pool.get(uses, found), found)
    return improving(pool)


def _best_of_each_size(
    grown: Sets,
) -> Sets:
    kept: Sets = {}
    sizes: dict[int, int] = {}
    for uses, found in sorted(grown.items(), key=lambda item: item[1]):
        size = sum(uses)
        if sizes.get(size, 0) < KEPT:
            sizes[size] = sizes.get(size, 0) + 1
            kept[uses] = found
    return kept
