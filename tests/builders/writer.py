"""A backend that outlines and expands on command."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from meshllm.config import Settings
from meshllm.errors import MeshError
from meshllm.request import (
    Answer,
    Event,
    FinishReason,
    Interruption,
    Piece,
    Prefilled,
    Request,
    Turn,
)

QUESTION = Turn(role="user", content="What makes a city worth living in?")
ASKED = Request(turns=(QUESTION,), max_tokens=400)
OUTLINE = "1. Parks\n2. Work\n3. Friends\n"


@dataclass
class Writer:
    """Writes the outline, then a text for each point that says which; each word is a token."""

    outline: str = OUTLINE
    bodies: dict[int, str] = field(default_factory=dict)
    """Instead of `text of N`, by number."""
    held: dict[int, asyncio.Event] = field(default_factory=dict)
    """Points that wait for this before their last word."""
    errors: dict[int, MeshError] = field(default_factory=dict)
    """Points that fail behind their first word."""
    losses: dict[int, Interruption] = field(default_factory=dict)
    """Told before the first word."""
    lengths: set[int] = field(default_factory=set)
    """Points that end at their length."""
    requests: list[Request] = field(default_factory=list)
    open: int = 0
    most_open: int = 0
    cancelled: int = 0
    all_wait: asyncio.Event = field(default_factory=asyncio.Event)
    """Every point that is held waits."""
    waiting: int = 0

    @asynccontextmanager
    async def __call__(self, settings: Settings) -> AsyncIterator["Writer"]:
        _ = settings
        yield self

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        number = len(self.requests) - 1
        is_ordinary = not any("outline" in each["content"] for each in request.turns)
        text = self.bodies.get(number, f"text of {number}") if number else self.outline
        words = ("the usual answer" if is_ordinary else text).split(" ")
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            yield Prefilled(10, 10)
            if number in self.losses:
                yield self.losses[number]
            for place, word in enumerate(words):
                await asyncio.sleep(0)
                if place and number in self.errors:
                    raise self.errors[number]
                if place == len(words) - 1 and number in self.held:
                    self.waiting += 1
                    if self.waiting == len(self.held):
                        self.all_wait.set()
                    await self.held[number].wait()
                yield Piece(f" {word}" if place else word, (100 * number + place,))
            yield self._answer(number, words)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.open -= 1

    def _answer(self, number: int, words: list[str]) -> Answer:
        return Answer(
            text=" ".join(words),
            tokens=tuple(100 * number + place for place in range(len(words))),
            prompt_tokens=10,
            finish_reason=FinishReason.LENGTH if number in self.lengths else FinishReason.STOP,
            ttft_ms=1.0,
            ms_per_token=1.0,
            tokens_per_second=1000.0,
            tokens_per_step=2.0,
            hops=(),
            cached_tokens=8 if number else 0,
        )
