"""Records the requests of an API server in a trace.

Theory of operation
-------------------
The tokens of a prompt are known to the entry, which tokenizes it. It reports them to this process,
which sent the prompt, so the key of the bucket ids never leaves the memory of this process. A new
key is drawn at the start and with the first request of each day (UTC), and the one before is
forgotten: requests of two days cannot be compared, and who reads the file later cannot test a
guess at a prompt. A request has the key of the moment that it began.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from meshllm.request import Answer, Backend, Event, Piece, Prefilled, PromptTokens, Request
from meshllm.traces.buckets import BUCKET, KEY_BYTES, Buckets
from meshllm.traces.file import TraceFile
from meshllm.traces.trace import MAX_LINE_TOKENS, Finish, TraceLine, rotation, sampling_of

DAY_S = 86_400


@dataclass(slots=True)
class Recorder:
    """Draws the keys of a trace, and begins its records."""

    file: TraceFile
    clock: Callable[[], float] = time.time
    """Unix time in seconds."""
    _day: int | None = None
    _key: bytes = field(default=b"", repr=False)

    def traced(self, backend: Backend, model: str) -> Backend:
        """Return a backend whose requests are recorded."""
        return _Traced(backend, model, self)

    async def begin(self, model: str, request: Request) -> "_Record":
        """Begin the record of a request."""
        now = round(self.clock(), 3)
        if (day := int(now // DAY_S)) != self._day:
            self._day, self._key = day, secrets.token_bytes(KEY_BYTES)
            await asyncio.to_thread(self.file.write, rotation(now))
        return _Record(now, _now(), model, request, Buckets(self._key))


@dataclass(slots=True)
class _Record:
    """What is known of one request."""

    at: float
    begin: float
    """On the clock of the event loop."""
    model: str
    request: Request
    buckets: Buckets
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    first: float | None = None
    finish_reason: Finish = "cancelled"

    def __enter__(self) -> None:
        """Record an answer."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Note that an error has ended it, which a cancellation is not."""
        if kind is not None and issubclass(kind, Exception):
            self.finish_reason = "error"

    def take(self, event: Event) -> None:
        match event:
            case PromptTokens(start, tokens) if start == self.buckets.count:
                self.buckets.add(tokens)
                if self.request.scores_prompt:  # their echo is not generated
                    self.new_tokens -= len(tokens)
            case Prefilled(total=total) if not self.request.scores_prompt:  # else it is decoded
                self.prompt_tokens = total
            case Piece(tokens=tokens) if tokens or event.has_text:
                self.first = self.first or _now()
                self.new_tokens += len(tokens)
            case Answer():
                self._end(event)

    def _end(self, answer: Answer) -> None:
        tokens = answer.tokens[answer.prompt_tokens if self.request.scores_prompt else 0 :]
        self.new_tokens = answer.written_for(self.request)
        self.finish_reason = answer.finish_reason.value
        self.prompt_tokens, self.cached_tokens = answer.prompt_tokens, answer.cached_tokens
        if self.buckets.count == self.prompt_tokens:
            self.buckets.add(tokens)

    def line(self) -> TraceLine:
        """Return the line; what other nodes counted is limited to what can be read again."""
        known = self.buckets.count
        prompt_tokens = _limited(self.prompt_tokens or known)
        new_tokens = _limited(self.new_tokens)
        ids = self.buckets.ids[: (prompt_tokens + new_tokens) // BUCKET]
        return TraceLine(
            at=self.at,
            model=self.model,
            prompt_tokens=prompt_tokens,
            cached_tokens=_limited(self.cached_tokens),
            new_tokens=new_tokens,
            max_tokens=self.request.max_tokens,
            ttft_ms=None if self.first is None else _ms(self.first - self.begin),
            total_ms=_ms(_now() - self.begin),
            finish_reason=self.finish_reason,
            sampling=sampling_of(self.request.sampling),
            buckets=" ".join(ids) if known else None,
        )


@dataclass(frozen=True, slots=True)
class _Traced:
    """A backend that records its requests."""

    backend: Backend
    model: str
    recorder: Recorder

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Answer a request, see `Backend`; record it at its end, however it ends."""
        record = await self.recorder.begin(self.model, request)
        events = self.backend.generate(replace(request, reports_prompt=True))
        try:
            with record:
                async with aclosing(events):
                    async for event in events:
                        record.take(event)
                        if request.reports_prompt or not isinstance(event, PromptTokens):
                            yield event
        finally:
            await asyncio.to_thread(self.recorder.file.write, record.line().to_json())


def _limited(count: int) -> int:
    return min(max(0, count), MAX_LINE_TOKENS)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _now() -> float:
    return asyncio.get_running_loop().time()
