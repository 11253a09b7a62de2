"""What a rank holds of one session: KV caches by loaded piece, and the rows it sent.

Theory of operation
-------------------
A rank loads its span of layers in one piece; after a change of plan it keeps that piece and loads
the layers that are new to it as another one. Each piece has its own `SpanCache`.

The hidden states that a rank sent to the next one are what the lost layers of that rank were
computed from. With these rows a later owner of the layers computes their caches again, and no other
layer computes anything, see `meshllm.model.steps.runner.SpanRunner.recompute`. They have no room
of their own in the plan: `SentRows` bounds the bytes of all sessions, and one without its rows is
recomputed from its first token after a loss. Kept sessions count, too, so those that recorded
longest ago lose their rows first: running ones go on recording.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch import Tensor

from meshllm.model.split.kv_cache import Rows, SpanCache
from meshllm.model.split.received_rows import ReceivedRows


class SentRows:
    """Bounds the memory of the rows that a rank sent, of all its sessions."""

    def __init__(self, most_bytes: int) -> None:
        """Keep up to ``most_bytes``; sessions that recorded longest ago make room for others."""
        self._most_bytes = most_bytes
        self._caches = WeakKeyDictionary[SessionCache, None]()  # in order of their last record
        self.bytes = 0
        """Bytes in use when they last grew."""

    def record(self, cache: "SessionCache", layer: int, start: int, rows: Tensor) -> None:
        """Add rows, see `SessionCache.record`."""
        before, is_known = cache.sent_bytes, cache in self._caches
        cache.record(layer, start, rows)
        self._move_last(cache)
        if cache.sent_bytes != before or not is_known:  # as one that is a branch
            self._fit()

    def count(self, cache: "SessionCache") -> None:
        """Count the rows of a session, whose number has changed."""
        self._move_last(cache)
        self._fit()

    def _move_last(self, cache: "SessionCache") -> None:
        self._caches.pop(cache, None)
        self._caches[cache] = None

    def _fit(self) -> None:
        """Drop the rows of sessions until the others fit; of the last one first if it cannot."""
        caches = list(self._caches)
        self.bytes = sum(each.sent_bytes for each in caches)
        if caches[-1].sent_bytes > self._most_bytes:
            caches.insert(0, caches.pop())
        for each in caches:
            if self.bytes <= self._most_bytes:
                break
            self.bytes -= each.sent_bytes
            each.sent.clear()


class SessionCache:
    """The KV cache of one session, in one part for each piece of the span, and the rows it sent."""

    def __init__(self, parts: Sequence[SpanCache]) -> None:
        self.parts = list(parts)
        self.sent: dict[int, tuple[int, Rows]] = {}
        """First position and outputs ``[1, T, D]`` of a layer; the key is the next layer."""
        self._late = set[int]()  # layers whose outputs begin with the next rows, at any position

    @property
    def length(self) -> int:
        """Tokens that all layers hold."""
        return min(part.length for part in self.parts)

    @property
    def sent_bytes(self) -> int:
        """Memory of the rows."""
        return sum(rows.buffer.nbytes for _, rows in self.sent.values())

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens; 0 empties the cache of any family.

        Raises:
            ModelError: the states cannot be rolled back that far; `crop` to 0.
        """
        for part in self.parts:
            part.crop(length)
        for first, rows in self.sent.values():
            rows.used = min(rows.used, max(0, length - first))

    def branch(self, length: int) -> "SessionCache":
        """Copy the first ``length`` tokens to a new cache; of a part that holds fewer, all.

        Raises:
            ModelError: the states cannot be rolled back that far.
        """
        other = SessionCache([part.branch(min(length, part.length)) for part in self.parts])
        for layer, (first, rows) in self.sent.items():
            if (held := min(rows.used, length - first)) > 0:
                other._late.add(layer)
                other.record(layer, first, rows.held[..., :held, :])
        return other

    def adopt(self, received: ReceivedRows, likes: Sequence[SpanCache]) -> None:
        """Take over rows that another node has handed over, for the parts that hold nothing yet.

        ``likes`` are caches of the model for the same spans, with at least one row. Outputs that
        were handed over are those of the last layer; others are recorded from the next row on.
        """
        for part, like in zip(self.parts, likes, strict=True):
            if part.length == 0:
                part.adopt(received.layers, like)
        last = self.parts[-1].span.stop
        if last not in self.sent:
            self._late.add(last)
            if (sent := received.sent.get(last)) and sent.used >= self.length:
                self.record(last, 0, sent.held[..., : self.length, :])

    def regroup(self, parts: Sequence[SpanCache]) -> None:
        """Move the layers to new, empty ``parts``; a part of which a layer is missing stays so.

        The rows after layers that are not among them are dropped.
        """
        for part in parts:
            part.take_over(self.parts)
        self.parts = list(parts)
        first, last = parts[0].span.start, parts[-1].span.stop
        self.sent = {layer: rows for layer, rows in self.sent.items() if first <= layer <= last}

    def record(self, layer: int, start: int, rows: Tensor) -> None:
        """Add the rows ``[1, T, D]`` from position ``start`` on; without those before, drop them.

        ``layer`` is the one that they enter next.
        """
        if start == 0 or layer in self._late:
            self.sent[layer] = start, Rows(rows)
            self._late.discard(layer)
        if layer not in self.sent:
            return
        first, sent = self.sent[layer]
        if first <= start <= first + sent.used:
            sent.used = start - first
            sent.extend(rows.shape[-2])
            sent.write(rows)

    def recorded(self, layer: int, start: int, stop: int) -> Tensor | None:
        """Return the rows ``[1, T, D]`` at positions ``start`` to ``stop``; None if unknown."""
        if layer not in self.sent:
            return None
        first, sent = self.sent[layer]
        if not first <= start <= stop <= first + sent.used:
            return None
        return sent.held[..., start - first : stop - first, :]

    def copied_rows(self, layer: int, start: int, stop: int) -> tuple[Tensor, int] | None:
        """Copy keys and values of a layer, see `SpanCache.copied_rows`."""
        part = next((each for each in self.parts if layer in each.span), None)
        return part.copied_rows(layer, start, stop) if part else None
