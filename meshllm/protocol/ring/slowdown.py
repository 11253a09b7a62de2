"""How much slower than planned a rank computes the steps of its layers.

Theory of operation: a machine is measured once, and may do something else later. Single steps vary
with the time slices of other programs, so the times of many are added up to a window, and only what
`WINDOWS` windows in a row agree on counts: the least of them if all are slower than planned, else
the greatest, if none is. Steps that are planned to be shorter than `MIN_S` do not count, as their
overhead is not planned; nor do the first ones of each number of rows, which are recorded, and those
after so many rows that attention matters, whose plan is a rough bound.
"""

from collections import Counter

from meshllm.protocol.planning.chunking import RankTimes
from meshllm.protocol.ring.hang import FIRST_STEPS

MIN_S = 2e-3  # s of a step
WINDOW_S = 5.0  # s of steps,
WINDOW_STEPS = 32  # and at least so many
WINDOWS = 3
RECENT_S = 300.0  # s in which all windows happen
MAX_ATTENTION = 0.25  # of a step


class Slowdown:
    """Compares the steps of one rank with their planned times; read on another thread."""

    def __init__(self) -> None:
        """Know no times yet."""
        self._counts = Counter[int]()  # steps, by their number of rows
        self._since = 0.0  # when the window began
        self._window = 0, 0.0, 0.0  # steps, their planned and their real seconds
        self._windows: tuple[tuple[float, float], ...] = ()  # since when, and the ratio
        self._rank: RankTimes | None = None
        self._head_s = 0.0

    def plan(self, rank: RankTimes | None, head_s: float = 0.0) -> None:
        """Expect these times from now on, ``head_s`` for the head if the steps have it."""
        self._rank, self._head_s = rank, head_s
        self._counts.clear()
        self._window, self._windows = (0, 0.0, 0.0), ()

    def note(self, rows: int, before: int, took_s: float, now: float) -> None:
        """Count a step of ``rows`` rows after at most ``before`` others."""
        self._counts[rows] += 1
        if self._rank is None or self._counts[rows] <= FIRST_STEPS:
            return
        layers_s = self._rank.compute_s(rows)
        attention_s = self._rank.compute_s(rows, before) - layers_s
        if layers_s < MIN_S or attention_s > MAX_ATTENTION * layers_s:
            return
        if not self._window[0]:
            self._since = now
        steps, planned_s, all_s = self._window
        offer = self._rank.offer
        head_s = self._head_s * offer.layer_seconds(rows) / offer.layer_seconds(1)
        self._window = steps + 1, planned_s + layers_s + head_s, all_s + took_s
        self._close(now)

    def take_layer_s(self) -> float | None:
        """Return how long a layer takes for one row as steps show it, once; None if unknown."""
        windows, rank = self._windows, self._rank
        if len(windows) < WINDOWS or rank is None:
            return None
        self._windows = ()
        ratios = [ratio for _, ratio in windows]
        ratio = max(1.0, min(ratios)) if max(ratios) > 1 else max(ratios)
        return ratio * rank.offer.layer_s[0][1]

    def _close(self, now: float) -> None:
        steps, planned_s, all_s = self._window
        if steps >= WINDOW_STEPS and all_s >= WINDOW_S:
            self._windows = (*self._windows, (self._since, all_s / planned_s))[-WINDOWS:]
            self._window = 0, 0.0, 0.0
        self._windows = tuple(each for each in self._windows if each[0] >= now - RECENT_S)
