"""The contract of a transport.

A transport carries whole messages (byte strings) over links, in order per channel, with
backpressure when the peer does not read. Authentication and encryption are done above it. A plugin
imports `meshllm.transport`, `meshllm.errors` and `meshllm.names` only: this module, and over a byte
stream `meshllm.transport.stream`. The conformance test is
`meshllm.testing.transports.check_transport`.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import ClassVar, Protocol, runtime_checkable

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Longest message: 4096 rows of 8192 bf16 values."""

Buffer = bytes | bytearray | memoryview


class Channel(IntEnum):
    """Messages of one channel arrive in order; channels do not block each other."""

    CONTROL = 0
    DATA = 1


class Path(StrEnum):
    """The network path of a link at this moment."""

    DIRECT = "direct"
    RELAY = "relay"


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """Traffic counters and measurements of a link."""

    messages_sent: int
    bytes_sent: int
    """Payload only, without the overhead of the transport."""
    messages_received: int
    bytes_received: int
    round_trip_s: float | None = None
    """Smoothed, in seconds; None if the transport does not measure it."""
    path: Path = Path.DIRECT
    bytes_per_s: float | None = None
    """Send rate while messages are queued; None if the transport does not measure it."""
    path_reason: str = ""
    """Why this path is used, in one line for people; empty if there is no choice."""


