"""Draft length of speculative decoding, and the number of steps in flight.

Theory of operation: a step with G draft tokens (guesses), each accepted with probability a if those
before it are, gives (1 - a**(G + 1)) / (1 - a) tokens (Leviathan et al., 2023, equation 1). It
takes the time of 1 + G rows plus the time of drafting. All three are measured while the ring works:
a per confidence of a drafter, step time per number of rows, drafting time per token of a drafter,
including attempts that gave none. The G with the most tokens per second is chosen, which may be 0.
A session starts with the statistics of earlier ones and gives its own more weight with every draft
token. A G that was not tried for long is tried again, as texts and rings change, and old step times
are replaced by an estimate from other numbers of rows; between trials, a drafter that takes time is
not even queried.

If round trips are long, further steps of draft tokens may follow one that is in flight. A run lasts
until the first rejection, for 1 / (1 - a) tokens. After its first step p / (1 - p) more are fully
accepted, with p = a**(G + 1), as the token after a step has to be the first one of the next.
One at a time, each takes a round trip of T seconds. With D in flight, one returns every T / D
seconds, or as fast as the slowest rank or link lets them pass: their interval. So a run takes

    T + max(interval, T / D) * p / (1 - p) + interval

seconds, the last interval for the work wasted after a rejection; for one step at a time it is the
equation above. T and the interval with several steps in flight are measured relative to a trip
that has the ring to itself, and decay to their prior while single steps run. If ranks share a
processor, the first of D steps is delayed by the work on the others, which is charged to those. The
G and D with the highest throughput are chosen; several steps only if they are worth what they
waste.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter

GUESSES = (0, 1, 2, 4, 8, 11, 16)
"""Draft lengths to choose from: few, so that each is measured soon.

With AVX-512, 12 rows take one pass over the weights, see `meshllm.model.kernels.gemm_bf16`."""
STEPS = tuple(1 + guesses for guesses in GUESSES if guesses)
"""Rows of a step with draft tokens."""
MAX_CONFIDENCE = 3
"""Of a drafter in its next token; the lowest is 0."""
MAX_STEP_ROWS = max(STEPS)
DEPTHS = (1, 2, 4, 8)
"""Numbers of steps in flight to choose from; a stage queues twice as many."""
MAX_DEPTH = max(DEPTHS)

_PRIOR = (0.3, 0.5, 0.7, 0.8)  # acceptance rate by confidence, until it is measured
_FAITH = 2.0  # weight of the ring's acceptance rate in a new session, in draft tokens, at most
_FIRST = 4.0  # draft tokens at most in a new ring; doubled each time that all were accepted
_DECAY = 0.9  # of a session's statistics, per draft token: the last ten count most
_LONG_DECAY = 0.99  # the same for several steps in flight, which hold a hundred tokens or more
_SLOW_DECAY = 0.95  # the same of a ring's statistics, from texts of many kinds
_SLOPE = 0.02  # time of each further row relative to the first, until it is measured
_STEEP = 1.0  # the same if rows are computed one by one
_MEMORY = 0.2  # weight of a new time in the moving average
_FRESH = 256  # steps after which a time that was not measured again is dropped
_JUMP = 2.0  # a time is clipped to this factor of the mean: other programs use the machine too
_REST = 64  # tokens without a draft until a small one is tried
_TRIAL = 2
_PATIENCE = 4  # queries that led to no draft, until there is none before the next trial
_LEAST = 0.05  # acceptance rate below which drafts are not worth their time, if they take any
_CERTAIN = 0.99  # acceptance rate at most: no text repeats itself without end
_WASTE = 1.1  # speed-up that several steps must give: wasted work costs other people's power
_DRIFT = 0.01  # of pipelined times towards their prior, per step that had the ring to itself


@dataclass(frozen=True, slots=True)
class Window:
    """Draft tokens and steps in flight at a time."""

    guesses: int
    """Draft tokens of a step, after its first token."""
    depth: int = 1
    """Steps in flight."""

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return 1 + self.guesses

    @property
    def length(self) -> int:
        """Draft tokens of all steps: only the first token of the first step is known."""
        return self.depth * self.rows - 1

    def cut(self, tokens: Sequence[int], *, is_open: bool) -> tuple[tuple[int, ...], ...]:
        """Split draft tokens into steps, the last ones shorter if there are few.

        ``is_open`` means that a known token precedes the first ones.
        """
        steps: list[tuple[int, ...]] = []
        at = -1 if is_open else 0
        while at + 1 < len(tokens) and (self.depth > 1 or not steps):
            rows = max(each for each in STEPS if each <= min(self.rows, len(tokens) - at))
            steps.append(tuple(tokens[max(at, 0) : at + rows]))
            at += rows
        return tuple(steps)


class StepTimes:
    """Step times of one ring in seconds, by number of rows; shared by its sessions."""

    def __init__(self, *, together: bool = True, ring: int = 2) -> None:
        """Start with a prior: whether rows are computed ``together``, and the number of ranks."""
        self._slope = _SLOPE if together else _STEEP
        self._means: dict[int, float] = {}
        self._steps = 0
        self._noted: dict[int, int] = {}  # step of the last measurement, by rows
        self._ring = ring
        self._first: float | None = None  # relative to `of`, with several steps in flight
        self._pulse: float | None = None

    def note(self, rows: int, seconds: float) -> None:
        """Record a step that had the ring to itself."""
        self._steps += 1
        self._noted[rows] = self._steps
        means = self._means | {rows: _blend(self._means.get(rows), seconds)}
        least, oldest = min(means), self._steps - _FRESH
        # The fewest rows are not dropped: if they seem too fast they are tried, see `of`.
        self._means = {at: means[at] for at in means if at == least or self._noted[at] > oldest}
        if self._first:
            self._first += _DRIFT * (1 - self._first)
        if self._pulse:
            self._pulse += _DRIFT * (1 / self._ring - self._pulse)

    def note_first(self, rows: int, seconds: float) -> None:
        """Record the round trip of the first of several steps sent back to back."""
        if mean := self.of(rows):
            self._first = _blend(self._first, seconds / mean)

    def note_next(self, rows: int, seconds: float) -> None:
        """Record how long after the previous one the next of them returned."""
        if mean := self.of(rows):
            self._pulse = _blend(self._pulse, seconds / mean)

    def first(self, rows: int) -> float:
        """Estimate the round trip of a step that others follow."""
        return (self._first or 1) * self.of(rows)

    def pulse(self, rows: int) -> float:
        """Estimate the interval between the returns of two such steps."""
        return (self._pulse or 1 / self._ring) * self.of(rows)

    def of(self, rows: int) -> float:
        """Estimate the time of a step from measurements of fewer and of more rows.

        Fewer rows take no longer, which counts where only steps of many rows were measured.
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
        if len(known) > 1:  # interpolate the nearest two, or extrapolate the last two
            low, high = known[at - 1 : at + 1] if at < len(known) else known[-2:]
            slope = max(0.0, (means[high] - means[low]) / (high - low))
        return means[known[at - 1]] + slope * (rows - known[at - 1])


