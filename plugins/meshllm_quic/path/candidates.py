"""The candidate addresses of a peer, and the probe schedule of each.

An address is probed in series: at once, then at intervals that grow from 20 to 200 ms, for 10 s or
until it has answered often enough. A series has at most `MAX_PROBES` probes, which bounds the
traffic to a third party whose address was offered.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, ip_address
from math import inf

from meshllm_quic.net.network import Address

MAX_OFFERED = 16
MAX_REFLEXIVE = 8  # peer-reflexive: observed as the source of a packet, not offered
SERIES_S = 10.0
MAX_PROBES = 64  # of one series
FIRST_PAUSE = 0.02  # s
GROWTH = 1.3
MAX_PAUSE = 0.2  # s
ANSWERS = 4  # replies that end a series: enough to compare round trips
MAX_TRUST = 16  # limit of `trust`, for flapping addresses
FRESH = 5.0  # s for which a reply counts as recent
IPV6_BONUS = 0.003  # s that IPv6 may be slower: it has no NAT mapping that expires
_GAIN = 1 / 4  # weight of a new sample in the smoothed round trip: there is one in 5 s


@dataclass(slots=True)
class Candidate:
    """One candidate address of the peer."""

    address: Address
    is_offered: bool = False
    due: float | None = None
    """When the next probe of the series is due."""
    probes: int = 0
    """Probes sent since the series began, including those outside of it."""
    answers: int = 0
    """Replies received since the series began."""
    trust: int = 1
    """Replies in a series that validate the path; doubled each time the route timed out."""
    round_trip_s: float | None = None
    answered: float | None = None
    """Time of the last reply; None if it never answered or timed out as the route."""
    _end: float = 0.0
    _pause: float = FIRST_PAUSE
    _wanted: int = ANSWERS

    @property
    def cost_s(self) -> float:
        """Round trip minus the bonus of IPv6; infinite while not measured."""
        if self.round_trip_s is None:
            return inf
        return self.round_trip_s - (IPV6_BONUS if ":" in self.address[0] else 0.0)

    def is_fresh(self, now: float) -> bool:
        """Return whether it answered within the last `FRESH` seconds."""
        return self.answered is not None and now < self.answered + FRESH

    def start(self, now: float, *, wanted: int | None = None) -> None:
        """Begin a series that ends after ``wanted`` replies, by default enough to compare."""
        self.due, self._end = now, now + SERIES_S
        self._wanted = wanted or max(ANSWERS, self.trust)
        self.probes = self.answers = 0
        self._pause = min(max(FIRST_PAUSE, 1.25 * (self.round_trip_s or 0.0)), MAX_PAUSE)

    def probe_sent(self, now: float) -> None:
        """Note a sent probe, and schedule the next one of the series after a longer pause."""
        self.probes += 1
        if self.due is None:
            return
        due, self._pause = now + self._pause, min(self._pause * GROWTH, MAX_PAUSE)
        self.due = due if due < self._end and self.probes < MAX_PROBES else None

    def answer(self, now: float, sample_s: float) -> float:
        """Note a reply and its round trip; return the smoothed one."""
        self.answers += 1
        self.answered = now
        if self.answers >= self._wanted:
            self.due = None
        smoothed = sample_s if self.round_trip_s is None else self.round_trip_s
        self.round_trip_s = smoothed + _GAIN * (sample_s - smoothed)
        return self.round_trip_s

    def timed_out(self) -> None:
        """Note that it was the route and timed out."""
        self.trust = min(2 * self.trust, MAX_TRUST)
        self.answered = None
        self.answers = 0


class PathCandidates:
    """The candidates of one peer: up to `MAX_OFFERED` + `MAX_REFLEXIVE`, plus a route or two."""

    def __init__(self) -> None:
        self._known: dict[Address, Candidate] = {}

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._known.values())

    def get(self, address: Address) -> Candidate | None:
        """Return the candidate of an address; None if there is none."""
        return self._known.get(address)

    def keep(self, address: Address) -> Candidate:
        """Find or add the address of the connection's handshake; it counts as offered."""
        return self._known.setdefault(address, Candidate(address, is_offered=True))

    def offer(self, addresses: Sequence[Address], route: Address | None) -> None:
        """Replace the previously offered addresses."""
        offered = set(addresses)
        self._known = {
            address: known
            for address, known in self._known.items()
            if not known.is_offered or address in offered or address == route
        }
        for address in addresses:
            self.keep(address).is_offered = True

    def find_or_add(self, address: Address, route: Address | None, now: float) -> Candidate | None:
        """Find or add the source address of a packet; None if it is invalid or there is no room."""
        if address in self._known:
            return self._known[address]
        if not is_probeable(address):
            return None
        others = [known for known in self if not known.is_offered and known.address != route]
        if len(others) >= MAX_REFLEXIVE:
            idle = [known for known in others if known.due is None and not known.is_fresh(now)]
            if not idle:
                return None
            del self._known[min(idle, key=lambda known: known.answered or -inf).address]
        self._known[address] = Candidate(address)
        return self._known[address]


def probeable(
    addresses: Sequence[Address], is_allowed: Callable[[str], bool] = lambda _: True
) -> list[Address]:
    """Filter and deduplicate offered addresses, which the peer chooses."""
    kept = [
        address
        for address in dict.fromkeys(addresses[: 4 * MAX_OFFERED])
        if is_probeable(address) and is_allowed(address[0])
    ]
    return kept[:MAX_OFFERED]


def is_probeable(address: Address) -> bool:
    """Return whether an address is a routable unicast address."""
    host = ip_address(address[0])
    if host.is_multicast or host.is_unspecified or not 0 < address[1] < 65536:
        return False
    if isinstance(host, IPv4Address):
        return not host.is_reserved and host.packed[0] != 0  # both 240.0.0.0/4 and "this network"
    return host.ipv4_mapped is None and not (host.is_link_local and host.scope_id is None)
