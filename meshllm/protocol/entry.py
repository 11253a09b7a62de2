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

A prompt that begins like a text before it goes on from what the ranks kept of that one: the first
Embed starts behind it, and a Resume runs ahead. A rank that has lost it reports a Gap like any
other. What came all round the ring by the end is kept in the same way for the next prompt.

Only results of the current gen count, and only those that end beyond ``done``: late
and repeated ones are dropped without a word. When a rank reports a Gap, or nothing came back for
``patience_s`` (doubled each time), the gen is raised and the tokens are injected again from the
first position that some rank may lack: crop on write makes that safe at any time. A Cancel runs
ahead so that stale chunks are not computed. Tokens once emitted never change (I5).

The driver does one job at a time for a session, `Embed` or `Pick`, and answers it. While it says
what it picked, it may already embed that: the next Embed asks for it, unless the answer ends or the
races below have it otherwise. Races:

- A restart against a running Embed: the restart. The output is of an older gen and is dropped; the
  next Embed crops the local cache. Where that cannot go back so far, `missed` begins at 0.
- A restart against a running Pick: both. Its rows were accepted before, so the tokens hold; chunks
  are injected again after them.
- The end against everything: the end. Close goes out once; answers to jobs, results and gaps that
  come later find a state that no longer listens. If Close is lost, ``close_s`` ends the wait.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from meshllm.errors import UserError
