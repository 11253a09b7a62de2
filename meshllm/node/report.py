"""The status that a node reports, from a snapshot of it."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from blake3 import blake3

from meshllm.errors import UserError
from meshllm.names import FIRST_GROUP, SHORT_LETTERS, GroupId, NodeId, short, show
from meshllm.node.agreement.own_state import PROVIDES, trouble_of
from meshllm.node.node_names import names_of
from meshllm.node.provider import NO_MODELS, STARTING
from meshllm.node.view import LinkView, NodeView, RingView
from meshllm.protocol.agreement.groups import groups_in, is_exact
from meshllm.protocol.agreement.trial import Trial
from meshllm.protocol.membership.charter import Charter, unique_name
from meshllm.protocol.membership.records import (
    DIGEST_PART_BYTES,
    Lifecycle,
    ModelOffer,
    Profile,
    StateRecord,
)
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.planning.prediction import Prediction, predict
from meshllm.protocol.planning.problem import room_tokens
from meshllm.protocol.trust.credential import Role
from meshllm.status import (
    NO_LINK,
    Change,
    CostTable,
    LinkStatus,
    Measured,
    MeasuredTimes,
    Members,
    MemberStatus,
    MemoryStatus,
    MeshStatus,
    ModelStatus,
    Named,
    NetworkStatus,
    NodeState,
    NodeStatus,
    PastState,
    Planned,
    PlannedRing,
    PlannedTimes,
    ProviderOffer,
    RingState,
    RingStatus,
    ServedRing,
    SessionCounts,
    StageStatus,
    Unplaced,
    of_providers,
)

_SHORT = re.compile(rf"`([a-z2-7]{{{SHORT_LETTERS}}})`")
_UNKNOWN = Profile("", "", (), 0)


def mesh_status(view: NodeView, memory: MemoryStatus) -> MeshStatus:
    """Return the status of a node, its ring and its mesh."""
    counts = view.counts
    return MeshStatus(
        mesh=view.mesh.hex(),
        node=show(view.me),
        name=view.name,
        version=view.version,
        model=model_status(view, view.charter) if view.charter else None,
        ring=_ring_status(view),
        nodes=tuple(_node(view, each) for each in _known(view)),
        sessions=SessionCounts(
            counts.active,
            waiting=counts.active - counts.begun,
            served=counts.served,
            failed=counts.failed,
            tokens=counts.tokens,
            losses=counts.loss_counts(view.recomputed),
            recomputed=sum(view.recomputed.values()),
        ),
        listening=view.addresses,
        networks=tuple(NetworkStatus(**asdict(each)) for each in view.networks),
        since_s=view.since_s,
        memory=memory,
        warnings=view.warnings,
        provided=_provided(view),
        rings=tuple(_served_ring(view, each) for each in view.rings),
        models=tuple(model_status(view, each) for each in _served(view)),
        unanswered=view.unanswered,
    )


def members(view: NodeView) -> Members:
    """List the members of the mesh, as far as known to the node."""
    known = [
        _member(view, each, str(Role.NODE), _state(view, each)[0], view.inviters.get(each, ()))
        for each in _known(view)
    ]
    clients = [
        _member(view, peer, str(Role.CLIENT), "linked", link.issuers)
        for peer, link in view.links.items()
        if link.role is Role.CLIENT
    ]
    removed = [_member(view, each, "", "removed") for each in view.removed]
    return Members((*known, *clients, *removed))


def models(view: NodeView) -> list[ModelStatus]:
    """List the models that the mesh serves: those of rings, and those of providers."""
    return [*(model_status(view, each) for each in _served(view)), *_provided(view)]


def change(view: NodeView) -> Change:
    """Return the state of the ring and of each node."""
    return Change(
        "changed",
        _ring_state(view),
        view.plan.epoch if view.plan else 0,
        _digest(view),
        {show(each): _state(view, each)[0] for each in _known(view)},
    )


def _ring_status(view: NodeView) -> RingStatus:
    """Return the status of the own ring."""
    plan, agreement = view.plan, view.agreement
    return RingStatus(
        state=_ring_state(view),
        reason="" if view.is_served else _by_name(view, view.reason),
        epoch=plan.epoch if plan else 0,
        digest=_digest(view),
        policy=str(view.charter.policy) if view.charter else "auto",
        entry=show(plan.stages[0].node) if plan else None,
        stages=tuple(
            StageStatus(rank, *named(view, stage.node), stage.span, room)
            for rank, (stage, room) in enumerate(
                zip(plan.stages, _rooms(view, plan), strict=True) if plan else ()
            )
        ),
        predicted=_predicted(view),
        measured=_measured(view, plan),
        advice=_by_name(view, view.advice),
        execution=view.execution,
        history=tuple(PastState(*each) for each in view.history),
        members=view.charter.members if view.charter else None,
        exclude=tuple(map(show, view.charter.exclude)) if view.charter else (),
        standbys=tuple(
            Unplaced(*named(view, each.node), _by_name(view, each.reason))
            for each in (agreement.standbys if agreement else ())
        ),
        refused=tuple(
            Unplaced(*named(view, each), _by_name(view, why))
            for each, why in (agreement.refused if agreement else {}).items()
        ),
    )


def named(view: NodeView, node: NodeId) -> tuple[str, str]:
    """Return the id and the name of a node."""
    return show(node), _name(view, node)


def _by_name(view: NodeView, text: str) -> str:
    """Replace the ids in a reason or an advice by names, where no other node has the same."""
    names = Counter(each.name for each in view.profiles.values())
    known = {short(node): each.name for node, each in view.profiles.items()}

    def replaced(found: re.Match[str]) -> str:
        name = known.get(found[1], "")
        return f"`{name}`" if names[name] == 1 and name else found[0]

    return _SHORT.sub(replaced, text)


def _name(view: NodeView, node: NodeId) -> str:
    return view.profiles.get(node, _UNKNOWN).name


def _known(view: NodeView) -> list[NodeId]:
    known = {*view.profiles, view.me}
    return sorted(known, key=lambda node: (node != view.me, _name(view, node), node))


def _member(
    view: NodeView, node: NodeId, role: str, state: str, inviters: Sequence[NodeId] = ()
) -> MemberStatus:
    return MemberStatus(
        node=show(node),
        short=short(node),
        name=_name(view, node) if role != Role.CLIENT else "",
        role=role,
        state=state,
        is_self=node == view.me,
        inviters=tuple(show(each) for each in inviters),
    )


def _served(view: NodeView) -> list[Charter]:
    """Return the charter of each model that rings serve."""
    rings = {each.group.charter.key: each.group.charter for each in view.rings}
    return list(rings.values())


def _model_name(view: NodeView, charter: Charter) -> str:
    """Return a name of a model of rings that no other one of the mesh has."""
    return unique_name(charter, _served(view))


def _served_ring(view: NodeView, ring: RingView) -> ServedRing:
    plan, group, own = ring.plan, ring.group, view.of_ring(ring)
    nodes = [node for node in _known(view) if group.id in _groups_of(view, node)]
    standbys = [
        node for node in nodes if node in view.alive and (plan is None or plan.rank(node) is None)
    ]
    state = RingState.FORMING if plan or standbys else RingState.WAITING
    return ServedRing(
        _model_name(view, group.charter),
        group.replica,
        RingState.SERVING if ring.is_served else state,
        "" if ring.is_served else _by_name(view, _waits_for(view, ring, standbys)),
        own is not None,
        plan.epoch if plan else 0,
        show(plan.stages[0].node) if plan else None,
        tuple(
            StageStatus(rank, *named(view, stage.node), stage.span)
            for rank, stage in enumerate(plan.stages if plan else ())
        ),
        tuple(Named(*named(view, each)) for each in standbys),
        ring.lacks_bytes,
        _ring_status(own) if own else None,
    )


def _waits_for(view: NodeView, ring: RingView, nodes: Sequence[NodeId]) -> str:
    """Return what a ring waits for, in the words of its own status where there is one."""
    if ring.own is not None and ring.own.reason:
        return ring.own.reason
    if ring.is_unused and not nodes:
        return "not in use: a request loads it, on nodes of another unused model"
    if ring.lacks_bytes:
        size, unit = (2**30, "GiB") if ring.lacks_bytes >= 2**30 else (2**20, "MiB")
        needed = f"{ring.lacks_bytes / size:.1f} {unit} of memory"
        return f"needs one more node with the model, with {needed}"
    names = names_of(nodes, view.profiles)
    return f"its nodes are loading and connecting: {names}" if nodes else "no node is free"


def _groups_of(view: NodeView, node: NodeId) -> tuple[GroupId, ...]:
    """Return the groups in which a node takes part, its first one first."""
    state = view.states.get(node)
    return groups_in(state) if state else (FIRST_GROUP,)


def model_status(view: NodeView, charter: Charter) -> ModelStatus:
    """Return the status of a model that rings serve."""
    shape = charter.shape
    dtype, quant = charter.dtype.name.lower(), str(charter.quant)
    plans, name = _plans_of(view, charter), _model_name(view, charter)
    shared = "" if name == shape.name else shape.name
    return ModelStatus(
        name,
        shape.layers,
        shape.hidden_size,
        dtype,
        quant,
        shape.context,
        _fingerprint(view, charter.config_digest, f"{dtype} {quant}"),
        aliases=charter.aliases,
        key=charter.key.hex(),
        replicas=charter.replicas,
        epoch=plans[0].epoch if plans else 0,
        is_exact=any(is_exact(charter, each, view.profiles) for each in plans),
        rings=sum(each.is_served and each.group.charter.key == charter.key for each in view.rings),
        beside=() if shared else tuple(_offers(view, charter).get(shape.name, ())),
        shared=shared,
    )


def _plans_of(view: NodeView, charter: Charter) -> list[Plan]:
    """Return the plans of the rings that serve a model, as far as known here, the own one first."""
    is_own = view.charter is not None and view.charter.key == charter.key
    rings = (ring.plan for ring in view.rings if ring.group.charter.key == charter.key)
    return [plan for plan in (view.plan if is_own else None, *rings) if plan]


def _provided(view: NodeView) -> tuple[ModelStatus, ...]:
    """Return the models of providers, each once, without those of rings."""
    rings = {each.shape.name for each in _served(view)}
    found = _offers(view).items()
    return tuple(of_providers(name, offers) for name, offers in found if name not in rings)


def _offers(view: NodeView, charter: Charter | None = None) -> dict[str, list[ProviderOffer]]:
    """Return the offers of each model, of nodes that may read the prompts of a ring's model."""
    offers: dict[str, list[ProviderOffer]] = {}
    for node in _known(view):
        state, is_reader = view.states.get(node), charter is None or charter.may_read(node)
        if state and is_reader and node in view.alive and state.lifecycle is Lifecycle.SERVING:
            name = _name(view, node) or short(node)
            own: dict[str, ModelOffer] = {}
            for offer in state.offers:  # the first of a name counts, as for requests
                own.setdefault(offer.model, offer)
            for model, offer in own.items():
                told = ProviderOffer(name, offer.precision, offer.context)
                offers.setdefault(model, []).append(told)
    return offers


