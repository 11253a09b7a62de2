"""Admission control of an entry: which generations may start, and in which order the others wait.

Theory of operation
-------------------
::

    ask --fits--> admitted --leave--> gone
     '--else--> waiting --its turn--> admitted
                   '-----leave------> gone

A generation is admitted if the queue is empty, fewer than ``most`` run, and the largest KV cache it
may need fits on every rank along with theirs. Else it waits: in FIFO order behind those of the same
asker, and askers take turns by deficit round robin (Shreedhar and Varghese 1995), so that each gets
the same number of tokens, however many requests it sends. The asker None, who owns this node, comes
before all others. These leave one of the running places to it while it asks, and `OWNER_S` longer;
if it has not asked for longer, its next generation waits until one of theirs ends. Who has the turn
keeps it until its generation fits: a short one does not overtake a long one, which could starve.
Those who ask at another node, its owner, clients and keys, are one asker, whose turns they take by
turns. So what a node says of them, which nobody can check, is at the expense of these only.
When nothing runs, the next one is always admitted, because a generation that does not fit on an
empty ring is rejected at once; so there is always progress.

An answer of more than `SHORT_ANSWER` tokens, such as one with long reasoning, is *long*. Long ones
leave one running place, and the room of `SHORT_ROOM` tokens, to a short one. If the generation that
has the turn is long and waits for its place or room, short ones start meanwhile: those of the asker
who used the least credit first. While it waits for room, this is one at a time, in the room that it
leaves, so that what others release remains for it; a long one that has no such room to leave keeps
its turn as all others do. So a short answer waits for other short ones, never for a long one to
end, and short ones cannot starve a long one.

The KV cache of a generation may be released before it leaves, when its prefix is kept. So `ask`
may let in others that wait, too: like `leave`, it returns all that it lets in.

A full queue rejects, and the client may retry. Others cannot fill the queue of the owner; of their
own, which is twice as long, an asker may have as many places as it leaves free, so that there is
one for the next asker.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Generic, TypeAlias, TypeVar

from meshllm.errors import Busy, ContextTooLong
from meshllm.names import NodeId, SessionId
from meshllm.protocol.kv_cache.budget import KvBudget
from meshllm.protocol.kv_cache.prefix_scope import PrefixScope, is_owners

MAX_SESSIONS = 32
"""Generations that a ring runs at once, at most; further ones wait."""
MIN_SESSIONS = 8
"""The same, at least, if the memory for their KV caches is there.

Between the two, the entry runs as many as make the ring faster: see `RingTimes.best_sessions`.
"""
MAX_WAITING = 256
"""Length of the owner's queue; its last generation waits for 8 to 32 rounds."""
OWNER_S = 300.0  # s; the owner reads an answer and writes what comes next
QUANTUM = 512  # tokens of credit per turn: the default of `--max-tokens`
SHORT_ANSWER = 2 * QUANTUM  # tokens; a longer one may run for minutes
SHORT_ROOM = 2 * SHORT_ANSWER  # tokens that long ones leave: a short answer, and a prompt

Asker: TypeAlias = NodeId | str | None
"""A node or client, the scope of an API key of this node, or None: the owner of this node."""


Key = TypeVar("Key", bound=Hashable)


def asker_of(scope: PrefixScope) -> Asker:
    """Return whose turn a request takes; another node answers for those who ask it."""
    node, name = scope
    if node is not None:
        return node
    return None if is_owners(scope) else name


def turn_of(scope: PrefixScope) -> tuple[Asker, str]:
    """Return whose turn a request takes, and the name in whose scope another node asks it."""
    node, name = scope
    return asker_of(scope), name if node is not None else ""


@dataclass(frozen=True, slots=True)
class _Demand:
    """What a generation asks for."""

    tokens: int
    """Prompt and answer."""
    is_long: bool


