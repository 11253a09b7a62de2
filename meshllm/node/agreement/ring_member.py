"""This node in one ring of its mesh: what it follows, has loaded, and serves.

Theory of operation
-------------------
The runtime reports when this node has loaded its span and when it serves. The state records of the
other nodes report the same, each together with the plan that the node follows, since a span loaded
for one plan means nothing for the next. A ring is formed when all its nodes have loaded their
spans, and serves when its links are open. While an entry serves requests it publishes that the plan
must not change, see `PlanHold`.

A neighbour that sends invalid data again and again is published as faulty, and so are a node of the
plan that does not load its span in time, and a neighbour that has and does not link, see
`ModelLoadWatch`. No plan makes the two neighbours again until `FAULTS_S` have passed.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from meshllm.errors import LinkLost, MeshError, UserError
from meshllm.names import FIRST_GROUP, GroupId, LossCause, NodeId
from meshllm.node.agreement.explanation import explain_loss, loading_layers
from meshllm.node.agreement.load_watch import ModelLoadWatch, has_loaded, is_formed
from meshllm.node.agreement.plan_hold import PlanHold
from meshllm.node.net.mesh_link import MeshLinks
from meshllm.node.net.secure import SecureLink
from meshllm.node.node_names import name_of, names_of
from meshllm.node.timer import CallLater
from meshllm.protocol.agreement.agreement import Agreement
from meshllm.protocol.agreement.groups import find_group, groups_in
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.mesh import Mesh
from meshllm.protocol.membership.records import Lifecycle, RingMembership
from meshllm.protocol.planning.chunking import RingTimes, ring_times
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.planning.problem import kv_capacities
from meshllm.protocol.ring.interruption import RecomputedRows
from meshllm.protocol.ring.plan_change import PlanChangeInput

if TYPE_CHECKING:  # a provider holds no layers, and imports no torch
    from meshllm.node.ring.model_runtime import ModelRuntime
    from meshllm.node.ring.runtime import RingRuntime
    from meshllm.node.session.entry import EntryNode
    from meshllm.node.session.stage import StageNode

FORM_S = 20.0  # s until the ring of an entry must serve

logger = logging.getLogger(__name__)


class MemberHost(Protocol):
    """What a member of a ring needs from its node."""

    def publish(self) -> None:
        """Publish the state of this node if it changed."""

    @property
    def news(self) -> asyncio.Event:
        """Set at the next change that may matter; another one from then on."""

    def failed(self) -> None:
        """Retract the offer for a span that cannot be loaded; the state record may not change."""

    def record_fault(self, node: NodeId) -> bool:
        """Count a fault of a neighbour; after several it is left out for a while.

        Return whether it counts: not if it is left out already.
        """

    def exclude(self, node: NodeId) -> None:
        """Leave a neighbour out for a while."""


class RingMember:
    """The place of a node in one ring of the mesh."""

    def __init__(
        self,
        machine: Mesh,
        links: MeshLinks,
        host: MemberHost,
        plan_reason: Callable[[], str],
        call_later: CallLater,
        group: GroupId = FIRST_GROUP,
    ) -> None:
        self.group = group
        """The ring in which this node takes part; see `grouping`."""
        self.model: ModelRuntime | None = None
        self.runtime: RingRuntime | None = None
        self.agreement: Agreement | None = None
        """The latest, with the offers of its nodes."""
        self.obstacle = ""
        """Why this node tells the others not to plan with it yet; empty if they may."""
        self.trouble: MeshError | None = None
        """The error that keeps this node from serving its span."""
        self.failure: MeshError | None = None
        """The same until the offer is retracted for it, also if the plan changes at once."""
        self.hold = PlanHold(host.publish, call_later)
        """Keeps the plan while requests are answered."""
        self._machine = machine
        self._links = links
        self._host = host
        self._plan_reason = plan_reason
        self._followed = b""
        self._loaded: Plan | None = None  # the plan whose span this node holds
        self._rows = RecomputedRows()
        self._watch = ModelLoadWatch(machine, host.exclude, call_later)

    @property
    def plan(self) -> Plan | None:
        """The plan that this node follows, with or without a span."""
        return self.runtime.plan if self.runtime else None

    @property
    def is_loaded(self) -> bool:
        """Whether this node holds its span of the plan that it follows."""
        return self.plan is not None and self._loaded == self.plan

    @property
    def charter(self) -> Charter | None:
        """The charter of the model of its ring; None if that is unknown."""
        whole = self._machine.charter
        group = find_group(whole, self.group) if whole else None
        return group.charter if group else None

    @property
    def rank(self) -> "EntryNode | StageNode | None":
        """The running entry or stage; None while this node does not serve."""
        return (self.runtime.entry or self.runtime.stage) if self.runtime else None

    @property
    def execution(self) -> str:
        """How the model is run here, or which layers are loaded in advance; may be empty."""
        if self.rank and self.model:
            from meshllm.model.steps.execution import describe

            refusal = self.model.refused_gpu
            parts = [
                (each.name, each.execution.instead_of_gpu(refusal)) for each in self.rank.runners
            ]
            return describe(parts, self.rank.draft_execution)
        ahead = self.runtime.preloaded if self.runtime else None
        rank = ahead.rank(self._machine.me) if ahead else None
        if ahead is None or rank is None:
            return ""
        return f"layers {ahead.stages[rank].span} are loaded in advance"

    @property
    def history(self) -> Sequence[tuple[str, float]]:
        """See `RingRuntime.history`."""
        return self.runtime.history if self.runtime else ()

    @property
    def recomputed(self) -> Counter[LossCause]:
        """Rows computed again in this ring after losses, times the layers that computed them."""
        return self._rows.count(self._all_rows)

    @property
    def _all_rows(self) -> int:
        return self.runtime.recomputed if self.runtime else 0

    @property
    def reason(self) -> str:
        """Why the ring does not serve."""
        if self.trouble or self.plan is None:
            return str(self.trouble or self._plan_reason())
        nodes, profiles = [stage.node for stage in self.plan.stages], self._machine.profiles
        if gone := [node for node in nodes if node not in self._machine.alive]:
            return f"{names_of(gone, profiles)} {'is' if len(gone) == 1 else 'are'} gone"
        loading = [node for node in nodes if not has_loaded(self._machine, self.plan, node)]
        unlinked = self.runtime.missing if self.runtime else None
        return loading_layers(len(nodes), loading, unlinked, profiles)

    @property
    def loads_until(self) -> float:
        """Until when nodes of the plan may still load layers, in loop time; 0 if none does."""
        return self._watch.until

    def begin(self, model: "ModelRuntime") -> "RingRuntime":
        """Create the runtime for a model."""
        from meshllm.node.ring.runtime import RingRuntime

        self.model, self.runtime = model, RingRuntime(self._machine.me, model, self, self.group)
        return self.runtime

    def end(self, group: GroupId) -> None:
        """Release the model, after its runtime has ended, and take part in another group."""
        if self.model is not None:
            self.model.release()
        self._rows.end(self._all_rows)
        self.model = self.runtime = self.agreement = self._loaded = None
        self.trouble = self.failure = None
        self._watch.end()
        self.group = group
        self._host.publish()

    def membership(self) -> RingMembership:
        """Return what this node publishes of the ring."""
        if self.runtime and self.plan:  # else keep the last one: the next epoch is to exceed it
            self._followed = self.plan.encode()
            self._watch.begin(self.runtime, self.group)
        prepared = self.runtime.prepared if self.runtime else None
        return RingMembership(
            *(self.group, self._followed, self.is_loaded, self.hold.may_change, self.obstacle),
            prepared.digest if prepared else b"",
        )

    def check_formed(self) -> None:
        """Tell the runtime whether all nodes of its plan have loaded."""
        if self.runtime and self.plan:
            self.runtime.formed(is_formed=is_formed(self._machine, self.plan))

    def plan_change_input(self, plan: Plan | None, settle_s: float) -> PlanChangeInput:
        """Return what is known here about following a plan that was agreed on."""
        machine, followed = self._machine, self.plan
        is_whole = followed is not None and is_formed(machine, followed)
        if followed and followed.rank(machine.me) is not None:
            is_whole &= self.rank is not None
        if plan is None:
            return PlanChangeInput(plan, followed, settle_s, is_whole)
        here = {
            node: machine.states[node].in_ring(self.group)
            for node in machine.alive
            if node in machine.states
        }
        encoded, digest = plan.encode(), plan.digest
        begun = {node for node, state in here.items() if state.followed == encoded}
        prepared = {node for node, state in here.items() if state.prepared == digest} | begun
        others = begun.intersection(stage.node for stage in plan.stages) - {machine.me}
        leaving = self._leaving(followed).intersection(here)
        return PlanChangeInput(plan, followed, settle_s, is_whole, bool(others), prepared, leaving)

    def waits_for_lost(self, agreement: Agreement) -> bool:
        """Return whether there is no plan without nodes that are lost, and the old one may go on.

        The others can still serve it; those that are lost have neither left nor been removed.
        """
        if agreement.plan is not None or self.plan is None or not agreement.has_lost(self.plan):
            return False
        able = {offer.node for offer in agreement.offers}
        return all(
            stage.node in able if stage.node in agreement.alive else self._is_lost(stage.node)
            for stage in self.plan.stages
        )

    def _is_lost(self, node: NodeId) -> bool:
        machine, state = self._machine, self._machine.states.get(node)
        has_left = state is not None and state.lifecycle is Lifecycle.LEFT
        # One that has just come back is not in the agreement yet.
        is_elsewhere = node in machine.alive and state and self.group not in groups_in(state)
        return node in machine.profiles and not (has_left or is_elsewhere)

    def _leaving(self, plan: Plan | None) -> set[NodeId]:
        """Return the nodes of a plan that leave, and can hand over their KV caches."""
        if plan is None or self.agreement is None:
            return set()
        nodes = self.agreement.leaving.intersection(stage.node for stage in plan.stages)
        states = self._machine.states
        return {node for node in nodes if node in states and not states[node].obstacle}

    def serving_entry(self) -> NodeId | None:
        """Return the entry of the ring if the ring serves, as far as known here; else None."""
        if self.runtime is None or self.plan is None:
            return None
        entry = self.plan.stages[0].node
        if entry == self._machine.me:
            return entry if self.runtime.entry else None
        is_linked = entry in self._links.by_peer
        return entry if is_linked and is_formed(self._machine, self.plan) else None

    async def serving(self) -> "tuple[EntryNode, Plan, ModelRuntime]":
        """Wait until the ring of which this node is the entry serves, at most `FORM_S`.

        Raises:
            LinkLost: this node is not the entry, or its ring did not form.
        """
        try:
            async with asyncio.timeout(FORM_S):
                while (plan := self.plan) and plan.stages[0].node == self._machine.me:
                    news = self._host.news
                    if self.model and self.runtime and (entry := self.runtime.entry):
                        return entry, plan, self.model
                    await news.wait()
        except TimeoutError:
            raise LinkLost(f"The ring was not ready within {FORM_S:.0f} s") from None
        raise LinkLost("This node is not the entry of the ring")

    # Callbacks of the ring runtime.

    def loaded(self, is_loaded: bool, trouble: MeshError | None) -> None:
        """Publish whether the span is loaded; ``trouble`` is why it cannot be."""
        self._loaded, self.trouble = self.plan if is_loaded else None, trouble
        self.failure = trouble or self.failure
        self._host.publish()
        if trouble:
            self._host.failed()

    def at_work(self) -> None:
        """Publish that this node started or stopped serving."""
        replaced = self.runtime.take_replaced() if self.runtime else None
        if replaced and self.plan:
            before, after = (self.group, replaced), (self.group, self.plan)
            self._rows.lost(explain_loss(self._machine, before, after)[0], self._all_rows)
        self._host.publish()

    def broke(self, plan: Plan) -> None:
        """Look which node of a ring has ended."""
        for stage in plan.stages:
            self._links.probe(stage.node)

    def times(self, plan: Plan) -> RingTimes | None:
        """Predict the times of the ranks of a plan from the latest offers."""
        agreement, charter = self.agreement, self.charter
        if agreement is None or charter is None:
            return None
        try:
            return ring_times(plan, agreement.offers, agreement.links, charter.shape)
        except UserError:  # a member has left, and a new plan will follow
            return None

    def rooms(self, plan: Plan) -> list[int] | None:
        """Return the bytes that each rank has for KV caches, from the latest offers."""
        agreement, charter = self.agreement, self.charter
        if agreement is None or charter is None:
            return None
        try:
            return kv_capacities(plan, agreement.offers, charter.shape)
        except UserError:  # a member has left, and a new plan will follow
            return None

    def faulty(self, node: NodeId) -> None:
        """Count a fault of a neighbour."""
        if self._host.record_fault(node):
            logger.warning(
                "node %s sent invalid data to this one", name_of(node, self._machine.profiles)
            )

    async def dial(self, node: NodeId) -> SecureLink:
        """Open a ring link."""
        return await self._links.dial_ring(node)
