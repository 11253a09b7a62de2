"""A node of a mesh at work: who is here, and which ring that makes.

Theory of operation
-------------------
The links feed the machine of the mesh; whenever what it knows changes, the node computes the
agreement anew, off the event loop, and its service follows the plan. The service loads, links and
serves, and says how far it is, which the node publishes. Requests go to the desk, which finds the
entry. Nobody decides for another: every node does this alone, from the same records.
"""

import asyncio
import logging
import platform
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from typing import TypeVarTuple

from meshllm import __version__
from meshllm.config import cache_path
from meshllm.errors import MeshError, NotAuthorised, OutOfMemory
from meshllm.names import MeshId, NodeId
from meshllm.node.compute.worker import Worker, compute_thread
from meshllm.node.founding import amend, names_in, resolve_names
from meshllm.node.membership.admission import Gate
from meshllm.node.membership.bootstrap import Membership, enter
from meshllm.node.membership.recollection import Memory, read_back, write_down
from meshllm.node.membership.state_store import Keyring
from meshllm.node.net.beacon import Beacon, open_beacon
from meshllm.node.net.dialer import Caller
from meshllm.node.net.endpoints import Place, open_place
from meshllm.node.net.mesh_link import Links
from meshllm.node.net.secure import SecureLink
from meshllm.node.offloop import OffLoop
from meshllm.node.options import NodeOptions
from meshllm.node.planner import Planner
from meshllm.node.preparation import Preparation
from meshllm.node.requests.router import Desk
from meshllm.node.standing import Standing
from meshllm.node.supervisor import Supervisor
from meshllm.node.view import LinkView, NodeView
from meshllm.protocol.agreement.agreement import Agreement
from meshllm.protocol.agreement.candidates import View
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.codec import Talk, Why
from meshllm.protocol.membership.mesh import Mesh
from meshllm.protocol.membership.records import MAX_LABEL_BYTES, Profile
from meshllm.protocol.membership.twin import Twin
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.trust.credential import Removal, Role, check
from meshllm.protocol.trust.handshake import Own
from meshllm.protocol.trust.identity import short
from meshllm.transport.contract import Transport

__all__ = ["MeshNode", "NodeOptions", "open_node"]

SETTLE_S = 0.5  # s; a beat: in that time both ends of a link say that it stands, or is gone
GATHER_S = 30.0  # s that the first ring waits for the members that are wanted
REMEMBER_S = 1.0  # s; what changes at once is written down once
SEEK_S = 2.0  # s between two looks for a mesh that was lost
SEEK_LINKED_S = 30.0  # s between two looks for members that are not linked
FIRST_RETRY_S, LAST_RETRY_S = 5.0, 300.0  # s; backoff before a failed span is offered for again
SMALLER = 0.9  # of the weights of a span for which there was no memory
WATCH_S = 1.0  # s between two looks at the compute thread
DRAIN_S = 60.0  # s that requests under way are given when the node is told to leave
TICKET_S = 24 * 3600.0  # s that the ticket of the start lasts

Ts = TypeVarTuple("Ts")

logger = logging.getLogger(__name__)


