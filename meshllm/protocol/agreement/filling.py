"""Filling groups: they take nodes and shares until they are complete, see `grouping`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshllm.names import GroupId, NodeId
from meshllm.protocol.agreement import donors
from meshllm.protocol.agreement.donors import NodeSources
from meshllm.protocol.agreement.group_table import GroupTable
from meshllm.protocol.agreement.groups import REFUSES, UNASSIGNED
from meshllm.protocol.agreement.replica_gain import is_worth, rings_beside
from meshllm.protocol.agreement.throughput import loads
from meshllm.protocol.membership.records import MAX_RINGS
from meshllm.protocol.planning.problem import HEADROOM_PERCENT


@dataclass(slots=True)
class GroupAssigner(GroupTable):
    """A table whose groups take nodes and shares."""

    def fill(self, number: int, *, strict: bool) -> None:
        """Complete a group with nodes that it may take; take none if they do not suffice."""
        if self.is_complete(number, self.nodes(number), strict=strict):
            self._replace_shares(number)
            return
        moves = donors.free, donors.unneeded, donors.incomplete
        if any(self._move(number, find, strict=strict) for find in moves):
            return
        if self._join(number, strict=strict) or self._join_instead(number, strict=strict) or strict:
            return
        later = donors.replicas, donors.unused
        if any(self._move(number, find, strict=False) for find in later):
            return
        if not self._move_instead(number, (*moves, *later)):
            self._move_and_join(number)

    def _move(
        self,
        number: int,
        find: NodeSources,
        *,
        strict: bool,
    ) -> bool:
        """Complete a group with nodes of these donors; return whether that is possible."""
        nodes, taken = self.nodes(number), list[NodeId]()
        while found := [each for each in find(self, number, taken, strict) if each not in taken]:
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

    def end_shares(self) -> None:
        """End the shares that their groups do not need, those that no ring uses first."""
        known = [(node, group) for node, shares in self.shares.items() for group in shares]
        for node, group in sorted(known, key=lambda share: (self.is_used(*share), *share)):
            number = self.numbers[group]
            is_own, is_used = self.is_own(node, number), self.is_used(node, group)
            others = [each for each in self.nodes(number) if each != node]
            is_over = self.is_complete(number, others, strict=is_own) and not (is_used and is_own)
            if is_over or not (is_own or self.has_own(number)):
                self._end_share(node, group)

    def _end_share(self, node: NodeId, group: GroupId) -> None:
        """End a share; if a ring works with it, once a plan without it is in force."""
        size, number = self.shares[node].pop(group), self.numbers[group]
        kept = (each for each, shares in self.ending.items() if group in shares)
        if self.is_used(node, group) and self.is_served(number, [*self.nodes(number), *kept, node]):
            self.ending.setdefault(node, {})[group] = size

    def _join(self, number: int, *, strict: bool = False, of_replicas: bool = False) -> bool:
        """Complete a group with shares of nodes; return whether that is possible.

        If asked for, also with shares of nodes in earlier replicas, no larger than necessary.
        """
        group, before = self.groups[number].id, self.copied_shares()
        able = {
            node: self.share(node, number)
            for node in self.place
            if self._may_join(node, number, of_replicas=of_replicas)
        }
        busy = loads(rings_beside(self, number).values()) if of_replicas else {}

        def order(node: NodeId) -> tuple[bool, bool, int, NodeId]:
            is_own = self.is_own(node, number)
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

    def _may_join(self, node: NodeId, number: int, *, of_replicas: bool) -> bool:
        """Return whether a node may have a share in a group, or a larger one than it has."""
        group, shares = self.groups[number], self.shares[node]
        held = [self.place[node], *(each for each in shares if each != group.id)]
        member = self.memberships.get((node, group.id))
        return (
            (member is None or member.obstacle != REFUSES)
            and len({*held, *self.given(node)} - {group.id}) < MAX_RINGS
            and node not in group.charter.exclude
            and self.holds(node, number)
            and UNASSIGNED not in held
            and (not (same := self.of_model(group.id, held)) or of_replicas)
            and (not same or self._may_share(node, group.id, same))
            and all(self._serves(node, each) for each in held)
            and self.share(node, number) > shares.get(group.id, 0)
        )

    def _may_share(self, node: NodeId, group: GroupId, others: Sequence[GroupId]) -> bool:
        """Return whether a group may have a share of a node in others; unless used, it may move."""
        is_used = any(self.is_used(node, each) for each in others)
        is_measured = self.offer(node, self.numbers[group]) is not None
        is_free = is_measured and not self._is_busy(node, group)
        return is_used and is_free and self.is_last(group, others)

    def _is_busy(self, node: NodeId, group: GroupId) -> bool:
        """Return whether a node serves a model in use while that of a group is not used."""
        rings = (at for at in self.plans if at in self.numbers and self.key(at) in self.used)
        is_asked = self.key(group) in self.used
        return not is_asked and any(self.is_used(node, at) for at in rings)

    def _serves(self, node: NodeId, group: GroupId) -> bool:
        """Return whether a ring is whole, and needs no more of a node than it has."""
        number, plan, member = (
            self.numbers[group],
            self.plans.get(group),
            self.memberships.get((node, group)),
        )
        if plan is None or member is None or not self.is_served(number, self.nodes(number)):
            return False
        return plan.rank(node) is None or (member.is_loaded and member.followed == plan.encode())

    def _needed_share(self, node: NodeId, number: int) -> int:
        """Return the most bytes of a share: for a replica of a node's model what the others lack.

        The less such a node computes in one ring, the more it can in the other.
        """
        if self.is_own(node, number):
            return self.sizes[number].whole
        sizes, others = self.sizes[number], [each for each in self.nodes(number) if each != node]
        lacking = max(1, self.lack(number, others))
        needed = sizes.cache + lacking * sizes.layer
        return sizes.workspace - (-needed * 100 // (100 - HEADROOM_PERCENT))  # rounded up

    def _join_instead(self, number: int, *, strict: bool) -> bool:
        """Complete a group with shares in place of those of groups that yield to it.

        For more nodes than it needs, only groups that are not complete yield.
        """
        before, plans = self.copied_shares(), dict(self.plans)
        shared = [
            (node, other)
            for other in range(len(self.groups) - 1, -1, -1)
            for node in self.nodes(other)
            if other != number and self.groups[other].id in self.shares[node]
        ]
        over = [] if strict else [share for share in shared if self.is_dispensable(*share)]
        yielding = [
            (node, other)
            for node, other in shared
            if self._yields(other, number) and not (strict and self.is_filled(other))
        ]
        for node, other in dict.fromkeys((*over, *yielding)):
            del self.shares[node][self.groups[other].id]
            self._stop_rings(before)
            is_complete = self.is_complete(number, self.nodes(number), strict=strict)
            if is_complete or self._join(number, strict=strict):
                return True
        self.shares, self.plans = before, plans
        return False

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

    def _move_instead(self, number: int, moves: Iterable[NodeSources]) -> bool:
        """Complete a group with nodes that end their shares in groups that yield to it.

        Return whether nodes have moved.
        """
        before, places, plans = self.copied_shares(), dict(self.place), dict(self.plans)
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
            any(self._move(number, find, strict=False) for find in moves)
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
                if self.is_used(node, group):
                    del self.plans[group]

    def _restore(self, node: NodeId, shares: dict[GroupId, int]) -> None:
        """Give a node its shares again, unless its first ring needs their memory by now.

        That ring may have given nodes away for it.
        """
        first, ended = self.numbers[self.place[node]], self.shares[node]
        was_filled, self.shares[node] = self.is_filled(first), shares
        if was_filled and not self.is_filled(first):
            self.shares[node] = ended

    def _replace_shares(self, number: int) -> None:
        """Complete a group with nodes that no ring uses, in place of shares of earlier replicas."""
        before, group = self.copied_shares(), self.groups[number].id
        ending = {node: dict(shares) for node, shares in self.ending.items()}
        shared = [
            node
            for node, shares in before.items()
            if group in shares and not self.is_own(node, number)
        ]
        for node in shared:
            self._end_share(node, group)
        if shared and not self._move(number, donors.left_over, strict=False):
            self.shares, self.ending = before, ending

    def _move_and_join(self, number: int) -> None:
        """Complete a group with nodes that no ring uses and shares of others.

        A replica takes shares of nodes in earlier ones only if that is worth it. Each try plans
        several rings, so that it takes twice as many nodes as the one before.
        """
        before, places, taken = self.copied_shares(), dict(self.place), 0
        while not (self._completes(number) and is_worth(self, number)):
            self.shares = {node: dict(shares) for node, shares in before.items()}
            more = sum(self._take_left_over(number) for _ in range(max(1, taken)))
            if not more:
                self.place = places
                return
            taken += more

    def _take_left_over(self, number: int) -> bool:
        """Move the largest node that no ring uses, and that has measured layers of the model."""
        able = donors.left_over(self, number, [], False)
        left = [node for node in able if self.offer(node, number) is not None]
        if left:
            largest = max(left, key=lambda node: (self.room(node, number)[0], node))
            self.place[largest] = self.groups[number].id
        return bool(left)

    def _completes(self, number: int) -> bool:
        """Complete a group with shares of nodes in any ring; return whether that is possible."""
        if not self.has_own(number):
            return False
        is_complete = self.is_complete(number, self.nodes(number), strict=False)
        return is_complete or self._join(number, of_replicas=True)
