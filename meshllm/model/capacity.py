"""How large a model is, part by part, and what this machine has free; reads no tensor data."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

import psutil  # type: ignore[import-untyped]  # ships no types
import torch
from torch import Tensor, nn

from meshllm.model.anatomy import PROBE, run_on_meta, stubbed
from meshllm.model.cache import MOST_ROWS, SpanCache, WindowLayer, rows_for, tensors_in
from meshllm.model.quant_kernels import packed_bytes
from meshllm.model.rotary import context_of
from meshllm.model.skeleton import Skeleton, build
from meshllm.model.source import Source, stored_dtype
from meshllm.names import Quant, Span

CHUNK = 1024  # rows of a prompt that are computed at a time, as a rule
STEP = 32  # rows of a step, as a rule
UNLIMITED = 1 << 20  # tokens; for the rare config that gives no longest sequence


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a planner has to know of a model."""

    name: str
    model_type: str
    layers: int
    layer_bytes: tuple[int, ...]
    embed_bytes: int
    """What stands before the layers."""
    head_bytes: int
    """What stands after them, without what it shares with the embedding."""
    tied: bool
    """Embedding and head share their weights."""
    kv_bytes_per_token: tuple[int, ...]
    """Per layer; 0 where the state does not grow. A sliding window grows until it is full."""
    hidden_size: int
    vocab_size: int
    context: int
    """Longest sequence, in tokens."""
    dtype: str
    """As ``bfloat16``."""
    itemsize: int
    """Bytes per element of a hidden state."""
    windows: tuple[int, ...]
    """Per layer: tokens of its sliding window; 0 where it has none."""
    state_bytes: tuple[int, ...]
    """Per layer: what a session takes however long it is."""


def shape_of(
    source: Source, dtype: torch.dtype | None = None, quant: Quant = Quant.NONE
) -> ModelShape:
    """Measure a model as it would be in ``dtype``, or as stored, and quantised.

    Raises:
        ModelError: transformers cannot build it.
    """
    dtype = dtype or stored_dtype(source)
    skeleton = build(source.config, dtype)
    model, anatomy = skeleton.model, skeleton.anatomy
    config = model.config.get_text_config(decoder=True)
    kv_bytes, state_bytes, windows = zip(*_cache_sizes(skeleton), strict=True)
    tensors = model.state_dict()
    tied = set(model.all_tied_weights_keys) & _under(tensors, anatomy.outputs)
    return ModelShape(
        name=source.name,
        model_type=source.config.model_type,
        layers=skeleton.layers,
        layer_bytes=tuple(
            _size(layer.state_dict().values()) - _saved(layer.modules(), quant)
            for layer in skeleton.parts
        ),
        embed_bytes=_size(tensors[name] for name in _under(tensors, anatomy.inputs)),
        head_bytes=_head_bytes(skeleton, tied, quant),
        tied=bool(tied),
        kv_bytes_per_token=kv_bytes,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        context=context_of(config) or UNLIMITED,
        dtype=str(dtype).removeprefix("torch."),
        itemsize=dtype.itemsize,
        windows=windows,
        state_bytes=state_bytes,
    )


def cache_cost(shape: ModelShape, span: Span) -> Callable[[int], tuple[int, int]]:
    """Return what tells the bytes of a session's cache for the layers of a span, by its tokens.

    The first is what the cache holds, the second what it takes beside that while one layer grows.
    """
    layers = zip(shape.kv_bytes_per_token, shape.windows, shape.state_bytes, strict=True)
    kinds = Counter(list(layers)[span.start : span.stop])

    def cost(tokens: int) -> tuple[int, int]:
        rows = {kind: kind[0] * rows_for(tokens, kind[1]) for kind in kinds}
        held = sum((rows[kind] + kind[2]) * count for kind, count in kinds.items())
        return held, max(rows.values(), default=0)

    return cost


def mean_kv_bytes(shape: ModelShape, tokens: int) -> tuple[int, ...]:
    """Tell for each layer what one token takes in the cache of a session of so many, at most."""
    layers = (Span(at, at + 1) for at in range(shape.layers))
    return tuple(-(-cache_cost(shape, layer)(tokens)[0] // tokens) for layer in layers)


def workspace_bytes(shape: ModelShape) -> int:
    """Bound what a forward takes beside weights and caches: the results of one layer, and logits.

    A row comes out of each matrix of a layer once. All of them together are as wide as the layer
    has weights per column, twice with what is made of them in float32; a mask has a row for each.
    """
    row = 2 * max(shape.layer_bytes) // shape.hidden_size + 8 * shape.hidden_size
    mask = min(shape.context, MOST_ROWS) * shape.itemsize
    return CHUNK * (row + mask) + STEP * shape.vocab_size * 4


def process_memory() -> int:
    """Tell how many bytes of memory this process takes."""
    return int(psutil.Process().memory_info().rss)


def free_memory() -> int:
    """Tell how many bytes can be used without swapping."""
    return int(psutil.virtual_memory().available)


def _saved(modules: Iterable[nn.Module], quant: Quant) -> int:
    """Count the bytes that linear modules take less when they are quantised."""
    weights = [module.weight for module in modules if isinstance(module, nn.Linear)]
    return sum(
        weight.nbytes - packed_bytes(quant, (weight.shape[0], weight.shape[1]), weight.dtype)
        for weight in weights
    )


def _head_bytes(skeleton: Skeleton, tied: set[str], quant: Quant) -> int:
    """Count what stands behind the layers; what is tied and quantised is held a second time."""
    model, outputs = skeleton.model, skeleton.anatomy.outputs
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


def _cache_sizes(skeleton: Skeleton) -> list[tuple[int, int, int]]:
    """Let one layer of each kind write into its cache on meta, and look at what it wrote."""
    kinds = SpanCache(skeleton.model.config, Span(0, skeleton.layers)).layers
    known: dict[object, tuple[int, int]] = {}
    sizes = []
    for index, layer in enumerate(skeleton.parts):
        kind = type(kinds[index]), tuple(tensor.shape for tensor in layer.parameters())
        if kind not in known:
            known[kind] = _probe(skeleton, index)
        window = kinds[index].sliding_window if isinstance(kinds[index], WindowLayer) else 0
        sizes.append((*known[kind], window))
    return sizes


def _probe(skeleton: Skeleton, index: int) -> tuple[int, int]:
    """Count the bytes that one token adds to the cache of one layer, and those of its state."""
    model, anatomy = skeleton.model, skeleton.anatomy
    cache = SpanCache(model.config, Span(index, index + 1))
    with stubbed(model, anatomy.layers, anatomy.arity, keep=index):
        run_on_meta(model, anatomy.call, cache)
    layer = cache.layers[index]
    names = "keys", "values", "indexer_keys"
    rows = [row for name in names if (row := getattr(layer, name, None)) is not None]
    others = (each for name, each in vars(layer).items() if name not in (*names, "rows"))
    states = sum(each.nbytes // (PROBE[0] if each.ndim else 1) for each in tensors_in(others))
    return _size(rows) // prod(PROBE), states
