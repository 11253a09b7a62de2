"""A client of a mesh: sends requests, holds neither weights nor a tokenizer.

It receives no records of the mesh. Which models there are, it asks the node that it is linked to,
which also tells it a few other nodes: when the link is lost, it dials those and the inviter, and
requests in progress go on at the one that answers, with the tokens so far. A request that only some
nodes may read (`trust`) is sent to no others: it waits until one of them is linked.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    aclosing,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from meshllm.errors import Busy, LinkLost, NotAuthorised, TimedOut, UserError
from meshllm.names import GroupId, LossCause, NodeId, RingEntry, parse_node, short
from meshllm.node.membership.bootstrap import (
    check_client_ticket,
    client_folder,
    dial_inviter,
    redeem,
)
from meshllm.node.membership.saved_records import RecordKeeper, SavedRecords, restore_records
from meshllm.node.membership.state_store import StateStore
from meshllm.node.net.beacon import MemberBeacons, open_beacon
from meshllm.node.net.dialer import NodeDialer
from meshllm.node.net.endpoints import by_scheme, prepare
from meshllm.node.net.mesh_link import MeshLinks
from meshllm.node.net.peer_address import LocalAddressPolicy, SameHostDetector, machine_secret
from meshllm.node.net.secure import SecureLink
from meshllm.node.requests.model_list import models_from_json
from meshllm.node.requests.peer_requests import MAX_PER_CLIENT
from meshllm.node.requests.router import MAX_WAITING, RequestRouter
from meshllm.node.supervisor import Supervisor
from meshllm.node.timer import loop_time
from meshllm.protocol.agreement.load_estimate import retry_s
from meshllm.protocol.membership.client_quota import places
from meshllm.protocol.membership.codec import (
    AskModels,
    CloseReason,
    ModelList,
    RequestMessage,
)
from meshllm.protocol.membership.link_table import MAX_CLIENTS
from meshllm.protocol.membership.mesh import Mesh
from meshllm.protocol.membership.records import ModelOffer
from meshllm.protocol.ring.interruption import RingPlan
from meshllm.protocol.trust.credential import Credential, Removals, check
from meshllm.protocol.trust.fallbacks import MAX_FALLBACKS, Fallback
from meshllm.protocol.trust.handshake import LocalIdentity
from meshllm.protocol.trust.ticket import Ticket
from meshllm.request import Backend, Event, Request
from meshllm.status import ModelStatus
from meshllm.strict_json import WrongField
from meshllm.transport.contract import Transport
from meshllm.transport.registry import Registry

MODELS_S = 2.0  # s until the models are asked for again; a node answers 8 times in 10 s
ASK_S = 10.0  # s to wait for them
REDIAL_S = 1.0  # s between two rounds of dials while a link is lacking; its loss begins one
SAVE_S = 1.0  # s between two times that what nodes tell is saved
STAGGER_S = 0.3  # s between the dials of two nodes: a handshake on most paths


class MeshClient:
    """A running client; created by `open_mesh_client`."""

    def __init__(
        self, store: StateStore, ticket: Ticket, credential: Credential, dialer: NodeDialer
    ) -> None:
        self._me = store.key.node
        self._store, self._ticket, self._credential = store, ticket, credential
        self.mesh = credential.mesh
        self._linked = asyncio.Event()
        self.records = RecordKeeper(store, self._lasting, pause_s=SAVE_S)
        self._lacking = asyncio.Event()  # set by the loss of a link, and by who waits for one
        self._awaited: list[Sequence[str] | None] = []  # whom the waiting requests trust
        self._here = dialer.machine
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Holds the bug that ended the client, or that it was removed; else cancelled at last."""
        machine = Mesh(
            store.key,
            credential,
            dialer.own.instance,
            now=loop_time(),
            wall_s=time.time(),
        )
        self.machine = machine
        self.links = MeshLinks(dialer, machine, _NoAdmission(), self)
        self.router = RequestRouter(self._me, self, self.links.post, asks_ingress=True)
        self._most = places(credential.limits, MAX_PER_CLIENT)
        self._places = asyncio.Semaphore(self._most)
        self.waiting = 0
        """Requests that wait until the ticket allows one more."""
        self._models: tuple[ModelStatus, ...] = ()
        self._asking = asyncio.Lock()
        self._asked: NodeId | None = None  # the node that was asked last for the models
        self._changed = asyncio.Event()  # set by a list of models, and by the loss of a link
        self._told_at = -MODELS_S

    @property
    def me(self) -> NodeId:
        """The id of the key of this client."""
        return self._me

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Send a request to a node of the mesh, once the ticket allows one more; see `Backend`."""
        async with self._place(), aclosing(self.router.generate(request)) as events:
            async for event in events:
                yield event

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Wait for a place, and hold it inside the context.

        Raises:
            Busy: too many wait already.
        """
        if self._places.locked() and self.waiting >= MAX_WAITING:
            raise Busy(
                f"The queue is full: {self._most} requests are in progress, the limit of the"
                f" ticket, and {self.waiting} are waiting",
                hint="retry later",
            )
        self.waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self._places.release()

    async def models(self) -> Sequence[ModelStatus]:
        """List the models of the mesh, as a node of it listed them within the last `MODELS_S`.

        Raises:
            TimedOut: no node tells them within `ASK_S`.
        """
        try:
            async with asyncio.timeout(ASK_S), self._asking:  # together with those before it
                until = self._told_at + MODELS_S
                if loop_time() >= until:
                    await self._ask_models()
        except TimeoutError:
            node = self._asked
            silent = f"node {short(node)} does not list them" if node else self.reason()
            raise TimedOut(f"The models of the mesh are unknown: {silent}") from None
        return self._models

    async def _ask_models(self) -> None:
        begin, self._asked = loop_time(), None
        while self._told_at < begin:
            (entry,) = await self.entries()
            self._asked = entry.node
            self._changed.clear()
            self.links.post(entry.node, AskModels())
            await self._changed.wait()

    async def run(self, link: SecureLink | None) -> None:
        """Run the client until cancelled, over the ``link`` to the inviter if there is one."""
        async with asyncio.TaskGroup() as group:
            for job in (
                self.links.run([]),
                self.router.run(),
                self._redial(),
                self.records.run(),
            ):
                group.create_task(job)
            await asyncio.sleep(0)  # let the links start
            if link is not None:
                self.links.adopt(link)
            else:
                self._lacking.set()

    def ended(self, running: asyncio.Future[None]) -> None:
        """Fail the pending requests if a bug ended the client."""
        if not running.cancelled() and (error := running.exception()) and not self.failed.done():
            self.failed.set_exception(error)
            self._linked.set()
            for peer in self.links.by_peer:
                self.router.lost(peer)

    def restore(self) -> None:
        """Take what was heard before; raise `NotAuthorised` if this client was removed.

        Raises:
            UserError: the state folder is damaged.
        """
        restore_records(self._store, self.machine, loop_time())
        self._check()
        self.machine.fallbacks = tuple(
            Fallback(node, b"", at) for node, at in self._store.peers.items()
        )

    def _lasting(self) -> SavedRecords:
        """Return the removals, and the nodes that were named."""
        records = SavedRecords.of(self.machine, lambda _: LocalAddressPolicy.NO)
        met = {at.node: at.addresses for at in self.machine.fallbacks}
        return replace(records, met=met, most=MAX_FALLBACKS)

    def _check(self) -> None:
        """Raise `NotAuthorised` if this client is not a member any more."""
        shown, removals = self._credential, self.machine.removals
        try:
            check(shown, self._me, shown.mesh, time.time(), removals)
        except NotAuthorised as error:
            raise NotAuthorised(str(error), hint="ask a member for a new ticket") from None

    async def _redial(self) -> None:
        """Dial the inviter and other nodes whenever one of them is needed, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(REDIAL_S):
                    await self._lacking.wait()
            self._lacking.clear()
            for node, addresses, local in self._fallbacks():
                if self._needs(node):
                    self.links.redial(node, addresses, local)
                    await asyncio.sleep(STAGGER_S)

    def _needs(self, node: NodeId) -> bool:
        """Return whether to dial a node: none is linked, or none that a request trusts."""
        unmet = (trusted for trusted in self._awaited if self._reader(trusted) is None)
        return not self.links.by_peer or any(self._may_read(node, trusted) for trusted in unmet)

    def _fallbacks(self) -> list[tuple[NodeId, tuple[str, ...], LocalAddressPolicy]]:
        """Return the nodes to dial; the inviter, which may be the lost one, is the second."""
        ticket = self._ticket
        fallbacks = [
            fallback for fallback in self.machine.fallbacks if fallback.node != ticket.inviter
        ]
        named = [
            (fallback.node, fallback.addresses, local_of(self._here, self.machine.teller, fallback))
            for fallback in fallbacks
        ]
        return [*named[:1], (ticket.inviter, ticket.addresses, LocalAddressPolicy.YES), *named[1:]]

    async def entries(
        self, model: str = "", trusted: Sequence[str] | None = None
    ) -> Sequence[RingEntry]:
        """Wait for a linked node that may read a request; any can be the ingress for any model.

        Raises:
            WrongField: this client knows no trusted node.
        """
        _ = model
        while True:
            if self.failed.done():
                self.failed.result()
            if node := self._reader(trusted):
                return [RingEntry(node)]
            if self.links.by_peer and not self._knows_reader(trusted):
                raise WrongField(
                    "meshllm.trust",
                    "The client knows no node that the request trusts",
                    hint="give the whole ids of nodes, as `meshllm id` prints them there",
                )
            await self._wait_for(trusted)

    async def _wait_for(self, trusted: Sequence[str] | None) -> None:
        """Wait until the links may have changed; meanwhile, trusted nodes are dialled."""
        self._linked.clear()
        self._awaited.append(trusted)
        self._lacking.set()
        try:
            await self._linked.wait()
        finally:
            self._awaited.remove(trusted)

    def _reader(self, trusted: Sequence[str] | None) -> NodeId | None:
        """Return a linked node that may read a request which only the trusted may read."""
        return next((node for node in self.links.by_peer if self._may_read(node, trusted)), None)

    def _knows_reader(self, trusted: Sequence[str] | None) -> bool:
        """Return whether a node may read it that was named to this client, now or earlier."""
        named = (fallback.node for fallback in self.machine.fallbacks)
        known = {self._ticket.inviter, *named, *self._store.peers}
        return any(self._may_read(node, trusted) for node in known)

    def _may_read(self, node: NodeId, trusted: Sequence[str] | None) -> bool:
        """Return whether the whole id of a node is trusted.

        A client cannot resolve names and parts of ids. The inviter can, which the user chose.
        """
        if trusted is None:
            return True
        ids = [_id_of(name) for name in trusted]
        return node in ids or (node == self._ticket.inviter and None in ids)

    def reason(self, model: str = "") -> str:
        """Return why no node can serve a request."""
        _ = model
        if self.links.by_peer:
            return "no node that the request trusts answers"
        return "no node of the mesh answers"

    def retry_s(self, model: str, waited_s: float) -> int:
        """Return after how many seconds a request may be repeated which waited for a node."""
        _ = model
        return retry_s(waited_s)

    loads_until = 0.0  # a client does not know whether its ingress loads

    def ring_at(self, entry: RingEntry, model: str = "") -> RingPlan | None:
        """Return None: a client knows no rings."""
        _ = entry, model
        return None

    def is_exact(self, entry: RingEntry, model: str = "") -> bool:
        """Return True: the ingress knows which rings are exact."""
        _ = entry, model
        return True

    def explain(self, before: RingPlan | None, after: RingPlan | None) -> tuple[LossCause, str]:
        """Return that the link to the ingress was lost: an ingress survives other losses."""
        _ = before, after
        return LossCause.LINK_LOST, "the node that answered is gone; another one answers"

    def name_of(self, node: NodeId) -> str:
        """Return the short id of a node: a client knows no names."""
        return short(node)

    def is_provided(self, model: str) -> bool:
        """Return False: the ingress knows who provides a model."""
        _ = model
        return False

    def awaited(self, model: str) -> str:
        """Return nothing: the ingress knows what its rings wait for."""
        _ = model
        return ""

    def pinned(self, model: str) -> str:
        """Return the name; the ingress knows what it means."""
        return model

    def shown(self, model: str) -> str:
        """Return the name."""
        return model

    def of_rings(self, model: str) -> ModelOffer | None:
        """Return None: the ingress knows what its rings have."""
        _ = model
        return None

    def using(self, model: str) -> AbstractContextManager[None]:
        """Do nothing: the ingress counts which models are used."""
        _ = model
        return nullcontext()

    def offers(self, model: str) -> Mapping[NodeId, ModelOffer]:
        """Return no node: the ingress knows them."""
        _ = model
        return {}

    def ids_of(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the names: the ingress resolves them."""
        return tuple(names)

    def backend(
        self, requester: NodeId | None = None, model: str = "", group: GroupId | None = None
    ) -> AbstractAsyncContextManager[Backend]:
        """Raise `LinkLost`: a client holds no model."""
        raise LinkLost("A client does not serve requests")

    def changed(self) -> None:
        """Wake requests that wait for a linked node; fail them if this client was removed."""
        try:
            self._check()
        except NotAuthorised as error:
            if not self.failed.done():
                self.failed.set_exception(error)
        self.records.changed()
        if self.links.by_peer:
            self.links.give_up(self._needs)
        self._linked.set()

    async def ring(self, link: SecureLink) -> None:
        """Close a ring link: a client is in no ring."""
        await link.close()

    async def weights(self, link: SecureLink) -> None:
        """Close a link for weights: a client has none."""
        await link.close()

    async def training(self, link: SecureLink) -> None:
        """Close a link for training: a client has no layers."""
        await link.close()

    def deliver_request(self, peer: NodeId, message: RequestMessage, *, is_client: bool) -> None:
        """Handle a message of a node about a request."""
        _ = is_client
        if isinstance(message, ModelList):
            self._models, self._told_at = models_from_json(message.body), loop_time()
            self._changed.set()
        else:
            self.router.receive(peer, message, is_client=False)

    def lost(self, peer: NodeId) -> None:
        """Fail the requests that the node served."""
        self._changed.set()
        self._lacking.set()
        self.router.lost(peer)

    def dropped(self, peer: NodeId, why: CloseReason) -> None:
        """Do nothing: the loss itself is reported by `lost`."""


