"""A client of a mesh: sends requests, holds neither weights nor a tokenizer."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
)
from pathlib import Path
from types import MappingProxyType

from blake3 import blake3

from meshllm.errors import LinkLost, NotAuthorised, UserError
from meshllm.names import LossCause, NodeId
from meshllm.node.membership.bootstrap import dial_inviter, granted
from meshllm.node.membership.state_store import StateStore
from meshllm.node.net.beacon import MemberBeacons, open_beacon
from meshllm.node.net.dialer import NodeDialer
from meshllm.node.net.endpoints import by_scheme, prepare
from meshllm.node.net.mesh_link import MeshLinks
from meshllm.node.net.peer_address import Local
from meshllm.node.net.secure import SecureLink
from meshllm.node.requests.router import MAX_PER_CLIENT, RequestRouter
from meshllm.node.supervisor import Supervisor
from meshllm.protocol.membership.client_quota import places
from meshllm.protocol.membership.codec import CloseReason, RequestMessage
from meshllm.protocol.membership.link_table import MAX_CLIENTS
from meshllm.protocol.membership.mesh import Mesh
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.trust.credential import Credential, Removals, Role
from meshllm.protocol.trust.handshake import Own
from meshllm.protocol.trust.ticket import Ticket, parse_ticket
from meshllm.request import Backend, Event, Request
from meshllm.transport.contract import Transport
from meshllm.transport.registry import Registry

REDIAL_S = 1.0  # s between two checks for a linked node, and two dials of the inviter without one


class MeshClient:
    """A running client; created by `open_mesh_client`."""

    def __init__(self, store: StateStore, credential: Credential, dialer: NodeDialer) -> None:
        self._me = store.key.node
        self._linked = asyncio.Event()
        self._bug: BaseException | None = None
        machine = Mesh(
            store.key,
            credential,
            dialer.own.instance,
            now=asyncio.get_running_loop().time(),
            wall_s=time.time(),
        )
        self.links = MeshLinks(dialer, machine, _NoAdmission(), self)
        self.router = RequestRouter(self._me, self, self.links.post, asks_ingress=True)
        self._places = asyncio.Semaphore(places(credential.limits, MAX_PER_CLIENT))

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Send a request to a node of the mesh, once the ticket allows one more; see `Backend`."""
        async with self._places, aclosing(self.router.generate(request)) as events:
            async for event in events:
                yield event

    async def run(self, ticket: Ticket, link: SecureLink | None) -> None:
        """Run the client until cancelled, over the ``link`` to the inviter if there is one."""
        async with asyncio.TaskGroup() as group:
            for job in (self.links.run([]), self.router.run(), self._redial(ticket)):
                group.create_task(job)
            await asyncio.sleep(0)  # let the links start
            if link is not None:
                self.links.adopt(link)
            else:
                self.links.hint(ticket.inviter, ticket.addresses, Local.YES)

    def ended(self, running: asyncio.Future[None]) -> None:
        """Fail the pending requests if a bug ended the client."""
        if not running.cancelled() and (error := running.exception()):
            self._bug = error
            self._linked.set()
            for peer in self.links.by_peer:
                self.router.lost(peer)

    async def _redial(self, ticket: Ticket) -> None:
        """Dial the inviter whenever no node is linked, until cancelled."""
        while True:
            await asyncio.sleep(REDIAL_S)
            if not self.links.by_peer:
                self.links.hint(ticket.inviter, ticket.addresses, Local.YES)

    async def entries(self, model: str = "") -> Sequence[NodeId]:
        """Wait for a linked node; any can be the ingress for any model."""
        _ = model
        while True:
            if self._bug is not None:
                raise self._bug
            if node := next(iter(self.links.by_peer), None):
                return [node]
            self._linked.clear()
            await self._linked.wait()

    def reason(self, model: str = "") -> str:
        """Return why no node can serve a request."""
        _ = model
        return "no node of the mesh answers"

    plan = None  # a client does not know it
    loads_until = 0.0  # nor whether its ingress loads

    def explain(self, before: Plan | None) -> tuple[LossCause, str]:
        """Return that the link to the ingress was lost: an ingress survives other losses."""
        _ = before
        return LossCause.LINK_LOST, "the node that answered is gone; another one answers"

    def is_provided(self, model: str) -> bool:
        """Return False: the ingress knows who provides a model."""
        _ = model
        return False

    def providers(self, model: str) -> Sequence[NodeId]:
        """Return no node: the ingress knows them."""
        _ = model
        return ()

    def ids_of(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the names: the ingress resolves them."""
        return tuple(names)

    def backend(
        self, asker: NodeId | None = None, model: str = ""
    ) -> AbstractAsyncContextManager[Backend]:
        """Raise `LinkLost`: a client holds no model."""
        raise LinkLost("A client does not serve requests")

    def changed(self) -> None:
        """Wake requests that wait for a linked node."""
        self._linked.set()

    async def ring(self, link: SecureLink) -> None:
        """Close a ring link: a client is in no ring."""
        await link.close()

    async def weights(self, link: SecureLink) -> None:
        """Close a link for weights: a client has none."""
        await link.close()

    def deliver_request(self, peer: NodeId, message: RequestMessage, *, is_client: bool) -> None:
        """Handle a message of a node about a request."""
        _ = is_client
        self.router.receive(peer, message, is_client=False)

    def lost(self, peer: NodeId) -> None:
        """Fail the requests that the node served."""
        self.router.lost(peer)

    def dropped(self, peer: NodeId, why: CloseReason) -> None:
        """Do nothing: the loss itself is reported by `lost`."""


class _NoAdmission:
    """The admission of a client: none."""

    removals: Removals = MappingProxyType({})

    def guests(self) -> tuple[bytes, ...]:
        """Return no tickets."""
        return ()

    async def judge(self, *_: object) -> Credential:
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
    ticket = parse_ticket(text)
    if ticket.role is not Role.CLIENT:
        raise UserError(
            "The ticket is for a node, not for a client",
            hint="make one with `meshllm ring ticket --role client`",
        )
    transports = (transport,) if transport else _transports_for(ticket)
    async with AsyncExitStack() as stack:
        supervisor = stack.enter_context(Supervisor())
        store, is_first = stack.enter_context(_free_keyring(ticket, state))
        instance, link = store.next_incarnation(), None
        prepare(transports, store.key)
        if (credential := store.credential) is None:
            try:
                link = await dial_inviter(store, ticket, transports, instance)
            except NotAuthorised as error:
                if is_first:
                    raise
                raise _too_many() from error
            credential = store.join(granted(link), ticket)
        own = Own(store.key, instance, credential)
        client = MeshClient(store, credential, NodeDialer(by_scheme(transports), own))
        with supervisor.scope():
            running = asyncio.ensure_future(client.run(ticket, link))
        stack.push_async_callback(_ended, running)
        running.add_done_callback(client.ended)
        supervisor.failed.add_done_callback(client.ended)
        known = {ticket.inviter, *(each.issuer for each in credential.chain)}
        code = MemberBeacons(store.key, credential, lambda: known, {})
        beacon = open_beacon(code, store.key.node, client.links.hint)
        (await stack.enter_async_context(beacon)).send()
        yield client


@contextmanager
def _free_keyring(ticket: Ticket, state: Path) -> Iterator[tuple[StateStore, bool]]:
    """Lock a key that no other process uses; yield it, and whether it is the ticket's first.

    A mesh accepts one link per key, and the node of this folder may run at the same time.
    """
    name = blake3(ticket.psk).hexdigest(8)
    with ExitStack() as stack:
        for place in range(1, MAX_CLIENTS + 1):
            store = StateStore.open(state / f"client-{name}-{place}")
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


async def _ended(running: asyncio.Future[None]) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


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
