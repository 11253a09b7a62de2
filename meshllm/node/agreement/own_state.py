"""The state record of this node: what it publishes of itself and of each of its rings.

Theory of operation
-------------------
In a mesh of several rings a node takes part in that of its group, and in further ones with the
memory that this leaves: a `RingMember` for each. One record tells of all of them, whether the node
is about to leave, what keeps it from work, and which neighbours it leaves out. It also tells which
models were asked for here within `--keep`, so that a model that nobody uses makes room for one that
somebody asks for, see `grouping`.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from meshllm.names import GroupId, LossCause, NodeId
from meshllm.node.agreement.model_use import ModelUse
from meshllm.node.agreement.ring_member import RingMember
from meshllm.node.net.mesh_link import MeshLinks
from meshllm.node.provider import Provider
from meshllm.node.timer import CallLater, loop_time
from meshllm.protocol.agreement.groups import REFUSES
from meshllm.protocol.membership.mesh import Mesh
from meshllm.protocol.membership.peer_limit import FAULTS_S, MAX_FAULTS, PeerLimit
from meshllm.protocol.membership.records import (
    MAX_RINGS,
    Lifecycle,
    RingMembership,
    StateRecord,
)

if TYPE_CHECKING:  # a provider holds no layers, and imports no torch
    from meshllm.model.steps.runner import Runner
    from meshllm.node.session.entry import EntryNode
    from meshllm.node.session.stage import StageNode

PROVIDES = "it provides whole models"  # why it holds no layers
HANGS = "its compute thread hangs"
_EARLY_S = 1.0  # more than the rounding error by which a timer may be early


def provides(trouble: str) -> str:
    """Return the obstacle of a provider; ``trouble`` is why its engine does not serve, or empty."""
    return f"{PROVIDES}; {trouble}" if trouble else PROVIDES


def trouble_of(state: StateRecord) -> str | None:
    """Return why the engine of a provider does not serve, or empty; None for another node."""
    what, _, trouble = state.obstacle.partition("; ")
    return trouble if what == PROVIDES else None


class OwnState:
    """This node in its rings, as it publishes it."""

    def __init__(
        self,
        machine: Mesh,
        links: MeshLinks,
        plan_reason: Callable[[], str],
        call_later: CallLater,
        failed: Callable[[], None],
        *,
        keep_s: float,
    ) -> None:
        """Take part in the first ring; a model counts as used for ``keep_s`` after a request.

        ``failed`` is called when a member cannot load its span.
        """
        self.provider: Provider | None = None
        """Instead of layers, this node provides whole models."""
        self.is_hung = False
        """Whether the compute thread of this node does not respond."""
        self.is_leaving = False
        """Whether this node tells the others to make a plan without it."""
        self.has_left = False
        """Whether this node has stopped publishing."""
        self.failed = failed
        """Called when a member cannot load its span, see `MemberHost`."""
        self.news = asyncio.Event()
        """Set at the next change that may matter; another one from then on."""
        self.use = ModelUse(machine, keep_s, self.publish, call_later)
        self.first = RingMember(machine, links, self, plan_reason, call_later)
        """This node in its first ring."""
        self.further: dict[GroupId, RingMember] = {}
        """This node in further rings."""
        self.refused: set[GroupId] = set()
        """Further rings that this node could not serve a moment ago."""
        self._ended = Counter[LossCause]()  # `recomputed` of further rings that have ended
        self._machine = machine
        self._links = links
        self._call_later = call_later
        self._published = StateRecord()
        self._faults = PeerLimit(MAX_FAULTS, FAULTS_S)

    @property
    def members(self) -> list[RingMember]:
        """This node in each of its rings."""
        return [self.first, *self.further.values()]

    @property
    def held(self) -> "Collection[Runner]":
        """Runners of all that this node has loaded, in advance too."""
        return [each for at in self.members if at.model for each in at.model.runners]

    @property
    def ranks(self) -> "list[EntryNode | StageNode]":
        """The running entries and stages of all rings of this node."""
        return [each.rank for each in self.members if each.rank]

    @property
    def received_bytes(self) -> int:
        """Memory of KV caches that are handed over to this node, of all rings."""
        return sum(at.runtime.received_bytes for at in self.members if at.runtime)

    @property
    def sessions(self) -> int:
        """The number of running sessions on the ranks of this node, and of its provider."""
        provided = self.provider.active if self.provider else 0
        return provided + sum(at.runtime.sessions for at in self.members if at.runtime)

    @property
    def recomputed(self) -> Counter[LossCause]:
        """Rows computed again on this node after losses, times the layers that computed them."""
        return sum((each.recomputed for each in self.members), self._ended)

    def end_further(self, group: GroupId) -> RingMember:
        """Take part in a further ring no longer; what it has counted stays counted."""
        member = self.further.pop(group)
        self._ended += member.recomputed
        return member

    def begin_further(self, group: GroupId, plan_reason: Callable[[], str]) -> RingMember:
        """Take part in a further ring, too."""
        member = RingMember(self._machine, self._links, self, plan_reason, self._call_later, group)
        self.further[group] = member
        return member

    def publish(self) -> None:
        """Publish the state record if it changed; wake the waiters for a change."""
        if self.has_left:
            return
        own, *others = [each.membership() for each in self.members]
        refused = [RingMembership(group, obstacle=REFUSES) for group in sorted(self.refused)]
        others += refused[: MAX_RINGS - 1 - len(others)]
        further = {each.group: each for each in reversed(others) if each.group != own.group}
        obstacle = HANGS if self.is_hung else ""
        if self.provider:
            obstacle = provides(self.provider.trouble)
        state = StateRecord(
            lifecycle=self._lifecycle(),
            followed=own.followed,
            is_loaded=own.is_loaded,
            may_change=own.may_change,
            obstacle=obstacle or own.obstacle,
            faulty=self._faults.excluded(loop_time()),
            offers=self.provider.offers if self.provider else (),
            group=own.group,
            used=self.use.used,
            prepared=own.prepared,
            further=tuple(
                each
                if each.obstacle == REFUSES
                else replace(each, obstacle=obstacle or each.obstacle)
                for _, each in sorted(further.items())
            ),
        )
        if state != self._published:
            self._published = state
            self._links.act(self._machine.publish(state=state, now=loop_time()))
        for each in self.members:
            each.check_formed()
        news, self.news = self.news, asyncio.Event()
        news.set()

    async def changes(self) -> AsyncGenerator[None, None]:
        """Yield once at first, then after each possible change."""
        while True:
            news = self.news
            yield
            await news.wait()

    def record_fault(self, node: NodeId) -> bool:
        """Count a fault of a neighbour; after several it is left out for a while.

        Return whether it counts: not if the neighbour is left out already, however much it sends
        until its ring has ended.
        """
        now = loop_time()
        if self._faults.is_excluded(node, now):
            return False
        self._faults.record(node, now)
        self._publish_faults()
        return True

    def exclude(self, node: NodeId) -> None:
        """Leave a neighbour out for a while."""
        self._faults.exclude(node, loop_time())
        self._publish_faults()

    def _publish_faults(self) -> None:
        """Publish them now, and again when they are forgiven."""
        self.publish()
        self._call_later(FAULTS_S + _EARLY_S, self.publish)

    def _lifecycle(self) -> Lifecycle:
        if self.is_leaving:
            return Lifecycle.LEAVING
        is_serving = self.provider.offers if self.provider else self.first.runtime
        return Lifecycle.SERVING if is_serving else Lifecycle.JOIN
