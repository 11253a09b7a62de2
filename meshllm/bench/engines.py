"""The contestants of the engine benchmark.

Transformers, called as by ``generate``; for each quantisation one shard as in a node, with traced
(replayed) and with ``eager`` steps; one shard with ``stock`` steps, a row at a time; and two
shards as in ``exact`` nodes, whose logits must be bit-identical to transformers'. So the table
shows the gain of the kernels and of the replay.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from meshllm.bench.ring_table import TRANSFORMERS
from meshllm.model.device import CPU, to_device, to_host
from meshllm.model.files.source import Source, load_stock, open_folder
from meshllm.model.parity.cases import divide
from meshllm.model.split.shard import Shard
from meshllm.model.steps.execution import matrix_bytes
from meshllm.model.steps.load import load_shard
from meshllm.model.steps.replay import STEPS_BEFORE_REPLAY
from meshllm.model.steps.runner import Runner
from meshllm.model.steps.strategies import InvariantSteps, ReplayedSteps, Steps
from meshllm.names import Quant, Span
from meshllm.protocol.drafting.window import STEPS

CONTEXT = 128  # prefilled tokens of each session before the first decode step, unless asked for
# Rows of a prompt whose logits are computed; with fewer, a node or torch may use the summation
# order of a single row.
LAST = 8

Forward = Callable[[Tensor], Tensor]
"""Token ids [B, T] to logits [B, R, V] of the last R tokens."""


@dataclass(frozen=True, slots=True)
class EngineTask:
    """The shape of a step."""

    kind: Literal["prefill", "decode"]
    rows: int
    """Tokens of the prompt, or number of sessions with one token each."""
    context: int = CONTEXT
    """Tokens of each session before a decode step."""

    @property
    def name(self) -> str:
        """Name it as in the table."""
        return f"{self.kind} {self.rows}"

    @property
    def shape(self) -> tuple[int, int]:
        """Shape [B, T] of the token ids."""
        return (1, self.rows) if self.kind == "prefill" else (self.rows, 1)


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that runs the model."""

    name: str
    bytes: int
    """Read by a step: all matrices, no embedding table."""
    begin: Callable[[EngineTask], Forward]
    """Prepare the sessions of a task; each prefill starts a new session."""
    exact: tuple[str, ...] = ()
    """Kinds of tasks whose logits must be bit-identical to transformers'."""
    is_single: bool = False
    """Whether it is excluded from tasks with several sessions."""

    def takes(self, task: EngineTask) -> bool:
        """Return whether it takes part in a task."""
        return task.shape[0] == 1 or not self.is_single


def line_up(
    folder: Path,
    quants: Sequence[Quant],
    report: Callable[[str], None],
    device: torch.device = CPU,
) -> list[Engine]:
    """Load the model for each contestant, transformers first."""
    source = open_folder(folder.name, folder)
    report(f"loading {TRANSFORMERS}")
    contestants = [open_stock(source, device)]
    size = contestants[0].bytes
    for quant in quants:
        report(f"loading {quant}")
        contestants += open_node(source, quant, device)
    report("loading stock steps")
    shard = load_shard(source, _all(source), embed=True, head=True, device=device, exact=True)
    stock = Engine("stock", size, _begin(Runner(shard).steps, shard), is_single=True)
    report("loading two shards")
    return [*contestants, stock, _exact(source, size, device)]


def open_stock(source: Source, device: torch.device) -> Engine:
    """Open the stock model, run with the arguments that ``generate`` passes."""
    model = load_stock(source, "auto")
    model.to(device)

    def begin(task: EngineTask) -> Forward:
        cache = DynamicCache(config=model.config)

        def forward(ids: Tensor) -> Tensor:
            (texts, count), start = ids.shape, cache.get_seq_length()
            places = torch.arange(start, start + count, device=device)
            logits: Tensor = model(
                input_ids=to_device(ids, device),
                attention_mask=torch.ones(texts, start + count, dtype=torch.int64, device=device),
                position_ids=places.expand(texts, count),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=LAST if start == 0 else 0,
            ).logits
            return to_host(logits)

        if task.kind == "decode":
            forward(_context(task.context))
            cache.batch_repeat_interleave(task.rows)
        return forward

    return Engine(TRANSFORMERS, _matrix_bytes(model), begin)


def open_node(source: Source, quant: Quant, device: torch.device) -> Iterator[Engine]:
    """Open one shard as in a ring of one; if steps can be replayed, also eagerly."""
    shard = load_shard(source, _all(source), embed=True, head=True, quant=quant, device=device)
    size, steps = matrix_bytes(shard.model, quant), Runner(shard, STEPS).steps
    eager = steps.inner if isinstance(steps, ReplayedSteps) else steps
    if isinstance(eager, InvariantSteps):
        yield Engine(quant, size, _begin(ReplayedSteps(eager), shard))
        yield Engine(f"{quant}, eager", size, _begin(eager, shard))
    else:
        yield Engine(quant, size, _begin(steps, shard))


def _begin(steps: Steps, shard: Shard) -> Callable[[EngineTask], Forward]:
    """Begin as a node does: whole prompts, batched sessions."""

    def begin(task: EngineTask) -> Forward:
        cache = shard.new_cache()
        if task.kind == "prefill":
            return lambda ids: steps.prefill(ids, cache, LAST)
        steps.prefill(_context(task.context), cache, LAST)
        caches = [cache, *(copy.deepcopy(cache) for _ in range(1, task.rows))]

        def step(ids: Tensor) -> Tensor:
            return torch.cat(steps.step_many(torch.split(ids, 1), caches))

        for _ in range(STEPS_BEFORE_REPLAY):  # warm up
            step(torch.zeros(task.rows, 1, dtype=torch.int64))
        return step

    return begin


def _exact(source: Source, size: int, device: torch.device) -> Engine:
    """Run two shards in sequence, bit-identically to transformers."""
    shards = [
        load_shard(source, part.span, embed=part.embed, head=part.head, device=device, exact=True)
        for part in divide(source.config.num_hidden_layers, 2)
    ]

    def begin(task: EngineTask) -> Forward:
        caches = [shard.new_cache() for shard in shards]

        def forward(ids: Tensor) -> Tensor:
            x = to_device(ids, device)
            for shard, cache in zip(shards, caches, strict=True):
                x = shard.forward(x, cache, rows=LAST if shard.head else None)
            return to_host(x)

        if task.kind == "decode":
            forward(_context(task.context))
        return forward

    return Engine("two shards, exact", size, begin, ("prefill", "decode"), is_single=True)


def _all(source: Source) -> Span:
    return Span(0, source.config.num_hidden_layers)


def _context(count: int) -> Tensor:
    """Return the token ids [1, T] of the prefill before a decode task."""
    return torch.tensor([[(7 * place + 3) % 500 for place in range(count)]])


def _matrix_bytes(model: nn.Module) -> int:
    linears = (module for module in model.modules() if isinstance(module, nn.Linear))
    return sum(linear.weight.nbytes for linear in linears)
