"""The best plan for the current candidates, relaxing the charter's constraints if needed."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from meshllm.errors import MeshError
from meshllm.names import NodeId, short
from meshllm.protocol.agreement.candidates import NO_LINK, Candidates, MeshView
from meshllm.protocol.membership.charter import Charter, OverridableTerm
from meshllm.protocol.planning.partition import Division
from meshllm.protocol.planning.plan import Ends, Plan, PlanConstraints
from meshllm.protocol.planning.policies import AUTO, POLICIES, make_plan
from meshllm.protocol.planning.problem import Problem, build_problem


@dataclass(frozen=True, slots=True)
class PlanningInput:
    """The planning input: the candidates and the hard constraints on a ring."""

    view: MeshView
    found: Candidates
    terms: PlanConstraints
    problem: Problem
    """The same, with nodes as indices."""


@dataclass(frozen=True, slots=True)
class BestPlan:
    """The best plan and the problem that it solves, or why none was found."""

    case: PlanningInput
    plan: Plan | None
    problem: Problem
    missing: str = ""
    exclude: Collection[NodeId] = ()
    """Nodes that the charter excludes, as far as it could be satisfied, and ending ones."""
    ignored: tuple[OverridableTerm, ...] = ()
    """Terms with which no ring was found, so that the founder's values count."""
    policy: str = AUTO
    """The policy that made the plan: that of the charter may find none."""
    spare: "BestPlan | None" = None
    """The best without nodes that lack weights, see `plan_without`."""


def build_planning_input(
    view: MeshView, found: Candidates, before: BestPlan | None = None
) -> PlanningInput:
    """Build the planning input; raise `UserError` if the charter contradicts itself.

    It has the problem of ``before`` if the planner would get the same input.
    """
    charter = view.charter
    entry = view.author if charter.ends is Ends.CLIENT else None
    terms = PlanConstraints(
        charter.ends, entry, charter.sessions, spans=found.spans, entries=charter.entries
    )
    if before is not None:
        case = replace(before.case, view=view, found=found, terms=terms)
        if _planner_input(case) == _planner_input(before.case):
            return case
    return PlanningInput(
        view, found, terms, build_problem(found.offers, found.links, charter.shape, terms)
    )


def find_best(case: PlanningInput, before: BestPlan | None = None) -> BestPlan:
    """Plan under all constraints, then under fewer if no ring satisfies them."""
    if before is not None and before.case.problem is case.problem:
        return replace(before, case=case)
    best, view = _search(case), case.view
    if best.plan is None and view.eases and view.charter.yields:
        eased = _search(replace(case, view=replace(view, charter=view.charter.eased)))
        best = replace(eased, case=case, ignored=view.charter.yields) if eased.plan else best
    return best


def plan_without(best: BestPlan, nodes: Collection[NodeId]) -> BestPlan:
    """Add the best plan without some nodes, which is reused as `find_best` does."""
    view = replace(best.case.view, ending=best.case.view.ending.union(nodes))
    case = build_planning_input(view, best.case.found, best.spare)
    return replace(best, spare=find_best(case, best.spare))


def _search(case: PlanningInput) -> BestPlan:
    charter, found = case.view.charter, case.found
    relaxed = _relaxed_terms(case)
    missing = ""
    for terms in relaxed:
        for policy in dict.fromkeys((charter.policy, AUTO)):
            if terms.spans and not POLICIES[policy].takes_spans:
                continue
            try:
                plan = make_plan(
                    found.offers, found.links, charter.shape, policy=policy, terms=terms
                )
            except MeshError as error:
                missing = missing or str(error)
                continue
            why = _excess(plan, relaxed[0].members) or find_missing_link(plan, found)
            if not why:
                problem = build_problem(found.offers, found.links, charter.shape, terms)
                return BestPlan(case, plan, problem, exclude=_excluded(case), policy=policy)
            missing = missing or why
    return BestPlan(case, None, case.problem, missing, _excluded(case))


def find_missing_link(plan: Plan, found: Candidates) -> str:
    """Return which neighbours have no link, or refuse it; empty if all have one."""
    nodes = nodes_of(plan)
    for here, there in zip(nodes, (*nodes[1:], nodes[0]), strict=True):
        if here != there and found.links.between(here, there) == NO_LINK:
            for node in (here, there):
                if why := found.faulty.get(node):
                    return f"`{short(node)}` is left out: {why}"
            return f"`{short(here)}` and `{short(there)}` have no link"
    return ""


def why_excluded(charter: Charter, node: NodeId) -> str:
    """Return why an excluded node is a standby, and who did it unless it was the founder."""
    terms = (each for each in charter.yields if each.name == "exclude")
    author = next((each.author for each in terms if node not in each.founders), None)
    return f"it is excluded by `{short(author)}`" if author else "it is excluded"


def to_division(problem: Problem, plan: Plan) -> Division:
    """Return the stages of a plan with nodes as indices into the problem."""
    numbers = to_numbers(problem)
    spans = tuple(stage.span for stage in plan.stages)
    return Division(tuple(numbers[node] for node in nodes_of(plan)), spans)


def to_numbers(problem: Problem) -> dict[NodeId, int]:
    """Return the index of each node of a problem."""
    return {node: number for number, node in enumerate(problem.nodes)}


def nodes_of(plan: Plan) -> list[NodeId]:
    """Return the nodes of a ring in rank order."""
    return [stage.node for stage in plan.stages]


def _excess(plan: Plan, most: int | None) -> str:
    count = len(plan.stages)
    return f"it takes {count} nodes, but {most} are allowed" if count > (most or count) else ""


def _planner_input(case: PlanningInput) -> tuple[object, ...]:
    found, view = case.found, case.view
    return (
        view.charter,
        view.eases,
        view.ending,
        found.offers,
        found.links,
        case.terms,
        found.leaving,
    )


def _excluded(case: PlanningInput) -> tuple[NodeId, ...]:
    return *case.view.charter.exclude, *sorted(case.view.ending)


def _relaxed_terms(case: PlanningInput) -> list[PlanConstraints]:
    """Return the terms of the charter, then looser ones in the order to try them.

    A ring of fewer nodes, or without a node whose fixed span fits no ring, is better than none.
    """
    charter, base = case.view.charter, case.terms
    exclude = (*_excluded(case), *sorted(case.found.leaving))
    nodes = {offer.node for offer in case.found.offers}.difference(exclude)
    client = charter.ends is Ends.CLIENT
    most = min(len(nodes), charter.shape.layers + client)
    strict = replace(
        base,
        members=charter.members and max(1 + client, min(charter.members, most)),
        exclude=exclude,
        prefer=tuple(node for node in charter.prefer if node in nodes),
    )
    loose = replace(strict, members=None, prefer=())
    free = replace(loose, spans={}, exclude=(*exclude, *base.spans))
    return [
        terms for terms, last in ((strict, None), (loose, strict), (free, loose)) if terms != last
    ]
