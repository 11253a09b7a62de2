"""Datagrams and addresses of simulated networks."""

from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from meshllm_quic.net.network import Address

HEAD_BYTES = {4: 20 + 8, 6: 40 + 8}  # of IP and UDP

Subnet = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True)
class Datagram:
    """A UDP datagram in flight."""

    data: bytes
    source: Address
    to: Address
    origin: str
    """Name of the host that sent it, whatever its source address says."""

    @property
    def size(self) -> int:
        """Bytes of the IP packet."""
        return len(self.data) + HEAD_BYTES[version(self.to[0])]

    def between(self, source: Address, to: Address) -> "Datagram":
        """Return it with other addresses."""
        return Datagram(self.data, source, to, self.origin)


@dataclass(frozen=True, slots=True)
class Captured:
    """A datagram that arrived at a host."""

    time: float
    sender: str
    """Name of the host that sent it, and its source address after NAT."""
    source: Address
    receiver: str
    to: Address
    size: int
    """Bytes of its data."""
    first: int
    """First byte of its data, which tells the protocol; -1 when it is empty."""


@lru_cache(maxsize=4096)
def address(host: str) -> IPv4Address | IPv6Address:
    """Read a numeric host; raise `ValueError` for a name."""
    return ip_address(host)


def version(host: str) -> int:
    """Return the IP version of a numeric host, 4 or 6."""
    return address(host).version


def subnets(*networks: str) -> list[Subnet]:
    """Read networks in CIDR notation."""
    return [ip_network(each) for each in networks]
