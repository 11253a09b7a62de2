"""Which node takes part in which ring of a mesh that serves several models, or replicas of one.

Theory of operation
-------------------
A mesh has a group of nodes for each replica of each model in its charter, and a ring per group. A
node takes part in one group, its first, and in further ones with memory that this one leaves, which
its state tells. Every node computes `divide` from the same records, and moves itself if the result
names other groups than its own. There is no vote.

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

Where moves do not complete a group, it takes *shares* of nodes that keep their first group: what is
left of their memory once each of their rings serves, at most what the whole model needs. A share
has the workspace of its model too, as models are loaded between the steps of others. A node
publishes the memory of each share, and the ring of its first group has the rest, so that no two
rings plan with the same bytes. A share ends if its group has as many nodes as requested without
it, and does not use it. Other shares end if another group becomes complete by it: those of later
replicas, of models that nobody uses, of groups that are complete with fewer nodes, and of groups
that are not complete; only the last of these for a group that merely has fewer nodes than
requested. Until then a group that lost a node keeps its shares, so that it serves soon after that
node returned. Nodes join one further group at a time, and none while a ring of theirs is not whole:
what such a ring needs next is not known yet. A share that a ring works with serves until a plan
without it is in force; until then its memory is in use. If it ends for another group, its ring
stops at once.

If nothing else completes a group, it takes nodes that no ring uses, and shares of others. A later
replica may then have shares of nodes in an earlier one, so that the layers of these are on several
nodes, with these rules:

- It has a node of its own, which is in no earlier replica. One of these is the entry: a node is the
  entry of one ring of a model, as requests name the entry.
- The share is as small as the nodes of its own allow, and of the node that computes least: what it
  computes in one ring is in the way of the other, see `throughput`.
- All rings of the model, and of other models in use, give more with it than without it, and than
  with the nodes of its own in the ring that shares nodes, as the policy would plan it, by as much
  as another plan must be faster. That takes measured layers: until a node has some, it is a standby
  elsewhere.
- A model that nobody uses has no share of a node that serves a model in use.

This is decided once, from plans in force. Then the share stays, whatever is measured later, so that
noise moves nobody. It ends when the group is complete without it, when nodes that no ring uses can
take its place, or without a node of its own. While it is not published, the group takes it again at
each computation; not while a node of its own, which has moved, has not measured layers there yet.

States tell which models were asked for lately. The first replica of such a model also takes nodes
from any ring of a model that nobody uses, if nothing else completes it. A model that has lost its
nodes to another one gets them back when it is asked for, and the other is not used any more.

What members exclude, or the members that they request, yields for the first replica of a model, if
it is complete with the founder's values alone: else the model would not be served.

A node that awaits weights takes part: it keeps its place while it fetches them, and one that a ring
does not need is free for another.

The memory of a node is what it offers for any model. A ring that follows a plan is complete even if
this estimate, which takes all layers as large as the largest, denies it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TypeAlias

from meshllm.names import FIRST_GROUP, NODE_ID_BYTES, GroupId, ModelKey, NodeId, Quant, Span
from meshllm.protocol.agreement.agreement import GAIN
from meshllm.protocol.agreement.candidates import MeshView, decode_plans, links_of, offer_of
from meshllm.protocol.agreement.throughput import TimedRing, limit, loads, plan_ring, throughput
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.records import (
    DIGEST_PART_BYTES,
    MAX_RINGS,
    Lifecycle,
    Profile,
    RingMembership,
    StateRecord,
)
from meshllm.protocol.planning.plan import Ends, Offer, Plan
from meshllm.protocol.planning.problem import (
    HEADROOM_PERCENT,
    least_memory,
    memory_for,
    usable_of,
)
from meshllm.protocol.weights.holders import awaits_weights

UNASSIGNED = GroupId(b"\0")
"""The group of a node that takes part in none."""

_NOBODY = NodeId(bytes(NODE_ID_BYTES))  # where no node may be the entry: none means all
_PRESENT = Lifecycle.JOIN, Lifecycle.SERVING
_Donors: TypeAlias = Callable[[int, list[NodeId], bool], list[NodeId]]
"""The nodes that a group may take, besides those that it takes; strict or not."""


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


def has_several(view: MeshView) -> bool:
    """Return whether a mesh has, or had until now, several groups, so that nodes may move."""
    is_moved = any(_groups(state) != (FIRST_GROUP,) for state in view.states.values())
    return is_moved or len(groups_of(view.charter)) > 1


def ring_of(view: MeshView) -> MeshView | None:
    """Return the view for planning the ring of its group; None if the mesh has no such group."""
    group = find_group(view.charter, view.group)
    if group is None:
        return None
    states, at = view.states, group.id
    further = {node for node, state in states.items() if state.is_further(at)}
    profiles = {
        node: profile.in_ring(at, is_further=node in further)
        for node, profile in view.profiles.items()
    }
    workspace = group.charter.shape.workspace_bytes  # in the first ring it is in the node's reserve
    shares = {
        node: replace(profiles[node], reserve_bytes=workspace) for node in further & profiles.keys()
    }
    charter = group.charter
    if sharing := _sharing(view, group):  # the entry names the ring of a request, see above
        able = [node for node in charter.entries or sorted(states) if node not in sharing]
        charter = replace(charter, entries=tuple(able) or (_NOBODY,))
    return replace(
        view,
        charter=charter,
        eases=not group.replica,
        ending=_ending(view, group) if sharing else frozenset(),
        states={node: state.in_ring(at) for node, state in states.items()},
        profiles=profiles | shares,
    )


def _sharing(view: MeshView, group: Group) -> frozenset[NodeId]:
    """Return the nodes of a group that take part in an earlier replica of its model too."""
    states, key = view.states, group.charter.key
    groups = groups_of(view.charter)
    before = [each.id for each in groups[: groups.index(group)] if each.charter.key == key]
    if not before:
        return frozenset()
    return frozenset(
        node
        for node, state in states.items()
        if group.id in (own := _groups(state)) and not set(before).isdisjoint(own)
    )


def _ending(view: MeshView, group: Group) -> frozenset[NodeId]:
    """Return the nodes whose shares in a ring end once a plan without them is in force."""
    table = _Table(view)
    table.end_shares()
    return frozenset(node for node, shares in table.ending.items() if group.id in shares)


def memberships(view: MeshView) -> dict[tuple[NodeId, GroupId], RingMembership]:
    """Return what each living node does in each ring in which it takes part."""
    here = view.alive()
    return {
        (node, each.group): each
        for node, state in view.states.items()
        if node in here
        for each in state.memberships
    }


def plans_in_force(view: MeshView) -> dict[GroupId, Plan]:
    """Return the plan that each ring follows, as far as it has living nodes of its group."""
    known, found = memberships(view), dict[GroupId, Plan]()
    plans = decode_plans(each.followed for each in known.values())
    takes_part = {(node, group) for node, state in view.states.items() for group in _groups(state)}
    for (node, group), each in known.items():
        plan = plans.get(each.followed)
        if plan is None or plan.rank(node) is None:
            continue
        if any((at.node, group) not in takes_part and at.node in view.states for at in plan.stages):
            continue
        if group not in found or found[group].precedence < plan.precedence:
            found[group] = plan
    return found


def _groups(state: StateRecord) -> tuple[GroupId, ...]:
    return tuple(each.group for each in state.memberships)


def used_models(view: MeshView) -> frozenset[ModelKey]:
    """Return the models that were asked for lately, at any living node."""
    here = view.alive()
    return frozenset(
        key for node, state in view.states.items() if node in here for key in state.used
    )


def assign(view: MeshView) -> Mapping[NodeId, GroupId]:
    """Return the first group of each living node that can hold layers; the same on every node."""
    return {node: part.first for node, part in divide(view).items()}


def divide(view: MeshView) -> Mapping[NodeId, NodeGroups]:
    """Return the groups of each living node that can hold layers; the same on every node."""
    bound = _divide(view)
    eased = _yielding(view, bound)
    while eased:  # ends: there are fewer each time
        table = _divide(view, eased)
        if not (lacking := eased & table.lacks().keys()):
            return table.parts()
        eased -= lacking
    return bound.parts()


def _yielding(view: MeshView, table: "_Table") -> frozenset[GroupId]:
    """Return the first replicas of models that are not complete with the terms of members."""
    if not view.charter.yields:
        return frozenset()
    lacks = table.lacks()
    return frozenset(each.id for each in table.groups if not each.replica and each.id in lacks)


def _divide(view: MeshView, eased: frozenset[GroupId] = frozenset()) -> "_Table":
    """Move nodes until nothing changes; terms of members do not hold for the groups ``eased``."""
    table = _Table(view, eased)
    table.end_shares()
    before = table.parts()
    while True:  # ends: each change completes an earlier group, or places a node
        for strict in (False, True):
            for number in range(len(table.groups)):
                table.fill(number, strict=strict)
        table.place_rest()
        found = table.parts()
        if found == before:
            return table
        before = found


def shortage(view: MeshView) -> Mapping[GroupId, int]:
    """Return the bytes of memory that each group lacks; only of those that lack some."""
    table = _Table(view)
    return _Table(view, _yielding(view, table)).lacks()


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What one node needs to hold layers of a model, in bytes."""

    layer: int
    cache: int
    ends: int
    workspace: int
    """Of a forward, in a share."""
    whole: int
    """For all layers, in a share."""

    @classmethod
    def of(cls, charter: Charter) -> "_Sizes":
        shape = charter.shape
        cache = shape.context * max(shape.kv_bytes_per_token)
        layer = max(shape.layer_bytes) + cache * charter.sessions
        span = Span(0, shape.layers)
        reserve, sessions = shape.workspace_bytes, charter.sessions
        whole = least_memory(shape, span, is_entry=True, sessions=sessions, reserve=reserve)
        return cls(layer, cache, shape.ends_bytes, reserve, whole)


