"""Pins rotary embeddings whose frequencies depend on the text length to those of short texts.

Theory of operation: the kinds ``dynamic`` and ``longrope`` of transformers read the largest
position of a forward. Beyond the original context of the model they switch to other frequencies,
for all rows of the forward, while KV caches keep keys with the old ones. So an answer would depend
on how its prompt was chunked and on earlier requests: transformers recomputes such a text from its
start, which a ring does not. Up to that context the frequencies never change, and every number is
that of transformers; so a mesh serves such a model up to that context.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_PINNED = "default"
"""The kind that a module is set to, to keep its frequencies."""


def context_of(config: Any) -> int | None:
    """Return the largest context in tokens; None if the config sets no limit."""
    config = config.get_text_config(decoder=True)
    limits = [getattr(config, "max_position_embeddings", None), *_original(config.to_dict())]
    return min((limit for limit in limits if limit), default=None)


def pin_frequencies(model: nn.Module) -> None:
    """Pin all rotary embeddings to the frequencies that they have."""
    for module in _length_dependent(model):
        module.rope_type = _pinned(module.rope_type)


@contextmanager
def pinned_frequencies(model: nn.Module) -> Iterator[None]:
    """Pin them within the block: on meta, positions have no data to read."""
    kinds = [(module, module.rope_type) for module in _length_dependent(model)]
    pin_frequencies(model)
    try:
        yield
    finally:
        for module, kind in kinds:
            module.rope_type = kind


def _original(config: object) -> Iterator[int | None]:
    """Yield the original context of each ``longrope`` in a config or a part of it."""
    if isinstance(config, dict):
        if config.get("rope_type") == "longrope":
            yield config.get("original_max_position_embeddings")
        for part in config.values():
            yield from _original(part)


def _length_dependent(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(_kind(module), str | dict)]


def _kind(module: nn.Module) -> Any:
    return vars(module).get("rope_type")


def _pinned(kind: str | dict[str, str]) -> str | dict[str, str]:
    """Return the pinned form of a kind; a dictionary has one kind per kind of layer."""
    if isinstance(kind, dict):
        return {layers: str(_pinned(each)) for layers, each in kind.items()}
    return _PINNED if "dynamic" in kind or kind == "longrope" else kind
