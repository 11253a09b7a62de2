"""The budget of CPU time for warm-up steps, which all rings of a compute thread share."""

from math import inf

CORE_S_PER_S = 1 / 60
"""Core-seconds of steps per second."""
SAVED_S = 60.0
"""Seconds of all cores: the budget at the start, and the most that is saved up."""


class WarmUpBudget:
    """Limits the rate of warm-up steps; a ring that forms later gets no budget of its own.

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
