"""An unreliable network: links, partitions, machines without power.

Theory of operation
-------------------
A link is reliable, as TCP is: while a direction is cut, messages wait, and arrive in order some
time after the cut has ended. A killed process closes its links, as its kernel does; a machine that
lost its power is silent, and nothing answers at its address until it is back. The links of a paused
process keep receiving, up to a limit. Every draw comes from the given `Random`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import ClassVar, Self

from meshllm.errors import LinkLost, UserError
from meshllm.transport.contract import Buffer, Channel, LinkStatistics, Listener, checked_size
from tests.simulation.machines import Process

QUEUE_MESSAGES = 256  # of one channel and direction: what sockets and transports hold
KNOCK_S = 1.0  # s between two attempts to connect to a silent address
INSTANT_S = 1e-6
LATE_S = 0.5  # s at most after a cut until waiting messages are sent again


class Network:
    """The machines and the paths between them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, random: Random) -> None:
        self.loop = loop
        self.random = random
        self.delay_s: dict[tuple[int, int], float] = {}
        """One way, from one machine to another."""
        self.jitter_s = 0.0
        self.cuts: set[tuple[int, int]] = set()
        """From one machine to another."""
        self.dark: set[int] = set()
        """Machines without power."""
        self.listeners: dict[str, _Listener] = {}
        self.context = Context()
        self._flows: set[_Flow] = set()
        self._serials = count()

    def seat(self, process: Process) -> "Seat":
        """Return the network as seen by a process."""
        return Seat(self, process)

    def heal(self, *ways: tuple[int, int]) -> None:
        """End cuts; messages that waited arrive soon."""
        self.cuts.difference_update(ways)
        for flow in sorted(self._flows, key=lambda flow: flow.serial):
            if flow.held and flow.way not in self.cuts:
                late = self.random.uniform(0, LATE_S)
                self.loop.call_later(late, flow.release, context=self.context)

    def kill(self, process: Process, *, silently: bool) -> None:
        """Remove a process from the network; nothing that it still sends arrives."""
        process.is_gone = True
        for end in sorted(process.ends, key=lambda end: end.outgoing.serial):
            end.detach(silently=silently)
        for address, listener in list(self.listeners.items()):
            if listener.process is process:
                del self.listeners[address]
        process.ends.clear()

    def reset(self, number: int) -> None:
        """Let a machine that is back after a power loss reset its old links."""
        for flow in sorted(self._flows, key=lambda flow: flow.serial):
            if flow.way[1] == number and flow.is_void:
                flow.end()
                flow.back.end()

    def blink(self, one: int, other: int) -> None:
        """Reset the latest link between two machines."""
        ways = {(one, other), (other, one)}
        latest = max((flow for flow in self._flows if flow.way in ways), key=lambda it: it.serial)
        latest.end()
        latest.back.end()

    def is_open(self, one: int, other: int) -> bool:
        """Return whether two machines can connect."""
        is_cut = (one, other) in self.cuts or (other, one) in self.cuts
        return not is_cut and other not in self.dark

    def travel_s(self, way: tuple[int, int]) -> float:
        """Draw how long a message takes."""
        return self.delay_s.get(way, 0.0005) + self.random.random() * self.jitter_s

    def connect(self, one: Process, listener: "_Listener") -> "End":
        """Make a link."""
        ways = (one.number, listener.process.number)
        serial = next(self._serials)
        out, back = _Flow(self, ways, 2 * serial), _Flow(self, ways[::-1], 2 * serial + 1)
        out.back, back.back = back, out
        self._flows |= {out, back}
        listener.arrivals.put_nowait(End(listener.process, back, out))
        return End(one, out, back)

    def forget(self, flow: "_Flow") -> None:
        """Drop a direction that is no longer in use."""
        self._flows.discard(flow)


@dataclass
class _Lane:
    arrived: deque[bytes] = field(default_factory=deque)
    under_way: int = 0
    last: float = 0.0
    """When the last message arrives."""
    line: deque[asyncio.Future[None]] = field(default_factory=deque)

    @property
    def is_full(self) -> bool:
        return len(self.arrived) + self.under_way >= QUEUE_MESSAGES


