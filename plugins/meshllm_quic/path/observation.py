"""Which NAT this node is behind, from what others see.

An observer is another host, or another port of it, that tells as whom it sees this node's socket.
Where two see the same, so will a third, and the other side of a connection can be told to send
there; where they differ, the NAT writes another address on what goes to each. Each observer is
asked again before a NAT forgets the mapping; one that leaves three questions open is believed no
longer, and when all are silent, UDP is blocked. When one observer sees a change, what the others
saw is of before it, and they are asked at once.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address

from meshllm_quic.net.network import Address
from meshllm_quic.wire.routes import show

MAX_OBSERVERS = 16
AGAIN = 25.0  # s; NATs forget after 30 at the earliest that is seen (RFC 4787 asks for 120)
RETRY = 3.0  # s that an answer may take
TRIES = 3


class NatKind(StrEnum):
    """How a NAT maps one socket (RFC 4787 section 4.1)."""

    UNKNOWN = "unknown"
    NONE = "none"
    EASY = "endpoint-independent"
    HARD = "address-dependent"


_MEANING = {
    NatKind.NONE: "others see this node as it is",
    NatKind.EASY: "others can be told where to reach it",
    NatKind.HARD: "direct only to those who can be reached themselves",
}


@dataclass(slots=True)
class _Observer:
    due: float
    """When it is to be asked."""
    misses: int = 0
    """Questions in a row that it left open."""
    is_asked: bool = False
    seen: Address | None = None
    told: float = 0.0


class Observations:
    """What others saw; times are seconds on the driver's clock."""

    def __init__(self) -> None:
        self._observers: dict[Address, _Observer] = {}

    def add(self, observer: Address, now: float) -> None:
        """Have an observer asked, from now on."""
        if observer not in self._observers:
            self._insert(observer, now)

    def told(self, observer: Address, seen: Address, now: float) -> None:
        """Note as whom an observer sees this node; the caller knows that it was asked, and is it.

        Raises:
            ValueError: an address has no numeric host.
        """
        ip_address(seen[0])
        old = self._observers.get(observer)
        if old is not None and old.seen not in {None, seen}:
            self._doubt(seen, now)
        known = old or self._insert(observer, now)
        known.seen, known.told, known.due = seen, now, now + AGAIN
        known.misses, known.is_asked = 0, False

    def moved(self, now: float) -> None:
        """Forget what was seen: this node has changed its network, and all are to be asked."""
        for observer in self._observers.values():
            observer.seen, observer.misses, observer.is_asked = None, 0, False
            observer.due = now

    @property
    def deadline(self) -> float | None:
        """When ``expire`` has something to do; None without an observer."""
        return min((observer.due for observer in self._observers.values()), default=None)

    def expire(self, now: float) -> list[Address]:
        """Take the observers that are to be asked now."""
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
        """Whether everybody was asked and nobody answers: UDP does not get through."""
        observers = self._observers.values()
        return bool(observers) and all(each.misses and each.seen is None for each in observers)

    def kind(self, own: Collection[Address]) -> NatKind:
        """Tell the kind; ``own`` are the addresses of this machine's interfaces, with the port."""
        seen = self._telling()
        others = [address for address in seen if address not in own]
        if not others:
            return NatKind.NONE if seen else NatKind.UNKNOWN
        if len(set(others)) > 1:
            return NatKind.HARD
        return NatKind.EASY if len(others) > 1 else NatKind.UNKNOWN

    def candidates(self) -> list[Address]:
        """List where others saw this node, freshest first."""
        fresh = sorted(self._observers.values(), key=lambda known: known.told, reverse=True)
        return list(dict.fromkeys(known.seen for known in fresh if known.seen is not None))

    def describe(self, own: Collection[Address]) -> str:
        """Say in one line what the network does, for people."""
        if self.is_blocked:
            return f"blocked: none of {len(self._observers)} observers answers over UDP"
        kind, seen = self.kind(own), ", ".join(show(address) for address in self.candidates())
        if not seen:
            return f"{kind}: nobody has told yet as whom they see this node"
        meaning = _MEANING.get(kind, "it takes a second observer to tell")
        return f"{kind}: seen as {seen}; {meaning}"

    def _telling(self) -> list[Address]:
        """What each observer saw that tells most: public addresses, and of IPv4, where NATs are."""
        seen = [known.seen for known in self._observers.values() if known.seen is not None]
        seen = [address for address in seen if ip_address(address[0]).is_global] or seen
        return [address for address in seen if ip_address(address[0]).version == 4] or seen

    def _insert(self, observer: Address, now: float) -> _Observer:
        if len(self._observers) >= MAX_OBSERVERS:
            oldest = min(self._observers, key=lambda address: self._observers[address].told)
            del self._observers[oldest]
        return self._observers.setdefault(observer, _Observer(now))

    def _doubt(self, seen: Address, now: float) -> None:
        """Forget what the others saw of the family in which an observer saw a change."""
        family = ip_address(seen[0]).version
        for known in self._observers.values():
            if known.seen is not None and ip_address(known.seen[0]).version == family:
                known.seen, known.due = None, now
