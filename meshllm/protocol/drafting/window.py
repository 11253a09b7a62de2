"""How many tokens to guess, in how many steps at a time.

Theory of operation: a step of G guesses, each right with probability a when those before it are,
gives (1 - a**(G + 1)) / (1 - a) tokens (Leviathan et al., 2023, equation 1) and takes as long as
1 + G rows take, and what the guesses themselves take. All three are measured while the ring works:
a for each confidence of a drafter, the time of a step for each number of rows, the time of a guess
for each drafter, looks that led to none included. The G with the most tokens per second is taken,
which may be none. A session begins with what those before it learnt, and trusts itself more with
every guess. What has not been tried for long is tried again, as texts and rings change, and times
of steps that have become old are what those of others make likely; a drafter that takes time is not
even looked at in between.

Where trips take long, further steps of guesses may follow one that is on its way. A text goes on
until a guess is wrong, for 1 / (1 - a) tokens. Behind the first step of these p / (1 - p) more are
all right, where p = a**(G + 1), as the token behind a step has to be the first one of the next.
One at a time each takes a trip of T seconds. Of D steps in flight one is back every T / D seconds,
or as fast as the slowest rank or way lets them pass, which is their pulse. So a run takes

    T + max(pulse, T / D) * p / (1 - p) + pulse

seconds, the last pulse for what is computed in vain after a wrong guess; for one step at a time it
is the equation above. What T and the pulse are with several steps in flight is measured as parts of
a trip that has the ring to itself, and fades to what is likely while there are none. Where ranks
share a processor, the first of D steps is late by what was computed of the others meanwhile, which
is counted as theirs. The G and D that give the most are taken; several steps only where they are
worth what they waste.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter

GUESSES = (0, 1, 2, 4, 8, 11, 16)
"""What is chosen from: few numbers, so that each is measured soon.

