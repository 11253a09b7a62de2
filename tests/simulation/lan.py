"""Simulated local networks: segments, the devices on them, and delays."""

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import Protocol

from tests.simulation.datagrams import Captured, Datagram, Subnet, address, version
from tests.simulation.wires import Dropped, Line, Wire


class Device(Protocol):
    """A device that can be plugged into a segment."""

    name: str

    def arrive(self, datagram: Datagram) -> None:
        """Receive a datagram; raise `Dropped` if it is dropped here."""
        ...


class World:
    """State shared by all segments of one internet."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.serials = count(1)
        self.capture: list[Captured] = []
        self.dropped: Counter[str] = Counter()
        """Number of dropped datagrams by reason: the text of `Dropped`."""
        self.hosts_by_name: dict[str, Callable[[], list[str]]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._orders = count()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def now(self) -> float:
        """Seconds on the running event loop."""
        return asyncio.get_running_loop().time()

    def random(self, name: str) -> Random:
        """Return a separate random source for each name."""
        return Random(f"{self.seed}/{name}")

    def through(
        self, wire: Wire, line: Line, datagram: Datagram, then: Callable[[Datagram], None]
    ) -> None:
        """Send a datagram through a wire, then run the next step; raise `Dropped`."""
        now = self.now
        for arrival in wire.arrivals(line, datagram.size, now):
            step = partial(then, datagram)
            if arrival <= now:
                self.attempt(step)
            else:
                self._at(arrival, step)

    def attempt(self, step: Callable[[], None]) -> None:
        """Run one step of a path; count the datagram if it is dropped."""
        try:
            step()
        except Dropped as drop:
            self.dropped[str(drop)] += 1

    def _at(self, time: float, step: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._orders), step))
        if self._events[0][2] is step:
            self._wait()

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(self._events[0][0], self._happen) if self._events else None

    def _happen(self) -> None:
        now = self.now
        while self._events and self._events[0][0] <= now:
            self.attempt(heapq.heappop(self._events)[2])
        self._wait()


@dataclass(eq=False, slots=True)
class Interface:
    """The attachment of a device to a segment, and its line."""

    lan: "Lan"
    device: Device
    hosts: list[str]
    line: Line
    up: Wire
    down: Wire


@dataclass(eq=False)
class Lan:
    """A segment: its devices reach each other; the rest goes to the router, if there is one."""

    name: str
    world: World
    subnets: list[Subnet]
    crossing: Line
    """From any device to any other, on top of their own lines."""
    interfaces: list[Interface] = field(default_factory=list)
    _owners: dict[str, Interface] = field(default_factory=dict)
    _between: dict[frozenset[str], Line] = field(default_factory=dict)
    _wires: dict[tuple[str, str], Wire] = field(default_factory=dict)
    _free: dict[int, Iterator[str]] = field(default_factory=dict)

    def plug(self, device: Device, line: Line, versions: tuple[int, ...]) -> Interface:
        """Plug a device in, and give it an address of each of these IP versions."""
        hosts = [self._address(each) for each in versions]
        up, down = (Wire(self.world.random(f"{device.name}@{hosts}/{way}")) for way in "ud")
        interface = Interface(self, device, hosts, line, up, down)
        self.interfaces.append(interface)
        for host in hosts:
            self.own(host, interface)
        return interface

    def unplug(self, interface: Interface) -> None:
        """Unplug it; its addresses are never reused."""
        self.interfaces.remove(interface)
        for host, owner in list(self._owners.items()):
            if owner is interface:
                del self._owners[host]

    def renumber(self, interface: Interface) -> None:
        """Give an interface new addresses; the old ones are never reused."""
        for index, host in enumerate(interface.hosts):
            del self._owners[host]
            interface.hosts[index] = self._address(version(host))
            self.own(interface.hosts[index], interface)

    def own(self, host: str, interface: Interface) -> None:
        """Route an address to an interface."""
        self._owners[host] = interface

    def line_between(self, one: Device, other: Device, line: Line) -> None:
        """Give two devices, and no others, another crossing."""
        self._between[frozenset((one.name, other.name))] = line

    def enter(self, interface: Interface, datagram: Datagram) -> None:
        """Accept a datagram from a device; raise `Dropped`."""
        cross = partial(self._cross, interface.device.name)
        self.world.through(interface.up, interface.line, datagram, cross)

    def is_local(self, host: str) -> bool:
        """Return whether an address belongs to this segment, used or not."""
        return host in self._owners or any(
            subnet.version == version(host) and address(host) in subnet for subnet in self.subnets
        )

    def leave(self, datagram: Datagram) -> None:
        """Send a datagram out of the segment; raise `Dropped`."""
        raise Dropped("unreachable")

    def descend(self, datagram: Datagram) -> None:
        """Accept a datagram from the router, for a device of this segment."""
        self._cross(self.name, datagram)

    def _cross(self, sender: str, datagram: Datagram) -> None:
        host = datagram.to[0]
        receiver = self._owners.get(host)
        if receiver is not None:
            arrive = partial(self._arrive, receiver)
            self._pass(sender, receiver.device.name, datagram, arrive)
        elif self.is_local(host):
            raise Dropped("unreachable")
        else:
            self._pass(sender, self.name, datagram, self.leave)

    def _pass(
        self, one: str, other: str, datagram: Datagram, then: Callable[[Datagram], None]
    ) -> None:
        if (wire := self._wires.get((one, other))) is None:
            wire = Wire(self.world.random(f"{self.name}/{one}>{other}"))
            self._wires[one, other] = wire
        line = self._between.get(frozenset((one, other)), self.crossing)
        self.world.through(wire, line, datagram, then)

    def _arrive(self, receiver: Interface, datagram: Datagram) -> None:
        self.world.through(receiver.down, receiver.line, datagram, receiver.device.arrive)

    def _address(self, wanted: int) -> str:
        if wanted not in self._free:
            subnet = next(each for each in self.subnets if each.version == wanted)
            hosts = map(str, subnet.hosts())
            next(hosts)  # of the router
            self._free[wanted] = hosts
        return next(self._free[wanted])
