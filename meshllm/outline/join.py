"""Joins the answers to the points of an outline in their order.

Theory of operation
-------------------
Each point is a session of its own. The first one that is not complete is shown as its text comes;
the text of later ones waits until those before them are complete. Tokens are reported when they
come, with or without their text, so that a count of them is right at any time. What waits is
bounded: a point has a limit of tokens, and text beyond what these can have is an error.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from meshllm.errors import PeerFault
from meshllm.outline.points import Point
from meshllm.request import (
    Answer,
    Event,
    FinishReason,
    Interruption,
    Piece,
    Prefilled,
    PromptTokens,
    Resumable,
    Waiting,
)

MAX_POINT_CHARS = 64 * 1024  # 64 characters for each of 1024 tokens; English averages about 4

_WORST_FIRST = FinishReason.CANCELLED, FinishReason.LENGTH, FinishReason.STOP


@dataclass(slots=True)
class TokenUsage:
    """The tokens of a session, known so far."""

    read: int = 0
    done: int = 0
    """Of those that are read, prefilled."""
    cached: int = 0
    written: list[int] = field(default_factory=list)

    def take(self, event: Event) -> None:
        """Count an event."""
        match event:
            case Prefilled(done, total):
                self.done, self.read = done, total
            case Piece(tokens=tokens):
                self.written += tokens
            case Answer():
                self.done = self.read = event.prompt_tokens
                self.cached, self.written = event.cached_tokens, [*event.tokens]
            case _:
                pass


@dataclass(slots=True)
class _Part:
    """The text of one point, without white space around it, and what it cost."""

    waiting: list[str]
    """Text that is not shown yet; the heading at first."""
    usage: TokenUsage = field(default_factory=TokenUsage)
    answer: Answer | None = None
    has_text: bool = False
    chars: int = 0
    space: str = ""
    """White space, which belongs to the text if more text follows."""

    def feed(self, text: str) -> None:
        """Append text to what is waiting."""
        self.chars += len(text)
        if self.chars > MAX_POINT_CHARS:
            raise PeerFault(f"A point of the answer has more than {MAX_POINT_CHARS} characters")
        text = self.space + text
        if not self.has_text:
            text = text.lstrip()
        body = text.rstrip()
        self.space = text[len(body) :]
        if body:
            self.waiting.append(body if self.has_text else f"\n\n{body}")
            self.has_text = True

    def flush(self) -> str:
        """Return the text that is not shown yet."""
        text = "".join(self.waiting)
        self.waiting.clear()
        return text


class Join:
    """The answer to a request, as far as its points have come."""

    def __init__(self, points: Sequence[Point], outline: TokenUsage) -> None:
        self._outline = outline
        self._parts = [
            _Part([("\n\n" if place else "") + point.heading]) for place, point in enumerate(points)
        ]
        self._shown = 0  # the part that is shown as it comes
        self._text: list[str] = []
        self._interruption = ""

    def begin(self) -> Iterator[Piece]:
        """Yield the first heading."""
        return self._show(self._parts[0].flush())

    def take(self, place: int, event: Event) -> Iterator[Event]:
        """Take an event of a point; yield those of the joined answer.

        Raises:
            PeerFault: the text of a point is too long.
        """
        part = self._parts[place]
        part.usage.take(event)
        match event:
            case Prefilled():
                yield self._progress()
            case Piece(text, tokens):
                part.feed(text)
                yield from self._show(part.flush() if place == self._shown else "", tokens)
            case Answer():
                part.answer = event
                yield from self._show("".join(self._advance()))
            case Interruption(text=text):
                if text != self._interruption:  # every point has lost the same ring
                    self._interruption = text
                    yield event
            case Waiting():
                pass  # the first text is shown already
            case Resumable() | PromptTokens():
                pass  # of a point: the joined answer cannot continue from caches
            case _:
                assert_never(event)

    def answer(self, first_s: float, end_s: float) -> Answer:
        """Return the whole answer; times are seconds from the request to first and last text."""
        answers = [part.answer for part in self._parts if part.answer]
        assert len(answers) == len(self._parts)  # `Backend.generate` ends with an answer
        usages = [self._outline, *(part.usage for part in self._parts)]
        count = sum(len(each.tokens) for each in answers)
        token_s = (end_s - first_s) / count if count else 0.0
        steps = sum(len(each.tokens) / (each.tokens_per_step or 1.0) for each in answers)
        lengths = {each.finish_reason for each in answers}
        return Answer(
            text="".join(self._text),
            tokens=tuple(token for each in usages for token in each.written),
            prompt_tokens=sum(each.read for each in usages),
            cached_tokens=sum(each.cached for each in usages),
            finish_reason=next(each for each in _WORST_FIRST if each in lengths),
            ttft_ms=first_s * 1e3,
            ms_per_token=token_s * 1e3,
            tokens_per_second=1 / token_s if token_s else 0.0,
            tokens_per_step=count / steps if steps else 1.0,
            hops=answers[0].hops,
            reasoning_tokens=sum(each.reasoning_tokens for each in answers),
        )

    def _advance(self) -> Iterator[str]:
        """Yield the text that waited for the complete parts."""
        while self._parts[self._shown].answer and self._shown + 1 < len(self._parts):
            self._shown += 1
            yield self._parts[self._shown].flush()

    def _show(self, text: str, tokens: tuple[int, ...] = ()) -> Iterator[Piece]:
        if text or tokens:
            self._text.append(text)
            yield Piece(text, tokens)

    def _progress(self) -> Prefilled:
        usages = [self._outline, *(part.usage for part in self._parts)]
        return Prefilled(sum(each.done for each in usages), sum(each.read for each in usages))
