"""In how many bytes activations leave for the next rank: as they are, packed, or in 8 bits.

Theory of operation
-------------------
The sender chooses, link by link; the receiver reads any of it. 8 bits change a text slightly, and a
session that had both could not be repeated, so what was chosen for its first rows holds for all of
it, however often it is begun again.

Rows that travel exact are packed where that is worth it: where the bytes that are saved would take
the link twice as long as packing and unpacking them takes two processors. That changes no value, so
it is decided for each message, at the rate that the link was known to have before rows of a prompt
last left. Where nobody knows the rate, as before the first of them, nothing is packed; nor is it
with ``plain``.

``auto`` chooses 8 bits where bytes are what a hop waits for: where the exact bytes, as they would
travel, take more than `SHARE` of it. A hop is the computing of this rank, one way to the next (half
a round trip) and the bytes at the rate of the link. That is decided by decode steps, which mostly
wait for the way, and by the chunks of a prompt, many rows that share one way; one of the two is
enough. What was computed and what it weighed is remembered of the last jobs on this rank; round
trip and rate are what the link knew last. Until all of that is known, as for the first session of a
ring, rows travel exact.
"""

from dataclasses import dataclass

from meshllm.names import SessionId, WireMode

SHARE = 0.2
"""Of a hop; where bytes take less, half of them saves less than a tenth of it, and less than a
twentieth where they would have been packed."""
MAX_CHOSEN = 1024  # sessions remembered; a ring has eight at a time

PACKED = 2 / 3
"""Of exact bytes, packed; of bfloat16, or a little less. Of float32 half as much is saved, which is
no loss; of float16 a quarter, which is one where packing only just pays."""
PACKING_S = 0.0003
"""For rows of any size, on both ends."""
PACKING_S_PER_BYTE = 8e-9
"""On both ends; measured on a processor of 2023."""

_KEEP = 7 / 8  # of what is known about jobs, when one more is


@dataclass(slots=True)
class _Jobs:
    """The last jobs of one kind; older ones fade."""

    count: float = 0.0
    compute_s: float = 0.0
    size: float = 0.0
    """Bytes of the rows, exact."""

    def add(self, compute_s: float, size: int) -> None:
        self.count = self.count * _KEEP + 1
        self.compute_s = self.compute_s * _KEEP + compute_s
        self.size = self.size * _KEEP + size

    def share(self, latency_s: float, bytes_per_s: float) -> float:
        """Return which part of their hops is bytes; 0 of no jobs."""
        if not self.count:
            return 0.0
        part = PACKED if pays(self.size / self.count, bytes_per_s) else 1.0
        bytes_s = part * self.size / bytes_per_s
        return bytes_s / (self.compute_s + self.count * latency_s + bytes_s)


def pays(size: float, bytes_per_s: float) -> bool:
    """Tell whether packing rows of so many bytes is worth it."""
    saved_s = (1 - PACKED) * size / bytes_per_s
    return saved_s > 2 * (PACKING_S + size * PACKING_S_PER_BYTE)


class Compression:
    """The choices of one rank; rates are bytes per second, None where the transport knows none."""

    def __init__(self, mode: WireMode) -> None:
        self._mode = mode
        self._steps = _Jobs()
        self._chunks = _Jobs()
        self._chosen: dict[SessionId, bool] = {}
        self._bytes_per_s: float | None = None

    def is_int8(self, session: SessionId, round_trip_us: int, bytes_per_s: float | None) -> bool:
        """Tell whether the rows of a session leave in 8 bits; the same each time."""
        if session not in self._chosen:
            self._chosen[session] = self._choose(round_trip_us, bytes_per_s)
            if len(self._chosen) > MAX_CHOSEN:
                del self._chosen[next(iter(self._chosen))]
        return self._chosen[session]

    def note(self, compute_us: int, size: int, bytes_per_s: float | None, *, is_step: bool) -> None:
        """Remember what rows took to compute, and their bytes when exact."""
        if self._mode is WireMode.AUTO:
            (self._steps if is_step else self._chunks).add(compute_us / 1e6, size)
        if not is_step:  # the transport may know the rate only while rows are many
            self._bytes_per_s = bytes_per_s or self._bytes_per_s

    def packs(self, size: int) -> bool:
        """Tell whether so many bytes that are to travel exact are packed."""
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
