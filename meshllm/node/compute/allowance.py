"""How much of the machine warm-ups may take, of all rings of a compute thread together."""

FREE_S = 60.0
"""s from the first step of all in which steps follow one another."""
CORE_S_PER_S = 1 / 60
"""Core-seconds of steps per second after that."""


class Allowance:
    """Spaces steps out: a ring that forms later has no minute of its own.

    ``now`` is seconds on one clock. Used by the event loop and the compute thread.
    """

    def __init__(self) -> None:
        self._begin: float | None = None
        self._next = 0.0

    def wait_s(self, now: float) -> float:
        """Return how long to wait before the next step."""
        if self._begin is None:
            self._begin = now
        return max(0.0, self._next - now)

    def spend(self, core_s: float, now: float) -> None:
        """Count a step that ended now and took ``core_s`` core-seconds."""
        if self._begin is not None and now - self._begin >= FREE_S:
            self._next = max(self._next, now) + core_s / CORE_S_PER_S
