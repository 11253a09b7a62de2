"""Timing of one job: queueing, serialising, computing."""

import time

from meshllm.protocol.session.messages import JobTimes


class Stopwatch:
    """Runs from the request for a job; each call adds the time since the last one to a part.

    Started on the event loop, and read there after the compute thread has finished the job.
    """

    def __init__(self) -> None:
        self._latest = time.perf_counter_ns()
        self._queue_ns = self._serialise_ns = self._compute_ns = 0

    def begin(self) -> None:
        """Discard the time so far, which another job took."""
        self._latest = time.perf_counter_ns()

    def queued(self) -> None:
        """Add the time until the compute thread took the job."""
        self._queue_ns += self._lap()

    def serialised(self) -> None:
        """Add the time of a conversion between bytes and tensors."""
        self._serialise_ns += self._lap()

    def computed(self) -> None:
        """Add the time in the model."""
        self._compute_ns += self._lap()

    @property
    def compute_us(self) -> int:
        """Microseconds in the model so far."""
        return self._compute_ns // 1000

    @property
    def spent(self) -> JobTimes:
        """Time recorded so far."""
        return JobTimes(self.compute_us, self._serialise_ns // 1000, self._queue_ns // 1000)

    def _lap(self) -> int:
        before, self._latest = self._latest, time.perf_counter_ns()
        return self._latest - before
