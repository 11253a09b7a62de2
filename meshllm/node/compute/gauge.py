"""Timing of one generation: first token, later tokens, and the parts of a decode step."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from meshllm.protocol.session.messages import JobTimes, RankStats


@dataclass(frozen=True, slots=True)
class Hop:
    """Mean times of one rank per decode step."""

    compute_s: float
    serialise_s: float
    queue_s: float
    wire_s: float
    """From this rank to the next."""
    bytes_sent: float


@dataclass(frozen=True, slots=True)
class GenerationTimes:
    """Figures of one generation."""

    ttft_s: float
    """From the request to the first token; 0 if there was none."""
    token_s: float
    """Mean time of every later token; 0 with fewer than two."""
    tokens_per_step: float
    """Mean of the steps after the first token; more than 1 if drafts were accepted."""
    reused: int
    """Prompt tokens taken from the prefix cache."""
    hops: tuple[Hop, ...]
    """One per rank whose tally is known, the entry first."""


class GenerationTimer:
    """Collects the times of one generation on the entry; ``now`` is seconds on one clock."""

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._first: float | None = None
        self._latest = begin
        self._tokens = 0  # after the first
        self._spent = JobTimes(0, 0, 0)
        self._steps = 0
        self._bytes = 0
        self._trips = 0
        self._trip_s = 0.0
        self._left: tuple[int, float] | None = None  # end and time of a step into an empty ring
        self._flying: deque[int] = deque()  # end positions of the steps in flight

    def computed(self, spent: JobTimes) -> None:
        """Add the time of a job for a decode step."""
        self._spent += spent

    def left(self, now: float, end: int, size: int) -> None:
        """Record that the rows of a decode step, up to position ``end``, left for the next rank."""
        while self._flying and self._flying[-1] >= end:
            self._flying.pop()  # overwritten by these rows
        if not self._flying:
            self._left = end, now
        self._flying.append(end)
        self._bytes += size

    def returned(self, now: float, end: int) -> None:
        """Record that rows came back; `left` does not record those of a prefill.

        A step queued behind others includes their time: only one sent into an empty ring counts.
        """
        if self._left and self._left[0] == end:
            self._trips += 1
            self._trip_s += now - self._left[1]
            self._left = None
        while self._flying and self._flying[0] <= end:
            self._flying.popleft()

    def tokens(self, now: float, count: int) -> None:
        """Record the tokens of one step."""
        if self._first is None:
            self._first = now
        else:
            self._steps += 1
            self._tokens += count
        self._latest = now

    def measured(
        self, tallies: Sequence[RankStats], round_trip_us: int, reused: int = 0
    ) -> GenerationTimes:
        """Return the figures; wire time is what a round trip took beyond the time of the ranks."""
        first = self._latest if self._first is None else self._first
        token_s = (self._latest - first) / self._tokens if self._tokens else 0.0
        per_step = self._tokens / self._steps if self._steps else 0.0
        own = RankStats(
            spent=self._spent,
            steps=self._steps,
            bytes_sent=self._bytes,
            round_trip_us=round_trip_us,
        )
        hops = self._hops((own, *tallies))
        return GenerationTimes(first - self._begin, token_s, per_step, reused, hops)

    def _hops(self, tallies: Sequence[RankStats]) -> tuple[Hop, ...]:
        behind = sum(tally.spent.total_us / max(1, tally.steps) for tally in tallies[1:])  # us
        trip_s = self._trip_s / max(1, self._trips)
        wire_s = max(0.0, trip_s - behind / 1e6) if len(tallies) > 1 else 0.0
        shares = [float(tally.round_trip_us) for tally in tallies]
        if not all(shares):  # not every link is measured yet: equal shares
            shares = [1.0] * len(tallies)
        return tuple(
            _hop(tally, wire_s * share / sum(shares))
            for share, tally in zip(shares, tallies, strict=True)
        )


def _hop(tally: RankStats, wire_s: float) -> Hop:
    steps, spent = max(1, tally.steps), tally.spent
    return Hop(
        compute_s=spent.compute_us / 1e6 / steps,
        serialise_s=spent.serialise_us / 1e6 / steps,
        queue_s=spent.queue_us / 1e6 / steps,
        wire_s=wire_s,
        bytes_sent=tally.bytes_sent / steps,
    )
