"""Size of a model, part by part, measured on meta without reading tensor data."""

from collections.abc import Iterable
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from meshllm.model.files.source import Source, stored_dtype
from meshllm.model.modules.quant_kernels import packed_bytes
from meshllm.model.shape import CachedShape, ModelShape
from meshllm.model.split.kv_cache import SpanCache, WindowLayer, tensors_in
from meshllm.model.split.meta_model import MetaModel, build, row_dtype
from meshllm.model.split.rope import context_of
from meshllm.model.split.structure import PROBE, run_on_meta, stubbed
from meshllm.names import Quant, Span

UNLIMITED = 1 << 20  # tokens; for the rare config without a context length


def shape_of(
    source: Source,
    dtype: torch.dtype | None = None,
    quant: Quant = Quant.NONE,
    cache: Path | None = None,
) -> ModelShape:
    """Measure a model in ``dtype`` (None: as stored), and quantised.

    The result is cached in the folder ``cache``, if given.

    Raises:
        ModelError: transformers cannot build it.
    """
    if cache is not None:
        kept = CachedShape(source.folder, cache, None if dtype is None else str(dtype), quant)
        if known := kept.read(source.name):
            return known
        kept.write(shape := shape_of(source, dtype, quant))
        return shape
    dtype = dtype or stored_dtype(source)
    meta_model = build(source.config, dtype)
    model, structure = meta_model.model, meta_model.structure
    config = model.config.get_text_config(decoder=True)
    kv_bytes, state_bytes, windows = zip(*_cache_sizes(meta_model), strict=True)
    tensors = model.state_dict()
    tied = set(model.all_tied_weights_keys) & _under(tensors, structure.outputs)
    return ModelShape(
        name=source.name,
        model_type=source.config.model_type,
        layers=meta_model.layers,
        layer_bytes=tuple(
            _size(layer.state_dict().values()) - _saved(layer.modules(), quant)
            for layer in meta_model.parts
        ),
        embed_bytes=_size(tensors[name] for name in _under(tensors, structure.inputs)),
        head_bytes=_head_bytes(meta_model, tied, quant),
        tied=bool(tied),
        kv_bytes_per_token=kv_bytes,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        context=context_of(config) or UNLIMITED,
        dtype=str(dtype).removeprefix("torch."),
        itemsize=row_dtype(config, dtype).itemsize,
        windows=windows,
        state_bytes=state_bytes,
    )


def _saved(modules: Iterable[nn.Module], quant: Quant) -> int:
    """Count the bytes that quantisation of the linear modules saves; it skips subclasses."""
    weights = [module.weight for module in modules if type(module) is nn.Linear]
    return sum(
        weight.nbytes - packed_bytes(quant, (weight.shape[0], weight.shape[1]), weight.dtype)
        for weight in weights
    )


def _head_bytes(meta_model: MetaModel, tied: set[str], quant: Quant) -> int:
    """Count the bytes after the layers; a tied head that is quantised is held a second time."""
    model, outputs = meta_model.model, meta_model.structure.outputs
    tensors = model.state_dict()
    names = _under(tensors, outputs)
    held = names if quant is not Quant.NONE else names - tied
    modules = (each for name in outputs for each in model.get_submodule(name).modules())
    return _size(tensors[name] for name in held) - _saved(modules, quant)


def _under(names: Iterable[str], modules: Iterable[str]) -> set[str]:
    prefixes = tuple(f"{module}." for module in modules)
    return {name for name in names if name.startswith(prefixes)}


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _cache_sizes(meta_model: MetaModel) -> list[tuple[int, int, int]]:
    """Run one layer of each kind on meta, and measure its cache: KV, state and window."""
    kinds = SpanCache(meta_model.model.config, Span(0, meta_model.layers)).layers
    known: dict[object, tuple[int, int]] = {}
    sizes = []
    for index, layer in enumerate(meta_model.parts):
        kind = type(kinds[index]), tuple(tensor.shape for tensor in layer.parameters())
        if kind not in known:
            known[kind] = _probe(meta_model, index)
        window = kinds[index].sliding_window if isinstance(kinds[index], WindowLayer) else 0
        sizes.append((*known[kind], window))
    return sizes


def _probe(meta_model: MetaModel, index: int) -> tuple[int, int]:
    """Count the bytes that one token adds to the cache of a layer, and those of its state."""
    model, structure = meta_model.model, meta_model.structure
    cache = SpanCache(model.config, Span(index, index + 1))
    with stubbed(model, structure.layers, structure.arity, keep=index):
        run_on_meta(model, structure.call, cache)
    layer = cache.layers[index]
    names = "keys", "values", "indexer_keys"
    rows = [row for name in names if (row := getattr(layer, name, None)) is not None]
    others = (each for name, each in vars(layer).items() if name not in (*names, "rows"))
    states = sum(each.nbytes // (PROBE[0] if each.ndim else 1) for each in tensors_in(others))
    return _size(rows) // prod(PROBE), states
