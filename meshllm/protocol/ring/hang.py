"""How long a job of the compute thread may take before its node counts as hung.

Theory of operation
-------------------
A node whose compute thread hangs still sends heartbeats, so only the node itself can tell a hang
from a long job. What a job should take follows from the plan: the measured times of the rank, for
so many rows that attend to so many others. A job hangs after `TIMES` as long, and never before
`HANG_S`. The first chunk of a prompt and the first steps of each number of rows may compile
kernels, record themselves and read weights from the disk; they have `FIRST_S` in addition, and so
has every job of a rank without known times.

A machine that is busy with something else is slower than it was when it was measured. So that it
does not come and go, the limit rises with what jobs took, up to `MAX_SLOW` times as long as
planned. Jobs below `TELLING_S` say nothing: another program's time slice is as long.
"""

from collections import Counter

from meshllm.protocol.planning.chunking import RankTimes, RingTimes

HANG_S = 3.0  # s; as long as a silent node is taken for alive
TIMES = 4
FIRST_S = 60.0  # s
FIRST_STEPS = 8  # steps of a number of rows until they are replayed
MAX_SLOW = 10.0
TELLING_S = 1.0  # s


def result_limit_s(times: RingTimes, rows: int, before: int, jobs: int) -> float:
    """Return the seconds after which ``rows`` rows that follow ``before`` others count as lost.

    Up to ``jobs`` jobs of that size wait at the slowest rank. An honest rank that takes longer
    exceeds its own limits and leaves the ring; one that stays is dropping rows.
    """
    slowest = max(rank.compute_s(rows, before) for rank in times.ranks)
    return FIRST_S + max(HANG_S, TIMES * MAX_SLOW * jobs * slowest)


class HangLimits:
    """The limits of the jobs of one loaded span."""

    def __init__(self) -> None:
        """Know no times yet."""
        self._rank: RankTimes | None = None
        self._head_s = 0.0
        self._slowness = 1.0
        self._chunks = 0
        self._steps = Counter[int]()  # by their number of rows

    def plan(self, rank: RankTimes | None, head_s: float = 0.0) -> None:
        """Expect these times from now on, ``head_s`` for each row of a decode step."""
        self._rank, self._head_s = rank, head_s

    def begin(self, rows: int, before: int, *, is_step: bool) -> float:
        """Return how many seconds a job may take that begins now."""
        is_new = self._steps[rows] < FIRST_STEPS if is_step else not self._chunks
        self._steps[rows] += is_step
        self._chunks += not is_step
        if self._rank is None:
            return FIRST_S
        limit_s = max(HANG_S, TIMES * self._slowness * self._expected_s(rows, before, is_step))
        return FIRST_S + limit_s if is_new else limit_s

    def ended(self, rows: int, before: int, took_s: float, *, is_step: bool) -> None:
        """Note how long a job took."""
        if self._rank is None or took_s < TELLING_S:
            return
        if (expected_s := self._expected_s(rows, before, is_step)) > 0:  # else it has no layers
            self._slowness = min(MAX_SLOW, max(self._slowness, took_s / expected_s))

    def _expected_s(self, rows: int, before: int, is_step: bool) -> float:
        assert self._rank is not None  # checked by the callers
        return self._rank.compute_s(rows, before) + (rows * self._head_s if is_step else 0.0)
