"""What a transport is.

A transport carries whole messages (byte strings) over links, in order per channel, and pushes back
when the other side does not read. Who is at the other end, and that nobody listens in, is settled
above it. This module is all that a plugin imports of meshllm, besides `meshllm.errors` and
`meshllm.names`; `meshllm.testing.transports.check_transport` tells whether it keeps the contract.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import ClassVar, Protocol, runtime_checkable

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Longest message: 4096 rows of 8192 bf16 values."""

Buffer = bytes | bytearray | memoryview


class Channel(IntEnum):
    """Messages of one channel arrive in order; channels do not wait for each other."""

    CONTROL = 0
    DATA = 1


class Path(StrEnum):
    """How the bytes of a link travel at this moment."""

    DIRECT = "direct"
    RELAY = "relay"


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """What a link has carried so far, and how well it does."""

    messages_sent: int
    bytes_sent: int
    """Of the messages, without what the transport adds to them."""
    messages_received: int
    bytes_received: int
    round_trip_s: float | None = None
    """Smoothed, in seconds; None where the transport does not measure it."""
    path: Path = Path.DIRECT
    bytes_per_s: float | None = None
    """How fast messages leave this side when many wait; None where the transport does not know."""
    path_reason: str = ""
    """Why it is that path, in one line for people; empty where there is no choice."""


class Link(Protocol):
    """One connection between two nodes; any task may send, one at a time may receive."""

    async def send(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> None:
        """Send the parts as one message; wait while the other side is behind.

        The parts may be changed as soon as this returns.

        Raises:
            LinkLost: either side has closed; the message may or may not have arrived.
            ValueError: the message is longer than `MAX_MESSAGE_BYTES`; the link is unharmed.

        If cancelled, the message was sent whole or not at all.
        """
        ...

    async def receive(self) -> tuple[Channel, Buffer]:
        """Wait for the next message; CONTROL goes before waiting DATA.

        The message belongs to the caller: the link does not write to it any more.

        Raises:
            LinkLost: this side has closed, or the other side is gone and every message was read.
            PeerFault: the other side broke the rules of the transport; the link is closed.

        If cancelled, no message is lost; the next call returns it.
        """
        ...

    async def close(self) -> None:
        """Close both directions and wake who waits; more calls do nothing.

        The other side reads what was sent, then gets `LinkLost`; here messages not yet read are
        dropped.
        """
        ...

    @property
    def statistics(self) -> LinkStatistics:
        """What this side has sent and received."""
        ...


@runtime_checkable
class Prompt(Protocol):
    """What a link adds where a message can leave within the call that sends it."""

    def offer(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> bool:
        """Send the parts as one message if that need not wait; tell whether it was sent.

        Nothing is sent where others wait, where the other side is behind, or on a lost link: there
        `Link.send` waits, or says what is wrong.

        Raises:
            ValueError: as `Link.send`.
        """
        ...


@runtime_checkable
class Guarded(Protocol):
    """What a link adds where strangers can reach it."""

    def limit_unread(self, size: int | None) -> None:
        """Close the link when the other side sends more than ``size`` bytes that nobody has read.

        For as long as it is a stranger; None is no limit besides back-pressure.
        """
        ...


@runtime_checkable
class Known(Protocol):
    """What a link adds where the transport itself has proven who is at the other end."""

    @property
    def peer_key(self) -> bytes:
        """The Ed25519 key of the other node, 32 bytes."""
        ...


class Listener(Protocol):
    """A place where links arrive."""

    @property
    def address(self) -> str:
        """Where others most likely reach this listener: the first of `addresses`."""
        ...

    @property
    def addresses(self) -> tuple[str, ...]:
        """Everywhere others may reach this listener, likeliest first."""
        ...

    def links(self) -> AsyncIterator[Link]:
        """Yield each link that arrives, until the listener is closed."""
        ...


@runtime_checkable
class Moving(Protocol):
    """What a listener adds where its `addresses` change while it listens."""

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call this whenever `addresses` is another one, until the listener is closed."""
        ...


@runtime_checkable
class Transport(Protocol):
    """One way to reach other nodes; made once per process, without arguments."""

    name: ClassVar[str]
    """The name under `meshllm.transports`."""
    schemes: ClassVar[tuple[str, ...]]
    """What its addresses begin with, before the first colon."""

    def listen(self, address: str | None = None) -> AbstractAsyncContextManager[Listener]:
        """Accept links at ``address``, or at one of the transport's choice, inside the context.

        Links that nobody took are closed at its end; the others live on.

        Raises:
            UserError: the address cannot be used.
        """
        ...

    async def dial(self, address: str) -> Link:
        """Open a link to a listener.

        Raises:
            LinkLost: nobody listens there.
            UserError: this is not an address of this transport.

        If cancelled, no link is left behind.
        """
        ...


@runtime_checkable
class Identified(Protocol):
    """What a transport adds that proves to the other side who this node is."""

    def identify(self, seed: bytes) -> None:
        """Use the Ed25519 key of these 32 bytes; call it before the first `listen` or `dial`.

        Without it the transport makes a key of its own, another one each time.
        """
        ...


@runtime_checkable
class Relaying(Protocol):
    """What a transport adds whose listeners can be reached through others."""

    def add_relay(self, address: str) -> None:
        """Be reached through the relay there, too, from the next `listen` on.

        Raises:
            UserError: this is no address of a relay.
        """
        ...


@dataclass(frozen=True, slots=True)
class Network:
    """What a transport has found out about the networks around this node."""

    nat: str
    """The kind of NAT, in a word."""
    line: str
    """The same in one line for people, with what it means."""
    observed: tuple[str, ...]
    """As whom others see this node."""
    relays: tuple[tuple[str, str], ...]
    """Each relay, and how this node stands with it."""


@runtime_checkable
class Surveying(Protocol):
    """What a transport adds that looks at the networks around it."""

    def survey(self) -> Network | None:
        """Tell what is known by now; None while nothing is open."""
        ...


def measure(message: Sequence[Buffer]) -> int:
    """Count the bytes of a message; raise `ValueError` when they are too many for one."""
    size = sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in message)
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} B is longer than {MAX_MESSAGE_BYTES} B")
    return size
