"""How a shard is run, for the user: strategy, kernels, and why a better one is not used."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from meshllm.model.device import CPU, missing_for_cuda_graphs
from meshllm.model.kernels import jit
from meshllm.model.modules.linear_bf16 import CompiledLinear, choose_kernel
from meshllm.model.modules.linear_onednn import PackedLinear
from meshllm.model.modules.linear_padded import PaddedLinear
from meshllm.model.modules.quant_kernels import packed_bytes
from meshllm.model.modules.quant_linear import QuantLinear
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.split.meta_model import build
from meshllm.model.steps.attention import PrefillKernel, prefill_kernel
from meshllm.names import Quant, Span

SDPA = "sdpa"
"""The attention of transformers that ours can replace."""

REPLAYED_BYTES = 600_000_000
"""Largest size of the matrices of a layer with which steps are replayed.

Replay saves Python overhead, which hardly depends on the size of a layer. Measured on an AVX2
processor at 15 GB/s, for a step of one row: 26 % at 31 MB a layer (Qwen3-0.6B), 8 % at 394 MB
(Qwen3-8B), 42 and 12 % with int8. From about 600 MB on it would be less than 5 %.
"""

NOT_CROPPABLE = "its caches cannot be cropped"
"""Why a model takes one row per step, which no draft precedes."""

_LAYER_KINDS = {"full_attention", "sliding_attention"}
_LINEARS: dict[type, str] = {
    PaddedLinear: "padded",
    PackedLinear: "oneDNN packed",
    QuantLinear: "quantised",
    nn.Linear: "torch",
}


class Strategy(StrEnum):
    """What runs the steps of a shard."""

    STOCK = "stock"
    """The stock forward, one row at a time."""
    INVARIANT = "row-invariant"
    """Several rows at a time, each with the same bits as if computed alone."""
    REPLAYED = "replayed"
    """Row-invariant steps replayed from a trace, without Python in between."""
    GRAPH = "CUDA graph"
    """Several rows at a time, in one launch of a CUDA graph."""


@dataclass(frozen=True, slots=True)
class Execution:
    """How a shard is run."""

    strategy: Strategy
    linears: tuple[tuple[str, int], ...] = ()
    """Kinds of linear modules, and how many of each; empty before weights are loaded."""
    attention: str = "torch"
    reason: str = ""
    """Why no better strategy is used; empty if there is none."""
    threads: int = 0
    """Of a step on the CPU; 0 before they are chosen, and on a GPU."""
    is_fallback: bool = False
    """Whether steps are slower for ``reason``, rather than as requested or as measured."""

    def __str__(self) -> str:
        """Format as one line."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.linears)
        linears = f"; linears: {kinds}" if kinds else ""
        reason = f" ({self.reason})" if self.reason else ""
        count = f"; {self.threads} thread{'s' * (self.threads > 1)}" if self.threads else ""
        return f"{self.strategy}{reason}; attention: {self.attention}{linears}{count}"

    def instead_of_gpu(self, refusal: str) -> "Execution":
        """Add why a GPU is not used, unless that is empty."""
        return self._slower("; ".join(filter(None, (refusal, self.reason)))) if refusal else self

    def without_replay(self, unfit: Mapping[int, str], counts: frozenset[int]) -> "Execution":
        """Add which of the row ``counts`` are not replayed and why, by number of rows."""
        if not unfit:
            return self
        reasons = "; ".join(dict.fromkeys(unfit.values()))
        if unfit.keys() >= counts:
            return replace(self._slower(f"no replay: {reasons}"), strategy=Strategy.INVARIANT)
        rows = f"{', '.join(map(str, sorted(unfit)))} row{'s' * (unfit.keys() != {1})}"
        return self._slower(f"no replay of steps of {rows}: {reasons}")

    def _slower(self, reason: str) -> "Execution":
        return replace(self, reason=reason, is_fallback=True)


def level_of(reason: str, warned: set[str]) -> int:
    """Return the level at which to log a fallback: a warning, but once for each reason."""
    level = logging.INFO if reason in warned else logging.WARNING
    warned.add(reason)
    return level


def describe(parts: Iterable[tuple[str, Execution]], draft: Execution | None = None) -> str:
    """Format how the named parts of a model are run as one line, those that are alike together."""
    names, linears = dict[Execution, dict[str, None]](), dict[Execution, Counter[str]]()
    for name, execution in parts:
        kind = replace(execution, linears=())
        names.setdefault(kind, {})[name] = None
        linears.setdefault(kind, Counter()).update(dict(execution.linears))
    parts = [
        (", ".join(names[kind]), replace(kind, linears=tuple(linears[kind].items())))
        for kind in names
    ]
    parts += [("draft model", draft)] if draft else []
    if len(parts) == 1:
        return str(parts[0][1])
    return "; ".join(f"{name}: {execution}" for name, execution in parts)


def linears_of(model: nn.Module) -> tuple[tuple[str, int], ...]:
    """Count the linear modules of a model by kind."""
    counts: Counter[str] = Counter()
    inner = {id(module.plain) for module in model.modules() if isinstance(module, PaddedLinear)}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        is_held = id(module) not in inner and not (isinstance(weight, Tensor) and weight.is_meta)
        own = module.kernel if isinstance(module, CompiledLinear) else None
        if is_held and (kind := own or _LINEARS.get(type(module))):
            counts[kind] += 1
    return tuple(counts.items())


