"""A node of a mesh: the driver that connects membership, planning and the ring.

Theory of operation
-------------------
The mesh links feed the membership machine. Whenever its records change, the `RingService` computes
the agreement again, and the ring runtime follows the resulting plan: it loads its span, connects to
its neighbours and serves. The node publishes the progress, and its `NodeOffer`. Requests go to the
router, which finds the entry. There is no leader: every node computes the same plan from the same
records.
"""

import asyncio
import logging
import platform
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
)
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from meshllm import __version__
from meshllm.config import cache_path
from meshllm.errors import NotAuthorised
from meshllm.local_files import keep_temporary_files
from meshllm.names import MeshId, NodeId, short
from meshllm.node.agreement.charter_editor import CharterEditor
from meshllm.node.agreement.offer import NodeOffer
from meshllm.node.agreement.own_state import OwnState
from meshllm.node.agreement.ring_directory import RingDirectory
from meshllm.node.agreement.ring_server import NodeParts
from meshllm.node.agreement.ring_service import RingService
from meshllm.node.charter_options import with_own_entry
from meshllm.node.event_loop import OffLoop
from meshllm.node.lifetime import Lifetime
from meshllm.node.membership.admission import MemberAdmission
from meshllm.node.membership.bootstrap import Membership, enter
from meshllm.node.membership.saved_models import load_models, save_models
from meshllm.node.membership.saved_records import (
    RecordKeeper,
    SavedRecords,
    expected_nodes,
    left_nodes,
    restore_records,
)
from meshllm.node.membership.state_store import StateStore
from meshllm.node.net.beacon import Beacon, MemberBeacons, open_beacon
from meshllm.node.net.dialer import NodeDialer
from meshllm.node.net.endpoints import Endpoints, open_endpoints
from meshllm.node.net.mesh_link import MeshLinks
from meshllm.node.net.peer_address import SameHostDetector, machine_secret
from meshllm.node.net.secure import SecureLink
from meshllm.node.options import FIRST_MODEL, ModelOptions, NodeOptions
from meshllm.node.provider import Provider
from meshllm.node.requests.request_json import REQUEST_BYTES
from meshllm.node.requests.router import RequestRouter
from meshllm.node.supervisor import Supervisor
from meshllm.node.timer import loop_time
from meshllm.node.training import TrainingRelay, TrainingServer
from meshllm.node.view import LinkView, NodeView
from meshllm.node.weights import WeightServer
from meshllm.protocol.agreement.agreement import Agreement
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.codec import CloseReason, RequestMessage
from meshllm.protocol.membership.duplicate_identity import DuplicateIdentity
from meshllm.protocol.membership.mesh import Mesh
from meshllm.protocol.membership.records import MAX_LABEL_BYTES, Profile
from meshllm.protocol.trust.credential import NO_LIMITS, ClientLimits, Removal, Role, check
from meshllm.protocol.trust.handshake import LocalIdentity
from meshllm.transport.contract import Transport

if TYPE_CHECKING:  # a provider holds no layers, and imports no torch
    from meshllm.node.compute.worker import Worker
    from meshllm.node.preparation import Preparation

__all__ = ["MeshNode", "NodeOptions", "open_node"]

SAVE_S = 1.0  # s; changes within it are written to disk together
REDIAL_S = 2.0  # s between two dials of known addresses while no node is linked
REDIAL_LINKED_S = 30.0  # s between two dials of members that are not linked
REQUEST_HEAD_BYTES = 64 * 1024  # of a request beside its text
TOKEN_BYTES = 64  # of one token as JSON: a word of ten letters, each escaped
DRAIN_S = 60.0  # s to finish running requests before the node leaves,
IDLE_DRAIN_S = 4.0  # and without any, for others to load its layers
HEAR_S = 1.0  # s; a member tells what it knows in one round trip
TICKET_S = 24 * 3600.0  # s of validity of the ticket shown at startup

logger = logging.getLogger(__name__)


