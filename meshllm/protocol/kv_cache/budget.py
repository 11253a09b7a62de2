"""KV cache budget of a ring in bytes, and how much of it each session holds.

Theory of operation ------------------- The planner gives a rank a span of layers that fits its
memory; what the weights leave of it is the rank's `KvCapacity` for KV caches, see
`meshllm.protocol.planning.problem.kv_capacities`. Admission counts against exactly that number, so
what is planned is what is admitted. A stage counts its own room. The entry computes the room of
every rank from the same signed offers and reserves in all of them at once, so the tightest rank
decides and a stage need not reject what an entry of ours sends.

A running session *reserves*: at the entry its prompt and the first part of its answer before it
starts, and more whenever it has used most of that. So many sessions share a room in which few of
the answers that clients allow would fit. What a session may still need is known, too: the entry
reserves only what leaves all sessions able to end, one after the other if need be, each with the
memory of those that ended before it (the banker's algorithm, Dijkstra 1965). So no session has to
be evicted, and one that waits for room gets it. A stage cannot know how long an answer may be, as
no message carries it, and reserves what each message of rows needs just before they are computed.
`KvCapacity.cost` converts tokens to bytes: what the cache allocates, not what a token needs.
Growing copies the keys and values one layer at a time, so the largest such copy is counted once on
top of all sessions.

A finished session may be *kept* for prompts with the same prefix. Kept sessions never block a
running one: `fits` ignores them, and `meshllm.protocol.kv_cache.prefix_index` evicts the least
recently used while `is_exceeded`.

Layers that the next plan may need are loaded in bytes that nothing uses: the budget *lends* them,
and takes them back as soon as a session, running or kept, needs them. If that plan follows at once,
the loan is urgent, and kept sessions make room for it instead.

Invariant: the reservations alone always fit in every room, and all sessions can end. Together with
the kept sessions they fit again once the prefix index has evicted, which happens before the new
rows are computed.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshllm.names import SessionId

BLOCK = 256  # tokens; reservations are whole blocks, so that few steps change one
MAX_TOKENS = 1 << 24  # of a session; the longest context published is 10 million


class Cost(NamedTuple):
    """What the cache of one session takes on one rank, in bytes."""

    held: int
    growth: int
    """Extra bytes while it grows: a second copy of the largest layer."""


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """Memory of one rank for KV caches."""

    total: int
    """Bytes."""
    measure: Callable[[int], tuple[int, int]]
    """Returns the fields of a `Cost` for a number of tokens; monotonic."""

    def cost(self, tokens: int) -> Cost:
        """Return what the cache of a session of ``tokens`` tokens takes."""
        return Cost(*self.measure(tokens))


@dataclass(frozen=True, slots=True)
class _Charge:
    tokens: int
    costs: list[Cost]
    """By rank."""


@dataclass(frozen=True, slots=True)
class _Reservation:
    now: _Charge
    most: _Charge
    """What it may grow to."""


class KvBudget:
    """The rooms of one or more ranks, and the sessions in them."""

    def __init__(self, rooms: Sequence[KvCapacity]) -> None:
        self.rooms = rooms
        """By rank, beginning with this one."""
        self._reserved: dict[SessionId, _Reservation] = {}
        self._kept: dict[SessionId, _Charge] = {}
        self._lent = 0  # bytes of this rank
        self._is_urgent = False  # what is lent
        self._take_back: Callable[[], None] = lambda: None

    def holds(self, tokens: int) -> bool:
        """Return whether a session fits on its own."""
        return self._is_within([self._charge(tokens)])

    def fits(self, tokens: int, session: SessionId | None = None) -> bool:
        """Return whether a session of ``tokens`` tokens fits beside the other running ones."""
        return self._can_end(self._with(session, tokens))

    def fits_beside(self, tokens: int, spare: int, sessions: Collection[SessionId]) -> bool:
        """Return whether a session and another of ``spare`` tokens fit with those running ones."""
        charges = [self._charge(tokens), self._charge(spare)]
        running = (self._reserved[each].now for each in sessions if each in self._reserved)
        return self._is_within([*charges, *running])

    def reserve(self, session: SessionId, tokens: int, most: int = 0) -> bool:
        """Reserve ``tokens`` tokens if they fit; if not, the session keeps its old reservation.

        It may ask for up to ``most`` later, and never for fewer than it was allowed to before.
        """
        if tokens <= self.reserved(session):
            return True
        wanted = self._with(session, tokens, most)
        is_fit = self._can_end(wanted)
        if is_fit:
            self._reserved[session] = wanted[0]
            self._reclaim_loan()
        return is_fit

    def resize(self, totals: Sequence[int], longest: int = 0) -> bool:
        """Give the ranks these bytes, if all that runs fits into them, and a session on its own.

        That session has ``longest`` tokens. Return whether they do. Kept sessions may not fit any
        more, see `is_exceeded`.
        """
        before = self.rooms
        pairs = zip(before, totals, strict=True)
        self.rooms = [replace(room, total=total) for room, total in pairs]
        if not (self._can_end(self._reserved.values()) and self.holds(longest)):
            self.rooms = before
            return False
        self._reclaim_loan()
        return True

    def has_room(self, size: int, *, without_kept: bool = False) -> bool:
        """Return whether this many bytes of this rank are free, or are if no session is kept."""
        kept = () if without_kept else self._kept.values()
        return self._is_within([each.now for each in self._reserved.values()], kept, size)

    def lend(self, size: int, take_back: Callable[[], None], *, is_urgent: bool = False) -> bool:
        """Lend bytes of this rank, if they are free, until ``take_back`` is called.

        They replace what is lent; if they are not free, nothing changes. Kept sessions do not take
        back what ``is_urgent``: the prefix index evicts them.
        """
        is_free = self.has_room(size)
        if is_free:
            self._lent, self._take_back, self._is_urgent = size, take_back, is_urgent
        return is_free

    def end_loan(self) -> None:
        """Take back what is lent, as it is not used any more."""
        self._lent = 0

    def reserved(self, session: SessionId) -> int:
        """Return the tokens that a session has reserved."""
        found = self._reserved.get(session)
        return found.now.tokens if found else 0

    def release(self, session: SessionId) -> None:
        """Release the reservation of a session."""
        self._reserved.pop(session, None)

    def keep(self, session: SessionId, tokens: int) -> None:
        """Count a finished session as kept."""
        self._kept[session] = self._charge(tokens)
        self._reclaim_loan()

    def drop(self, session: SessionId) -> None:
        """Stop counting a kept session."""
        self._kept.pop(session, None)

    @property
    def is_exceeded(self) -> bool:
        """Whether running and kept sessions, and what is lent, together exceed the budget."""
        return not self.has_room(self._lent)

    @property
    def tokens(self) -> int:
        """Tokens of the longest session that fits on its own."""
        return self._most(self.holds)

    def left(self, session: SessionId) -> int:
        """Return the tokens that a session can have next to the other running ones."""
        return self._most(lambda tokens: self.fits(tokens, session))

    @property
    def live_bytes(self) -> int:
        """Bytes that running sessions have reserved on this rank."""
        return sum(each.now.costs[0].held for each in self._reserved.values())

    @property
    def kept_bytes(self) -> int:
        """Bytes of the kept sessions on this rank."""
        return self.bytes_of(self._kept)

    def bytes_of(self, sessions: Iterable[SessionId]) -> int:
        """Return the bytes of some of the kept sessions on this rank."""
        return sum(self._kept[session].costs[0].held for session in sessions)

    def _charge(self, tokens: int) -> _Charge:
        whole = -(-tokens // BLOCK) * BLOCK
        return _Charge(whole, [room.cost(whole) for room in self.rooms])

    def _with(self, session: SessionId | None, tokens: int, most: int = 0) -> list[_Reservation]:
        """Return the reservation of a session with this many tokens, and those of the others."""
        before = self._reserved.get(session) if session else None
        limit = max(tokens, most, before.most.tokens if before else 0)
        own = _Reservation(self._charge(tokens), self._charge(limit))
        return [own, *(each for key, each in self._reserved.items() if key != session)]

    def _can_end(self, sessions: Collection[_Reservation]) -> bool:
        """Return whether each session can grow to its most, once those that could have ended."""
        left = list(sessions)
        while left:
            ranks = [
                (
                    sum(each.now.costs[rank].held for each in left),
                    max(each.now.costs[rank].growth for each in left),
                    room.total,
                )
                for rank, room in enumerate(self.rooms)
            ]
            waiting = [
                one
                for one in left
                if any(
                    held - now.held + most.held + max(growth, most.growth) > total
                    for (held, growth, total), now, most in zip(
                        ranks, one.now.costs, one.most.costs, strict=True
                    )
                )
            ]
            if len(waiting) == len(left):
                return False
            left = waiting
        return True

    def _reclaim_loan(self) -> None:
        if self._lent and not self.has_room(self._lent, without_kept=self._is_urgent):
            self._lent = 0
            self._take_back()

    def _is_within(
        self, live: Collection[_Charge], kept: Collection[_Charge] = (), lent: int = 0
    ) -> bool:
        for rank, room in enumerate(self.rooms):
            held = sum(charge.costs[rank].held for charge in (*live, *kept))
            held += 0 if rank else lent
            growth = max((charge.costs[rank].growth for charge in live), default=0)
            if held + growth > room.total:
                return False
        return True

    @staticmethod
    def _most(is_fit: Callable[[int], bool]) -> int:
        """Return the largest number of tokens for which the monotonic ``is_fit`` holds."""
        blocks = range(1, MAX_TOKENS // BLOCK + 1)
        return bisect_left(blocks, True, key=lambda count: not is_fit(count * BLOCK)) * BLOCK
