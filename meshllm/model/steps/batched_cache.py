"""The KV caches of several sessions, presented to the stock model as one cache."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.steps.attention import decode_attention


class BatchedCache(DynamicCache):  # type: ignore[misc]  # transformers is not followed
    """Appends the rows of each session to its own cache."""

    def __init__(self, caches: Sequence[SpanCache], rows: Sequence[int]) -> None:
        """Expect ``rows[i]`` rows for ``caches[i]``, in this order."""
        self.layers: list[Any] = []
        self.length = 0  # the shard adds the rows here; `advance` to the caches
        self.seen: list[tuple[Tensor, Tensor]] = []
        """Keys and values of each session, in the layer updated last."""
        self._caches = caches
        self.rows = list(rows)

    def attend(
        self, query: Tensor, _key: Tensor, _value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Attend with each session's rows over its cache: query [1, H, T, D] to [1, T, H, E]."""
        queries = torch.split(query, self.rows, 2)
        attended = [
            decode_attention(own, *seen, scale, window)
            for own, seen in zip(queries, self.seen, strict=True)
        ]
        return torch.cat(attended, 1)

    def advance(self) -> None:
        """Add the rows to the lengths of their caches."""
        for cache, rows in zip(self._caches, self.rows, strict=True):
            cache.length += rows

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append each session's rows to its cache; set ``seen`` to the keys and values to read."""
        keys, values = (torch.split(each, self.rows, 2) for each in (key_states, value_states))
        self.seen = [
            cache.update(key, value, layer_idx, *args, **kwargs)
            for cache, key, value in zip(self._caches, keys, values, strict=True)
        ]
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the length of the longest session, in tokens."""
        return max(cache.get_seq_length(layer_idx) for cache in self._caches)