class _Turns(Generic[Key]):
    """Deficit round robin between keys that each have a generation waiting."""

    def __init__(self) -> None:
        self._credit: defaultdict[Key, int] = defaultdict(int)  # tokens
        self._order: dict[Key, None] = {}
        """The first key has the turn."""

    def enter(self, key: Key) -> None:
        """Let a key take turns, the last one first unless it does already."""
        self._order.setdefault(key)

    def next(self, tokens: Mapping[Key, int]) -> Key:
        """Return whose generation, of so many tokens each, is next; it has the credit for it."""
        rounds = {
            key: max(0, -(-(tokens[key] - self._credit[key]) // QUANTUM)) for key in self._order
        }  # how many times a key gets credit until it has enough
        turn = min(rounds, key=lambda key: rounds[key])  # the first of those with the fewest
        for key in rounds:
            self._credit[key] += rounds[turn] * QUANTUM
        for key in takewhile(lambda each: each != turn, rounds):
            self._credit[key] += QUANTUM
            self._order[key] = self._order.pop(key)  # to the end
        return turn

    def spend(self, key: Key, tokens: int) -> None:
        """Take the credit for a generation that starts."""
        self._credit[key] -= tokens

    def credit(self, key: Key) -> int:
        """Return the tokens that a key has got and not spent."""
        return self._credit.get(key, 0)

    def leave(self, key: Key) -> None:
        """Let a key without generations take no turns; it has no credit either."""
        del self._order[key]
        self._credit.pop(key, None)


class _AskerQueue:
    """The waiting generations of one asker, in FIFO order for each name in whose scope it asks."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[SessionId, _Demand]] = {}
        """In order of arrival, by name."""
        self._turns = _Turns[str]()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __contains__(self, session: SessionId) -> bool:
        return any(session in sessions for sessions in self._waiting.values())

    def add(self, session: SessionId, demand: _Demand, name: str) -> None:
        self._waiting.setdefault(name, {})[session] = demand
        self._turns.enter(name)

    def first(self) -> tuple[SessionId, _Demand]:
        """Return the generation that is next, and its demand."""
        firsts = {name: next(iter(each.items())) for name, each in self._waiting.items()}
        return firsts[self._turns.next({name: each.tokens for name, (_, each) in firsts.items()})]

    def first_short(self, most: float) -> tuple[SessionId, _Demand] | None:
        """Return the short generation of up to ``most`` tokens that is next; None if none is."""
        found = dict[str, tuple[SessionId, _Demand]]()
        for name, sessions in self._waiting.items():
            for session, demand in sessions.items():
                if not demand.is_long and demand.tokens <= most:
                    found[name] = session, demand
                    break
        return found[max(found, key=self._turns.credit)] if found else None

    @property
    def longest(self) -> int:
        """The most tokens that one of them asks for."""
        demands = (each for sessions in self._waiting.values() for each in sessions.values())
        return max((each.tokens for each in demands), default=0)

    def remove(self, session: SessionId, *, spent: int = 0) -> None:
        """Remove a generation that starts, for which credit was spent, or leaves."""
        name = next(name for name, sessions in self._waiting.items() if session in sessions)
        self._turns.spend(name, spent)
        del self._waiting[name][session]
        if not self._waiting[name]:
            del self._waiting[name]
            self._turns.leave(name)


class Admission:
    """The running and waiting generations of one entry."""

    def __init__(self, budget: KvBudget, most: int, waiting: int = MAX_WAITING) -> None:
        self._budget = budget
        self._most = most
        self._most_waiting = waiting
        self._admitted: dict[SessionId, Asker] = {}
        self._long = set[SessionId]()  # of the admitted ones
        self._owner_at = -math.inf  # when the owner last asked or left
        self._waiting: dict[Asker, _AskerQueue] = {}
        self._turns = _Turns[Asker]()

    def ask(
        self,
        session: SessionId,
        tokens: int,
        now: float,
        asker: Asker = None,
        name: str = "",
        *,
        answer: int = 0,
    ) -> list[SessionId]:
        """Request admission of up to ``tokens`` tokens; return those that may start now.

        ``asker`` is who sent the request; None is the owner of this node. ``name`` tells apart
        those for whom it asks, if there are several. ``answer`` are those of the tokens that may be
        generated.

        Raises:
            ContextTooLong: they would not fit on an empty ring.
            Busy: the queue is full.
        """
        if not self._budget.holds(tokens):
            raise self._too_long(tokens)
        if self._is_full(asker):
            waiting = sum(map(len, self._waiting.values()))
            raise Busy(
                f"The queue is full: {len(self._admitted)} generations are running and"
                f" {waiting} are waiting",
                hint="retry later",
            )
        demand = _Demand(tokens, answer > SHORT_ANSWER)
        self._waiting.setdefault(asker, _AskerQueue()).add(session, demand, name)
        self._turns.enter(asker)
        if asker is None:
            self._owner_at = now
        return self._admit(now)

    def leave(self, session: SessionId, now: float) -> list[SessionId]:
        """Remove a running or waiting generation; return those that may start now."""
        for asker, queue in self._waiting.items():
            if session in queue:
                self._forget(asker, session)
                break
        if session in self._admitted and self._admitted.pop(session) is None:
            self._owner_at = now
        self._long.discard(session)
        self._budget.release(session)
        return self._admit(now)

    def resize(self, totals: Sequence[int], now: float) -> list[SessionId] | None:
        """Work with so many bytes on each rank from now on; return those that may start now.

        None if what runs and waits does not fit, and nothing changes: those that wait fit on an
        empty ring, as `ask` promises.
        """
        longest = max((queue.longest for queue in self._waiting.values()), default=0)
        return self._admit(now) if self._budget.resize(totals, longest) else None

    def is_idle(self, now: float) -> bool:
        """Return whether it may be forgotten: none runs or waits, and the owner has no place."""
        return not self._admitted and not self._waiting and now >= self._owner_at + OWNER_S

    def _admit(self, now: float) -> list[SessionId]:
        begun = []
        is_left = now < self._owner_at + OWNER_S  # one place, to the owner
        others = max(1, self._most - is_left)
        while self._waiting and len(self._admitted) < self._most:
            asker, are_full = self._turn(), self._others >= others
            if asker is not None and are_full:
                break
            session, demand = self._waiting[asker].first()
            waits_for_place = demand.is_long and not self._has_long_place(asker, others)
            if waits_for_place or not self._starts(session, demand):
                ahead = self._waiting if demand.is_long and not are_full else ()
                found = self._overtaking(demand, ahead, waits_for_place=waits_for_place)
                if found is None:
                    break
                asker, session, demand = found
            self._turns.spend(asker, demand.tokens)
            self._forget(asker, session, spent=demand.tokens)
            self._admitted[session] = asker
            begun.append(session)
        return begun

    def _has_long_place(self, asker: Asker, others: int) -> bool:
        """Return whether a long one leaves a place, also of the ``others`` of the owner."""
        if len(self._long) >= max(1, self._most - 1):
            return False
        theirs = sum(self._admitted[each] is not None for each in self._long)
        return asker is None or theirs < max(1, others - 1)

    def _starts(self, session: SessionId, demand: _Demand) -> bool:
        """Reserve the room that a generation needs, if it may have it."""
        leaves_room = (
            not demand.is_long
            or not self._can_leave(demand)
            or self._budget.fits_beside(demand.tokens, SHORT_ROOM, self._long)
        )
        is_fit = leaves_room and self._budget.reserve(session, demand.tokens)
        if is_fit and demand.is_long:
            self._long.add(session)
        return is_fit

    def _can_leave(self, demand: _Demand) -> bool:
        """Return whether there is room for a short generation besides a long one."""
        return self._budget.fits_beside(demand.tokens, SHORT_ROOM, ())

    def _overtaking(
        self, first: _Demand, askers: Collection[Asker], *, waits_for_place: bool
    ) -> tuple[Asker, SessionId, _Demand] | None:
        """Start a short generation while a long one waits whose turn it is; return it."""
        has_short = len(self._long) < len(self._admitted)
        if not waits_for_place and (has_short or not self._can_leave(first)):
            return None
        most = math.inf if waits_for_place else SHORT_ROOM
        for asker in sorted(askers, key=lambda each: (each is not None, -self._turns.credit(each))):
            found = self._waiting[asker].first_short(most)
            if found and self._starts(*found):
                return asker, *found
        return None

    @property
    def _others(self) -> int:
        """How many generations of others than the owner run."""
        return sum(asker is not None for asker in self._admitted.values())

    def _is_full(self, asker: Asker) -> bool:
        own, all_of_them = len(self._waiting.get(asker, ())), sum(map(len, self._waiting.values()))
        owners = len(self._waiting.get(None, ()))
        if asker is None:
            return owners >= self._most_waiting
        return own >= 2 * self._most_waiting - (all_of_them - owners)

    def _turn(self) -> Asker:
        """Return the asker whose first generation is next."""
        if None in self._waiting:
            return None
        firsts = {asker: queue.first()[1].tokens for asker, queue in self._waiting.items()}
        return self._turns.next(firsts)

    def _forget(self, asker: Asker, session: SessionId, *, spent: int = 0) -> None:
        self._waiting[asker].remove(session, spent=spent)
        if not self._waiting[asker]:
            del self._waiting[asker]
            self._turns.leave(asker)

    def _too_long(self, tokens: int) -> ContextTooLong:
        room = max(self._budget.rooms, key=lambda each: each.cost(tokens).held - each.total)
        cost = room.cost(tokens)
        return ContextTooLong(
            f"This model's maximum context length is {self._budget.tokens} tokens, for which the KV"
            f" caches have room; prompt and answer may take {tokens}: one node would need"
            f" {cost.held + cost.growth} bytes and has {max(0, room.total)}",
            hint="use a shorter prompt, a smaller `--max-tokens`, more memory or more nodes",
        )