def _fingerprint(view: NodeView, config: bytes, precision: str) -> str:
    """Hash what decides the text of an answer; the same on every node that knows all weights."""
    profiles = (each.weights for _, each in sorted(view.profiles.items()) if each.weights)
    known = [each for each in profiles if each[-1] == config[:DIGEST_PART_BYTES]]
    longest = max(map(len, known), default=0)
    whole = zip(*(each for each in known if len(each) == longest), strict=True)
    parts = [next(filter(any, layer), b"") for layer in whole]  # zeros: weights it does not hold
    digest = blake3(b"".join([config, precision.encode(), *parts])).hexdigest(6)
    return f"fp_{digest}" if parts and all(parts) else ""


def _ring_state(view: NodeView) -> RingState:
    if view.plan is None:
        return RingState.WAITING
    return RingState.SERVING if view.is_served else RingState.FORMING


def _digest(view: NodeView) -> str:
    return view.plan.digest.hex()[:12] if view.plan else ""


def _node(view: NodeView, node: NodeId) -> NodeStatus:
    profile, link = view.profiles.get(node, _UNKNOWN), view.links.get(node)
    plan = _plan_of(view, node)
    rank = plan.rank(node) if plan else None
    state, reason = _state(view, node)
    reason = _by_name(view, reason)
    is_self = node == view.me
    return NodeStatus(
        node=show(node),
        short=short(node),
        name=profile.name,
        role=str(Role.NODE),
        state=state,
        reason=reason,
        addresses=profile.addresses,
        memory_bytes=profile.memory_bytes,
        layers=plan.stages[rank].span if plan and rank is not None else None,
        rank=rank,
        is_self=is_self,
        incarnation=view.incarnation if is_self else (link.instance if link else 0),
        version=profile.version,
        link=_link(link) if link else None,
        execution=view.execution if is_self else "",
        costs=_costs(view, node, profile) if profile.layer_s else None,
    )