class Link(Protocol):
    """A connection between two nodes; any task may send, one at a time may receive."""

    async def send(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> None:
        """Send the parts as one message; wait while the peer exerts backpressure.

        The caller may modify the parts as soon as this returns.

        Raises:
            LinkLost: either side has closed; the message may or may not have arrived.
            ValueError: the message is longer than `MAX_MESSAGE_BYTES`; the link stays usable.

        If cancelled, the message was sent completely or not at all.
        """
        ...

    async def receive(self) -> tuple[Channel, Buffer]:
        """Wait for the next message; CONTROL is returned before queued DATA.

        The message belongs to the caller: the link does not reuse its memory.

        Raises:
            LinkLost: this side has closed, or the peer is gone and every message was read.
            PeerFault: the peer violated the transport's protocol; the link is closed.

        If cancelled, no message is lost; the next call returns it.
        """
        ...

    async def close(self) -> None:
        """Close both directions and wake all waiters; further calls do nothing.

        The peer reads what was sent, then gets `LinkLost`; it may miss the rest if nothing leaves
        the send buffer for 5 s, or not all within 30 s. Unread messages on this side are dropped.
        """
        ...

    @property
    def statistics(self) -> LinkStatistics:
        """The counters of this side."""
        ...


@runtime_checkable
class ImmediateSender(Protocol):
    """Optional for a link: sending without waiting."""

    def offer(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> bool:
        """Send the parts as one message if possible without waiting; return whether it was sent.

        Nothing is sent if other messages wait, under backpressure, or on a lost link: use
        `Link.send`, which waits or raises.

        Raises:
            ValueError: as `Link.send`.
        """
        ...


@runtime_checkable
class SupportsBatchedSend(Protocol):
    """Optional for a link: sending several messages together."""

    def together(self) -> AbstractContextManager[None]:
        """Send what is offered inside the context at its end, in one piece if possible.

        Do not await inside: a reply cannot come before the messages are sent.
        """
        ...


@runtime_checkable
class SupportsUnreadLimit(Protocol):
    """Optional for a link: a limit on unread data of an unauthenticated peer."""

    def limit_unread(self, size: int | None) -> None:
        """Close the link when more than ``size`` received bytes are unread.

        Set until the peer is authenticated; None leaves only the backpressure.
        """
        ...


@runtime_checkable
class HasPeerKey(Protocol):
    """Optional for a link: the peer's key, if the transport itself has authenticated the peer."""

    @property
    def peer_key(self) -> bytes:
        """The Ed25519 public key of the peer, 32 bytes."""
        ...


@runtime_checkable
class HasPeerHost(Protocol):
    """Optional for a link: where the peer is."""

    @property
    def peer_host(self) -> str:
        """The IP address that packets of the peer come from; empty if unknown, as by a relay."""
        ...


class Listener(Protocol):
    """A listening endpoint."""

    @property
    def address(self) -> str:
        """The address most likely reachable by peers: the first of `addresses`."""
        ...

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses at which peers may reach this listener, most likely first."""
        ...

    def links(self) -> AsyncIterator[Link]:
        """Yield each incoming link, until the listener is closed."""
        ...


@runtime_checkable
class NotifiesAddressChange(Protocol):
    """Optional for a listener: a notification when its `addresses` change."""

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever `addresses` changes, until the listener is closed."""
        ...


@runtime_checkable
class ReservesHandshakeSlots(Protocol):
    """Optional for a listener: places among unauthenticated peers that strangers do not take."""

    def reserve(self, hosts: Sequence[str]) -> None:
        """Keep places for the hosts of peers known from earlier, as for those that come."""
        ...


@runtime_checkable
class Transport(Protocol):
    """A way to reach other nodes; instantiated once per process, without arguments."""

    name: ClassVar[str]
    """The name of its entry point in the group `meshllm.transports`."""
    schemes: ClassVar[tuple[str, ...]]
    """The schemes of its addresses: the part before the first colon.

    Nodes dial only `SCHEME://HOST:PORT`, or `SCHEME:NAME` of letters, digits, `-` and `_`:
    peers choose addresses.
    """

    def listen(self, address: str | None = None) -> AbstractAsyncContextManager[Listener]:
        """Accept links at ``address``, or at one of the transport's choice, inside the context.

        Links not yet yielded are closed at its end; the others stay open.

        Raises:
            UserError: the address cannot be used.
        """
        ...

    async def dial(self, address: str) -> Link:
        """Open a link to a listener.

        Raises:
            LinkLost: no listener answers there.
            UserError: this is not an address of this transport.

        If cancelled, no link is left behind.
        """
        ...


@runtime_checkable
class SupportsIdentity(Protocol):
    """Optional for a transport: authentication of this node to its peers."""

    def identify(self, seed: bytes) -> None:
        """Use the Ed25519 key of this 32-byte seed; call it before the first `listen` or `dial`.

        Otherwise the transport generates an ephemeral key.
        """
        ...


@runtime_checkable
class SupportsDialHosts(Protocol):
    """Optional for a transport: dialling IP addresses of a name that were looked up and checked."""

    async def dial_hosts(self, address: str, hosts: Sequence[str]) -> Link:
        """Open a link as `Transport.dial`, to one of ``hosts``; the name is not looked up again."""
        ...


@runtime_checkable
class SupportsRelays(Protocol):
    """Optional for a transport: listeners that are reachable through relays."""

    def add_relay(self, address: str) -> None:
        """Register with the relay at ``address``, from the next `listen` on.

        Raises:
            UserError: this is not an address of a relay.
        """
        ...


@dataclass(frozen=True, slots=True)
class Network:
    """What a transport has detected about this node's network."""

    nat: str
    """The kind of NAT, in one word."""
    line: str
    """The same in one line for people, with its consequence."""
    observed: tuple[str, ...]
    """The external addresses of this node as seen by peers."""
    relays: tuple[tuple[str, str], ...]
    """Each relay, and the state of this node's registration."""


@runtime_checkable
class SupportsNatDetection(Protocol):
    """Optional for a transport: detection of the NAT and of relays."""

    def survey(self) -> Network | None:
        """Return what is known by now; None while nothing is open."""
        ...


def checked_size(message: Sequence[Buffer]) -> int:
    """Return the size of a message in bytes; raise `ValueError` if it is too long."""
    size = sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in message)
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} B is longer than {MAX_MESSAGE_BYTES} B")
    return size
