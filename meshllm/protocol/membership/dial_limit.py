"""A limit on failed dials of one target, whichever peers name it.

Peers choose their addresses, so several of them could make this node call a stranger's server again
and again. A target has `BURST` attempts, then one in each `PAUSE_S`; an answer restores them.
"""

BURST = 4
PAUSE_S = 10.0
MAX_TARGETS = 4096  # more than MAX_MEMBERS nodes have addresses; a new one replaces the oldest


class DialLimit:
    """Counts the attempts at each target; times are seconds on the driver's clock."""

    def __init__(self) -> None:
        self._tried: dict[str, tuple[float, float]] = {}
        """Attempts left, and the time of the last one."""

    def take(self, target: str, now: float) -> bool:
        """Count an attempt; return whether it may be made."""
        left, at = self._tried.pop(target, (float(BURST), now))
        left = min(float(BURST), left + (now - at) / PAUSE_S)
        is_allowed = left >= 1
        self._tried[target] = left - 1 if is_allowed else left, now
        if len(self._tried) > MAX_TARGETS:
            del self._tried[next(iter(self._tried))]
        return is_allowed

    def answered(self, target: str) -> None:
        """Note that a node answered there."""
        self._tried.pop(target, None)
