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
before all others. Who has the turn keeps it until its generation fits: a short one does not
overtake a long one, which could starve. When nothing runs, the next one is always admitted, because
a generation that does not fit on an empty ring is rejected at once; so there is always progress. A
full queue rejects, and the client may retry; others cannot fill the queue of the owner. Each
`leave` returns the generations that it lets in.
"""

from collections import defaultdict

from meshllm.errors import Busy, ContextTooLong
from meshllm.names import NodeId, SessionId
from meshllm.protocol.kv_cache.budget import KvBudget

MAX_WAITING = 256
"""Length of the queue; its last generation waits for 32 rounds of 8."""
QUANTUM = 512  # tokens of credit per turn: the default of `--max-tokens`


class Admission:
    """The running and waiting generations of one entry."""

    def __init__(self, budget: KvBudget, most: int, waiting: int = MAX_WAITING) -> None:
        self._budget = budget
        self._most = most
        self._most_waiting = waiting
        self._admitted: set[SessionId] = set()
        self._waiting: dict[NodeId | None, dict[SessionId, int]] = {}
        """Tokens in order of arrival, by asker; the first asker has the turn."""
        self._credit: defaultdict[NodeId | None, int] = defaultdict(int)  # tokens, of those waiting

    def ask(self, session: SessionId, tokens: int, asker: NodeId | None = None) -> bool:
        """Request admission of up to ``tokens`` tokens; return whether to start now, else wait.

        ``asker`` is the node that sent the request; None is the owner of this one.

        Raises:
            ContextTooLong: they would not fit on an empty ring.
            Busy: the queue is full.
        """
        if not self._budget.holds(tokens):
            raise self._too_long(tokens)
        waiting = self._places_taken(by_owner=asker is None)
        if waiting >= self._most_waiting:
            raise Busy(
                f"The queue is full: {len(self._admitted)} generations are running and"
                f" {waiting} are waiting",
                hint="retry later",
            )
        self._waiting.setdefault(asker, {})[session] = tokens
        return session in self._admit()

    def leave(self, session: SessionId) -> list[SessionId]:
        """Remove a running or waiting generation; return those that may start now."""
        for asker, sessions in self._waiting.items():
            if session in sessions:
                self._forget(asker, session)
                break
        self._admitted.discard(session)
        self._budget.release(session)
        return self._admit()

    def _admit(self) -> list[SessionId]:
        begun = []
        while self._waiting and len(self._admitted) < self._most:
            asker = self._turn()
            session, tokens = next(iter(self._waiting[asker].items()))
            if not self._budget.reserve(session, tokens):
                break
            self._credit[asker] -= tokens
            self._forget(asker, session)
            self._admitted.add(session)
            begun.append(session)
        return begun

    def _places_taken(self, *, by_owner: bool) -> int:
        askers = self._waiting.items()
        return sum(len(each) for asker, each in askers if (asker is None) == by_owner)

    def _turn(self) -> NodeId | None:
        """Return the asker whose first generation is next, which has the credit for it."""
        if None in self._waiting:
            return None
        while True:
            asker, sessions = next(iter(self._waiting.items()))
            if self._credit[asker] >= next(iter(sessions.values())):
                return asker
            self._credit[asker] += QUANTUM
            self._waiting[asker] = self._waiting.pop(asker)  # to the end

    def _forget(self, asker: NodeId | None, session: SessionId) -> None:
        """Remove a waiting generation; an asker without any has no credit either."""
        del self._waiting[asker][session]
        if not self._waiting[asker]:
            del self._waiting[asker]
            self._credit.pop(asker, None)

    def _too_long(self, tokens: int) -> ContextTooLong:
        room = max(self._budget.rooms, key=lambda each: each.cost(tokens).held - each.total)
        cost = room.cost(tokens)
        return ContextTooLong(
            f"This model's maximum context length is {self._budget.tokens} tokens, for which the KV"
            f" caches have room; prompt and answer may take {tokens}: one node would need"
            f" {cost.held + cost.growth} bytes and has {max(0, room.total)}",
            hint="use a shorter prompt, a smaller `--max-tokens`, more memory or more nodes",
        )
