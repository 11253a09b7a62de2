"""How fast one replica decodes and prefills, given the sessions that it runs at once.

Theory of operation
-------------------
A replica is a ring; a ring of one node is a whole-model engine. Its cost model is `RingTimes`, so
measured tables and rooflines count alike. Two things are added. A decode step reads the KV cache
of its session: a cached token takes as long as the same bytes of weights. And sessions share the
ring: B of them travel as G micro-batches of ceil(B/G) rows. A micro-batch takes `trip`, the sum of
all ranks and wires; a rank is busy with all G of them, so that a token of every session takes::

    period(B) = min over G of max(trip(B/G), max over ranks of G * rank(B/G))

of which the Gs that halve the rows again and again are tried. Both terms grow linearly with the
cached tokens, so a `Period` is a pair of coefficients, and the time of many steps has a closed
form. While a prompt is prefilled in chunks, ranks alternate between chunks and steps: a step waits
for one chunk on every rank, sessions that wait for the same chunk become one micro-batch, so that
there are no more of these than ranks, and a chunk gets the time that steps leave. An engine that
merges them computes the rows of both together.

Ranks on one machine share the bandwidth of its memory, so that steps take longer while other ranks
compute too. That does not change how sessions travel: G is chosen as for separate machines.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, sqrt
from typing import NamedTuple

from meshllm.protocol.planning.chunking import RingTimes

MAX_PROVIDER_SESSIONS = 256
"""Generations that another engine runs at once: the default of vLLM on a GPU."""


class Period(NamedTuple):
    """Seconds of one step of all sessions: ``base + slope * cached tokens``."""

    base: float
    slope: float

    def seconds(self, steps: float, cached: float, sessions: int) -> float:
        """Return the seconds of some steps; each adds a cached token to every session."""
        return steps * (self.base + self.slope * (cached + sessions * steps / 2))

    def steps(self, seconds: float, cached: float, sessions: int) -> float:
        """Return the steps in some seconds: the inverse of `seconds`."""
        now, growth = self.base + self.slope * cached, self.slope * sessions
        return 2 * seconds / (now + sqrt(now * now + 2 * growth * seconds))


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prefill of one prompt on an idle ring."""

    chunks: int
    ranks: tuple[float, ...]
    """Seconds of a mean chunk on each rank."""
    wire_s: float
    """Seconds that a mean chunk keeps the slowest link busy."""
    drain_s: float
    """Seconds of the last chunk after the slowest rank or link is free for the next prompt."""

    @property
    def interval_s(self) -> float:
        """Seconds between two chunks."""
        return max(self.wire_s, *self.ranks)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Coefficients of the sessions travelling as a number of micro-batches."""

    count: int
    trip: Period
    ranks: tuple[Period, ...]
    """How long each rank is busy with a step of all sessions."""
    wire_s: float
    """How long the slowest link is busy with it."""


class ReplicaEngine:
    """The speeds of one replica."""

    def __init__(  # noqa: PLR0913 -- one keyword per independent property
        self,
        times: RingTimes,
        cached_s: Sequence[float],
        *,
        room_tokens: int,
        chunk: int,
        max_sessions: int,
        mixes_prefill_and_decode: bool = False,
        contention: float = 1.0,
    ) -> None:
        """``cached_s`` is what each rank needs per cached token, ``room_tokens`` of all sessions,
        of which ``max_sessions`` run at once.

        ``mixes_prefill_and_decode`` computes the rows of a chunk and of a step together, on a ring
        of one. Steps of all ranks at once take ``contention`` times as long: they run on one
        machine.
        """
        self.room_tokens = room_tokens
        self.max_sessions = max_sessions
        self.chunk = chunk
        self._times = times
        self._cached_s = tuple(cached_s)
        self._is_merging = mixes_prefill_and_decode
        self._contention = contention
        self._batches: Callable[[int], tuple[_Batch, ...]] = cache(self._all_batches)
        self.prefill: Callable[[int], Prefill] = cache(self._prefill)
        """Return the prefill of a prompt of this many tokens."""

    def decode(self, sessions: int, cached: float) -> Period:
        """Return the period of ``sessions`` with ``cached`` tokens in all, and no prefill."""
        idle = (0.0,) * len(self._cached_s)
        batches = self._batches(sessions)
        batch = min(batches, key=lambda each: _slowest(each, cached, idle, 0.0))
        return _slowest(self._slowed(batch), cached, idle, 0.0)[1]

    def mixed(self, sessions: int, cached: float, prefill: Prefill) -> tuple[Period, float]:
        """Return the period beside a prefill, and the chunks per second of that."""
        if self._is_merging:
            period = self._merged(sessions, prefill)
            return period, 1 / (period.base + period.slope * cached)
        waits, wire_s = prefill.ranks, prefill.wire_s
        batches = (each for each in self._batches(sessions) if each.count <= len(waits))
        batch = min(batches, key=lambda each: _slowest(each, cached, waits, wire_s))
        batch = self._slowed(batch)
        seconds, period = _slowest(batch, cached, waits, wire_s)
        busy = [rank.base + rank.slope * cached for rank in batch.ranks]
        loads = zip((*busy, batch.wire_s), (*waits, wire_s), strict=True)
        return period, min((1 - step_s / seconds) / chunk_s for step_s, chunk_s in loads if chunk_s)

    def _merged(self, sessions: int, prefill: Prefill) -> Period:
        (rank,) = self._times.ranks
        alone = self._batches(sessions)[0].trip
        rows = sessions + self.chunk
        more_s = rank.compute_s(rows) - rank.compute_s(self.chunk)
        chunk_s = prefill.ranks[0] - self._times.head_s  # one forward reads the head once
        return Period(chunk_s + max(more_s, 0.0) + self._head_s(sessions + 1), alone.slope)

    def _all_batches(self, sessions: int) -> tuple[_Batch, ...]:
        if len(self._times.ranks) == 1:
            return (self._batch(sessions, 1),)
        halvings = range(sessions.bit_length())
        counts = sorted({ceil(sessions / (1 << halving)) for halving in halvings} | {1})
        return tuple(self._batch(sessions, count) for count in counts)

    def _batch(self, sessions: int, count: int) -> _Batch:
        rows = ceil(sessions / count)
        steps = [rank.compute_s(rows) for rank in self._times.ranks]
        steps[0] += self._head_s(rows)
        pairs = list(zip(steps, self._cached_s, strict=True))
        wires = [self._times.wire_s(rank, rows) for rank in range(len(steps))]
        return _Batch(
            count=count,
            trip=Period(sum(steps) + sum(wires), sum(self._cached_s) / count),
            ranks=tuple(Period(count * step, cached) for step, cached in pairs),
            wire_s=count * self._wire_s(rows),
        )

    def _slowed(self, batch: _Batch) -> _Batch:
        """Return a batch whose steps take longer by the time in which other ranks compute too."""
        if self._contention == 1 or len(batch.ranks) == 1:
            return batch
        steps = [rank.base / batch.count for rank in batch.ranks]
        trip_s, others = sum(steps), len(steps) - 1
        period_s = max(batch.trip.base, batch.count * max(steps))
        busy = (
            (batch.count - 1) * (trip_s - step) / others / max(period_s - step, 1e-12)
            for step in steps
        )
        factors = [1 + (self._contention - 1) * min(1.0, each) for each in busy]
        more = sum((each - 1) * step for each, step in zip(factors, steps, strict=True))
        return replace(
            batch,
            trip=batch.trip._replace(base=batch.trip.base + more),
            ranks=tuple(
                rank._replace(base=rank.base * each)
                for rank, each in zip(batch.ranks, factors, strict=True)
            ),
        )

    def _prefill(self, tokens: int) -> Prefill:
        starts = range(0, tokens, self.chunk)
        chunks = [(min(self.chunk, tokens - start), start) for start in starts]
        ranks = tuple(
            sum(rank.compute_s(rows, start) for rows, start in chunks) / len(chunks)
            for rank in self._times.ranks
        )
        head_s = self._times.head_s
        if len(ranks) == 1:  # the only rank computes the logits of each chunk, too
            ranks, head_s = (ranks[0] + head_s,), 0.0
        rows = tokens / len(chunks)
        wire_s = self._wire_s(ceil(rows)) if len(ranks) > 1 else 0.0
        wires = [self._times.wire_s(rank, ceil(rows)) for rank in range(len(ranks) - 1)]
        back_s = self._times.wire_s(len(ranks) - 1, 1) if len(ranks) > 1 else 0.0
        trip_s = sum(ranks) + sum(wires) + back_s + head_s
        return Prefill(len(chunks), ranks, wire_s, max(0.0, trip_s - max(wire_s, *ranks)))

    def _head_s(self, rows: int) -> float:
        first = self._times.ranks[0].offer
        return self._times.head_s * first.layer_seconds(rows) / first.layer_seconds(1)

    def _wire_s(self, rows: int) -> float:
        """Return the seconds that some rows keep the slowest link busy."""
        if len(self._times.ranks) == 1:
            return 0.0
        size = self._times.message_bytes(rows)
        return max(size / rank.speed.bytes_per_s for rank in self._times.ranks)


def _slowest(
    batch: _Batch, cached: float, waits: Sequence[float], wire_s: float
) -> tuple[float, Period]:
    """Return what bounds a step, and its seconds: the trip, or the busiest rank or link.

    Chunks add ``waits`` to the ranks and ``wire_s`` to the links.
    """
    base, slope = batch.trip
    base += sum(waits)
    most, bound = base + slope * cached, (base, slope)
    if len(waits) > 1:
        for (base, slope), wait in zip(batch.ranks, waits, strict=True):
            if (seconds := base + wait + slope * cached) > most:
                most, bound = seconds, (base + wait, slope)
        if (busy_s := batch.wire_s + wire_s) > most:
            most, bound = busy_s, (busy_s, 0.0)
    return most, Period(*bound)
