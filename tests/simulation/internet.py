"""An internet in memory: homes, NATs, hosts and the public network.

It runs on the current event loop; on `meshllm.testing.clock.VirtualLoop` an hour of it takes no
time, and the same seed gives the same capture. Each line has its own random source, so more traffic
on one changes nothing on another.

    internet = Internet(seed=1, delay_s=0.01)
    relay = internet.host("relay")
    home = internet.nat(PORT_RESTRICTED)
    one = home.host("one")  # QuicTransport(network=one)
    carrier = internet.nat(SYMMETRIC, subnet="100.64.0.0/10")
    phone = carrier.nat(FULL_CONE).host("phone")  # behind two NATs

All homes use the same private addresses, as real ones do: a candidate address of one home may
belong to another machine in the next, or to the machine itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.simulation.datagrams import Captured, Datagram, subnets, version
from tests.simulation.hosts import Host
from tests.simulation.lan import Interface, Lan, World
from tests.simulation.nat import KINDS, PORT_RESTRICTED, Kind, Table
from tests.simulation.wires import Dropped, Line

LAN_LINE = Line(delay_s=0.0002)
# Not the documentation ranges: Python (`ipaddress`) and the code under test count them as private.
PUBLIC = "20.0.0.0/16"
PUBLIC_6 = "2600::/64"
HOME = "192.168.1.0/24"
HOME_6 = "2600:0:0:{:x}::/64"


class Place(Lan):
    """A segment to which hosts and NATs can be added."""

    def host(
        self, name: str, line: Line | None = None, versions: tuple[int, ...] | None = None
    ) -> Host:
        """Add a machine, with an address of each IP version, by default those of the segment."""
        if name in self.world.hosts_by_name:
            raise ValueError(f"there is a `{name}`")
        host = Host(name, self.world)
        host.join(self, line, versions)
        return host

    def nat(self, kind: Kind, line: Line | None = None, *, subnet: str = HOME) -> "Nat":
        """Add a NAT router with a segment behind it."""
        return Nat(self, kind, line or Line(), subnet)

    def behind(self, name: str) -> "Place":
        """Return a place behind a NAT of a type of `KINDS`; `none` is this place."""
        kind = KINDS[name]
        return self if kind is None else self.nat(kind)


class Internet(Place):
    """The public network."""

    def __init__(self, seed: int = 0, delay_s: float = 0.01, *, is_dual: bool = False) -> None:
        """Start empty; `delay_s` is one way, and ``dual`` adds IPv6."""
        public = subnets(PUBLIC, PUBLIC_6) if is_dual else subnets(PUBLIC)
        super().__init__("internet", World(seed), public, Line(delay_s=delay_s))

    @property
    def capture(self) -> list[Captured]:
        """Datagrams that arrived at hosts, in order."""
        return self.world.capture

    @property
    def dropped(self) -> dict[str, int]:
        """Number of dropped datagrams by reason."""
        return self.world.dropped

    def seen(self, sender: Host, receiver: Host, since: float = 0.0) -> list[Captured]:
        """List what arrived at one host directly from another."""
        names = sender.name, receiver.name
        return [
            each
            for each in self.capture
            if (each.sender, each.receiver) == names and each.time >= since
        ]


@dataclass(slots=True)
class Traffic:
    """Traffic counters."""

    datagrams: int = 0
    bytes: int = 0
    """Of the data in them."""

    def count(self, datagram: Datagram) -> None:
        """Add one datagram."""
        self.datagrams += 1
        self.bytes += len(datagram.data)


def measure(captured: Sequence[Captured]) -> Traffic:
    """Add up what was captured."""
    return Traffic(len(captured), sum(each.size for each in captured))


class Nat(Place):
    """The segment of a home and its router: a NAT for IPv4, a firewall for IPv6."""

    def __init__(self, outer: Place, kind: Kind, line: Line, subnet: str) -> None:
        serial = next(outer.world.serials)
        super().__init__(f"nat {serial}", outer.world, subnets(subnet), LAN_LINE)
        self.kind = kind
        self.outer = outer
        self.interface = outer.plug(self, line, (4,))
        self.is_udp_blocked = False
        self.outward, self.inward = Traffic(), Traffic()
        self._random = self.world.random(f"{self.name}/ports")
        self._forget()
        if any(each.version == 6 for each in outer.subnets):
            self.subnets += subnets(HOME_6.format(serial))

    @property
    def public(self) -> str:
        """Its IPv4 address on the outer segment."""
        return self.interface.hosts[0]

    def reboot(self, *, renumber: bool = False) -> None:
        """Reboot: forget every mapping, and change the address if asked."""
        if renumber:
            self.outer.renumber(self.interface)
        self._forget()

    def block_udp(self, is_blocked: bool = True) -> None:
        """Block UDP in both directions, as some office networks do."""
        self.is_udp_blocked = is_blocked

    def own(self, host: str, interface: Interface) -> None:
        """Route an address to an interface; IPv6 addresses are routed here from outside."""
        super().own(host, interface)
        if version(host) == 6:
            self.outer.own(host, self.interface)

    def leave(self, datagram: Datagram) -> None:
        """Let a datagram out, or back in (hairpin) if it is for the router's own address."""
        if self.is_udp_blocked:
            raise Dropped("blocked")
        table = self._tables[version(datagram.to[0])]
        is_hairpin = datagram.to[0] == self.public
        if is_hairpin and not self.kind.is_hairpin:
            raise Dropped("no hairpin")
        source = table.outbound(datagram.source, datagram.to, self.world.now)
        datagram = datagram.between(source, datagram.to)
        if is_hairpin:
            self.arrive(datagram)
        else:
            self.outward.count(datagram)
            self.outer.enter(self.interface, datagram)

    def arrive(self, datagram: Datagram) -> None:
        """Let a datagram in, if the filter allows it."""
        if self.is_udp_blocked:
            raise Dropped("blocked")
        table = self._tables[version(datagram.to[0])]
        inside = table.inbound(datagram.source, datagram.to, self.world.now)
        self.inward.count(datagram)
        self.descend(datagram.between(datagram.source, inside))

    def _forget(self) -> None:
        self._tables = {
            4: Table(self.kind, self.public, self._random),
            6: Table(PORT_RESTRICTED, None, self._random),
        }
