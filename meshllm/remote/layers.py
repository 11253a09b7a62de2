"""The layers of a model in the mesh: hidden states go through them, and gradients come back.

Theory of operation
-------------------
A batch is cut into micro-batches of whole sequences. Each goes from span to span of the ring, while
another one is computed by another node: pipeline parallelism, by nothing but threads that wait.
What went into each span is kept here, for backward and for a node that is lost: then the pass is
repeated, with the spans of the next ring. Backward, a span of an earlier ring may be cut: what goes
into its parts is computed again first.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshllm.errors import Busy, LinkLost, ModelError, TimedOut
from meshllm.model.training.batch import GRAD, HIDDEN, KEPT, MASK, POSITIONS, pack, unpack
from meshllm.model.training.lora import layer_of
from meshllm.names import Digest, Span
from meshllm.protocol.training.codec import Direction

MICRO_TOKENS = 512
"""Tokens of a micro-batch, unless one sequence is longer: enough for matrices of full speed."""
MAX_IN_FLIGHT = 8  # micro-batches
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 2.0  # s; backoff after a node was lost, or has no memory
BACKOFF = 1.5
"""The factor of two pauses that follow each other."""
PATIENCE_S = 180.0
"""s after which a pass is given up that fails again and again."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sequences:
    """What goes with the hidden states [B, T, D] of a batch."""

    mask: Tensor | None = None
    """[B, T], int64, 0 for padding."""
    positions: Tensor | None = None
    """[B, T], int64."""

    def part(self, rows: slice) -> dict[str, Tensor]:
        """Return the tensors of some of the sequences."""
        both = {MASK: self.mask, POSITIONS: self.positions}
        return {name: each[rows] for name, each in both.items() if each is not None}


class LayerHost(Protocol):
    """Reaches the nodes of a ring; see `NodeConnection`."""

    def spans(self, model: Digest) -> list[Span]:
        """Return the spans of the ring that holds a model, in order."""
        ...

    def compute(self, model: Digest, span: Span, direction: Direction, data: bytes) -> bytes:
        """Send a batch through layers that one node has; return what comes out."""
        ...


