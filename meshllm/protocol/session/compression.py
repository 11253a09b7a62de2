"""Compression of activations for the next rank: plain, packed, or int8.

Theory of operation
-------------------
The sender chooses, link by link; the receiver reads any encoding. int8 changes a text slightly, and
a session that mixed both could not be reproduced, so the choice for its first rows holds for all of
it on that ring, however often it is restarted. After a loss the new ring chooses again.

Exact rows are packed (lossless) if that is worth it: if the saved bytes would take the link twice
as long as packing and unpacking take two processors. That changes no value, so it is decided for
each message, at the link rate known when rows of a prompt were last sent. While the rate is
unknown, as before the first of them, nothing is packed; nor is it with ``plain``.

``auto`` chooses int8 if a hop is bound by bandwidth: if the exact bytes, packed or not, take more
than `SHARE` of it. A hop is the computation of this rank, the latency to the next (half a round
trip) and the bytes at the rate of the link. That is estimated from decode steps, which mostly wait
for latency, and from prefill chunks, many rows that share one latency; one of the two is enough.
Computation times and sizes are remembered from the last jobs on this rank; round trip and rate are
the latest of the link. Until all of them are known, as for the first session of a ring, rows are
sent exact.
"""

from dataclasses import dataclass

from meshllm.names import SessionId, WireMode

SHARE = 0.2
"""Of a hop; if bytes take less, halving them saves less than a tenth of it, and less than a
twentieth if they would have been packed."""
MAX_CHOSEN = 1024  # sessions remembered; a ring has 32 at a time

PACKED = 2 / 3
"""Size of packed bfloat16 relative to plain, or a little less. float32 saves half as much, which is
no loss; float16 a quarter, which is a loss where packing only just pays."""
PACKING_S = 0.0003
"""For rows of any size, on both ends."""
PACKING_S_PER_BYTE = 8e-9
"""On both ends; measured on a processor of 2023."""

_DECAY = 7 / 8  # decay of the known jobs with each new one


@dataclass(slots=True)
class _Jobs:
    """Sums over the last jobs of one kind; older ones decay."""

    count: float = 0.0
    compute_s: float = 0.0
    size: float = 0.0
    """Bytes of the rows, uncompressed."""

    def add(self, compute_s: float, size: int) -> None:
        self.count = self.count * _DECAY + 1
        self.compute_s = self.compute_s * _DECAY + compute_s
        self.size = self.size * _DECAY + size

    def share(self, latency_s: float, bytes_per_s: float) -> float:
        """Return the share of their hops that is spent on bytes; 0 without jobs."""
        if not self.count:
            return 0.0
        part = PACKED if pays(self.size / self.count, bytes_per_s) else 1.0
        bytes_s = part * self.size / bytes_per_s
        return bytes_s / (self.compute_s + self.count * latency_s + bytes_s)


def pays(size: float, bytes_per_s: float) -> bool:
    """Return whether packing rows of ``size`` bytes is worth it."""
    saved_s = (1 - PACKED) * size / bytes_per_s
    return saved_s > 2 * (PACKING_S + size * PACKING_S_PER_BYTE)


class Compression:
    """The choices of one rank; rates are bytes per second, None if the transport knows none."""

    def __init__(self, mode: WireMode) -> None:
        self._mode = mode
        self._steps = _Jobs()
        self._chunks = _Jobs()
        self._chosen: dict[SessionId, bool] = {}
        self._bytes_per_s: float | None = None

    def is_int8(self, session: SessionId, round_trip_us: int, bytes_per_s: float | None) -> bool:
        """Return whether the rows of a session are sent as int8; the same each time."""
        if session not in self._chosen:
            self._chosen[session] = self._choose(round_trip_us, bytes_per_s)
            if len(self._chosen) > MAX_CHOSEN:
                del self._chosen[next(iter(self._chosen))]
        return self._chosen[session]

    def note(self, compute_us: int, size: int, bytes_per_s: float | None, *, is_step: bool) -> None:
        """Record the computation time of rows, and their uncompressed size."""
        if self._mode is WireMode.AUTO:
            (self._steps if is_step else self._chunks).add(compute_us / 1e6, size)
        if not is_step:  # the transport may know the rate only while it sends many rows
            self._bytes_per_s = bytes_per_s or self._bytes_per_s

    def packs(self, size: int) -> bool:
        """Return whether ``size`` bytes of exact rows are packed."""
        rate, mode = self._bytes_per_s, self._mode
        return mode is not WireMode.PLAIN and rate is not None and pays(size, rate)

    def _choose(self, round_trip_us: int, bytes_per_s: float | None) -> bool:
        if self._mode is not WireMode.AUTO:
            return self._mode is WireMode.INT8
        rate = self._bytes_per_s = bytes_per_s or self._bytes_per_s
        if not round_trip_us or not rate:
            return False
        jobs = self._steps, self._chunks
        return any(each.share(round_trip_us / 2e6, rate) > SHARE for each in jobs)
