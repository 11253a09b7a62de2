"""Path MTU discovery of one direct path (DPLPMTUD, RFC 8899).

It works in rounds of 5 s. Each round confirms the current size by up to three probes of that size;
if none is answered, the size falls back to the minimum that every path carries (black hole
detection). Larger sizes are probed in the first round and once a minute, twice each.
"""

from meshllm_quic.wire.packets import MAX_INNER_BYTES

ROUND = 5.0  # s
GROWTH_ROUNDS = 12
CONFIRMATIONS = 3  # two losses in a row are common on a bad radio link
TRIES = 2
PAUSE = 0.4  # s; minimum interval between probes of the same size


class PathMtu:
    """The datagram size of one direct path; times are seconds on the driver's clock."""

    def __init__(self, goals: tuple[int, ...], now: float) -> None:
        self.size = MAX_INNER_BYTES
        self._goals = goals
        self._rounds = 0
        self._begun = now
        self._left: dict[int, int] = {}
        self.deadline = now
        """When `expire` must be called."""

    def proved(self, length: int) -> None:
        """Note that a probe of ``length`` bytes was received."""
        self.size = max(self.size, length)
        self._left = {goal: left for goal, left in self._left.items() if goal > length}

    def expire(self, now: float, round_trip_s: float | None) -> list[int]:
        """Return the sizes to probe now, or end the round, in which ``size`` may fall back."""
        if now < self.deadline:
            return []
        if now >= self._begun + ROUND or not self._rounds:
            self._begin(now)
        lengths = [goal for goal, left in self._left.items() if left]
        if not lengths:
            self._finish()
            return []
        for goal in lengths:
            self._left[goal] -= 1
        self.deadline = now + max(PAUSE, 2 * (round_trip_s or 0.0))
        return lengths

    def _begin(self, now: float) -> None:
        goals = self._goals if self._rounds % GROWTH_ROUNDS == 0 else ()
        self._left = {goal: TRIES for goal in goals if goal > self.size}
        if self.size > MAX_INNER_BYTES:
            self._left[self.size] = CONFIRMATIONS
        self._rounds += 1
        self._begun = now

    def _finish(self) -> None:
        if self.size in self._left:
            self.size = MAX_INNER_BYTES
        self.deadline = self._begun + ROUND
