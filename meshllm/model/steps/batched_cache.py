"""The caches of several sessions where stock code expects one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.steps.attention import attend_alone


class Bundle(DynamicCache):  # type: ignore[misc]  # transformers is not followed
    """Takes the rows of each session to its own cache."""

    def __init__(self, caches: Sequence[SpanCache], rows: Sequence[int]) -> None:
        """Expect ``rows[i]`` rows of the session of ``caches[i]``, in this order."""
        self.layers: list[Any] = []
        self.length = 0  # the shard counts here; see `advance`
        self.seen: list[tuple[Tensor, Tensor]] = []
        """Keys and values of each session, of the layer that was updated last."""
        self._caches = caches
        self.rows = list(rows)

    def attend(
        self, query: Tensor, _key: Tensor, _value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Let each session's rows attend to its own cache: query [1, H, T, D] to [1, T, H, E]."""
        queries = torch.split(query, self.rows, 2)
        attended = [
            attend_alone(own, *seen, scale, window)
            for own, seen in zip(queries, self.seen, strict=True)
        ]
        return torch.cat(attended, 1)

    def advance(self) -> None:
        """Count the rows in their caches."""
        for cache, rows in zip(self._caches, self.rows, strict=True):
            cache.length += rows

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append each session's rows to its cache; what all of them see is in ``seen``."""
        keys, values = (torch.split(each, self.rows, 2) for each in (key_states, value_states))
        self.seen = [
            cache.update(key, value, layer_idx, *args, **kwargs)
            for cache, key, value in zip(self._caches, keys, values, strict=True)
        ]
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Count the tokens of the longest session."""
        return max(cache.get_seq_length(layer_idx) for cache in self._caches)
