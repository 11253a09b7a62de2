"""Prefix cache of one rank: which finished sessions are kept for prompts with the same prefix.

Theory of operation
-------------------
Only the entry knows tokens. It remembers the texts of finished sessions, and for a new prompt it
finds the one with the longest common prefix. A `Resume` precedes the first rows and names that
session and the number of positions to reuse; every rank crops the cache that it kept. Session ids
are random and reveal nothing about a text: the hash of a text would let anyone who sees it test
guesses at the text.

Each rank keeps what its budget has room for besides the running sessions (LRU), and reports it in
the Close that goes round the ring: a session that one rank does not keep is useless to the entry.
When a running session needs the room, the least recently used are evicted. A loss is found on
reuse: the first rows meet a gap, the entry restarts at position 0 and forgets that text.

The owner of the entry has a share: its most recently used sessions, up to half of the places, are
evicted after all others. So nobody else's finished sessions push them out; a Close says whose a
session is. The share is the same number on all ranks; one with less memory may still keep a session
that another evicted for an older one of the owner, which is found like any other loss.

The sessions of a lost ring go on in the next one. They are evicted after all others, and the
configured bytes do not limit them. Those that did not go on in time become like others.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from meshllm.names import SessionId, Span
from meshllm.protocol.kv_cache.budget import KvBudget

MAX_KEPT = 64
"""Kept sessions, however short."""
MAX_STATES = 8
"""Kept sessions of a model with recurrent state, which is as large as many positions."""
IDLE_S = 1800.0
"""Seconds until an unused session is evicted, so that an abandoned chat holds no memory."""
OWN_SHARE = 2
"""The latest sessions of the owner, up to 1/`OWN_SHARE` of the places, are evicted last."""
RESUME_S = 60.0
"""Seconds until a session of a lost ring is evicted: it is resumed soon, or not at all."""


class Chunk(NamedTuple):
    """How the rows of a session up to ``stop`` were computed; those before belong to others."""

    stop: int
    is_step: bool
    """Rows of decode steps, each as if computed alone; else one chunk of the prompt."""


@dataclass(frozen=True, slots=True)
class _Item:
    length: int
    capacity: int
    used: float
    is_own: bool
    is_lost: bool


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The prefix that a prompt shares with a kept session."""

    session: SessionId
    length: int
    """Positions; fewer than the prompt has, as its last token gives the row that is sampled."""
    whole: bool
    """Take over the cache instead of copying it: no other prompt will want that session."""
    capacity: int = 0
    """Positions for which the cache has room, if it is taken over."""
    chunks: tuple[Chunk, ...] = ()
    """How they were computed; the last one stops at ``length``."""
    lost: tuple[Span, ...] = ()
    """Layers whose caches are lost."""
    held: int = 0
    """Positions that all layers of this rank hold, lost ones too; 0 if no rank can have been handed
    over any of a lost layer."""
    is_claimed: bool = False
    """This rank did not see the tokens of the session, and has them from the request."""