class MeshNode:
    """A running node; created by `open_node`."""

    def __init__(
        self,
        options: NodeOptions,
        store: StateStore,
        preparation: "Preparation | None",
        endpoints: Endpoints,
        own: Membership,
        off_loop: OffLoop,
    ) -> None:
        self.life = Lifetime()
        self.stopped = self.life.stopped
        self.store = store
        self.endpoints = endpoints
        self.me = store.key.node
        name = options.name or platform.node() or "node"
        self.name = name.encode()[:MAX_LABEL_BYTES].decode(errors="ignore")
        self.since = time.monotonic()
        self.incarnation = own.incarnation
        self.machine = Mesh(
            store.key, own.credential, own.incarnation, now=loop_time(), wall_s=time.time()
        )
        restore_records(store, self.machine, loop_time())
        side = LocalIdentity(store.key, own.incarnation, own.credential)
        here = SameHostDetector(machine_secret(), own.credential.mesh)
        dialer = NodeDialer(endpoints.schemes, side, here)
        self._gate = MemberAdmission(store, own.credential, self.machine.removals, off_loop)
        self.links = MeshLinks(dialer, self.machine, self._gate, self)
        self.state = OwnState(
            self.machine,
            self.links,
            self._plan_reason,
            self.life.call_later,
            self.changed,
            keep_s=options.keep_s,
        )
        self.ring_member = self.state.first
        self.rings = RingDirectory(self.machine, self.links, self.state)
        self.router = RequestRouter(
            self.me,
            self.rings,
            self.links.post,
            longest=self._longest_request,
            off_loop=off_loop,
        )
        self.router.trusted = options.trust
        self.router.peers.limits_of = self._limits_of
        self._is_scheduled = self._is_refreshing = False
        self._off_loop = off_loop
        self._options, self._own, self._preparation = options, own, preparation
        profile = Profile(
            self.name,
            __version__,
            endpoints.addresses,
            memory_bytes=0,
            machine=here.tag(self.me),
            is_exact=options.inference.is_exact,
        )
        self._offer = NodeOffer(profile, self._send, self.ring_member, self.life.call_later)
        self.charter_editor = CharterEditor(options, self.machine, self.links, preparation)
        self._weights = WeightServer(off_loop)
        self._training = TrainingServer(self.life.call_later)
        self.relay = TrainingRelay(
            self.me, self.rings.plan_with, self.links.dial_training, self._training
        )
        """Sends batches for training to the nodes with the layers."""
        self.service = RingService(
            NodeParts(
                self.machine,
                self.links,
                self.state,
                self._offer,
                self.charter_editor,
                preparation,
                self._weights,
                self._training,
                off_loop,
                self.life.call_later,
                self.changed,
                self.life.spawn,
                is_founder=own.is_founder,
                has_own_model=options.model is not None,
            )
        )
        self.records = RecordKeeper(
            store,
            lambda: SavedRecords.of(self.machine, self.links.local_of),
            off_loop,
            pause_s=SAVE_S,
        )
        """Saves charter, removals, and addresses of members for the next start."""
        self._duplicate_identity = DuplicateIdentity()
        self._beacon: Beacon | None = None

    @property
    def agreement(self) -> Agreement | None:
        """The latest; None before the first."""
        return self.service.first.agreement

    @property
    def is_leaving(self) -> bool:
        """Whether it finishes its requests, to leave the mesh."""
        return self.state.is_leaving

    @property
    def trouble(self) -> str:
        """A condition that needs the owner's attention; empty if there is none."""
        return self._offer.hang or self.charter_editor.ambiguous

    @property
    def is_founder(self) -> bool:
        """Whether this node founded the mesh."""
        return self._own.is_founder

    @property
    def ticket_uses(self) -> int:
        """The number of nodes of `--members` that are not known here, 0 if all are; else one."""
        charter = self.machine.charter
        asked = self._options.members
        members = (charter and charter.members) or 0 if asked is None else asked
        provide = {node for node, state in self.machine.states.items() if state.offers}
        gone = {self.me, *self.machine.removals, *provide}
        others = {*self.machine.profiles, *self.store.peers} - gone
        if members == 1 or (members > 1 and others):
            return max(0, members - 1 - len(others))
        return max(1, members - 1)

    @property
    def first_model(self) -> str | None:
        """The first model of the mesh, or what this node gives it; None if another one decides."""
        if self.machine.charter is not None:
            return self.machine.charter.shape.name
        return self._options.model or (None if self._options.join else FIRST_MODEL)

    async def wait_for_charter(self) -> None:
        """Wait up to `HEAR_S` for the charter, which arrives after the records of the nodes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(HEAR_S), aclosing(self.state.changes()) as changes:
                async for _ in changes:
                    if self.machine.charter is not None:
                        return

    @property
    def mesh(self) -> MeshId:
        """The mesh of which this node is a member."""
        return self._own.credential.mesh

    def view(self) -> NodeView:
        """Take a snapshot for the status."""
        machine, ring_member, links = self.machine, self.ring_member, self.links.by_peer
        state, rings = self.state, self.rings
        plan, is_served = ring_member.plan, ring_member.serving_entry() is not None
        if state.provider:  # it follows no plan, and answers with the rings of others
            plan, is_served = rings.ring(ring_member.group)
        return NodeView(
            self.me,
            self.name,
            __version__,
            self.mesh,
            self.incarnation,
            since_s=time.monotonic() - self.since,
            is_leaving=self.is_leaving,
            addresses=self.endpoints.addresses,
            networks=tuple(self.endpoints.survey()),
            charter=ring_member.charter or machine.charter,
            profiles=dict(machine.profiles),
            states=dict(machine.states),
            inviters={node: machine.inviters(node) for node in machine.profiles},
            alive=machine.alive,
            removed=tuple(machine.removals),
            links={
                peer: LinkView(
                    contact.role,
                    tuple(each.issuer for each in contact.credential.chain),
                    contact.instance,
                    contact.round_trip_us,
                    heard_s=max(0.0, loop_time() - contact.heard),
                    ahead_s=contact.ahead_s,
                    statistics=links[peer].statistics,
                    address=links[peer].address,
                )
                for peer, contact in machine.links.items()
                if peer in links
            },
            agreement=self.agreement,
            advice=self.service.first.planner.advice,
            plan=plan,
            is_served=is_served,
            reason=rings.reason() if state.provider else ring_member.reason,
            trouble=str(ring_member.trouble or ""),
            sessions=state.sessions,
            recomputed=state.recomputed,
            counts=replace(self.router.counts),
            group=ring_member.group,
            rings=self.service.rings(rings),
            execution=ring_member.execution,
            history=ring_member.history,
            warnings=(self.trouble,) if self.trouble else (),
            unanswered=self._unanswered(),
        )

    def _unanswered(self) -> int:
        """Return how many members are expected while none is linked; see `MeshStatus`."""
        if any(each.role is Role.NODE for each in self.machine.links.values()):
            return 0
        return len(expected_nodes(self.store) - left_nodes(self.machine) - {*self.machine.removals})

    async def create_ticket(self) -> str:
        """Create a ticket for `ticket_uses` nodes, or for one."""
        return await self.invite(Role.NODE, TICKET_S, max(1, self.ticket_uses))

    async def invite(
        self,
        role: Role,
        lasts_s: float | None,
        uses: int | None,
        limits: ClientLimits = NO_LIMITS,
    ) -> str:
        """Create a ticket, on disk before this returns; None means no limit."""
        invite = partial(self.store.invite, lasts_s=lasts_s, uses=uses, limits=limits)
        made = await self._off_loop(invite, self.endpoints.addresses, role)
        return made.encode()

    def _limits_of(self, client: NodeId) -> ClientLimits:
        """Return the limits in the credential of a linked client."""
        contact = self.machine.links.get(client)
        return contact.credential.limits if contact else NO_LIMITS

    def _longest_request(self) -> int:
        """Return the limit on the bytes of a request, from the longest context in the mesh."""
        text_bytes = TOKEN_BYTES * self.rings.longest_context
        return min(REQUEST_BYTES, REQUEST_HEAD_BYTES + text_bytes)

    async def serve_model(self, asked: ModelOptions) -> Charter:
        """Let the mesh serve a model, see `CharterEditor.serve_model`; also after a restart."""
        served = await self.charter_editor.serve_model(asked)
        if self._preparation is not None:
            await self._off_loop(save_models, self.store, self._preparation.described)
        self.state.publish()  # it may hold it now
        return served

    async def publish_removal(self, removal: Removal) -> None:
        """Publish the removal of a member, and close the link to it; return once it is on disk."""
        self.links.act(self.machine.remove(removal, loop_time()))
        await self.records.save()

    def revoke(self, tags: tuple[bytes, ...]) -> None:
        """Publish the API keys that the owner of this node revoked."""
        if not self.is_leaving:
            self._offer.publish(revoked=tags)

    def leave(self) -> None:
        """Leave the ring, finish the requests of its clients, leave the mesh, and stop.

        The ring serves until the other nodes have agreed on a plan without this node.
        """
        if not self.is_leaving and not self.life.is_stopped:
            self.state.is_leaving = True
            self.state.publish()
            self.life.spawn(self._drain)

    async def run(self) -> None:
        """Run the node until cancelled."""
        parts: list[Callable[[], Awaitable[None]]] = [self._provide]
        if self._preparation is not None:
            watch = partial(self._offer.watch, self._preparation.worker, self.state)
            parts = [self.service.run, self.service.survey, watch]
        async with self.life.running(), AsyncExitStack() as stack:
            for part in (
                self._run_links,
                self.router.run,
                self.service.first.planner.run,
                self.rings.watch_loads,
                self.relay.run,
                self._redial,
                *parts,
                self.records.run,
            ):
                self.life.spawn(part)
            await asyncio.sleep(0)  # let the links start
            self._offer.publish()
            self.state.publish()
            if self._own.link is not None:
                self.links.adopt(self._own.link)
            if self._options.discovery:
                code = MemberBeacons(
                    self.store.key,
                    self._own.credential,
                    lambda: self.machine.profiles,
                    self.machine.removals,
                    lambda: () if self.links.by_peer else self.store.peers,
                )
                beacon = await stack.enter_async_context(
                    open_beacon(code, self.me, self.links.hint, self._guests)
                )
                self._beacon = beacon
                beacon.addresses = self.endpoints.addresses
                self.life.spawn(beacon.run)
            self.endpoints.on_change(lambda: self.life.call_later(0, self._update_addresses))
            self._update_addresses()  # in case they changed before
            await asyncio.Event().wait()  # never set: wait until cancelled

    # Callbacks of the mesh links, see `LinkHost`.

    def changed(self) -> None:
        """Schedule planning, once for all changes in this turn of the event loop."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self.life.call_later(0, self._schedule_planning)

    async def ring(self, link: SecureLink) -> None:
        """Accept a ring link of the previous rank."""
        await self.service.accept(link)

    async def weights(self, link: SecureLink) -> None:
        """Send weights to another node."""
        await self._weights.serve(link)

    async def training(self, link: SecureLink) -> None:
        """Compute batches of another node."""
        await self._training.serve(link)

    def deliver_request(self, peer: NodeId, message: RequestMessage, *, is_client: bool) -> None:
        """Handle a message about a request."""
        self.router.receive(peer, message, is_client=is_client)

    def lost(self, peer: NodeId) -> None:
        """Fail requests that depend on the lost peer."""
        self.router.lost(peer)

    def dropped(self, peer: NodeId, why: CloseReason) -> None:
        """Log why a peer closed the link; stop if another process uses the same key."""
        logger.info("node %s closed the link: %s", short(peer), why.name.lower())
        is_duplicate = why is CloseReason.DUPLICATE and not self.links.by_peer
        heard, now = self.machine.heard, loop_time()
        if error := self._duplicate_identity.dropped(
            peer, is_duplicate=is_duplicate, now=now, heard=heard
        ):
            self.life.stop(error)

    # Inside.

    def _schedule_planning(self) -> None:
        self._is_scheduled = False
        self.records.changed()
        if self._is_member():
            self.service.records_changed()

    def _guests(self) -> Iterator[bytes]:
        """Return the keys of the known tickets; others are known by the next query of a guest.

        Nothing is read once the node ends.
        """
        if not self._is_refreshing:
            self._is_refreshing = True
            self.life.call_later(0, self._refresh_tickets)
        return self._gate.guests()

    def _refresh_tickets(self) -> None:
        async def refresh() -> None:
            try:
                await self._gate.refresh()
            finally:
                self._is_refreshing = False

        self.life.spawn(refresh)

    def _plan_reason(self) -> str:
        return self.service.first.reason()

    def _is_member(self) -> bool:
        credential = self._own.credential
        try:
            check(credential, self.me, credential.mesh, time.time(), self.machine.removals)
        except NotAuthorised as error:
            self.life.stop(error)
            return False
        return True

    async def _provide(self) -> None:
        """Publish what the engine of this node serves, instead of layers."""
        provider = self.state.provider
        assert provider is not None  # else this does not run
        await provider.run(self.state.publish)

    def _update_addresses(self) -> None:
        """Publish the current addresses."""
        addresses = self.endpoints.addresses
        if addresses != self._offer.profile.addresses and not self.is_leaving:
            self._offer.publish(addresses=addresses)
            if self._beacon is not None:
                self._beacon.addresses = addresses

    def _send(self, profile: Profile) -> None:
        self.links.act(self.machine.publish(profile=profile, now=loop_time()))

    async def _redial(self) -> None:
        """Dial the known addresses of members: often while no node is linked, else rarely.

        Two partitions of a mesh that were never linked have no other way to find each other.
        """
        while True:
            for node, addresses in self._own.hints:
                self.links.hint(node, addresses)
            await asyncio.sleep(REDIAL_LINKED_S if self.links.by_peer else REDIAL_S)

    async def _drain(self) -> None:
        """Wait until others have taken the layers over and no request runs, then leave.

        Without requests it does not wait for long.
        """
        idle_since, first = loop_time(), self.service.first
        try:
            async with asyncio.timeout(DRAIN_S):
                # Polled: it happens once in the life of a node, not worth an event per session.
                while True:
                    if self.router.counts.active or self.state.sessions:
                        idle_since = loop_time()
                    elif loop_time() >= idle_since + IDLE_DRAIN_S or not first.is_handing_over:
                        break
                    await asyncio.sleep(0.05)
        except TimeoutError:
            logger.warning("requests still running after %d s", DRAIN_S)
        self.state.has_left = True
        await self.links.leave()
        self.life.stop()

    async def _run_links(self) -> None:
        await self.links.run(self.endpoints.listeners)


