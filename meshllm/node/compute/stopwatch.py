"""Where the time of one job goes."""

import time

from meshllm.protocol.session.messages import Spent


class Stopwatch:
    """Runs from the moment a job is asked for; each call gives the time since the last to a part.

    Started on the event loop and read there again when the compute thread is done with the job.
    """

    def __init__(self) -> None:
        self._latest = time.perf_counter_ns()
        self._queue_ns = self._serialise_ns = self._compute_ns = 0

    def begin(self) -> None:
        """Forget the time so far, which another job took."""
        self._latest = time.perf_counter_ns()

    def queued(self) -> None:
        """Count time until the compute thread took the job."""
        self._queue_ns += self._lap()

    def serialised(self) -> None:
        """Count time between bytes and tensors."""
        self._serialise_ns += self._lap()

    def computed(self) -> None:
        """Count time in the model."""
        self._compute_ns += self._lap()

    @property
    def spent(self) -> Spent:
        """What was counted so far."""
        return Spent(self._compute_ns // 1000, self._serialise_ns // 1000, self._queue_ns // 1000)

    def _lap(self) -> int:
        before, self._latest = self._latest, time.perf_counter_ns()
        return self._latest - before
