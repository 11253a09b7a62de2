"""The stock model of transformers with its layers in the mesh.

Theory of operation
-------------------
The model has all its modules, so that what looks at them finds them, such as ``peft`` where to put
adapters. The weights of the layers are zeros that take no memory. The first layer sends what enters
it through all layers of the mesh, the others pass it on; what belongs to the batch, such as its
mask, is taken from the arguments of the module that holds the layers.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshllm.api.unix import SOCKET
from meshllm.config import load as load_config
from meshllm.config import state_path
from meshllm.errors import ModelError, UserError
from meshllm.model.files.loader import load
from meshllm.model.files.manifest import config_digest
from meshllm.model.files.source import resolve, stored_dtype
from meshllm.model.parity.check import check
from meshllm.model.split.meta_model import MetaModel, build
from meshllm.model.split.stubs import LayerStub, first
from meshllm.model.training.lora import pair_name
from meshllm.names import Digest, Span
from meshllm.remote.connection import NodeConnection
from meshllm.remote.layers import RemoteLayers, Sequences

_LAYERS = "_meshllm_layers"
"""The attribute of a model that holds its remote layers."""


def from_pretrained(
    model: str | Path, *, state: Path | None = None, dtype: torch.dtype | None = None
) -> Any:
    """Return a stock model whose layers are those of the mesh, with frozen weights.

    ``model`` is a folder, a name, or `builtin`; its embedding and head are read here, in ``dtype``
    (None: as stored). The layers are in the ring of the node with the folder ``state``, by default
    that of this user. They have no KV cache: ``generate`` computes the whole text for every token.

    Raises:
        ModelError: the model is not here, or cannot be split.
    """
    source = resolve(str(model), offline=True)
    check(source.config).require(2)
    dtype = dtype or stored_dtype(source)
    meta_model = build(source.config, dtype)
    whole = meta_model.model
    real = list(meta_model.parts)
    for index, layer in enumerate(real):
        meta_model.parts[index] = LayerStub(layer, meta_model.structure.arity)
    load(meta_model, source.folder, dtype)
    folder = state or state_path(load_config({}).settings)
    layers = RemoteLayers(
        NodeConnection(folder / SOCKET), Digest(config_digest(source)), meta_model.layers
    )
    _Forwarding(meta_model, layers).install(real)
    whole.requires_grad_(False)
    for config in (whole.config, whole.generation_config):
        if config is not None:
            config.use_cache = False
    whole.save_pretrained = _refuse_saving
    whole.gradient_checkpointing_enable = lambda *_args, **_options: None  # the nodes do that
    setattr(whole, _LAYERS, layers)
    return whole


def remote_layers(model: Any) -> RemoteLayers:
    """Return the layers of a model by `from_pretrained`, also inside one of ``peft``.

    Raises:
        UserError: it is another model.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = getattr(inner, _LAYERS, None)
    if not isinstance(found, RemoteLayers):
        raise UserError("The layers of this model are not in a mesh")
    return found


def _refuse_saving(*_args: Any, **_options: Any) -> None:
    raise UserError(
        "The layers of this model are in the mesh and cannot be saved",
        hint="save the adapter: `save_pretrained` of the model of peft",
    )


