"""What the nodes of a mesh can hold of the model of each group, and which groups suffice."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, starmap

from meshllm.names import GroupId, ModelKey, NodeId, Span
from meshllm.protocol.agreement.candidates import MeshView, decode_plans, offer_of
from meshllm.protocol.agreement.groups import (
    UNASSIGNED,
    Group,
    NodeGroups,
    groups_in,
    groups_of,
    holds,
    memberships,
    plans_in_force,
    used_models,
)
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.records import Lifecycle, Profile, RingMembership
from meshllm.protocol.planning.plan import Ends, Offer, Plan
from meshllm.protocol.planning.problem import least_memory, memory_for, usable_of
from meshllm.protocol.weights.holders import awaits_weights

SMALL_RING = 3  # nodes; each is a neighbour of all others
_PRESENT = Lifecycle.JOIN, Lifecycle.SERVING


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one node needs to hold layers of a model, in bytes."""

    layer: int
    cache: int
    ends: int
    workspace: int
    """The most bytes that a rank needs besides weights and caches, in a share: of a forward, and of
    rows that wait, see `meshllm.protocol.session.waiting`."""
    whole: int
    """For all layers, in a share."""

    @classmethod
    def of(cls, charter: Charter) -> "Sizes":
        """Take all layers as large as the largest."""
        shape = charter.shape
        cache = shape.context * max(shape.kv_bytes_per_token)
        layer = max(shape.layer_bytes) + cache * charter.sessions
        span = Span(0, shape.layers)
        reserve, sessions = shape.workspace_bytes, charter.sessions
        whole = least_memory(shape, span, is_entry=True, sessions=sessions, reserve=reserve)
        return cls(layer, cache, shape.ends_bytes, reserve, whole)


