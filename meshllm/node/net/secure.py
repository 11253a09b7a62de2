"""Links on which both ends are known and nobody listens in.

`secure_dial` and `secure_accept` drive the handshake over the CONTROL channel of any link; what
they return is a link too, on which each message is sealed.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Protocol, assert_never

from meshllm.errors import LinkLost, NotAuthorised, PeerFault
from meshllm.names import NodeId
from meshllm.protocol.trust.cipher import OVERHEAD_BYTES, Seal, Unseal
from meshllm.protocol.trust.credential import Credential, Removals
from meshllm.protocol.trust.handshake import (
    PRE_AUTH_BYTES,
    PRE_AUTH_S,
    Dialer,
    Established,
    Judge,
    Listener,
    Own,
    Purpose,
    Send,
    State,
)
from meshllm.protocol.trust.ticket import TicketProof
from meshllm.protocol.trust.transcript import Fresh, OtherVersion
from meshllm.transport.contract import (
    MAX_MESSAGE_BYTES,
    Buffer,
    Channel,
    Guarded,
    Known,
    Link,
    LinkStatistics,
    Prompt,
    measure,
)

MAX_SECURE_BYTES = MAX_MESSAGE_BYTES - OVERHEAD_BYTES
"""Longest message of a secure link."""


class Doorkeeper(Protocol):
    """Who decides about those that dial this node."""

    def guests(self) -> Iterable[bytes]:
        """Yield the pre-shared keys of the tickets that are open; see `handshake.Listener`."""
        ...

    async def judge(
        self, peer: NodeId, proof: Credential | TicketProof, purpose: Purpose, instance: int
    ) -> Credential:
        """Return the dialer's own credential, checked, or a new one for its ticket.

        Raises:
            NotAuthorised: it may not enter; the dialer is told the message.
        """
        ...


class HungUp(LinkLost):
    """The other side heard who dials, and closed the link without a word."""


class SecureLink:
    """A link to a known peer; a message may be `MAX_SECURE_BYTES` long."""

    def __init__(self, link: Link, known: Established, early: Sequence[Buffer] = ()) -> None:
        self.peer = known.peer
        self.role = known.role
        self.instance = known.instance
        self.purpose = known.purpose
        self.credential = known.credential
        """By what the peer is a member."""
        self.granted = known.granted
        """By what this node is a member from now on, if it dialled with a ticket."""
        self.features = known.features
        """What the peer understands, and may be sent."""
        self.address = ""
        """Where it was dialled; empty where the other end dialled."""
        self._link = link
        self._prompt = link if isinstance(link, Prompt) else None
        self._early = deque(early)  # DATA that overtook the end of the handshake
        self._seals = [Seal(key) for key in known.keys.outgoing]
        self._unseals = [Unseal(key) for key in known.keys.incoming]
        # One at a time: numbers leave in their order, and only the last one can be in doubt.
        self._turns = [asyncio.Lock() for _ in Channel]
        self._senders = [0 for _ in Channel]
        """Those that have a turn or wait for one."""
        before = link.statistics
        self._before = replace(
            before,
            messages_received=before.messages_received - len(early),
            bytes_received=before.bytes_received - sum(map(len, early)),
        )

    async def send(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> None:
        """Seal the parts as one message and send it; see `contract.Link.send`."""
        _measure(message)
        self._senders[channel] += 1
        try:
            async with self._turns[channel]:
                seal = self._seals[channel]
                await self._link.send(seal.seal(message), channel)
                seal.sent()
        finally:
            self._senders[channel] -= 1

    def offer(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> bool:
        """Seal the parts as one message and send it at once; see `contract.Prompt.offer`.

        What was sealed and not sent is left out, as where a send is cancelled.
        """
        _measure(message)
        if self._prompt is None or self._senders[channel]:
            return False
        seal = self._seals[channel]
        if is_sent := self._prompt.offer(seal.seal(message), channel):
            seal.sent()
        return is_sent

    async def receive(self) -> tuple[Channel, Buffer]:
        """Wait for the next message and open it; see `contract.Link.receive`.

        Raises:
            PeerFault: it was changed, repeated or left out on the way; the link is closed.
            LinkLost: as the link does.
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
        """What was sent and received since the handshake, without the seals."""
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
    own: Own,
    purpose: Purpose,
    *,
    expect: NodeId | None = None,
    now_s: float,
    removals: Removals,
) -> SecureLink:
    """Make a link that was just dialled secure; a ticket expects its inviter.

    Raises:
        NotAuthorised: the other side is another node or no member, or it refuses this one.
        PeerFault: it broke the rules.
        HungUp: it knows neither our mesh nor our ticket, or has no time.
        LinkLost: it hung up later, or took longer than `PRE_AUTH_S`.

    After an error, and if cancelled, the link is closed.
    """
    dialer = Dialer(own, purpose, _fresh(), expect=expect, now_s=now_s, removals=removals)
    async with _handshake(link):
        try:
            return await _dial(link, dialer)
        except LinkLost as lost:
            if dialer.state is not State.HAILED:
                raise
            raise HungUp(
                "The other side hung up without a word",
                hint="it is of another mesh or version, has too many guests, or the ticket is over",
            ) from lost


