"""Rank 0's side of one generation: what to inject, what to accept; the only place with tokens.

Theory of operation
-------------------
::

    IDLE --open--> PREFILL --first token--> DECODE --Done or Failed--> CLOSING --Closed--> CLOSED
                      '-------------------Done or Failed------------------^

The entry holds the tokens: the prompt, then one more for every row that came back and was sampled.
Positions below ``done`` have been all round the ring, positions below ``injected`` have left this
rank; ``done <= injected <= len(tokens)``. One rule drives both prefill and decode: while fewer than
``window`` chunks are in flight, embed the next chunk of tokens that are known. Only the chunk with
the last known token asks for a row, so a prompt costs one row on the way back, and a decode step is
a chunk of one.

Behind that one token a decode step may carry guesses at what follows it; then all rows come back.
Each row says what stands behind it: as long as that is the guess, the next row was computed from
the right prefix and counts too (Leviathan et al., 2023, with equality for the test, as sampling is
a function of the position). A wrong guess raises the gen, and the next step begins where it stood:
crop on write undoes its rows. Guesses are never known tokens, so nothing else changes.

While a step is on its way, further ones may follow it that hold guesses only, as if all guesses
before them were right::

    known: a b c          in flight: [c d e] [f g h] [i j k]
    [c d e] comes back and says d e f    ->  known: a b c d e f    in flight: [f g h] [i j k]
    [f g h] comes back and says g X      ->  known: .. f g X       in flight: nothing; next: [X ..]

What comes back is looked at in order. Where it says what the next step begins with, that step has
become one like the first: a token that is known, and guesses. Else all that is in flight is wrong:
the gen is raised, a Cancel runs ahead, and the next step begins behind what is known. Each look may
add steps behind those in flight; steps that were not injected by then are guessed anew.

A prompt that begins like a text before it goes on from what the ranks kept of that one: the first
Embed starts behind it, and a Resume runs ahead. A rank that has lost it reports a Gap like any
other. What came all round the ring by the end is kept in the same way for the next prompt.

Only results of the current gen count, and only those that end beyond ``done``: late
and repeated ones are dropped without a word. When a rank reports a Gap, or nothing came back for
``patience_s`` (doubled each time), the gen is raised and the tokens are injected again from the
first position that some rank may lack: crop on write makes that safe at any time. A Cancel runs
ahead so that stale chunks are not computed. Tokens once emitted never change (I5).

The driver does one job at a time for a session, `Embed` or `Pick`, and answers it; what comes back
meanwhile waits. While it says what it picked, it may already embed what follows: the next Embed
asks for it, unless the answer ends or the races below have it otherwise. So an Embed goes first
after a Pick, and a Pick after an Embed. Races:

- A restart against a running Embed: the restart. The output is of an older gen and is dropped; the
  next Embed crops the local cache. Where that cannot go back so far, `missed` begins at 0.
- A restart against a running Pick: both. Its rows were accepted before, so the tokens hold; chunks
  are injected again after them.
- The end against everything: the end. Close goes out once; answers to jobs, results and gaps that
  come later find a state that no longer listens. If Close is lost, ``close_s`` ends the wait.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum, auto

from meshllm.protocol.kv_cache.prefix_index import Base
from meshllm.protocol.session.actions import (
    Action,
    Closed,
    Done,
    Embed,
    Emit,
    Failed,
    Pick,
    Progress,
    Task,
)
from meshllm.protocol.session.codec import MAX_POSITION
from meshllm.protocol.session.messages import (
    Blob,
    Cancel,
    Close,
    Data,
    Fault,
    FaultCode,
    Flags,
    Forward,
    Gap,
    Resume,
    SessionMessage,
    Tally,
)
from meshllm.protocol.session.pace import Pace
from meshllm.protocol.session.stage import MAX_PENDING
from meshllm.request import FinishReason


class State(Enum):
    """How far a generation is."""

    IDLE = auto()
    PREFILL = auto()
    DECODE = auto()
    CLOSING = auto()
    CLOSED = auto()


class Entry:
    """One generation; times are seconds on the driver's clock."""

    def __init__(self, task: Task, pace: Pace) -> None:
        """Prepare a task; raise `UserError` where its limit does."""
        self.state = State.IDLE
        self._task = task
        self._pace = pace
        self._limit = task.limit
        self._tokens = list(task.prompt)
        self._gen = 0
        self._done = 0  # positions that came back in this gen or are known to be everywhere
        self._kept = 0  # positions that are there for others once the session is closed
        self._best = 0  # known tokens that ever came back: what counts as progress
        self._injected = 0
        self._flight: deque[int] = deque()  # where each chunk or step in flight ends
        self._back: dict[int, Blob | None] = {}  # rows of those that wait for a Pick, by end
        self._job: Embed | Pick | None = None
        self._ahead: tuple[int, ...] = ()  # guesses behind the last known token, in flight
        self._steps: deque[tuple[int, ...]] = deque()  # guesses behind those, to be injected
        self._tries = 0
        self._base: Base | None = None
        self._waiting = 0.0  # since when: the last injection, result or Close
        self.reused = 0
        """Positions of the prompt that were not computed again."""
        self.reach = 0
        """Positions for which the caches have room."""

    @property
    def kept(self) -> list[int]:
        """The tokens, of a closed session, at the positions that are kept."""
        return self._tokens[: self._kept]

    def open(self, now: float, base: Base | None = None) -> list[Action]:
        """Begin, behind ``base`` if it is given; the first Embed is among the actions."""
        self.state, self._waiting = State.PREFILL, now
        task, self._base = self._task, base
        if base is None:
            return self._pump()
        self.reused = self._done = self._best = self._injected = base.length
        self.reach = base.reach if base.whole else base.length
        resume = Resume(task.session, task.epoch, base.session, base.length, base.whole)
        return [*([Forward(resume)] if task.ring > 1 else []), *self._pump()]

    def receive(self, message: SessionMessage, now: float) -> list[Action]:
        """Take a message of this session that came all round the ring."""
        if message.epoch != self._task.epoch:
            return []
        match self.state, message:
            case State.PREFILL | State.DECODE, Data(gen=self._gen) as data:
                return self._result(data, now)
            case State.PREFILL | State.DECODE, Gap(gen=self._gen, kv_len=kv_len):
                return self._restart(kv_len, now)
            case State.PREFILL | State.DECODE, Fault(code=code, rank=rank, text=text):
                return self._fail(Failed(code, text, rank), now)
            case State.CLOSING, Close(tallies=tallies) if len(tallies) == self._task.ring - 1:
                return self._closed(tallies, message.keep)
            case _:
                return []

    def computed(self, blob: Blob | None, now: float) -> list[Action]:
        """Take the output of the Embed: ``[1, keep, D]``, or None when nothing was to be kept."""
        job, self._job = self._job, None
        if not self._is_live or not isinstance(job, Embed):
            return []
        if job.gen != self._gen:
            return self._pump()
        end = job.pos + len(job.tokens)
        self._flight.append(end)
        self._waiting = now
        if self._task.ring == 1:
            return self._returned(end, None, now)
        return [Forward(self._data_of(job, blob)), *self._pump()]

    def picked(
        self,
        tokens: Sequence[int],
        now: float,
        steps: Iterable[tuple[int, ...]] = (),
        *,
        stop: bool = False,
    ) -> list[Action]:
        """Take what was sampled: every guess that was right and one token more.

        ``steps`` are guesses behind what `Pick.flying` says, step by step; where that is None, the
        first ones go with the last of ``tokens``. ``stop`` ends the answer with these tokens.
        """
        job, self._job = self._job, None
        if not self._is_live or not isinstance(job, Pick):
            return []
        self.state = State.DECODE
        self._tokens += tokens
        emitted: list[Action] = [Emit(token) for token in tokens]
        is_full = len(self._tokens) >= self._limit
        if job.gen == self._gen:  # no restart meanwhile: what was right is everywhere
            self._done = len(self._tokens) - 1
            self._steps = deque(steps)
            if stop or is_full:
                self._injected = self._done
            else:
                emitted += self._go_on(job.flying(tokens))
        if stop or is_full:
            return [*emitted, *self.finish(FinishReason.STOP if stop else FinishReason.LENGTH, now)]
        return [*emitted, *(self._inject() or self._look())]

    def missed(self, now: float) -> list[Action]:
        """Begin again at 0: the local cache is not what the Embed was to go on from."""
        self._job = None
        return self._restart(0, now) if self._is_live else []

    def failed(self, code: FaultCode, text: str, now: float) -> list[Action]:
        """End the generation because this rank cannot go on with it."""
        return self._fail(Failed(code, text, 0), now) if self._is_live else []

    def finish(self, reason: FinishReason, now: float) -> list[Action]:
        """End the answer where it is; also the way to cancel it, at any time."""
        return [Done(reason), *self._leave(now, self._complete)] if self._is_live else []

    @property
    def deadline(self) -> float | None:
        """When ``expire`` has something to do; None while the next move is the driver's."""
        if self.state is State.CLOSING:
            return self._waiting + self._pace.close_s
        if self._is_live and self._flight and self._job is None:
            return self._waiting + self._pace.patience_s * (1 << self._tries)
        return None

    def expire(self, now: float) -> list[Action]:
        """Do what is due: another try, or the end of waiting for Close."""
        if self.deadline is None or now < self.deadline:
            return []
        return self._closed(()) if self.state is State.CLOSING else self._restart(self._done, now)

    @property
    def _is_live(self) -> bool:
        return self.state not in {State.CLOSING, State.CLOSED}

    def _pump(self) -> list[Action]:
        """Start the next job, if there is one."""
        return self._look() or self._inject()

    def _look(self) -> list[Action]:
        """Start the Pick of the step that is next to come back, if it has."""
        if self._job or not self._flight or self._flight[0] not in self._back:
            return []
        self._done = end = self._flight.popleft()
        known = len(self._tokens)
        guesses, ahead = self._ahead[: end - known], self._ahead[end - known :]
        blob, slack = self._back.pop(end), self._task.slack
        reach = MAX_POSITION if slack is None else max(0, slack - 1)
        self._job = Pick(self._gen, known, blob, guesses, self._limit, ahead, reach)
        return [*self._progress(known), self._job]

    def _inject(self) -> list[Action]:
        """Start the next Embed, if there is something to inject and room in flight."""
        pos, known = self._injected, len(self._tokens)
        is_step = pos >= max(known - 1, len(self._task.prompt))
        guesses = self._steps[0] if is_step and self._steps else ()
        tokens = (*self._tokens[pos : pos + self._pace.chunk], *guesses)
        room = MAX_PENDING if is_step else self._pace.window
        if self._job or not tokens or len(self._flight) >= room:
            return []
        if guesses:
            self._ahead += self._steps.popleft()
        self._injected += len(tokens)
        self.reach = max(self.reach, self._injected)
        self._job = Embed(self._gen, pos, tokens, len(tokens) - 1 if is_step else 0)
        return [self._job]

    def _go_on(self, flying: tuple[int, ...] | None) -> list[Action]:
        """Leave in flight what may be right; where it is not, begin again behind the last token."""
        self._ahead = flying or ()
        if flying is not None or self._injected == self._done:
            return []
        self._injected = self._done
        return self._raise_gen(is_told=bool(self._flight))

    def _raise_gen(self, *, is_told: bool) -> list[Action]:
        """Give up all that is in flight."""
        self._gen += 1
        self._flight.clear()
        self._back.clear()
        cancel = Forward(Cancel(self._task.session, self._task.epoch, self._gen))
        return [cancel] if is_told and self._task.ring > 1 else []

    def _data_of(self, job: Embed, blob: Blob | None) -> Data:
        rows, flags = len(job.tokens), Flags(0)
        if job.pos < len(self._task.prompt) or rows > 1 + job.guesses:
            flags |= Flags.PREFILL
        if job.pos + rows >= len(self._tokens):
            flags |= Flags.NEED_ROW
        return Data(self._task.session, self._task.epoch, self._gen, job.pos, rows, flags, blob)

    def _result(self, data: Data, now: float) -> list[Action]:
        end, known = data.pos + data.rows, len(self._tokens)
        if end <= self._done or end in self._back:
            return []  # it came before: who says it again and again would be waited for
        before = (each for each in self._flight if each < end)
        rows = end - max(self._done, known - 1, *before)
        has_rows = data.blob is not None and data.blob.shape[:2] == (1, rows)
        if end not in self._flight or (end >= known and not has_rows):
            text = f"The answer for positions {data.pos} to {end} is not what was asked"
            return self._fail(Failed(FaultCode.RULES, text, self._task.ring - 1), now)
        return self._returned(end, data.blob, now)

    def _returned(self, end: int, blob: Blob | None, now: float) -> list[Action]:
        """Note what came back; chunks that went before it have been all round the ring, too."""
        known, self._waiting = len(self._tokens), now
        while self._flight and self._flight[0] <= min(end, known - 1):
            self._flight.popleft()
        if end >= known:
            self._back[end] = blob
            return self._pump()
        self._done = end
        return [*self._progress(end), *self._pump()]

    def _progress(self, done: int) -> list[Action]:
        if done <= self._best:
            return []
        before, self._best, self._tries = self._best, done, 0
        total = len(self._task.prompt)
        return [Progress(min(done, total), total)] if before < total else []

    def _restart(self, start: int, now: float) -> list[Action]:
        """Inject again from ``start`` or the first position that is not known to be everywhere."""
        if self._tries == self._pace.retries:
            text = f"No progress past position {self._best} after {self._tries} retries"
            return self._fail(Failed(FaultCode.TIMED_OUT, text, 0), now)
        self._tries += 1
        first = min(start, self._done, len(self._tokens))
        self._done = self._injected = first if self._goes_back(self._injected - first) else 0
        self.reused = min(self.reused, self._done)
        self._ahead = ()
        self._steps.clear()
        return [*self._raise_gen(is_told=True), *self._pump()]

    def _fail(self, failed: Failed, now: float) -> list[Action]:
        return [failed, *self._leave(now)]

    @property
    def _complete(self) -> int:
        """Positions that every rank has, can go back to, and that are worth it."""
        known = min(self._done, len(self._tokens))
        least, slack, out = self._task.keep_from, self._task.slack, self._injected - known
        if self._base and not self._base.whole:
            least = least and max(least, self._base.length + 1)  # else the base itself is there
        is_reached = slack is None or out <= min(slack, 1)
        return known if is_reached and least is not None and known >= least else 0

    def _goes_back(self, positions: int) -> bool:
        return self._task.slack is None or positions <= self._task.slack

    def _leave(self, now: float, keep: int = 0) -> list[Action]:
        self.state, self._waiting, self._kept = State.CLOSING, now, keep
        if self._task.ring == 1:
            return self._closed((), keep)
        return [Forward(Close(self._task.session, self._task.epoch, keep))]

    def _closed(self, tallies: tuple[Tally, ...], keep: int = 0) -> list[Action]:
        """End; only what every rank said that it keeps is kept here too."""
        self.state, self._kept = State.CLOSED, min(self._kept, keep)
        return [Closed(tallies)]
