"""Deterministic agreement on the plan of a mesh, computed from the gossiped records.

Theory of operation
-------------------
Every node computes `agree` from its store, again whenever an item changes; there is no vote. Two
nodes with the same items and the same component of living nodes get the same plan to the last bit.
Until gossip has converged their plans may differ for a moment; every plan has an epoch, and the
first message of a ring link names the plan that the link belongs to.

The plan in force is the *incumbent*, see `plan_in_force`: of the plans that work and that all their
nodes follow, the one with the most stages, or else the latest that a living node follows. A node
that restarts or joins late therefore adopts the current plan, after a partition heals one of the
two rings is dissolved, and a member cannot end a ring with a plan that it made up. The incumbent is
kept while it works: its nodes are alive, accepted and linked rank to rank, its layers fit, and the
charter still names its model. Ranks of which one refuses the other for invalid data count as not
linked. When it stops working, or a node of it is leaving, another plan replaces it at once: one in
which all others keep their layers, see `continuity`, if the best plan gains no more than `GAIN`, or
the best. A leaving node serves on while no other plan exists. Otherwise a better plan waits until
the entry has no session that the change would hurt, and it must be faster by `GAIN`, or satisfy a
constraint of the charter (exclude, prefer, members, fixed spans) that the incumbent violates, or be
without a node whose share of the ring ends, see `grouping`. Where no ring satisfies what a member
set of these, the founder's values count, see `Charter.eased`. A first plan reports how many of the
requested members are missing: nodes that follow it wait for them for a while, to avoid loading
layers for rings that are soon replaced. A better plan waits until its nodes have their weights,
which they fetch meanwhile; one that replaces a broken plan does not. While it waits, the best plan
without those nodes may take its place, if that one is better than the incumbent too.

The choice never depends on when a node computes it, and the best plan remains the best once it is
followed: a given set of items never makes plans flap. The epoch of a new plan exceeds every known
epoch, even those of departed nodes, unless it is absurd, see `followed_plans`. Standbys are not
part of a plan's bytes, because they may come and go without changing the ring.

In a mesh of several rings, see `grouping`, each node agrees on the plan of its own: a plan uses the
nodes of one group, and is followed by them alone. Who is alive is a question of all links.

A node that does not understand some part of the charter agrees to no plan, publishes this obstacle
in its state, and is not a candidate for the others.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshllm.errors import UserError
from meshllm.names import NodeId, Span, short
from meshllm.protocol.agreement.best_plan import (
    BestPlan,
    PlanningInput,
    build_planning_input,
    find_best,
    find_missing_link,
    nodes_of,
    plan_without,
    to_division,
    to_numbers,
    why_excluded,
)
from meshllm.protocol.agreement.candidates import (
    MeshView,
    count_lacking,
    find_candidates,
    followed_plans,
    is_of_group,
    plan_in_force,
    ready_members,
)
from meshllm.protocol.agreement.continuity import continuations
from meshllm.protocol.planning.explain import standby_reasons
from meshllm.protocol.planning.plan import Links, Offer, Plan, PlanStage, Standby
from meshllm.protocol.planning.policies import POLICIES, SLACK, Policy
from meshllm.protocol.planning.problem import Problem, build_problem
from meshllm.protocol.weights.holders import missing_parts, needed_parts

GAIN = 0.15  # of the time per token; less may be noise and does not justify reloading layers


@dataclass(frozen=True, slots=True)
class Agreement:
    """The result of `agree`: the plan in force and the role of every living node."""

    plan: Plan | None
    """None if there is no ring."""
    reason: str
    """A phrase: why this plan was chosen, or why there is none."""
    alive: frozenset[NodeId]
    """The living nodes of its group."""
    refused: Mapping[NodeId, str]
    """Living nodes that are incompatible with the others, and why."""
    standbys: tuple[Standby, ...]
    """Other living nodes without a stage, ordered by node id."""
    offers: tuple[Offer, ...]
    """The planner's input; `predict` needs it together with `links`."""
    links: Links
    lacking: int = 0
    """Requested members that are not ready yet; 0 once a node follows a plan for the model."""
    ready: frozenset[NodeId] = frozenset()
    """Those that are."""
    leaving: frozenset[NodeId] = frozenset()
    """Living nodes that are leaving."""
    ahead: Plan | None = None
    """A better plan that waits until sessions end; None if none does."""
    best: BestPlan | None = field(default=None, repr=False, compare=False)
    """The planning result, reused by the next `agree`."""

    def has_lost(self, plan: Plan | None) -> bool:
        """Return whether a node of a plan is gone, as all its neighbours have reported."""
        return plan is not None and any(stage.node not in self.alive for stage in plan.stages)


