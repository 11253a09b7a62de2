"""What the layers of a stock model attend with: its own attention, or another for a while.

Registered once, under a name of its own, with the functions and masks of transformers. Which one
answers is a field, so that nothing that models share changes from step to step.
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

from meshllm.model.split.kv_cache import WindowLayer
from meshllm.model.split.shard import Shard

Attend = Callable[[Tensor, Tensor, Tensor, float, int | None], Tensor]
"""From query [1, H, T, D], key and value, scale and window to [1, T, H, E]."""

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
"""Options of attention that are heeded, or change nothing where a row sees all before it."""

_numbers = count()
"""Names are never used again: an ``id`` is, as soon as its owner has gone."""


class AttentionSwitch:
    """The attention of one model; one thread at a time uses it."""

    def __init__(self, shard: Shard) -> None:
        """Take the place of `sdpa` in a model, which attends as before until told otherwise."""
        self._attend: Attend | None = None
        self._slides = any(isinstance(each, WindowLayer) for each in shard.new_cache().layers)
        self._config = shard.model.config
        stock = self._config._attn_implementation
        name, own = f"meshllm_{next(_numbers)}", ref(self)  # a registry would keep the weights
        AttentionInterface.register(name, lambda *args, **more: _own(own).attend(*args, **more))
        AttentionMaskInterface.register(name, lambda *args, **more: _own(own).mask(*args, **more))
        self._config._attn_implementation = name
        self._restore = finalize(self, _restore, self._config, name, stock)

    @contextmanager
    def using(self, attend: Attend) -> Iterator[None]:
        """Attend in another way for a while; no masks are made meanwhile."""
        before, self._attend = self._attend, attend
        try:
            yield
        finally:
            self._attend = before

    def close(self) -> None:
        """Leave the model as it was, which also happens when this is collected before the model."""
        self._restore()

    def mask(self, *args: Any, **more: Any) -> Any:
        """Make a mask where stock attention needs one."""
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
        """Attend in the place of a function of transformers: query [1, H, T, D] to [1, T, H, E]."""
        if self._attend is None:
            stock: tuple[Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, **options
            )
            return stock
        strange = {name for name in options.keys() - _KNOWN if options[name] is not None}
        if self._slides and "sliding_window" not in options:
            strange.add("a window")
        if strange or attention_mask is not None:
            wish = ", ".join(sorted(strange)) or "a mask"
            raise NotImplementedError(f"attention with {wish}")
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        return self._attend(query, key, value, scale, options.get("sliding_window")), None


def _own(switch: "ref[AttentionSwitch]") -> AttentionSwitch:
    found = switch()
    assert found is not None, "a model outlived its attention"
    return found


def _restore(config: Any, name: str, stock: str) -> None:
    if config._attn_implementation == name:
        config._attn_implementation = stock
    for registry in (AttentionInterface, AttentionMaskInterface):
        registry._global_mapping.pop(name, None)
