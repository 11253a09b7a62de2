"""A self-test on load: steps must be row-invariant and near the stock forward.

What is proven, for the layers tested: rows in one pass, rows one by one and batched sessions give
the same bits, and a step and a prefill chunk differ from the stock forward by rounding only. The
other layers have the same modules with the same shapes, and the kernel and its summation order
depend on these, not on the values. So a large span is not read from disk ten times: the first
layers are tested, as many as fit in `BUDGET` bytes, and one of each further kind.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn

from meshllm.model.device import CPU, name_of, to_device, to_host
from meshllm.model.json_cache import load_cached, model_code, store_cached
from meshllm.model.kernels.jit import machine
from meshllm.model.modules.linear_bf16 import MAX_ROWS
from meshllm.model.modules.quant_linear import QuantLinear
from meshllm.model.pauses import pause
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.split.shard import Shard
from meshllm.model.split.stubs import LayerStub

BEFORE = 24
"""Tokens of the prompt that precedes the rows of a trial."""
TRIED = 5
"""Rows of a trial on the CPU."""
BUDGET = 64 << 20
"""Bytes of the layers that are tested."""
TOLERANCE = 0.05
"""Largest distance between steps and stock forward, relative to the norm of all rows.

Measured with random weights in bfloat16, plain and quantised: at most 0.013 in six families of 6
layers, 0.022 in three of 28, as rounding adds up. A model whose steps are 1.1 times the stock ones
has 0.1.
"""


class TestedSteps(Protocol):
    """What is tested."""

    def prefill(self, x: Tensor, cache: SpanCache, rows: int | None = None) -> Tensor:
        """Run a chunk of a prompt."""
        ...

    def step(self, x: Tensor, cache: SpanCache | None) -> Tensor:
        """Run rows of one session."""
        ...

    def step_many(
        self, parts: Sequence[Tensor], caches: Sequence[SpanCache | None]
    ) -> list[Tensor]:
        """Run rows of several sessions."""
        ...


@torch.inference_mode()
def run_untested(shard: Shard, steps: TestedSteps, most: int = TRIED) -> str:
    """Run a prompt and steps, and compare nothing: what is only timed generates no text."""
    x, cache = draw_rows(shard, most), shard.new_cache()
    steps.prefill(x[:, :BEFORE], cache)
    steps.step(x[:, BEFORE : BEFORE + MAX_ROWS], cache)
    return ""


@dataclass(frozen=True, slots=True)
class CachedTrial:
    """A trial that runs once per machine and kind of layer; a success is cached.

    Other layers of the same kinds have the same kernels, so a span that grows by such layers, as
    after a loss, is not tested again.
    """

    cache: Path

    def __call__(self, shard: Shard, steps: TestedSteps, most: int = TRIED) -> str:
        """Test steps, see `try_steps`."""
        keys = _keys(shard, most)[0]
        if self._has_passed(keys):
            return ""
        if not (reason := try_steps(shard, steps, most)):
            for key in keys:
                store_cached(self.cache, True, *key)
        return reason

    def passed(self, shard: Shard, counts: Sequence[int]) -> frozenset[int]:
        """Return with which of ``counts`` rows these kinds of layers passed on this machine."""
        each = zip(counts, _keys(shard, *counts), strict=True)
        return frozenset(most for most, keys in each if self._has_passed(keys))

    def _has_passed(self, keys: Sequence[tuple[str | float, ...]]) -> bool:
        return all(load_cached(self.cache, *key) is True for key in keys)


def _keys(shard: Shard, *counts: int) -> list[list[tuple[str | float, ...]]]:
    """Return the keys of trials with each of ``counts`` rows: one of each kind of layer."""
    rest, kinds = trial_key(shard.model.config, shard.device), sorted(_kinds(shard))
    return [[("trial", kind, shard.quant, most, *rest) for kind in kinds] for most in counts]


def trial_key(config: Any, device: torch.device, *what: str | float) -> tuple[str | float, ...]:
    """List all that selects kernels: ``what`` runs, code, versions, the machine and its threads."""
    return (
        *what,
        json.dumps(config.to_dict(), sort_keys=True, default=str),
        torch.get_num_threads(),
        model_code(),
        transformers.__version__,
        torch.__version__,
        name_of(device),
        *machine(),
    )


@torch.inference_mode()
def try_steps(shard: Shard, steps: TestedSteps, most: int = TRIED) -> str:
    """Return why steps of ``most`` rows differ from single rows or the stock forward; or "".

    More than `MAX_ROWS` rows are compared with steps of this many.
    """
    device = shard.device
    layers = (
        chosen_layers(shard, BUDGET) if device == CPU else range(shard.span.start, shard.span.stop)
    )
    with only_layers(shard, layers) as rest:
        x = draw_rows(shard, most)
        rows, filled = x[:, BEFORE:], read_prompt(shard, x)
        cache = filled()
        rest()
        each = 1 if most <= MAX_ROWS else MAX_ROWS
        alone = torch.cat([steps.step(part, cache) for part in torch.split(rows, each, 1)], 1)
        rest()
        together = steps.step(rows, filled())
        rest()
        both = steps.step_many([rows[:, :2], rows[:, :TRIED]], [filled(), filled()])
        rest()
        stock = to_host(shard.forward(to_device(rows, device), filled()))
        pairs = [(alone, stock)]
        if (behind := filled()) is not None and device == CPU:
            pairs.append((steps.prefill(rows, behind), stock))
    if not all(torch.equal(each, alone[:, : each.shape[1]]) for each in (together, *both)):
        return "a row depends on the other rows of its step"
    apart = max(_relative_distance(own, its) for own, its in pairs)
    return "" if apart <= TOLERANCE else f"steps differ from the stock forward by {apart:.3f}"


def read_prompt(shard: Shard, x: Tensor) -> Callable[[], SpanCache | None]:
    """Prefill the first `BEFORE` rows; return a function that copies the filled cache."""
    cache = shard.new_cache()
    shard.forward(to_device(x[:, :BEFORE], shard.device), cache, rows=1)
    return lambda: deepcopy(cache) if shard.span else None


def draw_rows(shard: Shard, most: int = TRIED) -> Tensor:
    """Draw the rows [1, T or T, D] of a trial, always the same."""
    config = shard.model.config.get_text_config(decoder=True)
    generator, count = torch.Generator().manual_seed(0), BEFORE + most
    if shard.embed:
        return torch.randint(0, config.vocab_size, (1, count), generator=generator)
    rows = torch.randn(1, count, config.hidden_size, generator=generator)
    return rows.to(shard.model.dtype)


def _kinds(shard: Shard) -> set[str]:
    """Return the kinds of the layers of a shard, and of its ends."""
    caches, layers = shard.new_cache().layers, range(shard.span.start, shard.span.stop)
    kinds = {_kind(shard.layer(index), caches[index]) for index in layers}
    inner = {id(each) for index in layers for each in shard.layer(index).parameters()}
    ends = [
        (name, *_traits(module), *(str(each.dtype) for each in own))
        for name, module in shard.model.named_modules()
        if (own := [*module.parameters(recurse=False)])
        and not any(id(each) in inner for each in own)
        and (isinstance(module, QuantLinear) or not any(each.is_meta for each in own))
    ]
    return {*kinds, str(ends)} if ends else kinds


def _kind(layer: nn.Module, cache: Any) -> str:
    dtypes = {str(each.dtype) for each in layer.parameters()}
    return str((type(cache).__name__, sorted(dtypes), *_all_traits(layer)))


def chosen_layers(shard: Shard, budget: int) -> list[int]:
    """Choose the first layers of a span, up to a budget in bytes, and one of each further kind."""
    spent, kinds, chosen = 0, set[Any](), list[int]()
    caches = shard.new_cache().layers
    for index in range(shard.span.start, shard.span.stop):
        layer = shard.layer(index)
        kind = type(caches[index]), *_all_traits(layer)
        size = sum(each.nbytes for each in layer.parameters())
        if kind not in kinds or spent + size <= budget:
            kinds.add(kind)
            chosen.append(index)
            spent += size
    return chosen


@contextmanager
def only_layers(shard: Shard, layers: Sequence[int]) -> Iterator[Callable[[], None]]:
    """Run only some layers of a shard inside the block; the others return their input.

    Yields a function that pauses with all layers: sessions may use the shard already.
    """
    span = range(shard.span.start, shard.span.stop)
    skipped = [shard.layer(index) for index in span if index not in layers]

    def skip() -> None:
        for layer in skipped:
            layer.forward = LayerStub(layer, shard.arity).forward  # keeps hooks that end the span

    def restore() -> None:
        for layer in skipped:
            del layer.forward

    def rest() -> None:
        restore()
        try:
            pause()
        finally:
            skip()

    skip()
    try:
        yield rest
    finally:
        restore()


def _all_traits(layer: nn.Module) -> Iterator[tuple[Any, ...]]:
    """List what distinguishes kinds of layers: modules, their shapes and switches."""
    return ((name, *_traits(module)) for name, module in layer.named_modules())


def _traits(module: nn.Module) -> tuple[Any, ...]:
    shapes = (tuple(each.shape) for each in module.parameters(recurse=False))
    switches = sorted(
        (key, value) for key, value in vars(module).items() if isinstance(value, bool | str)
    )
    return type(module), *shapes, *switches


def _relative_distance(own: Tensor, its: Tensor) -> float:
    """Return the distance relative to the norm of the stock rows; infinite for NaN."""
    gap = float((own.float() - its.float()).norm() / its.float().norm())
    return float("inf") if isnan(gap) else gap