def agree(view: MeshView, before: Agreement | None = None) -> Agreement:
    """Return the plan in force; nodes with the same records get the same plan.

    The planner's input changes rarely: if it equals that of ``before``, an earlier result, its
    planning work is reused. This never changes the result.
    """
    here = frozenset(node for node in view.alive() if view.group_of(node) == view.group)
    if why := view.charter.obstacle:
        return Agreement(None, why, here, {view.me: why}, (), (), Links())
    known, ready = followed_plans(view), ready_members(view, here)
    epoch = 1 + max((plan.epoch for plan in known.values()), default=0)
    followed = {node: plan for node, plan in known.items() if is_of_group(view, plan)}
    plans = {node: plan for node, plan in followed.items() if node in here}
    found = find_candidates(view, here, _nodes_in_force(view, here, followed))
    plan, ahead, standbys = None, None, found.waiting
    best = before.best if before else None
    try:
        case = build_planning_input(view, found, best)
    except UserError as error:
        best, reason = None, str(error)
    else:
        best = find_best(case, best)
        incumbent = plan_in_force(plans, view.author, lambda plan: not _fault(case, plan))
        decided = spare = _decide(case, best, incumbent, epoch)
        without = frozenset[NodeId]()
        while not spare.lacking <= without:
            without |= spare.lacking
            best = plan_without(best, without)
            spare = _decide(case, _with_spare(best), incumbent, epoch)
        if spare.ahead or spare.plan != incumbent:
            decided = spare
        plan, reason, ahead = decided.plan, decided.reason, decided.ahead
        if incumbent is not None:
            later = {each for each in plans.values() if each.precedence > incumbent.precedence}
            ahead = _as_followed(ahead, later)
            plan = plan if plan == incumbent else _as_followed(plan, later)
        if plan is not None:
            standbys = {**standbys, **_standbys(best, plan)}
    return Agreement(
        plan,
        reason,
        here,
        found.refused,
        tuple(Standby(node, standbys[node]) for node in sorted(standbys)),
        found.offers,
        found.links,
        0 if followed or _has_served(view, here, known) else count_lacking(view.charter, ready),
        ready,
        found.leaving,
        ahead,
        best,
    )


def _nodes_in_force(
    view: MeshView, here: frozenset[NodeId], followed: Mapping[NodeId, Plan]
) -> Sequence[NodeId]:
    """Return the nodes that take precedence if nodes contradict each other.

    They are those of the plan with which most of the nodes that follow one can take part: any
    member can claim to follow a later one, of itself alone. That does not change while nodes follow
    another plan, one by one. Of several, it is a plan with the author, then the latest.
    """
    followers = {
        node for node, plan in followed.items() if node in here and plan.rank(node) is not None
    }
    plans = {followed[node] for node in followers}

    def rank(plan: Plan) -> tuple[int, bool, tuple[int, bytes]]:
        found = find_candidates(view, here, nodes_of(plan))
        able = followers - found.refused.keys() - found.waiting.keys()
        return len(able), view.author in nodes_of(plan), plan.precedence

    latest = max(plans, key=lambda plan: plan.precedence, default=None)
    if latest is None:
        return ()
    return nodes_of(max(plans, key=rank) if len(plans) > 1 else latest)


def _as_followed(plan: Plan | None, later: Collection[Plan]) -> Plan | None:
    """Return a decided plan, in the epoch in which nodes outside of the incumbent follow it.

    They may be the first to follow what replaces it: one of the plans ``later`` than the incumbent.
    """
    same = (each for each in later if plan and replace(each, epoch=plan.epoch) == plan)
    return max(same, key=lambda each: each.epoch, default=plan)


def _has_served(view: MeshView, here: Collection[NodeId], known: Mapping[NodeId, Plan]) -> bool:
    """Return whether a node of the group follows a plan for its model, which others may have left.

    What is left of a ring goes on at once: the first plan alone waits for requested members.
    """
    return any(
        node in here and plan.model == view.charter.shape.name for node, plan in known.items()
    )