class MeshNode:
    """One node; made by `open_node`."""

    def __init__(
        self,
        options: NodeOptions,
        keyring: Keyring,
        preparation: Preparation,
        place: Place,
        own: Membership,
        off_loop: OffLoop,
    ) -> None:
        self.keyring = keyring
        self.place = place
        self.me = keyring.key.node
        self.name = options.name or platform.node() or "node"
        self.name = self.name.encode()[:MAX_LABEL_BYTES].decode(errors="ignore")
        self.version = __version__
        self.since = time.monotonic()
        self.incarnation = own.incarnation
        self.machine = Mesh(
            keyring.key, own.credential, own.incarnation, now=self.now(), wall_s=time.time()
        )
        self.machine.restore(read_back(keyring), self.now())
        side = Own(keyring.key, own.incarnation, own.credential)
        caller = Caller(place.schemes, side)
        self._gate = Gate(keyring, own.credential, self.machine.removals, off_loop)
        self.links = Links(caller, self.machine, self._gate, self)
        self.standing = Standing(self.machine, self.links, self._why)
        self.desk = Desk(self.me, self.standing, self.links.post)
        self.planner = Planner(self._view, self._agreed, off_loop)
        self._ambiguous = self._hang = ""
        self.stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_leaving = False
        self._options = options
        self._own = own
        self._preparation = preparation
        self._profile = Profile(self.name, __version__, place.addresses, memory_bytes=0)
        self._measured = self._profile
        self._retry_s = FIRST_RETRY_S
        self._is_stirred = False
        self._off_loop = off_loop
        self._unwritten = asyncio.Event()
        self._considered: tuple[Plan | None, bool] | None = None
        self._names = resolve_names((), {})
        self._twin = Twin()
        self._charter_known = asyncio.Event()
        self._beacon: Beacon | None = None
        self._context = copy_context()  # of the supervisor, whoever stirs the node
        self._jobs = asyncio.TaskGroup()

    @property
    def agreement(self) -> Agreement | None:
        """The latest; None while there is none."""
        return self.planner.agreement

    @property
    def trouble(self) -> str:
        """What its owner should look at; empty when nothing is wrong."""
        return self._hang or self._ambiguous

    @property
    def ticket(self) -> str:
        """A fresh invitation for another node."""
        return self.invite(Role.NODE, TICKET_S, None)

    @property
    def mesh(self) -> MeshId:
        """The mesh that it is a member of."""
        return self._own.credential.mesh

    def view(self) -> NodeView:
        """Take a snapshot of what the owner may be shown."""
        machine, standing, lines = self.machine, self.standing, self.links.lines
        return NodeView(
            self.me,
            self.name,
            self.version,
            self.mesh,
            self.incarnation,
            since_s=time.monotonic() - self.since,
            is_leaving=self.is_leaving,
            addresses=self.place.addresses,
            networks=tuple(self.place.survey()),
            charter=machine.charter,
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
                    statistics=lines[peer].statistics,
                    address=lines[peer].address,
                )
                for peer, contact in machine.links.items()
                if peer in lines
            },
            agreement=self.agreement,
            advice=self.planner.advice,
            plan=standing.plan,
            is_served=standing.standing_entry() is not None,
            reason=standing.reason(),
            trouble=str(standing.trouble or ""),
            sessions=standing.sessions,
            counts=replace(self.desk.counts),
            execution=str(standing.rank.runners[0].execution) if standing.rank else "",
            warnings=(self.trouble,) if self.trouble else (),
        )

    def invite(self, role: Role, lasts_s: float | None, uses: int | None) -> str:
        """Make a ticket."""
        addresses = self.place.addresses
        return self.keyring.invite(addresses, role, lasts_s=lasts_s, uses=uses).encode()

    def expel(self, removal: Removal) -> None:
        """Tell that a member is removed, for good, and cut the link to it."""
        self.links.act(self.machine.remove(removal, self.now()))
        write_down(self.keyring, Memory.of(self.machine))  # who asked is told that it is done

    def leave(self) -> None:
        """Finish what is under way, tell the others, and stop."""
        if not self.is_leaving:
            self.is_leaving = True
            self._jobs.create_task(self._drain())

    async def run(self) -> None:
        """Be a node until cancelled."""
        async with self._jobs, AsyncExitStack() as stack:
            for part in (
                self._carry,
                self.desk.run,
                self.planner.run,
                self._seek,
                self._serve,
                self._remember,
                self._watch,
            ):
                self._jobs.create_task(self._guarded(part))
            await asyncio.sleep(0)  # the links take work from now on
            self._tell(profile=self._profile)
            self.standing.publish()
            if self._own.link is not None:
                self.links.adopt(self._own.link)
            if self._options.discovery:
                beacon = await stack.enter_async_context(
                    open_beacon(self.mesh, self.me, self.links.hint, self._gate.guests)
                )
                self._beacon = beacon
                beacon.addresses = self.place.addresses
                self._jobs.create_task(beacon.run())
            self.place.on_change(lambda: self._later(0, self._moved))
            self._moved()  # in case they changed before
            await asyncio.Event().wait()  # nobody sets it

    def close(self) -> None:
        """Write down what was to be written soon."""
        if self._unwritten.is_set():
            with self._warned():
                write_down(self.keyring, Memory.of(self.machine))

    def ended(self, running: asyncio.Future[None]) -> None:
        """Let a bug that ended the node be seen by whoever waits for its end."""
        if not running.cancelled() and (error := running.exception()):
            self._stop(error)

    # What the links bring.

    def changed(self) -> None:
        """Compute the agreement anew, once for all that changed by now."""
        if not self._is_stirred:
            self._is_stirred = True
            self._later(0, self._stir)

    async def ring(self, link: SecureLink) -> None:
        """Take a link of the rank before."""
        if self.standing.runtime is None:
            await link.close()
        else:
            await self.standing.runtime.arrive(link, link.peer)

    def talk(self, peer: NodeId, message: Talk, *, is_client: bool) -> None:
        """Take a message about a request."""
        self.desk.receive(peer, message, is_client=is_client)

    def lost(self, peer: NodeId) -> None:
        """Hear that a peer is not linked any more."""
        self.desk.lost(peer)

    def dropped(self, peer: NodeId, why: Why) -> None:
        """Hear why a peer closed the link; find out that the key runs elsewhere too."""
        logger.info("node %s closed the link: %s", short(peer), why.name.lower())
        is_twin, heard = why is Why.TWIN and not self.links.lines, self.machine.heard
        if error := self._twin.dropped(peer, is_twin=is_twin, now=self.now(), heard=heard):
            self._stop(error)

    # Inside.

    def _stir(self) -> None:
        self._is_stirred = False
        self._unwritten.set()
        if self._is_member():
            if self.machine.charter is not None:
                self._charter_known.set()
            self.planner.stir()
            self._withdraw()
            self.standing.publish()

    def _view(self) -> View | None:
        """Take a snapshot of what the node knows."""
        machine = self.machine
        if machine.charter is None or machine.author is None:
            return None
        return View(
            self.me, machine.charter, machine.author, dict(machine.profiles),
            dict(machine.states), tuple(machine.removals),
        )  # fmt: skip

    def _agreed(self) -> None:
        self.standing.agreement = self.agreement
        self._consider()
        self._amend()
        self.standing.publish()

    def _consider(self) -> None:
        """Follow the plan when nothing else was agreed on for a while.

        When a node comes or goes, its links do so one by one, and each would make a plan of a
        moment, for which layers are loaded.
        """
        plan = self.agreement.plan if self.agreement else None
        is_whole = not (self.agreement and self.agreement.lacking)
        if (plan, is_whole) == self._considered:
            return
        self._considered = plan, is_whole
        self._later(SETTLE_S if is_whole else GATHER_S, self._follow, self._considered)

    def _follow(self, considered: tuple[Plan | None, bool]) -> None:
        plan, _ = considered
        if considered != self._considered or not (runtime := self.standing.runtime):
            return
        if plan and runtime.plan and plan.precedence < runtime.plan.precedence:
            return  # it was agreed on before this node followed its plan, and there will be another
        runtime.follow(plan)
        self.standing.publish()

    def _amend(self) -> None:
        """Change the charter when another node has a name that the options call."""
        charter, model = self.machine.charter, self.standing.model
        if self._names.is_complete or charter is None or model is None:
            return
        if self._look_up():
            amended = amend(charter, self._options, self.machine.profiles, model.shape.context)
            if amended != charter:
                self._tell(charter=amended)

    def _look_up(self) -> bool:
        """Find whom the options name, say who is missing; tell whether that changed."""
        before, names = self._names, resolve_names(names_in(self._options), self.machine.profiles)
        self._names = names
        for name in names.ambiguous:
            if name not in before.ambiguous:
                logger.warning("several nodes are called `%s`: give the whole id of one", name)
        several = ", ".join(f"`{name}`" for name in names.ambiguous)
        self._ambiguous = several and f"several nodes are called {several}: give whole ids"
        return names != before

    def _why(self) -> str:
        """Say why there is no plan."""
        if self._hang:
            return self._hang
        if self.agreement is not None and self.agreement.plan is not None:
            if lacking := self.agreement.lacking:
                return f"it waits up to {GATHER_S:.0f} s for {lacking} more members"
            return "its nodes agree on a plan"
        if self.agreement is not None:
            is_early = not self.agreement.offers and not self.agreement.refused
            return "its nodes look at the model" if is_early else self.agreement.reason
        is_known = self.machine.charter or self._own.is_founder
        return "the node looks at its model" if is_known else "the mesh is not heard"

    def _is_member(self) -> bool:
        credential = self._own.credential
        try:
            check(credential, self.me, credential.mesh, time.time(), self.machine.removals)
        except NotAuthorised as error:
            self._stop(error)
            return False
        return True

    def _withdraw(self) -> None:
        """Take the offer back where the span cannot be loaded, and offer again later.

        Where memory was short, what is offered then is too little for that span.
        """
        trouble = self.standing.trouble
        if trouble is None or not self._profile.layer_s:
            return
        if isinstance(trouble, OutOfMemory):
            less = self._measured.reserve_bytes + int(trouble.needed_bytes * SMALLER)
            memory = min(self._measured.memory_bytes, less)
            self._measured = replace(self._measured, memory_bytes=memory)
        self._offer(is_open=False)
        self._later(self._retry_s, self._offer_again)
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)

    def _offer_again(self) -> None:
        trouble, self.standing.trouble = self.standing.trouble, None
        self._offer(is_open=not self._hang)
        if self.standing.runtime and not isinstance(trouble, OutOfMemory):
            self.standing.runtime.reload()  # the plan may be the same still

    def _offer(self, *, is_open: bool) -> None:
        """Publish what was measured, or nothing of it."""
        own, told = self._measured, self._profile
        if is_open:
            weights, layer_s, memory = own.weights, own.layer_s, own.memory_bytes
            told = replace(told, weights=weights, layer_s=layer_s, memory_bytes=memory)
        else:
            told = replace(told, weights=(), layer_s=())
        self._profile = told
        self._tell(profile=told)

    async def _watch(self) -> None:
        """Take this node out of the ring while its compute thread hangs.

        Its beats go on, as the event loop does: nobody else can tell it from one that is busy.
        """
        worker = self._preparation.worker
        while True:
            await asyncio.sleep(WATCH_S)
            if not (hung_s := worker.hung_s) or not self._profile.layer_s:
                continue
            self._hang = f"its compute thread has hung for {hung_s:.0f} s"
            logger.warning("%s: this node offers nothing until that ends", self._hang)
            self._offer(is_open=False)
            self.standing.publish()
            while worker.hung_s:  # noqa: ASYNC110  # a thread that hangs tells nobody
                await asyncio.sleep(WATCH_S)
            self._hang = ""
            logger.warning("the compute thread goes on, and so does this node")
            if not self.standing.trouble:
                self._offer(is_open=True)

    async def _serve(self) -> None:
        """Look at the model, tell what this node offers, and serve."""
        machine, preparation = self.machine, self._preparation
        if machine.charter is None and self._own.is_founder:
            model, charter = await preparation.found()
        else:
            await self._charter_known.wait()
            assert machine.charter is not None  # it is never forgotten
            model = await preparation.join(machine.charter)
            longest = model.shape.context
            charter = amend(machine.charter, self._options, dict(machine.profiles), longest)
        if charter != machine.charter:
            self._tell(charter=charter)
        self._look_up()
        for name in self._names.unknown:
            logger.warning("no node is called `%s` yet", name)
        offered = await preparation.offer(model, self._profile)
        self._measured = offered
        self._profile = replace(offered, addresses=self.place.addresses)  # it may have moved
        self._tell(profile=self._profile)
        runtime = self.standing.begin(model)
        self._considered = None  # what was agreed on before is to be followed now
        self.changed()
        await runtime.run()

    def _moved(self) -> None:
        """Tell the others where this node is reached now."""
        addresses = self.place.addresses
        if addresses != self._profile.addresses and not self.is_leaving:
            self._profile = replace(self._profile, addresses=addresses)
            self._tell(profile=self._profile)
            if self._beacon is not None:
                self._beacon.addresses = addresses

    def _tell(self, *, profile: Profile | None = None, charter: Charter | None = None) -> None:
        self.links.act(self.machine.publish(profile=profile, charter=charter, now=self.now()))

    async def _seek(self) -> None:
        """Look for members where they were: often while nobody is linked, else now and then.

        Two halves of a mesh that never met know each other's addresses from nowhere else.
        """
        while True:
            for node, addresses in self._own.hints:
                self.links.hint(node, addresses)
            await asyncio.sleep(SEEK_LINKED_S if self.links.lines else SEEK_S)

    async def _remember(self) -> None:
        """Keep for the next start what would be missed: charter, removals, and addresses."""
        while True:
            await self._unwritten.wait()
            await asyncio.sleep(REMEMBER_S)
            memory = Memory.of(self.machine)
            with self._warned():
                await self._off_loop(write_down, self.keyring, memory)
            if memory == Memory.of(self.machine):
                self._unwritten.clear()

    @staticmethod
    @contextmanager
    def _warned() -> Iterator[None]:
        """Go on where the state folder cannot be written: a full disk does not end a node."""
        try:
            yield
        except MeshError as error:
            logger.warning("%s", error)

    async def _drain(self) -> None:
        """Let requests end, then leave."""
        try:
            async with asyncio.timeout(DRAIN_S):
                # Once in the life of a node, so that nobody has to tell when a session ends.
                while self.desk.counts.active or self.standing.sessions:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        except TimeoutError:
            logger.warning("requests are still under way after %d s", DRAIN_S)
        self.standing.has_left = True
        await self.links.leave()
        self._stop(None)

    async def _carry(self) -> None:
        await self.links.run(self.place.listeners)

    async def _guarded(self, part: Callable[[], Awaitable[None]]) -> None:
        """Run a part of the node; what it expects to go wrong ends the node with that error."""
        try:
            await part()
        except MeshError as error:
            self._stop(error)

    def _later(self, delay_s: float, callback: Callable[[*Ts], None], *args: *Ts) -> None:
        """Let a callback run; what it raises ends the node."""
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
        """Tell the time of the event loop, in seconds."""
        return asyncio.get_running_loop().time()