class PrefixIndex:
    """Eviction policy of one rank's prefix cache; times are seconds on the driver's clock."""

    def __init__(
        self,
        budget: KvBudget,
        most_bytes: int | None = None,
        *,
        most: int = MAX_KEPT,
        idle_s: float = IDLE_S,
        resumes: bool = True,
    ) -> None:
        """Keep up to ``most`` sessions of up to ``most_bytes`` in total, as the budget allows.

        ``resumes``: keep the sessions of a ring that was lost even if no others are kept.
        """
        self.budget = budget
        self._most_bytes = most_bytes
        self._most = most
        self._idle_s = idle_s
        self.resumes = resumes
        """Whether sessions of a lost ring can go on with their caches."""
        self._items: dict[SessionId, _Item] = {}  # the latest used last
        self._names: dict[SessionId, tuple[SessionId, int]] = {}  # of them, see `name`

    @property
    def keeps(self) -> bool:
        """Whether it keeps anything at all."""
        return self._most_bytes != 0

    def put(
        self,
        session: SessionId,
        length: int,
        capacity: int,
        now: float,
        *,
        is_own: bool = False,
        is_lost: bool = False,
    ) -> list[SessionId]:
        """Keep ``length`` positions of a cache that has room for ``capacity``.

        ``is_own``: it is the owner's. ``is_lost``: the ring was lost, and the session goes on in
        the next one. Return the sessions to evict: others, or this one if there is no room for it.
        """
        keeps = self.resumes if is_lost else self.keeps
        if length <= 0 or not (keeps and self.budget.fits(capacity)):
            return [session]
        self.budget.keep(session, capacity)
        if not is_lost and self._exceeds([session]):
            self.budget.drop(session)
            return [session]
        self._items[session] = _Item(length, capacity, now, is_own, is_lost)
        return self.make_room()

    def make_room(self, spare: SessionId | None = None) -> list[SessionId]:
        """Evict sessions until the budget is met; return them. ``spare`` is never evicted."""
        gone = []
        for session in [each for each in self._in_order() if each != spare]:
            is_many = len(self._items) > self._most
            limited = [each for each, item in self._items.items() if not item.is_lost]
            if not (is_many or self.budget.is_exceeded or self._exceeds(limited)):
                break
            self._drop(session)
            gone.append(session)
        return gone

    def free(self, size: int) -> list[SessionId]:
        """Evict sessions until this many bytes of this rank are free, or all; return them."""
        gone = list[SessionId]()
        for session in self._in_order():
            if self.budget.has_room(size):
                break
            self._drop(session)
            gone.append(session)
        return gone

    def take(self, session: SessionId, length: int, now: float, *, whole: bool) -> int:
        """Return the positions for which a kept cache has room; 0 if it holds too few.

        ``whole`` removes it from the index.
        """
        item = self._items.get(session)
        if item is None or item.length < length:
            return 0
        del self._items[session]
        if whole:
            self.budget.drop(session)
            self._forget_names(session)
        else:
            self._items[session] = item if item.is_lost else replace(item, used=now)
        return item.capacity

    def name(self, session: SessionId, base: SessionId, length: int) -> None:
        """Let a session be resumed by the name of the one whose first positions it took over, too.

        A ring may be lost before the `Resume` has reached all ranks; the others know no other name.
        Behind ``length`` the two may differ.
        """
        if session in self._items:
            self._names[base] = session, length

    def name_of(self, session: SessionId, length: int) -> SessionId:
        """Return the session kept by this name, or that took over ``length`` positions of it.

        It is the session itself if there is none.
        """
        name, shared = self._names.get(session, (session, 0))
        return session if session in self._items or length > shared else name

    def holds(self, session: SessionId) -> bool:
        """Return whether a session is kept."""
        return session in self._items

    def move(self, budget: KvBudget) -> list[SessionId]:
        """Count what is kept in another budget; return the sessions that this evicts."""
        self.budget = budget
        for session, item in self._items.items():
            budget.keep(session, item.capacity)
        return self.make_room()

    def clear_ownership(self) -> None:
        """Treat all sessions alike, as another node is the entry from now on."""
        self._items = {key: replace(item, is_own=False) for key, item in self._items.items()}

    def clear(self) -> None:
        """Evict all."""
        for session in list(self._items):
            self._drop(session)

    @property
    def deadline(self) -> float | None:
        """When `expire` has something to do."""
        return min(map(self._end_of, self._items.values()), default=None)

    def expire(self, now: float) -> list[SessionId]:
        """Evict the sessions that were not used in a while; return them.

        Those of a lost ring that did not go on are kept like others from now on, if at all.
        """
        due = {key: item for key, item in self._items.items() if now >= self._end_of(item)}
        for session in due:
            self._drop(session)
        gone = list[SessionId]()
        for session, item in due.items():
            if item.is_lost:
                gone += self.put(session, item.length, item.capacity, now)
            else:
                gone.append(session)
        return gone

    def _in_order(self) -> list[SessionId]:
        """Return the sessions in the order of eviction."""
        own = [session for session, item in self._items.items() if item.is_own]
        share = set(own[-(self._most // OWN_SHARE) :])
        return sorted(self._items, key=lambda each: (self._items[each].is_lost, each in share))

    def _end_of(self, item: _Item) -> float:
        return item.used + (RESUME_S if item.is_lost else self._idle_s)

    def _forget_names(self, session: SessionId) -> None:
        self._names = {base: name for base, name in self._names.items() if name[0] != session}

    def _drop(self, session: SessionId) -> None:
        del self._items[session]
        self._forget_names(session)
        self.budget.drop(session)

    def _exceeds(self, sessions: Iterable[SessionId]) -> bool:
        most = self._most_bytes
        return self.keeps and most is not None and self.budget.bytes_of(sessions) > most


def prefix_index_for(
    budget: KvBudget, most_bytes: int | None, max_crop: int | None, *, resumes: bool = True
) -> PrefixIndex:
    """Make the index of a rank for a model whose caches can be cropped by ``max_crop``."""
    most = MAX_STATES if max_crop == 0 else MAX_KEPT
    return PrefixIndex(budget, most_bytes, most=most, resumes=resumes)


def add_chunk(chunks: Iterable[Chunk], start: int, stop: int, *, is_step: bool) -> list[Chunk]:
    """Add the rows at positions ``start`` to ``stop``; those from ``start`` on are replaced."""
    before = crop_chunks(chunks, start)
    if is_step and before and before[-1].is_step:
        before.pop()
    return [*before, Chunk(stop, is_step)]


def last_chunk_rows(chunks: Sequence[Chunk]) -> int | None:
    """Return the rows of the last chunk; None if there is none, or it holds decode steps.

    The last one may have been cut short: those of the chunk before it are returned if it is longer.
    """
    if not chunks or chunks[-1].is_step:
        return None
    pairs = pairwise([Chunk(0, is_step=False), *chunks][-3:])
    return max(chunk.stop - before.stop for before, chunk in pairs if not chunk.is_step)


def crop_chunks(chunks: Iterable[Chunk], length: int) -> list[Chunk]:
    """Keep the first ``length`` positions; a chunk that is cut there stops there."""
    cropped = list[Chunk]()
    for chunk in chunks:
        if cropped and cropped[-1].stop >= length:
            break
        cropped.append(Chunk(min(chunk.stop, length), chunk.is_step))
    return cropped if length else []
