"""Draft length of speculative decoding, and the number of steps in flight.

Theory of operation: a step with G draft tokens, each accepted with probability a if those
before it are, gives (1 - a**(G + 1)) / (1 - a) tokens (Leviathan et al., 2023, equation 1). It
takes the time of 1 + G rows plus the time of drafting. All three are measured while the ring works:
a per confidence of a drafter, step time per number of rows, drafting time per token of a drafter,
including attempts that gave none. The G with the most tokens per second is chosen, which may be 0.
A session starts with the statistics of earlier ones and gives its own more weight with every draft
token. A G that was not tried for long is tried again, as texts and rings change, and old step times
are replaced by an estimate from other numbers of rows; between trials, a drafter that takes time is
not even queried.

Sessions that run together share each pass over the weights. What a draft of one costs is the time
that it takes from all of them, which none of them sees in its own steps. So steps are timed by the
rows of all sessions, and a draft length is judged by what it would cost if all chose it.

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

DRAFTS = (0, 1, 2, 4, 8, 11, 16)
"""Draft lengths to choose from: few, so that each is measured soon.

With AVX-512, 12 rows take one pass over the weights, see `meshllm.model.kernels.gemm_bf16`."""
STEPS = tuple(1 + drafts for drafts in DRAFTS if drafts)
"""Rows of a step with draft tokens."""
MAX_CONFIDENCE = 3
"""Of a drafter in its next token; the lowest is 0."""
MAX_STEP_ROWS = max(STEPS)
DEPTHS = (1, 2, 4, 8)
"""Numbers of steps in flight to choose from; a stage queues twice as many."""
MAX_DEPTH = max(DEPTHS)

_PRIOR = (0.3, 0.5, 0.7, 0.8)  # acceptance rate by confidence, until it is measured
_RING_WEIGHT = 2.0  # of the ring's acceptance rate in a new session, in draft tokens, at most
_FIRST_MAX = 4.0  # draft tokens at most in a new ring; doubled each time that all were accepted
_DECAY = 0.9  # of a session's statistics, per draft token: the last ten count most
_LONG_DECAY = 0.99  # the same for several steps in flight, which hold a hundred tokens or more
_SLOW_DECAY = 0.95  # the same of a ring's statistics, from texts of many kinds
_ROW_SLOPE = 0.02  # time of each further row relative to the first, until it is measured
_SERIAL_SLOPE = 1.0  # the same if rows are computed one by one
_NEW_WEIGHT = 0.2  # weight of a new time in the moving average
_MAX_AGE = 256  # steps after which a time that was not measured again is dropped
_CLIP = 2.0  # a time is clipped to this factor of the mean: other programs use the machine too
_TRIAL_EVERY = 64  # tokens without a draft until a small one is tried
_TRIAL_DRAFTS = 2
_MAX_FRUITLESS = 4  # fruitless queries, after which there are none until the next trial
_MIN_RATE = 0.05  # acceptance rate below which drafts are not worth their time, if they take any
_MAX_RATE = 0.99  # acceptance rate at most: no text repeats itself without end
_MIN_SPEEDUP = 1.1  # speed-up that several steps must give: wasted work costs other people's power
_DRIFT = 0.01  # of pipelined times towards their prior, per step that had the ring to itself


@dataclass(frozen=True, slots=True)
class DraftWindow:
    """Draft tokens and steps in flight at a time."""

    drafts: int
    """Draft tokens of a step, after its first token."""
    depth: int = 1
    """Steps in flight."""

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return 1 + self.drafts

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
        self._slope = _ROW_SLOPE if together else _SERIAL_SLOPE
        self._means: dict[int, float] = {}
        self._steps = 0
        self._noted: dict[int, int] = {}  # step of the last measurement, by rows
        self._ring = ring
        self._first: float | None = None  # relative to `of`, with several steps in flight
        self._interval: float | None = None

    def note(self, rows: int, seconds: float) -> None:
        """Record a step that followed no other; ``rows`` are those of all sessions together."""
        self._steps += 1
        self._noted[rows] = self._steps
        means = self._means | {rows: _blend(self._means.get(rows), seconds)}
        least, oldest = min(means), self._steps - _MAX_AGE
        # The fewest rows are not dropped: if they seem too fast they are tried, see `of`.
        self._means = {at: means[at] for at in means if at == least or self._noted[at] > oldest}
        if self._first:
            self._first += _DRIFT * (1 - self._first)
        if self._interval:
            self._interval += _DRIFT * (1 / self._ring - self._interval)

    def note_first(self, rows: int, seconds: float) -> None:
        """Record the round trip of the first of several steps sent back to back."""
        if mean := self.of(rows):
            self._first = _blend(self._first, seconds / mean)

    def note_interval(self, rows: int, seconds: float) -> None:
        """Record how long after the previous one the next of them returned."""
        if mean := self.of(rows):
            self._interval = _blend(self._interval, seconds / mean)

    def first(self, rows: int) -> float:
        """Estimate the round trip of a step that others follow."""
        return (self._first or 1) * self.of(rows)

    def interval(self, rows: int) -> float:
        """Estimate the interval between the returns of two such steps."""
        return (self._interval or 1 / self._ring) * self.of(rows)

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
    counted = min(max(value, mean / _CLIP), mean * _CLIP)
    return mean + _NEW_WEIGHT * (counted - mean)


class Acceptance:
    """Acceptance rate of draft tokens, by confidence; old samples decay."""

    def __init__(self, ring: "Acceptance | None" = None, decay: float = _DECAY) -> None:
        """Count for a ring or, if one is given, for a session that starts with its rates."""
        self._decay = _SLOW_DECAY
        self._tried = [1.0 for _ in _PRIOR]
        self._right = list(_PRIOR)
        if ring:
            self._decay = decay
            self._tried = [min(tried, _RING_WEIGHT) for tried in ring._tried]
            self._right = [ring.rate(at) * tried for at, tried in enumerate(self._tried)]

    def rate(self, confidence: int) -> float:
        """Return the acceptance rate at this confidence."""
        return self._right[confidence] / self._tried[confidence]

    def note(self, confidence: int, tried: int, right: int) -> None:
        """Count ``tried`` draft tokens, of which the first ``right`` were accepted."""
        faded = self._decay**tried
        self._right[confidence] = self._right[confidence] * faded + right
        self._tried[confidence] = self._tried[confidence] * faded + tried


class DrafterStats:
    """Statistics of one drafter over all sessions of one ring."""

    def __init__(self) -> None:
        """Start empty."""
        self.acceptance = Acceptance()
        self.is_known = False
        """Whether any draft token was verified."""
        self.undrafted = _TRIAL_EVERY
        """Steps without a draft of the session that reported last; at first, one is due."""
        self.fruitless = 0
        """Consecutive queries of that session that led to no draft."""
        self._seconds, self._drafts = 0.0, 1.0

    @property
    def token_s(self) -> float:
        """Drafting time per token, fruitless queries included."""
        return self._seconds / max(self._drafts, 1.0)

    def note_query(self, drafts: int, seconds: float) -> None:
        """Record the time of a query, and the draft tokens that it gave."""
        self._seconds = self._seconds * _DECAY + seconds
        self._drafts = self._drafts * _DECAY + drafts


class WindowChoice:
    """Chooses the `DraftWindow` of one session and one drafter."""

    def __init__(self, times: StepTimes, ring: DrafterStats | None = None) -> None:
        """Start with the statistics of the ring, which this session updates."""
        self._times = times
        self._ring = ring = ring or DrafterStats()
        self._own = Acceptance(ring.acceptance)
        self._long = Acceptance(ring.acceptance, _LONG_DECAY)
        self._most = inf if ring.is_known else _FIRST_MAX
        self._undrafted, self._fruitless = ring.undrafted, ring.fruitless

    @property
    def is_paused(self) -> bool:
        """Whether a query, if it takes time, is not worth it now."""
        return self._fruitless >= _MAX_FRUITLESS and self._undrafted < _TRIAL_EVERY

    def choose(
        self,
        confidence: int,
        room: int,
        *,
        depth: int = 1,
        max_drafts: float = inf,
        sessions: int = 1,
    ) -> DraftWindow:
        """Choose the draft length, ``room`` at most, and the number of steps in flight.

        There are at most ``depth`` steps and, if several, ``max_drafts`` draft tokens in all.
        ``sessions`` run together.
        """
        allowed = [
            DraftWindow(drafts, steps)
            for drafts in DRAFTS
            for steps in (DEPTHS if drafts else (1,))
            if drafts <= room and steps <= depth and drafts * steps <= self._most
        ]
        alone = [each for each in allowed if each.depth == 1]
        many = [each for each in allowed if each.depth > 1 and each.length <= max_drafts]
        rate = self._own.rate(confidence)
        best = alone[0]
        if rate >= _MIN_RATE:
            best = max(alone, key=lambda window: self._gain(rate, window, sessions))
        else:
            many = []
        self._fruitless = 0 if best.drafts else self._fruitless + 1
        if best.drafts == 0 and self._undrafted >= _TRIAL_EVERY:
            best = max(
                (each for each in alone if each.drafts <= _TRIAL_DRAFTS),
                key=attrgetter("drafts"),
            )
        self._ring.fruitless = self._fruitless
        rate = min(rate, self._long.rate(confidence))
        return max([best, *many], key=lambda window: self._gain(rate, window, sessions))

    def note(self, confidence: int, drafts: int, right: int) -> None:
        """Record a step with ``drafts`` draft tokens, the first ``right`` of them accepted."""
        self._undrafted = 0 if drafts else self._undrafted + 1
        self._ring.undrafted = self._undrafted
        if not drafts:
            return
        # After the first rejection, the measured rate alone limits the draft length.
        self._most = 2 * self._most if right == drafts else inf
        self._ring.fruitless = self._fruitless = 0 if right else self._fruitless
        self._ring.is_known = True
        for acceptance in (self._own, self._long, self._ring.acceptance):
            acceptance.note(confidence, min(right + 1, drafts), right)

    def _gain(self, rate: float, window: DraftWindow, sessions: int) -> float:
        """Estimate tokens per second of each session."""
        rate = min(rate, _MAX_RATE)
        passed = rate**window.rows
        further = passed / (1 - passed)
        trip = self._times.of(window.rows * sessions) + window.drafts * self._ring.token_s
        seconds = trip * (1 + further)
        if window.depth > 1:
            first, interval = self._times.first(window.rows), self._times.interval(window.rows)
            interval += max(0.0, first - trip) / (window.depth - 1)  # delay by the other steps
            seconds = _MIN_SPEEDUP * (
                first + max(interval, first / window.depth) * further + interval
            )
        return 1 / (1 - rate) / seconds if seconds else inf
