"""One direction of a cable: when what enters it comes out."""

from dataclasses import dataclass
from math import inf
from random import Random


class Dropped(Exception):
    """A datagram ends here; its text says why, in a word or two."""


@dataclass(frozen=True, slots=True)
class Line:
    """How a line treats datagrams, the same in both directions."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    """Up to so much later, drawn for each datagram: they overtake one another."""
    loss: float = 0.0
    """Share that is lost, 1 for a line that is cut."""
    duplicate: float = 0.0
    """Share that comes twice."""
    bytes_per_s: float = inf
    """Of IP packets."""
    queue_bytes: float = 512 * 1024
    """What may wait for the rate, with the one that leaves just now; more is dropped."""
    mtu: int = 1500
    """Longest IP packet in bytes; a longer one is dropped, and nobody is told (RFC 8899)."""


class Wire:
    """One direction; what it draws depends on its own traffic only."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._free_at = 0.0

    def arrivals(self, line: Line, size: int, now: float) -> list[float]:
        """Tell when an IP packet of so many bytes comes out, mostly once; raise `Dropped`."""
        if size > line.mtu:
            raise Dropped("too large")
        begin = max(now, self._free_at)
        if begin > now and (begin - now) * line.bytes_per_s + size > line.queue_bytes:
            raise Dropped("queue full")
        self._free_at = begin + size / line.bytes_per_s
        if self._is_drawn(line.loss):
            raise Dropped("lost")
        copies = 2 if self._is_drawn(line.duplicate) else 1
        return [self._free_at + line.delay_s + self._late_s(line) for _ in range(copies)]

    def _is_drawn(self, share: float) -> bool:
        return share > 0 and self._random.random() < share

    def _late_s(self, line: Line) -> float:
        return self._random.random() * line.jitter_s if line.jitter_s else 0.0
