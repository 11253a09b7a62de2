"""Where the time of a generation went; knows no clock but what it is told."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshllm.protocol.messages import Tally


@dataclass(frozen=True, slots=True)
class Hop:
    """One rank's part of a decode step, as a mean."""

    compute_s: float
    wire_s: float
    """From this rank to the next, queues included."""
    bytes_sent: float


@dataclass(frozen=True, slots=True)
class Measured:
    """A generation in figures."""

    ttft_s: float
    """From the order to the first token; 0 when there was none."""
    token_s: float
    """Mean time of every later token; 0 with fewer than two."""
    hops: tuple[Hop, ...]
    """One per rank whose tally is known, the entry first."""


class Gauge:
    """Collects the times of one generation on the entry; every ``now`` in seconds of one clock."""

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._first: float | None = None
        self._latest = begin
        self._tokens = 0
        self._compute_s = 0.0
        self._steps = 0
        self._bytes = 0
        self._trips = 0
        self._trip_s = 0.0
        self._left: float | None = None

    def computed(self, seconds: float) -> None:
        """Count time in the model for a decode step."""
        self._compute_s += seconds

    def left(self, now: float, size: int) -> None:
        """Note that the row of a decode step left for the next rank."""
        self._left = now
        self._bytes += size

    def returned(self, now: float) -> None:
        """Note that a row came back; rows of the prompt never left a mark."""
        if self._left is not None:
            self._trips += 1
            self._trip_s += now - self._left
            self._left = None

    def token(self, now: float) -> None:
        """Note a token."""
        if self._first is None:
            self._first = now
        else:
            self._steps += 1
        self._latest = now
        self._tokens += 1

    def measured(self, tallies: Sequence[Tally], round_trip_us: int) -> Measured:
        """Sum up; the time on wires is what a trip took beyond what the ranks computed."""
        first = self._latest if self._first is None else self._first
        token_s = (self._latest - first) / self._steps if self._steps else 0.0
        own = Tally(
            compute_us=round(self._compute_s * 1e6),
            steps=self._steps,
            bytes_sent=self._bytes,
            round_trip_us=round_trip_us,
        )
        return Measured(first - self._begin, token_s, self._hops((own, *tallies)))

    def _hops(self, tallies: Sequence[Tally]) -> tuple[Hop, ...]:
        computes = [tally.compute_us / 1e6 / max(1, tally.steps) for tally in tallies]
        trip_s = self._trip_s / max(1, self._trips)
        wire_s = max(0.0, trip_s - sum(computes[1:])) if len(tallies) > 1 else 0.0
        shares = [float(tally.round_trip_us) for tally in tallies]
        if not all(shares):  # not every link is measured yet: equal shares
            shares = [1.0] * len(tallies)
        return tuple(
            Hop(compute, wire_s * share / sum(shares), tally.bytes_sent / max(1, tally.steps))
            for compute, share, tally in zip(computes, shares, tallies, strict=True)
        )