class _Flow:
    """One direction of a link."""

    back: "_Flow"

    def __init__(self, network: Network, way: tuple[int, int], serial: int) -> None:
        self.network = network
        self.way = way
        self.serial = serial
        self.lanes = {channel: _Lane() for channel in Channel}
        self.held: list[Callable[[], None]] = []
        """Messages that arrived during a cut, in order."""
        self.is_sealed = False
        """Closed for sending."""
        self.is_ended = False
        """Closed for receiving."""
        self.is_void = False
        """The receiver vanished silently."""
        self.reader: asyncio.Future[None] | None = None
        self.messages = self.bytes = 0

    async def put(self, channel: Channel, message: bytes) -> None:
        lane = self.lanes[channel]
        while lane.is_full and not self.is_sealed:
            place = self.network.loop.create_future()
            lane.line.append(place)
            await place
        if self.is_sealed:
            raise LinkLost("The link is closed")
        self.messages += 1
        self.bytes += len(message)
        lane.under_way += 1
        self._carry((lane,), partial(self._arrive, lane, message))

    def _carry(self, lanes: Sequence[_Lane], event: Callable[[], None]) -> None:
        at = self.network.loop.time() + self.network.travel_s(self.way)
        at = max(at, *(lane.last + INSTANT_S for lane in lanes))  # timers due at the same time
        for lane in lanes:  # either may fire first
            lane.last = at
        self.network.loop.call_at(at, self._here, event, context=self.network.context)

    def _here(self, event: Callable[[], None]) -> None:
        if self.held or self.way in self.network.cuts:
            self.held.append(event)
        else:
            event()

    def release(self) -> None:
        if self.way not in self.network.cuts:
            held, self.held = self.held, []
            for event in held:
                event()

    def _arrive(self, lane: _Lane, message: bytes) -> None:
        if self.is_void:
            return
        lane.under_way -= 1
        lane.arrived.append(message)
        self.wake()

    def take(self) -> tuple[Channel, bytes] | None:
        for channel, lane in self.lanes.items():
            if lane.arrived:
                message = lane.arrived.popleft()
                while lane.line:
                    if not (place := lane.line.popleft()).done():
                        place.set_result(None)
                        break
                return channel, message
        return None

    def wake(self) -> None:
        if self.reader and not self.reader.done():
            self.reader.set_result(None)

    def hang_up(self) -> None:
        """Signal the end to the receiver, after everything in flight."""
        self.seal()
        self._carry(tuple(self.lanes.values()), self._closed_by_peer)

    def _closed_by_peer(self) -> None:
        self.end()
        self.back.seal()
        self.network.forget(self)

    def seal(self) -> None:
        self.is_sealed = True
        for lane in self.lanes.values():
            while lane.line:
                if not (place := lane.line.popleft()).done():
                    place.set_result(None)

    def end(self) -> None:
        self.is_ended = True
        self.seal()
        self.wake()


class End:
    """One end of a link."""

    def __init__(self, process: Process, outgoing: _Flow, incoming: _Flow) -> None:
        self.outgoing = outgoing
        self.incoming = incoming
        self._process = process
        self._is_closed = False
        self._messages = self._bytes = 0
        process.ends.add(self)

    async def send(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> None:
        checked_size(message)
        await self.outgoing.put(channel, b"".join(message))

    async def receive(self) -> tuple[Channel, Buffer]:
        incoming = self.incoming
        while not self._is_closed:
            if taken := incoming.take():
                self._messages += 1
                self._bytes += len(taken[1])
                return taken
            if incoming.is_ended:
                break
            assert incoming.reader is None or incoming.reader.done(), "two tasks receive"
            incoming.reader = incoming.network.loop.create_future()
            await incoming.reader
        raise LinkLost("The link is closed")

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._process.ends.discard(self)
            self.outgoing.hang_up()
            self.incoming.is_void = True
            self.incoming.wake()

    def detach(self, *, silently: bool) -> None:
        """Disconnect the process that holds it."""
        self._is_closed = True
        if silently:
            self.outgoing.seal()
        else:
            self.outgoing.hang_up()
        self.incoming.is_void = True
        self.incoming.wake()

    @property
    def statistics(self) -> LinkStatistics:
        return LinkStatistics(
            self.outgoing.messages, self.outgoing.bytes, self._messages, self._bytes
        )


class _Listener:
    """Incoming links of a process."""

    def __init__(self, process: Process, address: str) -> None:
        self.process = process
        self.address = address
        self.addresses = (address,)
        self.arrivals: asyncio.Queue[End] = asyncio.Queue()

    def links(self) -> Self:
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> End:
        return await self.arrivals.get()


class Seat:
    """The network as seen by one process: a transport."""

    name: ClassVar[str] = "sim"
    schemes: ClassVar[tuple[str, ...]] = ("sim",)

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process

    @asynccontextmanager
    async def listen(self, address: str | None = None) -> AsyncIterator[Listener]:
        address = address or address_of(self._process.number)
        listeners = self._network.listeners
        number_of(address)
        if address in listeners:
            raise UserError(f"`{address}` is in use")
        listener = listeners[address] = _Listener(self._process, address)
        try:
            yield listener
        finally:
            if listeners.get(address) is listener:
                del listeners[address]
            while not listener.arrivals.empty():
                await listener.arrivals.get_nowait().close()

    async def dial(self, address: str) -> End:
        network, here, there = self._network, self._process.number, number_of(address)
        while not network.is_open(here, there):  # noqa: ASYNC110  # as a kernel does
            await asyncio.sleep(KNOCK_S)
        for way in ((here, there), (there, here)):
            await asyncio.sleep(network.travel_s(way))
        listener = network.listeners.get(address)
        if listener is None or self._process.is_gone or not network.is_open(here, there):
            raise LinkLost(f"Nothing listens at `{address}`")
        return network.connect(self._process, listener)


def address_of(number: int) -> str:
    """Return where a machine listens."""
    return f"sim:{number}"


def number_of(address: str) -> int:
    """Return which machine listens at an address; raise `UserError` for anything else."""
    scheme, _, number = address.partition(":")
    if scheme != "sim" or not number.isdecimal():
        raise UserError(f"`{address}` is not an address of the simulation")
    return int(number)
