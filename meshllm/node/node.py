"""A node of a mesh: the driver that connects membership, planning and the ring.

Theory of operation
-------------------
The mesh links feed the membership machine. Whenever its records change, the node recomputes the
agreement off the event loop, and the ring runtime follows the resulting plan: it loads its span,
connects to its neighbours and serves. The node publishes the progress. Requests go to the router,
which finds the entry. There is no leader: every node computes the same plan from the same records.

A mesh that serves several models, or replicas, has a ring for each, and every node takes part in
one. If the records name another ring than its own, a node leaves its ring, which goes on without
it, and begins again with the other model.
"""

import asyncio
import logging
import platform
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from typing import TypeVarTuple

from meshllm import __version__
from meshllm.config import cache_path
from meshllm.errors import (
    LinkLost,
    MeshError,
    ModelError,
    ModelMissing,
    NotAuthorised,
    OutOfMemory,
    UserError,
)
from meshllm.names import FIRST_GROUP, Digest, GroupId, MeshId, ModelKey, NodeId, Quant
from meshllm.node.compute.worker import Worker, compute_thread
from meshllm.node.founding import (
    amend,
    names_in,
    resolve_names,
    serve,
    stop,
    with_own_entry,
)
from meshllm.node.membership.admission import MemberAdmission
from meshllm.node.membership.bootstrap import Membership, enter
from meshllm.node.membership.saved_records import SavedRecords, load_records, save_records
from meshllm.node.membership.state_store import StateStore
from meshllm.node.net.beacon import Beacon, open_beacon
from meshllm.node.net.dialer import NodeDialer
from meshllm.node.net.endpoints import Endpoints, open_endpoints
from meshllm.node.net.mesh_link import MeshLinks
from meshllm.node.net.peer_address import Machine, machine_secret
from meshllm.node.net.secure import SecureLink
from meshllm.node.offloop import OffLoop
from meshllm.node.options import ModelOptions, NodeOptions
from meshllm.node.planner import Planner
from meshllm.node.preparation import Preparation
from meshllm.node.provider import Provider
from meshllm.node.requests.request_json import REQUEST_BYTES
from meshllm.node.requests.router import RequestRouter
from meshllm.node.ring.model_runtime import ModelRuntime
from meshllm.node.ring.shape import CONTEXT
from meshllm.node.ring_member import PROVIDES, RingMember
from meshllm.node.supervisor import Supervisor
from meshllm.node.view import LinkView, NodeView, RingView
from meshllm.node.weights import WeightFetcher, WeightServer, WeightSupply
from meshllm.protocol.agreement.agreement import Agreement
from meshllm.protocol.agreement.candidates import MeshView
from meshllm.protocol.agreement.groups import (
    UNASSIGNED,
    groups_of,
    has_several,
    ring_of,
    shortage,
)
from meshllm.protocol.membership.charter import Charter, differing
from meshllm.protocol.membership.codec import CloseReason, RequestMessage
from meshllm.protocol.membership.mesh import Mesh
from meshllm.protocol.membership.records import MAX_LABEL_BYTES, Profile
from meshllm.protocol.membership.twin import Twin
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.trust.credential import Removal, Role, check
from meshllm.protocol.trust.handshake import Own
from meshllm.protocol.trust.identity import short
from meshllm.transport.contract import Transport

__all__ = ["MeshNode", "NodeOptions", "open_node"]

SETTLE_S = 0.5  # s; a heartbeat: in that time both ends report that a link is up or lost
GATHER_S = 30.0  # s that the first ring waits for the requested number of members
MOVE_S = 10.0  # s that a node waits for the end of its sessions before it moves to another ring
SAVE_S = 1.0  # s; changes within it are written to disk together
REDIAL_S = 2.0  # s between two dials of known addresses while no node is linked
REDIAL_LINKED_S = 30.0  # s between two dials of members that are not linked
FIRST_RETRY_S, LAST_RETRY_S = 5.0, 300.0  # s; backoff before the offer is published again
SMALLER = 0.9  # factor on the weights of a span that did not fit into memory
REQUEST_HEAD_BYTES = 64 * 1024  # of a request beside its text
TOKEN_BYTES = 64  # of one token as JSON: a word of ten letters, each escaped
WATCH_S = 1.0  # s between two checks of the compute thread,
WATCH_LEAST_S = 0.05  # or less, if the limit of what it runs comes first
DESCRIBE_S = 60.0  # s to find a node that describes a model, one of several, to this one
DRAIN_S = 60.0  # s to finish running requests before the node leaves
TICKET_S = 24 * 3600.0  # s of validity of the ticket shown at startup

