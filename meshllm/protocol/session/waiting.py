"""Room for the rows that wait on a rank, and the queue of the prompts that share it.

Theory of operation
-------------------
Rows wait on a rank that computes more slowly than they arrive, and in front of one that reads more
slowly than they are computed. Every rank reserves a `RowQueueLimits` for them, those that run and
those that wait to be sent together. Its size follows from the width of the model, so that all ranks
know it; a plan counts it with the workspace of a forward, as memory that caches cannot have.

The entry alone lets rows into the ring, and all of them may wait on the same rank. There is room
for the steps of all sessions: one that runs beside others has one step in flight, and perhaps one
that was given up, and the queues of a few that ran alone before may be full. The chunks of
prompts, and the rows of steps that are computed again after a loss, are many more: a session sends
them if they fit beside all rows in flight, else it queues. So a prompt that runs alone has all the
room, and those that run at once share it by turns, in FIFO order. There is always progress: any
message fits on its own, and what is in flight returns, or is given up, without what is queued.

Rows that are given up, as a client stopped or a chunk is sent again, are dropped from the queues of
the links, and before they are computed. Only the chunk that is being computed stays, beside which
there is room for one of the next. Rows that do not fit show that the entry violates these rules: a
rank refuses them.
"""

from dataclasses import dataclass
from typing import Protocol

from meshllm.names import SessionId
from meshllm.protocol.drafting.window import MAX_STEP_ROWS
from meshllm.protocol.kv_cache.admission import MAX_OPEN_SESSIONS
from meshllm.protocol.session.codec import MAX_POSITION, MAX_ROWS
from meshllm.protocol.session.stage import MAX_PENDING, MAX_WAITING_BYTES

_CHUNKS = 4  # the largest; one for each rank keeps a ring of 4 busy, shorter chunks a larger one
MAX_DATA_BYTES = 64 << 20  # of a message, as transports limit it
_STEP_ROWS = (2 * MAX_OPEN_SESSIONS + 4 * MAX_PENDING) * MAX_STEP_ROWS  # see above
_OTHER_BYTES = 4 << 20  # headers, messages without rows, and a part of the logits of a step


@dataclass(frozen=True, slots=True)
class RowQueueLimits:
    """Memory of one rank for rows that run, wait for that, or wait to be sent."""

    row_bytes: int
    """Of a hidden state between two ranks."""

    @property
    def prompt_bytes(self) -> int:
        """Bytes for rows of prompts, of all sessions."""
        return _CHUNKS * self._chunk_bytes

    @property
    def max_waiting(self) -> int:
        """Bytes for all rows, with a chunk that was given up: a rank refuses more."""
        most = self.prompt_bytes + self._chunk_bytes + _STEP_ROWS * self.row_bytes
        return min(most, MAX_WAITING_BYTES)

    @property
    def total(self) -> int:
        """Bytes that a rank reserves: for all rows, and for what is queued beside them."""
        return self.max_waiting + _OTHER_BYTES

    @property
    def _chunk_bytes(self) -> int:
        return min(MAX_ROWS * self.row_bytes, MAX_DATA_BYTES)


class Prompting(Protocol):
    """A session whose prompt takes part of the room."""

    @property
    def in_flight(self) -> int:
        """Rows that have left it, or are about to, and have not come back."""


class PromptQueue:
    """The sessions of an entry whose prompts share the room for rows."""

    def __init__(self, most_rows: int = MAX_POSITION) -> None:
        """Let up to ``most_rows`` rows be in flight, of which any message has fewer."""
        self.most_rows = most_rows
        self._sessions: dict[SessionId, Prompting] = {}
        self.waiting: dict[SessionId, int] = {}
        """How many rows each session waits to send, in FIFO order."""
        self._turn: SessionId | None = None  # the session that `next` has returned

    def enter(self, session: SessionId, prompting: Prompting) -> None:
        """Count the rows of a session from now on."""
        self._sessions[session] = prompting

    def take(self, session: SessionId, rows: int) -> bool:
        """Return whether a session may send this many rows now; if not, it waits for its turn."""
        is_turn, self._turn = session == self._turn, None
        is_first = is_turn or next(iter(self.waiting), session) == session
        if is_first and self._fits(rows):
            self.waiting.pop(session, None)
            return True
        self.waiting = {session: rows} | self.waiting if is_turn else self.waiting | {session: rows}
        return False

    def next(self) -> SessionId | None:
        """Return the session whose turn it is, if its rows fit: it may `take` room for them now."""
        first = next(iter(self.waiting), None)
        if first is None or not self._fits(self.waiting[first]):
            return None
        del self.waiting[first]
        self._turn = first
        return first

    def end(self, session: SessionId) -> None:
        """Forget a session, which sends nothing more."""
        self.waiting.pop(session, None)

    def leave(self, session: SessionId) -> None:
        """Forget a session of which nothing is in flight any more."""
        self.end(session)
        del self._sessions[session]

    def _fits(self, rows: int) -> bool:
        return rows + sum(each.in_flight for each in self._sessions.values()) <= self.most_rows
