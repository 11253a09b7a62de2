"""Guesses for one generation and what they cost; knows nothing about how they are checked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshllm.model.draft import Drafting
from meshllm.protocol.lookahead import GUESSES, Experience, Lookahead, StepTimes

SURE = 2
"""Confidence from which on a guess that costs nothing goes before that of a model."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """What the generations of one entry share; used on the compute thread."""

    drafting: Drafting
    """Who guesses in no time."""
    times: StepTimes = field(default_factory=StepTimes)
    experience: Experience = field(default_factory=Experience)
    draft: Drafting | None = None
    """Who guesses better, but takes time: a model."""
    draft_experience: Experience = field(default_factory=Experience)


class Foresight:
    """Guesses at what follows one text."""

    def __init__(
        self, speculation: Speculation, prompt: Sequence[int], clock: Callable[[], float]
    ) -> None:
        """Begin behind a prompt; ``clock`` tells seconds."""
        self._speculation = shared = speculation
        self._clock = clock
        self._prompt = prompt
        self._quick = self._spoke = _Voice(shared.drafting, shared.times, shared.experience)
        self._voices = [self._quick]
        if shared.draft:
            self._voices.append(_Voice(shared.draft, shared.times, shared.draft_experience))
        self._since: float | None = None

    def after(self, tokens: Sequence[int], guesses: int, room: int) -> tuple[int, ...]:
        """Take what a step with so many guesses gave; guess at what follows, ``room`` at most."""
        if self._since is None:
            tokens = (*self._prompt, *tokens)
        else:
            self._learn(guesses, len(tokens) - 1, self._clock() - self._since)
        for voice in self._voices:
            voice.drafter.extend(tokens)
        found = self._guess(room) if room else ()
        self._since = self._clock()  # what guesses take is no part of a step: it has its own price
        return found

    def keep(self, text: Sequence[int]) -> None:
        """Remember a text for those to come."""
        for drafting in (self._speculation.drafting, self._speculation.draft):
            if drafting:
                drafting.keep(text)

    def _learn(self, guesses: int, right: int, seconds: float) -> None:
        self._speculation.times.note(1 + guesses, seconds)
        for voice in self._voices:
            own = guesses if voice is self._spoke else 0
            voice.lookahead.note(voice.confidence or 0, own, min(own, right))

    def _guess(self, room: int) -> tuple[int, ...]:
        """Ask who costs nothing first where it is sure, and last where it is not."""
        sure = self._quick.look() or 0
        for voice in self._voices if sure >= SURE else reversed(self._voices):
            guesses = self._quick.guess(room) if voice is self._quick else self._ask(voice, room)
            if guesses:
                self._spoke = voice
                return guesses
        return ()

    def _ask(self, model: "_Voice", room: int) -> tuple[int, ...]:
        """Count what a model takes; that it reads up on the text is no part of the price."""
        begin = self._clock()
        if model.lookahead.is_resting or model.look() is None:
            return ()
        guesses = model.guess(room)
        self._speculation.draft_experience.pay(len(guesses), self._clock() - begin)
        return guesses


class _Voice:
    """A drafter, and how many of its guesses are wanted."""

    def __init__(self, drafting: Drafting, times: StepTimes, experience: Experience) -> None:
        self.drafter = drafting.begin()
        self.lookahead = Lookahead(times, experience)
        self.confidence: int | None = None  # at the last look

    def look(self) -> int | None:
        """Say how sure the next guess is; None is no guess."""
        self.confidence = self.drafter.look()
        return self.confidence

    def guess(self, room: int) -> tuple[int, ...]:
        """Guess at as many tokens as are worth it; a step has one of a few numbers of them."""
        if self.confidence is None:
            return ()
        most = self.lookahead.choose(self.confidence, room)
        tokens = self.drafter.guess(most) if most else ()
        return tokens[: max(guesses for guesses in GUESSES if guesses <= len(tokens))]
