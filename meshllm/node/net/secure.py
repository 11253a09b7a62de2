"""Authenticated and encrypted links.

`secure_dial` and `secure_accept` drive the handshake over the CONTROL channel of any link; they
return a link on which each message is sealed.
"""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Protocol, assert_never

from meshllm.errors import LinkLost, NotAuthorised, PeerFault
from meshllm.names import NodeId
from meshllm.protocol.trust.cipher import OVERHEAD_BYTES, Seal, Unseal
from meshllm.protocol.trust.credential import Credential, Removals
from meshllm.protocol.trust.handshake import (
    FIRST_S,
    PRE_AUTH_BYTES,
    PRE_AUTH_S,
    AuthorizeDialer,
    Established,
    HandshakeDialer,
    HandshakeListener,
    HandshakeState,
    LocalIdentity,
    Purpose,
    SendHandshake,
    UnknownClaim,
)
from meshllm.protocol.trust.ticket import TicketProof
from meshllm.protocol.trust.transcript import HandshakeRandomness, OtherVersion
from meshllm.transport.contract import (
    MAX_MESSAGE_BYTES,
    Buffer,
    Channel,
    HasPeerHost,
    HasPeerKey,
    ImmediateSender,
    Link,
    LinkStatistics,
    SupportsUnreadLimit,
    checked_size,
)
from meshllm.transport.gathering import together

MAX_SECURE_BYTES = MAX_MESSAGE_BYTES - OVERHEAD_BYTES
"""Longest message of a secure link."""
MAX_EARLY = 256
"""Messages that may overtake the end of a handshake, while one packet is sent again."""


class AdmissionPolicy(Protocol):
    """Decides which peers may link to this node."""

    @property
    def removals(self) -> Removals:
        """The removed members, which receive no reply."""
        ...

    async def refresh(self) -> None:
        """Prepare `guests`, for a dialer that is not a member."""
        ...

    def guests(self) -> Iterable[bytes]:
        """Yield the pre-shared keys of the tickets that are open when they are asked for.

        See `handshake.Listener`; `refresh` comes before the first one is taken.
        """
        ...

    async def authorize(
        self, peer: NodeId, proof: Credential | TicketProof, purpose: Purpose, instance: int
    ) -> Credential:
        """Return the dialer's verified credential, or a new one for its ticket.

        Raises:
            NotAuthorised: the dialer is rejected; the message is sent to it.
        """
        ...


class HandshakeClosed(LinkLost):
    """The peer closed the connection after the first message of the handshake, without a reply."""


