"""Which node takes part in which ring of a mesh that serves several models, or replicas of one.

Theory of operation
-------------------
A mesh has a group of nodes for each replica of each model in its charter, and a ring per group. A
node takes part in one group at a time, which its state tells. Every node computes `assign` from the
same records, and moves itself if the result names another group than its own. There is no vote.

The groups are in a fixed order: each model once, then each a second time, and so on. A group is
*complete* if its nodes have the memory for the layers, one of them may be the entry, and, where
that can be had, there are as many as its charter requests. Nodes stay where they are. A group that
is not complete takes the nodes that it lacks, all or none, in this order: nodes without a group,
nodes that another ring does not use or does not need, nodes of later groups that are not complete,
and nodes of a later replica. So each model is served once before any is served twice, and a node
moves only if a group becomes complete by it. Nodes without a group that are left over take part in
the group that is served worst.

A complete group never gives a node that it needs to an earlier one of the same round, and groups
are filled until nothing changes: assigning again moves nobody.

States tell which models were asked for lately. The first replica of such a model also takes nodes
from any ring of a model that nobody uses, if nothing else completes it. A model that has lost its
nodes to another one gets them back when it is asked for, and the other is not used any more.

A node that awaits weights takes part: it keeps its place while it fetches them, and one that a ring
does not need is free for another.

The memory of a node is what it offers for any model. A ring that follows a plan is complete even if
this estimate, which takes all layers as large as the largest, denies it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from meshllm.names import FIRST_GROUP, GroupId, ModelKey, NodeId
from meshllm.protocol.agreement.candidates import MeshView, followed_plans
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.records import DIGEST_PART_BYTES, Lifecycle, Profile
from meshllm.protocol.planning.plan import Ends, Offer, Plan
from meshllm.protocol.planning.problem import usable_bytes
from meshllm.protocol.weights.holders import awaits_weights

UNASSIGNED = GroupId(b"\0")
"""The group of a node that takes part in none."""

_PRESENT = Lifecycle.JOIN, Lifecycle.SERVING


@dataclass(frozen=True, slots=True)
class Group:
    """One replica of a model, and its ring."""

    id: GroupId
    charter: Charter
    """Of the model, with the terms of the mesh."""
    replica: int


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


def has_several(view: MeshView) -> bool:
    """Return whether a mesh has, or had until now, several groups, so that nodes may move."""
    is_moved = any(state.group != FIRST_GROUP for state in view.states.values())
    return is_moved or len(groups_of(view.charter)) > 1


def ring_of(view: MeshView) -> MeshView | None:
    """Return the view for planning the ring of its group; None if the mesh has no such group."""
    group = find_group(view.charter, view.group)
    return replace(view, charter=group.charter) if group else None


def plans_in_force(view: MeshView) -> dict[GroupId, Plan]:
    """Return the plan that each ring follows, as far as it has living nodes of its group."""
    here, found = view.alive(), dict[GroupId, Plan]()
    for node, plan in followed_plans(view).items():
        group = view.group_of(node)
        is_own = all(view.group_of(stage.node) == group for stage in plan.stages)
        if node not in here or not is_own or plan.rank(node) is None:
            continue
        if group not in found or found[group].precedence < plan.precedence:
            found[group] = plan
    return found


def used_models(view: MeshView) -> frozenset[ModelKey]:
    """Return the models that were asked for lately, at any living node."""
    here = view.alive()
    return frozenset(
        key for node, state in view.states.items() if node in here for key in state.used
    )


def assign(view: MeshView) -> Mapping[NodeId, GroupId]:
    """Return the group of each living node that can hold layers; the same on every node."""
    table, before = _Table(view), dict[NodeId, GroupId]()
    while table.place != before:  # ends: each change completes an earlier group, or places a node
        before = dict(table.place)
        for strict in (False, True):
            for number in range(len(table.groups)):
                table.fill(number, strict=strict)
        table.place_rest()
    return table.place


def shortage(view: MeshView) -> Mapping[GroupId, int]:
    """Return the bytes of memory that each group lacks; only of those that lack some."""
    table = _Table(view)
    lacking = {group.id: table.lacking(number) for number, group in enumerate(table.groups)}
    return {group: size for group, size in lacking.items() if size > 0}


@dataclass(slots=True)
class _Table:
    """The nodes, their places, and what each can hold of each model."""

    view: MeshView
    groups: tuple[Group, ...] = ()
    place: dict[NodeId, GroupId] = field(default_factory=dict)
    plans: dict[GroupId, Plan] = field(default_factory=dict)
    rooms: dict[tuple[NodeId, int], tuple[int, int]] = field(default_factory=dict)
    """Layers of the model of a group that a node can hold, without and with the ends."""
    used: frozenset[ModelKey] = frozenset()

    def __post_init__(self) -> None:
        view = self.view
        self.groups = groups_of(view.charter)
        self.plans, self.used = plans_in_force(view), used_models(view)
        known = {group.id: group for group in self.groups}
        for node in sorted(view.alive()):
            if _can_take_part(view, node):
                group = known.get(view.group_of(node))
                profile = view.profiles[node]
                is_unable = group and profile.models and not holds(profile, group.charter)
                self.place[node] = group.id if group and not is_unable else UNASSIGNED
                for number, each in enumerate(self.groups):
                    self.rooms[node, number] = _rooms(view, node, each.charter)

    # Who has what it needs.

    def nodes(self, number: int) -> list[NodeId]:
        group = self.groups[number].id
        return [node for node, at in self.place.items() if at == group]

    def is_complete(self, number: int, nodes: Iterable[NodeId], *, strict: bool) -> bool:
        """Return whether nodes suffice for a group; if strict, there are as many as requested."""
        nodes, charter = list(nodes), self.groups[number].charter
        able = [node for node in nodes if self.rooms[node, number][0] > 0]
        wanted = min(charter.members or 1, charter.shape.layers) if strict else 1
        if len(able) < wanted:
            return False
        return self._is_served(number, nodes) or self._lack(number, able) <= 0

    def lacking(self, number: int) -> int:
        """Return the bytes that a group lacks, at least a layer if it lacks an entry."""
        nodes = self.nodes(number)
        if self.is_complete(number, nodes, strict=False):
            return 0
        shape = self.groups[number].charter.shape
        return max(1, self._lack(number, nodes)) * max(shape.layer_bytes)

    def _is_served(self, number: int, nodes: list[NodeId]) -> bool:
        plan = self.plans.get(self.groups[number].id)
        return plan is not None and {stage.node for stage in plan.stages} <= set(nodes)

    def _lack(self, number: int, nodes: list[NodeId]) -> int:
        """Return the layers for which nodes lack room; all if none may be the entry."""
        rooms = [self.rooms[node, number] for node in nodes]
        charter = self.groups[number].charter
        is_client = charter.ends is Ends.CLIENT  # the author is the entry, and holds no layers
        entries = (self.view.author,) if is_client else charter.entries
        ends = [
            plain if is_client else plain - entry
            for node, (plain, entry) in zip(nodes, rooms, strict=True)
            if (not entries or node in entries) and (entry > 0 or is_client)
        ]
        layers = charter.shape.layers
        return layers - sum(plain for plain, _ in rooms) + min(ends) if ends else layers

    # Filling a group.

    def fill(self, number: int, *, strict: bool) -> None:
        """Complete a group with nodes that it may take; take none if they do not suffice."""
        nodes, taken = self.nodes(number), list[NodeId]()
        if self.is_complete(number, nodes, strict=strict):
            return
        for donors in (
            self._free, self._unneeded, self._incomplete, self._replicas, self._unused,
        ):  # fmt: skip
            if donors == self._replicas and strict:
                return
            while found := [each for each in donors(number, taken, strict) if each not in taken]:
                taken.append(self._choose(number, nodes, taken, found, strict=strict))
                if self.is_complete(number, [*nodes, *taken], strict=strict):
                    self._take(number, nodes, taken, strict=strict)
                    return

    def _choose(
        self, number: int, nodes: list[NodeId], taken: list[NodeId], found: list[NodeId],
        *, strict: bool,
    ) -> NodeId:  # fmt: skip
        """Return the smallest node that completes the group, else the largest."""
        order = sorted(found, key=lambda node: (self.rooms[node, number][0], node))
        completing = (
            node
            for node in order
            if self.is_complete(number, [*nodes, *taken, node], strict=strict)
        )
        return next(completing, order[-1])

    def _take(self, number: int, nodes: list[NodeId], taken: list[NodeId], *, strict: bool) -> None:
        for node in list(taken[:-1]):
            others = [each for each in taken if each != node]
            if self.is_complete(number, [*nodes, *others], strict=strict):
                taken = others
        self.place |= dict.fromkeys(taken, self.groups[number].id)

    def _able(self, number: int, nodes: Iterable[NodeId]) -> list[NodeId]:
        return [node for node in nodes if self.rooms[node, number][0] > 0]

    def _free(self, number: int, _taken: list[NodeId], _strict: bool) -> list[NodeId]:
        return self._able(number, (node for node, at in self.place.items() if at == UNASSIGNED))

    def _unneeded(self, number: int, taken: list[NodeId], strict: bool) -> list[NodeId]:
        """Return the nodes without which their groups are complete, standbys first."""
        used = {stage.node for plan in self.plans.values() for stage in plan.stages}
        found = [
            node
            for other in range(len(self.groups))
            if other != number
            for node in self._spare(other, taken, strict=strict)
        ]
        able = self._able(number, found)
        return [node for node in able if node not in used] or able

    def _spare(self, number: int, taken: list[NodeId], *, strict: bool) -> Iterator[NodeId]:
        nodes = [node for node in self.nodes(number) if node not in taken]
        for node in nodes:
            if self.is_complete(number, (each for each in nodes if each != node), strict=strict):
                yield node

    def _incomplete(self, number: int, taken: list[NodeId], _strict: bool) -> list[NodeId]:
        """Return the nodes of later groups that are not complete."""
        return self._able(
            number,
            (
                node
                for other in range(number + 1, len(self.groups))
                for nodes in (self.nodes(other),)
                if not self.is_complete(
                    other, (each for each in nodes if each not in taken), strict=False
                )
                for node in nodes
            ),
        )

    def _replicas(self, number: int, _taken: list[NodeId], _strict: bool) -> list[NodeId]:
        """Return the nodes of the last replica from which this group may take."""
        replica = self.groups[number].replica
        for other in range(len(self.groups) - 1, number, -1):
            if self.groups[other].replica > replica and (
                able := self._able(number, self.nodes(other))
            ):
                return able
        return []

    def _unused(self, number: int, taken: list[NodeId], _strict: bool) -> list[NodeId]:
        """Return the nodes of the last ring of a model that nobody uses, for one that is used."""
        group = self.groups[number]
        if group.replica or group.charter.key not in self.used:
            return []
        for other in range(len(self.groups) - 1, -1, -1):
            if self.groups[other].charter.key not in self.used:
                able = self._able(number, self.nodes(other))
                if found := [node for node in able if node not in taken]:
                    return found
        return []

    def place_rest(self) -> None:
        """Let nodes without a group take part in the group that is served worst."""
        for node in [each for each, at in self.place.items() if at == UNASSIGNED]:
            able = [each for each in range(len(self.groups)) if self.rooms[node, each][0] > 0]
            if able:
                self.place[node] = self.groups[min(able, key=self._service)].id

    def _service(self, number: int) -> tuple[bool, int, int]:
        """Return how well a group is served: whole millionths of the room that it needs."""
        rooms = sum(self.rooms[node, number][0] for node in self.nodes(number))
        layers = self.groups[number].charter.shape.layers
        return self.groups[number].replica > 0, 10**6 * rooms // layers, number


def holds(profile: Profile, charter: Charter) -> bool:
    """Return whether a node has a model locally."""
    if profile.models:
        return charter.key in profile.models
    config = charter.config_digest[:DIGEST_PART_BYTES]
    return bool(profile.weights) and profile.weights[-1] == config


def _id(charter: Charter, replica: int, *, is_first: bool) -> GroupId:
    return FIRST_GROUP if is_first and not replica else GroupId(charter.key + bytes([replica]))


def _can_take_part(view: MeshView, node: NodeId) -> bool:
    profile, state = view.profiles.get(node), view.states.get(node)
    if profile is None or state is None or state.lifecycle not in _PRESENT:
        return False
    return not state.obstacle or awaits_weights(state)


def _rooms(view: MeshView, node: NodeId, charter: Charter) -> tuple[int, int]:
    """Return how many layers a node can hold, without and with the ends; the latter may be < 0."""
    profile = view.profiles[node]
    if node in charter.exclude or not holds(profile, charter):
        return 0, 0
    shape = charter.shape
    offer = Offer(node, profile.memory_bytes, ((1, 1.0),), 0.0, profile.reserve_bytes)
    cache_ = shape.context * max(shape.kv_bytes_per_token)
    layer = max(shape.layer_bytes) + cache_ * charter.sessions
    usable = max(0, usable_bytes(offer) - cache_)  # as the planner counts
    return usable // layer, (usable - shape.ends_bytes) // layer
