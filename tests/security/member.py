"""A member of a mesh that breaks the rules: it joins with a ticket, then says what it likes."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from meshllm.errors import NotAuthorised
from meshllm.names import NodeId
from meshllm.node.membership.bootstrap import dial_inviter, granted
from meshllm.node.membership.state_store import StateStore
from meshllm.node.net.dialer import NodeDialer
from meshllm.node.net.endpoints import by_scheme, prepare
from meshllm.node.net.mesh_link import MeshLinks
from meshllm.node.net.secure import SecureLink
from meshllm.protocol.membership.actions import SendToPeer
from meshllm.protocol.membership.codec import CloseReason, RequestMessage, batches
from meshllm.protocol.membership.gossip import Item
from meshllm.protocol.membership.mesh import Mesh
from meshllm.protocol.membership.record_store import Record, slot_of
from meshllm.protocol.trust.credential import Credential, Removals
from meshllm.protocol.trust.handshake import LocalIdentity
from meshllm.protocol.trust.ticket import parse_ticket
from meshllm.transport.contract import Transport
from meshllm_websocket.transport import WebsocketTransport


class _Host:
    """The callbacks of its links: it ignores what others say."""

    def changed(self) -> None:
        """Ignore it."""

    async def ring(self, link: SecureLink) -> None:
        """Be in no ring."""
        await link.close()

    async def weights(self, link: SecureLink) -> None:
        """Send no weights."""
        await link.close()

    async def training(self, link: SecureLink) -> None:
        """Compute no batches."""
        await link.close()

    def deliver_request(self, peer: NodeId, message: RequestMessage, *, is_client: bool) -> None:
        """Answer no request."""

    def lost(self, peer: NodeId) -> None:
        """Ignore it."""

    def dropped(self, peer: NodeId, why: CloseReason) -> None:
        """Ignore it."""


class _Closed:
    """Admits nobody."""

    removals: Removals = MappingProxyType({})

    async def refresh(self) -> None:
        """Do nothing."""

    def guests(self) -> tuple[bytes, ...]:
        return ()

    async def authorize(self, *_: object) -> Credential:
        raise NotAuthorised("closed")


@dataclass(frozen=True, slots=True)
class Member:
    """What an attacker has: a key, a credential, links."""

    store: StateStore
    credential: Credential
    machine: Mesh
    links: MeshLinks

    def say(self, *records: Record) -> None:
        """Sign records, whatever they contain, and send them to every peer."""
        mesh = self.credential.mesh
        items = []
        for record in records:
            slot, version = slot_of(self.store.key.node, record)
            item = Item(
                slot.kind, slot.subject, self.store.key.node, version or 0, 0,
                self.credential.encode(), record.encode(),
            )  # fmt: skip
            items.append(item.sign(self.store.key, mesh))
        for peer in list(self.links.by_peer):
            self.links.act([SendToPeer(peer, batch) for batch in batches(items)])


@asynccontextmanager
async def join(
    ticket: str, state: Path, transport: Transport | None = None
) -> AsyncIterator[Member]:
    """Join the mesh of a ticket; raise what refuses it."""
    store, invitation = StateStore.open(state), parse_ticket(ticket)
    transports, life = (transport or WebsocketTransport(),), store.next_incarnation()
    prepare(transports, store.key)
    link = await dial_inviter(store, invitation, transports, life, discovery=False)
    credential = store.join(granted(link), invitation)
    now = asyncio.get_running_loop().time()
    machine = Mesh(store.key, credential, life, now=now, wall_s=time.time())
    dialer = NodeDialer(by_scheme(transports), LocalIdentity(store.key, life, credential))
    links = MeshLinks(dialer, machine, _Closed(), _Host())
    async with AsyncExitStack() as stack:
        running = asyncio.ensure_future(links.run([]))
        stack.push_async_callback(_ended, running)
        await asyncio.sleep(0)
        links.adopt(link)
        await asyncio.sleep(0)
        yield Member(store, credential, machine, links)


async def _ended(running: "asyncio.Future[None]") -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
