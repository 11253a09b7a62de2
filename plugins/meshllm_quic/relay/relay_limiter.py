"""Limits on the streams to a relay, and the source address that a stream gets.

When all slots are taken, a new stream replaces one of the network that has most, first one on which
no node is registered, unless its own network then had as many. So strangers that renew their
streams again and again keep other networks out only if they have as many networks as there are
slots.
"""

from asyncio import BaseTransport, Transport
from collections import Counter
from http import HTTPStatus
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Protocol

from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request

from meshllm_quic.net.network import Address
from meshllm_quic.path.rate_limit import host_of, network_of

MAX_CONNECTIONS = 800  # below 1024, the usual limit of open files
MAX_HOST_CONNECTIONS = 64
MAX_NETWORK_CONNECTIONS = 128


class Droppable(Protocol):
    """A connection that can make room for another one."""

    def drop(self) -> None:
        """Close it at once."""
        ...


class ConnectionLimiter:
    """Counts connections, per host, per network and in total; an IPv6 /64 is one host."""

    def __init__(
        self,
        most: int = MAX_CONNECTIONS,
        most_of_host: int = MAX_HOST_CONNECTIONS,
        most_of_network: int = MAX_NETWORK_CONNECTIONS,
    ) -> None:
        self._most = most
        self._most_of_host = most_of_host
        self._most_of_network = most_of_network
        self._hosts: dict[Droppable, bytes] = {}
        """By connection, the oldest first."""
        self._used: set[Droppable] = set()

    def enter(self, who: Droppable, host: str) -> bool:
        """Count a connection of a host, in place of another one if there are too many.

        Return False if it exceeds a limit.
        """
        name = host_of((host, 0))
        hosts = list(self._hosts.values())
        near = sum(network_of(each) == network_of(name) for each in hosts)
        if hosts.count(name) >= self._most_of_host or near >= self._most_of_network:
            return False
        if len(hosts) >= self._most:
            victim = self._crowding(near)
            if victim is None:
                return False
            self.leave(victim)
            victim.drop()
        self._hosts[who] = name
        return True

    def use(self, who: Droppable) -> None:
        """Note that a node is registered on a connection, unless it has left."""
        if who in self._hosts:
            self._used.add(who)

    def leave(self, who: Droppable) -> None:
        """Stop counting a connection."""
        self._hosts.pop(who, None)
        self._used.discard(who)

    def _crowding(self, near: int) -> Droppable | None:
        """Return one of the network with most, unless that has no more than the newcomer's."""
        networks = {who: network_of(name) for who, name in self._hosts.items()}
        ((crowded, most),) = Counter(networks.values()).most_common(1)
        if most <= near + 1:
            return None
        there = [who for who, network in networks.items() if network == crowded]
        return next((who for who in there if who not in self._used), there[0])


class CountedConnection(ServerConnection):
    """A server connection that is counted from TCP accept on, before the handshake."""

    def __init__(self, limiter: ConnectionLimiter, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.host: str
        """Address of the client."""
        self._limiter = limiter
        self._is_counted = False

    def connection_made(self, transport: BaseTransport) -> None:
        """Abort a connection that exceeds a limit."""
        super().connection_made(transport)
        assert isinstance(transport, Transport)
        if not self._enter(_plain(transport.get_extra_info("peername")[0])):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting it."""
        super().connection_lost(exc)
        self._leave()

    def apply_forwarded_for(self, request: Request) -> HTTPStatus | None:
        """Trust X-Forwarded-For of a proxy on this machine; return the status of a rejection."""
        said = request.headers.get_all("X-Forwarded-For")
        if not (said and self._is_counted and ip_address(self.host).is_loopback):
            return None
        try:
            host = _plain(said[-1].rpartition(",")[2].strip())
        except ValueError:
            return HTTPStatus.BAD_REQUEST
        self._leave()
        return None if self._enter(host) else HTTPStatus.TOO_MANY_REQUESTS

    def drop(self) -> None:
        """Close it at once, for another connection."""
        self.transport.abort()

    def _enter(self, host: str) -> bool:
        self.host = host
        self._is_counted = self._limiter.enter(self, host)
        return self._is_counted

    def _leave(self) -> None:
        self._limiter.leave(self)
        self._is_counted = False


def stream_source(host: str, number: int) -> Address:
    """Make a unique synthetic address for a stream, within a /64 that belongs to its host.

    IPv4 hosts get their 6to4 network (RFC 3056). The port is 0, which no answerable datagram uses.
    """
    address = ip_address(host)
    if isinstance(address, IPv4Address):
        network = b"\x20\x02" + address.packed + b"\0\0"
    else:
        network = address.packed[:8]
    return str(IPv6Address(network + number.to_bytes(8, "big"))), 0


def _plain(host: str) -> str:
    """Normalise a host, IPv4-mapped IPv6 to IPv4; raise `ValueError` if it is not an address."""
    address = ip_address(host.partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return str(address)
