"""Peers that send invalid requests again and again.

One invalid request is a bug or a typo; a peer with `MAX_STRIKES` of them in `WINDOW_S` makes this
node work for nothing and is refused until the window has passed.
"""

from collections import deque

from meshllm.names import NodeId

MAX_STRIKES = 16
WINDOW_S = 60.0
MAX_STRUCK = 1024  # peers; a new one replaces the oldest


class Strikes:
    """Counts invalid requests by peer; times are seconds on the driver's clock."""

    def __init__(self) -> None:
        self._at: dict[NodeId, deque[float]] = {}

    def strike(self, peer: NodeId, now: float) -> None:
        """Count an invalid request."""
        times = self._at.pop(peer, deque(maxlen=MAX_STRIKES))
        times.append(now)
        self._at[peer] = times
        if len(self._at) > MAX_STRUCK:
            del self._at[next(iter(self._at))]

    def is_out(self, peer: NodeId, now: float) -> bool:
        """Return whether a peer is refused now."""
        times = self._at.get(peer)
        return times is not None and len(times) == MAX_STRIKES and now - times[0] < WINDOW_S