@dataclass(slots=True)
class _Table:
    """The nodes, their places, and what each can hold of each model."""

    view: MeshView
    eased: frozenset[GroupId] = frozenset()
    """The groups for which the terms of members that yield do not hold."""
    groups: tuple[Group, ...] = ()
    numbers: dict[GroupId, int] = field(default_factory=dict)
    sizes: tuple[_Sizes, ...] = ()
    place: dict[NodeId, GroupId] = field(default_factory=dict)
    """The first group of each node."""
    shares: dict[NodeId, dict[GroupId, int]] = field(default_factory=dict)
    """The further groups of each node, with the memory for them."""
    ending: dict[NodeId, dict[GroupId, int]] = field(default_factory=dict)
    """The shares that count no more, but serve until another plan takes the place of theirs."""
    plans: dict[GroupId, Plan] = field(default_factory=dict)
    told: dict[tuple[NodeId, GroupId], RingMembership] = field(default_factory=dict)
    used: frozenset[ModelKey] = frozenset()
    held: dict[NodeId, frozenset[int]] = field(default_factory=dict)
    """The groups of whose model each node has weights, by number."""
    keys: tuple[ModelKey, ...] = ()
    """The model of each group."""

    def __post_init__(self) -> None:
        view = self.view
        self.groups = tuple(
            replace(each, charter=each.charter.eased) if each.id in self.eased else each
            for each in groups_of(view.charter)
        )
        self.numbers = {group.id: number for number, group in enumerate(self.groups)}
        self.sizes = tuple(_Sizes.of(group.charter) for group in self.groups)
        self.plans, self.used = plans_in_force(view), used_models(view)
        self.told = memberships(view)
        self.keys = tuple(group.charter.key for group in self.groups)
        models = [*zip(self.keys, self.groups, strict=True)]
        for node, profile in view.profiles.items():
            self.held[node] = frozenset(
                number
                for number, (key, group) in enumerate(models)
                if _has(profile, key, group.charter)
            )
        for node in sorted(view.alive()):
            if _can_take_part(view, node):
                self._enter(node)

    def _enter(self, node: NodeId) -> None:
        """Enter the groups of a node, as far as the mesh has them and the node their models."""
        state, profile = self.view.states[node], self.view.profiles[node]
        known = [
            group
            for group in _groups(state)
            if (number := self.numbers.get(group)) is not None
            and (not profile.models or self._holds(node, number))
        ]
        given = {share.group: share.memory_bytes for share in profile.shares}
        groups = list[GroupId]()
        for group in known:  # a share of a replica counts once published, see `_move_and_join`
            held = self._of_model(group, groups)
            if not held or (given.get(group) and self._is_last(group, held)):
                groups.append(group)
        self.place[node], *further = groups or [UNASSIGNED]
        shares = {group: given[group] for group in further if given.get(group)}
        self.shares[node] = shares
        for group in further:  # of the rest, what is left: it has not published how much it uses
            if group not in shares:
                shares[group] = self._share(node, self.numbers[group])

    def parts(self) -> dict[NodeId, NodeGroups]:
        """Return the groups of each node."""
        return {node: NodeGroups(at, self.given(node)) for node, at in self.place.items()}

    def given(self, node: NodeId) -> dict[GroupId, int]:
        """Return the memory of a node that is for further groups: its shares, ending or not."""
        at, shares = self.place[node], self.shares[node]
        ending = self.ending.get(node, {})
        kept = {group: size for group, size in ending.items() if group not in {at, *shares}}
        return {**shares, **kept}

    # Who has what it needs.

    def nodes(self, number: int) -> list[NodeId]:
        group = self.groups[number].id
        return [node for node, at in self.place.items() if group in (at, *self.shares[node])]

    def is_complete(self, number: int, nodes: Iterable[NodeId], *, strict: bool) -> bool:
        """Return whether nodes suffice for a group; if strict, there are as many as requested."""
        nodes, charter = list(nodes), self.groups[number].charter
        able = self._able(number, nodes)
        wanted = min(charter.members or 1, charter.shape.layers) if strict else 1
        if len(able) < wanted or not any(self._is_own(node, number) for node in able):
            return False
        allowed = [node for node in nodes if node not in self._excluded(number)]
        return self._is_served(number, allowed) or self._lack(number, able) <= 0

    def lacking(self, number: int) -> int:
        """Return the bytes that a group lacks, at least a layer if it lacks an entry."""
        nodes = self.nodes(number)
        if self.is_complete(number, nodes, strict=False):
            return 0
        shape = self.groups[number].charter.shape
        return max(1, self._lack(number, nodes)) * max(shape.layer_bytes)

    def lacks(self) -> dict[GroupId, int]:
        """Return the bytes of memory that each group lacks; only of those that lack some."""
        lacking = {group.id: self.lacking(number) for number, group in enumerate(self.groups)}
        return {group: size for group, size in lacking.items() if size > 0}

    def room(self, node: NodeId, number: int) -> tuple[int, int]:
        """Return how many layers a node can hold, without and with the ends; the latter may be < 0.

        Of a group in which it takes part no share, what it could hold if it moved there.
        """
        profile, group = self.view.profiles[node], self.groups[number]
        if node in group.charter.exclude or not self._holds(node, number):
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

    def _excluded(self, number: int) -> frozenset[NodeId]:
        """Return the nodes that may not be in a ring; the entry may be, if it holds no layers."""
        plan, exclude = self.plans.get(self.groups[number].id), self.groups[number].charter.exclude
        bare = {stage.node for stage in plan.stages if not stage.span} if plan else set()
        return frozenset(exclude) - bare

    def _is_served(self, number: int, nodes: list[NodeId]) -> bool:
        plan = self.plans.get(self.groups[number].id)
        return plan is not None and {stage.node for stage in plan.stages} <= set(nodes)

    def _lack(self, number: int, nodes: list[NodeId]) -> int:
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
            if is_client or self._is_own(node, number)
        ]
        layers = charter.shape.layers
        return layers - sum(largest) + min(ends) if ends else layers

    # Filling a group.

    def fill(self, number: int, *, strict: bool) -> None:
        """Complete a group with nodes that it may take; take none if they do not suffice."""
        if self.is_complete(number, self.nodes(number), strict=strict):
            self._replace_shares(number)
            return
        moves = self._free, self._unneeded, self._incomplete
        if any(self._move(number, donors, strict=strict) for donors in moves):
            return
        if self._join(number, strict=strict) or self._join_instead(number, strict=strict) or strict:
            return
        later = self._replicas, self._unused
        if any(self._move(number, donors, strict=False) for donors in later):
            return
        if not self._move_instead(number, (*moves, *later)):
            self._move_and_join(number)

    def _move(
        self,
        number: int,
        donors: _Donors,
        *,
        strict: bool,
    ) -> bool:
        """Complete a group with nodes of these donors; return whether that is possible."""
        nodes, taken = self.nodes(number), list[NodeId]()
        while found := [each for each in donors(number, taken, strict) if each not in taken]:
            taken.append(self._choose(number, nodes, taken, found, strict=strict))
            if self.is_complete(number, [*nodes, *taken], strict=strict):
                self._take(number, nodes, taken, strict=strict)
                return True
        return False

    def _choose(
        self, number: int, nodes: list[NodeId], taken: list[NodeId], found: list[NodeId],
        *, strict: bool,
    ) -> NodeId:  # fmt: skip
        """Return the smallest node that completes the group, else the largest."""
        order = sorted(found, key=lambda node: (self.room(node, number)[0], node))
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

    # Shares.

    def end_shares(self) -> None:
        """End the shares that their groups do not need, those that no ring uses first."""
        known = [(node, group) for node, shares in self.shares.items() for group in shares]
        for node, group in sorted(known, key=lambda share: (self._is_used(*share), *share)):
            number = self.numbers[group]
            is_own, is_used = self._is_own(node, number), self._is_used(node, group)
            others = [each for each in self.nodes(number) if each != node]
            is_over = self.is_complete(number, others, strict=is_own) and not (is_used and is_own)
            if is_over or not (is_own or self._has_own(number)):
                self._end_share(node, group)

    def _end_share(self, node: NodeId, group: GroupId) -> None:
        """End a share; if a ring works with it, once a plan without it is in force."""
        size, number = self.shares[node].pop(group), self.numbers[group]
        kept = (each for each, shares in self.ending.items() if group in shares)
        if self._is_used(node, group) and self._is_served(
            number, [*self.nodes(number), *kept, node]
        ):
            self.ending.setdefault(node, {})[group] = size

    def _is_used(self, node: NodeId, group: GroupId) -> bool:
        plan = self.plans.get(group)
        return plan is not None and plan.rank(node) is not None

    def _join(self, number: int, *, strict: bool = False, of_replicas: bool = False) -> bool:
        """Complete a group with shares of nodes; return whether that is possible.

        If asked for, also with shares of nodes in earlier replicas, no larger than necessary.
        """
        group, before = self.groups[number].id, self._copied_shares()
        able = {
            node: self._share(node, number)
            for node in self.place
            if self._may_join(node, number, of_replicas=of_replicas)
        }
        busy = loads(self._rings_beside(number).values()) if of_replicas else {}

        def order(node: NodeId) -> tuple[bool, bool, int, NodeId]:
            is_own = self._is_own(node, number)
            first = -able[node] if is_own else busy[node]
            return not is_own, group not in self.shares[node], first, node

        joined = list[NodeId]()
        for node in sorted(able, key=order):
            self.shares[node][group] = min(able[node], self._needed_share(node, number))
            joined.append(node)
            if self.is_complete(number, self.nodes(number), strict=strict):
                self._end_unneeded(number, joined, before, strict=strict)
                return True
        self.shares = before
        return False

    def _end_unneeded(
        self, number: int, joined: list[NodeId], before: dict[NodeId, dict[GroupId, int]],
        *, strict: bool,
    ) -> None:  # fmt: skip
        """Undo the shares without which a group is complete too."""
        for node in joined[:-1]:
            now, self.shares[node] = self.shares[node], dict(before[node])
            if not self.is_complete(number, self.nodes(number), strict=strict):
                self.shares[node] = now

    def _join_instead(self, number: int, *, strict: bool) -> bool:
        """Complete a group with shares in place of those of groups that yield to it.

        For more nodes than it needs, only groups that are not complete yield.
        """
        before, plans = self._copied_shares(), dict(self.plans)
        shared = [
            (node, other)
            for other in range(len(self.groups) - 1, -1, -1)
            for node in self.nodes(other)
            if other != number and self.groups[other].id in self.shares[node]
        ]
        over = [] if strict else [share for share in shared if self._is_over(*share)]
        yielding = [
            (node, other)
            for node, other in shared
            if self._yields(other, number) and not (strict and self._is_filled(other))
        ]
        for node, other in dict.fromkeys((*over, *yielding)):
            del self.shares[node][self.groups[other].id]
            self._stop_rings(before)
            is_complete = self.is_complete(number, self.nodes(number), strict=strict)
            if is_complete or self._join(number, strict=strict):
                return True
        self.shares, self.plans = before, plans
        return False

    def _move_instead(self, number: int, moves: Iterable[_Donors]) -> bool:
        """Complete a group with nodes that end their shares in groups that yield to it.

        Return whether nodes have moved.
        """
        before, places, plans = self._copied_shares(), dict(self.place), dict(self.plans)
        yielding = {
            self.groups[other].id
            for other in range(len(self.groups))
            if other == number or self._yields(other, number)
        }
        self.shares = {
            node: {group: size for group, size in shares.items() if group not in yielding}
            for node, shares in before.items()
        }
        if self.shares != before:
            self._stop_rings(before)
            any(self._move(number, donors, strict=False) for donors in moves)
        self.plans = plans
        if self.place == places:
            self.shares = before
            return False
        for node in sorted(before.keys() - self.nodes(number)):
            if self.shares[node] != before[node]:
                self._restore(node, before[node])
        self._stop_rings(before)
        return True

    def _stop_rings(self, before: dict[NodeId, dict[GroupId, int]]) -> None:
        """Forget the plans of rings that worked with shares which are at an end."""
        for node, shares in before.items():
            for group in shares.keys() - {self.place[node], *self.shares[node]}:
                if self._is_used(node, group):
                    del self.plans[group]

    def _restore(self, node: NodeId, shares: dict[GroupId, int]) -> None:
        """Give a node its shares again, unless its first ring needs their memory by now.

        That ring may have given nodes away for it.
        """
        first, ended = self.numbers[self.place[node]], self.shares[node]
        was_filled, self.shares[node] = self._is_filled(first), shares
        if was_filled and not self._is_filled(first):
            self.shares[node] = ended

    def _is_over(self, node: NodeId, number: int) -> bool:
        """Return whether a group is complete without a node, if with fewer than requested."""
        others = (each for each in self.nodes(number) if each != node)
        return self.is_complete(number, others, strict=False)

    def _is_filled(self, number: int) -> bool:
        return self.is_complete(number, self.nodes(number), strict=False)

    def _yields(self, other: int, number: int) -> bool:
        """Return whether a group ends its shares if that completes another one."""
        group, wanting = self.groups[other], self.groups[number]
        if other != number and not self.is_complete(other, self.nodes(other), strict=False):
            return True
        if self.keys[number] in self.used and not wanting.replica:
            if self.keys[other] not in self.used:
                return True
        elif self.keys[other] in self.used and not group.replica:
            return False
        return other > number and group.replica > wanting.replica

    def _may_join(self, node: NodeId, number: int, *, of_replicas: bool) -> bool:
        """Return whether a node may have a share in a group, or a larger one than it has."""
        group, shares = self.groups[number], self.shares[node]
        held = [self.place[node], *(each for each in shares if each != group.id)]
        return (
            len({*held, *self.given(node)} - {group.id}) < MAX_RINGS
            and node not in group.charter.exclude
            and self._holds(node, number)
            and UNASSIGNED not in held
            and (not (same := self._of_model(group.id, held)) or of_replicas)
            and (not same or self._may_share(node, group.id, same))
            and all(self._serves(node, each) for each in held)
            and self._share(node, number) > shares.get(group.id, 0)
        )

    def _serves(self, node: NodeId, group: GroupId) -> bool:
        """Return whether a ring is whole, and needs no more of a node than it has."""
        number, plan, told = (
            self.numbers[group],
            self.plans.get(group),
            self.told.get((node, group)),
        )
        if plan is None or told is None or not self._is_served(number, self.nodes(number)):
            return False
        return plan.rank(node) is None or (told.is_loaded and told.followed == plan.encode())

    def _share(self, node: NodeId, number: int) -> int:
        """Return the memory that a node has left for a group, at most for the whole model."""
        profile, first = self.view.profiles[node], self.place[node]
        others = (size for at, size in self.given(node).items() if at != self.groups[number].id)
        needed = profile.reserve_bytes
        if (plan := self.plans.get(first) or self._followed(node, first)) is not None:
            charter = self.groups[self.numbers[first]].charter
            needed = memory_for(
                plan, node, charter.shape, sessions=charter.sessions, reserve=needed
            )
        left = profile.memory_bytes - needed - sum(others)
        return max(0, min(left, self.sizes[number].whole))

    def _followed(self, node: NodeId, group: GroupId) -> Plan | None:
        """Return the plan of a ring whose layers a node has while none is in force."""
        told = self.told.get((node, group))
        return decode_plans([told.followed]).get(told.followed) if told else None

    # Shares of nodes in earlier replicas.

    def _of_model(self, group: GroupId, others: Iterable[GroupId]) -> list[GroupId]:
        """Return the other groups that serve the model of a group too."""
        number = self.numbers[group]
        return [
            each
            for each in others
            if each not in (group, UNASSIGNED) and self._key(each) == self.keys[number]
        ]

    def _is_last(self, group: GroupId, others: Iterable[GroupId]) -> bool:
        """Return whether a group comes after others, and may have shares of nodes in these."""
        number = self.numbers[group]
        is_entry = self.groups[number].charter.ends is Ends.ENTRY
        return is_entry and all(self.numbers[each] < number for each in others)

    def _may_share(self, node: NodeId, group: GroupId, others: Sequence[GroupId]) -> bool:
        """Return whether a group may have a share of a node in others; unless used, it may move."""
        is_used = any(self._is_used(node, each) for each in others)
        is_measured = self._offer(node, self.numbers[group]) is not None
        is_free = is_measured and not self._is_busy(node, group)
        return is_used and is_free and self._is_last(group, others)

    def _is_busy(self, node: NodeId, group: GroupId) -> bool:
        """Return whether a node serves a model in use while that of a group is not used."""
        rings = (at for at in self.plans if at in self.numbers and self._key(at) in self.used)
        is_asked = self._key(group) in self.used
        return not is_asked and any(self._is_used(node, at) for at in rings)

    def _held(self, node: NodeId) -> list[GroupId]:
        return [self.place[node], *self.shares[node]]

    def _is_own(self, node: NodeId, number: int) -> bool:
        """Return whether a node is in no earlier replica of the model of a group."""
        if not self.groups[number].replica:
            return True
        same = self._of_model(self.groups[number].id, self._held(node))
        return all(self.numbers[each] > number for each in same)

    def _has_own(self, number: int) -> bool:
        return any(self._is_own(node, number) for node in self._able(number, self.nodes(number)))

    def _needed_share(self, node: NodeId, number: int) -> int:
        """Return the most bytes of a share: for a replica of a node's model what the others lack.

        The less such a node computes in one ring, the more it can in the other.
        """
        if self._is_own(node, number):
            return self.sizes[number].whole
        sizes, others = self.sizes[number], [each for each in self.nodes(number) if each != node]
        lacking = max(1, self._lack(number, others))
        needed = sizes.cache + lacking * sizes.layer
        return sizes.workspace - (-needed * 100 // (100 - HEADROOM_PERCENT))  # rounded up

    def _move_and_join(self, number: int) -> None:
        """Complete a group with nodes that no ring uses and shares of others.

        A replica takes shares of nodes in earlier ones only if that is worth it. Each try plans
        several rings, so that it takes twice as many nodes as the one before.
        """
        before, places, taken = self._copied_shares(), dict(self.place), 0
        while not (self._completes(number) and self._is_worth(number)):
            self.shares = {node: dict(shares) for node, shares in before.items()}
            more = sum(self._take_left_over(number) for _ in range(max(1, taken)))
            if not more:
                self.place = places
                return
            taken += more

    def _take_left_over(self, number: int) -> bool:
        """Move the largest node that no ring uses, and that has measured layers of the model."""
        able = self._left_over(number, [], False)
        left = [node for node in able if self._offer(node, number) is not None]
        if left:
            largest = max(left, key=lambda node: (self.room(node, number)[0], node))
            self.place[largest] = self.groups[number].id
        return bool(left)

    def _completes(self, number: int) -> bool:
        """Complete a group with shares of nodes in any ring; return whether that is possible."""
        if not self._has_own(number):
            return False
        is_complete = self.is_complete(number, self.nodes(number), strict=False)
        return is_complete or self._join(number, of_replicas=True)

    def _replace_shares(self, number: int) -> None:
        """Complete a group with nodes that no ring uses, in place of shares of earlier replicas."""
        before, group = self._copied_shares(), self.groups[number].id
        ending = {node: dict(shares) for node, shares in self.ending.items()}
        shared = [
            node
            for node, shares in before.items()
            if group in shares and not self._is_own(node, number)
        ]
        for node in shared:
            self._end_share(node, group)
        if shared and not self._move(number, self._left_over, strict=False):
            self.shares, self.ending = before, ending

    def _left_over(self, number: int, taken: list[NodeId], strict: bool) -> list[NodeId]:
        """Return the nodes of any group that no ring uses or needs."""
        used = {stage.node for plan in self.plans.values() for stage in plan.stages}
        moves = self._free, self._unneeded, self._incomplete
        found = dict.fromkeys(node for donors in moves for node in donors(number, taken, strict))
        return [node for node in found if node not in used]

    def _is_worth(self, number: int) -> bool:
        """Return whether nodes that a group shares with earlier replicas are worth it.

        All rings of the model, and of others in use, must give more than with a longer ring, by as
        much as another plan must be faster, see `agreement`.
        """
        nodes = self.nodes(number)
        own = [node for node in nodes if self._is_own(node, number)]
        if len(own) == len(nodes):
            return True
        rings, key = self._rings_beside(number), self.keys[number]
        counted = {at: ring for at, ring in rings.items() if self.keys[at] in {key, *self.used}}
        others = [ring for at, ring in rings.items() if at not in counted]
        least = throughput(counted.values(), others) * (1 + Fraction(GAIN))
        if self._limit(number, nodes, counted) <= least:
            return False  # whatever the plan, which takes a while to find
        if (new := self._plan_of(number, nodes)) is None:
            return False
        shared = throughput([*counted.values(), self._timed(number, new)], others)
        if shared <= least:
            return False
        for at in counted:
            here = self.nodes(at)
            if self.keys[at] == key and at < number and not set(nodes).isdisjoint(here):
                longer = self._plan_of(at, [*here, *own])
                if longer is not None:
                    after = counted | {at: self._timed(at, longer)}
                    least = max(least, throughput(after.values(), others) * (1 + Fraction(GAIN)))
        return shared > least

    def _limit(
        self, number: int, nodes: Iterable[NodeId], counted: Mapping[int, TimedRing]
    ) -> Fraction:
        """Return what rings cannot exceed together if nodes make another one of a model."""
        key, layers = self.keys[number], self.groups[number].charter.shape.layers
        same = [ring for at, ring in counted.items() if self.keys[at] == key]
        others = [ring for at, ring in counted.items() if self.keys[at] != key]
        busy = {stage.node for ring in same for stage in ring.plan.stages}
        known = [self._offer(node, number) for node in {*nodes, *busy}]
        offers = [offer for offer in known if offer is not None]
        unknown = len(known) - len(offers)  # their layers count as if they took no time
        return limit(offers, layers) + throughput(others) + unknown

    def _plan_of(self, number: int, nodes: Iterable[NodeId]) -> Plan | None:
        """Return the plan that those of the nodes make that have measured layers, if any."""
        charter, known = self.groups[number].charter, {at: self._offer(at, number) for at in nodes}
        offers = [offer for offer in known.values() if offer is not None]
        nodes = [offer.node for offer in offers]
        entries = [
            node
            for node in nodes
            if self._is_own(node, number) and (not charter.entries or node in charter.entries)
        ]
        if not entries:
            return None
        group = self.groups[number].id
        spans = {
            node: span
            for node in nodes
            if (span := self.view.profiles[node].span) and group not in self.shares[node]
        }
        links = links_of(self.view.states, nodes)
        return plan_ring(replace(charter, entries=tuple(entries)), offers, links, spans)

    def _rings_beside(self, number: int) -> dict[int, TimedRing]:
        """Return the rings of other groups that follow a plan."""
        return {
            at: self._timed(at, plan)
            for at, group in enumerate(self.groups)
            if at != number and (plan := self.plans.get(group.id)) is not None
        }

    def _timed(self, number: int, plan: Plan) -> TimedRing:
        known = ((stage.node, self._offer(stage.node, number)) for stage in plan.stages)
        offers = {node: offer for node, offer in known if offer is not None}
        return TimedRing(plan, self.groups[number].charter.shape, offers)

    def _offer(self, node: NodeId, number: int) -> Offer | None:
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
            if each.group in self.numbers and self._key(each.group) == self.keys[number]
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

    def _copied_shares(self) -> dict[NodeId, dict[GroupId, int]]:
        return {node: dict(shares) for node, shares in self.shares.items()}

    def _key(self, group: GroupId) -> ModelKey:
        return self.keys[self.numbers[group]]

    def _holds(self, node: NodeId, number: int) -> bool:
        return number in self.held[node]

    # Donors of nodes.

    def _able(self, number: int, nodes: Iterable[NodeId]) -> list[NodeId]:
        return [node for node in nodes if self.room(node, number)[0] > 0]

    def _movable(self, number: int, nodes: Iterable[NodeId]) -> list[NodeId]:
        """Return the nodes that can hold layers of a model, and have no ring of it yet."""
        key = self.keys[number]
        return [
            node
            for node in self._able(number, nodes)
            if key not in map(self._key, self.shares[node])
        ]

    def _firsts(self, number: int) -> list[NodeId]:
        group = self.groups[number].id
        return [node for node, at in self.place.items() if at == group]

    def _free(self, number: int, _taken: list[NodeId], _strict: bool) -> list[NodeId]:
        return self._movable(number, (node for node, at in self.place.items() if at == UNASSIGNED))

    def _unneeded(self, number: int, taken: list[NodeId], strict: bool) -> list[NodeId]:
        """Return the nodes without which their groups are complete, standbys first."""
        used = {stage.node for plan in self.plans.values() for stage in plan.stages}
        found = [
            node
            for other in range(len(self.groups))
            if other != number
            for node in self._spare(other, taken, strict=strict)
        ]
        able = self._movable(number, found)
        return [node for node in able if node not in used] or able

    def _spare(self, number: int, taken: list[NodeId], *, strict: bool) -> Iterator[NodeId]:
        nodes = [node for node in self.nodes(number) if node not in taken]
        for node in [each for each in self._firsts(number) if each not in taken]:
            if self.is_complete(number, (each for each in nodes if each != node), strict=strict):
                yield node

    def _incomplete(self, number: int, taken: list[NodeId], _strict: bool) -> list[NodeId]:
        """Return the nodes of later groups that are not complete."""
        return self._movable(
            number,
            (
                node
                for other in range(number + 1, len(self.groups))
                if not self.is_complete(
                    other, (each for each in self.nodes(other) if each not in taken), strict=False
                )
                for node in self._firsts(other)
            ),
        )

    def _replicas(self, number: int, taken: list[NodeId], _strict: bool) -> list[NodeId]:
        """Return the nodes of the last replica from which this group may take more."""
        replica = self.groups[number].replica
        for other in range(len(self.groups) - 1, number, -1):
            if self.groups[other].replica > replica:
                able = self._movable(number, self._firsts(other))
                if found := [node for node in able if node not in taken]:
                    return found
        return []

    def _unused(self, number: int, taken: list[NodeId], _strict: bool) -> list[NodeId]:
        """Return the nodes of the last ring of a model that nobody uses, for one that is used."""
        group = self.groups[number]
        if group.replica or self.keys[number] not in self.used:
            return []
        for other in range(len(self.groups) - 1, -1, -1):
            if self.keys[other] not in self.used:
                able = self._movable(number, self._firsts(other))
                if found := [node for node in able if node not in taken]:
                    return found
        return []

    def place_rest(self) -> None:
        """Let nodes without a group take part in the group that is served worst."""
        for node in [each for each, at in self.place.items() if at == UNASSIGNED]:
            able = [each for each in range(len(self.groups)) if self.room(node, each)[0] > 0]
            if able:
                self.place[node] = self.groups[min(able, key=self._service)].id

    def _service(self, number: int) -> tuple[bool, int, int]:
        """Return how well a group is served: whole millionths of the room that it needs."""
        rooms = sum(self.room(node, number)[0] for node in self.nodes(number))
        layers = self.groups[number].charter.shape.layers
        return self.groups[number].replica > 0, 10**6 * rooms // layers, number


def is_exact(charter: Charter, plan: Plan, profiles: Mapping[NodeId, Profile]) -> bool:
    """Return whether all nodes of a ring compute each token bit-identically to transformers."""
    known = (profiles.get(stage.node) for stage in plan.stages)
    is_plain = charter.quant is Quant.NONE
    return is_plain and all(profile is not None and profile.is_exact for profile in known)


def holds(profile: Profile, charter: Charter) -> bool:
    """Return whether a node has a model locally."""
    return _has(profile, charter.key, charter)


def _has(profile: Profile, key: ModelKey, charter: Charter) -> bool:
    if profile.models:
        return key in profile.models
    config = charter.config_digest[:DIGEST_PART_BYTES]
    return bool(profile.weights) and profile.weights[-1] == config


def _id(charter: Charter, replica: int, *, is_first: bool) -> GroupId:
    return FIRST_GROUP if is_first and not replica else GroupId(charter.key + bytes([replica]))


def _can_take_part(view: MeshView, node: NodeId) -> bool:
    profile, state = view.profiles.get(node), view.states.get(node)
    if profile is None or state is None or state.lifecycle not in _PRESENT:
        return False
    return not state.obstacle or awaits_weights(state)
