"""The relays at which this node is registered, and the addresses that they observe.

Their number is small, so that addresses dialled by this node can reveal it to few relays. Relays
from the configuration stay. Others serve the links through them, and are evicted for the next one
that a dial needs: first unused ones, then those that are only a fallback. A stream over TCP is used
while UDP is blocked: the relay is also asked over UDP, as an observer, and its first reply ends the
stream.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from meshllm_quic.base.identity import Identity
from meshllm_quic.net.network import Address
from meshllm_quic.path.observation import Observations
from meshllm_quic.relay.registration import Action, Registration, Send
from meshllm_quic.relay.relay_stream import RelayStream, stream_uri
from meshllm_quic.wire.packets import Ask, Packet, Tell

MAX_RELAYS = 3
MAX_QUESTIONS = 64
"""Pending requests to observers."""


class Usage(IntEnum):
    """How strongly links depend on a relay."""

    NONE = 0
    RESERVE = 1
    """A direct link would fall back to it."""
    ROUTE = 2
    """A link goes through it, or a dial waits for it."""


class Port(Protocol):
    """What `Relays` needs from the endpoint."""

    random: Callable[[int], bytes]

    def send_packet(self, packet: bytes, to: Address) -> None:
        """Send a datagram."""
        ...

    def arrived(self, packet: bytes, relay: Address) -> None:
        """Handle a packet from a relay's stream."""
        ...

    def relays_changed(self) -> None:
        """Note that the set of registered relays has changed."""
        ...

    def usage(self, relay: Address) -> Usage:
        """Return how strongly links depend on a relay."""
        ...