@asynccontextmanager
async def open_node(
    options: NodeOptions,
    transport: Transport | None = None,
    worker: Worker | None = None,
    prepare: Callable[[NodeOptions, Worker, Path], Preparation] = Preparation,
    off_loop: OffLoop = asyncio.to_thread,
) -> AsyncIterator[MeshNode]:
    """Run a node inside the context; return once it is a member of its mesh.

    Nodes of one process share a worker: torch and transformers load one model at a time.
    ``prepare`` may look at another kind of model, and ``off_loop`` may be no thread, as in a
    simulation.

    Raises:
        UserError: the state folder or the address cannot be used, or the ticket is none.
        NotAuthorised: the ticket is not accepted.
        PluginError: there is no such transport.
    """
    keyring = Keyring.open(options.state)
    async with AsyncExitStack() as stack:
        supervisor = stack.enter_context(Supervisor())
        stack.enter_context(keyring.locked())
        with supervisor.scope():
            if worker is None:
                worker = await stack.enter_async_context(
                    compute_thread(options.inference.threads or 1)
                )
            place = await stack.enter_async_context(open_place(options, keyring.key, transport))
            own = await enter(keyring, options, place.transports)
            preparation = prepare(options, worker, cache_path())
            node = MeshNode(options, keyring, preparation, place, own, off_loop)
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
