"""Admission control of an entry: which generations may start or go on, and in which order.

Theory of operation
-------------------
::

    ask --fits--> running --grow, no room--> paused --leave--> gone
     |             ^  |                        |  ^
     |             |  '---------leave----------|--|--> gone
     |             '-------room or place-------'
     '--else--> waiting --its turn--> running
                   '-----leave------> gone

A generation starts if the queue is empty, fewer than ``most`` run, and the KV cache of its prompt
and of the first `QUANTUM` tokens of its answer fits on every rank along with theirs, so that all
can end, see `meshllm.protocol.kv_cache.budget`. When it has used most of that, it asks for more. If
there is none, it is paused: it computes only what it still has room for, holds its memory, and
gives its place to another one. Those that are paused go on in the order of their requests, and
before those that wait to start. For each running place, `OPEN_PER_PLACE` generations may have
started, then only few, of the owner or short.

Else a generation waits: in FIFO order behind those of the same asker, and askers take turns by
deficit round robin (Shreedhar and Varghese 1995), so that each gets the same number of tokens,
however many requests it sends. The asker None, who owns this node, comes before all others, to
start and to go on. These leave one of the running places to it while it asks, and `OWNER_S` longer;
if it has not asked for longer, its next generation waits until one of theirs ends. Who has the turn
keeps it until its generation fits, unless others have used less meanwhile: a small one does not
overtake a large one, which could starve. The owner, clients and keys of another node are together
one asker and share its turns, so that a node which misreports who asks harms its own only. When
nothing runs, the next one is always admitted, because a generation that does not fit on an empty
ring is rejected at once; and when only short ones run, one of those that are paused can always go
on: so there is always progress.

How long an answer will be is not known in advance, only how long it may be. One that needs room for
more than `SHORT_ANSWER` tokens here, such as one with long reasoning, is *long* from then on: long
ones leave one running place to others, else they pause. One that may have no more is *short*: all
others leave the room of `SHORT_ROOM` tokens to it, if there is that much besides them, and a place.
While one of these waits for room, short ones start: those of the asker who used the least credit
first, and one at a time, in the room that is left, so that what others release remains for the one
that waits. So a short answer waits for other short ones, or until another one is long, hardly ever
for a long one to end; and none can starve a long one.

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
from itertools import islice, takewhile
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
OPEN_PER_PLACE = 2  # sessions with KV caches for each that may run, at most: the others are paused
MAX_OPEN_SESSIONS = OPEN_PER_PLACE * MAX_SESSIONS + 3
"""Sessions with KV caches in a ring, at most; the last 3 are short ones or the owner's."""
MAX_WAITING = 256
"""Length of the owner's queue; its last generation waits for 8 to 32 rounds."""
OWNER_S = 300.0  # s; the owner reads an answer and writes what comes next
QUANTUM = 512  # tokens of an answer for which there is room at a time, and of credit per turn
SHORT_ANSWER = 2 * QUANTUM  # tokens; a longer one may run for minutes
SHORT_ROOM = 2 * SHORT_ANSWER  # tokens that long ones leave: a short answer, and a prompt

Requester: TypeAlias = NodeId | str | None
"""A node or client, the scope of an API key of this node, or None: the owner of this node."""


Key = TypeVar("Key", bound=Hashable)


def requester_of(scope: PrefixScope) -> Requester:
    """Return whose turn a request takes; another node answers for those who ask it."""
    node, name = scope
    if node is not None:
        return node
    return None if is_owners(scope) else name


def queue_key_of(scope: PrefixScope) -> tuple[Requester, str]:
    """Return whose turn a request takes, and the name in whose scope another node asks it."""
    node, name = scope
    return requester_of(scope), name if node is not None else ""


