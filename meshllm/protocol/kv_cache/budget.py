"""The bytes that the KV caches of a ring may take, and which sessions hold how many of them.

Theory of operation
-------------------
The planner gives a rank a span of layers that fits its memory; what the weights leave of it is the
rank's `Room` for caches, see `meshllm.protocol.planning.problem.kv_rooms`. Admission counts against
exactly that number, so what is planned is what is admitted. A stage counts its own room. The entry
computes the room of every rank from the same signed offers and reserves in all of them at once, so
that the tightest rank decides and a stage need not refuse what an entry of ours sends.

A session that runs *reserves*. On the entry it reserves, before it begins, the positions it may
come to have: prompt and answer. A stage cannot know that number, as no message carries it, and
reserves what the rows at hand need, each time before they are computed. The bytes of so many tokens
are what `Room.cost` says: what the cache allocates, not what a token needs. Growing copies the keys
and values of one layer at a time, so the largest such copy is counted once beside all sessions.

A session that ended may be *kept* for prompts that begin alike. What is kept never stands in the
way of a session: `fits` ignores it, and `meshllm.protocol.kv_cache.prefix_index` evicts the oldest
while `is_over`.

Invariant: the reservations alone are always within every room. With what is kept, they are again as
soon as the shelf has evicted, which it does before any of the rows at hand are computed.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshllm.names import SessionId

BLOCK = 256  # tokens; reservations are whole blocks, so that few steps change one
MAX_TOKENS = 1 << 24  # of a session; the longest context published is 10 million


class Cost(NamedTuple):
    """What the cache of one session takes on one rank, in bytes."""

    held: int
    growth: int
    """Beside that, while it grows: the largest layer once more."""


@dataclass(frozen=True, slots=True)
class Room:
    """What one rank has for caches."""

    total: int
    """Bytes."""
    measure: Callable[[int], tuple[int, int]]
    """Gives a `Cost` for tokens; never falls as these rise."""

    def cost(self, tokens: int) -> Cost:
        """Tell what the cache of a session of so many tokens takes."""
        return Cost(*self.measure(tokens))


@dataclass(frozen=True, slots=True)
class _Charge:
    tokens: int
    costs: list[Cost]
    """By rank."""


class KvBudget:
    """The rooms of one rank or more, and the sessions in them."""

    def __init__(self, rooms: Sequence[Room]) -> None:
        self.rooms = rooms
        """The first is that of this rank."""
        self._reserved: dict[SessionId, _Charge] = {}
        self._kept: dict[SessionId, _Charge] = {}

    def holds(self, tokens: int) -> bool:
        """Tell whether a session fits where nothing else is."""
        return self._is_within([self._charge(tokens)])

    def fits(self, tokens: int, session: SessionId | None = None) -> bool:
        """Tell whether a session fits beside the others that run."""
        others = (charge for each, charge in self._reserved.items() if each != session)
        return self._is_within([self._charge(tokens), *others])

    def reserve(self, session: SessionId, tokens: int) -> bool:
        """Let a session have so many tokens, if they fit; it keeps what it had before."""
        if tokens <= self.reserved(session):
            return True
        is_fit = self.fits(tokens, session)
        if is_fit:
            self._reserved[session] = self._charge(tokens)
        return is_fit

    def reserved(self, session: SessionId) -> int:
        """Count the tokens that a session may have."""
        charge = self._reserved.get(session)
        return charge.tokens if charge else 0

    def release(self, session: SessionId) -> None:
        """Forget a session that ran."""
        self._reserved.pop(session, None)

    def keep(self, session: SessionId, tokens: int) -> None:
        """Count a session that ended."""
        self._kept[session] = self._charge(tokens)

    def drop(self, session: SessionId) -> None:
        """Forget a session that was kept."""
        self._kept.pop(session, None)

    @property
    def is_over(self) -> bool:
        """Whether the sessions that run leave too little room for all that are kept."""
        return not self._is_within(self._reserved.values(), self._kept.values())

    @property
    def tokens(self) -> int:
        """Count the tokens of the longest session that fits where nothing else is."""
        return self._most(self.holds)

    def left(self, session: SessionId) -> int:
        """Count the tokens that a session can have beside the others that run."""
        return self._most(lambda tokens: self.fits(tokens, session))

    @property
    def live_bytes(self) -> int:
        """Count the bytes that sessions which run reserve on this rank."""
        return sum(charge.costs[0].held for charge in self._reserved.values())

    @property
    def kept_bytes(self) -> int:
        """Count the bytes that are kept on this rank."""
        return sum(charge.costs[0].held for charge in self._kept.values())

    def _charge(self, tokens: int) -> _Charge:
        whole = -(-tokens // BLOCK) * BLOCK
        return _Charge(whole, [room.cost(whole) for room in self.rooms])

    def _is_within(self, live: Collection[_Charge], kept: Collection[_Charge] = ()) -> bool:
        for rank, room in enumerate(self.rooms):
            held = sum(charge.costs[rank].held for charge in (*live, *kept))
            growth = max((charge.costs[rank].growth for charge in live), default=0)
            if held + growth > room.total:
                return False
        return True

    @staticmethod
    def _most(is_fit: Callable[[int], bool]) -> int:
        """Find the most tokens for which a claim holds that fails for all above them."""
        blocks = range(1, MAX_TOKENS // BLOCK + 1)
        return bisect_left(blocks, True, key=lambda count: not is_fit(count * BLOCK)) * BLOCK
