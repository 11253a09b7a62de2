"""Which addresses of peers are dialled: a host and a port, not of this machine, and not too often.

A peer chooses its addresses freely, and this node may reach hosts that the peer cannot: servers on
loopback, on this machine, or on a link-local address such as the metadata of a cloud. Those are
dialled only for a peer that is on this machine, or when the user named them.
"""

import asyncio
import socket
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

import psutil  # type: ignore[import-untyped]  # ships no types
from blake3 import blake3

from meshllm.names import MeshId, NodeId
from meshllm.protocol.membership.records import MACHINE_BYTES
from meshllm.transport.half_open import groups

MAX_RESOLVED = 4  # addresses tried of one name
MAX_HOSTS = 64  # of which a transport chooses itself
LOOK_UP_S = 8.0  # s; more than a resolver takes to ask its second server
HOSTS_S = 2.0  # s for which the list of interfaces is used
_BY_NAME = {"wss"}  # schemes whose server proves its name, which the transport has to know

Host = IPv4Address | IPv6Address


class LocalAddressPolicy(Enum):
    """Which addresses of this machine and its links may be dialled."""

    NO = 0
    """None: a peer elsewhere named them."""
    LITERAL = 1
    """Those written as numbers, which were checked when they were heard."""
    HERE = 2
    """All, a limited number of times: a peer on this machine names another one there."""
    YES = 3
    """All: the user named them, or a peer on this machine."""

    @property
    def has_all(self) -> bool:
        """Whether those are dialled that lead to this machine, also by name."""
        return self in {LocalAddressPolicy.HERE, LocalAddressPolicy.YES}


@dataclass(frozen=True, slots=True)
class SameHostDetector:
    """Recognises the nodes on this machine: their tags are computed from what only it knows."""

    secret: bytes
    """Known to processes of this machine, and of this network namespace, until it restarts."""
    mesh: MeshId

    def tag(self, node: NodeId) -> bytes:
        """Return the tag that a node on this machine publishes in its profile."""
        key = blake3(self.secret).digest()
        return blake3(self.mesh + node, key=key).digest(MACHINE_BYTES)

    def has(self, node: NodeId, tag: bytes) -> bool:
        """Return whether a tag shows that a node is on this machine."""
        return tag == self.tag(node)


def machine_secret() -> bytes:
    """Return what identifies this machine to its own processes, and not to others."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    try:
        return f"{boot.read_text('ascii')} {network.stat().st_ino}".encode()
    except OSError:  # not Linux: the hardware address, which neighbours on its network know
        return f"{uuid.getnode()}".encode()


def own_hosts() -> frozenset[str]:
    """Return the addresses of the interfaces of this machine, some seconds old at most.

    Where they cannot be listed, as with too many open files, they are those of the last time.

    Raises:
        OSError: they were never listed.
    """
    try:
        _last[:] = [_hosts_at(int(time.monotonic() / HOSTS_S))]
    except OSError:
        if not _last:
            raise
    return _last[0]


_last = list[frozenset[str]]()


@lru_cache(maxsize=1)
def _hosts_at(_: int) -> frozenset[str]:
    families = socket.AF_INET, socket.AF_INET6
    interfaces = psutil.net_if_addrs().values()
    found = (at.address for each in interfaces for at in each if at.family in families)
    return frozenset(address.partition("%")[0] for address in found)


def permitted(addresses: Sequence[str], local: LocalAddressPolicy) -> tuple[str, ...]:
    """Keep the addresses that may be dialled; of names, this is known when they are resolved."""
    own = own_hosts()
    return tuple(
        address
        for address in addresses
        if (host := _host(address)) is not None
        and (
            local is not LocalAddressPolicy.NO
            or not isinstance(host, Host)
            or not _is_local(host, own)
        )
    )


def is_literal(address: str) -> bool:
    """Return whether the host of an address is written as a number."""
    return isinstance(_host(address), Host)


def own_host(address: str) -> str | None:
    """Return the host from which a peer at an address dials; None for a name, or a relay's."""
    host = _host(address)
    return None if not isinstance(host, Host) or urlsplit(address).username else str(host)