def lacks_invariance(config: Any, whole: nn.Module, device: torch.device) -> str:
    """Return why a whole model, on meta or not, cannot be row-invariant; "" if it can.

    Depends on the model only, so that every shard of it decides the same.
    """
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    if mixes(whole):
        return "mixture of experts: the rows that share an expert depend on the text"
    if unknown := set(kinds) - _LAYER_KINDS:
        return f"unsupported layer types: {', '.join(sorted(unknown))}"
    linears = {type(each) for each in whole.modules() if isinstance(each, nn.Linear)}
    if own := linears - {nn.Linear}:
        return f"custom linear modules: {', '.join(sorted(each.__name__ for each in own))}"
    if config._attn_implementation != SDPA:
        return f"the model's attention is `{config._attn_implementation}`, not `{SDPA}`"
    if device == CPU and whole.dtype != torch.bfloat16:
        name = str(whole.dtype).removeprefix("torch.")
        return f"{name} on the CPU: `--dtype bfloat16` allows batched verification and batching"
    return ""


def forecast(
    config: Any, dtype: torch.dtype, device: torch.device, quant: Quant = Quant.NONE
) -> Execution:
    """Return how a model would be run, without its weights.

    Kernels are not tested, but those of its shapes are timed if this machine never did.
    """
    meta_model = build(config, dtype)
    whole, cache = meta_model.model, SpanCache(meta_model.model.config, Span(0, meta_model.layers))
    reason = "" if cache.croppable else NOT_CROPPABLE
    reason = reason or lacks_invariance(whole.config, whole, device)
    if device != CPU:
        reason = reason or graph_obstacle(cache) or lacks_for_graphs()
    if reason:
        return Execution(Strategy.STOCK, reason=reason, is_fallback=True)
    if device != CPU:
        return Execution(Strategy.GRAPH, attention="own")
    linears = [module for module in whole.modules() if isinstance(module, nn.Linear)]
    if quant is Quant.NONE:
        kinds = Counter(str(choose_kernel(module)) for module in linears)
    else:
        kinds = Counter({_LINEARS[QuantLinear]: len(linears)})
    obstacle, is_fallback = replay_obstacle(meta_model.parts, cache, quant)
    return Execution(
        Strategy.INVARIANT if obstacle else Strategy.REPLAYED,
        tuple(kinds.items()),
        own_attention(config, dtype),
        obstacle,
        is_fallback=is_fallback,
    )


def graph_obstacle(cache: SpanCache) -> str:
    """Return why steps with such caches cannot be a CUDA graph; "" if they can."""
    return "" if cache.extends else "its caches cannot be written from a CUDA graph"


def lacks_for_graphs() -> str:
    """Return why CUDA graphs cannot work on this machine, without a try; "" if they may."""
    lacking = missing_for_cuda_graphs()
    return f"a CUDA graph needs {lacking}" if lacking else ""


def replay_obstacle(
    layers: Iterable[nn.Module], cache: SpanCache, quant: Quant
) -> tuple[str, bool]:
    """Return why steps of layers, on meta or not, are not replayed, and whether it is a fallback.

    It is "" if they are replayed; a large layer is not one, as replay was measured to gain little.
    """
    if not cache.extends:
        return "no replay: its caches cannot be written from a trace", True
    if not jit.jit_available():
        return "no replay: executable memory is forbidden", True
    if not jit.has_fma():
        return "no replay: the processor has no fused multiply-add", True
    sizes = [matrix_bytes(each, quant) for each in layers]
    if (size := sum(sizes) // max(1, len(sizes))) > REPLAYED_BYTES:
        gain = f"it gains less than 5 % with {size // 10**6} MB per layer"
        return f"no replay: {gain}", False
    return "", False


def own_attention(config: Any, dtype: torch.dtype) -> str:
    """Name the kernels of attention on this CPU, where that of steps is ours."""
    if not jit.has_fma():
        return "torch"
    is_usual = dtype == torch.bfloat16
    prompts = prefill_kernel(*_query_heads(config)) if is_usual else PrefillKernel.OWN
    return "own" if prompts is PrefillKernel.OWN else f"own for decode, {prompts} for prefill"


def _query_heads(config: Any) -> tuple[int, int]:
    """Return the number of query heads and their width; one as wide as a row if there are none."""
    text = config.get_text_config(decoder=True)
    heads, width = (getattr(text, name, None) for name in ("num_attention_heads", "head_dim"))
    count = heads if isinstance(heads, int) and heads > 0 else 1
    return count, width if isinstance(width, int) else text.hidden_size // count


def mixes(model: nn.Module) -> bool:
    """Return whether a model has experts: which rows share a matrix depends on the text."""
    return any(
        "expert" in name or (parameter.dim() > 2 and min(parameter.shape) > 1)
        for name, parameter in model.named_parameters()
    )


def matrix_bytes(model: nn.Module, quant: Quant) -> int:
    """Count the bytes of the matrices that a step reads; those on meta are not quantised yet."""
    return sum(
        packed_bytes(
            quant if isinstance(module, QuantLinear) or module.weight.is_meta else Quant.NONE,
            (module.out_features, module.in_features),
            module.weight.dtype,
        )
        for module in model.modules()
        if isinstance(module, nn.Linear | QuantLinear)
    )
