"""Which other nodes are named to a client: it asks one of them when its own is lost.

Every node admits every client of the mesh, so any living node that does not leave will do. Clients
get different ones first, so that those of a lost node do not all come to the same. An address or
name that is not public, as in a home network, is sent only to clients that come from such a one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from itertools import islice
from urllib.parse import urlsplit

from blake3 import blake3

from meshllm.names import NodeId

MAX_FALLBACKS = 8  # nodes that are named to a client
MAX_FALLBACK_ADDRESSES = 8  # of each of them

_LOCAL = tuple(
    map(
        ip_network,
        (
            "127.0.0.0/8",
            "10.0.0.0/8",
            "172.16.0.0/12",
            "192.168.0.0/16",
            "169.254.0.0/16",
            "100.64.0.0/10",  # RFC 6598, also used by overlay networks
            "::1/128",
            "fc00::/7",
            "fe80::/10",
        ),
    )
)
"""Networks that are not public; each has its own addresses in every home."""
_LOOPBACKS = {"127.0.0.0/8", "::1/128"}
_HOME_NAMES = {"home", "home.arpa", "internal", "intranet", "lan", "local", "localdomain"}
"""Ends of names that a home network gives; RFC 6762 and 8375, and what routers use."""
_HOME = "home"  # stands for the network of such a name


@dataclass(frozen=True, slots=True)
class Fallback:
    """A node that a client may ask."""

    node: NodeId
    machine: bytes
    """As in its profile; verified only by clients of which the teller shares the machine."""
    addresses: tuple[str, ...]


def fallbacks_for(client: NodeId, host: str, nodes: Iterable[Fallback]) -> tuple[Fallback, ...]:
    """Choose at most `MAX_FALLBACKS` of the nodes for a client that comes from ``host``.

    An empty ``host`` is unknown, as behind a relay: only public addresses are sent.
    """
    ranked = sorted(nodes, key=lambda each: blake3(client + each.node).digest())
    visible = (replace(each, addresses=_visible(each.addresses, host)) for each in ranked)
    return tuple(islice((each for each in visible if each.addresses), MAX_FALLBACKS))


def _visible(addresses: tuple[str, ...], host: str) -> tuple[str, ...]:
    at = _number(host)
    near = _network_of(at) if at else ""
    known = {"", near} - {None}
    if near and near not in _LOOPBACKS:  # all clients behind a proxy seem to be on its machine
        known.add(_HOME)
    visible = (address for address in addresses if _network_at(address) in known)
    return tuple(islice(visible, MAX_FALLBACK_ADDRESSES))


@lru_cache(maxsize=1024)
def _network_at(address: str) -> str | None:
    """Return the network of the host of an address; empty if its transport has no hosts."""
    try:
        parts = urlsplit(address)
        host = parts.hostname
    except ValueError:
        return None
    if not parts.netloc:
        return "" if parts.path else None
    if not host:
        return None
    at = _number(host)
    return _network_of(at) if at else _network_of_name(host.lower().rstrip("."))


@lru_cache(maxsize=1024)
def _number(host: str) -> IPv4Address | IPv6Address | None:
    """Return a host that is written as a number; None for a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def _network_of(at: IPv4Address | IPv6Address) -> str | None:
    """Return the network that is not public of a host; empty for a public one."""
    at = getattr(at, "ipv4_mapped", None) or at
    if at.is_global and not at.is_multicast:
        return ""
    networks = (each for each in _LOCAL if each.version == at.version and at in each)
    return next(map(str, networks), None)


def _network_of_name(name: str) -> str:
    labels = name.split(".")
    if labels[-1] == "localhost":
        return "127.0.0.0/8"
    is_home = len(labels) == 1 or {labels[-1], ".".join(labels[-2:])} & _HOME_NAMES
    return _HOME if is_home else ""
