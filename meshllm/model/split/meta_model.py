"""A stock model on meta, which is stripped to the part that a shard holds."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.initialization import no_init_weights
from transformers.models.auto.auto_factory import _get_model_class
from transformers.utils import logging

from meshllm.errors import ModelError
from meshllm.model.split.onemkl import warm_up_onemkl
from meshllm.model.split.structure import META_ERRORS, ModelStructure, find_structure
from meshllm.model.split.stubs import EndStub, LayerStub
from meshllm.model.without_compiler import without_compiler
from meshllm.names import Span

MAX_STRUCTURES = 64
_STRUCTURES = dict[tuple[type, str], ModelStructure]()  # by class and config: a third of a build


def row_dtype(config: Any, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of hidden states between layers; ``dtype`` is that of the weights."""
    return torch.float32 if getattr(config, "residual_in_fp32", False) else dtype


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a model: a span of layers, with or without the ends."""

    span: Span
    embed: bool
    """Hold the modules before layer 0."""
    head: bool
    """Hold the modules after the last layer."""

    def check(self, layers: int) -> None:
        """Raise `ModelError` unless this is a contiguous part of a model of ``layers`` layers."""
        start, stop = self.span.start, self.span.stop
        if stop > layers:
            raise ModelError(f"Span `{self.span}` is beyond the {layers} layers of the model")
        if (self.embed and start != 0) or (self.head and stop != layers):
            raise ModelError(
                f"Span `{self.span}` of {layers} layers does not reach the ends it must hold"
            )
        if not self.span and not self.embed and not self.head:
            raise ModelError(f"Empty span `{self.span}` without embedding or head")


@dataclass(frozen=True, slots=True)
class MetaModel:
    """A stock model on meta and its structure."""

    model: Any
    """A `PreTrainedModel`."""
    structure: ModelStructure
    layers: int

    @property
    def parts(self) -> nn.ModuleList:
        """The list of layers."""
        return cast("nn.ModuleList", self.model.get_submodule(self.structure.layers))

    def unused_ends(self, part: Part) -> frozenset[str]:
        """Return the ends that a part does not run, even if it holds their weights for a tie."""
        inputs, outputs = self.structure.inputs, self.structure.outputs
        none: frozenset[str] = frozenset()
        return (none if part.embed else inputs) | (none if part.head else outputs)

    @without_compiler()
    def copy_for(self, part: Part) -> "MetaModel":
        """Copy all but the layers that a part does not hold, which is faster than to build it.

        Those stay the layers of this model, for `strip` to replace.
        """
        known = {id(each): each for at, each in enumerate(self.parts) if at not in part.span}
        return replace(self, model=copy.deepcopy(self.model, known))


@without_compiler()
def build(config: Any, dtype: torch.dtype, attention: str | None = None) -> MetaModel:
    """Build a whole stock model on meta, as ``from_pretrained`` would.

    Raises:
        ModelError: transformers has no causal language model for this config, or cannot build it.
    """
    warm_up_onemkl()
    kind, config = _choose(copy.deepcopy(config))
    if attention is not None:
        config._attn_implementation = attention
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if part is not None:
            part.dtype = dtype
    try:
        with quiet(), no_init_weights(), ExitStack() as contexts:  # nothing on meta has values
            for context in kind.get_init_context(dtype, False, False, None):
                contexts.enter_context(context)
            model = kind(config).eval()
        layers = config.get_text_config(decoder=True).num_hidden_layers
    except (*META_ERRORS, ImportError) as error:
        raise ModelError(
            f"A `{config.model_type}` cannot be built from its config: {error}"
        ) from error
    key = kind, config.to_json_string()
    if key not in _STRUCTURES:
        if len(_STRUCTURES) >= MAX_STRUCTURES:
            _STRUCTURES.clear()
        _STRUCTURES[key] = find_structure(model, layers)
    return MetaModel(model, _STRUCTURES[key], layers)


def check_causal(config: Any) -> None:
    """Raise `ModelError` if transformers has no causal language model for a config."""
    _choose(config)


def strip(meta_model: MetaModel, part: Part) -> None:
    """Replace by stubs what a part does not hold; either end keeps both sides of a tie."""
    part.check(meta_model.layers)
    model, structure = meta_model.model, meta_model.structure
    for index, layer in enumerate(meta_model.parts):
        if index not in part.span:
            meta_model.parts[index] = LayerStub(layer, structure.arity)
    ties = model.all_tied_weights_keys
    for name in meta_model.unused_ends(part):
        tied = any(weight.startswith(f"{name}.") for tie in ties.items() for weight in tie)
        if not (tied and (part.embed or part.head)):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, EndStub(model.get_submodule(name)))
    held = model.state_dict().keys()
    model.all_tied_weights_keys = {a: b for a, b in ties.items() if a in held and b in held}


def _choose(config: Any) -> tuple[Any, Any]:
    """Return the model class for a config, and the part of the config that it takes."""
    try:
        kind = _get_model_class(config, MODEL_FOR_CAUSAL_LM_MAPPING)
    except KeyError:
        raise ModelError(
            f"Model type `{config.model_type}` is not a causal language model of transformers",
            hint="`meshllm model families` lists those that are",
        ) from None
    takes_text = kind.config_class is config.sub_configs.get("text_config")
    return kind, config.get_text_config() if takes_text else config


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers within the block: problems are raised as errors."""
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
