"""Members of one mesh on one loopback network, each with links and a machine, and no model."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from meshllm.names import NodeId
from meshllm.node.membership.admission import MemberAdmission
from meshllm.node.membership.state_store import StateStore
from meshllm.node.net.dialer import NodeDialer
from meshllm.node.net.mesh_link import MeshLinks
from meshllm.node.net.secure import SecureLink
from meshllm.protocol.membership.codec import CloseReason, RequestMessage
from meshllm.protocol.membership.mesh import Mesh
from meshllm.protocol.membership.records import Lifecycle, Profile, StateRecord
from meshllm.protocol.trust.credential import Credential, Role, issue
from meshllm.protocol.trust.handshake import LocalIdentity
from meshllm.transport.contract import Transport


class MeshMember:
    """A member: its links, its machine, and the messages it received."""

    def __init__(
        self, name: str, store: StateStore, credential: Credential, transport: Transport, life: int
    ) -> None:
        now = asyncio.get_running_loop().time()
        self.name, self.store, self.transport = name, store, transport
        self.me = store.key.node
        self.credential = credential
        self.machine = Mesh(store.key, credential, life, now=now, wall_s=time.time())
        self.own = LocalIdentity(store.key, life, credential)
        self.dialer = NodeDialer(dict.fromkeys(transport.schemes, transport), self.own)
        gate = MemberAdmission(store, credential, self.machine.removals)
        self.links = MeshLinks(self.dialer, self.machine, gate, self)
        self.talked: list[tuple[NodeId, RequestMessage, bool]] = []
        self.rings: list[SecureLink] = []
        self.send_weights: Callable[[SecureLink], Awaitable[None]] = lambda link: link.close()
        self.train: Callable[[SecureLink], Awaitable[None]] = lambda link: link.close()
        self.lost_ones: list[NodeId] = []
        self.byes: list[tuple[NodeId, CloseReason]] = []
        self.stack = AsyncExitStack()

    @property
    def address(self) -> str:
        return f"loopback:{self.name}"

    @property
    def peers(self) -> set[NodeId]:
        return set(self.links.by_peer)

    def changed(self) -> None:
        """Ignore a change."""

    async def ring(self, link: SecureLink) -> None:
        self.rings.append(link)

    async def weights(self, link: SecureLink) -> None:
        await self.send_weights(link)

    async def training(self, link: SecureLink) -> None:
        await self.train(link)

    def deliver_request(self, peer: NodeId, message: RequestMessage, *, is_client: bool) -> None:
        self.talked.append((peer, message, is_client))

    def lost(self, peer: NodeId) -> None:
        self.lost_ones.append(peer)

    def dropped(self, peer: NodeId, why: CloseReason) -> None:
        self.byes.append((peer, why))

    async def open(self) -> None:
        """Listen, and publish the profile."""
        listener = await self.stack.enter_async_context(self.transport.listen(self.address))
        running = asyncio.ensure_future(self.links.run([listener]))
        self.stack.push_async_callback(_ended, running)
        await asyncio.sleep(0)
        now = asyncio.get_running_loop().time()
        if self.credential.role is Role.NODE:
            profile = Profile(self.name, "1", (self.address,), 0)
            state = StateRecord(lifecycle=Lifecycle.SERVING)
            self.links.act(self.machine.publish(profile=profile, state=state, now=now))

    async def close(self) -> None:
        """Crash without closing the links."""
        await self.stack.aclose()

    def meet(self, other: "MeshMember") -> None:
        """Dial another member."""
        self.links.hint(other.me, [other.address])


class MemberNetwork:
    """A mesh; its first member founds it."""

    def __init__(self, folder: Path, transport: Transport) -> None:
        self.folder = folder
        self.transport = transport
        self.member_nodes: dict[str, MeshMember] = {}

    async def add(self, name: str, role: Role = Role.NODE, life: int = 1) -> MeshMember:
        """Start a member of the mesh."""
        store = StateStore.open(self.folder / name)
        founder = next(iter(self.member_nodes.values()), None)
        if founder is None:
            credential = store.create_mesh()
        elif (kept := store.credential) is not None:
            credential = kept
        else:
            key, node = founder.store.key, store.key.node
            credential = store.join(issue(key, founder.credential, node, role))
        member_node = MeshMember(name, store, credential, self.transport, life)
        self.member_nodes[f"{name} {life}"] = member_node
        await member_node.open()
        return member_node


@asynccontextmanager
async def network(folder: Path, transport: Transport) -> AsyncIterator[MemberNetwork]:
    """Found a mesh; stop all its members at the end."""
    made = MemberNetwork(folder, transport)
    try:
        yield made
    finally:
        for member_node in made.member_nodes.values():
            await member_node.close()


async def _ended(running: "asyncio.Future[None]") -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
