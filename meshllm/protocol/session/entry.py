"""Rank 0's side of one generation: what to inject and what to accept; only the entry sees tokens.

Theory of operation
-------------------
::

    IDLE --open--> PREFILL --first token--> DECODE --Done or Failed--> CLOSING --Closed--> CLOSED
                      '-------------------Done or Failed------------------^

The entry holds the tokens: the prompt, then one more for every row that came back and was sampled.
Positions below ``done`` have been all round the ring, positions below ``injected`` have left this
rank; ``done <= injected <= len(tokens)``. One rule drives both prefill and decode: while fewer than
``window`` chunks are in flight, embed the next chunk of known tokens, once those of all sessions
leave room for it, see `meshllm.protocol.session.waiting`. Only the chunk with the last known token
requests a row, so a prompt costs one row on the way back, and a decode step is a chunk of one.

For speculative decoding, draft tokens may follow that token in a decode step; then all
rows come back. As long as the token sampled from a row equals the next draft, the next row was
computed from the right prefix and is accepted too (Leviathan et al., 2023, with equality as the
test, as sampling is a function of the position). A rejected draft raises the gen, and the next step
starts at its position: crop on write undoes its rows. Drafts are never known tokens, so nothing
else changes.

While a step is in flight, further steps that hold only drafts may follow it, as if all drafts
before them were right::

    known: a b c          in flight: [c d e] [f g h] [i j k]
    [c d e] comes back and gives d e f   ->  known: a b c d e f    in flight: [f g h] [i j k]
    [f g h] comes back and gives g X     ->  known: .. f g X       in flight: nothing; next: [X ..]

Results are picked in order. If one gives the first token of the next step, that step has become
like the first one: a known token and drafts. Otherwise everything in flight is wrong: the gen is
raised, a Cancel runs ahead, and the next step starts at the last known token. Each `SampleTokens`
may add steps after those in flight; it replaces steps that were not injected by then.

A prompt that shares a prefix with an earlier text continues from the caches that the ranks kept:
the first Embed starts after the prefix, after a Resume. A rank that has lost it reports a
Gap like any other. What has been all round the ring by the end is kept likewise for later prompts.
If the ring is lost, there is no Close: `interrupt` keeps what had been all round it, every stage
keeps what it has, and the next attempt at the same answer continues from there like any prompt.
If layers have moved to another node since, the Resume names them as lost, and the kept positions go
round the ring once more to be *recomputed*: in the chunks of the first time, so that the rows get
the same bits, and in the lost layers only. A node that left may have handed over what they hold:
then the Resume asks for how many positions all of them hold, and the recomputation starts after
these when it is back. What follows is sent right after. Decode steps are all known by then: many
go into one message where each row has the same bits in any company, and up to `MAX_PENDING`
messages are in flight, whatever the window, or the entry would wait for the way round the ring
after every few rows.

Only results of the current gen count, and only those that end beyond ``done``: late and repeated
ones are silently dropped. When a rank reports a Gap, or nothing came back for ``patience_s``
(doubled on each retry), the gen is raised and the tokens are injected again from the first position
that some rank may lack: crop on write makes that safe at any time. A Cancel runs ahead so that
stale chunks are not computed. Tokens once emitted never change (I5).

The caches have *room* for the prompt and the first part of the answer. When little of it is left,
the entry requests more, and goes on meanwhile: so it waits only if there is none, and then at the
last position that has room, with nothing in flight for long.

The driver runs one job at a time for a session, `Embed` or `SampleTokens`, and answers it; results
wait meanwhile. While it reports the tokens of a `SampleTokens`, it may already embed what follows:
the next Embed asks for it, unless the answer ends or a race below intervenes. So an Embed has
priority after a `SampleTokens`, and the reverse after an Embed. Races:

- Restart against a running Embed: the restart wins. The output is of an older gen and is dropped;
  the next Embed crops the local cache. If that cannot be cropped so far, `missed` restarts at 0.
- Restart against a running `SampleTokens`: both count. Its rows were accepted before, so the tokens
  hold; chunks are injected again after them.
- The end against everything: the end wins. Close is sent once; later answers to jobs, results and
  gaps find a state that ignores them. If Close is lost, ``close_s`` ends the wait.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum, auto

from meshllm.names import Span
from meshllm.protocol.drafting.window import MAX_DEPTH, MAX_STEP_ROWS
from meshllm.protocol.kv_cache.admission import QUANTUM
from meshllm.protocol.kv_cache.prefix_index import Chunk, PrefixHit, add_chunk, crop_chunks
from meshllm.protocol.session.actions import (
    Action,
    Closed,
    Done,
    Embed,
    Emit,
    Failed,
    GenerationTask,
    Progress,
    Reserve,
    SampleTokens,
)
from meshllm.protocol.session.codec import MAX_POSITION
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
    Malformed,
    RankStats,
    Resume,
)
from meshllm.protocol.session.pace import PrefillPacing
from meshllm.protocol.session.stage import MAX_PENDING
from meshllm.protocol.session.waiting import PromptQueue
from meshllm.request import FinishReason

NEAR = MAX_DEPTH * MAX_STEP_ROWS  # positions of room left, from which more is requested


class EntryState(Enum):
    """State of a generation."""

    IDLE = auto()
    PREFILL = auto()
    DECODE = auto()
    CLOSING = auto()
    CLOSED = auto()


class Entry:
    """One generation; times are seconds on the driver's clock."""

    def __init__(
        self,
        task: GenerationTask,
        pace: PrefillPacing,
        queue: PromptQueue | None = None,
        room: int = MAX_POSITION,
    ) -> None:
        """Prepare a task; raise `UserError` if its limit is invalid.

        The ``queue`` is that of all sessions of a ring; None if nothing limits what they send. The
        caches have ``room`` for this many positions, which are more than the prompt has.
        """
        self.state = EntryState.IDLE
        self._task = task
        self._pace = pace
        self._queue = queue or PromptQueue()
        self._limit = task.limit
        self._room = room
        self._requested = 0  # positions for which there is no room yet
        self._tokens = list(task.prompt)
        self._gen = 0
        self._done = 0  # positions that came back in this gen or are known to be on every rank
        self._kept = 0  # positions that every rank keeps once the session is closed
        self._best = 0  # known tokens that ever came back: the measure of progress
        self._injected = 0
        self._flight: deque[int] = deque()  # end position of each chunk or step in flight
        self._back: dict[int, Blob | None] = {}  # rows that wait to be sampled, by end position
        self._job: Embed | SampleTokens | None = None
        self._ahead: tuple[int, ...] = ()  # drafts in flight after the last known token
        self._steps: deque[tuple[int, ...]] = deque()  # drafts after those, to be injected
        self._tries = 0
        self._base: PrefixHit | None = None
        self._recompute = 0  # positions to compute again in the lost layers of the base
        self._asks_held = False  # how many of them they still hold
        self._chunks: list[Chunk] = []  # how the positions so far were computed
        self._is_reported = False  # whether `take_chunks` has returned the current chunks
        self._waiting = 0.0  # time of the last injection, result or Close
        self.reused = 0
        """Positions of the prompt that came from the prefix cache."""
        self.capacity = 0
        """Positions for which the caches have room."""

    @property
    def is_alone(self) -> bool:
        """Whether the ring has no other rank."""
        return self._task.ring == 1

    @property
    def given_steps(self) -> range:
        """Positions of decode steps of an earlier ring, which are computed as such again."""
        prompt = len(self._task.prompt)
        return range(prompt - self._task.given, prompt)

    @property
    def kept(self) -> list[int]:
        """Tokens of a closed session at the positions that are kept."""
        return self._tokens[: self._kept]

    @property
    def kept_chunks(self) -> list[Chunk]:
        """How the positions that are kept were computed."""
        return crop_chunks(self._chunks, self._kept)

    @property
    def held(self) -> tuple[list[Chunk], int]:
        """How the positions that every rank holds were computed, and their number."""
        return crop_chunks(self._chunks, self._done), self._done

    @property
    def committed(self) -> int:
        """Positions that no draft takes back; while a step is picked, its drafts are not."""
        return min(self._done, len(self._tokens))

    @property
    def in_flight(self) -> int:
        """Rows that have left this rank, or are computed for that, and have not come back."""
        return self._injected - self._done

    def take_chunks(self) -> tuple[Chunk, ...] | None:
        """Return how the positions so far were computed; None if that has not changed.

        Later ones are computed in decode steps, unless this returns something else.
        """
        was_reported, self._is_reported = self._is_reported, True
        return None if was_reported else tuple(self._chunks)

    @property
    def lost(self) -> tuple[Span, ...]:
        """Layers whose caches are lost and have not been computed again."""
        return self._base.lost if self._base and self._done < self._recompute else ()

    def open(self, now: float, base: PrefixHit | None = None) -> list[Action]:
        """Start, after the prefix ``base`` if given; the actions include the first Embed."""
        self.state, self._waiting = EntryState.PREFILL, now
        task, self._base = self._task, base
        self._queue.enter(task.session, self)
        if base is None:
            return self._next_job()
        self.reused, self._chunks = base.length, list(base.chunks)
        self._recompute = base.length if base.lost else 0
        self._asks_held = base.held > 0 and task.ring > 1
        if not self._asks_held:
            self._begin_at(self._whole_chunks(base.held) if base.lost else base.length)
        self.capacity = base.capacity if base.whole else base.length
        fields = base.session, base.length, base.whole, base.lost, base.held
        resume = Resume(task.session, task.epoch, *fields)
        return [*([Forward(resume)] if task.ring > 1 else []), *self._next_job()]

    def receive(self, message: Delivered, now: float) -> list[Action]:
        """Handle a message of this session that has been all round the ring."""
        if message.epoch != self._task.epoch:
            return []
        match self.state, message:
            case EntryState.PREFILL | EntryState.DECODE, Data(gen=self._gen) as data:
                return self._result(data, now)
            case EntryState.PREFILL | EntryState.DECODE, Gap(gen=self._gen, kv_len=kv_len):
                return self._restart(kv_len, now)
            case EntryState.PREFILL | EntryState.DECODE, Fault(code=code, rank=rank, text=text):
                return self._fail(Failed(code, text, rank), now)
            case EntryState.PREFILL | EntryState.DECODE, Malformed(text=text):
                last = self._task.ring - 1  # its link has counted the fault
                return self._fail(Failed(FaultCode.RULES, text, last), now)
            case EntryState.PREFILL, Resume(held=held) if self._asks_held and self._base:
                self._asks_held = False
                self._begin_at(self._whole_chunks(min(held, self._base.held)))
                return self._next_job()
            case EntryState.CLOSING, Close(tallies=tallies) if len(tallies) == self._task.ring - 1:
                return self._closed(tallies, message.keep)
            case _:
                return []

    def proceed(self) -> list[Action]:
        """Go on, as it is the turn of this session in the queue."""
        return self._next_job() if self._is_live else []

    def computed(self, blob: Blob | None, now: float) -> list[Action]:
        """Handle the output of the Embed: ``[1, keep, D]``, or None if no row was to be kept."""
        job, self._job = self._job, None
        if not self._is_live or not isinstance(job, Embed):
            return []
        if job.gen != self._gen:
            return self._next_job()
        end = job.pos + len(job.tokens)
        self._flight.append(end)
        self._waiting = now
        if self._task.ring == 1:
            return self._returned(end, None, now)
        return [Forward(self._data_of(job, blob)), *self._next_job()]

    def sampled(
        self,
        tokens: Sequence[int],
        now: float,
        steps: Iterable[tuple[int, ...]] = (),
        *,
        stop: bool = False,
    ) -> list[Action]:
        """Handle the sampled tokens: every accepted draft and one token more.

        ``steps`` are drafts after those of `SampleTokens.flying`, step by step; if that is None,
        the first ones follow the last of ``tokens``. ``stop`` ends the answer with these tokens.
        """
        job, self._job = self._job, None
        if not self._is_live or not isinstance(job, SampleTokens):
            return []
        self.state = EntryState.DECODE
        self._tokens += tokens
        emitted: list[Action] = [Emit(token) for token in tokens]
        is_full = len(self._tokens) >= self._limit
        if job.gen == self._gen:  # no restart meanwhile: accepted rows are on every rank
            self._done = len(self._tokens) - 1
            self._steps = deque(steps)
            if stop or is_full:
                self._injected = self._done
            else:
                emitted += self._keep_flight(job.flying(tokens))
        if stop or is_full:
            return [*emitted, *self.finish(FinishReason.STOP if stop else FinishReason.LENGTH, now)]
        emitted += self._request_room()
        return [*emitted, *(self._start_embed() or self._start_pick())]

    def grown(self) -> list[Action]:
        """Go on with the room that was requested."""
        self._room, self._requested = max(self._room, self._requested), 0
        return self._next_job() if self._is_live else []

    def missed(self, now: float) -> list[Action]:
        """Restart at 0: the local cache cannot be cropped to where the Embed starts."""
        self._job = None
        return self._restart(0, now) if self._is_live else []

    def failed(self, code: FaultCode, text: str, now: float) -> list[Action]:
        """End the generation because this rank cannot continue it."""
        return self._fail(Failed(code, text, 0), now) if self._is_live else []

    def finish(self, reason: FinishReason, now: float) -> list[Action]:
        """End the answer where it is; also cancels it, at any time."""
        if not self._is_live:
            return []
        return [Done(reason), *self._leave(now, self._keepable(self._task.keep_from))]

    def interrupt(self) -> bool:
        """End without Close, as the ring is lost; what has been all round it may be kept.

        Return whether the answer was still incomplete.
        """
        is_incomplete = self._is_live
        if is_incomplete:
            self._kept = self._keepable(1 if self._task.resumes else None)
        self.state = EntryState.CLOSED
        self._queue.leave(self._task.session)
        return is_incomplete

    @property
    def deadline(self) -> float | None:
        """When ``expire`` has something to do; None while the next move is the driver's."""
        if self.state is EntryState.CLOSING:
            return self._waiting + self._pace.close_s
        if self._is_live and (self._flight or self._asks_held) and self._job is None:
            return self._waiting + self._pace.patience_s * (1 << self._tries)
        return None

    def expire(self, now: float) -> list[Action]:
        """Do what is due: a retry, or the end of the wait for Close."""
        if self.deadline is None or now < self.deadline:
            return []
        return (
            self._closed(()) if self.state is EntryState.CLOSING else self._restart(self._done, now)
        )

    @property
    def _is_live(self) -> bool:
        return self.state not in (EntryState.CLOSING, EntryState.CLOSED)

    def _next_job(self) -> list[Action]:
        """Start the next job, if there is one."""
        return self._start_pick() or self._start_embed()

    def _start_pick(self) -> list[Action]:
        """Start the `SampleTokens` of the first step in flight, if it has come back."""
        if self._job or not self._flight or self._flight[0] not in self._back:
            return []
        self._done = end = self._flight.popleft()
        known = len(self._tokens)
        drafts, ahead = self._ahead[: end - known], self._ahead[end - known :]
        blob, max_crop = self._back.pop(end), self._task.max_crop
        max_drafts = MAX_POSITION if max_crop is None else max(0, max_crop - 1)
        self._job = SampleTokens(
            self._gen, known, blob, drafts, self._limit, ahead, max_drafts, self._room
        )
        return [*self._progress(known), self._job]

    def _start_embed(self) -> list[Action]:
        """Start the next Embed, a prefill chunk or a decode step, if window and KV cache allow."""
        pos, known = self._injected, len(self._tokens)
        if pos < self._recompute:
            return self._start_recompute(pos)
        is_step = pos >= max(known - 1, len(self._task.prompt))
        drafts = self._steps[0] if is_step and self._steps else ()
        tokens = (*self._tokens[pos : pos + self._rows_from(pos)], *drafts)
        is_short = is_step or pos in self.given_steps
        if self._job or not tokens or len(self._flight) >= self._window(is_step=is_short):
            return []
        if pos + len(tokens) > self._room:
            return []
        if not is_step and not self._queue.take(self._task.session, len(tokens)):
            return []
        if drafts:
            self._ahead += self._steps.popleft()
        self._injected += len(tokens)
        self.capacity = max(self.capacity, self._injected)
        drafted = len(tokens) - 1 if is_step else 0
        is_known = pos < len(self._task.prompt) or len(tokens) > 1 + drafted
        is_step = not is_known or pos in self.given_steps
        self._chunks = add_chunk(self._chunks, pos, self._injected, is_step=is_step)
        self._job = Embed(self._gen, pos, tokens, drafted, is_step)
        return [self._job]

    def _request_room(self) -> list[Action]:
        """Request more room if little is left."""
        most = min(self._limit, self._room + QUANTUM)
        if self._requested or most <= self._room or self._room - len(self._tokens) >= NEAR:
            return []
        self._requested = most
        return [Reserve(most)]

    def _start_recompute(self, pos: int) -> list[Action]:
        """Start the next Embed for the lost layers: the same chunk as before, or some steps."""
        chunk = next(each for each in self._chunks if each.stop > pos)
        if self._job or self._asks_held or len(self._flight) >= self._window(is_step=chunk.is_step):
            return []
        most = pos + self._task.recompute_rows if chunk.is_step else self._recompute
        stop = min(chunk.stop, most)
        if not self._queue.take(self._task.session, stop - pos):
            return []
        tokens, self._injected = tuple(self._tokens[pos:stop]), stop
        self._job = Embed(self._gen, pos, tokens, 0, chunk.is_step, recomputes=True)
        return [self._job]

    def _begin_at(self, pos: int) -> None:
        """Begin with the token at a position, before which all layers hold everything."""
        self._done = self._best = self._injected = pos

    def _whole_chunks(self, held: int) -> int:
        """Return how many of the positions are decode steps or in whole chunks of the prompt."""
        start = 0
        for chunk in self._chunks:
            if chunk.stop > held:
                return held if chunk.is_step else start
            start = chunk.stop
        return start

    def _window(self, *, is_step: bool) -> int:
        """Return how many chunks may be in flight; steps have few rows, so more of them may."""
        return MAX_PENDING if is_step else self._pace.window

    def _rows_from(self, pos: int) -> int:
        """Return how many known tokens the next Embed may take."""
        if pos in self.given_steps:
            return max(1, min(MAX_STEP_ROWS, len(self._tokens) - 1 - pos))
        before = self.given_steps.start - pos
        if self.given_steps and before > 0:
            return min(self._pace.chunk, before)
        return self._pace.chunk

    def _keep_flight(self, flying: tuple[int, ...] | None) -> list[Action]:
        """Keep the steps in flight if they may be right; else inject from the last token on."""
        self._ahead = flying or ()
        if flying is not None or self._injected == self._done:
            return []
        self._injected = self._done
        return self._raise_gen(sends_cancel=bool(self._flight))

    def _raise_gen(self, *, sends_cancel: bool) -> list[Action]:
        """Discard everything in flight."""
        self._gen += 1
        self._flight.clear()
        self._back.clear()
        cancel = Forward(Cancel(self._task.session, self._task.epoch, self._gen))
        return [cancel] if sends_cancel and self._task.ring > 1 else []

    def _data_of(self, job: Embed, blob: Blob | None) -> Data:
        rows = len(job.tokens)
        flags = Flags.NEED_ROW if job.pos + rows >= len(self._tokens) else Flags(0)
        if not job.is_step:
            flags |= Flags.PREFILL
        if job.recomputes:
            flags |= Flags.RECOMPUTE
        if job.is_step and not job.recomputes and len(self._flight) == 1:
            flags |= Flags.COMMITTED
        if not self._task.hands_over:
            flags |= Flags.NO_HANDOVER
        return Data(self._task.session, self._task.epoch, self._gen, job.pos, rows, flags, blob)

    def _result(self, data: Data, now: float) -> list[Action]:
        end, known = data.pos + data.rows, len(self._tokens)
        if end <= self._done or end in self._back:
            return []  # a duplicate, which must not restart the retry timeout
        before = (each for each in self._flight if each < end)
        rows = end - max(self._done, known - 1, *before)
        has_rows = data.blob is not None and data.blob.shape[:2] == (1, rows)
        if end not in self._flight or (end >= known and not has_rows):
            text = f"Unexpected result for positions {data.pos} to {end}"
            last = self._task.ring - 1
            return self._fail(Failed(FaultCode.RULES, text, last, is_seen=True), now)
        return self._returned(end, data.blob, now)

    def _returned(self, end: int, blob: Blob | None, now: float) -> list[Action]:
        """Record a result; chunks sent before it have been all round the ring, too."""
        known, self._waiting = len(self._tokens), now
        while self._flight and self._flight[0] <= min(end, known - 1):
            self._flight.popleft()
        if end >= known:
            self._back[end] = blob
            return self._next_job()
        self._done = end
        return [*self._progress(end), *self._next_job()]

    def _progress(self, done: int) -> list[Action]:
        if done <= self._best:
            return []
        before, self._best, self._tries = self._best, done, 0
        total = len(self._task.prompt)
        return [Progress(min(done, total), total)] if before < total else []

    def _restart(self, start: int, now: float) -> list[Action]:
        """Inject again from ``start`` or the first position that some rank may lack."""
        if self._tries == self._pace.retries:
            text = f"No progress past position {self._best} after {self._tries} retries"
            return self._fail(Failed(FaultCode.TIMED_OUT, text, 0), now)
        self._tries += 1
        self._is_reported = self._asks_held = False
        first = min(start, self._done, len(self._tokens))
        held, self._recompute = max(self._injected, self._recompute), 0
        self._done = self._injected = first if self._can_crop(held - first) else 0
        self.reused = min(self.reused, self._done)
        self._ahead = ()
        self._steps.clear()
        return [*self._raise_gen(sends_cancel=True), *self._next_job()]

    def _fail(self, failed: Failed, now: float) -> list[Action]:
        return [failed, *self._leave(now)]

    def _keepable(self, least: int | None) -> int:
        """Positions that are worth keeping, and that every rank has and can crop its cache to."""
        known = max(min(self._done, len(self._tokens)), self._recompute)
        max_crop, out = self._task.max_crop, max(self._injected, self._recompute) - known
        if self._base and not self._base.whole:
            least = least and max(least, self._base.length + 1)  # the base itself is still kept
        is_reached = max_crop is None or out <= min(max_crop, 1)
        return known if is_reached and least is not None and known >= least else 0

    def _can_crop(self, positions: int) -> bool:
        return self._task.max_crop is None or positions <= self._task.max_crop

    def _leave(self, now: float, keep: int = 0) -> list[Action]:
        self.state, self._waiting, self._kept = EntryState.CLOSING, now, keep
        self._queue.end(self._task.session)
        if self._task.ring == 1:
            return self._closed((), keep)
        task = self._task
        return [Forward(Close(task.session, task.epoch, keep, is_own=task.is_own))]

    def _closed(self, tallies: tuple[RankStats, ...], keep: int = 0) -> list[Action]:
        """End; only what every rank has confirmed to keep is kept here too."""
        self.state, self._kept = EntryState.CLOSED, min(self._kept, keep)
        self._queue.leave(self._task.session)
        return [Closed(tallies)]
