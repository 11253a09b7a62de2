"""NAT type detection from the addresses that observers report, as in STUN.

An observer is another host, or another of its ports, that reports the source address of this node's
packets. If two observers report the same address, a third host will see it too, and peers can send
there; if they differ, the NAT uses a new mapping per destination. Each observer is asked again
before the NAT mapping expires; after three unanswered requests its report is dropped, and when no
observer answers, UDP is blocked. If one report changes, the others are outdated, and their
observers are asked at once.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address

from meshllm_quic.net.network import Address
from meshllm_quic.wire.routes import show

MAX_OBSERVERS = 16
AGAIN = 25.0  # s; the shortest NAT timeouts seen are 30 s (RFC 4787 asks for 120)
RETRY = 3.0  # s until an unanswered request counts as missed
TRIES = 3


class NatKind(StrEnum):
    """The address mapping behaviour of the NAT (RFC 4787 section 4.1)."""

    UNKNOWN = "unknown"
    NONE = "none"
    EASY = "endpoint-independent"
    HARD = "address-dependent"


_MEANING = {
    NatKind.NONE: "no address translation",
    NatKind.EASY: "peers can connect directly by hole punching",
    NatKind.HARD: "direct only to peers that are reachable themselves",
}


@dataclass(slots=True)
class _AddressObserver:
    due: float
    """When the next request is due."""
    misses: int = 0
    """Unanswered requests in a row."""
    is_asked: bool = False
    seen: Address | None = None
    reported_at: float = 0.0


class Observations:
    """The observers and their reports; times are seconds on the driver's clock."""

    def __init__(self) -> None:
        self._observers: dict[Address, _AddressObserver] = {}

    def add(self, observer: Address, now: float) -> None:
        """Add an observer, to be asked from now on."""
        if observer in self._observers:
            return
        if len(self._observers) >= MAX_OBSERVERS:
            oldest = min(self._observers, key=lambda address: self._observers[address].reported_at)
            del self._observers[oldest]
        self._observers[observer] = _AddressObserver(now)

    def report(self, observer: Address, seen: Address, now: float) -> None:
        """Record the address that an observer reports; the caller has authenticated the report.

        Raises:
            ValueError: the host of ``seen`` is not numeric.
        """
        ip_address(seen[0])
        self.add(observer, now)
        known = self._observers[observer]
        if known.seen not in {None, seen}:
            self._outdate(seen, now)
        known.seen, known.reported_at, known.due = seen, now, now + AGAIN
        known.misses, known.is_asked = 0, False

    def network_changed(self, now: float) -> None:
        """Drop all reports and ask all observers again: the network of this node has changed."""
        for observer in self._observers.values():
            observer.seen, observer.misses, observer.is_asked = None, 0, False
            observer.due = now

    @property
    def deadline(self) -> float | None:
        """When `expire` must be called; None without an observer."""
        return min((observer.due for observer in self._observers.values()), default=None)

    def expire(self, now: float) -> list[Address]:
        """Return the observers to ask now."""
        due = [address for address, known in self._observers.items() if now >= known.due]
        for address in due:
            observer = self._observers[address]
            observer.misses += observer.is_asked
            observer.is_asked = True
            if observer.misses >= TRIES:
                observer.seen = None
            observer.due = now + (RETRY if observer.misses < TRIES else AGAIN)
        return due

    @property
    def is_blocked(self) -> bool:
        """Whether no observer answers, although all were asked: UDP is blocked."""
        observers = self._observers.values()
        return bool(observers) and all(each.misses and each.seen is None for each in observers)

    def kind(self, own: Collection[Address]) -> NatKind:
        """Return the NAT kind; ``own`` are this machine's interface addresses with the port."""
        seen = self._telling()
        others = [address for address in seen if address not in own]
        if not others:
            return NatKind.NONE if seen else NatKind.UNKNOWN
        if len(set(others)) > 1:
            return NatKind.HARD
        return NatKind.EASY if len(others) > 1 else NatKind.UNKNOWN

    def candidates(self) -> list[Address]:
        """List the observed addresses of this node, latest report first."""
        fresh = sorted(self._observers.values(), key=lambda known: known.reported_at, reverse=True)
        return list(dict.fromkeys(known.seen for known in fresh if known.seen is not None))

    def describe(self, own: Collection[Address]) -> str:
        """Describe the NAT in one line."""
        if self.is_blocked:
            return f"blocked: none of {len(self._observers)} observers answers over UDP"
        kind, seen = self.kind(own), ", ".join(show(address) for address in self.candidates())
        if not seen:
            return f"{kind}: no observer has reported this node's address yet"
        meaning = _MEANING.get(kind, "a second observer is needed")
        return f"{kind}: seen as {seen}; {meaning}"

    def _telling(self) -> list[Address]:
        """The most informative reports: public addresses if any, then IPv4 ones if any."""
        seen = [known.seen for known in self._observers.values() if known.seen is not None]
        seen = [address for address in seen if ip_address(address[0]).is_global] or seen
        return [address for address in seen if ip_address(address[0]).version == 4] or seen

    def _outdate(self, seen: Address, now: float) -> None:
        """Drop the reports of the address family in which a report has changed."""
        family = ip_address(seen[0]).version
        for known in self._observers.values():
            if known.seen is not None and ip_address(known.seen[0]).version == family:
                known.seen, known.due = None, now
