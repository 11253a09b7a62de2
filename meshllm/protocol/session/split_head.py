"""When to let the last rank compute a part of the logits, and what to make of the answers.

Theory of operation
-------------------
The last rank has the rows that the head is for, and nothing to do until the next step. So an entry
may ask it, in the step itself, for its part of the logits, and compute only the other part::

    unaided steps --UNASKED--> asks --credit is used up--> rests, twice as long each time --> asks
                                 '--an answer that differs, or is none--> DISABLED

Nothing depends on it: the entry holds the whole head. After its own part it waits half as long as
that part took, then computes the rest too. An answer that comes late, or gains nothing, costs
credit; one that gains time earns some.

Another processor may round otherwise. So the first answers of a ring (`PROOFS`) are compared with
what the entry computes itself, bit by bit; a mismatch disables the feature, so that no text depends
on which was sooner. From then on the last rank is believed, as it is with its layers.
"""

from collections import deque
from statistics import median

UNASKED = 8
"""Steps without a question before the first one, to learn what the head takes; the last count."""
PROOFS = 2
"""Answers that are compared before one counts."""
CREDIT, MISS, MOST_CREDIT = 8, 2, 8
"""Of a ring: at first, what an answer that gains nothing costs, and the most; others earn 1.

The first answers are late: the last rank records how it computes them."""
REST, MOST_REST = 64, 1 << 14
"""Steps without a question when there is no credit left; twice as many each time, and at most."""
PATIENCE = 0.5
"""Of the time that the entry's own part took."""
LONGEST_S = 1.0
"""Seconds that anybody waits, as after a suspended night."""


class SplitHead:
    """The questions of one entry; seconds are those of its compute thread."""

    def __init__(self) -> None:
        self.is_disabled = False
        self._unaided = deque[float](maxlen=UNASKED)
        self._whole_s = 0.0  # what all of the head takes
        self._credit = CREDIT
        self._proofs = 0
        self._rest, self._next_rest = 0, REST

    def asks(self) -> bool:
        """Tell whether to ask in the next step."""
        if self.is_disabled or len(self._unaided) < UNASKED:
            return False
        if self._credit <= 0:
            self._credit, self._rest = CREDIT, self._next_rest
            self._next_rest = min(2 * self._rest, MOST_REST)
        self._rest -= self._rest > 0
        return not self._rest

    @property
    def is_proving(self) -> bool:
        """Whether the entry computes all logits itself, to compare them with the next answer."""
        return self._proofs < PROOFS

    def unaided(self, seconds: float) -> None:
        """Note how long all of the head took."""
        self._unaided.append(seconds)
        self._whole_s = median(self._unaided)

    def patience(self, seconds: float) -> float:
        """Tell how long to wait for an answer when the entry's own part took so long."""
        return min(seconds * PATIENCE, LONGEST_S)

    def answered(self, seconds: float) -> None:
        """Note an answer that was there so long after the head began."""
        self._count(is_gain=self.is_proving or seconds < self._whole_s)

    def missed(self) -> None:
        """Note that no answer came in time."""
        self._count(is_gain=False)

    def proved(self) -> None:
        """Note an answer that had the bits of the entry."""
        self._proofs += 1

    def disable(self) -> None:
        """Ask no more: an answer had other bits, or was none."""
        self.is_disabled = True

    def _count(self, *, is_gain: bool) -> None:
        self._credit = min(self._credit + 1, MOST_CREDIT) if is_gain else self._credit - MISS
        if self._credit == MOST_CREDIT:
            self._next_rest = REST