class RemoteLayers:
    """All layers of one model in the mesh; weights stay as they are."""

    def __init__(
        self,
        connection: LayerHost,
        model: Digest,
        count: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Use the ring with the model of this config digest, which has ``count`` layers."""
        self.count = count
        """Layers of the model."""
        self._connection = connection
        self._model = model
        self._sleep = sleep
        self._spans: Sequence[Span] = ()

    def __call__(
        self,
        hidden: Tensor,
        span: Span | None = None,
        sequences: Sequences = Sequences(),
        adapters: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the hidden states [B, T, D] after a span of layers, all by default.

        ``hidden`` is those before it, of floating point. Gradients flow to it and to the
        ``adapters``, the matrices of LoRA by name, see `meshllm.model.training.lora`.

        Raises:
            LinkLost: no node runs on this machine.
            MeshError: the layers stayed out of reach for `PATIENCE_S`.
            ModelError: the mesh does not serve the model, or refuses the batch.
        """
        wanted = Span(0, self.count) if span is None else span
        if not (wanted and len(hidden)):
            return hidden
        if wanted.stop > self.count:
            raise ModelError(f"Span `{wanted}` is beyond the {self.count} layers of the model")
        named = dict(adapters or {})
        needy = [layer_of(name) for name, each in named.items() if each.requires_grad]
        lowest = wanted.start if hidden.requires_grad else min(needy, default=wanted.stop)
        if not torch.is_grad_enabled():
            lowest = wanted.stop
        batch = _BatchPass(self, wanted, sequences, tuple(named), lowest)
        through: Any = _ThroughLayers.apply  # untyped
        result: Tensor = through(batch, hidden, *named.values())
        return result

    def in_parallel(self, works: Sequence[Callable[[threading.Event], T]]) -> list[T]:
        """Run functions on threads; each gets an event that tells it to end early.

        An interrupt of the caller does not wait for them, nor does the end of the process.
        """
        stop, waiting = threading.Event(), deque(works)
        futures = {id(work): Future[T]() for work in works}

        def run() -> None:
            while not stop.is_set():
                try:
                    work = waiting.popleft()
                except IndexError:
                    return
                try:
                    futures[id(work)].set_result(work(stop))
                except BaseException as error:  # raised in the caller
                    futures[id(work)].set_exception(error)

        for _ in range(min(MAX_IN_FLIGHT, len(works))):
            threading.Thread(target=run, name="remote-layers", daemon=True).start()
        try:
            return [futures[id(work)].result() for work in works]
        finally:
            stop.set()

    def pieces(self, span: Span) -> list[Span]:
        """Cut a span where the ring does now."""
        spans = self._spans or self._connection.spans(self._model)
        self._spans = spans  # another thread may forget them at any time
        cut = (
            Span(max(each.start, span.start), min(each.stop, span.stop))
            for each in spans
            if each.overlaps(span)
        )
        return sorted(cut, key=lambda each: each.start)

    def repeated(self, work: Callable[[], T], stop: threading.Event) -> T:
        """Call a function again while nodes are lost or busy, with the spans of the next ring."""
        delay, since = FIRST_RETRY_S, time.monotonic()
        while True:
            try:
                return work()
            except (LinkLost, Busy, TimedOut):
                self._spans = ()
                if stop.is_set() or time.monotonic() > since + PATIENCE_S:
                    raise
            self._sleep(delay)
            delay = min(BACKOFF * delay, LAST_RETRY_S)

    def compute(
        self, span: Span, direction: Direction, tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Send tensors through layers of one node; return those that come out."""
        return unpack(self._connection.compute(self._model, span, direction, pack(tensors)))


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Layers that a micro-batch went through on one node, and what went into them."""

    span: Span
    hidden: Tensor
    kept: Tensor | None = None
    """The secret of what the node keeps for backward."""


@dataclass(slots=True)
class _BatchPass:
    """A batch on its way through the layers, and back."""

    layers: RemoteLayers
    span: Span
    sequences: Sequences
    names: tuple[str, ...]
    """Of the adapters."""
    lowest: int
    """The lowest layer whose input or adapters need a gradient; none if it is after the span."""
    cuts: list[slice] = field(default_factory=list)
    """The sequences of each micro-batch."""
    stretches: list[list[_Stretch]] = field(default_factory=list)
    """Of each micro-batch."""

    def forward(self, hidden: Tensor, adapters: Sequence[Tensor]) -> Tensor:
        count, length, _ = hidden.shape
        size = max(1, MICRO_TOKENS // max(length, 1))
        self.cuts = [slice(at, at + size) for at in range(0, count, size)]
        named = dict(zip(self.names, adapters, strict=True))
        jobs = [
            partial(self._forward, hidden[rows], self.sequences.part(rows), named)
            for rows in self.cuts
        ]
        done = self.layers.in_parallel(jobs)
        self.stretches = [stretches for _, stretches in done]
        return torch.cat([output for output, _ in done]).to(hidden)

    def _forward(
        self,
        hidden: Tensor,
        extra: Mapping[str, Tensor],
        adapters: Mapping[str, Tensor],
        stop: threading.Event,
    ) -> tuple[Tensor, list[_Stretch]]:
        stretches, left = list[_Stretch](), self.span
        while left:
            stretch, output = self.layers.repeated(
                partial(self._step, left, hidden, extra, adapters), stop
            )
            stretches.append(stretch)
            left, hidden = Span(stretch.span.stop, left.stop), output
        return hidden, stretches

    def _step(
        self,
        left: Span,
        hidden: Tensor,
        extra: Mapping[str, Tensor],
        adapters: Mapping[str, Tensor],
    ) -> tuple[_Stretch, Tensor]:
        """Send a micro-batch through the first layers that are left, as many as one node has."""
        piece = self.layers.pieces(left)[0]
        tensors = {HIDDEN: hidden, **extra, **_within(piece, adapters)}
        keeps = piece.stop > self.lowest
        direction = Direction.FORWARD_KEEPING if keeps else Direction.FORWARD
        found = self.layers.compute(piece, direction, tensors)
        return _Stretch(piece, hidden, found.get(KEPT)), found[HIDDEN]

    def backward(self, grad: Tensor, adapters: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of the hidden states and of the adapters."""
        named = dict(zip(self.names, adapters, strict=True))
        jobs = [
            partial(self._backward, stretches, grad[rows], self.sequences.part(rows), named)
            for rows, stretches in zip(self.cuts, self.stretches, strict=True)
        ]
        done = self.layers.in_parallel(jobs)
        hidden = [each.pop(HIDDEN) for each in done]
        return [
            torch.cat(hidden).to(grad),
            *(_sum(name, done, each) for name, each in named.items()),
        ]

    def _backward(
        self,
        stretches: Sequence[_Stretch],
        grad: Tensor,
        extra: Mapping[str, Tensor],
        adapters: Mapping[str, Tensor],
        stop: threading.Event,
    ) -> dict[str, Tensor]:
        found = {HIDDEN: grad}
        for stretch in reversed(stretches):
            if stretch.span.stop > self.lowest:
                found |= self.layers.repeated(
                    partial(self._back, stretch, found[HIDDEN], extra, adapters), stop
                )
        return found

    def _back(
        self,
        stretch: _Stretch,
        grad: Tensor,
        extra: Mapping[str, Tensor],
        adapters: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Send a gradient back through a stretch, which the ring may have cut since."""
        *first, last = self.layers.pieces(stretch.span)
        parts, hidden = list[_Stretch](), stretch.hidden
        for piece in first:
            part, hidden = self._step(piece, hidden, extra, adapters)
            parts.append(part)
        parts.append(_Stretch(last, hidden, None if first else stretch.kept))
        found = {HIDDEN: grad}
        for part in reversed(parts):
            found |= self._back_one(part, found[HIDDEN], extra, adapters)
        return found

    def _back_one(
        self,
        part: _Stretch,
        grad: Tensor,
        extra: Mapping[str, Tensor],
        adapters: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Send a gradient back through layers of one node, and the whole batch if it needs that."""
        compute = partial(self.layers.compute, part.span, Direction.BACKWARD)
        if part.kept is not None:
            with suppress(Busy):  # it is not kept any more
                return compute({GRAD: grad, KEPT: part.kept})
        batch = {HIDDEN: part.hidden, GRAD: grad, **extra, **_within(part.span, adapters)}
        return compute(batch)


def _sum(name: str, parts: Sequence[Mapping[str, Tensor]], adapter: Tensor) -> Tensor | None:
    """Return the sum of the gradients of an adapter over the micro-batches, if it has any."""
    grads = [part[name] for part in parts if name in part]
    return torch.stack(grads).sum(0).to(adapter) if grads else None


def _within(span: Span, adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: each for name, each in adapters.items() if layer_of(name) in span}


class _ThroughLayers(torch.autograd.Function):
    """Connects a pass to autograd."""

    @staticmethod
    def forward(ctx: Any, batch: _BatchPass, hidden: Tensor, *adapters: Tensor) -> Tensor:
        ctx.batch = batch
        ctx.save_for_backward(*adapters)
        return batch.forward(hidden, adapters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.batch.backward(grad, ctx.saved_tensors)
