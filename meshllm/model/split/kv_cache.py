"""The KV cache, and recurrent states, of one session for the layers of a span.

Layers keep their global index; those outside the span are dummies. Keys and values are appended in
place, whereas transformers' own cache copies all of them for every token.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from meshllm.errors import ModelError
from meshllm.model.shape import SLACK, rows_for
from meshllm.names import Span

RowLayout = tuple[int, int, int, int]
"""Where rows are: address, numbers from head to head and from row to row, bytes from row to row."""


class Rows:
    """A tensor ``[B, H, T, D]`` that grows in place along T; `rows_for` sets its capacity."""

    __slots__ = ("buffer", "place", "room", "used")

    def __init__(self, like: Tensor) -> None:
        self.hold(like.new_empty(*like.shape[:-2], 0, like.shape[-1]))
        self.used = 0

    def hold(self, buffer: Tensor) -> None:
        """Use another buffer; what steps need of it is kept, as they would ask torch each time."""
        self.buffer, self.room = buffer, buffer.shape[-2]
        heads, line, _ = buffer.stride()[-3:]
        self.place: RowLayout = buffer.data_ptr(), heads, line, line * buffer.element_size()

    @property
    def held(self) -> Tensor:
        """All rows in use."""
        return self.buffer.narrow(-2, 0, self.used)

    @property
    def form(self) -> tuple[object, ...]:
        """All dimensions but T, and the dtype."""
        return (*self.buffer.shape[:-2], self.buffer.shape[-1], self.buffer.dtype)

    def extend(self, count: int, window: int = 0) -> None:
        """Add rows without writing them; a reallocation drops rows older than ``window``."""
        stop = self.used + count
        if stop > self.room:
            before = self.buffer
            held = before[..., : self.used, :]
            if window:
                held = held[..., max(0, self.used - (window - 1 + SLACK)) :, :]
            self.used = held.shape[-2]
            stop = self.used + count
            room = rows_for(stop, window)
            self.hold(before.new_empty(*before.shape[:-2], room, before.shape[-1]))
            self.buffer[..., : self.used, :] = held
        self.used = stop

    def __deepcopy__(self, _: Any) -> "Rows":
        copy = Rows(self.buffer)
        copy.extend(self.used)
        copy.write(self.held)
        return copy

    def on(self, device: torch.device) -> "Rows":
        """Return the rows on a device: these, or a copy."""
        if self.buffer.device == device:
            return self
        other = Rows(self.buffer)
        other.hold(self.buffer.to(device))
        other.used = self.used
        return other

    def write(self, states: Tensor) -> None:
        """Write the last rows ``[B, H, T, D]``."""
        count = states.shape[-2]
        self.buffer.narrow(-2, self.used - count, count).copy_(states)


@dataclass(frozen=True, slots=True)
class _RowsView:
    """An attribute that views rows, created only when it is read; None before the first rows."""

    number: int

    def __get__(self, layer: Any, _owner: type) -> Any:
        return layer.rows[self.number].held if layer.is_initialized else None

    def __set__(self, _layer: Any, value: Tensor | None) -> None:
        if value is not None and value.numel():  # stock code assigns None and empty tensors
            raise TypeError("Keys and values can only be written in place")


class _InPlaceLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not followed
    """Keys and values in rows that grow in place."""

    keys = _RowsView(0)
    values = _RowsView(1)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Create empty rows of these shapes and dtypes."""
        super().lazy_initialization(key_states, value_states)
        self.rows = Rows(key_states), Rows(value_states)

    def _write(self, key_states: Tensor, value_states: Tensor) -> int:
        """Append rows; return how many rows they see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        seen = self.extend(key_states.shape[-2])
        for rows, states in zip(self.rows, (key_states, value_states), strict=True):
            rows.write(states)
        return seen

    def extend(self, tokens: int) -> int:
        """Add rows for the caller to write; return how many rows they see."""
        raise NotImplementedError

    def _extend(self, tokens: int, window: int = 0) -> None:
        """Extend keys and values, or neither if memory runs out after the first."""
        keys, values = self.rows
        before = (keys.buffer, keys.used), (values.buffer, values.used)
        try:
            keys.extend(tokens, window)
            values.extend(tokens, window)
        except BaseException:
            for rows, (buffer, used) in zip(self.rows, before, strict=True):
                rows.hold(buffer)
                rows.used = used
            raise

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` rows."""
        if self.is_initialized:
            for rows in self.rows:
                rows.used += tokens_to_remove


