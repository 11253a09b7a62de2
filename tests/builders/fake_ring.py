"""A fake ring, to test commands without a model."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshllm.cli.app import app
from meshllm.config import Settings
from meshllm.errors import MeshError, ModelError
from meshllm.names import Span
from meshllm.request import Answer, Event, FinishReason, HopReport, Piece, Prefilled, Request
from tests.builders.waiting import until


@dataclass
class FakeRing:
    """Echoes the last message, word by word."""

    error: MeshError | None = None
    waits_for: Path | None = None
    """A file without which it does not form."""
    requests: list[Request] = field(default_factory=list)
    settings: Settings | None = None
    is_open: bool = False
    cancelled: int = 0

    @asynccontextmanager
    async def __call__(self, settings: Settings) -> AsyncIterator["FakeRing"]:
        self.settings = settings
        if settings.model == "missing":
            raise ModelError("There is no model `missing`")
        if self.error:
            raise self.error
        if self.waits_for:
            await until(self.waits_for.exists)
        self.is_open = True
        try:
            yield self
        finally:
            self.is_open = False

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        asked = request.raw if request.raw is not None else request.turns[-1]["content"]
        words = ["You", " said:", *(f" {word}" for word in asked.split())]
        yield Prefilled(2, 2)
        try:
            if asked == "silence":
                await asyncio.Event().wait()
            for word in words:
                yield Piece(word)
                await asyncio.sleep(0)
            while asked == "loop":
                yield Piece(" on")
                await asyncio.sleep(0.01)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        answer = answer_of("".join(words), len(words))
        is_cut = request.max_tokens is not None and len(words) >= request.max_tokens
        yield replace(answer, finish_reason=FinishReason.LENGTH) if is_cut else answer


def answer_of(text: str, count: int) -> Answer:
    hops = (
        HopReport(0, "node-0", Span(0, 4), 1.25, 0.08, 0.02, 0.05, 512.0),
        HopReport(1, "node-1", Span(4, 8), 1.5, 0.09, 0.03, 0.06, 512.0),
    )
    return Answer(
        text=text,
        tokens=tuple(range(count)),
        prompt_tokens=2,
        finish_reason=FinishReason.STOP,
        ttft_ms=20.0,
        ms_per_token=4.0,
        tokens_per_second=250.0,
        tokens_per_step=1.0,
        hops=hops,
    )


def main() -> None:
    """Run the command line with the fake ring; print its final state to stderr."""
    file = os.environ.get("WAITS_FOR")
    ring = FakeRing(waits_for=Path(file) if file else None)
    try:
        app(obj=ring)
    finally:
        if ring.cancelled or ring.is_open:
            print(f"cancelled {ring.cancelled}, open {ring.is_open}", file=sys.stderr)
