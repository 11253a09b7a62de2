"""Removals, in any order and over any partition: none is undone, and none shuts out the founder."""

from collections import deque
from collections.abc import Iterator
from itertools import combinations

import pytest
from blake3 import blake3
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from meshllm.names import NodeId
from meshllm.protocol.membership import record_store
from meshllm.protocol.membership.actions import Action, Drop, SendToPeer
from meshllm.protocol.membership.codec import CloseReason, Message
from meshllm.protocol.membership.mesh import Mesh
from meshllm.protocol.membership.records import Profile, StateRecord
from meshllm.protocol.trust.credential import (
    Credential,
    Removals,
    Role,
    founder_credential,
    issue,
    remove,
)
from meshllm.protocol.trust.identity import NodeKey
from tests.builders.identities import WALL
from tests.property import strategies

pytestmark = pytest.mark.property
_ = strategies.nodes  # their module loads the profile of hypothesis
MOST = 5  # members
FEW = settings(
    max_examples=40,
    stateful_step_count=20,
    phases=[Phase.generate, Phase.shrink],
)
places = st.integers(0, MOST - 1)
groups = st.lists(st.integers(0, 2), min_size=MOST, max_size=MOST)


class Members(RuleBasedStateMachine):
    """Members that invite and remove each other, linked within their part of the network."""

    @initialize()
    def founding(self) -> None:
        """Found a mesh."""
        self.now = 0.0
        self.keys: list[NodeKey] = []
        self.shown: dict[NodeId, Credential] = {}
        self.meshes: dict[NodeId, Mesh] = {}
        self.group = [0] * MOST
        self.founders: set[NodeId] = set()
        """The keys that the founder removed."""
        key = self._key()
        self._add(key, founder_credential(key, bytes(16)))

    @precondition(lambda self: len(self.keys) < MOST)
    @rule(by=places, role=st.sampled_from([Role.NODE, Role.NODE, Role.NODE, Role.CLIENT]))
    def invite(self, by: int, role: Role) -> None:
        """Let anyone invite, removed or not."""
        host = self.keys[by % len(self.keys)]
        if self.shown[host.node].role is Role.CLIENT:
            return
        key = self._key()
        self._add(key, issue(host, self.shown[host.node], key.node, role))

    @rule(by=places, of=places, spared=st.sets(places, max_size=2))
    def remove(self, by: int, of: int, spared: set[int]) -> None:
        """Let anyone remove anyone, removed or not; all who can be reached hear of it."""
        author, node = self.keys[by % len(self.keys)], self.keys[of % len(self.keys)].node
        if self.shown[author.node].role is Role.CLIENT:
            return
        kept = tuple(sorted(self.keys[each % len(self.keys)].node for each in spared))
        if author is self.keys[0] and node != author.node:
            self.founders.add(node)
        mesh = next(iter(self.shown.values())).mesh
        signed = remove(author, mesh, node, int(self.now), kept)
        self._carry(author.node, self.meshes[author.node].remove(signed, self.now))

    @rule(group=groups)
    def part(self, group: list[int]) -> None:
        """Split the network, or join it again."""
        self.group = group
        for one, other in self._links():
            if self._side(one) != self._side(other):
                self._cut(one, other)
        for one, other in combinations(self.meshes, 2):
            self._link(one, other)

    @invariant()
    def no_removed_member_is_linked(self) -> None:
        """Check every link and every attempt at one."""
        for node, mesh in self.meshes.items():
            for key in self.keys:
                if is_covered(self.shown[key.node], key.node, mesh.removals):
                    assert key.node not in mesh.links
                    assert is_refused(mesh, key.node, self.shown[key.node], self.now), node.hex()
            assert self.keys[0].node not in mesh.removals

    @invariant()
    def the_founder_is_heard(self) -> None:
        """Check that the founder's removals are in force where it is linked."""
        founder = self.keys[0].node
        for peer in (founder, *self.meshes[founder].links):
            known = self.meshes[peer].removals
            assert self.founders <= known.keys()
            assert {known[node].issuer for node in self.founders} <= {founder}

    def teardown(self) -> None:
        """Heal the network: all that remain agree on who was removed, and by whom."""
        if not self.keys:
            return
        self.part([0] * MOST)
        founder = self.meshes[self.keys[0].node]
        for peer in founder.links:
            known = dict(self.meshes[peer].removals)
            assert known.keys() >= self.founders
            if self.is_within_quotas and self.shown[peer].role is Role.NODE:
                assert known == dict(founder.removals)
            elif self.is_within_quotas:  # it may know more: what a part told it that is out now
                assert known.keys() >= founder.removals.keys()

    is_within_quotas = True

    def _key(self) -> NodeKey:
        key = NodeKey(blake3(b"member %d" % len(self.keys)).digest())
        self.keys.append(key)
        return key

    def _add(self, key: NodeKey, credential: Credential) -> None:
        mesh = Mesh(key, credential, 1, now=self.now, wall_s=WALL)
        self.shown[key.node], self.meshes[key.node] = credential, mesh
        if credential.role is Role.NODE:
            mesh.publish(profile=Profile("n", "1", (), 0), state=StateRecord(), now=self.now)
        for other in list(self.meshes):
            self._link(other, key.node)

    def _side(self, node: NodeId) -> int:
        return self.group[next(at for at, key in enumerate(self.keys) if key.node == node)]

    def _links(self) -> Iterator[tuple[NodeId, NodeId]]:
        return iter([(node, peer) for node, mesh in self.meshes.items() for peer in mesh.links])

    def _link(self, one: NodeId, other: NodeId) -> None:
        """Link two members that reach each other, unless one refuses."""
        self.now += 0.01
        roles = {self.shown[each].role for each in (one, other)}
        is_linked = other in self.meshes[one].links
        if (
            one == other
            or is_linked
            or self._side(one) != self._side(other)
            or roles == {Role.CLIENT}
        ):
            return
        sides = [(one, other, True), (other, one, False)]
        said = {
            node: self.meshes[node].linked(
                peer, 1, self.shown[peer], dialled=is_dialler, now=self.now
            )
            for node, peer, is_dialler in sides
        }
        if any(
            isinstance(action, Drop) and action.is_newcomer for at in said.values() for action in at
        ):
            self._cut(one, other)
            return
        for node, actions in said.items():
            self._carry(node, actions)

    def _cut(self, one: NodeId, other: NodeId) -> None:
        self.meshes[one].unlinked(other, self.now)
        self.meshes[other].unlinked(one, self.now)

    def _carry(self, node: NodeId, actions: list[Action]) -> None:
        """Deliver what a member sends, and what others send in answer."""
        queue = deque[tuple[NodeId, NodeId, Message]]()
        self._act(node, actions, queue)
        while queue:
            sender, to, message = queue.popleft()
            if to in self.meshes[sender].links or sender in self.meshes[to].links:
                self._act(to, self.meshes[to].receive(sender, message, self.now), queue)

    def _act(
        self, node: NodeId, actions: list[Action], queue: deque[tuple[NodeId, NodeId, Message]]
    ) -> None:
        for action in actions:
            match action:
                case SendToPeer(peer, message):
                    queue.append((node, peer, message))
                case Drop(peer, why):
                    assert why is CloseReason.REMOVED, action
                    self.meshes[peer].unlinked(node, self.now)
                case _:
                    pass


def is_covered(credential: Credential, node: NodeId, removals: Removals) -> bool:
    """Return whether a removal is of a member, or of one of its inviters and does not spare it."""
    through = ((each.issuer, each.subject) for each in credential.chain)
    return node in removals or any(
        issuer in removals and subject not in removals[issuer].spared for issuer, subject in through
    )


def is_refused(mesh: Mesh, node: NodeId, credential: Credential, now: float) -> bool:
    actions = mesh.linked(node, 2, credential, dialled=False, now=now)
    return actions == [Drop(node, CloseReason.REMOVED, is_newcomer=True)]


class Crowded(Members):
    """The same with room for few removals, which are used up."""

    is_within_quotas = False


def test_no_removal_is_undone_in_any_order_and_over_any_partition() -> None:
    run_state_machine_as_test(Members, settings=FEW)


def test_no_quota_shuts_out_the_founder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_store, "MAX_REMOVALS", MOST + 2)
    monkeypatch.setattr(record_store, "FOUNDER_REMOVALS", MOST)
    monkeypatch.setattr(record_store, "BRANCH_REMOVALS", 1)

    run_state_machine_as_test(Crowded, settings=FEW)