class GrowingLayer(_InPlaceLayer):
    """Keys and values of full attention."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the rows of this step and return all."""
        self._write(key_states, value_states)
        return self.keys, self.values

    def extend(self, tokens: int) -> int:
        """Add rows for the caller to write; return how many rows they see."""
        keys, values = self.rows
        seen: int = keys.used + tokens
        if seen > keys.room or values.used + tokens > values.room:
            self._extend(tokens)
        else:
            keys.used, values.used = seen, values.used + tokens
        return seen

    def get_seq_length(self) -> int:
        """Return the number of rows."""
        return self.rows[0].used if self.is_initialized else 0


class WindowLayer(_InPlaceLayer, DynamicSlidingWindowLayer):  # type: ignore[misc]  # transformers is not followed
    """Keys and values of a sliding window; `SLACK` older rows are kept for `crop`."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the rows of this step and return those that it sees."""
        seen = self._write(key_states, value_states)
        return self.keys[..., -seen:, :], self.values[..., -seen:, :]

    def extend(self, tokens: int) -> int:
        """Add rows for the caller to write; return how many rows they see."""
        seen: int = min(self.cumulative_length, self.sliding_window - 1) + tokens
        self._extend(tokens, self.sliding_window)
        self.cumulative_length += tokens
        return seen

    @property
    def floor(self) -> int:
        """The shortest length that `crop` can go back to."""
        forgotten = self.cumulative_length - (self.rows[0].used if self.is_initialized else 0)
        return forgotten + self.sliding_window - 1 if forgotten else 0

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` rows; the caller has checked `floor`."""
        self.cumulative_length += tokens_to_remove
        super().crop(tokens_to_remove)


_ATTENTION = (GrowingLayer, WindowLayer, DynamicIndexedLayer)
_CROPPABLE = (*_ATTENTION, DummyLayer)


def _crop_indexed(layer: DynamicIndexedLayer, length: int) -> None:
    """Keep the first rows of each tensor: a step that failed may have extended only some."""
    if layer.is_initialized and layer.keys.numel():
        layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
    if layer.indexer_keys is not None and layer.indexer_keys.numel():
        layer.indexer_keys = layer.indexer_keys[:, :length]
    if layer.indexer_position_ids is not None:
        layer.indexer_position_ids = layer.indexer_position_ids[..., :length]


class SpanCache(DynamicCache):  # type: ignore[misc]  # transformers is not followed
    """The cache of one session for the layers of one span."""

    length: int
    """Tokens so far; updated by the shard."""
    layers: list[Any]
    """By global index; dummies for layers outside the span."""

    def __init__(self, config: Any, span: Span) -> None:
        super().__init__(config=config)
        self.length = 0
        self._config = config
        self.span = span
        self.layers = self._within_span(self.layers)
        self._attends = any(isinstance(layer, CacheLayerMixin) for layer in self.layers)

    def take_over(self, others: "Sequence[SpanCache]") -> None:
        """Take over the layers of this span, if ``others`` hold all of them for as many tokens."""
        span = range(self.span.start, self.span.stop)
        begun = [each for each in others if each.length and each.span.overlaps(self.span)]
        layers = [each.layers[at] for at in span for each in begun if at in each.span]
        lengths = {each.length for each in begun}
        if not span:  # nothing to hold
            self.length = max((other.length for other in others), default=0)
        elif len(layers) == len(span) and len(lengths) == 1:
            self.length = lengths.pop()
            self.layers[span.start : span.stop] = layers

    def copied_rows(self, layer: int, start: int, stop: int) -> tuple[Tensor, int] | None:
        """Copy keys and values ``[1, H, T, D]`` of a layer side by side.

        Return them, and where the values begin; None if the layer does not keep all rows, or has
        not so many.
        """
        kept = self.layers[layer]
        if type(kept) is not GrowingLayer or kept.get_seq_length() < stop:
            return None
        keys, values = (rows.held[..., start:stop, :] for rows in kept.rows)
        if keys.shape[:-1] != values.shape[:-1]:
            return None
        return torch.cat((keys, values), -1), keys.shape[-1]

    def adopt(self, received: Mapping[int, tuple[Rows, ...]], like: "SpanCache") -> None:
        """Take over rows of all layers of this empty cache, as far as all have them.

        Nothing changes if a layer has none, or others than ``like``, a cache of the model.
        """
        pairs = [
            (received.get(at), like.layers[at]) for at in range(self.span.start, self.span.stop)
        ]
        if not pairs or not all(rows and _is_alike(rows, layer) for rows, layer in pairs):
            return
        length = min(each.used for rows, _ in pairs for each in rows or ())
        try:
            for at in range(self.span.start, self.span.stop):
                device = like.layers[at].keys.device
                keys, values = (rows.on(device) for rows in received[at])
                keys.used = values.used = length
                self.layers[at].lazy_initialization(keys.held, values.held)
                self.layers[at].rows = keys, values
        except BaseException:
            self.crop(0)
            raise
        self.length = length

    @property
    def croppable(self) -> bool:
        """Whether tokens can be removed; recurrent and convolution states cannot be rolled back."""
        return all(type(layer) in _CROPPABLE for layer in self.layers)

    @property
    def extends(self) -> bool:
        """Whether the caller can write the rows of all layers, see `GrowingLayer.extend`."""
        return all(
            isinstance(layer, GrowingLayer | WindowLayer | DummyLayer) for layer in self.layers
        )

    @property
    def floor(self) -> int:
        """The shortest length, other than 0, that `crop` can go back to."""
        if not self.croppable:
            return self.length
        return max((la.floor for la in self.layers if isinstance(la, WindowLayer)), default=0)

    @property
    def max_crop(self) -> int | None:
        """Tokens that `crop` can always remove, besides a step of drafts; None means no limit."""
        if not self.croppable:
            return 0
        windows = any(isinstance(layer, WindowLayer) for layer in self.layers)
        return SLACK // 2 if windows else None

    @property
    def bytes(self) -> int:
        """Memory of the states, including spare capacity."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for layer in self.layers
            for tensor in tensors_in(vars(layer).values())
        }
        return sum(storages.values())

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens; 0 empties the cache of any family.

        After a forward that raised, ``crop(cache.length)`` makes the layers agree again.

        Raises:
            ModelError: the states cannot be rolled back that far; the cache is unchanged.
        """
        if length == 0:
            self.layers = self._within_span(DynamicCache(config=self._config).layers)
            self.length = 0
            return
        # Each step crops to the present length; `floor` would look at every layer again.
        if length != self.length and not self.floor <= length <= self.length:
            raise ModelError(
                f"Cannot crop a cache of {self.length} tokens to {length}:"
                f" the valid range is {self.floor} to {self.length}",
                hint="crop it to 0 and prefill again",
            )
        for layer in self.layers:
            if type(layer) is DynamicIndexedLayer:
                _crop_indexed(layer, length)
            elif type(layer) in _ATTENTION and (excess := layer.get_seq_length() - length) > 0:
                layer.crop(-excess)
        self.length = length

    @torch.inference_mode()
    def branch(self, length: int) -> "SpanCache":
        """Copy the first ``length`` tokens to a new cache.

        Raises:
            ModelError: the states cannot be rolled back that far.
        """
        other = SpanCache(self._config, self.span)
        for index, layer in enumerate(self.layers):
            if type(layer) is GrowingLayer and layer.is_initialized:
                other.layers[index].update(
                    layer.keys[..., :length, :], layer.values[..., :length, :]
                )
            else:
                other.layers[index] = deepcopy(layer)
        other.length = self.length
        other.crop(length)
        return other

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens before this step; stock code reads layer 0, even outside the span."""
        if layer_idx < len(self.layers) and isinstance(self.layers[layer_idx], CacheLayerMixin):
            return int(self.layers[layer_idx].get_seq_length())
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (keys, offset) for a mask, which is unused if no layer of the span attends."""
        if not self._attends:
            return self.length + query_length, 0
        own = layer_idx < len(self.layers) and isinstance(self.layers[layer_idx], CacheLayerMixin)
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx if own else 0)
        return sizes

    def _within_span(self, layers: list[Any]) -> list[Any]:
        """Replace the layers outside the span by dummies."""
        return [
            _in_place_layer(layer) if index in self.span else DummyLayer()
            for index, layer in enumerate(layers)
        ]


def _is_alike(rows: Sequence[Rows], layer: Any) -> bool:
    """Return whether rows have the form of those in a layer that grows."""
    return type(layer) is GrowingLayer and [r.form for r in rows] == [r.form for r in layer.rows]


def max_crop_of(config: Any, layers: int) -> int | None:
    """Return `SpanCache.max_crop` of a whole model."""
    return SpanCache(config, Span(0, layers)).max_crop


def _in_place_layer(layer: Any) -> Any:
    """Replace a layer that copies itself for every token by one that grows in place."""
    if type(layer) is DynamicLayer:
        return GrowingLayer()
    if type(layer) is DynamicSlidingWindowLayer:
        return WindowLayer(layer.sliding_window)
    return layer


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in attributes, and in dicts and tuples of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Rows):
            yield value.buffer
        elif isinstance(value, dict):
            yield from tensors_in(value.values())
        elif isinstance(value, tuple):
            yield from tensors_in(value)
