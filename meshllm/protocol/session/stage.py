"""A stage, that is a rank after the entry, and the sessions that it serves.

Theory of operation
-------------------
A session on a stage is (gen, kv_len, running rows, queue). One rule drives it, crop on write::

    Data, older epoch or gen     dropped
    Data, newer epoch            Fault(EPOCH): this rank does not know that plan yet
    Data, pos > kv_len           Gap(kv_len): rows before it never arrived
    Data, else                   crop the cache to pos, run the rows, kv_len = pos + rows, forward

    Data, beyond the context     Fault(MODEL): the session ends here, before anything is allocated
    Data, beyond the budget      Fault(BUSY), likewise, see `meshllm.protocol.kv_cache.budget`
    Data, too many bytes wait    Fault(BUSY), likewise: rows arrive faster than they are computed

A Resume may name lost layers: those that were on another node when their caches were computed. The
positions to recompute follow it as Data for which the driver runs only the layers that lack the
rows, from rows that the rank before recorded when it sent them the first time. They neither crop
nor grow: ``kv_len`` is that of the Resume from the start, and rows after it wait in the queue.

    Data to recompute, beyond kv_len    Fault(RULES)
    Malformed, whatever it was          Fault(RULES), once, or handled as a Close without tallies,
                                        if it was one

So no message ever rolls back: a rejected or repeated row is undone by the next write at its
position. Gap, Fault, Cancel, Resume and Close are passed on round the ring to the entry, which
alone decides. What a Close asks to keep stays in the prefix cache until a Resume, see
`meshllm.protocol.kv_cache.prefix_index`.

The last rank may hold a part of the head. If a step of one row asks for it, this part of the logits
follows that row, unless the step is cancelled; it is not a fault if the logits never come.

Invariant: while nothing runs, the driver's cache holds ``kv_len`` positions or more. While rows
run, they are written there; a session has one `Compute` at a time and the driver answers each with
``computed``, ``missed`` or ``failed``, or, if a `Withdraw` came before it began, with
``withdrawn``: rows that nobody needs take neither time nor the room of others. The driver runs the
actions in order, `Free` and `Keep` after the `Compute` that they overtake.

Races, and their outcome:

- Cancel against queued Data: Cancel. It raises gen, and stale rows are dropped before they run.
- Cancel against running rows: both. They finish and count in ``kv_len``, but are not forwarded; if
  they have not begun they are withdrawn.
- Close against anything: Close. The cache is freed or kept at once, and the session is remembered
  as closed so that Data which Close overtook cannot revive it. Running rows find no session and
  are discarded; they write after all kept positions. Until the driver answers, no message starts a
  session of that name again, and their bytes count as waiting.
- Resume against anything: it only applies to a session that is still unknown. If Close overtook it,
  the base that it names is freed: the entry has forgotten it.
- A newer gen against its own repeated Data: the order of the link. As long as only committed tokens
  are injected a row is the same in every gen, so even lost or reordered messages cannot corrupt a
  cache. Draft rows need what a link guarantees: messages in order, or loss of the link. Then a step
  that follows another one of its gen finds the rows of that one, and the first step of a new gen
  starts at a position before which everything has been all round the ring.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from meshllm.names import SessionId, Span
from meshllm.protocol.drafting.window import MAX_STEP_ROWS
from meshllm.protocol.kv_cache.admission import MAX_OPEN_SESSIONS
from meshllm.protocol.kv_cache.budget import KvBudget
from meshllm.protocol.kv_cache.prefix_index import PrefixIndex
from meshllm.protocol.session.codec import MAX_POSITION, size
from meshllm.protocol.session.messages import (
    Blob,
    Cancel,
    Close,
    Data,
    Delivered,
    Fault,
    FaultCode,
    Flags,
    Forward,
    Gap,
    JobTimes,
    Logits,
    Malformed,
    RankStats,
    Resume,
)

MAX_PENDING = 16  # queued Data of one session; an entry never has more in flight
MAX_WAITING_BYTES = 1 << 30
"""Rows that run or wait on one rank, of all sessions of any model; most need less room, see
`meshllm.protocol.session.waiting`."""
MAX_PATIENCE_S = 600.0  # an entry waits no longer for a result, before it asks again
IDLE_S = MAX_PENDING * MAX_PATIENCE_S  # longer than an entry waits, be it a retry or many results
MAX_RECOMPUTE_ROWS = 7 * MAX_STEP_ROWS  # of decode steps, after a loss; a few ms of a layer
MAX_CLOSED = 1024  # closed sessions remembered; Data is late by seconds, not by a thousand answers

_NO_LAYERS = Span(0, 0)
_EMPTY_TALLY = RankStats(JobTimes(0, 0, 0), 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Compute:
    """Crop the session's cache to ``pos``, run the rows, then call ``computed`` or ``failed``.

    If the cache cannot be cropped to ``pos``, call ``missed``. The blob is not checked yet, not
    even that there is one: hashing belongs on the compute thread.
    """

    session: SessionId
    pos: int
    rows: int
    keep: int
    """How many of the last output rows to return; if 0, ``computed`` gets no blob."""
    blob: Blob | None
    """``[1, rows, D]``; None is valid only if it recomputes, and no layer here needs them."""
    is_step: bool
    """Rows of a decode step, which must be row-invariant: each as if it were computed alone."""
    helps: int | None = None
    """Gen of a step after whose row this rank's part of the logits may follow, if it has one: call
    ``helped`` with it, or not at all."""
    recomputes: bool = False
    """Do not crop: run the rows only in the layers that lack them."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Do not run the latest rows of a session if they have not begun; then call ``withdrawn``.

    Their result is not needed any more, and they would take the room of others until their turn.
    """

    session: SessionId


@dataclass(frozen=True, slots=True)
class Free:
    """Drop the cache of a session, running or kept."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class Keep:
    """Move the session's cache to the prefix cache."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class Adopt:
    """Start the session's cache with the first ``length`` positions of the kept one of ``base``.

    No answer is expected: if it cannot be done, the first rows find out.
    """

    session: SessionId
    base: SessionId
    length: int
    whole: bool
    """Take over the kept cache itself instead of copying it."""


Action = Compute | Withdraw | Free | Keep | Adopt | Forward


@dataclass(slots=True)
class _SessionState:
    used: float  # creation or last computation; a session that only meets gaps is idle
    gen: int = 0
    kv_len: int = 0
    capacity: int = 0  # positions for which the cache has room
    running: Data | None = None
    pending: deque[tuple[Data, Compute]] = field(default_factory=deque)
    tally: RankStats = _EMPTY_TALLY
    feeds_lost: bool = False  # the layer after this rank's last is lost
    has_missed: bool = False  # its cache is gone, and cannot be recomputed any more
    committed: int = 0  # positions that no draft may take back
    base: tuple[SessionId, int] | None = None  # what it took over, and how many positions of it
    ends: deque[int] = field(default_factory=lambda: deque(maxlen=1 + MAX_PENDING))
    hands_over: bool | None = None  # None until its first Data: a Resume does not tell

    def grow(self, data: Data) -> None:
        """Note that rows were written, after which nothing is held.

        Rows also count as committed once more messages followed them than are in flight.
        """
        self.kv_len = data.pos + data.rows
        self.committed = min(self.committed, data.pos)
        if Flags.PREFILL in data.flags:
            self.committed = self.kv_len
        elif data.gen == self.gen:
            self.ends.append(self.kv_len)
            if Flags.COMMITTED in data.flags:
                self.committed = max(self.committed, data.pos)
        if len(self.ends) == self.ends.maxlen:
            self.committed = max(self.committed, self.ends[0])

    def note_handover(self, data: Data) -> None:
        """Note whether the session may be handed over: once it may not, it never may."""
        if self.hands_over is not False:
            self.hands_over = Flags.NO_HANDOVER not in data.flags

    def raise_gen(self, gen: int) -> list[Action]:
        if gen <= self.gen:
            return []
        self.gen = gen
        self.ends.clear()
        self.pending = deque(item for item in self.pending if item[0].gen >= gen)
        return [Withdraw(self.running.session)] if self.running else []


class Stage:
    """The sessions of one rank; times are seconds on the driver's clock."""

    def __init__(  # noqa: PLR0913 -- its position and its limits
        self,
        rank: int,
        ring: int,
        *,
        epoch: int,
        max_sessions: int = MAX_OPEN_SESSIONS,
        max_waiting: int = MAX_WAITING_BYTES,
        idle_s: float = IDLE_S,
        context: int = MAX_POSITION,
        index: PrefixIndex | None = None,
        span: Span = _NO_LAYERS,
        held: Callable[[SessionId], int] = lambda _: 0,
        queued: Callable[[], int] = lambda: 0,
    ) -> None:
        """Serve sessions of up to ``context`` positions within the budget of the ``index``.

        The rows that run or wait, and those that are ``queued`` to be sent, take up to
        ``max_waiting`` bytes together. Finished sessions are kept in the ``index``; None keeps
        none, and has no budget. ``span`` are the layers of this rank; ``held`` returns how many
        positions of a kept session all of them hold.
        """
        self._span = span
        self._held = held
        self._queued = queued
        self.round_trip_us = 0
        """Round trip to the next rank, for the tallies; updated by the driver."""
        self._rank = rank
        self._is_last = rank == ring - 1
        self.epoch = epoch
        self._max_sessions = max_sessions
        self._max_waiting = max_waiting
        self._idle_s = idle_s
        self._context = context
        self._index = index or PrefixIndex(KvBudget(()), 0)
        self.budget = self._index.budget
        self._sessions: dict[SessionId, _SessionState] = {}
        self._closed: dict[SessionId, RankStats] = {}
        self._outliving: dict[SessionId, Data] = {}  # rows that run, of ended sessions

    def receive(self, message: Delivered, now: float) -> list[Action]:
        """Handle a message from the previous rank; one that breaks the rules ends its session."""
        if message.epoch < self.epoch:
            return []
        match message:
            case Data():
                return self._data(message, now)
            case Resume():
                forward = Forward(self._lowered(message))  # before its base is taken
                return [*self._resume(message, now), forward]
            case Close():
                return self._close(message, now)
            case Cancel():
                return self._cancel(message)
            case Malformed():
                return self._malformed(message, now)
            case Gap() | Fault() | Logits():  # only the entry may receive Logits
                return [] if isinstance(message, Logits) else [Forward(message)]
            case _:
                assert_never(message)

    def computed(
        self, session: SessionId, blob: Blob | None, now: float, spent: JobTimes
    ) -> list[Action]:
        """Handle the output of the rows that ran, ``[1, keep, D]``, and the time they took."""
        if (ran := self._take_running(session)) is None:
            return []
        state, done = ran
        state.used = now
        if Flags.RECOMPUTE not in done.flags:
            state.grow(done)
        if done.gen < state.gen:
            return self._next(state)
        answer = replace(done, blob=blob)
        if done.is_decoded:
            state.tally = _counted(state.tally, spent, size(answer))
        return [Forward(answer), *self._next(state)]

    def missed(self, session: SessionId) -> list[Action]:
        """Request all rows again: the cache could not be cropped to where the rows start."""
        if (ran := self._take_running(session)) is None:
            return []
        state, missing = ran
        state.kv_len, state.has_missed = 0, True
        state.pending = deque(item for item in state.pending if not item[1].recomputes)
        return [_gap(missing, 0), *self._next(state)]

    def withdrawn(self, session: SessionId) -> list[Action]:
        """Go on after rows that do not run any more, as `Withdraw` asked for."""
        ran = self._take_running(session)
        return self._next(ran[0]) if ran else []

    def failed(self, session: SessionId, code: FaultCode, text: str) -> list[Action]:
        """End the session because its rows could not be computed."""
        if (ran := self._take_running(session)) is None:
            return []
        return [*self._end(session), self._fault(ran[1], code, text)]

    def interrupt(self, now: float) -> list[Action]:
        """End all sessions, as the ring is lost, and keep their caches in the prefix cache."""
        ended: list[Action] = []
        for session, state in list(self._sessions.items()):
            ended += self._end(session, state.kv_len, now, is_lost=True)
        return ended

    def resize(self, totals: Sequence[int]) -> list[Action] | None:
        """Give caches this many bytes from now on; None, and no change, if the sessions do not fit.

        The entry, which knows what they may reach, makes sure that they fit until they end.
        """
        if not self.budget.resize(totals):
            return None
        return [Free(each) for each in self._index.make_room()]

    def make_room(self, size: int) -> list[Action]:
        """Free kept sessions until this many bytes are left for others, or none is kept."""
        return [Free(session) for session in self._index.free(size)]

    def helped(self, logits: Logits) -> list[Action]:
        """Forward this rank's part of the logits of a step, unless the step is outdated."""
        state = self._sessions.get(logits.session)
        return [Forward(logits)] if state and state.gen <= logits.gen else []

    @property
    def committed(self) -> dict[SessionId, int]:
        """Positions that no draft takes back, of each session that may be handed over."""
        return {key: state.committed for key, state in self._sessions.items() if state.hands_over}

    @property
    def deadline(self) -> float | None:
        """When the next idle session is freed; None while every session computes."""
        idle = [
            state.used + self._idle_s for state in self._sessions.values() if state.running is None
        ]
        if (kept := self._index.deadline) is not None:
            idle.append(kept)
        return min(idle, default=None)

    def expire(self, now: float) -> list[Action]:
        """Free the sessions that were not used in a while; a later Data meets a Gap."""
        idle = [
            session
            for session, state in self._sessions.items()
            if state.running is None and now >= state.used + self._idle_s
        ]
        for session in idle:
            del self._sessions[session]
            self.budget.release(session)
        return [Free(session) for session in (*idle, *self._index.expire(now))]

    def _cancel(self, cancel: Cancel) -> list[Action]:
        state = self._sessions.get(cancel.session)
        return [*(state.raise_gen(cancel.gen) if state else []), Forward(cancel)]

    def _data(self, data: Data, now: float) -> list[Action]:
        session = data.session
        if session in self._closed or session in self._outliving:
            return []
        if data.epoch > self.epoch:
            text = f"Rank {self._rank} is at epoch {self.epoch}, not {data.epoch}"
            return [self._fault(data, FaultCode.EPOCH, text)]
        state, recomputes = self._sessions.get(session), Flags.RECOMPUTE in data.flags
        if refusal := self._refusal(data, state):
            return self._refuse(data, *refusal)
        if recomputes and (state is None or state.has_missed):  # it was on the way at the miss
            return [_gap(data, 0)]
        if state is None:
            if data.pos > 0:
                return [_gap(data, 0)]
            if len(self._sessions) >= self._max_sessions:
                text = f"The limit of {self._max_sessions} sessions is reached"
                return [self._fault(data, FaultCode.BUSY, text)]
            state = self._sessions[session] = _SessionState(now)
        state.note_handover(data)
        compute = Compute(
            session,
            data.pos,
            data.rows,
            self._keep(data, state),
            data.blob,
            is_step=Flags.PREFILL not in data.flags,
            helps=data.gen if self._is_last and _asks_for_help(data) else None,
            recomputes=recomputes,
        )
        return self._queue(state, data, compute)

    def _refusal(self, data: Data, state: _SessionState | None) -> tuple[str, FaultCode] | None:
        """Return why rows cannot be computed, whatever else runs here; None if they can."""
        stop = data.pos + data.rows
        if broken := _violation(data):
            return broken, FaultCode.RULES
        is_recompute = state and Flags.RECOMPUTE in data.flags and not state.has_missed
        if state and is_recompute and stop > state.kv_len:
            return f"Data to recompute positions up to {stop} of {state.kv_len}", FaultCode.RULES
        if stop > self._context:
            text = f"Positions {data.pos} to {stop} exceed the context of {self._context}"
            return text, FaultCode.MODEL
        return None

    def _resume(self, resume: Resume, now: float) -> list[Action]:
        session, length = resume.session, resume.length
        base = self._index.name_of(resume.base, length)
        if resume.epoch != self.epoch or session in self._sessions or session in self._outliving:
            return []
        if session in self._closed:  # Close has overtaken it; nobody knows the base any more
            is_left = resume.whole and self._index.take(base, 0, now, whole=True) > 0
            return [Free(base)] if is_left else []
        if len(self._sessions) >= self._max_sessions or length > self._context:
            return []
        whole, lost = resume.whole, resume.lost
        feeds_lost = any(self._span.stop in span for span in lost)
        capacity = self._index.take(base, length, now, whole=whole)
        if not capacity and any(_contains(span, self._span) for span in lost):
            return self._resume_empty(resume, now, feeds_lost=feeds_lost)
        if not capacity or not self.budget.reserve(session, capacity if whole else length):
            return [Free(base)] if capacity and whole else []
        gone = self._index.make_room(spare=base)
        if self.budget.is_exceeded:  # no room for a copy
            whole = bool(self._index.take(base, length, now, whole=True))
            if not self.budget.reserve(session, capacity):
                self.budget.release(session)
                return [Free(each) for each in (*gone, base)]
        capacity = capacity if whole else length
        self._sessions[session] = state = _SessionState(
            now, kv_len=length, capacity=capacity, feeds_lost=feeds_lost, committed=length
        )
        state.base = (resume.base, length) if whole else None
        return [*map(Free, gone), Adopt(session, base, length, whole)]

    def _lowered(self, resume: Resume) -> Resume:
        """Lower the positions that lost layers hold to those of the ones here."""
        if not resume.held or not any(map(self._span.overlaps, resume.lost)):
            return resume
        return replace(
            resume,
            held=min(resume.held, self._held(self._index.name_of(resume.base, resume.length))),
        )

    def _resume_empty(self, resume: Resume, now: float, *, feeds_lost: bool) -> list[Action]:
        """Start a session whose first positions are computed again, as all layers here are new.

        What another node has handed over of them is kept as fewer positions of the base.
        """
        session, length = resume.session, resume.length
        base = self._index.name_of(resume.base, length)
        is_begun = self._index.take(base, 0, now, whole=True) > 0
        if not self.budget.reserve(session, length):
            return [Free(base)] if is_begun else []
        self._sessions[session] = state = _SessionState(
            now, kv_len=length, capacity=length, feeds_lost=feeds_lost, committed=length
        )
        state.base = (resume.base, length) if resume.whole else None
        begin = [Adopt(session, base, length, whole=True)] if is_begun else []
        return [*map(Free, self._index.make_room()), *begin]

    def _queue(self, state: _SessionState, data: Data, compute: Compute) -> list[Action]:
        if data.gen < state.gen:
            return []
        outdated = state.raise_gen(data.gen)
        if len(state.pending) >= MAX_PENDING:
            text = f"Data at position {data.pos} while {MAX_PENDING} others are queued"
            return self._refuse(data, text, FaultCode.RULES)
        waiting = self.waiting_bytes + self._queued() + _bytes(data)
        if waiting > self._max_waiting:
            text = f"{waiting} bytes of rows would wait; the limit is {self._max_waiting}"
            return self._refuse(data, text)
        state.pending.append((data, compute))
        return outdated if state.running else self._next(state)

    def _next(self, state: _SessionState) -> list[Action]:
        refused: list[Action] = []
        while state.pending:
            data, compute = state.pending.popleft()
            if compute.recomputes:
                state.running = data
                return [*refused, compute]
            if data.pos > state.kv_len:
                refused.append(_gap(data, state.kv_len))
                continue
            stop, gone = data.pos + data.rows, list[SessionId]()
            if stop > self.budget.reserved(data.session):
                if not self.budget.reserve(data.session, stop):
                    return [*refused, *self._refuse(data, self._no_room(data.session, stop))]
                gone = self._index.make_room()
            state.running, state.kv_len, state.capacity = data, data.pos, max(state.capacity, stop)
            return [*refused, *map(Free, gone), compute]
        return refused

    def _take_running(self, session: SessionId) -> tuple[_SessionState, Data] | None:
        """Take what ran from its session; None if that has ended meanwhile."""
        self._outliving.pop(session, None)
        state = self._sessions.get(session)
        if state is None or state.running is None:
            return None
        done, state.running = state.running, None
        return state, done

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the rows that run or wait."""
        waiting = sum(map(_bytes, self._outliving.values()))
        for state in self._sessions.values():
            waiting += _bytes(state.running) if state.running else 0
            waiting += sum(_bytes(data) for data, _ in state.pending)
        return waiting

    def _no_room(self, session: SessionId, positions: int) -> str:
        others, left = len(self._sessions) - 1, self.budget.left(session)
        return (
            f"No room for the cache of {positions} positions: {left} fit next to {others} other"
            f" sessions"
        )

    def _refuse(
        self, message: Data | Malformed, text: str, code: FaultCode = FaultCode.BUSY
    ) -> list[Action]:
        """End one session, for lack of room or because its messages break the rules."""
        return [*self._end(message.session), self._fault(message, code, text)]

    def _keep(self, data: Data, state: _SessionState) -> int:
        if Flags.RECOMPUTE in data.flags:
            return data.rows if state.feeds_lost else 0
        if not self._is_last:
            return data.rows
        if Flags.NEED_ROW not in data.flags:
            return 0
        return 1 if Flags.PREFILL in data.flags else data.rows

    def _close(self, close: Close, now: float) -> list[Action]:
        if len(close.tallies) != self._rank - 1:  # it skipped a rank: nothing is kept
            return [*self._end(close.session), Forward(replace(close, keep=0))]
        ended = self._end(close.session, close.keep, now, is_own=close.is_own)
        keep = close.keep if Keep(close.session) in ended else 0
        tally = replace(self._closed[close.session], round_trip_us=self.round_trip_us)
        return [*ended, Forward(replace(close, keep=keep, tallies=(*close.tallies, tally)))]

    def _malformed(self, message: Malformed, now: float) -> list[Action]:
        """End the session of a message that cannot be read."""
        if message.is_close:  # the following ranks free their caches only at a Close
            return self._close(Close(message.session, message.epoch), now)
        if message.session in self._closed:
            return []
        text = f"The previous rank sent an invalid message: {message.text}"
        return self._refuse(message, text, FaultCode.RULES)

    def _end(
        self,
        session: SessionId,
        keep: int = 0,
        now: float = 0.0,
        *,
        is_own: bool = False,
        is_lost: bool = False,
    ) -> list[Action]:
        """Forget a session; its first ``keep`` positions, if complete, may be kept."""
        state = self._sessions.pop(session, None)
        self._closed.setdefault(session, state.tally if state else _EMPTY_TALLY)
        if len(self._closed) > MAX_CLOSED:
            del self._closed[next(iter(self._closed))]
        self.budget.release(session)
        if state is None:
            return []
        outdated = [Withdraw(session)] if state.running and not is_lost else []
        if state.running:
            self._outliving[session] = state.running
        length = keep if keep <= state.kv_len else 0
        capacity = state.capacity
        gone = self._index.put(session, length, capacity, now, is_own=is_own, is_lost=is_lost)
        if state.base and is_lost:
            self._index.name(session, *state.base)
        return [*outdated, *([] if session in gone else [Keep(session)]), *map(Free, gone)]

    def _fault(self, message: Data | Malformed, code: FaultCode, text: str) -> Forward:
        return Forward(Fault(message.session, message.epoch, code, self._rank, text))


def _contains(outer: Span, inner: Span) -> bool:
    return bool(len(inner)) and outer.start <= inner.start and inner.stop <= outer.stop


def _asks_for_help(data: Data) -> bool:
    flags = data.flags
    return data.rows == 1 and Flags.HELP in flags and Flags.NEED_ROW in flags and data.is_decoded


def _violation(data: Data) -> str:
    """Return which rule the rows of a message break; empty if none."""
    most = MAX_RECOMPUTE_ROWS if Flags.RECOMPUTE in data.flags else MAX_STEP_ROWS
    if data.rows > most and Flags.PREFILL not in data.flags:
        return f"Step of {data.rows} rows; the limit is {most}"
    return ""


def _bytes(data: Data) -> int:
    return len(data.blob.payload) if data.blob else 0


def _gap(data: Data, kv_len: int) -> Forward:
    return Forward(Gap(data.session, data.epoch, data.gen, kv_len))


def _counted(tally: RankStats, spent: JobTimes, bytes_sent: int) -> RankStats:
    return RankStats(tally.spent + spent, tally.steps + 1, tally.bytes_sent + bytes_sent, 0)
