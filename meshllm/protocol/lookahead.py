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
MAX_CONFIDENCE = 4
"""Of a drafter in its next guess, from 0 on."""

_PRIOR = (0.3, 0.5, 0.7, 0.8, 0.9)  # acceptance by confidence, until it is measured
_DECAY = 0.9  # of what was learnt, per guess: the last ten count most
_SLOPE = 0.02  # of the time of one row, per further row, until it is measured
_MEMORY = 0.2  # of a new time in the mean
_JUMP = 2.0  # a time is counted as at most so many times the mean: others use the machine too
_REST = 64  # tokens without a guess until one is tried, small
_TRIAL = 2


class StepTimes:
    """What a step of so many rows takes in one ring, in seconds; shared by its sessions."""

    def __init__(self) -> None:
        self._begun: set[int] = set()
        self._means: dict[int, float] = {}

    def note(self, rows: int, seconds: float) -> None:
        """Count a step, but the first of its kind: there kernels are tried and made."""
        mean = self._means.get(rows)
        if rows not in self._begun:
            self._begun.add(rows)
        elif mean is None:
            self._means[rows] = seconds
        else:
            counted = min(max(seconds, mean / _JUMP), mean * _JUMP)
            self._means[rows] = mean + _MEMORY * (counted - mean)

    def of(self, rows: int) -> float:
        """Estimate a step: between what was measured, or a little more than the nearest below."""
        means = self._means or {1: 1.0}
        known = sorted(means)
        at = bisect_left(known, rows)
        if at < len(known) and known[at] == rows:
            return means[rows]
        if at == 0:
            return means[known[0]]
        low = known[at - 1]
        if at == len(known):
            return means[low] + means[known[0]] * _SLOPE * (rows - low)
        high = known[at]
        return means[low] + (means[high] - means[low]) * (rows - low) / (high - low)


class Lookahead:
    """Chooses for one session."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._right = [prior * 2 for prior in _PRIOR]
        self._tried = [2.0 for _ in _PRIOR]
        self._rested = 0

    def choose(self, confidence: int, room: int) -> int:
        """Say how many tokens to guess, ``room`` at most."""
        allowed = [guesses for guesses in GUESSES if guesses <= room]
        best = max(allowed, key=lambda guesses: self._gain(confidence, guesses))
        if best == 0 and self._rested >= _REST:
            best = max(guesses for guesses in allowed if guesses <= _TRIAL)
        return best

    def note(self, confidence: int, guesses: int, right: int, seconds: float | None) -> None:
        """Count a step with so many guesses, of which the first ``right`` ones were right."""
        self._rested = 0 if guesses else self._rested + 1
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