With AVX-512, 12 rows are one pass over the weights, see `meshllm.model.kernels.gemm_bf16`."""
STEPS = tuple(1 + guesses for guesses in GUESSES if guesses)
"""Rows of a step with guesses."""
MAX_CONFIDENCE = 3
"""Of a drafter in its next guess, from 0 on."""
MAX_STEP_ROWS = max(STEPS)
DEPTHS = (1, 2, 4, 8)
"""Steps in flight that are chosen from; a stage lets twice as many wait."""
MAX_DEPTH = max(DEPTHS)

_PRIOR = (0.3, 0.5, 0.7, 0.8)  # acceptance by confidence, until it is measured
_FAITH = 2.0  # guesses as which the ring's acceptance counts in a new session, at most
_FIRST = 4.0  # guesses at most in a new ring; twice as many each time that all were right
_DECAY = 0.9  # of what a session learnt, per guess: the last ten count most
_LONG_DECAY = 0.99  # of what it trusts many steps to: all of their guesses count, a hundred or more
_SLOW_DECAY = 0.95  # the same of what a ring learnt, from texts of many kinds
_SLOPE = 0.02  # of the time of one row, per further row, until it is measured
_STEEP = 1.0  # the same where rows are computed one by one
_MEMORY = 0.2  # of a new time in the mean
_FRESH = 256  # steps until what others of so many rows took is forgotten
_JUMP = 2.0  # a time is counted as at most so many times the mean: others use the machine too
_REST = 64  # tokens without a guess until one is tried, small
_TRIAL = 2
_PATIENCE = 4  # looks that led to no guess, until there is no look before the next trial
_LEAST = 0.05  # acceptance below which guesses are worth less than what they take, if anything
_CERTAIN = 0.99  # acceptance at most: no text repeats itself for ever
_WASTE = 1.1  # times as fast several steps have to be: what is computed in vain is others' power
_DRIFT = 0.01  # to what is likely, of what is known of several steps in flight, per trip of one


@dataclass(frozen=True, slots=True)
class Window:
    """What may be in flight at a time."""

    guesses: int
    """Of a step, behind its first token."""
    depth: int = 1
    """Steps."""

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return 1 + self.guesses

    @property
    def length(self) -> int:
        """Guesses of all steps: only the first token of the first one is known."""
        return self.depth * self.rows - 1

    def cut(self, tokens: Sequence[int], *, is_open: bool) -> tuple[tuple[int, ...], ...]:
        """Cut guesses into steps, the last ones shorter where there are few.

        ``is_open`` is that the first ones go with a token that is known.
        """
        steps: list[tuple[int, ...]] = []
        at = -1 if is_open else 0
        while at + 1 < len(tokens) and (self.depth > 1 or not steps):
            rows = max(each for each in STEPS if each <= min(self.rows, len(tokens) - at))
            steps.append(tuple(tokens[max(at, 0) : at + rows]))
            at += rows
        return tuple(steps)


class StepTimes:
    """What a step of so many rows takes in one ring, in seconds; shared by its sessions."""

    def __init__(self, *, together: bool = True, ring: int = 2) -> None:
        """Know nothing yet but whether rows are computed ``together``, and how many ranks are."""
        self._slope = _SLOPE if together else _STEEP
        self._means: dict[int, float] = {}
        self._steps = 0
        self._noted: dict[int, int] = {}  # at which step, by rows
        self._ring = ring
        self._first: float | None = None  # times `of`, with several steps in flight
        self._pulse: float | None = None

    def note(self, rows: int, seconds: float) -> None:
        """Count a step that had the ring to itself."""
        self._steps += 1
        self._noted[rows] = self._steps
        means = self._means | {rows: _blend(self._means.get(rows), seconds)}
        least, oldest = min(means), self._steps - _FRESH
        # The fewest are not forgotten: where they seem too fast they are tried, see `of`.
        self._means = {at: means[at] for at in means if at == least or self._noted[at] > oldest}
        if self._first:
            self._first += _DRIFT * (1 - self._first)
        if self._pulse:
            self._pulse += _DRIFT * (1 / self._ring - self._pulse)

    def note_first(self, rows: int, seconds: float) -> None:
        """Count the first of several steps that left one behind the other."""
        if mean := self.of(rows):
            self._first = _blend(self._first, seconds / mean)

    def note_next(self, rows: int, seconds: float) -> None:
        """Count how long after the one before it the next of them was back."""
        if mean := self.of(rows):
            self._pulse = _blend(self._pulse, seconds / mean)

    def first(self, rows: int) -> float:
        """Estimate the trip of a step that others follow."""
        return (self._first or 1) * self.of(rows)

    def pulse(self, rows: int) -> float:
        """Estimate how long after a step the one behind it is back."""
        return (self._pulse or 1 / self._ring) * self.of(rows)

    def of(self, rows: int) -> float:
        """Estimate a step from what was measured of fewer rows and of more.

        One of fewer rows takes no longer: where several are always guessed, it is not measured.
        """
        more = (mean for at, mean in self._means.items() if at > rows)
        return min([self._likely(rows), *more])

    def _likely(self, rows: int) -> float:
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


def _blend(mean: float | None, value: float) -> float:
    if not mean:
        return value
    counted = min(max(value, mean / _JUMP), mean * _JUMP)
    return mean + _MEMORY * (counted - mean)


class Acceptance:
    """Which share of the guesses was right, by confidence; what is old fades."""

    def __init__(self, ring: "Acceptance | None" = None, decay: float = _DECAY) -> None:
        """Count for a ring; with one, for a session that begins with what the ring saw."""
        self._decay = _SLOW_DECAY
        self._tried = [1.0 for _ in _PRIOR]
        self._right = list(_PRIOR)
        if ring:
            self._decay = decay
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
        self._long = Acceptance(ring.acceptance, _LONG_DECAY)
        self._most = inf if ring.is_known else _FIRST
        self._rested, self._vain = ring.rested, ring.vain

    @property
    def is_resting(self) -> bool:
        """Whether a look, if it takes time, is not worth it now."""
        return self._vain >= _PATIENCE and self._rested < _REST

    def choose(self, confidence: int, room: int, *, depth: int = 1, reach: float = inf) -> Window:
        """Say how many tokens to guess, ``room`` at most, in how many steps at a time.

        There are ``depth`` of them at most, and with several ``reach`` guesses at most in all.
        """
        allowed = [
            Window(guesses, steps)
            for guesses in GUESSES
            for steps in (DEPTHS if guesses else (1,))
            if guesses <= room and steps <= depth and guesses * steps <= self._most
        ]
        alone = [each for each in allowed if each.depth == 1]
        many = [each for each in allowed if each.depth > 1 and each.length <= reach]
        share = self._own.share(confidence)
        best = alone[0]
        if share >= _LEAST:
            best = max(alone, key=lambda window: self._gain(share, window))
        else:
            many = []
        self._vain = 0 if best.guesses else self._vain + 1
        if best.guesses == 0 and self._rested >= _REST:
            best = max(
                (each for each in alone if each.guesses <= _TRIAL), key=attrgetter("guesses")
            )
        self._ring.vain = self._vain
        share = min(share, self._long.share(confidence))
        return max([best, *many], key=lambda window: self._gain(share, window))

    def note(self, confidence: int, guesses: int, right: int) -> None:
        """Count a step with so many guesses, of which the first ``right`` ones were right."""
        self._rested = 0 if guesses else self._rested + 1
        self._ring.rested = self._rested
        if not guesses:
            return
        # Once a guess was wrong, what is measured is enough.
        self._most = 2 * self._most if right == guesses else inf
        self._ring.vain = self._vain = 0 if right else self._vain
        self._ring.is_known = True
        for acceptance in (self._own, self._long, self._ring.acceptance):
            acceptance.note(confidence, min(right + 1, guesses), right)

    def _gain(self, share: float, window: Window) -> float:
        """Estimate tokens per second."""
        share = min(share, _CERTAIN)
        passed = share**window.rows
        further = passed / (1 - passed)
        trip = self._times.of(window.rows) + window.guesses * self._ring.price
        seconds = trip * (1 + further)
        if window.depth > 1:
            first, pulse = self._times.first(window.rows), self._times.pulse(window.rows)
            pulse += max(0.0, first - trip) / (window.depth - 1)  # what the others took from it
            seconds = _WASTE * (first + max(pulse, first / window.depth) * further + pulse)
        return 1 / (1 - share) / seconds if seconds else inf
