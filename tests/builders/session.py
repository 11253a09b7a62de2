"""Fakes around an entry or a stage: layers that count, neighbours that record, a held thread."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from meshllm.errors import MeshError, ModelError
from meshllm.model.wire.payload import RowFormat
from meshllm.names import Span
from meshllm.protocol.session.messages import Delivered, Forward, SessionMessage
from meshllm.protocol.trust.handshake import Features

P = ParamSpec("P")
T = TypeVar("T")

VOCABULARY = 100


class HeldExecutor(Executor):
    """A compute thread that runs what was submitted when it is told to."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self._jobs.append((future, partial(function, *args, **kwargs)))
        return future

    @property
    def waiting(self) -> int:
        """How many jobs have not begun."""
        return len(self._jobs)

    async def run_one(self) -> None:
        """Run the job that has waited longest, and report its result."""
        future, function = self._jobs.popleft()
        future.set_result(function())
        for _ in range(3):
            await asyncio.sleep(0)

    async def settle(self) -> None:
        """Run all jobs, those that their results submit too, and report the results."""
        await asyncio.sleep(0)
        while self._jobs:
            jobs, self._jobs = self._jobs, deque()
            for future, function in jobs:
                future.set_result(function())
            for _ in range(3):  # the result, what it wakes, and what that submits
                await asyncio.sleep(0)


@dataclass
class CountedCache:
    """A KV cache that only knows its length."""

    length: int = 0
    branches: bool = True
    croppable: bool = True

    @property
    def parts(self) -> "tuple[CountedCache]":
        return (self,)

    def crop(self, length: int) -> None:
        if length > self.length:
            raise ModelError(f"A cache of {self.length} tokens has no {length}")
        self.length = length

    def branch(self, length: int) -> "CountedCache":
        if not self.branches:
            raise RuntimeError("cannot allocate memory")
        self.crop(length)
        return CountedCache(length)


@dataclass
class CountingLayers:
    """Layers that apply a function to each row, and record what ran in one pass."""

    apply: Callable[[Tensor], Tensor]
    passes: list[tuple[str, list[int]]] = field(default_factory=list)
    """The kind of each pass, and the lengths of its caches before it."""
    error: Exception | None = None
    most: int = 99
    """Caches that may grow in one pass; one more is out of memory, once the others have grown."""
    is_row_invariant: bool = True
    vocabulary: int = VOCABULARY
    span: Span = field(default_factory=lambda: Span(0, 1))
    row_format: RowFormat = field(default_factory=lambda: RowFormat(2, torch.float32))
    pieces: tuple[()] = ()
    prepared: int = 0

    def new_cache(self) -> CountedCache:
        return CountedCache()

    def prefill(self, x: Tensor, cache: CountedCache, rows: int | None = None) -> Tensor:
        output = self._run("prefill", [x], [cache])[0]
        return output if rows is None else output[:, -rows:]

    def step(self, x: Tensor, cache: CountedCache) -> Tensor:
        return self.step_many([x], [cache])[0]

    def step_many(self, parts: Sequence[Tensor], caches: Sequence[CountedCache]) -> list[Tensor]:
        return self._run("step", parts, caches)

    def _run(
        self, kind: str, parts: Sequence[Tensor], caches: Sequence[CountedCache]
    ) -> list[Tensor]:
        if self.error:
            raise self.error
        self.passes.append((kind, [cache.length for cache in caches]))
        for x, cache in zip(parts, caches, strict=True):
            cache.length += x.shape[1]
        if len(caches) > self.most:
            raise RuntimeError("cannot allocate memory")
        return [self.apply(x) for x in parts]


class RecordingNeighbours:
    """Links to both neighbours, of which the test is the other end."""

    round_trip_us = 0
    bytes_per_s: float | None = None
    features = Features(0)
    helps = False
    is_waiting = False
    queued_bytes = 0

    def __init__(self) -> None:
        self.sent: list[SessionMessage] = []
        self.groups: list[int] = []
        """How many messages were sent together, each time."""
        self.blamed = 0
        self.deliver: Callable[[Delivered], None] = lambda _: None
        self._lost = asyncio.get_running_loop().create_future()

    def forward(self, action: Forward) -> None:
        self.sent.append(action.message)

    @contextmanager
    def together(self) -> Iterator[None]:
        before = len(self.sent)
        yield
        self.groups.append(len(self.sent) - before)

    def blame(self) -> None:
        self.blamed += 1

    async def run(self, deliver: Callable[[Delivered], None]) -> MeshError:
        self.deliver = deliver
        lost: MeshError = await self._lost
        return lost

    def lose(self, reason: MeshError) -> None:
        """Lose a neighbour."""
        self._lost.set_result(reason)


def next_token(tokens: Tensor) -> Tensor:
    """Return logits [1, T, V] that favour the token after each of ``tokens`` [1, T]."""
    return torch.nn.functional.one_hot((tokens + 1) % VOCABULARY, VOCABULARY).float()