def _blend(mean: float | None, value: float) -> float:
    if not mean:
        return value
    counted = min(max(value, mean / _JUMP), mean * _JUMP)
    return mean + _MEMORY * (counted - mean)


class Acceptance:
    """Acceptance rate of draft tokens, by confidence; old samples decay."""

    def __init__(self, ring: "Acceptance | None" = None, decay: float = _DECAY) -> None:
        """Count for a ring or, if one is given, for a session that starts with its rates."""
        self._decay = _SLOW_DECAY
        self._tried = [1.0 for _ in _PRIOR]
        self._right = list(_PRIOR)
        if ring:
            self._decay = decay
            self._tried = [min(tried, _FAITH) for tried in ring._tried]
            self._right = [ring.share(at) * tried for at, tried in enumerate(self._tried)]

    def share(self, confidence: int) -> float:
        """Return the acceptance rate at this confidence."""
        return self._right[confidence] / self._tried[confidence]

    def note(self, confidence: int, tried: int, right: int) -> None:
        """Count ``tried`` draft tokens, of which the first ``right`` were accepted."""
        faded = self._decay**tried
        self._right[confidence] = self._right[confidence] * faded + right
        self._tried[confidence] = self._tried[confidence] * faded + tried


class Experience:
    """Statistics of one drafter over all sessions of one ring."""

    def __init__(self) -> None:
        """Start empty."""
        self.acceptance = Acceptance()
        self.is_known = False
        """Whether any draft token was verified."""
        self.rested = _REST
        """Steps without a draft of the session that reported last; at first, one is due."""
        self.vain = 0
        """Consecutive queries of that session that led to no draft."""
        self._seconds, self._guesses = 0.0, 1.0

    @property
    def price(self) -> float:
        """Seconds per draft token, fruitless queries included."""
        return self._seconds / max(self._guesses, 1.0)

    def pay(self, guesses: int, seconds: float) -> None:
        """Record the time of a query, and the draft tokens that it gave."""
        self._seconds = self._seconds * _DECAY + seconds
        self._guesses = self._guesses * _DECAY + guesses


class Lookahead:
    """Chooses the `Window` of one session and one drafter."""

    def __init__(self, times: StepTimes, ring: Experience | None = None) -> None:
        """Start with the statistics of the ring, which this session updates."""
        self._times = times
        self._ring = ring = ring or Experience()
        self._own = Acceptance(ring.acceptance)
        self._long = Acceptance(ring.acceptance, _LONG_DECAY)
        self._most = inf if ring.is_known else _FIRST
        self._rested, self._vain = ring.rested, ring.vain

    @property
    def is_resting(self) -> bool:
        """Whether a query, if it takes time, is not worth it now."""
        return self._vain >= _PATIENCE and self._rested < _REST

    def choose(self, confidence: int, room: int, *, depth: int = 1, reach: float = inf) -> Window:
        """Choose the draft length, ``room`` at most, and the number of steps in flight.

        There are at most ``depth`` steps and, if several, ``reach`` draft tokens in all of them.
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
        """Record a step with ``guesses`` draft tokens, the first ``right`` of them accepted."""
        self._rested = 0 if guesses else self._rested + 1
        self._ring.rested = self._rested
        if not guesses:
            return
        # After the first rejection, the measured rate alone limits the draft length.
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
            pulse += max(0.0, first - trip) / (window.depth - 1)  # delay by the other steps
            seconds = _WASTE * (first + max(pulse, first / window.depth) * further + pulse)
        return 1 / (1 - share) / seconds if seconds else inf
