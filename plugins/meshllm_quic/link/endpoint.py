"""The UDP socket of a process, and the demultiplexing of its datagrams."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Final

from meshllm.errors import PeerFault
from meshllm.transport import contract
from meshllm_quic.base.identity import Identity
from meshllm_quic.link.admission import Admitted, ConnectionAdmission
from meshllm_quic.link.connection import Connection
from meshllm_quic.link.listener import QuicListener
from meshllm_quic.link.machine import ConnectionMachine
from meshllm_quic.link.path_driver import PathDriver
from meshllm_quic.link.table import ConnectionTable, destination
from meshllm_quic.net.network import Address, DatagramNetwork, Socket
from meshllm_quic.path.rate_limit import HostBuckets, TokenBucket, host_of
from meshllm_quic.relay.relay import Relay
from meshllm_quic.relay.relays import Relays, RelayUsage
from meshllm_quic.wire.packets import (
    MAX_INNER_BYTES,
    AddressRequest,
    Packet,
    Probe,
    ProbeReply,
    Register,
    Relayed,
    UnknownTag,
    decode,
    is_quic,
)
from meshllm_quic.wire.routes import Direct, Route, ViaRelay, show

logger = logging.getLogger(__name__)

HOSTS_S: Final = 5.0
"""Interval between checks of the addresses of this machine."""
MAX_HOSTS = 10
"""Maximum of them in an offer; the rest is for observed addresses."""
MAX_REFLECTED = 3
"""Amplification limit: the source of a datagram may be forged (RFC 9000 section 8.1)."""
PROBES = 2000.0
"""Probes per second of all connections; a new link needs about 20 per address."""
HOST_PROBES = 128.0
"""Probes per second to one host, which many offers may name; bursts are four times as large."""
MAX_PROVEN = 256
"""Nodes whose direct address is remembered (LRU)."""

Touched = dict[Connection, None]


class Endpoint:
    """Sends and receives for all connections, as client, server and relay."""

    def __init__(
        self, network: DatagramNetwork, identity: Identity, random: Callable[[int], bytes]
    ) -> None:
        self.random = random
        self.identity = identity
        self.listener: QuicListener | None = None
        self.relays = Relays(self, identity)
        self.table = ConnectionTable()
        self.known: dict[bytes, Address] = {}
        """Last direct address of each node, by key."""
        self._network = network
        self._loop = asyncio.get_running_loop()
        self._socket: Socket
        self._hosts: tuple[str, ...] = ()
        self.admission = ConnectionAdmission[Connection]()
        self._paths: dict[bytes, list[PathDriver]] = {}
        self._probes = TokenBucket(PROBES, PROBES)
        self._probes_of = HostBuckets(HOST_PROBES, 4 * HOST_PROBES, random)
        self._members: Counter[bytes] = Counter()
        self._relay = Relay(self._members.__contains__, random=random)
        self._hosts_timer: asyncio.TimerHandle | None = None
        self._holders = 0

    async def open(self, host: str | None, port: int) -> None:
        """Open the socket; raise `OSError`."""
        self._socket = await self._network.open(host, port, self._receive, self._note_refusal)
        try:
            self._hosts = tuple(self._socket.hosts())
        except OSError:
            self._socket.close()
            raise
        self._hosts_timer = self._loop.call_later(HOSTS_S, self._check_hosts)

    @property
    def port(self) -> int:
        """The port of the socket."""
        return self._socket.port

    @property
    def hosts(self) -> Sequence[str]:
        """The addresses of this machine at the last check, most reachable first."""
        return self._hosts

    @property
    def is_open(self) -> bool:
        """Whether the socket is open."""
        return self._hosts_timer is not None

    @property
    def is_idle(self) -> bool:
        """Whether the socket is not in use."""
        return self.listener is None and not self.table and not self._holders

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the socket open within the context."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            self.release()

    def release(self) -> None:
        """Close the socket if it is no longer in use."""
        if self.is_idle and self._hosts_timer is not None:
            self._hosts_timer.cancel()
            self._hosts_timer = None
            self.relays.stop()
            self._socket.close()

    def connect(self, routes: Sequence[Route], address: str, expected: bytes | None) -> Connection:
        """Start a connection; ``expected`` is the key that the peer must have, None accepts any."""
        machine = ConnectionMachine(self.identity.configure(is_client=True))
        connection = self._add(machine, routes, address)
        connection.expected = expected
        connection.connect()
        return connection

    def send(self, route: Route, datagrams: Sequence[bytes]) -> None:
        """Send the datagrams of a connection."""
        to = route.address if isinstance(route, Direct) else route.relay
        if isinstance(route, ViaRelay):
            tag = self.identity.tag
            datagrams = [Relayed(route.to, tag, each).encode() for each in datagrams]
            if self.relays.send(to, datagrams):
                return
        for run in runs(datagrams):
            self._socket.send(run, to)

    def send_packet(self, packet: bytes, to: Address) -> None:
        """Send a non-QUIC datagram."""
        self._socket.send([packet], to)

    def may_probe(self, to: Address) -> bool:
        """Count a probe; return False if it exceeds the rate limit of the host or in total."""
        now = self._loop.time()
        return self._probes_of.of(host_of(to)).take(1, now) and self._probes.take(1, now)

    def bind(self, connection_id: bytes, connection: Connection) -> None:
        """Route datagrams for this connection id to the connection."""
        self.table.add(connection, connection_id)

    def unbind(self, connection_id: bytes) -> None:
        """Stop routing datagrams for this connection id."""
        self.table.drop(connection_id)

    def opened(self, connection: Connection) -> None:
        """Queue an incoming link at the listener: its handshake is complete."""
        if connection.machine.is_client:
            return
        if self.listener is None:
            connection.abort()
        else:
            self.listener.arrived(connection)

    def note_authentication(self, connection: Connection, *, is_authenticated: bool) -> None:
        """Count an incoming link as half-open while its peer is unauthenticated."""
        if connection.machine.is_client:
            return
        if is_authenticated and connection.was_unproven:
            self.admission.authenticated(connection)
        self.admission.forget(connection)
        if not is_authenticated and connection in self.table:
            self._count(connection)

    def authenticated(self, connection: Connection) -> None:
        """Serve as a relay for an authenticated peer, and use a public one as a relay.

        A remembered address of a node behind a relay may be that of its NAT, which others cannot
        reach.
        """
        self._members[connection.link.peer_key] += 1
        route, is_remembered = connection.route, connection.expected is not None
        is_dialled = connection.machine.is_client and not is_remembered
        if not is_dialled or not isinstance(route, Direct):
            return
        if ip_address(route.address[0].partition("%")[0]).is_global:
            self.relays.add(route.address, is_wanted=False)

    def closing(self, connection: Connection) -> None:
        """Stop relaying for the peer of a link: it may take long to read what was sent."""
        driver = connection.path_driver
        if isinstance(driver, PathDriver) and driver.is_authenticated:
            driver.is_authenticated = False
            self._members[connection.link.peer_key] -= 1
            self._members += Counter()

    def gone(self, connection: Connection) -> None:
        """Remove a closed connection, but keep its CONNECTION_CLOSE datagram."""
        self.admission.forget(connection)
        self.table.remove(connection)
        self.closing(connection)
        if isinstance(connection.path_driver, PathDriver):
            self._forget_path(connection.path_driver)
        self.release()

    def candidates(self, connection: Connection) -> list[Address]:
        """List our candidate addresses for this connection, most reachable first."""
        route = connection.route
        is_same_machine = isinstance(route, Direct) and self.is_local(route.address[0])
        hosts = [host for host in self._hosts if is_same_machine or not _is_loopback(host)]
        own = [(host, self.port) for host in hosts[:MAX_HOSTS]]
        return list(dict.fromkeys(own + self.relays.observations.candidates()))

    def is_local(self, host: str) -> bool:
        """Return whether a host is this machine."""
        return host in self._hosts or _is_loopback(host)

    def is_relay(self, address: Address) -> bool:
        """Return whether this node uses the address as a relay."""
        return address in self.relays

    def watch_path(self, path: bytes, driver: PathDriver) -> None:
        """Route the probes and replies of a path to its driver, the first one of each role."""
        drivers = self._paths.setdefault(path, [])
        # Both roles: this node has dialled itself.
        roles = {each.connection.machine.is_client for each in drivers}
        if driver.connection.machine.is_client not in roles:
            drivers.append(driver)

    def proven(self, key: bytes, address: Address) -> None:
        """Remember the direct address of a node."""
        self.known.pop(key, None)
        self.known[key] = address
        if len(self.known) > MAX_PROVEN:
            del self.known[next(iter(self.known))]

    def arrived(self, packet: bytes, relay: Address) -> None:
        """Handle a packet from a relay's stream."""
        self._receive([(packet, relay)])

    def survey(self) -> contract.Network:
        """Return NAT type, observed addresses and relay states."""
        own = [(host, self.port) for host in self._hosts]
        observations = self.relays.observations
        return contract.Network(
            nat=observations.kind(own),
            line=observations.describe(own),
            observed=tuple(map(show, observations.candidates())),
            relays=tuple((show(relay), state) for relay, state in self.relays.states()),
        )

    def usage(self, relay: Address) -> RelayUsage:
        """Return how strongly links depend on a relay."""
        routes = {connection.route for connection in self.table}
        backups = {
            each.path_driver.backup
            for each in self.table
            if isinstance(each.path_driver, PathDriver)
        }
        for usage, ways in ((RelayUsage.ROUTE, routes), (RelayUsage.RESERVE, backups)):
            if any(isinstance(way, ViaRelay) and way.relay == relay for way in ways):
                return usage
        return RelayUsage.NONE

    def relays_changed(self) -> None:
        """Notify the listener: its relay addresses have changed."""
        if self.listener is not None:
            self.listener.notify()

    def _add(self, machine: ConnectionMachine, routes: Sequence[Route], address: str) -> Connection:
        connection = Connection(self, machine, routes, address)
        connection.path_driver = driver = PathDriver(self, connection)
        driver.backup = next((each for each in routes if isinstance(each, ViaRelay)), None)
        self.table.add(connection, machine.host_cid)
        return connection

    def _receive(self, datagrams: Sequence[tuple[bytes, Address]]) -> None:
        now = self._loop.time()
        touched: Touched = {}
        for datagram, source in datagrams:
            if is_quic(datagram):
                self._feed(datagram, Direct(source), now, touched)
            else:
                self._take(datagram, source, now, touched)
        for connection in touched:
            connection.work()

    def _feed(self, datagram: bytes, route: Route, now: float, touched: Touched) -> None:
        """Pass a QUIC datagram to its connection, or start a new one."""
        connection_id = destination(datagram)
        connection = self.table.find(connection_id)
        if connection is None:
            reply = self.table.close_datagram(connection_id, MAX_REFLECTED * len(datagram))
            if reply:
                self.send(route, [reply])
            if reply is not None:
                return
            connection = self._admit(datagram, route, now)
        if connection is not None:
            connection.receive(datagram, route, now)
            if len(datagram) >= Probe.SIZE:  # long enough that a probe in return does not amplify
                connection.path_driver.heard(route, now)
            touched[connection] = None

    def _admit(self, datagram: bytes, route: Route, now: float) -> Connection | None:
        """Accept a new connection, subject to admission control."""
        if self.listener is None:
            return None
        source = route.address if isinstance(route, Direct) else route.relay
        verdict = self.admission.decide(datagram, source, self._origin(route)[0], now)
        if isinstance(verdict, bytes):
            self.send(route, [verdict])
        if not isinstance(verdict, Admitted):
            return None
        machine = ConnectionMachine(
            self.identity.configure(is_client=False),
            original_destination_connection_id=verdict.original_id,
            retry_source_connection_id=verdict.retried_id,
        )
        connection = self._add(machine, [route], show(source))
        self.table.add(connection, verdict.retried_id or verdict.original_id)
        self._count(connection)
        return connection

    def _note_refusal(self, address: Address) -> None:
        """Note that nobody listens at an address any more, for peers that no relay reaches."""
        now = self._loop.time()
        for connection in [each for each in self.table if each.route == Direct(address)]:
            if connection.path_driver.backup is None:
                connection.refused(now)

    def _take(self, datagram: bytes, source: Address, now: float, touched: Touched) -> None:
        """Dispatch a non-QUIC datagram."""
        try:
            packet = decode(datagram)
        except PeerFault:
            return
        match packet:
            case Probe() | ProbeReply():
                for driver in self._paths.get(packet.path, ()):
                    driver.take(packet, source, now)
                    touched[driver.connection] = None
            case Relayed() if packet.to == self.identity.tag:
                if is_quic(packet.inner) and len(packet.inner) <= MAX_INNER_BYTES:
                    self._feed(packet.inner, ViaRelay(source, packet.sender), now, touched)
            case Relayed() | Register() | AddressRequest():
                self._serve(packet, source, len(datagram), now)
            case _:
                if isinstance(packet, UnknownTag):
                    self._note_unknown(ViaRelay(source, packet.tag))
                self.relays.receive(packet, source, now)

    def _note_unknown(self, route: ViaRelay) -> None:
        """Note that a relay does not know the peer; it may still register."""
        for connection in self.table:
            if connection.route == route:
                connection.is_unknown = True

    def _serve(self, packet: Packet, source: Address, size: int, now: float) -> None:
        """Serve as a relay for authenticated peers."""
        for datagram, to in self._relay.receive(packet, source, size, now):
            self._socket.send([datagram], to)

    def _count(self, connection: Connection) -> None:
        host, relay = self._origin(connection.route)
        for dropped in self.admission.count(connection, host, relay=relay):
            dropped.abort()

    def _origin(self, route: Route) -> tuple[str, str]:
        """Return the host to count and its relay; only our own relays are trusted with tags."""
        if isinstance(route, Direct):
            return route.address[0], ""
        if route.relay in self.relays:
            return route.to.hex(), show(route.relay)
        return route.relay[0], ""

    def _forget_path(self, driver: PathDriver) -> None:
        for path, drivers in list(self._paths.items()):
            if driver in drivers:
                drivers.remove(driver)
                if not drivers:
                    del self._paths[path]

    def _check_hosts(self) -> None:
        """Check the interfaces; after a change, register again, notify, and send offers."""
        self._hosts_timer = self._loop.call_later(HOSTS_S, self._check_hosts)
        try:
            hosts = tuple(self._socket.hosts())
        except OSError as error:  # too many open files: the last ones are probably still right
            logger.info("cannot list the interfaces: %s", error)
            return
        if set(hosts) == set(self._hosts):
            return
        self._hosts = hosts
        self.relays.network_changed()
        self.relays_changed()
        for connection in self.table:
            if isinstance(connection.path_driver, PathDriver):
                connection.path_driver.offer()


def runs(datagrams: Iterable[bytes]) -> Iterable[list[bytes]]:
    """Split into runs for one `Socket.send`: equal sizes, the last may be shorter."""
    run: list[bytes] = []
    for datagram in datagrams:
        if run and (len(datagram) > len(run[0]) or len(run[-1]) < len(run[0])):
            yield run
            run = []
        run.append(datagram)
    if run:
        yield run


def _is_loopback(host: str) -> bool:
    return ip_address(host.partition("%")[0]).is_loopback
