"""Finds the layers of a stock model, and which modules run before and after them.

It runs the stock forward once on meta, with every layer stubbed and the other modules hooked.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from meshllm.errors import MeshError, ModelError
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.split.rope import pinned_frequencies
from meshllm.model.split.stubs import LayerStub
from meshllm.model.without_compiler import without_compiler
from meshllm.names import Span

ARITIES = range(4)  # a layer returns a tensor (0) or a tuple of up to 3
PROBE = (2, 3)  # [B, T], different and not 1, so that a lost or swapped dimension shows

PROBE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MeshError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""What third-party model code raises when run in a way, or at a size, it was not made for."""

META_ERRORS = (
    RuntimeError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError,
    AssertionError,
)  # fmt: skip
"""What stock code raises on meta, where tensors have no data, or for a config of no model."""


@dataclass(frozen=True, slots=True)
class ForwardSignature:
    """The arguments of the stock forward, read once from its signature."""

    cache: str
    """The name of the argument that takes the cache."""
    position_ids: bool
    attention_mask: bool
    logits_to_keep: bool


@dataclass(frozen=True, slots=True)
class ModelStructure:
    """The parts of a model, by dotted name."""

    layers: str
    """The list of layers."""
    arity: int
    """How many values a layer returns; 0 is a bare tensor."""
    inputs: frozenset[str]
    """Outermost modules with parameters that run before the first layer only."""
    outputs: frozenset[str]
    """Outermost modules with parameters that run after the last layer only."""
    call: ForwardSignature


def find_structure(model: nn.Module, count: int) -> ModelStructure:
    """Find the parts of a stock model on meta that has ``count`` layers.

    Raises:
        ModelError: it has no list of ``count`` layers, or its forward does not run without them.
    """
    layers = _find_layers(model, count)
    call = _read_signature(model)
    ends = _find_ends(model, layers)
    for arity in ARITIES:
        if (calls := _trace(model, layers, arity, call, ends)) is not None:
            middle = calls.index(layers)
            before, after = frozenset(calls[:middle]), frozenset(calls[middle + 1 :])
            return ModelStructure(layers, arity, before - after, after - before, call)
    raise ModelError(f"`{type(model).__name__}` does not run without its layers")


def _find_layers(model: nn.Module, count: int) -> str:
    """Return the name of the list of ``count`` modules with the most parameters."""
    sizes: dict[str, int] = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    }
    if not sizes:
        raise ModelError(f"`{type(model).__name__}` has no list of {count} layers")
    return max(sizes, key=sizes.__getitem__)


def _read_signature(model: nn.Module) -> ForwardSignature:
    names = signature(model.forward).parameters
    return ForwardSignature(
        "cache_params" if "cache_params" in names else "past_key_values",
        "position_ids" in names,
        "attention_mask" in names,
        "logits_to_keep" in names,
    )


def _find_ends(model: nn.Module, layers: str) -> list[str]:
    """Return the outermost modules with parameters that are neither around nor in the layers."""
    ends: list[str] = []
    for name, module in model.named_modules():
        holds = f"{layers}.".startswith(f"{name}.") or not name
        inside = any(name.startswith(f"{outer}.") for outer in (layers, *ends))
        if not holds and not inside and any(True for _ in module.parameters()):
            ends.append(name)
    return ends


def _trace(
    model: nn.Module, layers: str, arity: int, call: ForwardSignature, ends: list[str]
) -> list[str] | None:
    """Return the ends and the layers in the order of their calls; None if the arity is wrong."""
    calls: list[str] = []
    with stubbed(model, layers, arity) as stubs, ExitStack() as hooks:
        for name, module in [*((e, model.get_submodule(e)) for e in ends), (layers, stubs[-1])]:
            note = module.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
            hooks.callback(note.remove)
        shape = run_on_meta(model, call, SpanCache(model.config, Span(0, 0)))
    # A tuple taken for a tensor, or the reverse, may pass; but it loses a dimension.
    return calls if shape == PROBE and layers in calls else None


@without_compiler()
def run_on_meta(model: Any, call: ForwardSignature, cache: SpanCache) -> tuple[int, ...] | None:
    """Run a stock forward without data; return the shape of the logits, without V.

    None if it raised: stubs were of the wrong arity, or a layer is data-dependent. What it wrote
    into the cache until then stays.
    """
    tokens = torch.zeros(PROBE, dtype=torch.long, device="meta")
    options: dict[str, Any] = {call.cache: cache, "use_cache": True}
    if call.position_ids:  # computing them would read the data of a meta tensor
        options["position_ids"] = tokens
    try:
        with _eager_attention(model), pinned_frequencies(model), torch.no_grad():
            return tuple(model(input_ids=tokens, **options).logits.shape[:-1])
    except META_ERRORS:
        return None


@contextmanager
def _eager_attention(model: Any) -> Iterator[None]:
    """Select eager attention within the block: masks of other kinds are data-dependent."""
    configs = [model.config, model.config.get_text_config(decoder=True)]
    names = [config._attn_implementation_internal for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = "eager"
        yield
    finally:
        for config, name in zip(configs, names, strict=True):
            config._attn_implementation_internal = name


@contextmanager
def stubbed(
    model: nn.Module, layers: str, arity: int, keep: int | None = None
) -> Iterator[nn.ModuleList]:
    """Replace every layer except ``keep`` by a stub within the block."""
    parts = cast("nn.ModuleList", model.get_submodule(layers))
    originals = list(parts)
    try:
        for index, layer in enumerate(originals):
            if index != keep:
                parts[index] = LayerStub(layer, arity)
        yield parts
    finally:
        for index, layer in enumerate(originals):
            parts[index] = layer
