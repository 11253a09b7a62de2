"""Which generations may begin on an entry, and in which order the others wait.

Theory of operation
-------------------
::

    ask --fits--> admitted --leave--> gone
     '--else--> waiting --its turn--> admitted
                   '-----leave------> gone

A generation is admitted when no other waits, fewer than ``most`` run, and what it may grow to fits
beside them on every rank. Else it waits, first come, first served: a short one does not overtake a
long one, which could wait without end. Where nothing runs, the first that waits is admitted, as one
that fits on no empty ring is refused at once; so somebody is always served. A full queue refuses,
and the client may ask again. Each `leave` says who is admitted for it.
"""

from meshllm.errors import Busy, UserError
from meshllm.names import SessionId
from meshllm.protocol.kv_cache.budget import KvBudget

MAX_WAITING = 64
"""Generations that wait; the last of them waits for 8 rounds of 8."""


class Admission:
    """The generations of one entry; ids name them."""

    def __init__(self, budget: KvBudget, most: int, waiting: int = MAX_WAITING) -> None:
        self._budget = budget
        self._most = most
        self._most_waiting = waiting
        self._admitted: set[SessionId] = set()
        self._waiting: dict[SessionId, int] = {}  # tokens, the first come first

    def ask(self, session: SessionId, tokens: int) -> bool:
        """Ask for a generation that may come to so many tokens; tell whether it may begin now.

        Raises:
            UserError: there is no room for it, ever.
            Busy: too many wait already.
        """
        if not self._budget.holds(tokens):
            raise self._too_long(tokens)
        if len(self._waiting) >= self._most_waiting:
            raise Busy(
                f"{len(self._admitted)} answers are being made and {len(self._waiting)} wait,"
                f" which are the most",
                hint="ask again later",
            )
        self._waiting[session] = tokens
        return session in self._admit()

    def leave(self, session: SessionId) -> list[SessionId]:
        """End a generation, or its wait; return those that may begin for it."""
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

    def _too_long(self, tokens: int) -> UserError:
        room = max(self._budget.rooms, key=lambda each: each.cost(tokens).held - each.total)
        cost = room.cost(tokens)
        return UserError(
            f"The prompt and its answer may come to {tokens} tokens, and there is room for"
            f" {self._budget.tokens}: one node would need {cost.held + cost.growth} bytes for their"
            f" cache and has {max(0, room.total)}",
            hint="use a shorter prompt, a smaller `--max-tokens`, more memory or more nodes",
        )
