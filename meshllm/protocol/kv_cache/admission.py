"""Admission control of an entry: which generations may start, and in which order the others wait.

Theory of operation
-------------------
::

    ask --fits--> admitted --leave--> gone
     '--else--> waiting --its turn--> admitted
                   '-----leave------> gone

A generation is admitted if the queue is empty, fewer than ``most`` run, and the largest KV cache it
may need fits on every rank along with theirs. Else it waits in FIFO order: a short generation does
not overtake a long one, which could starve. When nothing runs, the head of the queue is always
admitted, because a generation that does not fit on an empty ring is rejected at once; so there is
always progress. A full queue rejects, and the client may retry. Each `leave` returns the
generations that it lets in.
"""

from meshllm.errors import Busy, ContextTooLong
from meshllm.names import SessionId
from meshllm.protocol.kv_cache.budget import KvBudget

MAX_WAITING = 64
"""Length of the queue; its last generation waits for 8 rounds of 8."""


class Admission:
    """The running and waiting generations of one entry."""

    def __init__(self, budget: KvBudget, most: int, waiting: int = MAX_WAITING) -> None:
        self._budget = budget
        self._most = most
        self._most_waiting = waiting
        self._admitted: set[SessionId] = set()
        self._waiting: dict[SessionId, int] = {}  # tokens, in order of arrival

    def ask(self, session: SessionId, tokens: int) -> bool:
        """Request admission of up to ``tokens`` tokens; return whether to start now, else wait.

        Raises:
            ContextTooLong: they would not fit on an empty ring.
            Busy: the queue is full.
        """
        if not self._budget.holds(tokens):
            raise self._too_long(tokens)
        if len(self._waiting) >= self._most_waiting:
            raise Busy(
                f"The queue is full: {len(self._admitted)} generations are running and"
                f" {len(self._waiting)} are waiting",
                hint="retry later",
            )
        self._waiting[session] = tokens
        return session in self._admit()

    def leave(self, session: SessionId) -> list[SessionId]:
        """Remove a running or waiting generation; return those that may start now."""
        self._waiting.pop(session, None)
        self._admitted.discard(session)
        self._budget.release(session)
        return self._admit()

    def _admit(self) -> list[SessionId]:
        begun = []
        for session, tokens in list(self._waiting.items()):
            is_full = len(self._admitted) >= self._most
            if is_full or not self._budget.reserve(session, tokens):
                break
            del self._waiting[session]
            self._admitted.add(session)
            begun.append(session)
        return begun

    def _too_long(self, tokens: int) -> ContextTooLong:
        room = max(self._budget.rooms, key=lambda each: each.cost(tokens).held - each.total)
        cost = room.cost(tokens)
        return ContextTooLong(
            f"The prompt and its answer may take {tokens} tokens, and the KV cache has room for"
            f" {self._budget.tokens}: one node would need {cost.held + cost.growth} bytes and has"
            f" {max(0, room.total)}",
            hint="use a shorter prompt, a smaller `--max-tokens`, more memory or more nodes",
        )