@dataclass(slots=True)
class _Forwarding:
    """Sends what enters the first layer of a stock model through layers of the mesh."""

    meta_model: MetaModel
    remote: RemoteLayers
    _sequences: Sequences = field(default_factory=Sequences)
    _is_each: bool = False
    """Whether hidden states after every layer are wanted."""
    _weights: dict[int, nn.Parameter] = field(default_factory=dict)
    """The weights of the layers, by id."""

    def install(self, layers: list[nn.Module]) -> None:
        """Put the layers of the stock model back, and forward what enters them."""
        parts, structure = self.meta_model.parts, self.meta_model.structure
        for index, layer in enumerate(layers):
            self._fill(layer)
            layer.forward = partial(self._run, index)
            parts[index] = layer
        owner = self.meta_model.model.get_submodule(structure.layers.rpartition(".")[0])
        names = list(signature(owner.forward).parameters)
        owner.register_forward_pre_hook(partial(self._begin, names), with_kwargs=True)

    def _fill(self, layer: nn.Module) -> None:
        """Give every parameter and buffer on meta zeros that take no memory."""
        for module in layer.modules():
            for name, meta in list(module.named_parameters(recurse=False)):
                weight = nn.Parameter(_zeros(meta), requires_grad=False)
                self._weights[id(weight)] = weight
                setattr(module, name, weight)
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, _zeros(buffer))
            # Moved to a device, or cast, they would take memory.
            module._apply = partial(_apply_to_others, module, module._apply, self._weights)  # type: ignore[method-assign]

    def _begin(
        self, names: list[str], _owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Take what belongs to the batch from the arguments of the module with the layers."""
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        config = self.meta_model.model.config
        if given.get("use_cache") or _length(given.get("past_key_values")):
            raise UserError("Layers in a mesh have no KV cache here", hint="`use_cache=False`")
        if given.get("output_attentions") or getattr(config, "output_attentions", False):
            raise UserError("Layers in a mesh return no attentions")
        each = given.get("output_hidden_states")
        self._is_each = bool(config.output_hidden_states if each is None else each)
        inputs = given.get("input_ids")
        rows = inputs if inputs is not None else given["inputs_embeds"]
        shape = rows.shape[0], rows.shape[1]
        self._sequences = Sequences(
            _of_shape("attention_mask", given.get("attention_mask"), shape),
            _of_shape("position_ids", given.get("position_ids"), shape),
        )

    def _run(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Return what a layer would: the hidden state, and None for the rest."""
        hidden, arity = first(args, kwargs), self.meta_model.structure.arity
        if self._is_each or index == 0:
            stop = index + 1 if self._is_each else self.remote.count
            span = Span(index, stop)
            hidden = self.remote(hidden, span, self._sequences, dict(self._adapters(span)))
        return (hidden, *(None,) * (arity - 1)) if arity else hidden

    def _adapters(self, span: Span) -> Iterator[tuple[str, Tensor]]:
        """Yield the matrices of LoRA that ``peft`` has put into the layers of a span, by name.

        Raises:
            ModelError: something else in the layers would have to be computed or trained.
        """
        for index in range(span.start, span.stop):
            layer, known = self.meta_model.parts[index], set[int]()
            for name, module in layer.named_modules():
                if hasattr(module, "lora_A"):
                    yield from _lora(index, name, module)
                    known |= {id(each) for each in _matrices(module)}
            for name, parameter in layer.named_parameters():
                if id(parameter) not in known:
                    self._check_frozen(index, name, parameter)

    def _check_frozen(self, layer: int, name: str, parameter: nn.Parameter) -> None:
        if id(parameter) not in self._weights:
            raise ModelError(
                f"`{name}` of layer {layer} cannot be trained in a mesh",
                hint="prompt tuning and LoRA can, without biases or copies of weights",
            )
        if parameter.untyped_storage().nbytes() > parameter.itemsize:  # no longer one zero
            raise ModelError(
                f"`{name}` of layer {layer} has changed; layers in a mesh do not",
                hint="initialise LoRA without the weights of the layers",
            )
        if parameter.requires_grad:
            raise ModelError(f"The weights of layer {layer} are frozen: `{name}` cannot be trained")


def _apply_to_others(
    module: nn.Module,
    apply: Callable[..., nn.Module],
    weights: Mapping[int, nn.Parameter],
    change: Callable[[Tensor], Tensor],
    recurse: bool = True,
) -> nn.Module:
    """Change the parameters of a module and those below it, such as adapters, but not weights."""
    own = dict(module._parameters)
    kept = {name: each for name, each in own.items() if each is not None and id(each) in weights}
    for name in kept:
        del module._parameters[name]
    try:
        return apply(change, recurse)
    finally:
        module._parameters = {name: kept.get(name, module._parameters.get(name)) for name in own}


def _zeros(meta: Tensor) -> Tensor:
    """Return zeros like a tensor on meta, which take no memory."""
    return torch.zeros((), dtype=meta.dtype).expand(meta.shape)


def _lora(layer: int, name: str, module: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices of the active adapters of a module of ``peft``, with their scale."""
    if module.merged:
        raise ModelError(f"The adapter in `{name}` is merged; layers in a mesh do not change")
    if module.disable_adapters:
        return
    active = [each for each in module.active_adapters if each in module.lora_A]
    for number, adapter in enumerate(active):
        dropout = module.lora_dropout[adapter]
        if module.training and getattr(dropout, "p", 0):
            raise ModelError("Dropout of LoRA is not supported in a mesh", hint="`lora_dropout=0`")
        if adapter in getattr(module, "lora_variant", ()):
            raise ModelError("No variant of LoRA, such as DoRA, is supported in a mesh")
        full = pair_name(layer, name, number)
        scale = module.scaling[adapter]
        yield f"{full}.a", module.lora_A[adapter].weight
        yield f"{full}.b", module.lora_B[adapter].weight * scale


def _matrices(module: Any) -> Iterator[Tensor]:
    for group in (module.lora_A, module.lora_B):
        yield from (each.weight for each in group.values())


def _length(cache: Any) -> int:
    return int(cache.get_seq_length()) if cache is not None else 0


def _of_shape(name: str, given: Any, shape: tuple[int, int]) -> Tensor | None:
    """Return a tensor of integers for a batch [B, T], expanded if it is of one sequence."""
    if given is None:
        return None
    if not isinstance(given, Tensor) or given.dim() != 2 or given.shape[1] != shape[1]:
        raise UserError(f"`{name}` is not a tensor [B, T] for a batch of shape {list(shape)}")
    return given.to("cpu", torch.int64).expand(shape)
