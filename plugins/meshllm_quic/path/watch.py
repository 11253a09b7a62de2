"""Does the route still work.

Theory of operation
-------------------
::

    CALM --an answer is 5 s old, or something was sent and nothing heard for a while--> CHECK
    CHECK --an answer--> CALM
    CHECK --none for max(3 round trips, 1 s)--> DEAD

Only an answer to a probe shows that a route works in both directions: what is heard puts a check
off, and never ends one. A receiver that sends nothing but acknowledgements hears nothing either, so
silence alone starts a check and proves nothing. A route through a relay cannot be probed; there
silence is all there is, and DEAD means no more than that.

A check that ends late was not waited out: this side slept, and the answers of that time are still
to be read, so that it lasts a moment longer, once.
"""

from enum import Enum, auto

HEARTBEAT = 5.0  # s that an answer stands for
PATIENCE = 1.0  # s without an answer, at least: a link above gives its neighbour 3 s in all
MAX_PATIENCE = 10.0  # s; with HEARTBEAT the 15 s after which no route is believed in
ROUND_TRIPS = 3
HASTE = 0.3  # s without an answer, at least, where another address answers
CALM = 1.0  # s after an answer in which nothing is suspected
GRACE = 0.25  # s


class Verdict(Enum):
    """What is to be done about the route."""

    FINE = auto()
    CHECK = auto()
    DEAD = auto()


class Watch:
    """The life of one route; times are seconds on the driver's clock."""

    def __init__(self, now: float, *, is_direct: bool) -> None:
        self.since: float | None = None
        """When the check began; None while calm."""
        self._is_direct = is_direct
        self._round_trip_s = 0.0
        self._answered = now
        self._waiting: float | None = None  # since when something sent has met with silence
        self._end = 0.0  # of the check
        self._is_extended = False

    @property
    def deadline(self) -> float | None:
        """When ``expire`` has something to do."""
        if self.since is not None:
            return self._end
        if not self._is_direct:
            return None if self._waiting is None else self._waiting + PATIENCE
        heartbeat = self._answered + HEARTBEAT
        return heartbeat if self._waiting is None else min(heartbeat, self._waiting + self._doubt)

    def sent(self, now: float) -> None:
        """Note that something was sent."""
        if self._waiting is None:
            self._waiting = now

    def heard(self) -> None:
        """Note that something was heard."""
        self._waiting = None

    def answered(self, now: float, round_trip_s: float | None) -> None:
        """Note the answer to a probe."""
        self._answered, self._round_trip_s = now, round_trip_s or 0.0
        self.since = self._waiting = None

    def suspect(self, now: float) -> None:
        """Let a check begin soon: the other side sends from elsewhere."""
        if self._is_direct and now >= self._answered + CALM:
            self._answered = min(self._answered, now - HEARTBEAT)

    def hurry(self) -> None:
        """Shorten the check: another address answers."""
        if self.since is not None:
            self._end = min(self._end, self.since + self._haste)

    def expire(self, now: float) -> Verdict:
        """Begin a check or end one; after DEAD everything begins anew."""
        deadline = self.deadline
        if deadline is None or now < deadline:
            return Verdict.FINE
        if self.since is None and self._is_direct:
            self._begin(now)
            return Verdict.CHECK
        if self._is_direct and now > deadline + GRACE and not self._is_extended:
            self._end, self._is_extended = now + GRACE, True
            return Verdict.CHECK
        self._answered, self.since, self._waiting = now, None, None
        return Verdict.DEAD

    def _begin(self, now: float) -> None:
        begun = now if self._waiting is None else self._waiting
        self.since, self._is_extended = now, False
        self._end = max(begun + self._patience, now + self._haste)

    @property
    def _patience(self) -> float:
        return min(max(ROUND_TRIPS * self._round_trip_s, PATIENCE), MAX_PATIENCE)

    @property
    def _haste(self) -> float:
        return min(max(ROUND_TRIPS * self._round_trip_s, HASTE), MAX_PATIENCE)

    @property
    def _doubt(self) -> float:
        return self._patience / 3
