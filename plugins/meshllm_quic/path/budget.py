"""So much a second and so much at once, for one or for each host."""

from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address

from blake3 import blake3

from meshllm_quic.net.network import Address

SLOTS = 4096
_V6_NET_BYTES = 8  # one subscriber has a /64, and all addresses in it (RFC 6177)


@dataclass(slots=True)
class Budget:
    """A token bucket, full at the start; times are seconds on the driver's clock."""

    rate: float
    """What comes in, a second."""
    burst: float
    """What it holds."""
    left: float
    at: float
    """When `left` was so much."""

    def take(self, amount: float, now: float) -> bool:
        """Spend an amount; False leaves everything where it is."""
        self.left = min(self.burst, self.left + (now - self.at) * self.rate)
        self.at = now
        if amount > self.left:
            return False
        self.left -= amount
        return True


class Shares:
    """A budget for each host in a memory that does not grow.

    Hosts whose hashes meet in one slot share it; which hosts these are is known to nobody, for the
    hash has a secret key.
    """

    def __init__(self, rate: float, burst: float, random: Callable[[int], bytes]) -> None:
        self._rate = rate
        self._burst = burst
        self._key = random(32)
        self._budgets: dict[int, Budget] = {}

    def of(self, host: bytes, now: float) -> Budget:
        """Return the budget of a host, as `host_of` names it."""
        slot = int.from_bytes(blake3(host, key=self._key).digest(2), "big") % SLOTS
        if slot not in self._budgets:
            self._budgets[slot] = Budget(self._rate, self._burst, self._burst, now)
        return self._budgets[slot]


def host_of(address: Address) -> bytes:
    """Name who is behind an address: the host with IPv4, the network of 64 bits with IPv6."""
    return ip_address(address[0]).packed[:_V6_NET_BYTES]