Ts = TypeVarTuple("Ts")

logger = logging.getLogger(__name__)


class MeshNode:
    """A running node; created by `open_node`."""

    def __init__(
        self,
        options: NodeOptions,
        store: StateStore,
        preparation: Preparation,
        endpoints: Endpoints,
        own: Membership,
        off_loop: OffLoop,
    ) -> None:
        self.store = store
        self.endpoints = endpoints
        self.me = store.key.node
        name = options.name or platform.node() or "node"
        self.name = name.encode()[:MAX_LABEL_BYTES].decode(errors="ignore")
        self.version = __version__
        self.since = time.monotonic()
        self.incarnation = own.incarnation
        self.machine = Mesh(
            store.key, own.credential, own.incarnation, now=self.now(), wall_s=time.time()
        )
        self.machine.restore(load_records(store), self.now())
        side = Own(store.key, own.incarnation, own.credential)
        here = Machine(machine_secret(), own.credential.mesh)
        dialer = NodeDialer(endpoints.schemes, side, here)
        self._gate = MemberAdmission(store, own.credential, self.machine.removals, off_loop)
        self.links = MeshLinks(dialer, self.machine, self._gate, self)
        self.ring_member = RingMember(self.machine, self.links, self._plan_reason)
        self.router = RequestRouter(
            self.me,
            self.ring_member,
            self.links.post,
            longest=self._longest_request,
            off_loop=off_loop,
        )
        self.router.trusted = options.trust
        self._server = WeightServer(off_loop)
        dial, folder = self.links.dial_weights, cache_path() / "weights"
        fetcher = WeightFetcher(dial, folder, self._digest_of, self._check_parts, off_loop)
        self.supply = WeightSupply(self.me, fetcher, self, off_loop)
        self.planner = Planner(self._view, self._agreed, off_loop, self._foreseen)
        self._ambiguous = self._hang = ""
        self.stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_leaving = self._is_scheduled = False
        self._options, self._own, self._preparation = options, own, preparation
        self._profile = Profile(
            self.name,
            __version__,
            endpoints.addresses,
            memory_bytes=0,
            machine=here.tag(self.me),
            is_exact=options.inference.is_exact,
        )
        self._measured, self._retry_s = self._profile, FIRST_RETRY_S
        self._off_loop = off_loop
        self._unsaved = asyncio.Event()
        self._pending: tuple[Plan | None, bool] | None = None
        self._names, self._twin = resolve_names((), {}), Twin()
        self._charter_known = asyncio.Event()
        self._moving = asyncio.Event()
        self._target: GroupId | None = None  # the group in which to take part soon
        self._unable: set[ModelKey] = set()  # models that could not be opened
        self._beacon: Beacon | None = None
        self._context = copy_context()  # of the supervisor, for callbacks from other contexts
        self._jobs = asyncio.TaskGroup()

    @property
    def agreement(self) -> Agreement | None:
        """The latest; None before the first."""
        return self.planner.agreement

    @property
    def trouble(self) -> str:
        """A condition that needs the owner's attention; empty if there is none."""
        return self._hang or self._ambiguous

    @property
    def ticket(self) -> str:
        """A new ticket for `ticket_uses` nodes."""
        return self.invite(Role.NODE, TICKET_S, self.ticket_uses)

    @property
    def ticket_uses(self) -> int:
        """The number of other nodes of `--members`, else one."""
        return max(1, (self._options.members or 1) - 1)

    @property
    def mesh(self) -> MeshId:
        """The mesh of which this node is a member."""
        return self._own.credential.mesh

    def view(self) -> NodeView:
        """Take a snapshot for the status."""
        machine, ring_member, links = self.machine, self.ring_member, self.links.by_peer
        return NodeView(
            self.me,
            self.name,
            self.version,
            self.mesh,
            self.incarnation,
            since_s=time.monotonic() - self.since,
            is_leaving=self.is_leaving,
            addresses=self.endpoints.addresses,
            networks=tuple(self.endpoints.survey()),
            charter=ring_member.charter or machine.charter,
            profiles=dict(machine.profiles),
            states=dict(machine.states),
            hosts={node: machine.hosts(node) for node in machine.profiles},
            alive=machine.alive,
            removed=tuple(machine.removals),
            links={
                peer: LinkView(
                    contact.role,
                    tuple(each.issuer for each in contact.credential.chain),
                    contact.instance,
                    contact.round_trip_us,
                    heard_s=max(0.0, self.now() - contact.heard),
                    ahead_s=contact.ahead_s,
                    statistics=links[peer].statistics,
                    address=links[peer].address,
                )
                for peer, contact in machine.links.items()
                if peer in links
            },
            agreement=self.agreement,
            advice=self.planner.advice,
            plan=ring_member.plan,
            is_served=ring_member.serving_entry() is not None,
            reason=ring_member.reason(),
            trouble=str(ring_member.trouble or ""),
            sessions=ring_member.sessions,
            recomputed=ring_member.recomputed,
            counts=replace(self.router.counts),
            group=ring_member.group,
            rings=self._rings(),
            execution=ring_member.execution,
            warnings=(self.trouble,) if self.trouble else (),
        )

    def _rings(self) -> tuple[RingView, ...]:
        """Return all rings of the mesh."""
        view, member = self._view(), self.ring_member
        if view is None:
            return ()
        lacking = shortage(view) if has_several(view) else {}
        return tuple(
            RingView(
                group,
                plan := member.plan if group.id == member.group else member.plan_of(group.id),
                is_served=plan is not None
                and (group.id != member.group or member.serving_entry() is not None),
                lacks_bytes=lacking.get(group.id, 0),
            )
            for group in groups_of(view.charter)
        )

    def invite(self, role: Role, lasts_s: float | None, uses: int | None) -> str:
        """Create a ticket; None means no limit."""
        addresses = self.endpoints.addresses
        return self.store.invite(addresses, role, lasts_s=lasts_s, uses=uses).encode()

    def _longest_request(self) -> int:
        """Return the limit on the bytes of a request, from the context length of the mesh."""
        charter = self.machine.charter
        context = charter.shape.context if charter else 0
        return min(REQUEST_BYTES, REQUEST_HEAD_BYTES + TOKEN_BYTES * context)

    def _records(self) -> SavedRecords:
        return SavedRecords.of(self.machine, self.links.local_of)

    def expel(self, removal: Removal) -> None:
        """Publish the removal of a member, and close the link to it."""
        self.links.act(self.machine.remove(removal, self.now()))
        save_records(self.store, self._records())  # on disk before the caller returns

    async def serve_model(self, asked: ModelOptions) -> Charter:
        """Let the mesh serve a model, or change how it does; return the charter of the model.

        Raises:
            MeshError: this node does not have the model, or the mesh cannot serve it.
        """
        whole = self._known_charter()
        model = whole.find(asked.model)
        if model is None or asked.quant not in {None, str(model.quant)}:
            quant = _quant(asked.quant or str(Quant.NONE))
            context = asked.context or CONTEXT
            model = await self._preparation.describe(asked.model, quant, context)
            whole = self._known_charter()  # it may have changed
            model = next((each for each in whole.served if each.key == model.key), model)
        key = model.key
        self._amend_models(serve(whole, model, asked), f"model.{key.hex()}")
        return next(each for each in self._known_charter().served if each.key == key)

    def stop_model(self, name: str) -> None:
        """Let the mesh no longer serve a model; raise `MeshError` if it does not, or cannot."""
        self._amend_models(stop(self._known_charter(), name), "models")

    def _known_charter(self) -> Charter:
        if self.machine.charter is None:
            raise LinkLost("This node is not in contact with the mesh yet", hint="retry later")
        return self.machine.charter

    def _amend_models(self, wanted: Charter, what: str) -> None:
        """Publish another charter; raise `MeshError` if the mesh cannot take it."""
        self.links.act(self.machine.publish(charter=wanted, now=self.now()))
        if differing(wanted, self._known_charter()):
            raise MeshError(
                f"The mesh cannot store the change of `{what}`",
                hint="stop models on the node that served them, or begin a new mesh",
            )
        self.changed()

    def revoke(self, tags: tuple[bytes, ...]) -> None:
        """Publish the API keys that the owner of this node revoked."""
        self._profile = replace(self._profile, revoked=tags)
        if not self.is_leaving:
            self._publish(profile=self._profile)

    def leave(self) -> None:
        """Leave the ring, finish the requests of its clients, leave the mesh, and stop.

        The ring serves until the other nodes have agreed on a plan without this node.
        """
        if not self.is_leaving:
            self.is_leaving = self.ring_member.is_leaving = True
            self.ring_member.publish()
            self._jobs.create_task(self._drain())

    async def run(self) -> None:
        """Run the node until cancelled."""
        async with self._jobs, AsyncExitStack() as stack:
            for part in (
                self._run_links,
                self.router.run,
                self.planner.run,
                self._redial,
                self._provide if self.ring_member.provider else self._serve,
                self._survey,
                self._save,
                self._watch,
            ):
                self._jobs.create_task(self._guarded(part))
            await asyncio.sleep(0)  # let the links start
            self._publish(profile=self._profile)
            self.ring_member.publish()
            if self._own.link is not None:
                self.links.adopt(self._own.link)
            if self._options.discovery:
                beacon = await stack.enter_async_context(
                    open_beacon(self.mesh, self.me, self.links.hint, self._gate.guests)
                )
                self._beacon = beacon
                beacon.addresses = self.endpoints.addresses
                self._jobs.create_task(beacon.run())
            self.endpoints.on_change(lambda: self._call_later(0, self._update_addresses))
            self._update_addresses()  # in case they changed before
            await asyncio.Event().wait()  # never set: wait until cancelled

    def close(self) -> None:
        """Write records to disk that are not written yet."""
        if self._unsaved.is_set():
            with self._warned():
                save_records(self.store, self._records())

    def ended(self, running: asyncio.Future[None]) -> None:
        """Pass a bug that ended the node on to `stopped`."""
        if not running.cancelled() and (error := running.exception()):
            self._stop(error)

    # Callbacks of the mesh links, see `LinkHost`.

    def changed(self) -> None:
        """Schedule planning, once for all changes in this turn of the event loop."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._call_later(0, self._stir)

    async def ring(self, link: SecureLink) -> None:
        """Accept a ring link of the previous rank."""
        if self.ring_member.runtime is None:
            await link.close()
        else:
            await self.ring_member.runtime.arrive(link, link.peer)

    async def weights(self, link: SecureLink) -> None:
        """Send weights to another node."""
        await self._server.serve(link)

    def deliver_request(self, peer: NodeId, message: RequestMessage, *, is_client: bool) -> None:
        """Handle a message about a request."""
        self.router.receive(peer, message, is_client=is_client)

    def lost(self, peer: NodeId) -> None:
        """Fail requests that depend on the lost peer."""
        self.router.lost(peer)

    def dropped(self, peer: NodeId, why: CloseReason) -> None:
        """Log why a peer closed the link; stop if another process uses the same key."""
        logger.info("node %s closed the link: %s", short(peer), why.name.lower())
        is_twin, heard = why is CloseReason.TWIN and not self.links.by_peer, self.machine.heard
        if error := self._twin.dropped(peer, is_twin=is_twin, now=self.now(), heard=heard):
            self._stop(error)

    # Callbacks of the supply of weights, see `SupplyHost`.

    def mesh_view(self) -> MeshView | None:
        """Take a snapshot of the records, with the charter of this node's ring; None without."""
        view = self._view()
        return ring_of(view) if view else None

    def linked(self) -> Collection[NodeId]:
        """Return the nodes that are linked to this one."""
        return tuple(self.links.by_peer)

    def changes(self) -> AsyncIterator[None]:
        """Yield once at first, then after each possible change of the records."""
        return self.ring_member.changes()

    def own_weights(self) -> Sequence[bytes]:
        """Return the digests of the weights that are here, even while no offer is published."""
        return self._measured.weights

    async def part_sizes(self) -> Sequence[int]:
        """Return the most bytes of the file of each part of the model."""
        assert self.ring_member.model is not None  # it is open before weights are fetched
        return await self._preparation.part_sizes(self.ring_member.model)

    async def hash_weights(self) -> None:
        """Publish the digests of the weights that are here now."""
        assert self.ring_member.model is not None
        weights = await self._preparation.hash_weights(self.ring_member.model)
        self._measured = replace(self._measured, weights=weights)
        self._offer(is_open=bool(self._profile.layer_s))

    def publish_state(self) -> None:
        """Publish whether this node fetches weights."""
        self.ring_member.obstacle = self.supply.obstacle
        self.ring_member.publish()

    # Inside.

    def _stir(self) -> None:
        self._is_scheduled = False
        self._unsaved.set()
        if self._is_member():
            if self.machine.charter is not None:
                self._charter_known.set()
            self.planner.invalidate()
            self._withdraw()
            self.ring_member.publish()

    def _view(self) -> MeshView | None:
        """Take a snapshot of the records for planning; None before there is a charter."""
        machine = self.machine
        if machine.charter is None or machine.author is None:
            return None
        return MeshView(
            self.me, machine.charter, machine.author, dict(machine.profiles),
            dict(machine.states), tuple(machine.removals), self.ring_member.group,
        )  # fmt: skip

    def _agreed(self) -> None:
        self.ring_member.agreement = self.agreement
        self._schedule_follow()
        self._schedule_move()
        self._amend()
        self.ring_member.publish()

    def _foreseen(self, plan: Plan | None) -> None:
        if runtime := self.ring_member.runtime:
            runtime.prepare(plan)

    def _schedule_follow(self) -> None:
        """Schedule following the plan once it has been stable for a while.

        When a node joins or leaves, its links change one by one, and each change could give a
        short-lived plan, for which layers would be loaded.
        """
        plan = self.agreement.plan if self.agreement else None
        is_whole = not (self.agreement and self.agreement.lacking)
        if (plan, is_whole) == self._pending:
            return
        self._pending = plan, is_whole
        self._call_later(SETTLE_S if is_whole else GATHER_S, self._follow, self._pending)

    def _follow(self, pending: tuple[Plan | None, bool]) -> None:
        plan, _ = pending
        if pending != self._pending or not (runtime := self.ring_member.runtime):
            return
        if plan and runtime.plan and plan.precedence < runtime.plan.precedence:
            return  # older than the plan that this node follows; a newer one will come
        runtime.follow(plan)
        self.ring_member.publish()

    def _schedule_move(self) -> None:
        """Schedule the move to another group once it has been wanted for a while."""
        target = self.planner.groups.get(self.me)
        if target == self._target or self.ring_member.provider:
            return
        self._target = target
        if target not in {None, self.ring_member.group}:
            self._call_later(SETTLE_S, self._move, target, self.now() + MOVE_S)

    def _move(self, target: GroupId, latest: float) -> None:
        """Move to another group; if that may wait, only when no session is in progress."""
        if target != self._target or self.is_leaving:
            return
        if self.ring_member.sessions and self.now() < latest:
            self._call_later(SETTLE_S, self._move, target, latest)
            return
        self._moving.set()

    def _amend(self) -> None:
        """Amend the charter if the names in the options resolve to other nodes now."""
        charter, model = self.machine.charter, self.ring_member.model
        if self.ring_member.group != FIRST_GROUP:
            return
        if self._names.is_complete or charter is None or model is None:
            return
        if self._resolve_options():
            amended = amend(charter, self._options, self.machine.profiles, model.shape.context)
            if amended != charter:
                self._publish(charter=amended)

    def _resolve_options(self) -> bool:
        """Resolve the names in the options, warn of ambiguous ones; return whether any changed."""
        before, names = self._names, resolve_names(names_in(self._options), self.machine.profiles)
        self._names = names
        for name in names.ambiguous:
            if name not in before.ambiguous:
                logger.warning("several nodes match `%s`: give the whole id of one", name)
        several = ", ".join(f"`{name}`" for name in names.ambiguous)
        self._ambiguous = several and f"several nodes match {several}: give whole ids"
        return names != before

    def _plan_reason(self) -> str:
        """Return why there is no plan."""
        if self._hang or self.supply.progress:
            return self._hang or self.supply.progress
        if self.ring_member.provider and self.agreement is None:
            return PROVIDES if self.links.by_peer else "no contact with the mesh yet"
        if self.agreement is not None and self.agreement.plan is not None:
            if lacking := self.agreement.lacking:
                charter = self.ring_member.charter
                members = charter.members if charter else None
                here = f"{(members or lacking) - lacking} of {members or lacking} members"
                return f"{here} are ready, up to {GATHER_S:.0f} s for the others"
            return "the nodes are agreeing on a plan"
        if self.agreement is not None:
            is_early = not self.agreement.offers and not self.agreement.refused
            is_early &= self.ring_member.provider is None
            return "the nodes are loading the model" if is_early else self.agreement.reason
        is_known = self.machine.charter or self._own.is_founder
        return "this node is loading the model" if is_known else "no contact with the mesh yet"

    def _is_member(self) -> bool:
        credential = self._own.credential
        try:
            check(credential, self.me, credential.mesh, time.time(), self.machine.removals)
        except NotAuthorised as error:
            self._stop(error)
            return False
        return True

    def _withdraw(self) -> None:
        """Retract the offer if the span cannot be loaded; offer again later, with backoff.

        After running out of memory, the next offer is too small for that span.
        """
        trouble = self.ring_member.trouble
        if trouble is None or not self._profile.layer_s:
            return
        if isinstance(trouble, OutOfMemory):
            less = self._measured.reserve_bytes + int(trouble.needed_bytes * SMALLER)
            memory = min(self._measured.memory_bytes, less)
            self._measured = replace(self._measured, memory_bytes=memory)
        self._offer(is_open=False)
        self._call_later(self._retry_s, self._offer_again)
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)

    def _offer_again(self) -> None:
        trouble, self.ring_member.trouble = self.ring_member.trouble, None
        self._offer(is_open=not self._hang)
        if self.ring_member.runtime and not isinstance(trouble, OutOfMemory):
            self.ring_member.runtime.reload()  # the plan may still be the same

    def _offer(self, *, is_open: bool) -> None:
        """Publish the measured offer, or retract it."""
        own, profile = self._measured, self._profile
        if is_open:
            weights, layer_s, memory = own.weights, own.layer_s, own.memory_bytes
            profile = replace(profile, weights=weights, layer_s=layer_s, memory_bytes=memory)
        else:
            profile = replace(profile, weights=(), layer_s=())
        self._profile = profile
        self._publish(profile=profile)

    async def _watch(self) -> None:
        """Retract the offer while the compute thread hangs.

        The event loop still sends heartbeats, so peers cannot tell a hung node from a busy one.
        """
        worker = self._preparation.worker
        while True:
            await self._watch_sleep(worker)
            if not (hung_s := worker.hung_s) or not self._profile.layer_s:
                continue
            self._hang = f"the compute thread has hung for {hung_s:.0f} s"
            logger.warning("%s: this node retracts its offer until it responds", self._hang)
            self.ring_member.is_hung = True
            self._offer(is_open=False)
            self.ring_member.publish()
            while worker.hung_s:  # a hung thread sets no event
                await asyncio.sleep(WATCH_S)
                if self._profile.layer_s:  # offered again, for another ring
                    self._offer(is_open=False)
            self._hang = ""
            logger.warning("the compute thread responds again")
            self.ring_member.is_hung = False
            self.ring_member.publish()
            if not self.ring_member.trouble:
                self._offer(is_open=True)

    async def _watch_sleep(self, worker: Worker) -> None:
        """Sleep until a hang may have begun; excuse the worker for the time that is slept more.

        This process may have been stopped meanwhile.
        """
        hangs_in_s = worker.hangs_in_s
        sleep_s = WATCH_S if hangs_in_s is None else min(WATCH_S, max(WATCH_LEAST_S, hangs_in_s))
        until = self.now() + sleep_s
        await asyncio.sleep(sleep_s)
        worker.excuse(max(0.0, self.now() - until))

    async def _serve(self) -> None:
        """Serve in one ring after the other, each with its model."""
        machine, found = self.machine, None
        if machine.charter is None and self._own.is_founder:
            found, charter = await self._preparation.found()
            self._publish(charter=charter)
        else:
            await self._charter_known.wait()
            assert machine.charter is not None  # never unset
            if len(groups_of(machine.charter)) > 1:
                self._regroup(UNASSIGNED)
        while True:
            serving = asyncio.ensure_future(self._serve_ring(found))
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
            self._regroup(self.ring_member.group if target is None else target)

    def _regroup(self, group: GroupId) -> None:
        """Take part in another group, and retract the offer of the last one."""
        self._moving.clear()
        self.supply.end()
        self._pending = None
        self._retry_s = FIRST_RETRY_S
        self._measured = self._profile = replace(self._profile, weights=(), layer_s=(), model="")
        self._publish(profile=self._profile)
        self.ring_member.end(group)
        self.planner.move()

    async def _serve_ring(self, model: ModelRuntime | None) -> None:
        """Load and profile the model, publish the offer, and run the ring runtime."""
        preparation, ring = self._preparation, self.ring_member.charter
        if ring is None:
            return  # until there is a ring for this node
        if model is None:
            try:
                model = await self._join(ring)
            except ModelError as error:
                if not self._profile.models:
                    raise
                self._give_up(ring.key, error)
                return
        if self.ring_member.group == FIRST_GROUP:
            self._amend_first(model)
        offered = await preparation.offer(model, self._profile)
        self._measured = offered = replace(offered, models=self._profile.models)
        addresses, revoked = self.endpoints.addresses, self._profile.revoked  # may have changed
        self._profile = replace(offered, addresses=addresses, revoked=revoked)
        self.supply.begin(offered.weights, model.source.folder)
        self._publish(profile=self._profile)
        runtime = self.ring_member.begin(model)
        self._server.offer(ring.config_digest, lambda: preparation.parts(model))
        model.obtain = self.supply.obtain
        self._pending = None  # follow the plan that was agreed on before
        self.changed()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.supply.run())
            await runtime.run()

    def _amend_first(self, model: ModelRuntime) -> None:
        """Amend the charter by the options of this node."""
        machine = self.machine
        assert machine.charter is not None  # never unset
        longest = model.shape.context
        charter = amend(machine.charter, self._options, dict(machine.profiles), longest)
        if charter != machine.charter:
            self._publish(charter=charter)
        self._resolve_options()
        for name in self._names.unknown:
            logger.warning("no node is named `%s` yet", name)

    def _give_up(self, model: ModelKey, error: ModelError) -> None:
        """Publish that this node cannot hold a model, so that it gets another one."""
        logger.warning("this node cannot serve in its ring: %s", error)
        self._unable.add(model)
        self._profile = replace(
            self._profile, models=tuple(each for each in self._profile.models if each != model)
        )
        self._publish(profile=self._profile)

    async def _survey(self) -> None:
        """Publish which models of the mesh this node may hold, while the mesh has several.

        Without `--model` it may also hold those whose weights another node can send.
        """
        known: tuple[ModelKey, ...] = ()
        held: tuple[ModelKey, ...] = ()
        async with aclosing(self.ring_member.changes()) as changes:
            async for _ in changes:
                charter = self.machine.charter
                if charter is None or self.ring_member.provider:
                    continue
                keys = tuple(each.key for each in charter.served)
                if not (self._profile.models or len(groups_of(charter)) > 1):
                    continue
                if keys != known:
                    known, held = keys, await self._preparation.held(charter.served)
                models = self._may_hold(charter, held)
                if models == self._profile.models:
                    continue
                if not self._profile.memory_bytes:
                    self._profile = await self._preparation.room(self._profile)
                self._profile = replace(self._profile, models=models)
                self._measured = replace(self._measured, models=models)
                self._publish(profile=self._profile)

    def _may_hold(self, charter: Charter, held: Collection[ModelKey]) -> tuple[ModelKey, ...]:
        is_free = self._options.model is None
        return tuple(
            each.key
            for each in charter.served
            if each.key not in self._unable
            and (
                each.key in held or (is_free and self.supply.can_fetch(each, self.machine.profiles))
            )
        )

    async def _join(self, charter: Charter) -> ModelRuntime:
        """Open the model of a ring; fetch its description from another node if it is not here.

        While the mesh has several models, this node tries another one if nobody describes it.
        """
        try:
            return await self._preparation.join(charter)
        except ModelMissing as missing:
            if self._options.model is not None:
                raise
            try:
                async with asyncio.timeout(DESCRIBE_S if self._profile.models else None):
                    folder = await self.supply.describe()
            except TimeoutError:
                raise missing from None
        return await self._preparation.join(charter, folder)

    async def _digest_of(self, folder: Path) -> Digest:
        return await self._preparation.digest_folder(folder.name, folder)

    async def _check_parts(self, folder: Path, weights: Mapping[str, int]) -> None:
        await self._preparation.check_parts(folder.name, folder, weights)

    async def _provide(self) -> None:
        """Publish what the engine of this node serves, instead of layers."""
        provider = self.ring_member.provider
        assert provider is not None  # else this does not run
        await provider.run(self.ring_member.publish)

    def _update_addresses(self) -> None:
        """Publish the current addresses."""
        addresses = self.endpoints.addresses
        if addresses != self._profile.addresses and not self.is_leaving:
            self._profile = replace(self._profile, addresses=addresses)
            self._publish(profile=self._profile)
            if self._beacon is not None:
                self._beacon.addresses = addresses

    def _publish(self, *, profile: Profile | None = None, charter: Charter | None = None) -> None:
        self.links.act(self.machine.publish(profile=profile, charter=charter, now=self.now()))
        if charter is not None and self.machine.charter is not None:
            for name in differing(charter, self.machine.charter):
                logger.warning("the mesh keeps its `%s`: the change cannot be published", name)

    async def _redial(self) -> None:
        """Dial the known addresses of members: often while no node is linked, else rarely.

        Two partitions of a mesh that were never linked have no other way to find each other.
        """
        while True:
            for node, addresses in self._own.hints:
                self.links.hint(node, addresses)
            await asyncio.sleep(REDIAL_LINKED_S if self.links.by_peer else REDIAL_S)

    async def _save(self) -> None:
        """Save charter, removals, and addresses of members for the next start."""
        while True:
            await self._unsaved.wait()
            await asyncio.sleep(SAVE_S)
            records = self._records()
            with self._warned():
                await self._off_loop(save_records, self.store, records)
            if records == self._records():
                self._unsaved.clear()

    @staticmethod
    @contextmanager
    def _warned() -> Iterator[None]:
        """Log instead of raise if the state folder cannot be written, such as on a full disk."""
        try:
            yield
        except MeshError as error:
            logger.warning("%s", error)

    async def _drain(self) -> None:
        """Wait until no request runs, then leave."""
        try:
            async with asyncio.timeout(DRAIN_S):
                # Polled: it happens once in the life of a node, not worth an event per session.
                while self.router.counts.active or self.ring_member.sessions:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        except TimeoutError:
            logger.warning("requests still running after %d s", DRAIN_S)
        self.ring_member.has_left = True
        await self.links.leave()
        self._stop(None)

    async def _run_links(self) -> None:
        await self.links.run(self.endpoints.listeners)

    async def _guarded(self, part: Callable[[], Awaitable[None]]) -> None:
        """Run a part of the node; a `MeshError` ends the node with that error."""
        try:
            await part()
        except MeshError as error:
            self._stop(error)

    def _call_later(self, delay_s: float, callback: Callable[[*Ts], None], *args: *Ts) -> None:
        """Schedule a callback; an error in it ends the node."""
        loop = asyncio.get_running_loop()
        loop.call_later(delay_s, callback, *args, context=self._context)

    def _stop(self, error: BaseException | None) -> None:
        if self.stopped.done():
            return
        if error is None:
            self.stopped.set_result(None)
        else:
            self.stopped.set_exception(error)

    @staticmethod
    def now() -> float:
        """Return the time of the event loop, in seconds."""
        return asyncio.get_running_loop().time()


