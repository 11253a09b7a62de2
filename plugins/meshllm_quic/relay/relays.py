"""The relays at which this node is registered, and the addresses that they observe.

Their number is small, so that addresses dialled by this node can reveal it to few relays. Relays
from the configuration stay. Others serve the links through them, and are evicted for the next one
that a dial needs: first unused ones, then those that are only a fallback. Peers choose their
addresses, so such a relay is only tried until it answers: it keeps no other dial waiting, and
evicts nothing. One that nothing uses is dropped once it is silent and its registration has expired.
A stream over TCP is used while UDP is blocked: the relay is also asked over UDP, as
an observer, and its first reply ends the stream.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain
from typing import Protocol

from meshllm_quic.base.identity import Identity
from meshllm_quic.net.network import Address
from meshllm_quic.path.observation import Observations
from meshllm_quic.relay.registration import Action, Registration, SendToRelay
from meshllm_quic.relay.relay_stream import RelayStream, stream_uri
from meshllm_quic.wire.packets import AddressReply, AddressRequest, Packet

MAX_RELAYS = 3
MAX_TRIED = 32
"""Relays that dials need and that have not answered; a new one replaces the oldest."""
MAX_QUESTIONS = 64
"""Pending requests to observers."""


class RelayUsage(IntEnum):
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

    def usage(self, relay: Address) -> RelayUsage:
        """Return how strongly links depend on a relay."""
        ...


@dataclass
class _RelayClient:
    """Registration and stream of one relay."""

    registration: Registration
    is_wanted: bool
    """From the configuration: never evicted."""
    is_tried: bool
    """A dial needs it, and it has not answered: it is not in use."""
    others: Sequence[Address] = ()
    """Addresses of it, of which others may need one."""
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
        self._clients: dict[Address, _RelayClient] = {}
        self._questions: dict[bytes, Address] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._before: tuple[Address, ...] = ()

    @property
    def registered(self) -> tuple[Address, ...]:
        """The relays at which this node is registered now."""
        return tuple(a for a, client in self._clients.items() if client.registration.is_registered)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The addresses by which others reach the relays at which this node is registered."""
        others = (self._clients[relay].others for relay in self.registered)
        return tuple(dict.fromkeys(chain(self.registered, *others)))

    def states(self) -> list[tuple[Address, str]]:
        """Describe the state of each relay in a few words."""
        return [(relay, _state(client)) for relay, client in self._clients.items()]

    def add(
        self,
        relay: Address,
        *,
        is_wanted: bool,
        is_needed: bool = False,
        others: Sequence[Address] = (),
    ) -> None:
        """Register at a relay, unless `MAX_RELAYS` are in use; ``others`` are addresses of it.

        A wanted (configured) relay evicts any other; one that a dial needs evicts one that carries
        no link now, once it has answered.
        """
        if relay in self._clients:
            client = self._clients[relay]
            client.is_wanted |= is_wanted
            client.others = others or client.others
            return
        most = RelayUsage.ROUTE if is_wanted else RelayUsage.RESERVE if is_needed else None
        least = self._least_used(most) if self._in_use >= MAX_RELAYS else None
        if self._in_use >= MAX_RELAYS and least is None:
            return
        if is_needed:
            self._limit_tried()
        elif least is not None:
            self.drop(least)
        sign, random = self._identity.sign, self._port.random
        registration = Registration(relay, self._identity.key, sign, random)
        self._clients[relay] = _RelayClient(
            registration, is_wanted, is_tried=is_needed, others=others
        )
        self._do(relay, registration.start(self._loop.time()))

    def drop(self, relay: Address) -> None:
        """Stop using a relay."""
        client = self._clients.pop(relay, None)
        if client is not None:
            _end_stream(client)
            client.ready.set()
        self._note()

    def give_up(self, relay: Address) -> None:
        """Stop using a relay that did not answer a dial, unless something else uses it."""
        client = self._clients.get(relay)
        if client is not None and not client.is_wanted and self.usage(relay) is RelayUsage.NONE:
            self.drop(relay)

    def usage(self, relay: Address) -> RelayUsage:
        """Return how strongly links and dials depend on a relay."""
        client = self._clients.get(relay)
        return RelayUsage.ROUTE if client and client.waiters else self._port.usage(relay)

    def __contains__(self, relay: Address) -> bool:
        client = self._clients.get(relay)
        return client is not None and not client.is_tried

    async def wait_ready(self, relay: Address) -> bool:
        """Wait until this node is registered at a relay that was added; False: it was dropped."""
        client = self._clients.get(relay)
        if client is None:
            return False
        client.waiters += 1
        try:
            await client.ready.wait()
        finally:
            client.waiters -= 1
        return self._clients.get(relay) is client

    def send(self, relay: Address, packets: Sequence[bytes]) -> bool:
        """Send through the stream to a relay; return whether there is an open one."""
        client = self._clients.get(relay)
        if client is None or client.stream is None or not client.stream.is_open:
            return False
        client.stream.send(packets)
        return True

    def receive(self, packet: Packet, source: Address, now: float) -> None:
        """Handle a packet from a relay or an observer."""
        if isinstance(packet, AddressReply):
            if self._questions.get(packet.nonce) == source:
                del self._questions[packet.nonce]
                self.observations.report(source, packet.address, now)
                self._return(source, now)
                self._note()
        elif (client := self._clients.get(source)) is not None:
            self._do(source, client.registration.receive(packet, now))

    def network_changed(self) -> None:
        """Register again: the network of this node has changed."""
        now = self._loop.time()
        self.observations.network_changed(now)
        for relay, client in list(self._clients.items()):
            self._do(relay, client.registration.restart(now))

    def stop(self) -> None:
        """Stop all timers and streams."""
        if self._timer is not None:
            self._timer.cancel()
        for client in self._clients.values():
            _end_stream(client)
        self._clients.clear()

    @property
    def _in_use(self) -> int:
        return sum(not client.is_tried for client in self._clients.values())

    def _least_used(self, most: RelayUsage | None) -> Address | None:
        """Return the relay in use with the lowest usage, if that is at most ``most``."""
        unwanted = [
            relay for relay, at in self._clients.items() if not (at.is_wanted or at.is_tried)
        ]
        least = min(unwanted, key=self.usage, default=None)
        is_spare = most is not None and least is not None and self.usage(least) <= most
        return least if is_spare else None

    def _limit_tried(self) -> None:
        """Make room for one more relay that is tried."""
        tried = [relay for relay, at in self._clients.items() if at.is_tried and not at.is_wanted]
        if len(tried) >= MAX_TRIED:
            self.drop(tried[0])

    def _admit(self, relay: Address, client: _RelayClient) -> bool:
        """Use a relay that has answered; drop it, and return False, if there is no room."""
        if self._in_use >= MAX_RELAYS:
            most = RelayUsage.ROUTE if client.is_wanted else RelayUsage.RESERVE
            self.drop(self._least_used(most) or relay)
        client.is_tried = False
        return relay in self

    def _do(self, relay: Address, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, SendToRelay):
                packet = action.packet.encode()
                if not self.send(relay, [packet]):
                    self._port.send_packet(packet, relay)
            else:
                self._change(relay, self._clients[relay])
        self._note()

    def _change(self, relay: Address, client: _RelayClient) -> None:
        now, registration = self._loop.time(), client.registration
        if registration.is_registered:
            if client.is_tried and not self._admit(relay, client):
                return
            client.ready.set()
        else:
            client.ready.clear()
        if registration.observed is not None:
            self.observations.report(relay, registration.observed, now)
        if registration.observer is not None:
            self.observations.add(registration.observer, now)
            _end_stream(client)  # UDP works again: no address is observed through a stream
        if registration.is_silent and client.stream is None:
            self._open_stream(relay, client)

    def _open_stream(self, relay: Address, client: _RelayClient) -> None:
        """Open a TCP stream to a relay that does not answer over UDP."""
        client.stream = RelayStream(
            stream_uri(*relay),
            lambda packet: self._port.arrived(packet, relay),
            lambda: self._switch(relay, client),
            self._port.random,
        )
        client.task = self._loop.create_task(client.stream.run())
        client.task.add_done_callback(raise_error)
        self.observations.add(relay, self._loop.time())

    def _return(self, relay: Address, now: float) -> None:
        """Switch from the stream back to UDP."""
        client = self._clients.get(relay)
        if client is not None and client.stream is not None:
            _end_stream(client)
            self._do(relay, client.registration.restart(now))

    def _switch(self, relay: Address, client: _RelayClient) -> None:
        """Register again after a stream was opened or lost."""
        if self._clients.get(relay) is client:
            self._do(relay, client.registration.restart(self._loop.time()))

    def _note(self) -> None:
        """Reset the timer, and notify the endpoint if the set of registered relays has changed."""
        before, self._before = self._before, self.registered
        if self._before != before:
            self._port.relays_changed()
        due = [client.registration.deadline for client in self._clients.values()]
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
        for relay, client in list(self._clients.items()):
            if (due := client.registration.deadline) is not None and now >= due:
                self._do(relay, client.registration.expire(now))
                if client.registration.is_over(now):  # or its dial took a direct address
                    self.give_up(relay)
        for observer in self.observations.expire(now):
            nonce = self._port.random(8)
            while len(self._questions) >= MAX_QUESTIONS:
                del self._questions[next(iter(self._questions))]
            self._questions[nonce] = observer
            self._port.send_packet(AddressRequest(nonce).encode(), observer)
        self._note()


def raise_error(task: asyncio.Task[None]) -> None:
    """Report a bug in a task that has ended to the event loop."""
    if not task.cancelled():
        task.result()


def _end_stream(client: _RelayClient) -> None:
    if client.task is not None:
        client.task.cancel()
    client.stream = client.task = None


def _state(client: _RelayClient) -> str:
    way = "over TCP" if client.stream is not None and client.stream.is_open else "over UDP"
    if client.registration.is_registered:
        return f"registered {way}"
    if client.stream is not None and client.stream.last_error:
        return f"no answer over UDP; over TCP: {client.stream.last_error}"
    return "no answer" if client.registration.is_silent else "registering"
