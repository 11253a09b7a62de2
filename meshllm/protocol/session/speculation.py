"""Speculative decoding of one generation: which drafter, how many tokens, and what they cost."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from meshllm.protocol.drafting.drafter import Drafting
from meshllm.protocol.drafting.window import MAX_DEPTH, DrafterStats, StepTimes, WindowChoice
from meshllm.protocol.session.actions import SampleTokens

SURE = 2
"""Confidence from which on the free drafter is preferred to a model."""

Steps = tuple[tuple[int, ...], ...]
"""Draft tokens by step, see `Entry.sampled`."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """State shared by the generations of one entry; used on the compute thread."""

    drafting: Drafting
    """Source of free drafters, which take no time."""
    times: StepTimes = field(default_factory=StepTimes)
    stats: DrafterStats = field(default_factory=DrafterStats)
    draft: Drafting | None = None
    """Source of better drafters that take time: a draft model."""
    draft_stats: DrafterStats = field(default_factory=DrafterStats)
    depth: int = MAX_DEPTH
    """Steps in flight at most; with 1, each waits for the one before it."""


@dataclass(frozen=True, slots=True)
class _Limits:
    """Limits of the next draft."""

    flying: tuple[int, ...] | None
    """Draft tokens in flight, see `SampleTokens.flying`."""
    room: int
    """Maximum draft tokens after the text, those in flight included."""
    max_drafts: int
    """Maximum draft tokens in flight at a time."""
    depth: int
    sessions: int


class Speculator:
    """Drafts the continuation of one text; times are seconds on the driver's clock.

    The driver calls `after` with the tokens of a step, and `drafted` when that has returned: only
    then is it known how long a draft model took, and the next step begins.
    """

    def __init__(self, speculation: Speculation, prompt: Sequence[int]) -> None:
        """Start after a prompt."""
        self._speculation = shared = speculation
        self._prompt = prompt
        self._free = self._used = _DraftSource(shared.drafting, shared.times, shared.stats)
        self._sources = [self._free]
        if shared.draft:
            self._sources.append(_DraftSource(shared.draft, shared.times, shared.draft_stats))
        self._since: float | None = None
        self._before = 0  # warm-up steps at that time
        self._asked_at = 0.0  # when `after` was called
        self._modelled: int | None = None  # tokens that a draft model gave then; None if not asked
        self._burst, self._place = 1, 0  # steps sent back to back, and which of them is next
        self._is_clear = True  # no cancelled steps are still computed before them

    def after(  # noqa: PLR0913 -- the state of the ring at this step
        self,
        tokens: Sequence[int],
        job: SampleTokens,
        now: float,
        *,
        prepared: int = 0,
        ends: bool = False,
        depth: int = 1,
        sessions: int = 1,
        beside: int = 0,
    ) -> Steps:
        """Take the tokens sampled for a job; draft what follows, unless the text ``ends``.

        At most ``depth`` steps are in flight, and ``sessions`` run together, of which the others
        had ``beside`` rows in the ring with this job. ``prepared`` counts the warm-up steps so far,
        which took longer than later ones will.
        """
        most = min(job.limit - 1, job.room) - job.pos - len(tokens)
        room = 0 if ends else max(0, most)
        limits = _Limits(job.flying(tokens), room, job.max_drafts, depth, sessions)
        self._asked_at, self._modelled = now, None
        if self._since is None:
            tokens = (*self._prompt, *tokens)
        else:
            self._learn(
                job,
                job.accepted(tokens),
                now - self._since,
                beside,
                is_warm_up=prepared > self._before,
            )
        for source in self._sources:
            source.drafter.extend(tokens)
        found = self._draft(limits) if room else ()
        self._place += 1
        if limits.flying is None:
            self._burst, self._place = max(1, len(found)), 0
            self._is_clear = not job.ahead
        self._before = prepared
        return found

    def drafted(self, now: float) -> None:
        """Note the end of `after`: drafting time is not part of a step, but charged apart."""
        self._since = now
        if self._modelled is not None:
            self._speculation.draft_stats.note_query(self._modelled, now - self._asked_at)

    def keep(self, text: Sequence[int]) -> None:
        """Let drafters learn from a finished text."""
        for drafting in (self._speculation.drafting, self._speculation.draft):
            if drafting:
                drafting.keep(text)

    def _learn(
        self, job: SampleTokens, right: int, seconds: float, beside: int, *, is_warm_up: bool
    ) -> None:
        times, rows = self._speculation.times, 1 + len(job.drafts)
        if is_warm_up:
            pass  # it does not predict later steps
        elif self._place == 0 and self._burst > 1:
            times.note_first(rows, seconds)
        elif self._place == 0 and self._is_clear:
            times.note(rows + beside, seconds)
        elif 0 < self._place < self._burst:
            times.note_interval(rows, seconds)
        tried = min(rows, len(job.drafts) + len(job.ahead))
        for source in self._sources:
            own = tried if source is self._used else 0
            source.window_choice.note(source.confidence or 0, own, min(own, right))

    def _draft(self, limits: _Limits) -> Steps:
        """Query the free drafter first if it is sure, and last if it is not."""
        sure = self._free.look() or 0
        if limits.flying is not None:
            return self._free.draft(limits)
        for source in self._sources if sure >= SURE else reversed(self._sources):
            steps = (
                self._free.draft(limits) if source is self._free else self._query(source, limits)
            )
            if steps:
                self._used = source
                return steps
        return ()

    def _query(self, model: "_DraftSource", limits: _Limits) -> Steps:
        """Draft with a model; its time is charged, but not of a query in which it only read text.

        As its drafts take time, no further steps follow them in flight.
        """
        if model.window_choice.is_paused or model.look() is None:
            return ()
        steps = model.draft(replace(limits, depth=1))
        self._modelled = sum(map(len, steps))
        return steps


class _DraftSource:
    """A drafter, and the choice of its draft length."""

    def __init__(self, drafting: Drafting, times: StepTimes, stats: DrafterStats) -> None:
        self.drafter = drafting.begin()
        self.window_choice = WindowChoice(times, stats)
        self.confidence: int | None = None  # at the last query

    def look(self) -> int | None:
        """Return the confidence in the next draft token; None if there is none."""
        self.confidence = self.drafter.look()
        return self.confidence

    def draft(self, limits: _Limits) -> Steps:
        """Draft as many tokens as are worth it, in steps whose rows are among `STEPS`."""
        if self.confidence is None:
            return ()
        window = self.window_choice.choose(
            self.confidence,
            min(limits.room, limits.max_drafts),
            depth=limits.depth,
            max_drafts=limits.max_drafts,
            sessions=limits.sessions,
        )
        flying, is_open = limits.flying or (), limits.flying is None
        most = min(window.length, limits.max_drafts) - len(flying) + is_open
        count = min(most // window.rows * window.rows - is_open, limits.room - len(flying))
        if count <= 0:
            return ()
        tokens = self.drafter.draft(len(flying) + count)
        if tokens[: len(flying)] != flying:
            return ()  # it disagrees with the draft in flight, whose result comes first
        return window.cut(tokens[len(flying) :], is_open=is_open)
