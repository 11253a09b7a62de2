"""Loading a shard: build the stock model, strip it to a part, load weights, replace modules."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshllm.errors import ModelError
from meshllm.model.device import CPU
from meshllm.model.files.loader import load
from meshllm.model.files.source import Source, stored_dtype
from meshllm.model.modules.quant_store import digest_weights
from meshllm.model.modules.replacement import replace_modules
from meshllm.model.split.meta_model import MetaModel, Part, build, strip
from meshllm.model.split.shard import Shard
from meshllm.names import Quant, Span


def load_shard(  # noqa: PLR0913 -- one keyword per independent option
    source: Source,
    span: Span,
    *,
    embed: bool,
    head: bool,
    dtype: torch.dtype | None = None,
    attention: str | None = None,
    share: Shard | None = None,
    packed: bool = True,
    exact: bool = False,
    quant: Quant = Quant.NONE,
    cache: Path | None = None,
    device: torch.device = CPU,
    outputs: range | None = None,
    whole: MetaModel | None = None,
) -> Shard:
    """Load a part of a model, reading only its tensors.

    Weights stay memory-mapped if ``dtype`` is that of the file (None: as stored); ``packed``
    copies matrices to a faster layout with the same results, and to more of them with ``exact``,
    which says that steps will be those of the stock model. Tensors that ``share`` holds too,
    such as tied embeddings, are taken from it. ``attention`` is an implementation of
    transformers, such as ``sdpa`` (None: its default). With ``quant`` the matrices are quantised
    instead, and the result is cached in the folder ``cache``. Packing and quantisation are for
    the CPU: to another ``device`` each tensor is copied from its file as it is. A head computes
    the logits of its ``outputs`` only (None: all). ``whole`` is the meta model, with
    this ``dtype`` and ``attention``; None builds it.

    Raises:
        ModelError: the span is not in the model, weights are missing or damaged, or this
            machine has no kernel for ``quant``.
    """
    dtype = dtype or stored_dtype(source)
    part = Part(span, embed, head)
    meta_model = whole.copy_for(part) if whole else build(source.config, dtype, attention)
    strip(meta_model, part)
    load(meta_model, source.folder, dtype, share.model if share else None, device)
    names = _cut(meta_model.model, outputs) if outputs is not None else []
    mapped, unused = dtype == stored_dtype(source), meta_model.unused_ends(part)
    digests = (
        digest_weights(meta_model, source.folder, cache)
        if quant is not Quant.NONE and cache
        else {}
    )
    if found := [digests[name] for name in names if name in digests]:
        digests[names[-1]] = f"{found[-1]} {outputs}"
    if packed or quant is not Quant.NONE:
        replace_modules(
            *(meta_model.model, device, quant, cache),
            skip=unused,
            digests=digests,
            mapped=mapped,
            exact=exact,
        )
    return Shard(meta_model, part, device, quant)


def _cut(model: Any, outputs: range) -> list[str]:
    """Cut the head to ``outputs``, as a view of its matrix; what it is tied to stays whole.

    Returns the names of that matrix, the head's own last.

    Raises:
        ModelError: the head is not a plain linear module.
    """
    whole, here = model.get_output_embeddings(), slice(outputs.start, outputs.stop)
    if type(whole) is not nn.Linear:
        raise ModelError(f"An LM head of type `{type(whole).__name__}` cannot be split")
    matrices = [
        (name, matrix is whole.weight)
        for name, matrix in model.named_parameters(remove_duplicate=False)
    ]
    own = next(f"{name}.weight" for name, module in model.named_modules() if module is whole)
    bias = whole.bias is not None
    part = nn.Linear(whole.in_features, len(outputs), bias, device="meta", dtype=whole.weight.dtype)
    part.weight = nn.Parameter(whole.weight.detach()[here], requires_grad=False)
    if bias:
        part.bias = nn.Parameter(whole.bias.detach()[here], requires_grad=False)
    model.set_output_embeddings(part)
    return [*(name for name, is_it in matrices if is_it and name != own), own]
