"""Groups of nodes, one for each replica of each model of a mesh, and what they do."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from meshllm.names import FIRST_GROUP, GroupId, ModelKey, NodeId, Quant
from meshllm.protocol.agreement.candidates import (
    MeshView,
    decode_plans,
    highest_epoch,
    plan_in_force,
)
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.records import (
    DIGEST_PART_BYTES,
    Profile,
    RingMembership,
    StateRecord,
)
from meshllm.protocol.planning.plan import Plan

REFUSES = "it could not serve this ring"
"""The obstacle of a node in a further ring which it takes no part in for a while."""
UNASSIGNED = GroupId(b"\0")
"""The group of a node that takes part in none."""


@dataclass(frozen=True, slots=True)
class Group:
    """One replica of a model, and its ring."""

    id: GroupId
    charter: Charter
    """Of the model, with the terms of the mesh."""
    replica: int


@dataclass(frozen=True, slots=True)
class NodeGroups:
    """The groups in which a node takes part."""

    first: GroupId
    further: Mapping[GroupId, int] = field(default_factory=dict)
    """Further ones, with the bytes of memory that the node gives to each."""


def groups_of(charter: Charter) -> tuple[Group, ...]:
    """Return the groups of a mesh in order of precedence."""
    served = charter.served
    return tuple(
        Group(_id(each, replica, is_first=not number), each, replica)
        for replica in range(max(each.replicas for each in served))
        for number, each in enumerate(served)
        if replica < each.replicas
    )


def find_group(charter: Charter, group: GroupId) -> Group | None:
    """Return a group of the mesh; None if it has none of this id."""
    return next((each for each in groups_of(charter) if each.id == group), None)


def memberships(view: MeshView) -> dict[tuple[NodeId, GroupId], RingMembership]:
    """Return what each living node does in each ring in which it takes part."""
    here = view.alive()
    return {
        (node, each.group): each
        for node, state in view.states.items()
        if node in here
        for each in state.memberships
    }


def plans_in_force(
    view: MeshView, works: Callable[[GroupId, Plan], bool] = lambda group, plan: True
) -> dict[GroupId, Plan]:
    """Return the plan that each ring follows, as far as it has living nodes of its group.

    See `plan_in_force`; ``works`` is asked of plans that all their nodes follow.
    """
    known = memberships(view)
    plans = decode_plans(each.followed for each in known.values())
    takes_part = {
        (node, group) for node, state in view.states.items() for group in groups_in(state)
    }
    of_group = defaultdict[GroupId, list[Plan | None]](list)
    for (_, group), each in known.items():
        of_group[group].append(plans.get(each.followed))
    most = {group: highest_epoch(followed) for group, followed in of_group.items()}
    followed = defaultdict[GroupId, dict[NodeId, Plan]](dict)
    for (node, group), each in known.items():
        plan = plans.get(each.followed)
        if plan is None or plan.rank(node) is None or plan.epoch > most[group]:
            continue
        if any((at.node, group) not in takes_part and at.node in view.states for at in plan.stages):
            continue
        followed[group][node] = plan
    in_force = {
        group: plan_in_force(plans, view.author, partial(works, group))
        for group, plans in followed.items()
    }
    return {group: plan for group, plan in in_force.items() if plan}


def groups_in(state: StateRecord) -> tuple[GroupId, ...]:
    """Return the groups in which a node takes part, the first one first."""
    return state.group, *(each.group for each in state.further if each.obstacle != REFUSES)


def used_models(view: MeshView) -> frozenset[ModelKey]:
    """Return the models that were asked for lately, at any living node."""
    here = view.alive()
    return frozenset(
        key for node, state in view.states.items() if node in here for key in state.used
    )


def is_exact(charter: Charter, plan: Plan, profiles: Mapping[NodeId, Profile]) -> bool:
    """Return whether all nodes of a ring compute each token bit-identically to transformers."""
    known = (profiles.get(stage.node) for stage in plan.stages)
    is_plain = charter.quant is Quant.NONE
    return is_plain and all(profile is not None and profile.is_exact for profile in known)


def holds(profile: Profile, charter: Charter, key: ModelKey) -> bool:
    """Return whether a node has the model of a charter locally; ``key`` is that of the model."""
    if profile.models:
        return key in profile.models
    config = charter.config_digest[:DIGEST_PART_BYTES]
    return bool(profile.weights) and profile.weights[-1] == config


def _id(charter: Charter, replica: int, *, is_first: bool) -> GroupId:
    return FIRST_GROUP if is_first and not replica else GroupId(charter.key + bytes([replica]))
