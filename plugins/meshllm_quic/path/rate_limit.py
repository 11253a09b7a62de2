"""Token buckets, single and per host."""

from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from math import inf

from blake3 import blake3

from meshllm_quic.net.network import Address

SLOTS = 4096
_6TO4 = b"\x20\x02"
_V6_NET_BYTES = 8  # one subscriber has a /64, and all addresses in it (RFC 6177)


@dataclass(slots=True)
class TokenBucket:
    """A token bucket, full at the start; times are seconds on the driver's clock."""

    rate: float
    """Tokens added per second."""
    burst: float
    """Capacity in tokens."""
    left: float = 0.0
    at: float = -inf
    """The time at which ``left`` was computed: long ago, so a new bucket fills."""

    def take(self, amount: float, now: float) -> bool:
        """Spend tokens; return False, and spend none, if there are too few."""
        self.left = min(self.burst, self.left + (now - self.at) * self.rate)
        self.at = now
        if amount > self.left:
            return False
        self.left -= amount
        return True


class HostBuckets:
    """A token bucket per host, in bounded memory.

    Hosts whose hashes collide share a bucket; the hash is keyed with a secret, so that an attacker
    cannot choose collisions.
    """

    def __init__(self, rate: float, burst: float, random: Callable[[int], bytes]) -> None:
        self._rate = rate
        self._burst = burst
        self._key = random(32)
        self._budgets: dict[int, TokenBucket] = {}

    def of(self, host: bytes) -> TokenBucket:
        """Return the bucket of a host (see `host_of`)."""
        slot = int.from_bytes(blake3(host, key=self._key).digest(2)) % SLOTS
        if slot not in self._budgets:
            self._budgets[slot] = TokenBucket(self._rate, self._burst)
        return self._budgets[slot]


def host_of(address: Address) -> bytes:
    """Return the unit of rate limiting of an address: the IPv4 host, or the IPv6 /64."""
    return ip_address(address[0]).packed[:_V6_NET_BYTES]


def network_of(host: bytes) -> bytes:
    """Return the network of a host (see `host_of`): the IPv4 /24, or the IPv6 /48.

    The address of a stream of an IPv4 host (RFC 3056) counts to the network of that host.
    """
    if len(host) < _V6_NET_BYTES:
        return host[:3]
    return host[2:5] if host.startswith(_6TO4) else host[:6]