@dataclass(frozen=True, slots=True)
class _Demand:
    """What a generation asks for."""

    prompt: int
    most: int
    """Tokens of prompt and answer."""

    @property
    def tokens(self) -> int:
        """Those that it needs to start."""
        return min(self.prompt + QUANTUM, self.most)

    @property
    def is_short(self) -> bool:
        """Whether its answer cannot become long."""
        return self.most <= self.prompt + SHORT_ANSWER


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
        """Return whose generation, of this many tokens each, is next; it has the credit for it."""
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
        """Take the credit for tokens of a generation, if its key takes turns."""
        if key in self._order:
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

    def first_short(self) -> tuple[SessionId, _Demand] | None:
        """Return the short generation that is next and fits into `SHORT_ROOM`, if there is one."""
        found = dict[str, tuple[SessionId, _Demand]]()
        for name, sessions in self._waiting.items():
            for session, demand in sessions.items():
                if demand.is_short and demand.most <= SHORT_ROOM:
                    found[name] = session, demand
                    break
        return found[max(found, key=self._turns.credit)] if found else None

    @property
    def longest(self) -> int:
        """The most tokens that one of them may take."""
        demands = (each for sessions in self._waiting.values() for each in sessions.values())
        return max((each.most for each in demands), default=0)

    def spend(self, name: str, tokens: int) -> None:
        """Take the credit for tokens of a generation that has started."""
        self._turns.spend(name, tokens)

    def remove(self, session: SessionId, spent: int) -> str:
        """Remove a generation that starts, for so much credit, or leaves; return its name."""
        name = next(name for name, sessions in self._waiting.items() if session in sessions)
        self._turns.spend(name, spent)
        del self._waiting[name][session]
        if not self._waiting[name]:
            del self._waiting[name]
            self._turns.leave(name)
        return name


@dataclass(frozen=True, slots=True)
class _Admitted:
    """A generation that has started."""

    requester: Requester
    name: str
    demand: _Demand


