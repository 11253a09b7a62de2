"""Other terms for a mesh, tried out: the ring that they would give. Nothing moves."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from meshllm.errors import Busy, UserError
from meshllm.names import NodeId
from meshllm.protocol.agreement.agreement import Agreement
from meshllm.protocol.agreement.best_plan import build_planning_input, find_best, nodes_of
from meshllm.protocol.agreement.candidates import MAX_MEMORY_BYTES, Candidates, find_candidates
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.records import MAX_LAYERS, Profile
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.planning.policies import find_policy
from meshllm.protocol.planning.prediction import Prediction, predict


@dataclass(frozen=True, slots=True)
class TrialTerms:
    """What to change; None is what the charter says."""

    policy: str | None = None
    members: int | None = None
    """Nodes of the ring; 0 lets the policy choose."""
    exclude: tuple[NodeId, ...] | None = None
    memory_bytes: Mapping[NodeId, int] = field(default_factory=dict)
    """Memory of nodes, instead of what they offer."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The ring that other terms would give."""

    policy: str
    plan: Plan | None
    prediction: Prediction | None
    missing: str
    """Why there is no plan; empty if there is one."""
    standbys: Mapping[NodeId, str]
    """Living nodes without a stage, and why."""


def try_out(agreement: Agreement, terms: TrialTerms) -> Trial:
    """Plan the mesh of an agreement with other terms, as if it had no ring yet.

    Raises:
        Busy: the mesh cannot be planned yet.
        UserError: a term is invalid.
    """
    if agreement.best is None:
        raise Busy(f"Planning is not possible yet: {agreement.reason}")
    known = agreement.best.case.view
    charter = _amend(known.charter, terms)
    profiles = {
        node: _with_memory(profile, terms.memory_bytes.get(node))
        for node, profile in known.profiles.items()
    }
    view = replace(known, charter=charter, profiles=profiles)
    followed = nodes_of(agreement.plan) if agreement.plan else ()
    found = find_candidates(view, agreement.alive, followed)
    best = find_best(build_planning_input(view, found))
    plan, prediction = best.plan, None
    if plan is not None:
        prediction = predict(plan, found.offers, found.links, charter.shape)
    return Trial(charter.policy, plan, prediction, best.missing, _standbys(charter, found, plan))


def _amend(charter: Charter, terms: TrialTerms) -> Charter:
    policy = charter.policy if terms.policy is None else terms.policy
    find_policy(policy)
    members = charter.members if terms.members is None else terms.members or None
    if not 0 <= (members or 0) <= MAX_LAYERS:
        raise UserError(f"A ring of {members} nodes", hint=f"at most {MAX_LAYERS}; 0 for any")
    exclude = charter.exclude if terms.exclude is None else terms.exclude
    return replace(charter, policy=policy, members=members, exclude=exclude)


def _with_memory(profile: Profile, memory_bytes: int | None) -> Profile:
    if memory_bytes is None:
        return profile
    if not 0 <= memory_bytes <= MAX_MEMORY_BYTES:
        raise UserError(
            f"Invalid memory of {memory_bytes} bytes", hint=f"at most {MAX_MEMORY_BYTES}"
        )
    return replace(profile, memory_bytes=memory_bytes)


def _standbys(charter: Charter, found: Candidates, plan: Plan | None) -> dict[NodeId, str]:
    planned = {each.node: each.reason for each in plan.standbys} if plan else {}
    here = {*planned, *(offer.node for offer in found.offers)}
    excluded = {node: "it is excluded" for node in charter.exclude if node in here}
    ring = nodes_of(plan) if plan else ()
    known = {**planned, **excluded, **found.waiting, **found.refused}
    return {node: why for node, why in sorted(known.items()) if node not in ring}