@asynccontextmanager
async def _open_preparation(
    options: NodeOptions,
    worker: "Worker | None",
    prepare: "Callable[[NodeOptions, Worker, Path], Preparation] | None",
) -> "AsyncIterator[Preparation]":
    """Start the compute thread, unless there is a ``worker``; torch is imported here."""
    from meshllm.node.compute.worker import compute_thread
    from meshllm.node.preparation import Preparation

    async with AsyncExitStack() as stack:
        if worker is None:
            thread = compute_thread(options.inference.threads or 1)
            worker = await stack.enter_async_context(thread)
        yield (prepare or Preparation)(options, worker, cache_path())


@asynccontextmanager
async def open_node(
    options: NodeOptions,
    transport: Transport | None = None,
    worker: "Worker | None" = None,
    prepare: "Callable[[NodeOptions, Worker, Path], Preparation] | None" = None,
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
    store = await off_loop(StateStore.open, options.state)
    await off_loop(keep_temporary_files, options.state)
    async with AsyncExitStack() as stack:
        supervisor = stack.enter_context(Supervisor())
        stack.enter_context(store.locked())
        with supervisor.scope():
            preparation = None
            if provider is None:
                opened = _open_preparation(options, worker, prepare)
                preparation = await stack.enter_async_context(opened)
                preparation.described.extend(load_models(store))
            endpoints = await stack.enter_async_context(
                open_endpoints(options, store.key, transport)
            )
            endpoints.reserve(store.peers.values())
            if options.join and preparation is not None:
                await preparation.check_layers()
            own = await enter(store, options, endpoints.transports, off_loop)
            options = with_own_entry(options, store.key.node, is_founder=own.is_founder)
            node = MeshNode(options, store, preparation, endpoints, own, off_loop)
            node.state.provider = provider
            running = asyncio.ensure_future(node.run())
        running.add_done_callback(node.life.ended)
        supervisor.failed.add_done_callback(node.life.ended)
        node.stopped.add_done_callback(lambda _: running.cancel())
        try:
            await asyncio.sleep(0)
            yield node
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await node.records.close()