class SecureLink:
    """A link to an authenticated peer; a message may be `MAX_SECURE_BYTES` long."""

    def __init__(self, link: Link, known: Established, early: Sequence[Buffer] = ()) -> None:
        self.peer = known.peer
        self.role = known.role
        self.instance = known.instance
        self.purpose = known.purpose
        self.credential = known.credential
        """The credential of the peer."""
        self.granted = known.granted
        """The credential issued to this node, if it dialled with a ticket."""
        self.features = known.features
        """Protocol features that the peer supports."""
        self.address = ""
        """The dialled address; empty if the peer dialled."""
        self.host = link.peer_host if isinstance(link, HasPeerHost) else ""
        """The IP address that the peer comes from; empty if it is unknown."""
        self._link = link
        self._immediate = link if isinstance(link, ImmediateSender) else None
        self._early = deque(early)  # DATA that overtook the end of the handshake
        self._seals = [Seal(key) for key in known.keys.outgoing]
        self._unseals = [Unseal(key) for key in known.keys.incoming]
        # One sender at a time: nonces are sent in order, and only the last may be unconfirmed.
        self._send_locks = [asyncio.Lock() for _ in Channel]
        self._senders = [0 for _ in Channel]
        """Number of senders that hold the lock or wait for it."""
        before = link.statistics
        self._before = replace(
            before,
            messages_received=before.messages_received - len(early),
            bytes_received=before.bytes_received - sum(map(len, early)),
        )

    async def send(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> None:
        """Seal the parts as one message and send it; see `contract.Link.send`."""
        _check_size(message)
        self._senders[channel] += 1
        try:
            async with self._send_locks[channel]:
                seal = self._seals[channel]
                await self._link.send(seal.seal(message), channel)
                seal.sent()
        finally:
            self._senders[channel] -= 1

    def offer(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> bool:
        """Seal the parts as one message and send it at once; see `contract.ImmediateSender.offer`.

        A sealed message that was not sent is skipped, as after a cancelled send.
        """
        _check_size(message)
        if self._immediate is None or self._senders[channel]:
            return False
        seal = self._seals[channel]
        if is_sent := self._immediate.offer(seal.seal(message), channel):
            seal.sent()
        return is_sent

    def together(self) -> AbstractContextManager[None]:
        """Send what is offered inside the context together; see `SupportsBatchedSend`."""
        return together(self._link)

    async def receive(self) -> tuple[Channel, Buffer]:
        """Wait for the next message and open it; see `contract.Link.receive`.

        Raises:
            PeerFault: a message was modified, replayed or dropped in transit; the link is closed.
            LinkLost: see `contract.Link.receive`.
        """
        if self._early:
            channel, sealed = Channel.DATA, self._early.popleft()
        else:
            channel, sealed = await self._link.receive()
        try:
            return channel, self._unseals[channel].open(sealed)
        except PeerFault:
            await self._link.close()
            raise

    async def close(self) -> None:
        """Close the link; see `contract.Link.close`."""
        self._early.clear()
        await self._link.close()

    @property
    def statistics(self) -> LinkStatistics:
        """The counters since the handshake, without the overhead of the seals."""
        now, before = self._link.statistics, self._before
        sent = now.messages_sent - before.messages_sent
        received = now.messages_received - before.messages_received
        return replace(
            now,
            messages_sent=sent,
            bytes_sent=now.bytes_sent - before.bytes_sent - sent * OVERHEAD_BYTES,
            messages_received=received,
            bytes_received=now.bytes_received - before.bytes_received - received * OVERHEAD_BYTES,
        )


async def secure_dial(
    link: Link,
    own: LocalIdentity,
    purpose: Purpose,
    *,
    expect: NodeId,
    now_s: float,
    removals: Removals,
) -> SecureLink:
    """Perform the handshake on a link to node ``expect``; with a ticket, to its inviter.

    Raises:
        NotAuthorised: the peer is another node or not a member, or it rejects this node.
        PeerFault: it violated the protocol.
        HandshakeClosed: it knows neither our mesh nor our ticket, or is overloaded.
        LinkLost: it closed the connection later, or took longer than `PRE_AUTH_S`.

    After an error, and if cancelled, the link is closed.
    """
    dialer = HandshakeDialer(own, purpose, _fresh(), expect=expect, now_s=now_s, removals=removals)
    async with _handshake(link):
        try:
            return await _dial(link, dialer)
        except LinkLost as lost:
            if dialer.state is not HandshakeState.HELLO_SENT:
                raise
            raise HandshakeClosed(
                "The peer closed the connection during the handshake",
                hint="it is of another mesh or version, has removed this node, is full, or the"
                " ticket has expired",
            ) from lost


async def secure_accept(link: Link, own: LocalIdentity, admission: AdmissionPolicy) -> SecureLink:
    """Perform the handshake on an incoming link.

    Raises:
        NotAuthorised: the dialer is not a member and knows no ticket, or is not admitted.
        PeerFault: it violated the protocol.
        LinkLost: it closed the connection, said nothing for `FIRST_S`, or took longer than
            `PRE_AUTH_S`.

    After an error, and if cancelled, the link is closed.
    """
    listener = HandshakeListener(
        own, _fresh(), admission.guests(), now_s=time.time(), removals=admission.removals
    )
    async with _handshake(link):
        channel, message = await _first(link, listener, admission)
        while True:
            if channel is not Channel.CONTROL:
                raise _early(message)
            try:
                actions = listener.receive(bytes(message))
            except (OtherVersion, UnknownClaim) as refusal:
                if refusal.answer:
                    await link.send([refusal.answer], Channel.CONTROL)
                raise
            for action in actions:
                match action:
                    case SendHandshake(answer):
                        await link.send([answer], Channel.CONTROL)
                    case AuthorizeDialer():
                        return await _judge(link, listener, action, admission)
                    case _:
                        assert_never(action)
            channel, message = await link.receive()


async def _first(
    link: Link, listener: HandshakeListener, admission: AdmissionPolicy
) -> tuple[Channel, Buffer]:
    """Wait for the first message; unless it is of a member, the open tickets are needed next."""
    try:
        async with asyncio.timeout(FIRST_S):
            channel, message = await link.receive()
    except TimeoutError:
        raise LinkLost(f"The peer sent nothing for {FIRST_S} s") from None
    if channel is Channel.CONTROL and not listener.is_of_member(bytes(message)):
        await admission.refresh()
    return channel, message


async def _dial(link: Link, dialer: HandshakeDialer) -> SecureLink:
    early: list[Buffer] = []
    unread = 0  # bytes of them
    actions = dialer.start()
    while True:
        for action in actions:
            match action:
                case SendHandshake(message):
                    await link.send([message], Channel.CONTROL)
                case Established():
                    _refuse_other(link, action.peer)
                    return SecureLink(link, action, early)
                case _:
                    assert_never(action)
        if dialer.state is HandshakeState.PROVEN:  # the peer is authenticated
            _limit_unread(link, None)
        while (arrived := await link.receive())[0] is not Channel.CONTROL:
            early.append(arrived[1])
            unread += len(arrived[1])
            is_bounded = unread <= MAX_MESSAGE_BYTES and len(early) <= MAX_EARLY
            if dialer.state is not HandshakeState.PROVEN or not is_bounded:
                raise _early(arrived[1])
        actions = dialer.receive(bytes(arrived[1]))


async def _judge(
    link: Link, listener: HandshakeListener, question: AuthorizeDialer, admission: AdmissionPolicy
) -> SecureLink:
    try:
        _refuse_other(link, question.peer)
        credential = await admission.authorize(
            question.peer, question.proof, question.purpose, question.instance
        )
    except NotAuthorised as refusal:
        await link.send([listener.refuse(str(refusal)).message], Channel.CONTROL)
        raise
    welcome, known = listener.admit(credential)
    _limit_unread(link, None)
    await link.send([welcome.message], Channel.CONTROL)
    return SecureLink(link, known)


@asynccontextmanager
async def _handshake(link: Link) -> AsyncIterator[None]:
    """Limit the time and memory of an unauthenticated peer; close the link after an error."""
    _limit_unread(link, PRE_AUTH_BYTES)
    async with AsyncExitStack() as failed:
        failed.push_async_callback(link.close)
        try:
            async with asyncio.timeout(PRE_AUTH_S):
                yield
        except TimeoutError:
            raise LinkLost(
                f"The peer did not complete the handshake within {PRE_AUTH_S} s"
            ) from None
        failed.pop_all()


def _check_size(message: Sequence[Buffer]) -> None:
    if (size := checked_size(message)) > MAX_SECURE_BYTES:
        raise ValueError(f"a message of {size} B is longer than {MAX_SECURE_BYTES} B")


def _refuse_other(link: Link, peer: NodeId) -> None:
    """Raise `NotAuthorised` if the transport has authenticated a different peer."""
    if isinstance(link, HasPeerKey) and link.peer_key != peer:
        raise NotAuthorised("The peer claims another node id than the transport has authenticated")


def _limit_unread(link: Link, size: int | None) -> None:
    if isinstance(link, SupportsUnreadLimit):
        link.limit_unread(size)


def _early(message: Buffer) -> PeerFault:
    return PeerFault(f"Data of {len(message)} bytes before the end of the handshake")


def _fresh() -> HandshakeRandomness:
    return HandshakeRandomness(secrets.token_bytes(32), secrets.token_bytes(16))