def is_looked_up(address: str, local: LocalAddressPolicy) -> bool:
    """Return whether a name server is asked for the host of an address."""
    is_name = isinstance(_host(address), str) and bool(urlsplit(address).netloc)
    return is_name and not local.has_all


class DialTarget(NamedTuple):
    """An address to dial."""

    address: str
    hosts: tuple[str, ...] = ()
    """The IP addresses that its name has, if these are to be dialled: a further look-up might give
    others, which were not checked."""


async def resolve(address: str, local: LocalAddressPolicy, threads: Executor) -> list[DialTarget]:
    """Return where to dial for one address: itself, or those that its name has.

    Names are looked up in ``threads``: those of a peer's own name server may keep them busy.

    Raises:
        OSError: the name has no address, or not within `LOOK_UP_S`.
    """
    if not is_looked_up(address, local):
        return [*map(DialTarget, permitted([address], local))]
    parts, own, loop = urlsplit(address), own_hosts(), asyncio.get_running_loop()
    look_up = partial(socket.getaddrinfo, type=socket.SOCK_STREAM)
    async with asyncio.timeout(LOOK_UP_S):
        found = await loop.run_in_executor(threads, look_up, parts.hostname, parts.port or 0)
    hosts = list(dict.fromkeys(ip_address(each[4][0]) for each in found))
    if any(_is_local(each, own) for each in hosts):
        return []
    if parts.scheme in _BY_NAME:
        return [DialTarget(address, tuple(map(str, hosts[:MAX_HOSTS])))]
    return [DialTarget(_replaced(parts, each)) for each in hosts[:MAX_RESOLVED]]


def target(address: str) -> tuple[str, str]:
    """Return what attempts at an address are counted under: its host, or IPv6 /64, and the port.

    Of the port that is the whole host with the number, in one spelling, and of a relay the node
    behind it.
    """
    host, parts = _host(address), urlsplit(address)
    shown = f"{_unmapped(host) if isinstance(host, Host) else host}".partition("%")[0]
    node = f" {parts.username}" if parts.username else ""
    return groups(shown)[0], f"{shown} {parts.port}{node}"


@lru_cache(maxsize=4096)
def _host(address: str) -> Host | str | None:
    """Return the host of an address; None if it has more than scheme, node, host and port.

    An address without `//` is a plain name of its transport, which has no hosts.
    """
    if not (address.isascii() and address.isprintable()) or {" ", "\\", "#", "?"} & set(address):
        return None
    try:
        parts = urlsplit(address)
        port, host = parts.port, parts.hostname
    except ValueError:
        return None
    if not parts.netloc:
        return address if parts.path.replace("-", "").replace("_", "").isalnum() else None
    if parts.path not in {"", "/"} or parts.password is not None or not host or port == 0:
        return None
    try:
        found = ip_address(host)
    except ValueError:
        return host
    # Hosts ignore a zone of other addresses, so that it would hide which one is meant.
    is_zoned = isinstance(found, IPv6Address) and found.scope_id is not None
    return None if is_zoned and not found.is_link_local else found


def _is_local(host: Host, own: frozenset[str]) -> bool:
    """Return whether packets to a host may stay on this machine or its links."""
    host = _unmapped(host)
    if host.is_link_local:  # two machines on one cable have no other addresses
        return not any(_is_link_local_v4(each) for each in own)
    return host.is_loopback or host.is_unspecified or host.is_multicast or str(host) in own


def _unmapped(host: Host) -> Host:
    """Return the IPv4 address that an IPv6 address stands for, if any."""
    return getattr(host, "ipv4_mapped", None) or host


def _is_link_local_v4(host: str) -> bool:
    return host.startswith("169.254.")


def _replaced(parts: SplitResult, host: Host) -> str:
    """Return an address with a number for its name."""
    user = f"{parts.username}@" if parts.username else ""
    shown = f"[{host}]" if isinstance(host, IPv6Address) else str(host)
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{user}{shown}{port}"