async def secure_accept(link: Link, own: Own, doorkeeper: Doorkeeper) -> SecureLink:
    """Make a link that just arrived secure.

    Raises:
        NotAuthorised: the dialer knows neither mesh nor ticket, or the doorkeeper refused it.
        PeerFault: it broke the rules.
        LinkLost: it hung up, or took longer than `PRE_AUTH_S`.

    After an error, and if cancelled, the link is closed.
    """
    listener = Listener(own, _fresh(), doorkeeper.guests())
    async with _handshake(link):
        while True:
            channel, message = await link.receive()
            if channel is not Channel.CONTROL:
                raise _early(message)
            try:
                actions = listener.receive(bytes(message))
            except OtherVersion as other:
                if other.answer:
                    await link.send([other.answer], Channel.CONTROL)
                raise
            for action in actions:
                match action:
                    case Send(answer):
                        await link.send([answer], Channel.CONTROL)
                    case Judge():
                        return await _judge(link, listener, action, doorkeeper)
                    case _:
                        assert_never(action)


async def _dial(link: Link, dialer: Dialer) -> SecureLink:
    early: list[Buffer] = []
    actions = dialer.start()
    while True:
        for action in actions:
            match action:
                case Send(message):
                    await link.send([message], Channel.CONTROL)
                case Established():
                    _refuse_other(link, action.peer)
                    return SecureLink(link, action, early)
                case _:
                    assert_never(action)
        if dialer.state is State.PROVEN:  # no stranger any more
            _limit_unread(link, None)
        while (arrived := await link.receive())[0] is not Channel.CONTROL:
            early.append(arrived[1])
            if dialer.state is not State.PROVEN or sum(map(len, early)) > MAX_MESSAGE_BYTES:
                raise _early(arrived[1])
        actions = dialer.receive(bytes(arrived[1]))


async def _judge(
    link: Link, listener: Listener, question: Judge, doorkeeper: Doorkeeper
) -> SecureLink:
    try:
        _refuse_other(link, question.peer)
        credential = await doorkeeper.judge(
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
    """Bound what strangers may cost, and close the link unless all goes well."""
    _limit_unread(link, PRE_AUTH_BYTES)
    async with AsyncExitStack() as failed:
        failed.push_async_callback(link.close)
        try:
            async with asyncio.timeout(PRE_AUTH_S):
                yield
        except TimeoutError:
            raise LinkLost(
                f"The other side took more than {PRE_AUTH_S} s to say who it is"
            ) from None
        failed.pop_all()


def _measure(message: Sequence[Buffer]) -> None:
    if (size := measure(message)) > MAX_SECURE_BYTES:
        raise ValueError(f"a message of {size} B is longer than {MAX_SECURE_BYTES} B")


def _refuse_other(link: Link, peer: NodeId) -> None:
    """Raise where the transport has proven that somebody else is at the other end."""
    if isinstance(link, Known) and link.peer_key != peer:
        raise NotAuthorised("The other side says to be another node than the transport has proven")


def _limit_unread(link: Link, size: int | None) -> None:
    if isinstance(link, Guarded):
        link.limit_unread(size)


def _early(message: Buffer) -> PeerFault:
    return PeerFault(f"Data of {len(message)} bytes before the handshake is done")


def _fresh() -> Fresh:
    return Fresh(secrets.token_bytes(32), secrets.token_bytes(16))
