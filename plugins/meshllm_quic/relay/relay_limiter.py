"""Limits on the streams to a relay, and the source address that a stream gets."""

from asyncio import BaseTransport, Transport
from collections import Counter
from http import HTTPStatus
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request

from meshllm_quic.net.network import Address
from meshllm_quic.path.rate_limit import host_of, network_of

MAX_CONNECTIONS = 800  # below 1024, the usual limit of open files
MAX_HOST_CONNECTIONS = 64
MAX_NETWORK_CONNECTIONS = 128


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
        self._hosts: Counter[bytes] = Counter()

    def enter(self, host: str) -> bool:
        """Count one more connection of a host; return False if it exceeds a limit."""
        name = host_of((host, 0))
        network = network_of(name)
        own = [count for each, count in self._hosts.items() if network_of(each) == network]
        is_crowded = sum(own) >= self._most_of_network or self._hosts.total() >= self._most
        if is_crowded or self._hosts[name] >= self._most_of_host:
            return False
        self._hosts[name] += 1
        return True

    def leave(self, host: str) -> None:
        """Count one connection less."""
        name = host_of((host, 0))
        self._hosts[name] -= 1
        if not self._hosts[name]:
            del self._hosts[name]


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

    def _enter(self, host: str) -> bool:
        self.host = host
        self._is_counted = self._limiter.enter(host)
        return self._is_counted

    def _leave(self) -> None:
        if self._is_counted:
            self._limiter.leave(self.host)
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
