"""The service of a node in the rings of its mesh: it follows plans, and moves between rings.

Theory of operation
-------------------
Whenever the records of the mesh change, the agreement is computed again off the event loop. Once it
has been stable for a while, the ring runtime prepares for its plan, and follows it, see `Handover`.
A mesh that serves several models, or replicas, has a ring for each. If the records name another
first ring than that of the node, it retracts its offer, leaves the ring, which goes on without it,
and begins again with the other model. A model that is not here is fetched from other nodes.

For each further ring that the records name, the first service runs another one, which sees the
records as that ring does, see `groups`. It publishes its offer as a share of the profile, and its
state as a membership. All of them compute on one thread, in turn. If the first ring of the node
ends, a further one may be named as the first. It ends and begins again with all of the memory, once
no session is in progress or after `DRAIN_S`: until then it serves with its share. Other further
rings end meanwhile; new ones wait, as the first ring may still hold its model.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from meshllm.config import cache_path
from meshllm.errors import ModelError, ModelMissing
from meshllm.names import FIRST_GROUP, Digest, GroupId, ModelKey, NodeId
from meshllm.node.charter_editor import CharterEditor
from meshllm.node.net.mesh_link import MeshLinks
from meshllm.node.net.secure import SecureLink
from meshllm.node.offer import NodeOffer
from meshllm.node.offloop import OffLoop
from meshllm.node.own_state import PROVIDES, OwnState
from meshllm.node.planner import Planner
from meshllm.node.ring_directory import RingDirectory
from meshllm.node.ring_member import RingMember
from meshllm.node.timer import loop_time
from meshllm.node.view import OwnRing, RingView
from meshllm.node.weights import WeightFetcher, WeightServer, WeightSupply
from meshllm.protocol.agreement.agreement import Agreement
from meshllm.protocol.agreement.candidates import MeshView
from meshllm.protocol.agreement.groups import (
    UNASSIGNED,
    groups_of,
    has_several,
    ring_of,
    shortage,
    used_models,
)
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.mesh import Mesh
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.ring.handover import Follow, Handover, HandoverState, Prepare

if TYPE_CHECKING:  # a provider holds no layers, and imports no torch
    from meshllm.node.preparation import Preparation
    from meshllm.node.ring.model_runtime import ModelRuntime
    from meshllm.node.ring.runtime import RingRuntime
    from meshllm.protocol.session.messages import Hello

SETTLE_S = 0.5  # s; a heartbeat: in that time both ends report that a link is up or lost
LOST_S = 0.15  # s; all links of a node are lost, and an answer waits
GATHER_S = 30.0  # s that the first ring waits for the requested number of members
MOVE_S = 10.0  # s that a node waits for the end of its sessions before it moves to another ring
DRAIN_S = 60.0  # s more for a further ring that is to be the first
DESCRIBE_S = 60.0  # s to find a node that describes a model, one of several, to this one

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RingService:
    """Serves in one ring of the mesh after the other, and in further ones meanwhile."""

    machine: Mesh
    links: MeshLinks
    state: OwnState
    member: RingMember
    offer: NodeOffer
    editor: CharterEditor
    preparation: "Preparation | None"
    off_loop: OffLoop
    call_later: Callable[..., None]
    changed: Callable[[], None]
    """Called after a change of what the plan depends on."""
    spawn: Callable[[Callable[[], Awaitable[None]]], asyncio.Task[None]]
    """Runs a part of the node in the background; its error ends the node."""
    is_founder: bool
    has_own_model: bool
    """Whether the options name the model: then this node serves no other."""
    first: "RingService | None" = None
    """The service in the first ring of this node; None for this one itself."""
    further: dict[GroupId, "RingService"] = field(default_factory=dict)
    """The services in further rings, until they have ended."""
    planner: Planner = field(init=False)
    _supply: WeightSupply = field(init=False)
    _server: WeightServer = field(init=False)
    _handover: Handover = field(default_factory=Handover)
    _due: float | None = None  # when a timer for it fires
    _charter_known: asyncio.Event = field(default_factory=asyncio.Event)
    _moving: asyncio.Event = field(default_factory=asyncio.Event)
    _target: GroupId | None = None  # the group in which to take part soon
    _unable: set[ModelKey] = field(default_factory=set)  # models that could not be opened
    # Further groups, and memory; None to look again.
    _wanted: Mapping[GroupId, int] | None = field(default_factory=dict)
    _memory: int = 0  # for this ring, if it is a further one
    _task: asyncio.Task[None] | None = None  # of a further ring
    _latest: float | None = None  # when it ends if it still is not wanted then
    _is_stopped: bool = False  # it ends, and the node goes on without this ring

    def __post_init__(self) -> None:
        folder = cache_path() / "weights"
        fetcher = WeightFetcher(
            self.links.dial_weights, folder, self._digest_of, self._check_parts, self.off_loop
        )
        self._server = self.first._server if self.first else WeightServer(self.off_loop)
        self._supply = WeightSupply(self.machine.me, fetcher, self, self.off_loop)
        self.planner = Planner(
            self.view, self._agreed, self.off_loop, self._foreseen, is_first=self.first is None
        )

    @property
    def agreement(self) -> Agreement | None:
        """The latest; None before the first."""
        return self.planner.agreement

    @property
    def _preparation(self) -> "Preparation":
        assert self.preparation is not None  # a provider runs nothing that loads a model
        return self.preparation

    def view(self) -> MeshView | None:
        """Take a snapshot of the records for planning; None before there is a charter."""
        machine = self.machine
        if machine.charter is None or machine.author is None:
            return None
        return MeshView(
            machine.me, machine.charter, machine.author, dict(machine.profiles),
            dict(machine.states), tuple(machine.removals), self.member.group,
        )  # fmt: skip

    def rings(self, directory: RingDirectory) -> tuple[RingView, ...]:
        """Return all rings of the mesh."""
        view = self.view()
        if view is None:
            return ()
        lacking = shortage(view) if has_several(view) else {}
        used = used_models(view)
        return tuple(
            RingView(
                group,
                plan,
                is_served=is_served,
                lacks_bytes=lacking.get(group.id, 0),
                is_unused=bool(used) and group.charter.key not in used,
                own=self._own_ring(group.id),
            )
            for group in groups_of(view.charter)
            for plan, is_served in (directory.ring(group.id),)
        )

    def _own_ring(self, group: GroupId) -> OwnRing | None:
        """Return what this node knows of one of its rings; None if it takes part in no such."""
        services = (self, *self.further.values())
        service = next((each for each in services if each.member.group == group), None)
        if service is None or self.state.provider:
            return None
        member = service.member
        return OwnRing(
            service.agreement,
            service.planner.advice,
            member.reason,
            member.execution,
            member.history,
        )

    def records_changed(self) -> None:
        """Plan again, and publish what follows for this node."""
        if self.machine.charter is not None:
            self._charter_known.set()
        for each in (self, *self.further.values()):
            each.planner.invalidate()
            each.offer.withdraw()
        self.state.publish()

    def reason(self) -> str:
        """Return why there is no plan."""
        if self.offer.hang or self._supply.progress:
            return self.offer.hang or self._supply.progress
        if self.state.provider and self.agreement is None:
            return PROVIDES if self.links.by_peer else "no contact with the mesh yet"
        if self.agreement is not None and self.agreement.plan is not None:
            if lacking := self.agreement.lacking:
                charter = self.member.charter
                members = charter.members if charter else None
                here = f"{(members or lacking) - lacking} of {members or lacking} members"
                return f"{here} are ready, up to {GATHER_S:.0f} s for the others"
            return "the nodes are agreeing on a plan"
        if self.agreement is not None:
            is_early = not self.agreement.offers and not self.agreement.refused
            is_early &= self.state.provider is None
            return "the nodes are loading the model" if is_early else self.agreement.reason
        is_known = self.machine.charter or self.is_founder
        return "this node is loading the model" if is_known else "no contact with the mesh yet"

    async def run(self) -> None:
        """Serve in one ring after the other, each with its model."""
        machine, found = self.machine, None
        if machine.charter is None and self.is_founder:
            found, charter = await self._preparation.found()
            self.editor.publish(charter)
        else:
            await self._charter_known.wait()
            assert machine.charter is not None  # never unset
            if len(groups_of(machine.charter)) > 1:
                self._regroup(UNASSIGNED)
        while True:
            serving = asyncio.ensure_future(self._serve(found))
            moving = asyncio.ensure_future(self._moving.wait())
            try:
                await asyncio.wait({serving, moving}, return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    serving.result()
                    await moving
            finally:
                for task in (serving, moving):
                    task.cancel()
                await asyncio.gather(serving, moving, return_exceptions=True)
            found, target = None, self._target
            self._regroup(self.member.group if target is None else target)

    async def survey(self) -> None:
        """Publish which models of the mesh this node may hold, while the mesh has several.

        Without `--model` it may also hold those whose weights another node can send.
        """
        known: tuple[ModelKey, ...] = ()
        held: tuple[ModelKey, ...] = ()
        async with aclosing(self.state.changes()) as changes:
            async for _ in changes:
                charter = self.machine.charter
                if charter is None:
                    continue
                keys = tuple(each.key for each in charter.served)
                if not (self.offer.profile.models or len(groups_of(charter)) > 1):
                    continue
                if keys != known:
                    known, held = keys, await self._preparation.held(charter.served)
                models = self._may_hold(charter, held)
                if models == self.offer.profile.models:
                    continue
                if not self.offer.profile.memory_bytes:
                    self.offer.profile = await self._preparation.room(self.offer.profile)
                self.offer.hold(models)

    async def accept(self, link: SecureLink) -> None:
        """Accept a ring link of the previous rank."""
        if not any(each.runtime for each in self.state.members):
            await link.close()  # a provider imports no torch
            return
        from meshllm.node.ring.runtime import arrive

        await arrive(link, link.peer, self._runtime)

    async def send_weights(self, link: SecureLink) -> None:
        """Send weights to another node."""
        await self._server.serve(link)

    def _runtime(self, hello: "Hello") -> "RingRuntime | None":
        found = (each.runtime for each in self.state.members if each.group == hello.group)
        return next(found, None)

    # Callbacks of the supply of weights, see `SupplyHost`.

    def mesh_view(self) -> MeshView | None:
        """Take a snapshot of the records, with the charter of this node's ring; None without."""
        view = self.view()
        return ring_of(view) if view else None

    def linked(self) -> Collection[NodeId]:
        """Return the nodes that are linked to this one."""
        return tuple(self.links.by_peer)

    def changes(self) -> AsyncIterator[None]:
        """Yield once at first, then after each possible change of the records."""
        return self.state.changes()

    def own_weights(self) -> Sequence[bytes]:
        """Return the digests of the weights that are here, even while no offer is published."""
        return self.offer.measured.weights

    def holds_layers(self) -> bool:
        """Return whether a plan is in force for which this node loads layers or has loaded them."""
        plan = self.member.plan
        return plan is not None and plan.rank(self.machine.me) is not None

    async def part_sizes(self) -> Sequence[int]:
        """Return the most bytes of the file of each part of the model."""
        assert self.member.model is not None  # it is open before weights are fetched
        return await self._preparation.part_sizes(self.member.model)

    async def hash_weights(self) -> None:
        """Publish the digests of the weights that are here now."""
        assert self.member.model is not None
        self.offer.set_weights(await self._preparation.hash_weights(self.member.model))

    def publish_state(self) -> None:
        """Publish whether this node fetches weights."""
        self.member.obstacle = self._supply.obstacle
        self.state.publish()

    # Following the plan.

    def _agreed(self) -> None:
        member = self.member
        member.agreement = self.agreement
        if runtime := member.runtime:
            runtime.narrow()
        self._hand_over()
        if self.first is None:
            self._schedule_move()
            self._schedule_further()
        if member.group == FIRST_GROUP and member.model is not None:
            self.editor.amend_again(member.model.shape.context)
        self.state.publish()

    def _foreseen(self, plan: Plan | None) -> None:
        runtime = self.member.runtime
        is_free = not (self.first or self.offer.shared_bytes)  # else no memory is free for it
        if runtime and is_free and self._handover.state is not HandoverState.PREPARING:
            runtime.prepare(plan)

    @property
    def is_handing_over(self) -> bool:
        """Whether this node, which is leaving, still has layers that others may take over."""
        plan, me, agreement = self.member.plan, self.machine.me, self.agreement
        if plan is None or agreement is None or plan.rank(me) is None:
            return False
        return me not in agreement.leaving or agreement.plan != plan

    async def _watch_ring(self) -> None:
        async with aclosing(self.state.changes()) as changes:
            async for _ in changes:
                self._hand_over()

    @property
    def _sessions(self) -> int:
        """The sessions of this node; those of its own ring only, if that is a further one."""
        if self.first is None:
            return self.state.sessions
        return self.member.runtime.sessions if self.member.runtime else 0

    def _settle_s(self) -> float:
        """Return for how long what is agreed on must not change before this node acts on it."""
        agreement, member = self.agreement, self.member
        if agreement is None:  # the mesh serves this model no more
            return MOVE_S if self._sessions else SETTLE_S
        if agreement.lacking:
            return GATHER_S
        return LOST_S if agreement.has_lost(member.plan) else SETTLE_S

    def _hand_over(self) -> None:
        """Follow the plan that was agreed on, or prepare for it, see `Handover`."""
        agreement, member, now = self.agreement, self.member, loop_time()
        if (runtime := member.runtime) is None:
            return
        outlook = member.outlook(agreement.plan if agreement else None, self._settle_s())
        for action in self._handover.look(outlook, now):
            match action:
                case Prepare(plan):
                    runtime.prepare(plan, is_urgent=True)
                case Follow(plan):
                    runtime.follow(plan)
                    self.state.publish()
        due = self._handover.deadline
        if due is not None and due != self._due:
            self._due = due
            self.call_later(due - now, self._hand_over_due, due)

    def _hand_over_due(self, due: float) -> None:
        """Hand over at a deadline; the timer may be early by a rounding error, and is set again."""
        if due == self._due:
            self._due = None
            self._hand_over()

    # Moving between rings.

    def _schedule_move(self) -> None:
        """Schedule the move to another group once it has been wanted for a while."""
        part = self.planner.parts.get(self.machine.me)
        target = part.first if part else None
        if target == self._target or self.state.provider:
            return
        self._target = target
        if target not in {None, self.member.group}:
            latest = loop_time() + MOVE_S
            self.call_later(SETTLE_S, self._move, target, latest)

    def _move(self, target: GroupId, latest: float) -> None:
        """Move to another group; if that may wait, only when no session is in progress."""
        if target != self._target or self.state.is_leaving:
            return
        is_late = loop_time() >= latest
        if target in self.further or (self._sessions and not is_late):
            self.call_later(SETTLE_S, self._move, target, latest)
            return
        self._moving.set()

    # Further rings.

    def _schedule_further(self) -> None:
        """Schedule what changes in further rings once it has been wanted for a while."""
        part, view = self.planner.parts.get(self.machine.me), self.view()
        is_out = part is None and view is not None and has_several(view)  # as when it hangs
        wanted = part.further if part else {}
        if is_out or wanted == self._wanted or self.state.provider:
            return
        self._wanted = wanted
        self.call_later(SETTLE_S, self._change_further, wanted)

    def _change_further(self, wanted: Mapping[GroupId, int]) -> None:
        """Take part in these further rings, and in no others.

        Those that still have sessions end later; new ones wait for the memory of all that end.
        """
        if wanted is not self._wanted or self.state.is_leaving:
            return
        ending = [(group, at) for group, at in self.further.items() if group not in wanted]
        for group in wanted.keys() & self.further.keys():
            self.further[group]._latest = None
        ends = [at._end(DRAIN_S if group == self._target else 0.0) for group, at in ending]
        if not all(ends):
            self.call_later(SETTLE_S, self._change_further, wanted)
            return
        for group, memory in wanted.items():
            running = self.further.get(group)
            if running is None:
                self._begin_further(group, memory)
            elif not running._is_stopped:  # else it begins again once it has ended
                running.resize(memory)

    def _end(self, patience_s: float) -> bool:
        """End a further ring if no session is in progress or it is late; return whether it ends."""
        now = loop_time()
        if self._latest is None:
            self._latest = now + MOVE_S
        if self._sessions and now < self._latest + patience_s and not self._is_stopped:
            return False
        self.stop()
        return True

    def _begin_further(self, group: GroupId, memory: int) -> None:
        def why() -> str:
            return service.reason()

        member = self.state.begin_further(group, why)
        bare = replace(self.offer.profile, weights=(), layer_s=(), model="", shares=())
        offer = NodeOffer(bare, partial(self.offer.share, group), member, self.call_later)
        service = replace(
            self,
            member=member,
            offer=offer,
            is_founder=False,
            first=self,
            further={},
            _handover=Handover(),
            _due=None,
            _target=None,
        )
        service._memory = memory
        self.further[group] = service
        service._task = self.spawn(service.run_further)

    async def run_further(self) -> None:
        """Serve in one further ring until cancelled, or until its model cannot be served here."""
        assert self.first is not None  # this is a further ring
        ring = self.member.charter
        try:
            async with asyncio.TaskGroup() as tasks:
                self.planner.invalidate()
                tasks.create_task(self.planner.run())
                tasks.create_task(self._serve(None))
        except* ModelError as failed:
            self._is_stopped = True
            if ring is not None:
                self.first._give_up(ring.key, _first_of(failed))
        finally:
            self._leave_further(self.first)

    def _leave_further(self, first: "RingService") -> None:
        group = self.member.group
        del first.further[group], self.state.further[group]
        self.offer.close()
        if self._is_stopped:  # else the whole node stops
            self._supply.end()
            self._end_member(group)
            first.offer.share(group, None)
        else:
            self.member.end(group)
        first._wanted = None  # if it is wanted again meanwhile, it begins again
        first.changed()

    def _end_member(self, group: GroupId) -> None:
        """Release the model, and take part in another group; free its memory in the background."""
        model = self.member.model
        self.member.end(group)
        if model is not None:
            self.spawn(model.tidy)

    def stop(self) -> None:
        """End the service in a further ring."""
        if self._task is not None and not self._is_stopped:
            self._is_stopped = True
            self._task.cancel()

    def resize(self, memory: int) -> None:
        """Use this much memory for a further ring."""
        if memory != self._memory:
            self._memory = memory
            self.offer.resize(memory)

    # Serving.

    def _regroup(self, group: GroupId) -> None:
        """Take part in another group, and retract the offer of the last one."""
        self._moving.clear()
        self._supply.end()
        self._handover.reset()
        self.offer.end()
        self._end_member(group)
        self.planner.move()

    async def _serve(self, model: "ModelRuntime | None") -> None:
        """Load and profile the model, publish the offer, and run the ring runtime."""
        preparation, ring = self._preparation, self.member.charter
        if ring is None:
            return  # until there is a ring for this node
        is_further = self.first is not None
        try:
            model = model or await self._join(ring)
            if self.member.group == FIRST_GROUP:
                self.editor.amend(model.shape.context)
            await self._supply.remove_damaged(model.source.folder, preparation.cache)
            offered = await preparation.offer(model, self.offer.profile, is_further=is_further)
        except ModelError as error:
            if is_further or not self.offer.profile.models:
                raise
            self._give_up(ring.key, error)
            return
        if is_further:
            reserve = ring.shape.workspace_bytes
            offered = replace(offered, memory_bytes=self._memory, reserve_bytes=reserve, span=None)
        self._supply.begin(offered.weights, model.source.folder)
        self.offer.begin(offered)
        runtime = self.member.begin(model)
        self._server.offer(ring.config_digest, lambda: preparation.parts(model))
        model.obtain = self._supply.obtain
        self._handover.reset()  # follow the plan that was agreed on before
        self.changed()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._supply.run())
            group.create_task(self._watch_ring())
            group.create_task(self.offer.refine())
            await runtime.run()

    def _give_up(self, model: ModelKey, error: ModelError) -> None:
        """Publish that this node cannot hold a model, so that it gets another one."""
        logger.warning("this node cannot serve in its ring: %s", error)
        self._unable.add(model)
        models = tuple(each for each in self.offer.profile.models if each != model)
        self.offer.publish(models=models)

    def _may_hold(self, charter: Charter, held: Collection[ModelKey]) -> tuple[ModelKey, ...]:
        return tuple(
            each.key
            for each in charter.served
            if each.key not in self._unable
            and (
                each.key in held
                or (not self.has_own_model and self._supply.can_fetch(each, self.machine.profiles))
            )
        )

    async def _join(self, charter: Charter) -> "ModelRuntime":
        """Open the model of a ring; fetch its description from another node if it is not here.

        While the mesh has several models, this node tries another one if nobody describes it.
        """
        is_further = self.first is not None
        try:
            return await self._preparation.join(charter, is_further=is_further)
        except ModelMissing as missing:
            if self.has_own_model:
                raise
            try:
                async with asyncio.timeout(
                    DESCRIBE_S if (self.first or self).offer.profile.models else None
                ):
                    folder = await self._supply.describe()
            except TimeoutError:
                raise missing from None
        return await self._preparation.join(charter, folder, is_further=is_further)

    async def _digest_of(self, folder: Path) -> Digest:
        return await self._preparation.digest_folder(folder.name, folder)

    async def _check_parts(self, folder: Path, weights: Mapping[str, int]) -> None:
        await self._preparation.check_parts(folder.name, folder, weights)


def _first_of(group: BaseExceptionGroup[ModelError]) -> ModelError:
    """Return the first error of a group, which may hold groups."""
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first
