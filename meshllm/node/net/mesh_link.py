"""The mesh links of a node to other members: dialling, accepting, message queues.

The membership machine (`protocol.membership.mesh`) decides what to send, which peers to dial and
which of two links to keep. A link has a queue per channel: heartbeats and gossip are not blocked
by answers.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import ParamSpec, Protocol, assert_never

from meshllm.errors import MeshError
from meshllm.names import NodeId, short
from meshllm.node.net.dialer import NodeDialer
from meshllm.node.net.peer_address import LocalAddressPolicy
from meshllm.node.net.secure import AdmissionPolicy, SecureLink, secure_accept
from meshllm.node.supervisor import contained
from meshllm.node.timer import DeadlineTimer, loop_time
from meshllm.protocol.membership.actions import (
    Action,
    Changed,
    ClosedByPeer,
    DeliverRequest,
    Dial,
    Drop,
    SendToPeer,
)
from meshllm.protocol.membership.codec import (
    Bye,
    CloseReason,
    Message,
    RequestMessage,
    decode,
    encode,
)
from meshllm.protocol.membership.mesh import Mesh
from meshllm.protocol.membership.read_budget import ReadBudget
from meshllm.protocol.membership.records import MAX_MEMBERS
from meshllm.protocol.trust.credential import Role
from meshllm.protocol.trust.handshake import Purpose
from meshllm.transport.contract import Channel, Link, Listener

MAX_QUEUED = 8 << 20  # bytes queued for a slow peer; above, its link is closed
HINT_S = 5.0  # s between two dials of a hinted peer at the same addresses
MAX_HINTED = 2 * MAX_MEMBERS  # in that time: at saved addresses, and at those of beacons
MAX_HANDSHAKES = 256  # concurrent, of one transport: as many as any of them keeps half-open
FAREWELL_S = 1.0  # s to send the last message

P = ParamSpec("P")

logger = logging.getLogger(__name__)


class LinkHost(Protocol):
    """The owner of the links: callbacks for what they receive."""

    def changed(self) -> None:
        """Handle a possible change of the records."""

    async def ring(self, link: SecureLink) -> None:
        """Handle an accepted ring link."""

    async def weights(self, link: SecureLink) -> None:
        """Handle an accepted link for weights."""

    async def training(self, link: SecureLink) -> None:
        """Handle an accepted link for training."""

    def deliver_request(self, peer: NodeId, message: RequestMessage, *, is_client: bool) -> None:
        """Handle a message about a request."""

    def lost(self, peer: NodeId) -> None:
        """Handle the loss or the closing of the link to a peer."""

    def dropped(self, peer: NodeId, why: CloseReason) -> None:
        """Handle the peer's reason for closing the link."""


class _Queue:
    """The send queue of a channel."""

    def __init__(self, link: SecureLink, channel: Channel) -> None:
        self._link = link
        self._channel = channel
        self._waiting: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self.size = 0

    def put(self, message: bytes) -> None:
        self._waiting.append(message)
        self.size += len(message)
        self._idle.clear()
        self._wake.set()

    async def run(self) -> None:
        while True:
            while self._waiting:
                if len(self._waiting) > 1:
                    self._offer_all()
                if self._waiting:
                    message = self._waiting.popleft()
                    await self._link.send([message], self._channel)
                    self.size -= len(message)
            self._idle.set()
            self._wake.clear()
            await self._wake.wait()

    def _offer_all(self) -> None:
        """Send what waits as one, as far as the link takes it without waiting."""
        with self._link.together():
            while self._waiting and self._link.offer([self._waiting[0]], self._channel):
                self.size -= len(self._waiting.popleft())

    async def emptied(self) -> None:
        await self._idle.wait()