class _NoAdmission:
    """The admission of a client: none."""

    removals: Removals = MappingProxyType({})

    async def refresh(self) -> None:
        """Do nothing: there are no tickets."""

    def guests(self) -> tuple[bytes, ...]:
        """Return no tickets."""
        return ()

    async def authorize(self, *_: object) -> Credential:
        """Reject the peer."""
        raise UserError("A client does not accept links")


@asynccontextmanager
async def open_mesh_client(
    text: str, state: Path, transport: Transport | None = None
) -> AsyncIterator[MeshClient]:
    """Run a client of a mesh inside the context; concurrent ones in a folder use different keys.

    Raises:
        UserError: the ticket is invalid, or admits no more clients than run here already.
        NotAuthorised: it has expired, or is rejected.
    """
    ticket = check_client_ticket(text, state)
    transports = (transport,) if transport else _transports_for(ticket)
    async with AsyncExitStack() as stack:
        supervisor = stack.enter_context(Supervisor())
        store, is_first = await stack.enter_async_context(_free_store(ticket, state))
        instance, link = await asyncio.to_thread(store.next_incarnation), None
        prepare(transports, store.key)
        if (credential := store.credential) is None:
            try:
                link = await dial_inviter(store, ticket, transports, instance)
            except NotAuthorised as error:
                if is_first:
                    raise
                raise _too_many() from error
            credential = await redeem(store, ticket, link)
        own = LocalIdentity(store.key, instance, credential)
        here = SameHostDetector(machine_secret(), credential.mesh)
        dialer = NodeDialer(by_scheme(transports), own, here)
        client = MeshClient(store, ticket, credential, dialer)
        client.restore()
        stack.push_async_callback(client.records.close)
        with supervisor.scope():
            running = asyncio.ensure_future(client.run(link))
        stack.push_async_callback(_ended, running, client.failed)
        running.add_done_callback(client.ended)
        supervisor.failed.add_done_callback(client.ended)
        known = {ticket.inviter, *(each.issuer for each in credential.chain)}
        code = MemberBeacons(store.key, credential, lambda: known, client.machine.removals)
        beacon = open_beacon(code, store.key.node, client.links.hint)
        (await stack.enter_async_context(beacon)).send()
        yield client


