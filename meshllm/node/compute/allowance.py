"""How much of the machine warm-ups may take, of all rings of a compute thread together."""

from math import inf

CORE_S_PER_S = 1 / 60
"""Core-seconds of steps per second."""
SAVED_S = 60.0
"""s of all cores that are there at first; what no step uses is saved up to as much again."""


class Allowance:
    """Spaces steps out: a ring that forms later has no minute of its own.

    ``now`` is seconds on one clock. Used by the event loop and the compute thread.
    """

    def __init__(self, cores: int) -> None:
        self._saving_s = SAVED_S * cores / CORE_S_PER_S
        self._paid = -inf  # when the steps so far are paid for

    def wait_s(self, now: float) -> float:
        """Return how long to wait before the next step."""
        return max(0.0, self._paid - now)

    def spend(self, core_s: float, now: float) -> None:
        """Count a step that ended now and took ``core_s`` core-seconds."""
        self._paid = max(self._paid, now - self._saving_s) + core_s / CORE_S_PER_S