@dataclass(slots=True)
class GroupTable:
    """The nodes, their places, and what each can hold of each model."""

    view: MeshView
    eased: frozenset[GroupId] = frozenset()
    """The groups for which the terms of members that yield do not hold."""
    groups: tuple[Group, ...] = ()
    numbers: dict[GroupId, int] = field(default_factory=dict)
    sizes: tuple[Sizes, ...] = ()
    place: dict[NodeId, GroupId] = field(default_factory=dict)
    """The first group of each node."""
    shares: dict[NodeId, dict[GroupId, int]] = field(default_factory=dict)
    """The further groups of each node, with the memory for them."""
    ending: dict[NodeId, dict[GroupId, int]] = field(default_factory=dict)
    """The shares that no longer count, but serve until another plan takes the place of theirs."""
    plans: dict[GroupId, Plan] = field(default_factory=dict)
    memberships: dict[tuple[NodeId, GroupId], RingMembership] = field(default_factory=dict)
    used: frozenset[ModelKey] = frozenset()
    held: dict[NodeId, frozenset[int]] = field(default_factory=dict)
    """The groups of whose model each node has weights, by number."""
    keys: tuple[ModelKey, ...] = ()
    """The model of each group."""
    failing: frozenset[tuple[NodeId, ModelKey]] = frozenset()
    """Nodes that cannot load layers of a model now, which their ring serves."""
    refusing: frozenset[frozenset[NodeId]] = frozenset()
    """Pairs of nodes of which one refuses the other as a neighbour."""

    def __post_init__(self) -> None:
        view = self.view
        self.groups = tuple(
            replace(each, charter=each.charter.eased) if each.id in self.eased else each
            for each in groups_of(view.charter)
        )
        self.numbers = {group.id: number for number, group in enumerate(self.groups)}
        self.sizes = tuple(Sizes.of(group.charter) for group in self.groups)
        self.used, self.memberships = used_models(view), memberships(view)
        self.keys = tuple(group.charter.key for group in self.groups)
        self.refusing = frozenset(
            frozenset((node, other))
            for node, state in view.states.items()
            for other in state.faulty
        )
        self.failing = frozenset(
            (node, self.key(group))
            for node, group in self.memberships
            if (own := self._offered(node, group)) and own.is_retracted
        )
        plans = plans_in_force(view, self._can_work).items()
        self.plans = {group: plan for group, plan in plans if self._can_work(group, plan)}
        models = [*zip(self.keys, self.groups, strict=True)]
        for node, profile in view.profiles.items():
            self.held[node] = frozenset(
                number
                for number, (key, group) in enumerate(models)
                if holds(profile, group.charter, key)
            )
        for node in sorted(view.alive()):
            if _can_take_part(view, node):
                self._enter(node)

    def _can_work(self, group: GroupId, plan: Plan) -> bool:
        """Return whether nodes of a ring can load their layers, and have memory and links for them.

        They tell of the plan that they followed last, also when it no longer works, when it was
        that of another model, or when its entry may no longer be one.
        """
        if group not in self.numbers:
            return False
        ring, charter = [at.node for at in plan.stages], self.groups[self.numbers[group]].charter
        if not _is_of_model(charter, plan):
            return False
        if charter.entries and ring[0] not in charter.entries:
            return False
        if any(map(self._refuse, ring, (*ring[1:], ring[0]))):
            return False
        return all(
            not own.is_retracted and self._needed(group, plan, at.node, own) <= own.memory_bytes
            for at in plan.stages
            if at.span and (own := self._offered(at.node, group))
        )

    def _needed(self, group: GroupId, plan: Plan, node: NodeId, own: Profile) -> int:
        """Return the memory that a node needs for its layers of the plan of a ring."""
        charter, reserve = self.groups[self.numbers[group]].charter, own.reserve_bytes
        return memory_for(plan, node, charter.shape, sessions=charter.sessions, reserve=reserve)

    def _offered(self, node: NodeId, group: GroupId) -> Profile | None:
        """Return the profile with which a ring of a node plans; None if it is unknown."""
        state, profile = self.view.states.get(node), self.view.profiles.get(node)
        if state is None or profile is None or group not in self.numbers:
            return None
        if not state.is_further(group):
            return profile.in_ring(group, is_further=False)
        shape = self.groups[self.numbers[group]].charter.shape
        own = profile.in_ring(group, is_further=True)
        return replace(own, reserve_bytes=shape.workspace_bytes)

    def _refuse(self, one: NodeId, other: NodeId) -> bool:
        """Return whether two nodes cannot be neighbours, as one found the other faulty."""
        return frozenset((one, other)) in self.refusing

    def _enter(self, node: NodeId) -> None:
        """Enter the groups of a node, as far as the mesh has them and the node their models."""
        state, profile = self.view.states[node], self.view.profiles[node]
        known = [
            group
            for group in groups_in(state)
            if (number := self.numbers.get(group)) is not None
            and (not profile.models or self.holds(node, number))
        ]
        given = {share.group: share.memory_bytes for share in profile.shares}
        groups = list[GroupId]()
        for group in known:  # a share of a replica counts once published, see `filling`
            held = self.of_model(group, groups)
            if not held or (given.get(group) and self.is_last(group, held)):
                groups.append(group)
        self.place[node], *further = groups or [UNASSIGNED]
        shares = {group: given[group] for group in further if given.get(group)}
        self.shares[node] = shares
        for group in further:  # of the rest, what is left: it has not published how much it uses
            if group not in shares:
                shares[group] = self.share(node, self.numbers[group])

    def parts(self) -> dict[NodeId, NodeGroups]:
        """Return the groups of each node."""
        return {node: NodeGroups(at, self.given(node)) for node, at in self.place.items()}

    def given(self, node: NodeId) -> dict[GroupId, int]:
        """Return the memory of a node that is for further groups: its shares, ending or not."""
        at, shares = self.place[node], self.shares[node]
        ending = self.ending.get(node, {})
        kept = {group: size for group, size in ending.items() if group not in {at, *shares}}
        return {**shares, **kept}

    def copied_shares(self) -> dict[NodeId, dict[GroupId, int]]:
        """Return a copy of all shares, for another try."""
        return {node: dict(shares) for node, shares in self.shares.items()}

    def holds(self, node: NodeId, number: int) -> bool:
        """Return whether a node has the model of a group locally."""
        return number in self.held[node]

    def key(self, group: GroupId) -> ModelKey:
        """Return the model of a group."""
        return self.keys[self.numbers[group]]

    def of_model(self, group: GroupId, others: Iterable[GroupId]) -> list[GroupId]:
        """Return the other groups that serve the model of a group too."""
        number = self.numbers[group]
        return [
            each
            for each in others
            if each not in (group, UNASSIGNED) and self.key(each) == self.keys[number]
        ]

    def is_last(self, group: GroupId, others: Iterable[GroupId]) -> bool:
        """Return whether a group comes after others, and may have shares of nodes in these."""
        number = self.numbers[group]
        is_entry = self.groups[number].charter.ends is Ends.ENTRY
        return is_entry and all(self.numbers[each] < number for each in others)

    def is_own(self, node: NodeId, number: int) -> bool:
        """Return whether a node is in no earlier replica of the model of a group."""
        if not self.groups[number].replica:
            return True
        same = self.of_model(self.groups[number].id, self._held(node))
        return all(self.numbers[each] > number for each in same)

    def has_own(self, number: int) -> bool:
        """Return whether a group has a node that is in no earlier replica of its model."""
        return any(self.is_own(node, number) for node in self.able(number, self.nodes(number)))

    def _held(self, node: NodeId) -> list[GroupId]:
        return [self.place[node], *self.shares[node]]

    def nodes(self, number: int) -> list[NodeId]:
        """Return the nodes that take part in a group."""
        group = self.groups[number].id
        return [node for node, at in self.place.items() if group in (at, *self.shares[node])]

    def is_complete(self, number: int, nodes: Iterable[NodeId], *, strict: bool) -> bool:
        """Return whether nodes suffice for a group; if strict, there are as many as requested."""
        nodes, charter = list(nodes), self.groups[number].charter
        able = self.able(number, nodes)
        wanted = min(charter.members or 1, charter.shape.layers) if strict else 1
        if len(able) < wanted or not any(self.is_own(node, number) for node in able):
            return False
        allowed = [node for node in nodes if node not in self._excluded(number)]
        return self.is_served(number, allowed) or any(
            self.lack(number, ring) <= 0 for ring in self._rings(able, wanted)
        )

    def _rings(self, nodes: list[NodeId], least: int) -> Iterable[list[NodeId]]:
        """Return nodes that can form a ring: all, or fewer if all of up to three are neighbours."""
        if len(nodes) > SMALL_RING or not any(starmap(self._refuse, combinations(nodes, 2))):
            return [nodes]
        rings = chain.from_iterable(combinations(nodes, size) for size in range(least, len(nodes)))
        return [[*ring] for ring in rings if not any(starmap(self._refuse, combinations(ring, 2)))]

    def is_filled(self, number: int) -> bool:
        """Return whether a group is complete, maybe with fewer nodes than requested."""
        return self.is_complete(number, self.nodes(number), strict=False)

    def is_dispensable(self, node: NodeId, number: int) -> bool:
        """Return whether a group stays complete without a node, maybe with fewer than requested."""
        others = (each for each in self.nodes(number) if each != node)
        return self.is_complete(number, others, strict=False)

    def lacking(self, number: int) -> int:
        """Return the bytes that a group lacks, at least a layer if it lacks an entry."""
        nodes = self.nodes(number)
        if self.is_complete(number, nodes, strict=False):
            return 0
        shape = self.groups[number].charter.shape
        return max(1, self.lack(number, nodes)) * max(shape.layer_bytes)

    def lacks(self) -> dict[GroupId, int]:
        """Return the bytes of memory that each group lacks; only of those that lack some."""
        lacking = {group.id: self.lacking(number) for number, group in enumerate(self.groups)}
        return {group: size for group, size in lacking.items() if size > 0}

    def room(self, node: NodeId, number: int) -> tuple[int, int]:
        """Return how many layers a node can hold, without and with the ends; the latter may be < 0.

        If it has no share in the group: what it could hold if it moved there.
        """
        profile, group = self.view.profiles[node], self.groups[number]
        is_failing = (node, self.keys[number]) in self.failing
        if node in group.charter.exclude or is_failing or not self.holds(node, number):
            return 0, 0
        memory, reserve, shares = profile.memory_bytes, profile.reserve_bytes, self.shares[node]
        sizes = self.sizes[number]
        if group.id in shares:
            memory, reserve = shares[group.id], sizes.workspace
        else:
            memory = max(0, memory - sum(self.given(node).values()))
        usable = max(0, usable_of(memory, reserve) - sizes.cache)  # as the planner counts
        plain, entry = usable // sizes.layer, (usable - sizes.ends) // sizes.layer
        if profile.span and group.id not in shares:
            return min(plain, len(profile.span)), min(entry, len(profile.span))
        return plain, entry

    def able(self, number: int, nodes: Iterable[NodeId]) -> list[NodeId]:
        """Return those of the nodes that can hold a layer of a group."""
        return [node for node in nodes if self.room(node, number)[0] > 0]

    def _excluded(self, number: int) -> frozenset[NodeId]:
        """Return the nodes that may not be in a ring; the entry may be, if it holds no layers."""
        plan, exclude = self.plans.get(self.groups[number].id), self.groups[number].charter.exclude
        bare = {stage.node for stage in plan.stages if not stage.span} if plan else set()
        return frozenset(exclude) - bare

    def is_served(self, number: int, nodes: list[NodeId]) -> bool:
        """Return whether the ring of a group follows a plan that needs no other nodes."""
        plan = self.plans.get(self.groups[number].id)
        return plan is not None and {stage.node for stage in plan.stages} <= set(nodes)

    def is_used(self, node: NodeId, group: GroupId) -> bool:
        """Return whether the ring of a group works with a node."""
        plan = self.plans.get(group)
        return plan is not None and plan.rank(node) is not None

    def lack(self, number: int, nodes: list[NodeId]) -> int:
        """Return the layers for which nodes lack room; all if none may be the entry.

        A ring has at most as many nodes as its charter requests: the largest of them count.
        """
        rooms = [self.room(node, number) for node in nodes]
        charter = self.groups[number].charter
        is_client = charter.ends is Ends.CLIENT  # the author is the entry, and holds no layers
        entries = (self.view.author,) if is_client else charter.entries
        most = max(charter.members, 1 + is_client) if charter.members else len(nodes)
        largest = sorted((plain for plain, _ in rooms), reverse=True)[:most]
        ends = [  # what the ring has less, with this node as the entry
            max(plain, largest[-1]) - (0 if is_client else entry)
            for node, (plain, entry) in zip(nodes, rooms, strict=True)
            if (not entries or node in entries) and (entry > 0 or is_client)
            if is_client or self.is_own(node, number)
        ]
        layers = charter.shape.layers
        return layers - sum(largest) + min(ends) if ends else layers

    def share(self, node: NodeId, number: int) -> int:
        """Return the memory that a node has left for a group, at most for the whole model."""
        profile, first = self.view.profiles[node], self.place[node]
        others = (size for at, size in self.given(node).items() if at != self.groups[number].id)
        plan = self.plans.get(first) or self._followed(node, first)
        needed = self._needed(first, plan, node, profile) if plan else profile.reserve_bytes
        left = profile.memory_bytes - needed - sum(others)
        return max(0, min(left, self.sizes[number].whole))

    def _followed(self, node: NodeId, group: GroupId) -> Plan | None:
        """Return the plan of a ring whose layers a node has while none is in force."""
        member, number = self.memberships.get((node, group)), self.numbers.get(group)
        plan = decode_plans([member.followed]).get(member.followed) if member else None
        is_own = number is not None and plan and _is_of_model(self.groups[number].charter, plan)
        return plan if is_own else None

    def offer(self, node: NodeId, number: int) -> Offer | None:
        """Return what a node would offer to a group, by the speed that it has published.

        None if it has measured none with this model.
        """
        view, group, shares = self.view, self.groups[number], self.shares.get(node, {})
        state, profile = view.states.get(node), view.profiles.get(node)
        if state is None or profile is None:
            return None
        published = (
            profile.in_ring(each.group, is_further=each.group != state.group)
            for each in state.memberships
            if each.group in self.numbers and self.key(each.group) == self.keys[number]
        )
        measured = next((each for each in published if each.layer_s), None)
        if measured is None:
            return None
        given = self.given(node) if node in self.place else {}
        memory, reserve = profile.memory_bytes - sum(given.values()), profile.reserve_bytes
        if group.id in shares:
            memory, reserve = shares[group.id], self.sizes[number].workspace
        measured = replace(measured, memory_bytes=max(0, memory), reserve_bytes=reserve)
        return offer_of(node, measured, group.charter.shape)


def _can_take_part(view: MeshView, node: NodeId) -> bool:
    profile, state = view.profiles.get(node), view.states.get(node)
    if profile is None or state is None or state.lifecycle not in _PRESENT:
        return False
    return not state.obstacle or awaits_weights(state)


def _is_of_model(charter: Charter, plan: Plan) -> bool:
    """Return whether a plan is for the model of a charter."""
    model = charter.shape.name, charter.shape.layers, charter.ends
    return (plan.model, plan.layers, plan.ends) == model
