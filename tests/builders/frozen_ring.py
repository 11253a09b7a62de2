"""A ring that computes batches for training, behind the methods of a connection to a node."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock

from meshllm.errors import MeshError
from meshllm.model.files.source import Source
from meshllm.model.training.frozen_span import FrozenSpan
from meshllm.names import Digest, Span
from meshllm.protocol.training.codec import Direction

Fault = Callable[[], MeshError | None]


@dataclass
class FrozenRing:
    """Spans of a model in this process; stands for `NodeConnection`."""

    source: Source
    cuts: Sequence[Span]
    """How the ring is split now."""
    faults: list[MeshError | None] = field(default_factory=list)
    """What the next passes raise; None is nothing."""
    passes: list[tuple[Span, Direction]] = field(default_factory=list)
    """Those that were computed."""
    asked: int = 0
    """How often the spans were asked for."""
    _loaded: dict[Span, FrozenSpan] = field(default_factory=dict)
    _turn: Lock = field(default_factory=Lock)
    """A node has one compute thread."""

    def spans(self, model: Digest) -> list[Span]:
        _ = model
        self.asked += 1
        return list(self.cuts)

    def compute(self, model: Digest, span: Span, direction: Direction, data: bytes) -> bytes:
        _ = model
        with self._turn:
            return self._compute(span, direction, data)

    def _compute(self, span: Span, direction: Direction, data: bytes) -> bytes:
        if self.faults and (fault := self.faults.pop(0)):
            raise fault
        if span not in self._loaded:
            self._loaded[span] = FrozenSpan(self.source, span)
        self.passes.append((span, direction))
        layers = self._loaded[span]
        if direction is Direction.BACKWARD:
            return layers.backward(data)
        return layers.forward(data, keeps=direction is Direction.FORWARD_KEEPING)

    def forget(self) -> None:
        """Lose all that is kept between two passes, as nodes that start again do."""
        self._loaded.clear()
