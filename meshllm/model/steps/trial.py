"""Tries on load whether steps are row-invariant and near the stock forward, on bounded weights.

What is proven, for the layers tried: rows together, rows alone and sessions together give the same
bits, and a step and a chunk of a prompt differ from the stock forward by rounding only. The other
layers have the same modules with the same shapes, and which kernel multiplies, in which order,
depends on these and not on the numbers. So a large span is not read from disk ten times: the first
layers are tried, as many as fit in `BUDGET` bytes, and one of each further kind.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from math import isnan
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from blake3 import blake3
from torch import Tensor, nn

from meshllm.model.device import CPU, fetch, name_of, put
from meshllm.model.json_cache import recall, remember
from meshllm.model.kernels.jit import machine
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.split.shard import Shard
from meshllm.model.split.stubs import LayerStub

BEFORE = 24
"""Tokens of a prompt that the rows of a trial come behind."""
TRIED = 5
"""Rows of a trial on the CPU."""
BUDGET = 64 << 20
"""Bytes of the layers that are tried."""
ALIKE = 0.05
"""Of the norm of all rows tried, between row-invariant steps and the stock forward.

Measured with random weights in bfloat16, plain and quantised: at most 0.013 in six families of 6
layers, 0.022 in three of 28, as rounding adds up. A model whose steps are 1.1 times the stock ones
comes to 0.1.
"""


class Steps(Protocol):
    """What is tried."""

    def prefill(self, x: Tensor, cache: SpanCache, rows: int | None = None) -> Tensor:
        """Run a part of a prompt."""
        ...

    def step(self, x: Tensor, cache: SpanCache | None) -> Tensor:
        """Run rows of one session."""
        ...

    def step_many(
        self, parts: Sequence[Tensor], caches: Sequence[SpanCache | None]
    ) -> list[Tensor]:
        """Run rows of several sessions."""
        ...


def untried(shard: Shard, steps: Steps, most: int = TRIED) -> str:
    """Try nothing: what is only timed gives nobody a text."""
    _ = shard, steps, most
    return ""


@dataclass(frozen=True, slots=True)
class KeptTrial:
    """Tries a part of a model once on a machine, and keeps it where that went well."""

    cache: Path

    def __call__(self, shard: Shard, steps: Steps, most: int = TRIED) -> str:
        """Try steps, see `try_steps`."""
        key = self._key(shard, most)
        if recall(self.cache, *key) is True:
            return ""
        if not (reason := try_steps(shard, steps, most)):
            remember(self.cache, True, *key)
        return reason

    @staticmethod
    def _key(shard: Shard, most: int) -> tuple[str | float, ...]:
        """Name all that chooses kernels: shapes, code, versions, the machine and its threads."""
        model = shard.model
        shapes = {name: [*each.shape, str(each.dtype)] for name, each in model.named_parameters()}
        return (
            "trial",
            json.dumps(model.config.to_dict(), sort_keys=True, default=str),
            json.dumps(shapes),
            str(shard.span),
            shard.quant,
            most,
            torch.get_num_threads(),
            _code(),
            transformers.__version__,
            torch.__version__,
            name_of(shard.device),
            *machine(),
        )


@cache
def _code() -> str:
    """Name the code that is tried: in a checkout it changes without a new version."""
    root = Path(__file__).parents[1]
    files = [(str(each.relative_to(root)), each.read_bytes()) for each in root.rglob("*.py")]
    return blake3(repr(sorted(files)).encode()).hexdigest(16)


@torch.inference_mode()
def try_steps(shard: Shard, steps: Steps, most: int = TRIED) -> str:
    """Say why steps of ``most`` rows are not row-invariant, or not those of the model; or ""."""
    device = shard.device
    layers = (
        chosen_layers(shard, BUDGET) if device == CPU else range(shard.span.start, shard.span.stop)
    )
    with abridged(shard, layers):
        x = draw_rows(shard, most)
        rows, filled = x[:, BEFORE:], read_prompt(shard, x)
        cache = filled()
        alone = torch.cat([steps.step(row, cache) for row in torch.split(rows, 1, 1)], 1)
        together = steps.step(rows, filled())
        both = steps.step_many([rows[:, :2], rows[:, :TRIED]], [filled(), filled()])
        stock = fetch(shard.forward(put(rows, device), filled()))
        pairs = [(alone, stock)]
        if (behind := filled()) is not None and device == CPU:
            pairs.append((steps.prefill(rows, behind), stock))
    if not all(torch.equal(each, alone[:, : each.shape[1]]) for each in (together, *both)):
        return "a row depends on the rows beside it"
    apart = max(_apart(own, its) for own, its in pairs)
    return "" if apart <= ALIKE else f"a step is {apart:.3f} off the stock forward"


def read_prompt(shard: Shard, x: Tensor) -> Callable[[], SpanCache | None]:
    """Read a prompt of the first `BEFORE` rows; return what makes caches that hold it."""
    cache = shard.new_cache()
    shard.forward(put(x[:, :BEFORE], shard.device), cache, rows=1)
    return lambda: deepcopy(cache) if shard.span else None


def draw_rows(shard: Shard, most: int = TRIED) -> Tensor:
    """Draw the rows [1, T or T, D] of a trial; the same each time."""
    config = shard.model.config.get_text_config(decoder=True)
    generator, count = torch.Generator().manual_seed(0), BEFORE + most
    if shard.embed:
        return torch.randint(0, config.vocab_size, (1, count), generator=generator)
    rows = torch.randn(1, count, config.hidden_size, generator=generator)
    return rows.to(shard.model.dtype)


def chosen_layers(shard: Shard, budget: int) -> list[int]:
    """Choose the first layers of a span, up to a budget in bytes, and one of each further kind."""
    spent, kinds, chosen = 0, set[Any](), list[int]()
    caches = shard.new_cache().layers
    for index in range(shard.span.start, shard.span.stop):
        layer = shard.layer(index)
        kind = type(caches[index]), *_traits(layer)
        size = sum(each.nbytes for each in layer.parameters())
        if kind not in kinds or spent + size <= budget:
            kinds.add(kind)
            chosen.append(index)
            spent += size
    return chosen


@contextmanager
def abridged(shard: Shard, layers: Sequence[int]) -> Iterator[None]:
    """Let only some layers of a shard compute for a while; the others pass their input on."""
    span = range(shard.span.start, shard.span.stop)
    skipped = [shard.layer(index) for index in span if index not in layers]
    for layer in skipped:
        layer.forward = LayerStub(layer, shard.arity).forward  # hooks stay, which end the span
    try:
        yield
    finally:
        for layer in skipped:
            del layer.forward


def _traits(layer: nn.Module) -> Iterator[tuple[Any, ...]]:
    """List what tells one kind of layer from another: its modules, their shapes and switches."""
    for name, module in layer.named_modules():
        shapes = (tuple(each.shape) for each in module.parameters(recurse=False))
        switches = sorted(
            (key, value) for key, value in vars(module).items() if isinstance(value, bool | str)
        )
        yield name, type(module), *shapes, *switches


def _apart(own: Tensor, its: Tensor) -> float:
    """Measure the distance, relative to the norm; NaN is never near."""
    gap = float((own.float() - its.float()).norm() / its.float().norm())
    return float("inf") if isnan(gap) else gap