class _MeshLink:
    """A running mesh link."""

    def __init__(self, link: SecureLink, turn: asyncio.Lock) -> None:
        """Run a link; peers that send much wait for a ``turn``."""
        self.link = link
        self._turn = turn
        self._queues = {channel: _Queue(link, channel) for channel in Channel}
        self._done = asyncio.Event()

    def post(self, message: Message) -> None:
        """Queue a message; close the link if too many bytes are queued."""
        is_talk = isinstance(message, RequestMessage)
        queue = self._queues[Channel.DATA if is_talk else Channel.CONTROL]
        queue.put(encode(message))
        if queue.size > MAX_QUEUED:
            logger.warning("node %s does not read its messages", short(self.link.peer))
            self._done.set()

    def close(self) -> None:
        """Let `run` end."""
        self._done.set()

    async def part(self, why: CloseReason) -> None:
        """Send the reason, then close."""
        self.post(Bye(why))
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._queues[Channel.CONTROL].emptied()
        except TimeoutError:
            logger.debug("node %s did not read why its link is closed", short(self.link.peer))
        self.close()

    async def run(self, receive: Callable[[Message], None]) -> str:
        """Send and receive until the link is lost or closed; return why."""
        jobs = (self._read(receive), *(queue.run() for queue in self._queues.values()))
        tasks = [asyncio.ensure_future(job) for job in (*jobs, self._done.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            try:
                outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            finally:  # also when the node stops while it waits here
                await self.link.close()
        for outcome in outcomes:
            if isinstance(outcome, Exception) and not isinstance(outcome, MeshError):
                logger.error("bug in a link", exc_info=outcome)
        return next((str(each) for each in outcomes if isinstance(each, MeshError)), "closed")

    async def _read(self, receive: Callable[[Message], None]) -> None:
        budget = ReadBudget(self.link.role, loop_time())
        while True:
            _, buffer = await self.link.receive()
            message = decode(buffer)
            receive(message)
            is_gossip = not isinstance(message, RequestMessage)
            if pause_s := budget.pause(len(buffer), loop_time(), is_gossip=is_gossip):
                async with self._turn:  # meanwhile nothing is decrypted, and the peer has to wait
                    await asyncio.sleep(pause_s)


class MeshLinks:
    """All mesh links of a node, over all its transports."""

    def __init__(
        self, dialer: NodeDialer, machine: Mesh, admission: AdmissionPolicy, host: LinkHost
    ) -> None:
        self._dialer = dialer
        self._machine = machine
        self._admission = admission
        self._host = host
        self._lines: dict[NodeId, _MeshLink] = {}
        self._turns = {role: asyncio.Lock() for role in Role}  # members do not wait for clients
        self._hinted: dict[tuple[NodeId, tuple[str, ...]], float] = {}
        self._redials: dict[asyncio.Task[None], NodeId] = {}
        self._dialling = set[asyncio.Task[None]]()  # for the machine
        self._served = set[SecureLink]()  # of others, for weights or training
        self._timer = DeadlineTimer(lambda: machine.deadline, self._expire)
        self._jobs = asyncio.TaskGroup()
        self._is_ending = False

    @property
    def by_peer(self) -> Mapping[NodeId, SecureLink]:
        """The open mesh links, by peer."""
        return {peer: line.link for peer, line in self._lines.items()}

    async def run(self, listeners: Sequence[Listener]) -> None:
        """Accept and run links until cancelled."""
        async with self._jobs, self._timer:
            for listener in listeners:
                self._jobs.create_task(self._accept(listener))
            try:
                await asyncio.Event().wait()  # never set: wait until cancelled
            finally:
                self._is_ending = True  # from now on no job begins

    def act(self, actions: Sequence[Action]) -> None:
        """Perform the actions of the machine."""
        for action in actions:
            match action:
                case SendToPeer(peer, message):
                    self.post(peer, message)
                case DeliverRequest(peer, message):
                    role = self._machine.links[peer].role
                    self._host.deliver_request(peer, message, is_client=role is Role.CLIENT)
                case Dial(peer, addresses):
                    self._dial_due(peer, addresses)
                case Drop(peer, why, _, text):
                    logger.info("drop node %s: %s", short(peer), text or why.name.lower())
                    self._drop(peer, why)
                case ClosedByPeer(peer, why):
                    self._drop(peer, None)
                    self._host.dropped(peer, why)
                case Changed():
                    self._close_ended()
                    self._host.changed()
                case _:
                    assert_never(action)
        self._timer.reset()

    def post(self, peer: NodeId, message: Message) -> None:
        """Send a message; drop it if there is no link."""
        if line := self._lines.get(peer):
            line.post(message)

    def probe(self, peer: NodeId) -> None:
        """Send a beat ahead of time to a peer that may have ended."""
        self.act(self._machine.probe(peer, loop_time()))

    def hint(
        self,
        peer: NodeId,
        addresses: Sequence[str],
        local: LocalAddressPolicy = LocalAddressPolicy.LITERAL,
    ) -> None:
        """Dial a member at addresses where it may be, each `peer_address.permitted`.

        A beacon may call it until it is closed: nothing is dialled once these links end.
        """
        now = loop_time()
        self._hinted = {each: until for each, until in self._hinted.items() if now < until}
        place = peer, tuple(addresses)
        is_full = len(self._hinted) >= MAX_HINTED  # a member may invent peers
        if is_full or place in self._hinted or not self._may_dial(peer):
            return
        self._hinted[place] = now + HINT_S
        self._begin(self._dial, peer, addresses, local)

    def redial(self, peer: NodeId, addresses: Sequence[str], local: LocalAddressPolicy) -> None:
        """Dial a member now, unless it is linked, or this is under way; the caller makes pauses."""
        if peer not in self._redials.values() and self._may_dial(peer):
            self._redials[self._begin(self._dial, peer, addresses, local)] = peer

    def give_up(self, is_needed: Callable[[NodeId], bool]) -> None:
        """Cancel those dials of `redial` that are not needed any more."""
        for task, peer in list(self._redials.items()):
            if not is_needed(peer):
                del self._redials[task]
                task.cancel()

    def adopt(self, link: SecureLink) -> None:
        """Run a mesh link that was dialled elsewhere."""
        self._begin(self._carry, link, dialled=True)

    async def dial_ring(self, peer: NodeId) -> SecureLink:
        """Open a ring link to a member.

        Raises:
            LinkLost: it cannot be reached.
        """
        return await self._dial_member(peer, Purpose.RING)

    async def dial_weights(self, peer: NodeId) -> SecureLink:
        """Open a link for weights to a member.

        Raises:
            LinkLost: it cannot be reached.
        """
        return await self._dial_member(peer, Purpose.WEIGHTS)

    async def dial_training(self, peer: NodeId) -> SecureLink:
        """Open a link for training to a member.

        Raises:
            LinkLost: it cannot be reached.
        """
        return await self._dial_member(peer, Purpose.TRAINING)

    def local_of(self, peer: NodeId) -> LocalAddressPolicy:
        """Return which addresses of this machine a member may name: all if it is here itself."""
        profile, machine = self._machine.profiles.get(peer), self._dialer.machine
        is_here = profile and machine and machine.has(peer, profile.machine)
        return LocalAddressPolicy.YES if is_here else LocalAddressPolicy.NO

    async def leave(self) -> None:
        """Announce that this node leaves, and close all links."""
        lines = list(self._lines.values())
        self.act(self._machine.leave(loop_time()))
        await asyncio.gather(*(line.part(CloseReason.LEAVING) for line in lines))

    def _dial_due(self, peer: NodeId, addresses: Sequence[str]) -> None:
        """Dial a peer for the machine; later if there are too many: a member may invent them."""
        if len(self._dialling) >= MAX_MEMBERS:
            self._machine.refused(peer, loop_time())
        else:
            self._dialling.add(self._begin(self._dial, peer, addresses, self.local_of(peer)))

    def _may_dial(self, peer: NodeId) -> bool:
        """Return whether a peer may be linked; addresses may be of removed ones."""
        machine = self._machine
        if self._is_ending:
            return False
        return peer not in self._lines and peer != machine.me and peer not in machine.removals

    def _begin(
        self, job: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Task[None]:
        """Run a job of one link in a task: a bug in it closes the link, not the node."""

        async def supervised() -> None:
            with contained("bug in a link"):
                await job(*args, **kwargs)

        return self._jobs.create_task(supervised())

    async def _accept(self, listener: Listener) -> None:
        handshakes = asyncio.Semaphore(MAX_HANDSHAKES)
        await handshakes.acquire()
        async for link in listener.links():
            self._begin(self._admit, link, handshakes)
            await handshakes.acquire()  # first: a link counts as authenticated once it is taken

    async def _admit(self, link: Link, handshakes: asyncio.Semaphore) -> None:
        try:
            secured = await secure_accept(link, self._dialer.own, self._admission)
        except MeshError as error:
            logger.info("rejected an incoming link: %s", error)
            return
        finally:
            handshakes.release()
        if secured.purpose is Purpose.MESH:
            await self._carry(secured, dialled=False)
        elif secured.role is not Role.NODE or self._has_ended(secured):
            await secured.close()
        elif secured.purpose is Purpose.RING:
            await self._host.ring(secured)
        elif secured.purpose is Purpose.WEIGHTS:
            await self._serve(secured, self._host.weights)
        else:
            await self._serve(secured, self._host.training)

    async def _serve(
        self, link: SecureLink, serve: Callable[[SecureLink], Awaitable[None]]
    ) -> None:
        """Serve a link until it closes, at the latest at the end of the peer's membership."""
        self._served.add(link)
        try:
            await serve(link)
        finally:
            self._served.discard(link)

    def _close_ended(self) -> None:
        """Close the links for weights or training to peers whose membership has ended."""
        for link in filter(self._has_ended, () if self._is_ending else self._served):
            self._begin(link.close)

    def _has_ended(self, link: SecureLink) -> bool:
        return self._machine.has_ended(link.peer, link.credential)

    async def _dial(
        self, peer: NodeId, addresses: Sequence[str], local: LocalAddressPolicy
    ) -> None:
        try:
            link = await self._dial_peer(addresses, Purpose.MESH, peer, local)
        except MeshError as error:
            logger.debug("cannot reach node %s: %s", short(peer), error)
            if asyncio.current_task() in self._dialling:  # else it would delay the machine's next
                self._machine.refused(peer, loop_time())
                self._timer.reset()
            return
        finally:
            if task := asyncio.current_task():
                self._redials.pop(task, None)  # from here on it is a link
                self._dialling.discard(task)
        await self._carry(link, dialled=True)

    async def _dial_member(self, peer: NodeId, purpose: Purpose) -> SecureLink:
        profile = self._machine.profiles.get(peer)
        addresses = profile.addresses if profile else ()
        return await self._dial_peer(addresses, purpose, peer, self.local_of(peer))

    async def _dial_peer(
        self, addresses: Sequence[str], purpose: Purpose, peer: NodeId, local: LocalAddressPolicy
    ) -> SecureLink:
        return await self._dialer.dial(
            addresses, purpose, expect=peer, removals=self._machine.removals, local=local
        )

    async def _carry(self, link: SecureLink, *, dialled: bool) -> None:
        """Report a link to the machine and run it until it is lost."""
        peer, line = link.peer, _MeshLink(link, self._turns[link.role])
        actions = self._machine.linked(
            peer,
            link.instance,
            link.credential,
            dialled=dialled,
            now=loop_time(),
            host=link.host,
        )
        for action in actions:
            if isinstance(action, Drop) and action.is_newcomer and action.peer == peer:
                await self._reject(line, action.why)
                return
        # A drop of this peer is of its previous link; messages to it are for the new one.
        for action in actions:
            if isinstance(action, Drop) and action.peer == peer:
                self._drop(peer, action.why)
        self._lines[peer] = line
        rest = [each for each in actions if not (isinstance(each, Drop) and each.peer == peer)]
        self.act(rest)
        reason = await line.run(lambda message: self._receive(line, message))
        if self._lines.get(peer) is line:
            logger.info("lost the link to node %s: %s", short(peer), reason)
            del self._lines[peer]
            self._host.lost(peer)
            self.act(self._machine.unlinked(peer, loop_time()))

    def _receive(self, line: _MeshLink, message: Message) -> None:
        peer = line.link.peer
        if self._lines.get(peer) is line:  # else it was closed, and its reader not yet cancelled
            self.act(self._machine.receive(peer, message, loop_time()))

    def _drop(self, peer: NodeId, why: CloseReason | None) -> None:
        if line := self._lines.pop(peer, None):
            self._host.lost(peer)
            if why is None:
                line.close()
            else:
                self._jobs.create_task(line.part(why))

    async def _reject(self, line: _MeshLink, why: CloseReason) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(line.run(lambda _: None))
            await line.part(why)

    def _expire(self) -> None:
        self.act(self._machine.expire(loop_time(), time.time()))