def _quant(text: str) -> Quant:
    try:
        return Quant(text)
    except ValueError:
        raise UserError(f"Unknown quantisation `{text[:100]}`", hint=", ".join(Quant)) from None


@asynccontextmanager
async def open_node(
    options: NodeOptions,
    transport: Transport | None = None,
    worker: Worker | None = None,
    prepare: Callable[[NodeOptions, Worker, Path], Preparation] = Preparation,
    off_loop: OffLoop = asyncio.to_thread,
    provider: Provider | None = None,
) -> AsyncIterator[MeshNode]:
    """Run a node inside the context, which is entered once it is a member of its mesh.

    Nodes of one process share a worker: torch and transformers load one model at a time. A
    simulation replaces ``prepare`` and ``off_loop``. With a ``provider``, the node holds no layers.

    Raises:
        UserError: the state folder, the address or the ticket is invalid.
        NotAuthorised: the ticket is rejected.
        PluginError: a transport is missing or broken.
    """
    store = StateStore.open(options.state)
    async with AsyncExitStack() as stack:
        supervisor = stack.enter_context(Supervisor())
        stack.enter_context(store.locked())
        with supervisor.scope():
            if worker is None:
                worker = await stack.enter_async_context(
                    compute_thread(options.inference.threads or 1)
                )
            endpoints = await stack.enter_async_context(
                open_endpoints(options, store.key, transport)
            )
            own = await enter(store, options, endpoints.transports)
            options = with_own_entry(options, store.key.node)
            preparation = prepare(options, worker, cache_path())
            node = MeshNode(options, store, preparation, endpoints, own, off_loop)
            node.ring_member.provider = provider
            running = asyncio.ensure_future(node.run())
        running.add_done_callback(node.ended)
        supervisor.failed.add_done_callback(node.ended)
        node.stopped.add_done_callback(lambda _: running.cancel())
        try:
            await asyncio.sleep(0)
            yield node
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            node.close()