@dataclass(frozen=True, slots=True)
class _Decision:
    """The plan in force, and why."""

    plan: Plan | None
    reason: str
    ahead: Plan | None = None
    """A better plan that waits until sessions end."""
    lacking: frozenset[NodeId] = frozenset()
    """Nodes for whose weights a better plan waits."""


def _decide(case: PlanningInput, best: BestPlan, incumbent: Plan | None, epoch: int) -> _Decision:
    """Decide between the incumbent and the best plan."""
    fault = _fault(case, incumbent) if incumbent else "first plan"
    new = best.plan and replace(best.plan, epoch=epoch, standbys=())
    if new is None:
        kept = _Decision(incumbent, "no other plan was found")
        return _Decision(None, best.missing) if fault else kept
    if incumbent is None:
        return _Decision(new, fault)
    leaving = case.found.leaving.intersection(nodes_of(incumbent))
    if fault or leaving:
        why = fault or f"`{short(min(leaving))}` is leaving"
        return _Decision(_least_moved(case, best, incumbent, new), why)
    if new.stages == incumbent.stages:
        return _Decision(incumbent, "no plan is better")
    gain = _gain(case, POLICIES[best.policy], incumbent, new)
    keeps = _satisfies(best, incumbent)
    if keeps and gain <= GAIN:
        why = f"another plan would gain {max(gain, 0):.0%}, too little for a change"
        return _Decision(incumbent, why)
    better = f"it gains {gain:.0%}" if keeps else "it satisfies the charter"
    if lacking := [node for node in nodes_of(new) if _lacks_weights(case, new, node)]:
        why = f"another plan waits for weights on `{short(lacking[0])}`: {better}"
        return _Decision(incumbent, why, lacking=frozenset(lacking))
    state = case.view.states.get(incumbent.stages[0].node)
    if state and not state.may_change:
        return _Decision(incumbent, f"another plan waits until sessions end: {better}", new)
    return _Decision(new, better)


def _with_spare(best: BestPlan) -> BestPlan:
    """Return the planning result with the spare plan in place of the best, if it satisfies too."""
    spare = best.spare or best
    plan = spare.plan if spare.plan and _satisfies(best, spare.plan) else None
    return replace(best, plan=plan, policy=spare.policy)


def _least_moved(case: PlanningInput, best: BestPlan, incumbent: Plan, new: Plan) -> Plan:
    """Return a plan in which the nodes that stay keep their layers, unless it is too slow.

    It would be kept as an incumbent just so: the ``new`` plan gains too little for a change. Of
    those with about the least objective, one is chosen that nobody lacks weights for, and whose
    slowest node computes the caches of its new layers soonest: sessions wait for that.
    """
    policy, numbers = POLICIES[best.policy], to_numbers(case.problem)
    is_same = (incumbent.model, incumbent.layers) == (new.model, new.layers)
    if not (is_same and policy.is_timed):
        return new
    usable = [node for node in numbers if node not in {*case.found.leaving, *best.exclude}]
    spare = [node for node in usable if node not in nodes_of(incumbent)]
    plans = [
        plan
        for stages in continuations(incumbent, usable, spare)
        if (plan := _with_stages(new, stages))
        and not _fault(case, plan)
        and _satisfies(best, plan)
        and _gain(case, policy, plan, new) <= GAIN
    ]
    costs = [policy.objective(case.problem, to_division(case.problem, plan)) for plan in plans]
    most = (1 + SLACK) * min(costs, default=0)

    def rank(found: tuple[Plan, int]) -> tuple[bool, int, int]:
        plan, cost = found
        lacks = any(_lacks_weights(case, plan, node) for node in nodes_of(plan))
        return lacks, _takeover_time(case.problem, incumbent, plan), cost

    near = [each for each in zip(plans, costs, strict=True) if SLACK * each[1] <= most]
    return min(near, key=rank, default=(new, 0))[0]


def _with_stages(plan: Plan, stages: tuple[PlanStage, ...]) -> Plan | None:
    """Return a plan with other stages; None if they suit other ends, such as those of a liar."""
    try:
        return replace(plan, stages=stages)
    except UserError:
        return None


