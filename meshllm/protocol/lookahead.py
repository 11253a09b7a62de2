"""How many tokens to guess before a trip round the ring; knows nothing about how one guesses.

Theory of operation: a step of G guesses, each right with probability a when those before it are,
gives (1 - a**(G + 1)) / (1 - a) tokens (Leviathan et al., 2023, equation 1) and takes as long as
1 + G rows take, and what the guesses themselves take. All three are measured while the ring works:
a for each confidence of a drafter, the time of a step for each number of rows, the time of a guess
for each drafter, looks that led to none included. The G with the most tokens per second is taken,
which may be none. A session begins with what those before it learnt, and trusts itself more with
every guess. What has not been tried for long is tried again, as texts and rings change; a drafter
that takes time is not even looked at in between.
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
_FAITH = 2.0  # guesses as which the ring's acceptance counts in a new session, at most
_FIRST = 4  # guesses at most in a new ring; twice as many each time that all were right
_DECAY = 0.9  # of what a session learnt, per guess: the last ten count most
_SLOW_DECAY = 0.95  # the same of what a ring learnt, from texts of many kinds
_SLOPE = 0.02  # of the time of one row, per further row, until it is measured
_STEEP = 1.0  # the same where rows are computed one by one
_MEMORY = 0.2  # of a new time in the mean
_JUMP = 2.0  # a time is counted as at most so many times the mean: others use the machine too
_REST = 64  # tokens without a guess until one is tried, small
_TRIAL = 2
_PATIENCE = 4  # looks that led to no guess, until there is no look before the next trial


class StepTimes:
    """What a step of so many rows takes in one ring, in seconds; shared by its sessions."""

    def __init__(self, *, together: bool = True) -> None:
        """Know nothing yet but whether rows are computed ``together`` or one by one."""
        self._slope = _SLOPE if together else _STEEP
        self._means: dict[int, float] = {}

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


class Acceptance:
    """Which share of the guesses was right, by confidence; what is old fades."""

    def __init__(self, ring: "Acceptance | None" = None) -> None:
        """Count for a ring; with one, for a session that begins with what the ring saw."""
        self._decay = _SLOW_DECAY
        self._tried = [1.0 for _ in _PRIOR]
        self._right = list(_PRIOR)
        if ring:
            self._decay = _DECAY
            self._tried = [min(tried, _FAITH) for tried in ring._tried]
            self._right = [ring.share(at) * tried for at, tried in enumerate(self._tried)]

    def share(self, confidence: int) -> float:
        """Tell the share at this confidence."""
        return self._right[confidence] / self._tried[confidence]

    def note(self, confidence: int, tried: int, right: int) -> None:
        """Count guesses of which the first ``right`` ones were right."""
        faded = self._decay**tried
        self._right[confidence] = self._right[confidence] * faded + right
        self._tried[confidence] = self._tried[confidence] * faded + tried


class Experience:
    """What the sessions of one ring have learnt of one drafter."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self.acceptance = Acceptance()
        self.is_known = False
        """Whether any guess was checked."""
        self.rested = _REST
        """Steps without a guess of the session that spoke last; at first, one is due."""
        self.vain = 0
        """Looks of it that led to none, one after the other."""
        self._seconds, self._guesses = 0.0, 1.0

    @property
    def price(self) -> float:
        """Seconds of one guess, looks in vain included."""
        return self._seconds / max(self._guesses, 1.0)

    def pay(self, guesses: int, seconds: float) -> None:
        """Count what a look took, and the guesses that it led to."""
        self._seconds = self._seconds * _DECAY + seconds
        self._guesses = self._guesses * _DECAY + guesses


class Lookahead:
    """Chooses for one session and one drafter."""

    def __init__(self, times: StepTimes, ring: Experience | None = None) -> None:
        """Begin with what the ring learnt, which learns from this session."""
        self._times = times
        self._ring = ring = ring or Experience()
        self._own = Acceptance(ring.acceptance)
        self._most = inf if ring.is_known else _FIRST
        self._rested, self._vain = ring.rested, ring.vain

    @property
    def is_resting(self) -> bool:
        """Whether a look, if it takes time, is not worth it now."""
        return self._vain >= _PATIENCE and self._rested < _REST

    def choose(self, confidence: int, room: int) -> int:
        """Say how many tokens to guess, ``room`` at most."""
        allowed = [guesses for guesses in GUESSES if guesses <= min(room, self._most)]
        best = max(allowed, key=lambda guesses: self._gain(confidence, guesses))
        self._vain = 0 if best else self._vain + 1
        if best == 0 and self._rested >= _REST:
            best = max(guesses for guesses in allowed if guesses <= _TRIAL)
        self._ring.vain = self._vain
        return best

    def note(self, confidence: int, guesses: int, right: int) -> None:
        """Count a step with so many guesses, of which the first ``right`` ones were right."""
        self._rested = 0 if guesses else self._rested + 1
        self._ring.rested = self._rested
        if not guesses:
            return
        # Once a guess was wrong, what is measured is enough.
        self._most = max(self._most, 2 * guesses) if right == guesses else inf
        self._ring.vain = self._vain = 0 if right else self._vain
        self._ring.is_known = True
        for acceptance in (self._own, self._ring.acceptance):
            acceptance.note(confidence, min(right + 1, guesses), right)

    def _gain(self, confidence: int, guesses: int) -> float:
        """Estimate tokens per second."""
        share = self._own.share(confidence)
        tokens = sum(share**index for index in range(guesses + 1))
        seconds = self._times.of(1 + guesses) + guesses * self._ring.price
        return tokens / seconds if seconds else inf
