"""Split LM head: when the last rank computes a part of the logits, and whether it pays off.

Theory of operation
-------------------
The last rank has the input rows of the head, and nothing to do until the next step. So an entry may
request, in the step itself, a part of the logits from it, and compute only the other part::

    unaided steps --UNASKED--> asks --credit is used up--> rests, twice as long each time --> asks
                                 '--an answer that differs, or is invalid--> DISABLED

The answer is optional: the entry holds the whole head. After its own part it waits half as long as
that part took, then computes the rest too. An answer that is late, or gains nothing, costs credit;
one that saves time earns some.

Another processor may round differently. So the first answers of a ring (`PROOFS`) are compared bit
by bit with what the entry computes itself; a mismatch disables the feature, so that no text depends
on which result came first. Later answers are compared at random, by a draw of the driver that the
last rank cannot foresee: one that turns dishonest is believed for a few tokens only.
"""

from collections import deque
from statistics import median

UNASKED = 8
"""Steps before the first request, to measure the time of the whole head; the last ones count."""
PROOFS = 2
"""Answers that are verified before one is used."""
RECHECKED = 1 / 64
"""Later answers that are verified."""
CREDIT, MISS, MAX_CREDIT = 8, 2, 8
"""Of a ring: initial credit, cost of an answer that gains nothing, and maximum; others earn 1.

The first answers are late: the last rank traces their computation."""
REST, MAX_REST = 64, 1 << 14
"""Steps without a request when the credit is used up; doubled each time, up to the second."""
PATIENCE = 0.5
"""Of the time that the entry's own part took."""
LONGEST_S = 1.0
"""Longest wait in seconds, which matters after a suspend."""


class SplitHead:
    """Controls the requests of one entry; seconds are measured on its compute thread."""

    def __init__(self) -> None:
        self.is_disabled = False
        self._unaided = deque[float](maxlen=UNASKED)
        self._whole_s = 0.0  # time of the whole head
        self._credit = CREDIT
        self._proofs = 0
        self._rest, self._next_rest = 0, REST

    def asks(self) -> bool:
        """Return whether to request logits in the next step."""
        if self.is_disabled or len(self._unaided) < UNASKED:
            return False
        if self._credit <= 0:
            self._credit, self._rest = CREDIT, self._next_rest
            self._next_rest = min(2 * self._rest, MAX_REST)
        self._rest -= self._rest > 0
        return not self._rest

    @property
    def is_proving(self) -> bool:
        """Whether the entry computes all logits itself, to verify the next answer."""
        return self._proofs < PROOFS

    def unaided(self, seconds: float) -> None:
        """Record the time of the whole head."""
        self._unaided.append(seconds)
        self._whole_s = median(self._unaided)

    def patience(self, seconds: float) -> float:
        """Return how long to wait for an answer when the entry's own part took ``seconds``."""
        return min(seconds * PATIENCE, LONGEST_S)

    def answered(self, seconds: float) -> None:
        """Record an answer that arrived ``seconds`` after the start of the head."""
        self._count(is_gain=self.is_proving or seconds < self._whole_s)

    def missed(self) -> None:
        """Record that no answer came in time."""
        self._count(is_gain=False)

    def proved(self) -> None:
        """Record an answer that matched the entry's logits bit by bit."""
        self._proofs += 1

    def disable(self) -> None:
        """Stop requesting: an answer differed or was invalid."""
        self.is_disabled = True

    def _count(self, *, is_gain: bool) -> None:
        self._credit = min(self._credit + 1, MAX_CREDIT) if is_gain else self._credit - MISS
        if self._credit == MAX_CREDIT:
            self._next_rest = REST
