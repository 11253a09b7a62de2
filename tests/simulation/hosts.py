"""Machines with UDP sockets, each of them a network to open sockets on."""

import asyncio
import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from meshllm_quic.net.network import Address, Receive, Refused
from tests.simulation.datagrams import Captured, Datagram, version
from tests.simulation.lan import Interface, Lan, World
from tests.simulation.wires import Dropped, Line, Wire

ANY = (None, "", "0.0.0.0", "::")
LOOPBACK = {4: "127.0.0.1", 6: "::1"}
LOOPBACK_LINE = Line(delay_s=20e-6, mtu=65536)
FIRST_FREE_PORT = 49152  # RFC 6335 section 6


@dataclass(eq=False)
class Host:
    """A machine: give it to a transport as its network."""

    name: str
    world: World
    interfaces: list[Interface] = field(default_factory=list)
    """The first interface of the right IP version is the default route."""
    is_udp_blocked: bool = False
    _sockets: list["Socket"] = field(default_factory=list)
    _loopback: Wire = field(init=False)

    def __post_init__(self) -> None:
        self._loopback = Wire(self.world.random(f"{self.name}/loopback"))
        self.world.hosts_by_name[self.name] = self.hosts

    def hosts(self) -> list[str]:
        """List the addresses that it has now."""
        return [host for interface in self.interfaces for host in interface.hosts]

    def join(
        self, lan: Lan, line: Line | None = None, versions: tuple[int, ...] | None = None
    ) -> Interface:
        """Plug it into another segment; plugging in twice gives two addresses."""
        has = tuple(subnet.version for subnet in lan.subnets)
        interface = lan.plug(self, line or Line(), versions or has)
        self.interfaces.append(interface)
        return interface

    def leave(self) -> None:
        """Unplug it from all segments; sockets stay open."""
        for interface in self.interfaces:
            interface.lan.unplug(interface)
        self.interfaces.clear()

    def move(self, lan: Lan, line: Line | None = None) -> None:
        """Roam: move to another segment, keeping open sockets."""
        self.leave()
        self.join(lan, line)

    def block_udp(self, is_blocked: bool = True) -> None:
        """Block UDP in both directions."""
        self.is_udp_blocked = is_blocked

    def stop(self) -> None:
        """Cut its power: its sockets silently stop sending and receiving."""
        for each in list(self._sockets):
            each.close()

    async def open(
        self, host: str | None, port: int, receive: Receive, refused: Refused | None = None
    ) -> "Socket":
        """Open a socket, see `meshllm_quic.net.network.DatagramNetwork`."""
        bound = None if host in ANY else host
        if bound is not None and bound not in (*self.hosts(), *LOOPBACK.values()):
            raise OSError(errno.EADDRNOTAVAIL, f"`{bound}` is not an address of `{self.name}`")
        taken = {each.port for each in self._sockets if None in (bound, each.host)}
        taken |= {each.port for each in self._sockets if each.host == bound}
        if port in taken:
            raise OSError(errno.EADDRINUSE, f"Port {port} of `{self.name}` is in use")
        port = port or next(each for each in count(FIRST_FREE_PORT) if each not in taken)
        opened = Socket(self, bound, port, receive)
        self._sockets.append(opened)
        return opened

    async def resolve(self, host: str, port: int) -> Sequence[Address]:
        """Find a numeric host, or one by its name; raise `OSError` for another."""
        if host in self.world.hosts_by_name:
            return [(each, port) for each in self.world.hosts_by_name[host]()]
        try:
            version(host)
        except ValueError:
            raise socket.gaierror(socket.EAI_NONAME, f"`{host}` is not a known host") from None
        return [(host, port)]

    def close_socket(self, closed: "Socket") -> None:
        """Forget a socket."""
        if closed in self._sockets:
            self._sockets.remove(closed)

    def send(self, data: bytes, source: tuple[str | None, int], to: Address) -> None:
        """Send a datagram; the source host defaults to the interface, any other may be spoofed."""
        self.world.attempt(lambda: self._send(data, source, to))

    def _send(self, data: bytes, source: tuple[str | None, int], to: Address) -> None:
        if self.is_udp_blocked:
            raise Dropped("blocked")
        if to[0] in LOOPBACK.values() or to[0] in self.hosts():
            datagram = Datagram(data, (source[0] or to[0], source[1]), to, self.name)
            self.world.through(self._loopback, LOOPBACK_LINE, datagram, self.arrive)
            return
        interface, host = self._way(to[0])
        if source[0] in LOOPBACK.values() or version(source[0] or host) != version(to[0]):
            raise Dropped("no route")
        datagram = Datagram(data, (source[0] or host, source[1]), to, self.name)
        interface.lan.enter(interface, datagram)

    def _way(self, to: str) -> tuple[Interface, str]:
        ways = [
            (interface, host)
            for interface in self.interfaces
            for host in interface.hosts
            if version(host) == version(to)
        ]
        if not ways:
            raise Dropped("no route")
        return next((way for way in ways if way[0].lan.is_local(to)), ways[0])

    def arrive(self, datagram: Datagram) -> None:
        """Deliver a datagram to its socket; raise `Dropped`."""
        host, port = datagram.to
        if self.is_udp_blocked:
            raise Dropped("blocked")
        if host not in (*self.hosts(), *LOOPBACK.values()):
            raise Dropped("unreachable")  # it moved
        for each in self._sockets:
            if each.port == port and each.host in (host, None):
                self.world.capture.append(_captured(self, datagram))
                each.take(datagram)
                return
        raise Dropped("no socket")


@dataclass(eq=False)
class Socket:
    """One UDP socket of a host."""

    owner: Host
    host: str | None
    port: int
    _receive: Receive
    _inbox: list[tuple[bytes, Address]] = field(default_factory=list)
    _is_closed: bool = False

    def hosts(self) -> list[str]:
        """List the addresses at which it can be reached."""
        return self.owner.hosts() if self.host is None else [self.host]

    def send(self, datagrams: Sequence[bytes], to: Address) -> None:
        """Send datagrams as one GSO batch; fail the test if the kernel would refuse it."""
        sizes = [len(each) for each in datagrams]
        assert not sizes[1:] or {*sizes[:-1]} == {sizes[0]} >= {max(sizes)}, f"a batch of {sizes}"
        if self._is_closed:
            return
        for data in datagrams:
            self.owner.send(bytes(data), (self.host, self.port), to)

    def take(self, datagram: Datagram) -> None:
        """Receive a datagram; those of the same time are delivered together."""
        if not self._inbox:
            asyncio.get_running_loop().call_soon(self._give)
        self._inbox.append((datagram.data, datagram.source))

    def close(self) -> None:
        """Close it; datagrams that were not delivered are lost."""
        self._is_closed = True
        self.owner.close_socket(self)

    def _give(self) -> None:
        batch, self._inbox = self._inbox, []
        if not self._is_closed:
            self._receive(batch)


def _captured(receiver: Host, datagram: Datagram) -> Captured:
    data = datagram.data
    return Captured(
        receiver.world.now, datagram.origin, datagram.source, receiver.name, datagram.to,
        len(data), data[0] if data else -1,
    )  # fmt: skip
