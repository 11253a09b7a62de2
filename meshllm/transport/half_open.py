"""Connections whose peer is not authenticated yet: how many, and which makes room for another.

Strangers must not lock out others by connections that say nothing. So a full table does not refuse
a newcomer: it drops the oldest connection, first of the same host, then of the same network, then
of the network that has most. A peer that answers at once needs its place for a few round trips.

The hosts of peers that were authenticated before are known: strangers never take their places, not
even those of their own network. The hosts of the peers that a node knew when it started are
expected. Strangers do not take their places either. But a peer chooses its addresses, and may have
named hosts of others: so expected hosts share the limit of their network, and together they keep
half of the places at most, until peers have been authenticated there.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, ip_address
from typing import Generic, TypeVar

MAX_KNOWN = 128  # hosts; a new one replaces the one that was not authenticated for longest

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
        self._known: dict[str, bool] = {}
        """Known and expected hosts; whether a peer was authenticated there. The latest is last."""

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._groups))

    def add(self, who: T, host: str) -> T | None:
        """Count a connection; return one that is dropped for it and no longer counted."""
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

    def authenticated(self, who: T) -> None:
        """Stop counting a connection, and know its host from now on."""
        if (at := self._groups.pop(who, None)) is not None:
            self._know(at[0], is_proved=True)

    def reserve(self, hosts: Iterable[str]) -> None:
        """Expect peers at hosts, at the first one longest."""
        for host in reversed([*hosts][:MAX_KNOWN]):
            self._know(groups(host)[0], is_proved=False)

    def _know(self, host: str, *, is_proved: bool) -> None:
        self._known[host] = self._known.pop(host, False) or is_proved
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def _crowded(self, own: tuple[str, str]) -> T | None:
        """Return the oldest connection of the first group that is full; None if none is."""
        host, network = own
        same = [who for who, at in self._groups.items() if at[0] == host]
        if len(same) >= self._limits.host:
            return same[0]
        rank = self._known.get(host)
        near = [who for who in self._of(rank) if network and self._groups[who][1] == network]
        if len(near) >= self._limits.network and not rank:
            return near[0]
        if len(self._groups) < self._limits.total:
            return None
        others = self._evictable()
        ((most, _),) = Counter(self._groups[who][1] for who in others).most_common(1)
        return next(who for who in others if self._groups[who][1] == most)

    def _evictable(self) -> list[T]:
        """Return the connections of which one makes room in a full table, the oldest first."""
        strangers, expected = self._of(None), self._of(False)
        if 2 * len(expected) > self._limits.total:
            return expected
        return strangers or expected or [*self._groups]

    def _of(self, rank: bool | None) -> list[T]:
        """Return the connections of strangers (None), expected hosts (False) or known ones."""
        return [who for who, at in self._groups.items() if self._known.get(at[0]) is rank]
