"""The one plan of a mesh, out of what all of its nodes know; carries nothing out.

Theory of operation
-------------------
Every node computes `agree` from its store, again whenever an item changes; there is no vote. Two
nodes with the same items and the same component of living nodes get the same plan to the last bit.
Until the items have spread they may differ for a moment; every plan has an epoch, and links of a
ring say in their first message which plan they are for.

The plan that binds is the *incumbent*: of all plans that living nodes follow the one of the highest
(epoch, digest). So a node that restarts, or comes late, takes what is there; and where a partition
heals, one of the two rings gives way. The incumbent stays as long as it works: its nodes are alive,
accepted and linked rank to rank, its layers fit, the charter still names its model. When it does
not, the best plan follows at once. When it does, a better plan waits until its entry has no session
that the change would hurt, and must be better by `GAIN`, or keep what the charter binds (exclude,
prefer, members, spans of nodes) where the incumbent does not. A first plan that lacks
members which the charter asks for says so: who follows it waits for them for a while, as each ring
of fewer would be loaded for nothing.

What is best never depends on the times at which nodes look, and the best plan stays the best when
it is followed: the same items never make a plan flap. A new plan has an epoch above every epoch
known, even of nodes that are gone; standbys are not in its bytes, for their coming and going
changes nothing for a ring.

A node that does not know what the charter asks for agrees to nothing, says so in its state, and is
no candidate for the others.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from meshllm.errors import PeerFault, UserError
from meshllm.names import NodeId, Span
from meshllm.protocol.agreement.candidates import View, count_lacking, find_candidates
from meshllm.protocol.agreement.relaxation import (
    Best,
    Case,
    find_best,
    find_gap,
    nodes_of,
    open_case,
    to_division,
    to_numbers,
)
from meshllm.protocol.planning.explain import standby_reasons
from meshllm.protocol.planning.plan import MAX_EPOCH, Links, Offer, Plan, Standby
from meshllm.protocol.planning.policies import POLICIES
from meshllm.protocol.planning.problem import Problem, pose
from meshllm.protocol.trust.identity import short

GAIN = 0.15  # of the time of a token; less is not worth to load layers for, and may be noise


@dataclass(frozen=True, slots=True)
class Agreement:
    """What a mesh does with its nodes."""

    plan: Plan | None
    """None where there is no ring."""
    reason: str
    """Half a sentence: why it is this plan, or why there is none."""
    alive: frozenset[NodeId]
    refused: Mapping[NodeId, str]
    """Living nodes that others would not compute with, and why."""
    standbys: tuple[Standby, ...]
    """Other living nodes without a stage, in order of node id."""
    offers: tuple[Offer, ...]
    """What was planned with; with `links` what `predict` needs."""
    links: Links
    lacking: int = 0
    """Members that are wanted and not ready, where no plan was followed yet."""
    best: Best | None = field(default=None, repr=False, compare=False)
    """The work that went into it."""


def agree(view: View, before: Agreement | None = None) -> Agreement:
    """Find the plan that binds; the same on every node that knows the same.

    What is planned with changes rarely. Of ``before``, an earlier result, the work is taken over
    where it answers the same question; it never changes the answer.
    """
    here = view.alive()
    if why := view.charter.obstacle:
        return Agreement(None, why, here, {view.me: why}, (), (), Links())
    followed = _followed(view)
    plans = [plan for node, plan in followed.items() if node in here]
    incumbent = max(plans, key=lambda plan: plan.precedence, default=None)
    epoch = 1 + max((plan.epoch for plan in followed.values()), default=0)
    found = find_candidates(view, here, nodes_of(incumbent) if incumbent else ())
    plan, best, standbys = None, None, found.waiting
    try:
        case = open_case(view, found)
    except UserError as error:
        reason = str(error)
    else:
        best = find_best(case, before.best if before else None)
        plan, reason = _decide(case, best, incumbent, epoch)
        if plan is not None:
            standbys = {**standbys, **_standbys(case, best.problem.members, plan)}
    return Agreement(
        plan,
        reason,
        here,
        found.refused,
        tuple(Standby(node, standbys[node]) for node in sorted(standbys)),
        found.offers,
        found.links,
        0 if followed else count_lacking(view, here),
        best,
    )


def _followed(view: View) -> dict[NodeId, Plan]:
    """Read which plan each node follows; one that cannot be followed by another is none."""
    told = {node: at.followed for node, at in view.states.items() if node not in view.removed}
    plans: dict[bytes, Plan] = {}
    for data in set(told.values()):
        with suppress(PeerFault):
            plan = Plan.decode(data)
            if plan.epoch < MAX_EPOCH:
                plans[data] = plan
    return {node: plans[data] for node, data in told.items() if data in plans}


def _decide(case: Case, best: Best, incumbent: Plan | None, epoch: int) -> tuple[Plan | None, str]:
    fault = _fault(case, incumbent) if incumbent else "it is the first"
    new = best.plan and replace(best.plan, epoch=epoch, standbys=())
    if incumbent is None or fault:
        return new, fault if new else best.missing
    if new is None:
        return incumbent, "no other was found"
    if new.stages == incumbent.stages:
        return incumbent, "none is better"
    gain = _gain(case, incumbent, new)
    keeps = _keeps(case, best.problem, incumbent)
    if keeps and gain <= GAIN:
        return incumbent, f"another would gain {max(gain, 0):.0%}, too little for a change"
    better = f"it gains {gain:.0%}" if keeps else "it has the nodes that are wanted"
    state = case.view.states.get(incumbent.stages[0].node)
    if state and not state.may_change:
        return incumbent, f"another waits until sessions end: {better}"
    return new, better


def _fault(case: Case, plan: Plan) -> str:
    """Say why a plan cannot be followed; nothing when it can."""
    shape, problem, found = case.view.charter.shape, case.problem, case.found
    asked = (shape.name, shape.layers, case.terms.ends, case.terms.entry or plan.stages[0].node)
    if (plan.model, plan.layers, plan.ends, plan.stages[0].node) != asked:
        return "the charter wants another ring"
    numbers = to_numbers(problem)
    for rank, stage in enumerate(plan.stages):
        name = short(stage.node)
        if why := found.refused.get(stage.node) or found.waiting.get(stage.node):
            return f"`{name}` is out: {why}"
        if stage.node not in numbers:
            return f"`{name}` is gone"
        if not _fits(problem, numbers[stage.node], stage.span, entry=rank == 0):
            return f"`{name}` cannot hold `{stage.span}`"
    return find_gap(plan, found.links)


def _fits(problem: Problem, node: int, span: Span, *, entry: bool) -> bool:
    if not span:
        return problem.can_enter(node)
    return span.stop in problem.stops(node, span.start, entry=entry)


def _keeps(case: Case, problem: Problem, plan: Plan) -> bool:
    """Tell whether a plan that works also has the nodes that are wanted."""
    ring = to_division(problem, plan).order
    return problem.allows(ring) and not set(case.view.charter.exclude) & set(nodes_of(plan))


def _gain(case: Case, incumbent: Plan, other: Plan) -> float:
    """Return the part of the time that another plan saves; of the layers where time is no matter.

    It is a quotient of whole numbers, and so the same on every machine.
    """
    policy, problem = POLICIES[case.view.charter.policy], case.problem
    if not policy.is_timed:
        return _moved(incumbent, other)
    before, after = (
        policy.objective(problem, to_division(problem, plan)) for plan in (incumbent, other)
    )
    return (before - after) / max(before, 1)


def _moved(incumbent: Plan, other: Plan) -> float:
    """Return the part of the layers that changes hands; all where the nodes are others."""
    if set(nodes_of(incumbent)) != set(nodes_of(other)):
        return 1.0
    before, after = (
        [stage.node for stage in plan.stages for _ in range(len(stage.span))]
        for plan in (incumbent, other)
    )
    return sum(a != b for a, b in zip(before, after, strict=True)) / other.layers


def _standbys(case: Case, members: int | None, plan: Plan) -> dict[NodeId, str]:
    """Say of each node that has no stage why not.

    The ring may be one that the terms would not allow any more, so it is looked at without them.
    """
    charter, found = case.view.charter, case.found
    free = pose(found.offers, found.links, charter.shape, replace(case.terms, spans={}))
    problem = replace(free, members=members)
    ring = to_division(problem, plan).order
    reasons = {problem.nodes[at]: why for at, why in standby_reasons(problem, ring)}
    spans = {node: f"there is no place for its `{span}`" for node, span in found.spans.items()}
    excluded = dict.fromkeys(charter.exclude, "it is excluded")
    return {node: (spans | excluded).get(node, why) for node, why in reasons.items()}