@dataclass
class _Berth:
    """Registration and stream of one relay."""

    registration: Registration
    is_wanted: bool
    """From the configuration: never evicted."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    waiters: int = 0
    """Dials that wait for the registration."""
    stream: RelayStream | None = None
    task: asyncio.Task[None] | None = None


class Relays:
    """Keeps this node registered at up to `MAX_RELAYS` relays."""

    def __init__(self, port: Port, identity: Identity) -> None:
        self.observations = Observations()
        self._port = port
        self._identity = identity
        self._loop = asyncio.get_running_loop()
        self._berths: dict[Address, _Berth] = {}
        self._questions: dict[bytes, Address] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._before: tuple[Address, ...] = ()

    @property
    def registered(self) -> tuple[Address, ...]:
        """The relays at which this node is registered now."""
        return tuple(a for a, berth in self._berths.items() if berth.registration.is_registered)

    def states(self) -> list[tuple[Address, str]]:
        """Describe the state of each relay in a few words."""
        return [(relay, _state(berth)) for relay, berth in self._berths.items()]

    def add(self, relay: Address, *, is_wanted: bool, is_needed: bool = False) -> None:
        """Register at a relay, unless `MAX_RELAYS` are in use.

        A wanted (configured) relay evicts any other; one that a dial needs evicts one that carries
        no link now.
        """
        if relay in self._berths:
            self._berths[relay].is_wanted |= is_wanted
            return
        most = Usage.ROUTE if is_wanted else Usage.RESERVE if is_needed else None
        if len(self._berths) >= MAX_RELAYS and not self._make_room(most):
            return
        sign, random = self._identity.sign, self._port.random
        registration = Registration(relay, self._identity.key, sign, random)
        self._berths[relay] = _Berth(registration, is_wanted)
        self._do(relay, registration.start(self._loop.time()))

    def drop(self, relay: Address) -> None:
        """Stop using a relay."""
        berth = self._berths.pop(relay, None)
        if berth is not None:
            _end_stream(berth)
        self._note()

    def give_up(self, relay: Address) -> None:
        """Stop using a relay that did not answer a dial, unless something else uses it."""
        berth = self._berths.get(relay)
        if berth is not None and not berth.is_wanted and self._usage(relay) is Usage.NONE:
            self.drop(relay)

    def __contains__(self, relay: Address) -> bool:
        return relay in self._berths

    async def wait_ready(self, relay: Address) -> None:
        """Wait until this node is registered at a relay that was added."""
        if (berth := self._berths.get(relay)) is not None:
            berth.waiters += 1
            try:
                await berth.ready.wait()
            finally:
                berth.waiters -= 1

    def send(self, relay: Address, packets: Sequence[bytes]) -> bool:
        """Send through the stream to a relay; return whether there is an open one."""
        berth = self._berths.get(relay)
        if berth is None or berth.stream is None or not berth.stream.is_open:
            return False
        berth.stream.send(packets)
        return True

    def receive(self, packet: Packet, source: Address, now: float) -> None:
        """Handle a packet from a relay or an observer."""
        if isinstance(packet, Tell):
            if self._questions.get(packet.nonce) == source:
                del self._questions[packet.nonce]
                self.observations.told(source, packet.address, now)
                self._return(source, now)
                self._note()
        elif (berth := self._berths.get(source)) is not None:
            self._do(source, berth.registration.receive(packet, now))

    def moved(self) -> None:
        """Register again: the network of this node has changed."""
        now = self._loop.time()
        self.observations.moved(now)
        for relay, berth in list(self._berths.items()):
            self._do(relay, berth.registration.moved(now))

    def stop(self) -> None:
        """Stop all timers and streams."""
        if self._timer is not None:
            self._timer.cancel()
        for berth in self._berths.values():
            _end_stream(berth)
        self._berths.clear()

    def _make_room(self, most: Usage | None) -> bool:
        """Evict the relay with the lowest usage, if that is at most ``most``."""
        unwanted = [relay for relay, berth in self._berths.items() if not berth.is_wanted]
        least = min(unwanted, key=self._usage, default=None)
        if most is None or least is None or self._usage(least) > most:
            return False
        self.drop(least)
        return True

    def _usage(self, relay: Address) -> Usage:
        return Usage.ROUTE if self._berths[relay].waiters else self._port.usage(relay)

    def _do(self, relay: Address, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                packet = action.packet.encode()
                if not self.send(relay, [packet]):
                    self._port.send_packet(packet, relay)
            else:
                self._change(relay, self._berths[relay])
        self._note()

    def _change(self, relay: Address, berth: _Berth) -> None:
        now, registration = self._loop.time(), berth.registration
        if registration.is_registered:
            berth.ready.set()
        else:
            berth.ready.clear()
        if registration.observed is not None:
            self.observations.told(relay, registration.observed, now)
        if registration.observer is not None:
            self.observations.add(registration.observer, now)
            _end_stream(berth)  # UDP works again: no address is observed through a stream
        if registration.is_silent and berth.stream is None:
            self._open_stream(relay, berth)

    def _open_stream(self, relay: Address, berth: _Berth) -> None:
        """Open a TCP stream to a relay that does not answer over UDP."""
        berth.stream = RelayStream(
            stream_uri(*relay),
            lambda packet: self._port.arrived(packet, relay),
            lambda: self._switch(relay, berth),
            self._port.random,
        )
        berth.task = self._loop.create_task(berth.stream.run())
        self.observations.add(relay, self._loop.time())

    def _return(self, relay: Address, now: float) -> None:
        """Switch from the stream back to UDP."""
        berth = self._berths.get(relay)
        if berth is not None and berth.stream is not None:
            _end_stream(berth)
            self._do(relay, berth.registration.moved(now))

    def _switch(self, relay: Address, berth: _Berth) -> None:
        """Register again after a stream was opened or lost."""
        if self._berths.get(relay) is berth:
            self._do(relay, berth.registration.moved(self._loop.time()))

    def _note(self) -> None:
        """Reset the timer, and notify the endpoint if the set of registered relays has changed."""
        before, self._before = self._before, self.registered
        if self._before != before:
            self._port.relays_changed()
        due = [berth.registration.deadline for berth in self._berths.values()]
        due.append(self.observations.deadline)
        at = min((moment for moment in due if moment is not None), default=None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at is not None:
            self._timer = self._loop.call_at(at, self._expire, at)

    def _expire(self, at: float) -> None:
        self._timer = None
        now = max(at, self._loop.time())  # a loop timer may fire early
        for relay, berth in list(self._berths.items()):
            if (due := berth.registration.deadline) is not None and now >= due:
                self._do(relay, berth.registration.expire(now))
        for observer in self.observations.expire(now):
            nonce = self._port.random(8)
            while len(self._questions) >= MAX_QUESTIONS:
                del self._questions[next(iter(self._questions))]
            self._questions[nonce] = observer
            self._port.send_packet(Ask(nonce).encode(), observer)
        self._note()


def _end_stream(berth: _Berth) -> None:
    if berth.task is not None:
        berth.task.cancel()
    berth.stream = berth.task = None


def _state(berth: _Berth) -> str:
    way = "over TCP" if berth.stream is not None and berth.stream.is_open else "over UDP"
    if berth.registration.is_registered:
        return f"registered {way}"
    if berth.stream is not None and berth.stream.trouble:
        return f"no answer over UDP; over TCP: {berth.stream.trouble}"
    return "no answer" if berth.registration.is_silent else "registering"
