"""Meshes of several models whose nodes take part in several rings; they do what the records say."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random

from meshllm.names import FIRST_GROUP, Digest, GroupId, ModelKey, NodeId
from meshllm.protocol.agreement.agreement import Agreement, agree
from meshllm.protocol.agreement.candidates import MeshView
from meshllm.protocol.agreement.grouping import group_nodes, ring_of
from meshllm.protocol.agreement.groups import UNASSIGNED, NodeGroups, groups_of
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.records import (
    DIGEST_PART_BYTES,
    ENDS,
    MAX_RINGS,
    Lifecycle,
    Profile,
    RingMembership,
    RingShare,
    StateRecord,
)
from meshllm.protocol.planning.plan import ModelSizes, Plan
from meshllm.protocol.planning.problem import memory_for
from meshllm.protocol.session.messages import DType
from meshllm.protocol.weights.holders import ABSENT, FETCHES

NODES = tuple(NodeId(bytes([number + 1]) * 32) for number in range(5))
MAX_ROUNDS = 40  # until nothing changes: a few for each group
ACTS = 0.8  # share of the nodes in a round
MAX_TURNS = 200  # rounds in which each node acts or waits
LAYER_S = 0.01


@dataclass
class SharedMesh:
    """Nodes that do at once what the records say; one round is one exchange of records.

    With ``turns`` they act one after the other, or not in this round, and publish a share later
    than the ring for which it is.
    """

    charter: Charter
    memory: dict[NodeId, int]
    used: tuple[ModelKey, ...] = ()
    parts: dict[NodeId, NodeGroups] = field(default_factory=dict)
    followed: dict[tuple[NodeId, GroupId], Plan] = field(default_factory=dict)
    plans: dict[GroupId, Plan] = field(default_factory=dict)
    layer_s: dict[NodeId, float] = field(default_factory=dict)
    """Seconds of a layer on nodes that are faster or slower than the others."""
    bare: set[NodeId] = field(default_factory=set)
    """Nodes that have no weights yet: they fetch them."""
    unmeasured: set[NodeId] = field(default_factory=set)
    """Nodes that have published no speed of their layers."""
    turns: Random | None = None
    hidden: set[tuple[NodeId, GroupId]] = field(default_factory=set)
    """Shares that are not published yet."""
    _agreed: dict[GroupId, Agreement] = field(default_factory=dict)

    def view(self, group: GroupId = FIRST_GROUP) -> MeshView:
        states = {node: self._state(node) for node in self.memory}
        profiles = {node: self._profile(node) for node in self.memory}
        me = min(self.memory)
        return MeshView(me, self.charter, min(NODES), profiles, states, (), group)

    def settle(self) -> None:
        """Exchange records until nothing changes."""
        most = MAX_TURNS if self.turns else MAX_ROUNDS
        for _ in range(most):
            before = dict(self.parts), dict(self.followed), set(self.hidden)
            is_whole = self._act()
            for group in groups_of(self.charter):
                self._follow(group.id)
                self.check()
            if (self.parts, self.followed, self.hidden) == before and is_whole:
                return
        raise AssertionError(f"something changes after {most} rounds")

    def _act(self) -> bool:
        """Let nodes do what the records say; return whether all did."""
        view = self.view()
        parts = dict(group_nodes(view))
        assert group_nodes(replace(view, me=max(self.memory))) == parts  # the same on every node
        if self.turns is None:
            self.parts = parts
            self._forget()
            self.check()
            return True
        acting = [node for node in self.memory if self.turns.random() < ACTS]
        self.turns.shuffle(acting)
        for node in acting:
            part = group_nodes(self.view()).get(node, NodeGroups(UNASSIGNED))
            begun = part.further.keys() - self._part(node).further.keys()
            self.hidden = {each for each in self.hidden if each[0] != node}
            self.hidden |= {(node, group) for group in begun}
            self.parts[node] = part
            self._forget()
            self.check()
        return len(acting) == len(self.memory)

    def _forget(self) -> None:
        """Forget the plans of rings that nodes have left."""
        self.followed = {
            (node, group): plan
            for (node, group), plan in self.followed.items()
            if group in _groups(self._part(node))
        }

    def join(self, node: NodeId, memory: int) -> None:
        self.memory[node] = memory

    def lose(self, node: NodeId) -> None:
        del self.memory[node]
        self.parts.pop(node, None)
        self.followed = {at: plan for at, plan in self.followed.items() if at[0] != node}

    def end_idle_shares(self) -> None:
        """End the shares of groups that are not served."""
        served = self.served()
        for node, part in self.parts.items():
            further = {group: size for group, size in part.further.items() if group in served}
            self.parts[node] = replace(part, further=further)
            for group in part.further.keys() - served:
                self.followed.pop((node, group), None)

    def check(self) -> None:
        """No node has planned more than it offers; records of this kind are taken."""
        charters = {group.id: group.charter for group in groups_of(self.charter)}
        for node, part in self.parts.items():
            further = part.further.items()  # those not published yet are sized again when they are
            shares = {each: size for each, size in further if (node, each) not in self.hidden}
            rest = self.memory[node] - sum(shares.values())
            assert rest >= 0
            assert len(part.further) < MAX_RINGS
            for group, room in {part.first: rest, **shares}.items():
                plan = self.followed.get((node, group))
                if plan and plan == self.plans.get(group):
                    shape, sessions = charters[group].shape, charters[group].sessions
                    reserve = 0 if group == part.first else shape.workspace_bytes
                    needed = memory_for(plan, node, shape, sessions=sessions, reserve=reserve)
                    assert needed <= room, f"{needed} of {room} bytes"
            profile, state = self._profile(node), self._state(node)
            assert Profile.decode(profile.encode()) == profile
            assert StateRecord.decode(state.encode()) == state

        self._check_replicas()

    def _check_replicas(self) -> None:
        """No replica is made of nodes of others alone, and a model has one ring of each entry."""
        earlier: dict[ModelKey, set[NodeId]] = {}
        entries = set[tuple[ModelKey, NodeId]]()
        for group in groups_of(self.charter):
            key, plan = group.charter.key, self.plans.get(group.id)
            before = earlier.setdefault(key, set())
            here = {node for node, part in self.parts.items() if group.id in _groups(part)}
            if plan is not None and group.id in self.served():
                entry = plan.stages[0].node
                assert entry not in before
                assert (key, entry) not in entries
                entries.add((key, entry))
            before |= here

    def served(self) -> set[GroupId]:
        """Return the groups whose rings work."""
        here = {(node, group) for node, part in self.parts.items() for group in _groups(part)}
        return {
            group
            for group, plan in self.plans.items()
            if all((stage.node, group) in here for stage in plan.stages)
        }

    def sharing(self) -> set[GroupId]:
        """Return the served groups that share nodes with an earlier replica."""
        found, charter = set[GroupId](), self.charter
        keys = {group.id: group.charter.key for group in groups_of(charter)}
        for part in self.parts.values():
            own = [each for each in keys if each in _groups(part)]
            found |= {each for each in own if keys[each] in map(keys.get, own[: own.index(each)])}
        return found & self.served()

    def _follow(self, group: GroupId) -> None:
        ring = ring_of(self.view(group))
        assert ring is not None
        self._agreed[group] = agreement = agree(ring, self._agreed.get(group))
        plan = agreement.plan
        self.plans.pop(group, None)
        if plan is not None:
            self.plans[group] = plan
        for node, part in self.parts.items():
            if plan is not None and group in _groups(part):
                self.followed[node, group] = plan

    def _part(self, node: NodeId) -> NodeGroups:
        return self.parts.get(node, NodeGroups(UNASSIGNED))

    def _profile(self, node: NodeId) -> Profile:
        layer_s = ((1, self.layer_s.get(node, LAYER_S)),)
        part, charters = self._part(node), {at.id: at.charter for at in groups_of(self.charter)}
        first = charters.get(part.first) if node not in self.unmeasured else None
        return Profile(
            "n", "1", (), self.memory[node],
            layer_s if first else (),
            model=first.shape.name if first else "",
            weights=self._weights(node, first) if first else (),
            models=tuple(each.key for each in self.charter.served),
            shares=tuple(
                RingShare(group, size, layer_s, 0.0, at.shape.name, self._weights(node, at))
                for group, size in sorted(part.further.items())
                if (node, group) not in self.hidden
                for at in (charters.get(group, self.charter),)
            ),
        )  # fmt: skip

    def _state(self, node: NodeId) -> StateRecord:
        part = self._part(node)
        own, *further = (
            RingMembership(group, plan.encode() if plan else b"", is_loaded=plan is not None)
            for group in (part.first, *sorted(part.further))
            for plan in (self.followed.get((node, group)),)
        )
        links = tuple((peer, 1000) for peer in self.memory if peer != node)
        return StateRecord(
            Lifecycle.SERVING, links, own.followed, own.is_loaded,
            obstacle=FETCHES if node in self.bare else "",
            group=own.group, used=self.used, further=tuple(further),
        )  # fmt: skip

    def _weights(self, node: NodeId, charter: Charter) -> tuple[bytes, ...]:
        config = charter.config_digest[:DIGEST_PART_BYTES]
        parts = charter.shape.layers + ENDS - 1
        return *((ABSENT if node in self.bare else config,) * parts), config


def _groups(part: NodeGroups) -> tuple[GroupId, ...]:
    return part.first, *part.further


def served_model(
    number: int,
    layers: int,
    replicas: int = 1,
    members: int | None = None,
    workspace: int = 0,
) -> Charter:
    """Describe a model of layers of 80 bytes, which take 100 of memory."""
    sizes = ModelSizes(
        f"m{number}", (80,) * layers, (0,) * layers, 8, 0,
        tied=False, hidden_size=1, itemsize=4, context=1, workspace_bytes=workspace,
    )  # fmt: skip
    return Charter(
        1,
        sizes,
        DType.FLOAT32,
        Digest(bytes([number + 1]) * 32),
        members=members,
        replicas=replicas,
    )


def shared_mesh(memory: Mapping[int, int], *models: Charter) -> SharedMesh:
    """Make a mesh of nodes with some memory, by number."""
    first, *others = models
    charter = replace(first, models=tuple(sorted(others, key=lambda each: each.key)))
    return SharedMesh(charter, {NODES[number]: size for number, size in memory.items()})