def _takeover_time(problem: Problem, incumbent: Plan, plan: Plan) -> int:
    """Return the time of the layers that are new to a node, for one row, on the slowest node."""
    numbers = to_numbers(problem)
    held = {stage.node: stage.span for stage in incumbent.stages}
    return max(
        problem.time(number, stage.span) - problem.time(number, held.get(stage.node, Span(0, 0)))
        for stage, number in ((stage, numbers[stage.node]) for stage in plan.stages)
    )


def _lacks_weights(case: PlanningInput, plan: Plan, node: NodeId) -> bool:
    weights = case.view.profiles[node].weights
    return bool(missing_parts(weights, needed_parts(plan, node)))


def _fault(case: PlanningInput, plan: Plan) -> str:
    """Return why a plan cannot be followed; empty if it can."""
    charter, problem, found = case.view.charter, case.problem, case.found
    shape = charter.shape
    asked = (shape.name, shape.layers, case.terms.ends, case.terms.entry or plan.stages[0].node)
    if (plan.model, plan.layers, plan.ends, plan.stages[0].node) != asked:
        return "the charter requires another ring"
    if case.terms.entry is None and plan.stages[0].node not in (charter.entries or nodes_of(plan)):
        return f"`{short(plan.stages[0].node)}` may not be the entry"
    numbers = to_numbers(problem)
    for rank, stage in enumerate(plan.stages):
        name = short(stage.node)
        if why := found.refused.get(stage.node) or found.waiting.get(stage.node):
            return f"`{name}` cannot take part: {why}"
        if stage.node not in numbers:
            return f"`{name}` is gone"
        if not _fits(problem, numbers[stage.node], stage.span, entry=rank == 0):
            return f"`{name}` cannot hold `{stage.span}`"
    return find_missing_link(plan, found)


def _fits(problem: Problem, node: int, span: Span, *, entry: bool) -> bool:
    if not span:
        return problem.can_enter(node)
    return span.stop in problem.stops(node, span.start, entry=entry)


def _satisfies(best: BestPlan, plan: Plan) -> bool:
    """Return whether a working plan satisfies the constraints of the charter, as the best does."""
    ring = to_division(best.problem, plan).order
    return best.problem.allows(ring) and not set(best.exclude) & set(nodes_of(plan))


def _gain(case: PlanningInput, policy: Policy, incumbent: Plan, other: Plan) -> float:
    """Return the fraction of time that another plan saves; of layers moved if untimed.

    A quotient of integers, and so the same on every machine.
    """
    problem = case.problem
    if not policy.is_timed:
        return _moved_layers(incumbent, other)
    before, after = (
        policy.objective(problem, to_division(problem, plan)) for plan in (incumbent, other)
    )
    return (before - after) / max(before, 1)


def _moved_layers(incumbent: Plan, other: Plan) -> float:
    """Return the fraction of layers that change nodes; 1 if the sets of nodes differ."""
    if set(nodes_of(incumbent)) != set(nodes_of(other)):
        return 1.0
    before, after = (
        [stage.node for stage in plan.stages for _ in range(len(stage.span))]
        for plan in (incumbent, other)
    )
    return sum(a != b for a, b in zip(before, after, strict=True)) / other.layers


def _standbys(best: BestPlan, plan: Plan) -> dict[NodeId, str]:
    """Return why each node without a stage has none.

    The ring may violate the current terms, so members and spans of the terms are ignored.
    """
    case = best.case
    charter, found, free = case.view.charter, case.found, case.problem
    if case.terms.spans:
        free = build_problem(
            found.offers, found.links, charter.shape, replace(case.terms, spans={})
        )
    problem = replace(free, members=best.problem.members)
    ring = to_division(problem, plan).order
    reasons = {problem.nodes[at]: why for at, why in standby_reasons(problem, ring)}
    spans = {node: f"its span `{span}` does not fit the ring" for node, span in found.spans.items()}
    excluded = {node: why_excluded(charter, node) for node in best.exclude}
    ending = dict.fromkeys(case.view.ending, "its share of the ring ends")
    leaving = dict.fromkeys(found.leaving, "it is leaving")
    known = {**spans, **found.faulty, **excluded, **ending, **leaving}
    return {node: known.get(node, why) for node, why in reasons.items()}
