"""Serves one ring of the mesh on this node: opens its model, offers it, and follows its plans.

Theory of operation
-------------------
Whenever the records of the mesh change, the agreement is computed again off the event loop. Once it
has been stable for a while, the ring runtime prepares for its plan, and follows it, see
`PlanChange`. A model that is not here is fetched from other nodes.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshllm.errors import ModelMissing
from meshllm.model.locate import weights_path
from meshllm.names import FIRST_GROUP, Digest, GroupId, NodeId
from meshllm.node.agreement.charter_editor import CharterEditor
from meshllm.node.agreement.explanation import gathering, loading_model
from meshllm.node.agreement.offer import NodeOffer
from meshllm.node.agreement.own_state import OwnState, provides, trouble_of
from meshllm.node.agreement.plan_follower import GATHER_S, PlanFollower
from meshllm.node.agreement.planner import Planner
from meshllm.node.agreement.ring_member import RingMember
from meshllm.node.event_loop import OffLoop
from meshllm.node.net.mesh_link import MeshLinks
from meshllm.node.ring.shape import reserved_bytes
from meshllm.node.timer import CallLater
from meshllm.node.training import FrozenModel, TrainingServer
from meshllm.node.view import OwnRing
from meshllm.node.weights import WeightFetcher, WeightServer, WeightSupply
from meshllm.protocol.agreement.agreement import Agreement
from meshllm.protocol.agreement.candidates import MeshView
from meshllm.protocol.agreement.grouping import ring_of
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.mesh import Mesh
from meshllm.protocol.membership.records import Lifecycle
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.ring.plan_change import PlanChangeState
from meshllm.protocol.weights.holders import awaits_weights

if TYPE_CHECKING:  # a provider holds no layers, and imports no torch
    from meshllm.node.preparation import Preparation
    from meshllm.node.ring.model_runtime import ModelRuntime

DESCRIBE_S = 60.0  # s to find a node that describes a model, one of several, to this one


@dataclass(frozen=True, slots=True)
class NodeParts:
    """What the rings of one node share."""

    machine: Mesh
    links: MeshLinks
    state: OwnState
    offer: NodeOffer
    """Of the first ring, and of the node."""
    editor: CharterEditor
    preparation: "Preparation | None"
    """None on a provider, which runs nothing that loads a model."""
    weights: WeightServer
    training: TrainingServer
    off_loop: OffLoop
    call_later: CallLater
    changed: Callable[[], None]
    """Called after a change of what the plan depends on."""
    spawn: Callable[[Callable[[], Awaitable[None]]], asyncio.Task[None]]
    """Runs a part of the node in the background; its error ends the node."""
    is_founder: bool
    has_own_model: bool
    """Whether the options name the model: then this node serves no other."""

    @property
    def prepared(self) -> "Preparation":
        """What opens and measures models."""
        assert self.preparation is not None
        return self.preparation


class RingServer:
    """Serves one ring; also the host of its supply of weights, see `SupplyHost`."""

    def __init__(
        self,
        parts: NodeParts,
        member: RingMember,
        offer: NodeOffer,
        grouped: Callable[[], None] | None = None,
        memory: int | None = None,
    ) -> None:
        """Serve the ring of a member.

        In the first ring of a node ``grouped`` is called whenever its groups were computed.
        """
        self.member = member
        self.offer = offer
        self.memory = memory
        """The share of the memory of this node, in bytes, of a further ring; None is the first."""
        self._parts = parts
        fetcher = WeightFetcher(
            parts.links.dial_weights,
            weights_path(),
            self._digest_of,
            self._check_parts,
            parts.off_loop,
        )
        self.supply = WeightSupply(parts.machine.me, fetcher, self, parts.off_loop)
        self.planner = Planner(self.view, self._agreed, parts.off_loop, self._foreseen, grouped)
        self.follower = PlanFollower(
            member, parts.state, self.planner, lambda: bool(self.sessions), parts.call_later
        )

    @property
    def is_further(self) -> bool:
        """Whether it is not the first ring of this node."""
        return self.memory is not None

    @property
    def agreement(self) -> Agreement | None:
        """The latest; None before the first."""
        return self.planner.agreement

    @property
    def sessions(self) -> int:
        """The running sessions: of the whole node, or of this ring if it is a further one."""
        if not self.is_further:
            return self._parts.state.sessions
        return self.member.runtime.sessions if self.member.runtime else 0

    @property
    def is_handing_over(self) -> bool:
        """Whether this node, which is leaving, still has layers that others may take over."""
        plan, me, agreement = self.member.plan, self._parts.machine.me, self.agreement
        if plan is None or agreement is None or plan.rank(me) is None:
            return False
        return me not in agreement.leaving or agreement.plan != plan

    @property
    def status(self) -> OwnRing:
        """What this node knows of the ring."""
        member = self.member
        return OwnRing(
            self.agreement, self.planner.advice, member.reason, member.execution, member.history
        )

    def view(self) -> MeshView | None:
        """Take a snapshot of the records for planning; None before there is a charter."""
        machine = self._parts.machine
        if machine.charter is None or machine.author is None:
            return None
        return MeshView(
            machine.me, machine.charter, machine.author, dict(machine.profiles),
            dict(machine.states), tuple(machine.removals), self.member.group,
        )  # fmt: skip

    def reason(self) -> str:
        """Return why there is no plan."""
        parts, agreement = self._parts, self.agreement
        if self.offer.hang or self.supply.progress:
            return self.offer.hang or self.supply.progress
        if parts.state.provider and agreement is None:
            is_linked = bool(parts.links.by_peer)
            return (
                provides(parts.state.provider.trouble)
                if is_linked
                else "no contact with the mesh yet"
            )
        if agreement is not None and agreement.plan is not None:
            if agreement.lacking:
                loading = self._loading(agreement)
                return gathering(agreement, loading, GATHER_S, parts.machine.profiles)
            return "the nodes are agreeing on a plan"
        if agreement is not None:
            is_early = not agreement.offers and not agreement.refused
            if not is_early or parts.state.provider is not None:
                return agreement.reason
            members = self.member.charter.members if self.member.charter else None
            loading = self._loading(agreement)
            if not loading:  # no node has published its state yet
                return "the nodes are loading the model"
            return loading_model(loading, members, parts.machine.profiles)
        is_known = parts.machine.charter or parts.is_founder
        return "this node is loading the model" if is_known else "no contact with the mesh yet"

    def _loading(self, agreement: Agreement) -> list[NodeId]:
        """Return the nodes that will be ready, as far as they say so."""
        states = self._parts.machine.states
        return [
            node
            for node in agreement.alive - agreement.ready
            if (state := states.get(node)) is not None
            and (state.lifecycle is Lifecycle.JOIN or awaits_weights(state))
            and trouble_of(state) is None
        ]

    def records_changed(self) -> None:
        """Plan again, and retract the offer if the span cannot be loaded."""
        self.planner.invalidate()
        self.offer.withdraw()

    async def serve(self, model: "ModelRuntime | None" = None) -> None:
        """Load and profile the model, publish the offer, and run the ring runtime.

        Raises:
            ModelError: the model cannot be opened or measured here.
        """
        preparation, ring = self._parts.prepared, self.member.charter
        if ring is None:
            return  # until there is a ring for this node
        model = model or await self._join(ring)
        if self.member.group == FIRST_GROUP:
            self._parts.editor.amend(model.shape.context)
        await self.supply.remove_damaged(model.source.folder, preparation.cache)
        offered = await preparation.offer(model, self.offer.profile, is_further=self.is_further)
        if self.memory is not None:
            offered = replace(
                offered,
                memory_bytes=self.memory,
                reserve_bytes=ring.shape.workspace_bytes,
                span=None,
            )
        self.supply.begin(offered.weights, model.source.folder)
        self.offer.begin(offered, reserved_bytes(model.shape))
        runtime = self.member.begin(model)
        self._parts.weights.offer(ring.config_digest, lambda: preparation.parts(model))
        if model.verdict.equal:  # else its layers cannot be computed by themselves
            self._parts.training.offer(
                ring.config_digest, FrozenModel(model.worker, model.load_frozen)
            )
        model.obtain = self.supply.obtain
        self.follower.reset()  # follow the plan that was agreed on before
        self._parts.changed()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.supply.run())
            group.create_task(self._watch_ring())
            group.create_task(self.offer.refine())
            await runtime.run()

    def end(self, group: GroupId) -> None:
        """Retract the offer, release the model, and take part in another group."""
        self.supply.end()
        self.follower.reset()
        self.offer.end()
        model, ring = self.member.model, self.member.charter
        if ring is not None:
            self._parts.training.withdraw(ring.config_digest)
        self.member.end(group)
        if model is not None:
            self._parts.spawn(model.tidy)  # frees its memory
        self.planner.move()

    # Callbacks of the supply of weights.

    def mesh_view(self) -> MeshView | None:
        """Take a snapshot of the records, with the charter of this ring; None without."""
        view = self.view()
        return ring_of(view) if view else None

    def linked(self) -> Collection[NodeId]:
        """Return the nodes that are linked to this one."""
        return tuple(self._parts.links.by_peer)

    def changes(self) -> AsyncIterator[None]:
        """Yield once at first, then after each possible change of the records."""
        return self._parts.state.changes()

    def own_weights(self) -> Sequence[bytes]:
        """Return the digests of the weights that are here, even while no offer is published."""
        return self.offer.measured.weights

    def holds_layers(self) -> bool:
        """Return whether a plan is in force for which this node loads layers or has loaded them."""
        plan = self.member.plan
        return plan is not None and plan.rank(self._parts.machine.me) is not None

    async def part_sizes(self) -> Sequence[int]:
        """Return the most bytes of the file of each part of the model."""
        assert self.member.model is not None  # it is open before weights are fetched
        return await self._parts.prepared.part_sizes(self.member.model)

    async def hash_weights(self) -> None:
        """Publish the digests of the weights that are here now."""
        assert self.member.model is not None
        self.offer.set_weights(await self._parts.prepared.hash_weights(self.member.model))

    def publish_state(self) -> None:
        """Publish whether this node fetches weights."""
        self.member.obstacle = self.supply.obstacle
        self._parts.state.publish()

    # Inside.

    def _agreed(self) -> None:
        member = self.member
        member.agreement = self.agreement
        if runtime := member.runtime:
            runtime.resize()
        self.follower.look()
        self._parts.editor.amend_again()
        self._parts.state.publish()

    def _foreseen(self, plan: Plan | None) -> None:
        runtime = self.member.runtime
        # Else no memory is free for it.
        is_free = not (self.is_further or self.offer.shared_bytes)
        if runtime and is_free and self.follower.progress is not PlanChangeState.PREPARING:
            runtime.prepare(plan)

    async def _watch_ring(self) -> None:
        async with aclosing(self._parts.state.changes()) as changes:
            async for _ in changes:
                self.follower.look()

    async def _join(self, charter: Charter) -> "ModelRuntime":
        """Open the model of a ring; fetch its description from another node if it is not here.

        While the mesh has several models, this node tries another one if nobody describes it.
        """
        parts, is_further = self._parts, self.is_further
        try:
            return await parts.prepared.join(charter, is_further=is_further)
        except ModelMissing as missing:
            if parts.has_own_model:
                raise
            try:
                async with asyncio.timeout(DESCRIBE_S if parts.offer.profile.models else None):
                    folder = await self.supply.describe()
            except TimeoutError:
                raise missing from None
        return await parts.prepared.join(charter, folder, is_further=is_further)

    async def _digest_of(self, folder: Path) -> Digest:
        return await self._parts.prepared.digest_folder(folder.name, folder)

    async def _check_parts(self, folder: Path, weights: Mapping[str, int]) -> None:
        await self._parts.prepared.check_parts(folder.name, folder, weights)
