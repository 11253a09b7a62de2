"""How many times slower than planned a rank computes its steps.

Theory of operation: a machine is measured once, and may do something else later. Single steps vary
with the time slices of other programs, so the times of many are added up to a window, and only what
`WINDOWS` windows in a row agree on counts: the least of them if all are slower than planned, else
the greatest, if none is.
"""

WINDOW_S = 5.0  # s of steps,
WINDOW_STEPS = 32  # and at least so many
WINDOWS = 3


class Slowdown:
    """Compares the steps of one rank with their planned times; read on another thread."""

    def __init__(self) -> None:
        self._ratios: tuple[float, ...] = ()
        self._steps, self._planned_s, self._took_s = 0, 0.0, 0.0

    def note(self, planned_s: float, took_s: float) -> None:
        """Count a step."""
        self._steps += 1
        self._planned_s += planned_s
        self._took_s += took_s
        if self._steps >= WINDOW_STEPS and self._took_s >= WINDOW_S:
            self._ratios = (*self._ratios, self._took_s / self._planned_s)[-WINDOWS:]
            self._steps, self._planned_s, self._took_s = 0, 0.0, 0.0

    def take(self) -> float | None:
        """Return how many times as long as planned steps take, once; None until that is known."""
        ratios = self._ratios
        if len(ratios) < WINDOWS:
            return None
        self._ratios = ()
        return max(1.0, min(ratios)) if max(ratios) > 1 else max(ratios)