def _costs(view: NodeView, node: NodeId, profile: Profile) -> CostTable:
    """Return what a node measured, with the model of its first ring."""
    layer_ms = tuple((rows, seconds * 1e3) for rows, seconds in profile.layer_s)
    first = _groups_of(view, node)[:1]
    quants = (str(it.group.charter.quant) for it in view.rings if it.group.id in first)
    return CostTable(profile.model, layer_ms, profile.head_s * 1e3, next(quants, ""))


def _state(view: NodeView, node: NodeId) -> tuple[NodeState, str]:
    """Return the state of a node, and why."""
    agreement, state = view.agreement, view.states.get(node, StateRecord())
    if node not in view.alive:
        left = state.lifecycle is Lifecycle.LEFT
        return (NodeState.LEFT, "") if left else (NodeState.DOWN, NO_LINK)
    if node == view.me and view.is_leaving:  # before its record says so
        return NodeState.LEAVING, "finishing requests"
    if agreement and (why := agreement.refused.get(node)):
        return NodeState.REFUSED, why
    if state.lifecycle is Lifecycle.LEAVING:
        return NodeState.LEAVING, "finishing requests"
    if (trouble := trouble_of(state)) is not None:
        return _of_provider(state, trouble)
    return _of_layers(view, node, state)


def _of_layers(view: NodeView, node: NodeId, state: StateRecord) -> tuple[NodeState, str]:
    if state.lifecycle is Lifecycle.JOIN:
        return NodeState.JOINING, "loading and benchmarking the model"
    plan = _plan_of(view, node)
    if plan and plan.rank(node) is not None:
        if state.is_loaded:
            return NodeState.SERVING, ""
        return NodeState.LOADING, view.trouble if node == view.me else ""
    standbys = view.agreement.standbys if view.agreement else ()
    reasons = {each.node: each.reason for each in standbys}
    return NodeState.STANDBY, reasons.get(node, "")


