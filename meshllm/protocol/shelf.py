"""Which finished sessions a rank keeps, for those that begin alike; holds no caches itself.

Theory of operation
-------------------
The entry alone knows tokens. It remembers the texts of finished sessions, and for a new prompt it
finds the one with which most of it is shared. A `Resume` goes ahead of the first rows and names
that session and how many positions of it are wanted; every rank crops what it kept of it. Sessions
have random names, so what is kept says nothing about a text: the hash of a text would let whoever
sees it test guesses at the text.

Each rank keeps what its own memory has room for, the latest first, and says so in the Close that
goes round: what one of them does not keep is of no use to the entry. What is lost later shows when
it is asked for: the first rows meet a gap, the entry begins at 0, and forgets that text.
"""

from dataclasses import dataclass, replace

from meshllm.names import SessionId

MAX_KEPT = 64
"""Sessions, however short."""
MAX_STATES = 8
"""Sessions of a model with recurrent states: each of these is as large as many positions."""
ROUNDING = 256
"""Positions that a cache may have room for beside those that it holds."""
IDLE_S = 1800.0
"""Nobody owes memory to a chat that was left."""


@dataclass(frozen=True, slots=True)
class _Item:
    length: int
    used: float


@dataclass(frozen=True, slots=True)
class Base:
    """What a prompt shares with a session that was kept."""

    session: SessionId
    length: int
    """Positions; less than the prompt has, as its last token gives the row that is picked from."""
    whole: bool
    """Nobody else will want that session."""


class Shelf:
    """The sessions that one rank keeps; times are seconds on the driver's clock."""

    def __init__(self, room: int, *, most: int = MAX_KEPT, idle_s: float = IDLE_S) -> None:
        """Keep up to ``room`` positions in all, of ``most`` sessions; 0 keeps nothing."""
        self.room = room
        self._most = most
        self._idle_s = idle_s
        self._items: dict[SessionId, _Item] = {}  # the latest used last

    def put(self, session: SessionId, length: int, now: float) -> list[SessionId]:
        """Keep a session; return those that have to go for it, or itself where it has no room."""
        if not 0 < length <= self.room - ROUNDING:
            return [session]
        self._items[session] = _Item(length, now)
        gone = []
        while len(self._items) > self._most or self._length > self.room:
            gone.append(next(iter(self._items)))
            del self._items[gone[-1]]
        return gone

    def take(self, session: SessionId, length: int, now: float, *, whole: bool) -> bool:
        """Say whether so much of a session is kept; ``whole`` takes it away."""
        item = self._items.get(session)
        if item is None or item.length < length:
            return False
        del self._items[session]
        if not whole:
            self._items[session] = replace(item, used=now)
        return True

    @property
    def deadline(self) -> float | None:
        """When `expire` has something to do."""
        return next((item.used + self._idle_s for item in self._items.values()), None)

    def expire(self, now: float) -> list[SessionId]:
        """Return the sessions that nobody asked for in a while; they have to go."""
        gone = [key for key, item in self._items.items() if now >= item.used + self._idle_s]
        for session in gone:
            del self._items[session]
        return gone

    @property
    def _length(self) -> int:
        return sum(item.length + ROUNDING for item in self._items.values())


def shelf_for(room: int, slack: int | None) -> Shelf:
    """Make the shelf of a rank, for a model whose caches can go back by ``slack`` positions."""
    return Shelf(room, most=MAX_STATES if slack == 0 else MAX_KEPT)