from meshllm.names import SessionId
from meshllm.protocol.codec import MAX_POSITION
from meshllm.protocol.messages import (
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
from meshllm.protocol.pace import Pace
from meshllm.protocol.shelf import Base
from meshllm.request import FinishReason


class State(Enum):
    """How far a generation is."""

    IDLE = auto()
    PREFILL = auto()
    DECODE = auto()
    CLOSING = auto()
    CLOSED = auto()


@dataclass(frozen=True, slots=True)
class Task:
    """One generation."""

    session: SessionId
    epoch: int
    ring: int
    """Ranks; 1 is this node alone, which sends nothing."""
    prompt: tuple[int, ...]
    max_tokens: int
    context: int
    """Most tokens that the model takes, prompt included."""
    slack: int | None = None
    """How many positions a cache can go back; None is any number. To 0 all can."""
    keep_from: int | None = None
    """Positions from which on it is worth keeping what a session leaves; None is never."""


@dataclass(frozen=True, slots=True)
class Embed:
    """Crop the local cache to ``pos``, embed, run the local layers; answer ``computed``."""

    gen: int
    pos: int
    tokens: tuple[int, ...]
    guesses: int = 0
    """How many of the last tokens are guesses. Alone in the ring, the rows of the guesses and the
    one before them stay for a Pick; in a larger one all rows are handed back."""


@dataclass(frozen=True, slots=True)
class Pick:
    """Norm, head and sampling of the tokens from position ``pos`` on; answer ``picked``.

    The digest of the blob is not checked yet: hashing belongs on the thread that computes.
    """

    gen: int
    pos: int
    blob: Blob | None
    """``[1, 1 + G, D]``; None stands for the last rows of the last Embed."""
    guesses: tuple[int, ...]
    """G tokens that were guessed for ``pos`` and behind it."""
    limit: int
    """Position that no token of the answer may have, nor a guess."""


@dataclass(frozen=True, slots=True)
class Emit:
    """This token is part of the answer, for good."""

    token: int


@dataclass(frozen=True, slots=True)
class Progress:
    """So many tokens of the prompt have been all round the ring."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Done:
    """The answer is complete."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Failed:
    """There is no more answer to come, and why."""

    code: FaultCode
    text: str
    rank: int


@dataclass(frozen=True, slots=True)
class Closed:
    """The session is over on every rank that can be reached; free the local cache. Comes last."""

    tallies: tuple[Tally, ...]
    """Of rank 1, 2, and so on; empty when Close did not come back."""


Action = Embed | Pick | Emit | Forward | Progress | Done | Failed | Closed


class Entry:
    """One generation; times are seconds on the driver's clock.

    Raises:
        UserError: the prompt is empty or does not leave room in the context, or no token is asked.
    """

    def __init__(self, task: Task, pace: Pace) -> None:
        context = min(task.context, MAX_POSITION)
        if not 0 < len(task.prompt) < context:
            raise UserError(
                f"A prompt of {len(task.prompt)} tokens; the model takes 1 to {context - 1}",
                hint="shorten the prompt or the chat",
            )
        if task.max_tokens < 1:
            raise UserError(f"An answer of at most {task.max_tokens} tokens is none")
        self.state = State.IDLE
        self._task = task
        self._pace = pace
        self._limit = min(len(task.prompt) + task.max_tokens, context)
        self._tokens = list(task.prompt)
        self._gen = 0
        self._done = 0  # positions that came back in this gen or are known to be everywhere
        self._kept = 0  # positions that are there for others once the session is closed
        self._best = 0  # known tokens that ever came back: what counts as progress
        self._injected = 0
        self._flight: deque[int] = deque()  # where each chunk in flight ends
        self._job: Embed | Pick | None = None
        self._guesses: tuple[int, ...] = ()  # behind the last known token, in the next step
        self._tries = 0
        self._base: Base | None = None
        self._waiting = 0.0  # since when: the last injection, result or Close
        self.reused = 0
        """Positions of the prompt that were not computed again."""

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
        self, tokens: Sequence[int], now: float, guesses: Sequence[int] = (), *, stop: bool = False
    ) -> list[Action]:
        """Take what was sampled: every guess that was right and one token more.

        ``guesses`` are for the next step; ``stop`` ends the answer with these tokens.
        """
        job, self._job = self._job, None
        if not self._is_live or not isinstance(job, Pick):
            return []
        self.state = State.DECODE
        self._tokens += tokens
        self._guesses = tuple(guesses)
        if job.gen == self._gen:  # no restart meanwhile: what was right is everywhere
            self._done = self._injected = len(self._tokens) - 1
            self._gen += len(tokens) <= len(job.guesses)
        emitted: list[Action] = [Emit(token) for token in tokens]
        if stop:
            return [*emitted, *self.finish(FinishReason.STOP, now)]
        if len(self._tokens) >= self._limit:
            return [*emitted, *self.finish(FinishReason.LENGTH, now)]
        return [*emitted, *self._pump()]

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
        """Start the next Embed, if there is something to inject and room in flight."""
        pos = self._injected
        tokens = tuple(self._tokens[pos : pos + self._pace.chunk])
        if self._job or not tokens or len(self._flight) >= self._pace.window:
            return []
        self._injected += len(tokens)
        is_step = len(tokens) == 1 and pos >= len(self._task.prompt)
        guesses = self._guesses if is_step else ()
        self._job = Embed(self._gen, pos, tokens + guesses, len(guesses))
        return [self._job]

    def _data_of(self, job: Embed, blob: Blob | None) -> Data:
        rows, flags = len(job.tokens), Flags(0)
        if job.pos < len(self._task.prompt) or rows > 1 + job.guesses:
            flags |= Flags.PREFILL
        if job.pos + rows >= len(self._tokens):
            flags |= Flags.NEED_ROW
        return Data(self._task.session, self._task.epoch, self._gen, job.pos, rows, flags, blob)

    def _result(self, data: Data, now: float) -> list[Action]:
        end = data.pos + data.rows
        if end <= self._done:
            return []
        guesses = max(0, end - len(self._tokens))
        has_rows = data.blob is not None and data.blob.shape[:2] == (1, 1 + guesses)
        if end not in self._flight or (end >= len(self._tokens) and not has_rows):
            text = f"The answer for positions {data.pos} to {end} is not what was asked"
            return self._fail(Failed(FaultCode.RULES, text, self._task.ring - 1), now)
        return self._returned(end, data.blob, now)

    def _returned(self, end: int, blob: Blob | None, now: float) -> list[Action]:
        while self._flight and self._flight[0] <= end:
            self._flight.popleft()
        known = len(self._tokens)
        self._done, self._waiting = end, now
        actions = self._progress(min(end, known))
        if end < known:
            return [*actions, *self._pump()]
        self._job = Pick(self._gen, known, blob, self._guesses[: end - known], self._limit)
        return [*actions, self._job]

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
        self._gen += 1
        first = min(start, self._done, len(self._tokens))
        self._done = self._injected = first if self._goes_back(self._injected - first) else 0
        self.reused = min(self.reused, self._done)
        self._flight.clear()
        self._guesses = ()
        cancel = Forward(Cancel(self._task.session, self._task.epoch, self._gen))
        return [*([cancel] if self._task.ring > 1 else []), *self._pump()]

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
