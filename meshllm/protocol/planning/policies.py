"""Planning policies: what makes one plan better than another.

A policy is a row of `POLICIES`: its name travels as text, and a node that does not know it stands
by. A row needs an objective; without a solver, the best of the most promising rings is taken.

Theory of operation
-------------------
`fastest` minimises one session's time per token: the sum of all stages, the hops, and the head. It
takes a lower bound of every candidate ring, and partitions the layers exactly in the order of the
bounds until no bound is below the best partition. If all layers are alike the bound is exact, and
with up to twelve nodes every set of them is a candidate: the result is optimal.

`auto` takes that ring and redistributes its layers: a token may take `SLACK` longer if that makes
the slowest stage faster by `WORTH` times as much, for prefill, which keeps all stages busy at once,
and for concurrent sessions. Times are measured, and two equal machines never measure the same:
`fastest` gives one of them all layers but one. If one is much slower, that stays so.

`throughput` is `fastest` under a limit: the shortest possible time of the slowest stage.

`proportional` is the paper's Algorithm 1, repaired. As printed it gives a node no layers (3 layers
on 4 nodes), or -5 of them (28 layers, memories 100 and 9 x 1), or the smallest node the most (10
and 3 x 9.9), because the last node takes what rounding leaves. Here the squared distance from the
proportional share is minimised, within the capacity of each node and with at least one layer each:
the largest remainder method, if no capacity binds.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from meshllm.errors import UserError
from meshllm.names import Span
from meshllm.protocol.planning.candidate_rings import rings
from meshllm.protocol.planning.explain import refusal, standby_reasons
from meshllm.protocol.planning.partition import Division, GreedyFill, divide, stage_time, token_time
from meshllm.protocol.planning.plan import (
    Links,
    ModelSizes,
    Offer,
    Plan,
    PlanConstraints,
    PlanStage,
    Standby,
)
from meshllm.protocol.planning.problem import NANOSECOND, Problem, build_problem

SLACK = 20
"""A token may take 1/20 longer: equal machines under load measure up to a fifth apart."""

WORTH = 4
"""Relative gain of the slowest stage, at least, per relative loss of the token time."""

_MAX_CANDIDATES = 64  # rings that are partitioned for a policy without a solver
_LIMIT_STEPS = 64  # of the slowest stage that are tried, as fractions of that of `fastest`
_LOOSEN = 16  # a limit that unequal layers cannot meet grows by 1/16
_TIME_WEIGHT = 1 << 32  # more than the sum of squares of the spans of any model

UNBOUND = PlanConstraints()
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Policy:
    """What a plan optimises."""

    objective: Callable[[Problem, Division], int]
    """What to minimise: an integer from 0 on, so that it is the same on every machine."""
    solve: Callable[[Problem], Division | None] | None = None
    """Finds the best ring."""
    takes_spans: bool = True
    """The terms may fix the span of a node."""
    is_timed: bool = True
    """The objective is a time; else the gain of a change is the share of layers that it moves."""

    def find(self, problem: Problem) -> Division | None:
        """Find the best ring; None if the model does not fit."""
        if self.solve is not None:
            return self.solve(problem)
        likeliest = islice(sorted(rings(problem, GreedyFill(problem))), _MAX_CANDIDATES)
        found = (_divide_evenly(problem, ring) for _, _, ring in likeliest)
        divisions = [division for division in found if division]
        return min(divisions, key=lambda each: self.objective(problem, each), default=None)


def find_policy(name: str) -> Policy:
    """Return the policy of this name.

    Raises:
        UserError: the name is unknown.
    """
    if name not in POLICIES:
        names = ", ".join(f"`{each}`" for each in POLICIES)
        raise UserError(f"Unknown policy `{name}`", hint=f"one of {names}")
    return POLICIES[name]


def make_plan(
    offers: Sequence[Offer],
    links: Links,
    shape: ModelSizes,
    *,
    policy: str = AUTO,
    epoch: int = 1,
    terms: PlanConstraints = UNBOUND,
) -> Plan:
    """Choose which node holds which layers; the order of the offers does not matter.

    Raises:
        ModelError: the model does not fit; the message says how much is missing.
        UserError: the offers or the terms contradict each other, or the policy is unknown.
    """
    offers = sorted(offers, key=lambda offer: offer.node)
    if len({offer.node for offer in offers}) < len(offers):
        raise UserError("A node made more than one offer")
    chosen = find_policy(policy)
    if terms.spans and not chosen.takes_spans:
        raise UserError(f"Policy `{policy}` does not support fixed spans", hint="use `fastest`")
    problem = build_problem(offers, links, shape, terms)
    division = chosen.find(problem)
    if division is None:
        raise refusal(problem, shape)
    stages = zip(division.order, division.spans, strict=True)
    return Plan(
        epoch=epoch,
        model=shape.name,
        ends=terms.ends,
        stages=tuple(PlanStage(problem.nodes[node], span) for node, span in stages),
        standbys=tuple(
            Standby(problem.nodes[node], reason)
            for node, reason in standby_reasons(problem, division.order)
        ),
    )


def fastest(problem: Problem) -> Division | None:
    """Find the ring with the least time per token; ties go to the smallest and most even."""
    fill = GreedyFill(problem)
    least: tuple[int, int] | None = None  # time and size of the best ring so far
    best: Division | None = None
    for bound, size, ring in sorted(rings(problem, fill)):
        if least is not None and (bound, size) >= least:
            break
        division = _divide_evenly(problem, ring)
        if division is None:
            continue
        found = token_time(problem, division), size
        if least is None or found < least:
            least, best = found, division
    return best


def auto(problem: Problem) -> Division | None:
    """Take the ring of `fastest` and, within `SLACK`, a partition with a fast slowest stage.

    The best one is faster by at most 1/64 of the slowest stage of `fastest`, whose partition is
    kept if no other is worth it.
    """
    best = fastest(problem)
    if best is None:
        return None
    token, stage = token_time(problem, best), stage_time(problem, best)

    def under(limit: int) -> Division | None:
        found = _divide_evenly(problem.limited(limit), best.order)
        return found if found and token_time(problem, found) <= token + token // SLACK else None

    limits = [stage * part // _LIMIT_STEPS for part in range(1, _LIMIT_STEPS)]
    at = bisect_left(limits, 1, key=lambda limit: under(limit) is not None)
    found = under(limits[at]) if at < len(limits) else None
    if found is None:
        return best
    loss, gain = token_time(problem, found) - token, stage - stage_time(problem, found)
    return found if loss * stage * WORTH <= gain * token else best


def throughput(problem: Problem) -> Division | None:
    """Find the ring with the fastest slowest stage; ties go to the `fastest`.

    It is optimal where `fastest` is exact; elsewhere the stage may be 1/16 slower than the best.
    """
    if fastest(problem) is None:
        return None
    limit = _least_limit(problem)
    while (found := fastest(problem.limited(limit))) is None:
        limit += limit // _LOOSEN + NANOSECOND
    return found


def proportional(problem: Problem) -> Division | None:
    """Give every node, largest memory first, layers in proportion to its memory.

    The smallest are left out only if there is no layer that they could hold in that order.
    """
    fill = GreedyFill(problem)
    most = problem.members or problem.layers + problem.client
    by_memory = sorted(fill.holders, key=lambda node: -problem.memory[node])
    entries = sorted(fill.entries, key=lambda node: -problem.memory[node])
    for size in range(min(most, len(by_memory) + problem.client), 0, -1):
        for entry in entries:
            rooms = fill.rooms(entry)
            others = [node for node in by_memory if node != entry]
            chosen = sorted(others, key=lambda node: node not in problem.required)[: size - 1]
            ring = (entry, *(node for node in others if node in chosen))
            if sum(rooms[node] for node in ring) < problem.works[-1] or not problem.allows(ring):
                continue
            if found := divide(problem, ring, _share(problem, ring)):
                return found
    return None


def _share(problem: Problem, order: Sequence[int]) -> Callable[[int, Span], int]:
    usable = {node: problem.usable(node, entry=node == order[0]) for node in order}
    if problem.client:
        usable[order[0]] = 0
    total, works = sum(usable.values()), problem.works

    def distance(node: int, span: Span) -> int:
        work = works[span.stop] - works[span.start]
        return (work * total - works[-1] * usable[node]) ** 2

    return distance


def _divide_evenly(problem: Problem, ring: tuple[int, ...]) -> Division | None:
    """Partition for the least time per token; ties go to the most even spans."""
    return divide(
        problem, ring, lambda node, span: problem.time(node, span) * _TIME_WEIGHT + len(span) ** 2
    )


def _least_limit(problem: Problem) -> int:
    """Return the smallest limit, in whole nanoseconds, under which all layers have room."""
    slowest = max(problem.layer_ns) * problem.works[-1] + max(problem.head)
    limits = range(0, slowest + 2 * NANOSECOND, NANOSECOND)
    at = bisect_left(limits, 1, key=lambda limit: _has_room(problem.limited(limit)))
    return limits[at]


def _has_room(problem: Problem) -> bool:
    fill = GreedyFill(problem)
    most = problem.members or problem.layers + problem.client
    for entry in fill.entries:
        rooms = fill.rooms(entry)
        others = [node for node in fill.holders if node != entry]
        others.sort(key=lambda node: (node not in problem.required, -rooms[node]))
        ring = (entry, *others[: most - 1])
        if problem.allows(ring) and sum(rooms[node] for node in ring) >= problem.works[-1]:
            return True
    return False


def _share_error(problem: Problem, division: Division) -> int:
    """Return the distance of a partition from the shares of `proportional`."""
    distance = _share(problem, division.order)
    holders = zip(division.order, division.spans, strict=True)
    return sum(distance(node, span) for node, span in holders if span)


POLICIES: Mapping[str, Policy] = {
    AUTO: Policy(token_time, auto),
    "fastest": Policy(token_time, fastest),
    "throughput": Policy(stage_time, throughput),
    "proportional": Policy(_share_error, proportional, takes_spans=False, is_timed=False),
}
"""The policies by name, the default first."""
