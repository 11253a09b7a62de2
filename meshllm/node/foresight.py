"""Guesses for one generation and what they cost; knows nothing about how they are checked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshllm.model.draft import Drafting
from meshllm.protocol.lookahead import GUESSES, Lookahead, StepTimes


@dataclass(frozen=True, slots=True)
class Speculation:
    """What the generations of one entry share; used on the compute thread."""

    drafting: Drafting
    times: StepTimes = field(default_factory=StepTimes)


class Foresight:
    """Guesses at what follows one text."""

    def __init__(
        self, speculation: Speculation, prompt: Sequence[int], clock: Callable[[], float]
    ) -> None:
        """Begin behind a prompt; ``clock`` tells seconds."""
        self._speculation = speculation
        self._clock = clock
        self._prompt = prompt
        self._drafter = speculation.drafting.begin()
        self._lookahead = Lookahead(speculation.times)
        self._confidence = 0
        self._since: float | None = None

    def after(self, tokens: Sequence[int], guesses: int, room: int) -> tuple[int, ...]:
        """Take what a step with so many guesses gave; guess at what follows, ``room`` at most."""
        now = self._clock()
        if self._since is None:
            self._drafter.extend(self._prompt)
        else:
            seconds = now - self._since
            self._lookahead.note(self._confidence, guesses, len(tokens) - 1, seconds)
        self._drafter.extend(tokens)
        self._since = now
        return self._guess(room)

    def keep(self, text: Sequence[int]) -> None:
        """Remember a text for those to come."""
        self._speculation.drafting.keep(text)

    def _guess(self, room: int) -> tuple[int, ...]:
        confidence = self._drafter.look() if room else None
        if confidence is None:
            return ()
        self._confidence = confidence
        most = self._lookahead.choose(confidence, room)
        tokens = self._drafter.guess(most) if most else ()
        return tokens[: max(guesses for guesses in GUESSES if guesses <= len(tokens))]
