"""How many tokens to guess before a trip round the ring; knows nothing about how one guesses.

Theory of operation: a step of G guesses, each right with probability a when those before it are,
gives (1 - a**(G + 1)) / (1 - a) tokens (Leviathan et al., 2023, equation 1) and takes as long as
1 + G rows take. Both are measured while the ring works: a for each confidence of the drafter, the
time for each number of rows. The G with the most tokens per second is taken, which may be none.
What has not been tried for long is tried again, as texts and rings change.
"""

from bisect import bisect_left
from math import inf

GUESSES = (0, 1, 2, 4, 8, 16)
"""What is chosen from: few numbers, so that each is measured soon."""
STEPS = tuple(1 + guesses for guesses in GUESSES if guesses)
"""Rows of a step with guesses."""
MAX_CONFIDENCE = 3
"""Of a drafter in its next guess, from 0 on."""
MAX_STEP_ROWS = max(STEPS)

_PRIOR = (0.3, 0.5, 0.7, 0.8)  # acceptance by confidence, until it is measured
_FIRST = 4  # guesses at most in a new session; twice as many each time that all were right
_DECAY = 0.9  # of what was learnt, per guess: the last ten count most
_SLOPE = 0.02  # of the time of one row, per further row, until it is measured
_STEEP = 1.0  # the same where rows are computed one by one
_MEMORY = 0.2  # of a new time in the mean
_JUMP = 2.0  # a time is counted as at most so many times the mean: others use the machine too
_REST = 64  # tokens without a guess until one is tried, small
_TRIAL = 2


class StepTimes:
    """What a step of so many rows takes in one ring, in seconds; shared by its sessions."""

    def __init__(self, *, together: bool = True) -> None:
        """Know nothing yet but whether rows are computed ``together`` or one by one."""
        self._slope = _SLOPE if together else _STEEP
        self._means: dict[int, float] = {}

    @property
    def is_known(self) -> bool:
        """Whether any step of several rows was measured."""
        return any(rows > 1 for rows in self._means)

    def note(self, rows: int, seconds: float) -> None:
        """Count a step."""
        mean = self._means.get(rows)
        if mean is None:
            self._means[rows] = seconds
        else:
            counted = min(max(seconds, mean / _JUMP), mean * _JUMP)
            self._means[rows] = mean + _MEMORY * (counted - mean)

    def of(self, rows: int) -> float:
        """Estimate a step from what was measured of fewer rows and of more."""
        means = self._means or {1: 1.0}
        known = sorted(means)
        at = bisect_left(known, rows)
        if at < len(known) and known[at] == rows:
            return means[rows]
        if at == 0:
            return means[known[0]] / (1 + self._slope * (known[0] - rows))
        slope = means[known[0]] * self._slope
        if len(known) > 1:  # between the nearest two, or as it was between the last
            low, high = known[at - 1 : at + 1] if at < len(known) else known[-2:]
            slope = max(0.0, (means[high] - means[low]) / (high - low))
        return means[known[at - 1]] + slope * (rows - known[at - 1])


class Lookahead:
    """Chooses for one session."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._right = list(_PRIOR)
        self._tried = [1.0 for _ in _PRIOR]
        self._rested = 0 if times.is_known else _REST  # a first try, unless others made it
        self._most = float(_FIRST)

    def choose(self, confidence: int, room: int) -> int:
        """Say how many tokens to guess, ``room`` at most."""
        allowed = [guesses for guesses in GUESSES if guesses <= min(room, self._most)]
        best = max(allowed, key=lambda guesses: self._gain(confidence, guesses))
        if best == 0 and self._rested >= _REST:
            best = max(guesses for guesses in allowed if guesses <= _TRIAL)
        return best

    def note(self, confidence: int, guesses: int, right: int, seconds: float | None) -> None:
        """Count a step with so many guesses, of which the first ``right`` ones were right."""
        self._rested = 0 if guesses else self._rested + 1
        if guesses:  # once a guess was wrong, what is measured is enough
            self._most = max(self._most, 2 * guesses) if right == guesses else inf
        tried = min(right + 1, guesses)
        faded = _DECAY**tried
        self._right[confidence] = self._right[confidence] * faded + right
        self._tried[confidence] = self._tried[confidence] * faded + tried
        if seconds is not None:
            self._times.note(1 + guesses, seconds)

    def _gain(self, confidence: int, guesses: int) -> float:
        """Estimate tokens per second."""
        share = self._right[confidence] / self._tried[confidence]
        tokens = sum(share**index for index in range(guesses + 1))
        seconds = self._times.of(1 + guesses)
        return tokens / seconds if seconds else inf
