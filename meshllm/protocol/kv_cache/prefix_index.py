"""Which finished sessions a rank keeps, for those that begin alike.

Theory of operation
-------------------
The entry alone knows tokens. It remembers the texts of finished sessions, and for a new prompt it
finds the one with which most of it is shared. A `Resume` goes ahead of the first rows and names
that session and how many positions of it are wanted; every rank crops what it kept of it. Sessions
have random names, so what is kept says nothing about a text: the hash of a text would let whoever
sees it test guesses at the text.

Each rank keeps what its budget has room for beside the sessions that run, the latest first, and
says so in the Close that goes round: what one of them does not keep is of no use to the entry. When
a session needs the room, the oldest are evicted. What is lost shows when it is asked for: the first
rows meet a gap, the entry begins at 0, and forgets that text.
"""

from dataclasses import dataclass, replace

from meshllm.names import SessionId
from meshllm.protocol.kv_cache.budget import KvBudget

MAX_KEPT = 64
"""Sessions, however short."""
MAX_STATES = 8
"""Sessions of a model with recurrent states: each of these is as large as many positions."""
IDLE_S = 1800.0
"""Nobody owes memory to a chat that was left."""


@dataclass(frozen=True, slots=True)
class _Item:
    length: int
    reach: int
    used: float


@dataclass(frozen=True, slots=True)
class Base:
    """What a prompt shares with a session that was kept."""

    session: SessionId
    length: int
    """Positions; less than the prompt has, as its last token gives the row that is picked from."""
    whole: bool
    """Nobody else will want that session."""
    reach: int = 0
    """Positions for which its cache has room, where it is taken whole."""


class Shelf:
    """The sessions that one rank keeps; times are seconds on the driver's clock."""

    def __init__(
        self,
        budget: KvBudget,
        most_bytes: int | None = None,
        *,
        most: int = MAX_KEPT,
        idle_s: float = IDLE_S,
    ) -> None:
        """Keep up to ``most`` sessions of up to ``most_bytes`` in all, as the budget has room."""
        self.budget = budget
        self._most_bytes = most_bytes
        self._most = most
        self._idle_s = idle_s
        self._items: dict[SessionId, _Item] = {}  # the latest used last

    @property
    def keeps(self) -> bool:
        """Whether it keeps anything at all."""
        return self._most_bytes != 0

    def put(self, session: SessionId, length: int, reach: int, now: float) -> list[SessionId]:
        """Keep ``length`` positions of a cache with room for ``reach``.

        Return the sessions that have to go for it, or itself where it has no room.
        """
        if length <= 0 or not (self.keeps and self.budget.fits(reach)):
            return [session]
        before = self.budget.kept_bytes
        self.budget.keep(session, reach)
        if self._exceeds(self.budget.kept_bytes - before):
            self.budget.drop(session)
            return [session]
        self._items[session] = _Item(length, reach, now)
        return self.make_room()

    def make_room(self, spare: SessionId | None = None) -> list[SessionId]:
        """Evict the oldest until the sessions that run have their room; return what goes.

        ``spare`` stays, whatever happens.
        """
        gone = []
        for session in [each for each in self._items if each != spare]:
            is_many = len(self._items) > self._most
            if not (is_many or self.budget.is_over or self._exceeds(self.budget.kept_bytes)):
                break
            self._drop(session)
            gone.append(session)
        return gone

    def take(self, session: SessionId, length: int, now: float, *, whole: bool) -> int:
        """Return the positions for which a kept cache has room; 0 where it holds too few.

        ``whole`` takes it away.
        """
        item = self._items.get(session)
        if item is None or item.length < length:
            return 0
        del self._items[session]
        if whole:
            self.budget.drop(session)
        else:
            self._items[session] = replace(item, used=now)
        return item.reach

    @property
    def deadline(self) -> float | None:
        """When `expire` has something to do."""
        return next((item.used + self._idle_s for item in self._items.values()), None)

    def expire(self, now: float) -> list[SessionId]:
        """Return the sessions that nobody asked for in a while; they have to go."""
        gone = [key for key, item in self._items.items() if now >= item.used + self._idle_s]
        for session in gone:
            self._drop(session)
        return gone

    def _drop(self, session: SessionId) -> None:
        del self._items[session]
        self.budget.drop(session)

    def _exceeds(self, size: int) -> bool:
        return self._most_bytes is not None and size > self._most_bytes


def shelf_for(budget: KvBudget, most_bytes: int | None, slack: int | None) -> Shelf:
    """Make the shelf of a rank, for a model whose caches can go back by ``slack`` positions."""
    return Shelf(budget, most_bytes, most=MAX_STATES if slack == 0 else MAX_KEPT)
