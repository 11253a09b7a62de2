"""A limit on failed dials of one target, whichever peers name it.

Peers choose their addresses, so several of them could make this node call a stranger's server again
and again. A target has `BURST` attempts, then one in each `PAUSE_S`. Where a node has proved who it
is, `MOST_UNANSWERED` attempts come first: a node that restarts is dialled as soon as it is back.
"""

from typing import Any

BURST = 4
PAUSE_S = 10.0
MOST_UNANSWERED = 256  # of a node that is away: it is dialled twice a minute, at two addresses
MAX_TARGETS = 4096  # more than MAX_MEMBERS nodes have addresses; a new one replaces the oldest


class DialLimit:
    """Counts the attempts at each target; times are seconds on the driver's clock."""

    def __init__(self) -> None:
        self._tried: dict[str, tuple[float, float]] = {}
        """Attempts left, and the time of the last one."""
        self._answered: dict[str, int] = {}
        """Attempts left at targets where a node has answered, oldest first."""

    def take(self, target: str, now: float) -> bool:
        """Count an attempt; return whether it may be made."""
        if left := self._answered.get(target, 0):
            self._answered[target] = left - 1
            return True
        rest, at = self._tried.pop(target, (float(BURST), now))
        rest = min(float(BURST), rest + (now - at) / PAUSE_S)
        is_allowed = rest >= 1
        self._tried[target] = rest - 1 if is_allowed else rest, now
        _shorten(self._tried)
        return is_allowed

    def answered(self, target: str) -> None:
        """Note that a node answered there, and proved who it is."""
        self._tried.pop(target, None)
        self._answered.pop(target, None)
        self._answered[target] = MOST_UNANSWERED
        _shorten(self._answered)


def _shorten(targets: dict[str, Any]) -> None:
    if len(targets) > MAX_TARGETS:
        del targets[next(iter(targets))]
