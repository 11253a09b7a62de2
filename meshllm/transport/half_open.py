"""Connections whose peer is not authenticated yet: how many, and which makes room for another.

Strangers must not lock out others by connections that say nothing. So a full table does not refuse
a newcomer: it drops the oldest connection, first of the same host, then of the same network, then
of the network that has most. A peer that answers at once needs its place for a few round trips.
"""

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, ip_address
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a table."""

    total: int
    host: int
    """Of one IPv4 address or IPv6 /64."""
    network: int
    """Of one IPv4 /24 or IPv6 /48."""


def groups(host: str) -> tuple[str, str]:
    """Return the host and the network of an IP address; a name that is none has no network."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host, ""
    address = getattr(address, "ipv4_mapped", None) or address
    is_v4 = isinstance(address, IPv4Address)
    digits = address.packed.hex()
    return digits if is_v4 else digits[:16], digits[:6] if is_v4 else digits[:12]


class HalfOpen(Generic[T]):
    """The half-open connections of one listener, the oldest first."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._groups: dict[T, tuple[str, str]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._groups))

    def add(self, who: T, host: str) -> T | None:
        """Count a connection; return one that is dropped for it, and counted no more."""
        if who in self._groups:
            return None
        own = groups(host)
        victim = self._crowded(own)
        if victim is not None:
            del self._groups[victim]
        self._groups[who] = own
        return victim

    def remove(self, who: T) -> None:
        """Stop counting a connection."""
        self._groups.pop(who, None)

    def _crowded(self, own: tuple[str, str]) -> T | None:
        """Return the oldest connection of the first group that is full; None if none is."""
        for level, limit in enumerate((self._limits.host, self._limits.network)):
            same = [
                who for who, at in self._groups.items() if own[level] and at[level] == own[level]
            ]
            if len(same) >= limit:
                return same[0]
        if len(self._groups) < self._limits.total:
            return None
        ((most, _),) = Counter(network for _, network in self._groups.values()).most_common(1)
        return next(who for who, (_, network) in self._groups.items() if network == most)
