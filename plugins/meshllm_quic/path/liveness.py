"""Liveness of the current route.

Theory of operation
-------------------
::

    CALM --the last reply is 5 s old, or sent data was met with silence for a while--> CHECK
    CHECK --a reply--> CALM
    CHECK --no reply for max(3 round trips, 1 s)--> DEAD

Only a reply to a probe proves that a route works in both directions; other received data delays a
check but never ends one. A receiver that only sends acknowledgements receives nothing either, so
silence starts a check and proves nothing. A route through a relay cannot be probed: there DEAD
means only that it is silent.

If a check ends late, this process was suspended, and replies from that time are still unread; the
check is then extended once, for a short time.
"""

from enum import Enum, auto

HEARTBEAT = 5.0  # s for which a reply proves the route
MIN_CHECK_S = 1.0  # s; minimum timeout of a check: the ring drops a silent neighbour after 3 s
MAX_CHECK_S = 10.0  # s; with HEARTBEAT, a route is dead after at most 15 s
ROUND_TRIPS = 3
SHORT_CHECK_S = 0.3  # s; minimum timeout of a check while another address answers
CALM = 1.0  # s after a reply in which `suspect` is ignored
GRACE = 0.25  # s


class RouteVerdict(Enum):
    """What to do with the route."""

    FINE = auto()
    CHECK = auto()
    DEAD = auto()


class Liveness:
    """Liveness of one route; times are seconds on the driver's clock."""

    def __init__(self, now: float, *, is_direct: bool) -> None:
        self.since: float | None = None
        """When the check began; None in CALM."""
        self._is_direct = is_direct
        self._round_trip_s = 0.0
        self._answered = now
        self._waiting: float | None = None  # time of the oldest unanswered data
        self._end: float  # of the check
        self._is_extended: bool

    @property
    def deadline(self) -> float | None:
        """When `expire` must be called; None while there is nothing to wait for."""
        if self.since is not None:
            return self._end
        if not self._is_direct:
            return None if self._waiting is None else self._waiting + MIN_CHECK_S
        heartbeat = self._answered + HEARTBEAT
        return heartbeat if self._waiting is None else min(heartbeat, self._waiting + self._doubt)

    def sent(self, now: float) -> None:
        """Note sent data."""
        if self._waiting is None:
            self._waiting = now

    def heard(self) -> None:
        """Note received data."""
        self._waiting = None

    def answered(self, now: float, round_trip_s: float) -> None:
        """Note the reply to a probe."""
        self._answered, self._round_trip_s = now, round_trip_s
        self.since = self._waiting = None

    def suspect(self, now: float) -> None:
        """Start a check soon: the peer sends from another address."""
        if self._is_direct and now >= self._answered + CALM:
            self._answered = min(self._answered, now - HEARTBEAT)

    def shorten(self) -> None:
        """Shorten the running check: another address answers."""
        if self.since is not None:
            self._end = min(self._end, self.since + self._haste)

    def expire(self, now: float) -> RouteVerdict:
        """Start or end a check; after DEAD the state is that of a new route."""
        deadline = self.deadline
        if deadline is None or now < deadline:
            return RouteVerdict.FINE
        if self.since is None and self._is_direct:
            self._begin(now)
            return RouteVerdict.CHECK
        if self._is_direct and now > deadline + GRACE and not self._is_extended:
            self._end, self._is_extended = now + GRACE, True
            return RouteVerdict.CHECK
        self._answered, self.since, self._waiting = now, None, None
        return RouteVerdict.DEAD

    def _begin(self, now: float) -> None:
        begun = now if self._waiting is None else self._waiting
        self.since, self._is_extended = now, False
        self._end = max(begun + self._patience, now + self._haste)

    @property
    def _patience(self) -> float:
        return min(max(ROUND_TRIPS * self._round_trip_s, MIN_CHECK_S), MAX_CHECK_S)

    @property
    def _haste(self) -> float:
        return min(max(ROUND_TRIPS * self._round_trip_s, SHORT_CHECK_S), MAX_CHECK_S)

    @property
    def _doubt(self) -> float:
        return self._patience / 3