@asynccontextmanager
async def _free_store(ticket: Ticket, state: Path) -> AsyncIterator[tuple[StateStore, bool]]:
    """Lock a key that no other process uses; yield it, and whether it is the ticket's first.

    A mesh accepts one link per key, and the node of this folder may run at the same time.
    """
    with ExitStack() as stack:
        for place in range(1, MAX_CLIENTS + 1):
            folder = client_folder(ticket, state, place)
            store = await asyncio.to_thread(StateStore.open, folder)
            try:
                stack.enter_context(store.locked())
            except UserError:
                continue
            yield store, place == 1
            return
    raise _too_many()


def _too_many() -> UserError:
    return UserError(
        "The ticket admits no more clients than already run here",
        hint="wait for them, or get another one: `meshllm ring ticket --role client --uses 9`",
    )


def local_of(
    here: SameHostDetector | None, source: tuple[NodeId, bytes], fallback: Fallback
) -> LocalAddressPolicy:
    """Return which addresses of this machine a fallback may have: all if a node here named it.

    The tag of the fallback alone proves nothing: members read it, and could add other addresses.
    Alone, that of the teller does not either: the addresses are those that the fallback publishes.
    """
    tags = source, (fallback.node, fallback.machine)
    return (
        LocalAddressPolicy.HERE
        if here is not None and all(here.has(*tag) for tag in tags)
        else LocalAddressPolicy.NO
    )


def _id_of(name: str) -> NodeId | None:
    """Return the node with a whole id; None if a text is a name, or a part of an id."""
    try:
        return parse_node(name)
    except UserError:
        return None


async def _ended(running: asyncio.Future[None], failed: asyncio.Future[None]) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    if not failed.cancel():
        failed.exception()  # mark as retrieved


def _transports_for(ticket: Ticket) -> tuple[Transport, ...]:
    """Load the transports that dial the addresses of a ticket."""
    registry = Registry.discover()
    schemes = {address.partition(":")[0] for address in ticket.addresses}
    if found := registry.dialing(schemes):
        return found
    listed = ", ".join(f"`{address}`" for address in ticket.addresses) or "it has none"
    raise UserError(
        f"No installed transport dials an address of the ticket ({listed})",
        hint=f"installed: {', '.join(registry.names())}; the inviter may need `--advertise`",
    )