def _of_provider(state: StateRecord, trouble: str) -> tuple[NodeState, str]:
    if trouble in {STARTING, NO_MODELS}:
        return NodeState.JOINING, trouble
    if trouble:
        return NodeState.DOWN, trouble
    # An earlier version says that it serves while its engine does not, and gives no trouble.
    return (NodeState.SERVING, "") if state.offers else (NodeState.STANDBY, PROVIDES)


def _plan_of(view: NodeView, node: NodeId) -> Plan | None:
    """Return the plan of the ring in which a node takes part."""
    group = _groups_of(view, node)[0]
    if node == view.me or group == view.group:
        return view.plan
    return next((each.plan for each in view.rings if each.group.id == group), None)


def _link(link: LinkView) -> LinkStatus:
    return LinkStatus(
        round_trip_ms=link.round_trip_us / 1e3 if link.round_trip_us else None,
        path=str(link.statistics.path),
        path_reason=link.statistics.path_reason,
        address=link.address,
        bytes_sent=link.statistics.bytes_sent,
        bytes_received=link.statistics.bytes_received,
        heard_s=link.heard_s,
        clock_s=link.ahead_s,
    )


def _rooms(view: NodeView, plan: Plan) -> Sequence[int | None]:
    """Return the KV cache capacity of each rank in tokens; None if unknown."""
    if view.agreement and view.charter:
        try:
            return room_tokens(plan, view.agreement.offers, view.charter.shape)
        except UserError:  # a member has left, and a new plan will follow
            pass
    return [None] * len(plan.stages)


def _predicted(view: NodeView) -> Planned | None:
    plan, agreement, charter = view.plan, view.agreement, view.charter
    if plan is None or agreement is None or charter is None:
        return None
    offered = {offer.node for offer in agreement.offers}
    if not offered.issuperset(stage.node for stage in plan.stages):
        return None  # a member has left, and a new plan will follow
    return _planned(predict(plan, agreement.offers, agreement.links, charter.shape))


def _planned(found: Prediction) -> Planned | None:
    if not found.is_measured:
        return None
    return Planned(
        ms_per_token=found.seconds_per_token * 1e3,
        ttft_ms=found.ttft_s * 1e3,
        head_ms=found.head_s * 1e3,
        hops=tuple(
            PlannedTimes(rank, hop.compute_s * 1e3, hop.wire_s * 1e3)
            for rank, hop in enumerate(found.hops)
        ),
    )


def planned_ring(view: NodeView, found: Trial) -> PlannedRing:
    """Return the ring that was tried out."""
    stages = found.plan.stages if found.plan else ()
    return PlannedRing(
        found.policy,
        "" if found.plan else found.missing,
        tuple(
            StageStatus(rank, *named(view, stage.node), stage.span)
            for rank, stage in enumerate(stages)
        ),
        _planned(found.prediction) if found.prediction else None,
        tuple(
            Unplaced(*named(view, node), _by_name(view, why))
            for node, why in found.standbys.items()
        ),
    )


def _measured(view: NodeView, plan: Plan | None) -> Measured | None:
    """Return the times of the latest answer, if it is of the ring with this plan."""
    counts = view.counts
    answer, tokens = counts.by_ring.get(view.group, (None, 0))
    if answer is None and len(view.rings) <= 1:
        answer, tokens = counts.last, counts.last_tokens
    if answer is None or not answer.ms_per_token:
        return None
    held = [(show(each.node)[:SHORT_LETTERS], each.span) for each in plan.stages] if plan else []
    if [(hop.node[:SHORT_LETTERS], hop.span) for hop in answer.hops] != held:
        return None
    return Measured(
        ms_per_token=answer.ms_per_token,
        ttft_ms=answer.ttft_ms,
        tokens=tokens,
        hops=tuple(
            MeasuredTimes(
                hop.rank,
                hop.node,
                hop.span,
                compute_ms=hop.compute_ms,
                serialise_ms=hop.serialise_ms,
                queue_ms=hop.queue_ms,
                wire_ms=hop.wire_ms,
                bytes_per_token=hop.bytes_per_token,
            )
            for hop in answer.hops
        ),
    )
