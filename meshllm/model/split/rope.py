"""Rotary embeddings that change with the length of a text, held to what they are for short ones.

Theory of operation: the kinds ``dynamic`` and ``longrope`` of transformers look at the largest
position of a forward. Beyond the context that the model was trained for first they take other
frequencies, for all rows of it, while caches keep what they were filled with. So a text would
depend on how its prompt was cut and on who came before it: transformers begins such a text again,
which a ring does not. Up to that context nothing ever changes, and every number is that of
transformers; so that is what a mesh serves of such a model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_FIXED = "default"
"""What a module takes its kind for, when it is to keep its frequencies."""


def context_of(config: Any) -> int | None:
    """Return how many tokens a text may have; None where its config sets no limit."""
    config = config.get_text_config(decoder=True)
    limits = [getattr(config, "max_position_embeddings", None), *_original(config.to_dict())]
    return min((limit for limit in limits if limit), default=None)


def hold(model: nn.Module) -> None:
    """Let all rotary embeddings keep the frequencies that they have."""
    for module in _changing(model):
        module.rope_type = _held(module.rope_type)


@contextmanager
def held(model: nn.Module) -> Iterator[None]:
    """Do so for a while: on meta there is no length to look at, and nothing to set aside."""
    kinds = [(module, module.rope_type) for module in _changing(model)]
    hold(model)
    try:
        yield
    finally:
        for module, kind in kinds:
            module.rope_type = kind


def _original(config: object) -> Iterator[int | None]:
    """Find the contexts that change to longer ones, in a config or in a part of it."""
    if isinstance(config, dict):
        if config.get("rope_type") == "longrope":
            yield config.get("original_max_position_embeddings")
        for part in config.values():
            yield from _original(part)


def _changing(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(_kind(module), str | dict)]


def _kind(module: nn.Module) -> Any:
    return vars(module).get("rope_type")


def _held(kind: str | dict[str, str]) -> str | dict[str, str]:
    """Name a kind that stays; each kind of layer has its own where it is a dictionary."""
    if isinstance(kind, dict):
        return {layers: str(_held(each)) for layers, each in kind.items()}
    return _FIXED if "dynamic" in kind or kind == "longrope" else kind
