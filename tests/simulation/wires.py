"""One direction of a simulated line: rate, queue, delay, loss and duplicates."""

from dataclasses import dataclass
from math import inf
from random import Random


class Dropped(Exception):
    """A datagram is dropped; the text is the reason, in a word or two."""


@dataclass(frozen=True, slots=True)
class Line:
    """How a line treats datagrams, the same in both directions."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    """Maximum extra delay, drawn for each datagram, so that they are reordered."""
    loss: float = 0.0
    """Share that is lost, 1 for a line that is cut."""
    duplicate: float = 0.0
    """Share that is duplicated."""
    bytes_per_s: float = inf
    """Of IP packets."""
    queue_bytes: float = 512 * 1024
    """Queue limit, including the packet being sent; more is dropped."""
    mtu: int = 1500
    """Longest IP packet in bytes; a longer one is silently dropped (RFC 8899)."""


class Wire:
    """One direction; what it draws depends on its own traffic only."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._free_at = 0.0

    def arrivals(self, line: Line, size: int, now: float) -> list[float]:
        """Return when an IP packet of this size arrives, mostly once; raise `Dropped`."""
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
