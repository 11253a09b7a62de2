"""The attention function of a stock model: its own, or a temporary replacement.

Each switch is registered once with transformers, under a unique name, as attention and as mask
function. A field selects the active one, so no state that models share changes between steps.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import finalize, ref

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from meshllm.model.modules.linear_padded import PaddedLinear
from meshllm.model.split.kv_cache import WindowLayer
from meshllm.model.split.shard import Shard
from meshllm.model.split.stubs import EndOfSpan, ProjectionStub

Attend = Callable[[Tensor, Tensor, Tensor, float, int | None], Tensor]
"""Maps query [1, H, T, D], key, value, scale and window to [1, T, H, E]."""

_QUERIES = "q_proj"
"""The name that families give the linear module of queries, if it makes nothing else."""

_KNOWN = {
    "cache_position",
    "dropout",
    "is_causal",
    "output_attentions",
    "position_ids",
    "scaling",
    "sliding_window",
    "use_cache",
}
"""Attention options that are handled, or have no effect on causal attention."""

_numbers = count()
"""Names are never reused; an ``id`` is, as soon as its object is freed."""


class AttentionSwitch:
    """The replaceable attention of one model; used by one thread at a time."""

    def __init__(self, shard: Shard) -> None:
        """Replace `sdpa` in a model; the results stay the same outside of `using`."""
        self._attend: Attend | None = None
        self._ends = frozenset[nn.Module]()
        self._slides = any(isinstance(each, WindowLayer) for each in shard.new_cache().layers)
        self._config = shard.model.config
        stock = self._config._attn_implementation
        name, own = f"meshllm_{next(_numbers)}", ref(self)  # a registry must not own it
        AttentionInterface.register(name, lambda *args, **more: _own(own).attend(*args, **more))
        AttentionMaskInterface.register(name, lambda *args, **more: _own(own).mask(*args, **more))
        self._config._attn_implementation = name
        self._restore = finalize(self, _restore, self._config, name, stock)

    @contextmanager
    def using(self, attend: Attend) -> Iterator[None]:
        """Replace the attention inside the block; no masks are made meanwhile."""
        before, self._attend = self._attend, attend
        try:
            yield
        finally:
            self._attend = before

    @contextmanager
    def ending_at(self, layer: nn.Module) -> Iterator[None]:
        """End the forward inside the block once a layer has its keys and values.

        Its queries are not computed, where a linear module of their own would: what full and
        sliding attention caches does not depend on them. `Shard.forward` then returns rows
        [1, T, ...] without a meaning.
        """
        self._ends = frozenset(layer.modules())
        queries = {
            each: own
            for each in self._ends
            if isinstance(own := getattr(each, _QUERIES, None), nn.Linear | PaddedLinear)
        }
        try:
            for each, own in queries.items():
                setattr(each, _QUERIES, ProjectionStub(own))
            yield
        finally:
            for each, own in queries.items():
                setattr(each, _QUERIES, own)
            self._ends = frozenset()

    def close(self) -> None:
        """Restore the model, which also happens when this is collected before the model."""
        self._restore()

    def mask(self, *args: Any, **more: Any) -> Any:
        """Return the mask of stock attention; None while the attention is replaced."""
        return sdpa_mask(*args, **more) if self._attend is None else None

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention for transformers: query [1, H, T, D] to [1, T, H, E]."""
        if self._attend is None:
            stock: tuple[Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, **options
            )
            return stock
        if module in self._ends:
            raise EndOfSpan(query.transpose(1, 2))
        unknown = {name for name in options.keys() - _KNOWN if options[name] is not None}
        if self._slides and "sliding_window" not in options:
            unknown.add("a window")
        if unknown or attention_mask is not None:
            names = ", ".join(sorted(unknown)) or "a mask"
            raise NotImplementedError(f"attention with {names}")
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        return self._attend(query, key, value, scale, options.get("sliding_window")), None


def _own(switch: "ref[AttentionSwitch]") -> AttentionSwitch:
    found = switch()
    assert found is not None, "the model outlived its AttentionSwitch"
    return found


def _restore(config: Any, name: str, stock: str) -> None:
    if config._attn_implementation == name:
        config._attn_implementation = stock
    for registry in (AttentionInterface, AttentionMaskInterface):
        registry._global_mapping.pop(name, None)