class Admission:
    """The running, paused and waiting generations of one entry."""

    def __init__(self, budget: KvBudget, most: int, waiting: int = MAX_WAITING) -> None:
        self._budget = budget
        self._most = most
        self._most_waiting = waiting
        self._admitted: dict[SessionId, _Admitted] = {}
        self._paused: dict[SessionId, int] = {}
        """The tokens that each needs to go on, in the order in which they asked."""
        self._room: dict[SessionId, int] = {}
        """The tokens for which each admitted one has room."""
        self._long = set[SessionId]()  # of the admitted ones
        self._ended = set[SessionId]()  # and those that have yet to leave
        self._owner_at = -math.inf  # when the owner last asked or left
        self._waiting: dict[Requester, _AskerQueue] = {}
        self._turns = _Turns[Requester]()

    def ask(
        self,
        session: SessionId,
        tokens: int,
        now: float,
        requester: Requester = None,
        name: str = "",
        *,
        answer: int = 0,
    ) -> list[SessionId]:
        """Request admission of up to ``tokens`` tokens; return those that may start or go on now.

        ``asker`` is who sent the request; None is the owner of this node. ``name`` tells apart
        those for whom it asks, if there are several. ``answer`` are those of the tokens that may be
        generated: there is room for the first `QUANTUM` of them when it starts, see `grow`.

        Raises:
            ContextTooLong: they would not fit on an empty ring.
            Busy: the queue is full.
        """
        if not self._budget.holds(tokens):
            raise self._too_long(tokens)
        if self._is_full(requester):
            waiting = sum(map(len, self._waiting.values()))
            raise Busy(
                f"The queue is full: {len(self._admitted)} generations are running and"
                f" {waiting} are waiting",
                hint="retry later",
            )
        demand = _Demand(tokens - answer, tokens)
        self._waiting.setdefault(requester, _AskerQueue()).add(session, demand, name)
        self._turns.enter(requester)
        if requester is None:
            self._owner_at = now
        return self._admit(now)

    def grow(self, session: SessionId, tokens: int, now: float) -> list[SessionId]:
        """Request room for this many tokens of a generation; return those that may go on now.

        Until it is one of these, it is paused: it must not reach what it has no room for.
        """
        if session in self._admitted and session not in self._ended:
            self._paused[session] = tokens
        return self._admit(now)

    def leave(self, session: SessionId, now: float) -> list[SessionId]:
        """Remove a generation; return those that may start or go on now."""
        for requester, queue in self._waiting.items():
            if session in queue:
                self._forget(requester, session, 0)
                break
        left = self._admitted.pop(session, None)
        if left and left.requester is None:
            self._owner_at = now
        self._paused.pop(session, None)
        self._room.pop(session, None)
        self._long.discard(session)
        self._ended.discard(session)
        self._budget.release(session)
        return self._admit(now)

    def end(self, session: SessionId, now: float) -> list[SessionId]:
        """Note that a generation computes nothing more, until it leaves; return as `leave` does."""
        if session in self._admitted:
            self._paused.pop(session, None)
            self._ended.add(session)
        return self._admit(now)

    def resize(self, totals: Sequence[int], now: float) -> list[SessionId] | None:
        """Work with this many bytes on each rank from now on; return those that may go on now.

        None if what runs and waits does not fit, and nothing changes: those that wait fit on an
        empty ring, as `ask` promises.
        """
        longest = max((queue.longest for queue in self._waiting.values()), default=0)
        return self._admit(now) if self._budget.resize(totals, longest) else None

    def is_idle(self, now: float) -> bool:
        """Return whether it may be forgotten: none runs or waits, and the owner has no place."""
        return not self._admitted and not self._waiting and now >= self._owner_at + OWNER_S

    def _admit(self, now: float) -> list[SessionId]:
        is_left = now < self._owner_at + OWNER_S  # one place, to the owner
        others = max(1, self._most - is_left)
        begun, blocked = self._go_on(others)
        while self._waiting and self._has_place(None, others):
            requester = self._turn()
            if not self._has_place(requester, others):
                break
            session, demand = self._waiting[requester].first()
            before = (each for each in blocked if requester is not None or each.requester is None)
            ahead = next((each.demand for each in before), None)
            if ahead or not self._starts(session, demand, requester):
                found = self._overtaking(ahead or demand, others)
                if found is None:
                    break
                requester, session, demand = found
            self._turns.spend(requester, demand.tokens)
            name = self._forget(requester, session, demand.tokens)
            self._admitted[session] = _Admitted(requester, name, demand)
            self._room[session] = demand.tokens
            begun.append(session)
        return begun

    def _go_on(self, others: int) -> tuple[list[SessionId], list[_Admitted]]:
        """Let paused generations go on; return them, and those that have a place and no room."""
        begun, blocked = list[SessionId](), list[SessionId]()
        for session in sorted(
            self._paused, key=lambda each: self._admitted[each].requester is not None
        ):
            found, tokens = self._admitted[session], self._paused[session]
            if not self._has_place(found.requester, others, is_long=self._is_long(session)):
                continue
            is_fit = self._leaves_room(session, found.demand, tokens)
            if is_fit and self._budget.reserve(session, tokens):
                begun.append(self._resume(session))
            else:
                blocked.append(session)
        if not begun and all(map(self._is_passing, self._admitted)):  # then one may take all room
            fits = filter(lambda each: self._budget.reserve(each, self._paused[each]), blocked)
            begun += map(self._resume, islice(fits, 1))
            blocked = [each for each in blocked if each not in begun]
        return begun, [self._admitted[each] for each in blocked]

    def _is_passing(self, session: SessionId) -> bool:
        """Whether a generation holds up no other for long: it is paused, over, or short."""
        is_over = session in self._paused or session in self._ended
        return is_over or self._admitted[session].demand.is_short

    def _is_long(self, session: SessionId) -> bool:
        """Whether an answer that asks for more room is long with it."""
        found = self._admitted[session]
        return self._room[session] >= found.demand.prompt + SHORT_ANSWER

    def _resume(self, session: SessionId) -> SessionId:
        found = self._admitted[session]
        if self._is_long(session):
            self._long.add(session)
        self._room[session] = self._paused.pop(session)
        self._turns.spend(found.requester, QUANTUM)
        if queue := self._waiting.get(found.requester):
            queue.spend(found.name, QUANTUM)
        return session

    def _has_place(self, requester: Requester, others: int, *, is_long: bool = False) -> bool:
        """Return whether there is a running place, of which others than the owner have fewer.

        Long ones leave one of them, and one of those of others.
        """
        running = [each for each in self._admitted if each not in self._paused]
        long = [each for each in running if each in self._long]
        return self._are_fewer(running, requester, self._most, others) and (
            not is_long or self._are_fewer(long, requester, self._most - 1, others - 1)
        )

    def _are_fewer(
        self, sessions: Collection[SessionId], requester: Requester, most: int, others: int
    ) -> bool:
        """Return whether these are fewer than ``most``, and those of others than ``others``."""
        theirs = sum(self._admitted[each].requester is not None for each in sessions)
        return len(sessions) < max(1, most) and (requester is None or theirs < max(1, others))

    def _starts(self, session: SessionId, demand: _Demand, requester: Requester) -> bool:
        """Reserve the room that a generation needs to start, if it may have it."""
        most = OPEN_PER_PLACE * self._most + (requester is None) + 2 * demand.is_short
        return (
            len(self._admitted) < most
            and self._leaves_room(session, demand, demand.tokens)
            and self._budget.reserve(session, demand.tokens, demand.most)
        )

    def _leaves_room(self, session: SessionId, demand: _Demand, tokens: int) -> bool:
        """Return whether one that is not short leaves room for one that is, if it can."""
        if demand.is_short or not self._can_leave(demand):
            return True
        others = (each for each, it in self._admitted.items() if not it.demand.is_short)
        return self._budget.fits_beside(tokens, SHORT_ROOM, set(others) - {session})

    def _can_leave(self, demand: _Demand) -> bool:
        return self._budget.fits_beside(demand.most, SHORT_ROOM, ())

    def _overtaking(
        self, blocked: _Demand, others: int
    ) -> tuple[Requester, SessionId, _Demand] | None:
        """Start a short generation while one that is not waits for room; return it."""
        running = self._admitted.keys() - self._paused.keys() - self._ended
        has_short = any(self._admitted[each].demand.is_short for each in running)
        if blocked.is_short or has_short or not self._can_leave(blocked):
            return None
        for requester in sorted(
            self._waiting, key=lambda each: (each is not None, -self._turns.credit(each))
        ):
            found = self._waiting[requester].first_short()
            if found and self._has_place(requester, others) and self._starts(*found, requester):
                return requester, *found
        return None

    def _is_full(self, requester: Requester) -> bool:
        own, all_of_them = (
            len(self._waiting.get(requester, ())),
            sum(map(len, self._waiting.values())),
        )
        owners = len(self._waiting.get(None, ()))
        if requester is None:
            return owners >= self._most_waiting
        return own >= 2 * self._most_waiting - (all_of_them - owners)

    def _turn(self) -> Requester:
        """Return the asker whose first generation is next."""
        if None in self._waiting:
            return None
        firsts = {requester: queue.first()[1].tokens for requester, queue in self._waiting.items()}
        return self._turns.next(firsts)

    def _forget(self, requester: Requester, session: SessionId, spent: int) -> str:
        """Remove a waiting generation; return the name for which it was asked."""
        name = self._waiting[requester].remove(session, spent)
        if not self._waiting[requester]:
            del self._waiting[requester]
            self._turns.leave(requester)
        return name

    def _too_long(self, tokens: int) -> ContextTooLong:
        room = max(self._budget.rooms, key=lambda each: each.cost(tokens).held - each.total)
        cost = room.cost(tokens)
        return ContextTooLong(
            f"This model's maximum context length is {self._budget.tokens} tokens, for which the KV"
            f" caches have room; prompt and answer take at least {tokens}: one node would need"
            f" {cost.held + cost.growth} bytes and has {max(0, room.total)}",
            hint="use a shorter prompt, more memory or more nodes",
        )
