"""Peers that break the rules again and again.

One invalid request is a bug or a typo; a peer with `MAX_INVALID` of them in `WINDOW_S` wastes this
node's time and is refused until the window has passed. Invalid hidden states end the request of
another member: `MAX_FAULTS` of them in `FAULTS_S` are too many.
"""

from collections import deque

from meshllm.names import NodeId

MAX_INVALID = 16
WINDOW_S = 60.0
MAX_FAULTS = 3
FAULTS_S = 600.0
MAX_COUNTED = 1024  # peers; a new one replaces the oldest


class PeerLimit:
    """Counts what peers do, such as faults; times are seconds on the driver's clock."""

    def __init__(self, most: int = MAX_INVALID, window_s: float = WINDOW_S) -> None:
        self._most = most
        self._window_s = window_s
        self._at: dict[NodeId, deque[float]] = {}

    def record(self, peer: NodeId, now: float) -> None:
        """Count a fault, or a request."""
        times = self._at.pop(peer, deque(maxlen=self._most))
        times.append(now)
        self._at[peer] = times
        if len(self._at) > MAX_COUNTED:
            del self._at[next(iter(self._at))]

    def exclude(self, peer: NodeId, now: float) -> None:
        """Refuse a peer from now on, until the window has passed."""
        for _ in range(self._most):
            self.record(peer, now)

    def is_excluded(self, peer: NodeId, now: float) -> bool:
        """Return whether a peer is refused now."""
        times = self._at.get(peer)
        if times is None or len(times) < self._most:
            return False
        return now - times[0] < self._window_s

    def excluded(self, now: float) -> tuple[NodeId, ...]:
        """Return all peers that are refused now."""
        return tuple(sorted(peer for peer in self._at if self.is_excluded(peer, now)))
