"""Who runs a model for the table of engines.

Transformers runs it in a loop as ``generate`` has it; one shard, for each way to hold the weights,
as a node does, with its steps replayed and ``eager``; one by ``stock`` steps, a row at a time; and
two shards as ``exact`` nodes do, whose logits are to be those of transformers. So the table shows
what kernels gain, and what replay does.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from meshllm.bench.ring_table import TRANSFORMERS
from meshllm.model.device import CPU, fetch, put
from meshllm.model.files.source import Source, open_folder
from meshllm.model.parity.cases import divide
from meshllm.model.split.shard import Shard
from meshllm.model.split.skeleton import quiet
from meshllm.model.steps.execution import matrix_bytes
from meshllm.model.steps.load import load_shard
from meshllm.model.steps.replay import SETTLED
from meshllm.model.steps.runner import Runner
from meshllm.model.steps.strategies import InvariantSteps, ReplayedSteps, Steps
from meshllm.names import Quant, Span
from meshllm.protocol.drafting.window import STEPS

CONTEXT = 128  # tokens of each session before the first one that is decoded
LAST = (
    8  # rows of a prompt whose logits are wanted; of fewer a node, or torch, may add up as of one
)

Forward = Callable[[Tensor], Tensor]
"""From token ids [B, T] to logits [B, R, V]: of a prompt behind the last of them, of R tokens."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a step is."""

    kind: Literal["prefill", "decode"]
    rows: int
    """Tokens of one prompt, or one token of each of so many sessions."""

    @property
    def name(self) -> str:
        """Name it as in the table."""
        return f"{self.kind} {self.rows}"

    @property
    def shape(self) -> tuple[int, int]:
        """Of the token ids [B, T]."""
        return (1, self.rows) if self.kind == "prefill" else (self.rows, 1)


@dataclass(frozen=True, slots=True)
class Contestant:
    """Somebody who runs the model."""

    name: str
    bytes: int
    """That a step reads: every matrix, but no look-up table."""
    begin: Callable[[Task], Forward]
    """Make sessions ready for the steps of a task; a prefill begins a session each time."""
    exact: tuple[str, ...] = ()
    """Kinds of tasks at which each bit must be that of transformers."""
    is_single: bool = False
    """Whether it is not asked to run several sessions."""

    def takes(self, task: Task) -> bool:
        """Whether it runs steps of this kind."""
        return task.shape[0] == 1 or not self.is_single


def line_up(
    folder: Path,
    quants: Sequence[Quant],
    told: Callable[[str], None],
    device: torch.device = CPU,
) -> list[Contestant]:
    """Load the model once for each contestant, transformers first."""
    source = open_folder(folder.name, folder)
    told(f"{TRANSFORMERS} loads")
    contestants = [_stock(source, device)]
    size = contestants[0].bytes
    for quant in quants:
        told(f"{quant} loads")
        contestants += _node(source, quant, device)
    told("stock steps load")
    shard = load_shard(source, _all(source), embed=True, head=True, device=device)
    stock = Contestant("stock", size, _begin(Runner(shard).steps, shard), is_single=True)
    told("two shards load")
    return [*contestants, stock, _exact(source, size, device)]


def _stock(source: Source, device: torch.device) -> Contestant:
    """Run the stock model with the arguments that ``generate`` gives it."""
    with quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(source.folder, dtype="auto").eval()
        model.to(device)

    def begin(task: Task) -> Forward:
        cache = DynamicCache(config=model.config)

        def forward(ids: Tensor) -> Tensor:
            (texts, count), start = ids.shape, cache.get_seq_length()
            places = torch.arange(start, start + count, device=device)
            logits: Tensor = model(
                input_ids=put(ids, device),
                attention_mask=torch.ones(texts, start + count, dtype=torch.int64, device=device),
                position_ids=places.expand(texts, count),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=LAST if start == 0 else 0,
            ).logits
            return fetch(logits)

        if task.kind == "decode":
            forward(_context())
            cache.batch_repeat_interleave(task.rows)
        return forward

    return Contestant(TRANSFORMERS, _matrix_bytes(model), begin)


def _node(source: Source, quant: Quant, device: torch.device) -> Iterator[Contestant]:
    """Run one shard as a node does that is alone; where steps can be replayed, both ways."""
    shard = load_shard(source, _all(source), embed=True, head=True, quant=quant, device=device)
    size, steps = matrix_bytes(shard.model, quant), Runner(shard, STEPS).steps
    eager = steps.inner if isinstance(steps, ReplayedSteps) else steps
    if isinstance(eager, InvariantSteps):
        yield Contestant(quant, size, _begin(ReplayedSteps(eager), shard))
        yield Contestant(f"{quant}, eager", size, _begin(eager, shard))
    else:
        yield Contestant(quant, size, _begin(steps, shard))


def _begin(steps: Steps, shard: Shard) -> Callable[[Task], Forward]:
    """Begin as a node does: prompts whole, sessions together."""

    def begin(task: Task) -> Forward:
        cache = shard.new_cache()
        if task.kind == "prefill":
            return lambda ids: steps.prefill(ids, cache, LAST)
        steps.prefill(_context(), cache, LAST)
        caches = [cache, *(copy.deepcopy(cache) for _ in range(1, task.rows))]

        def step(ids: Tensor) -> Tensor:
            return torch.cat(steps.step_many(torch.split(ids, 1), caches))

        for _ in range(SETTLED):  # as a node that has been at it for a while
            step(torch.zeros(task.rows, 1, dtype=torch.int64))
        return step

    return begin


def _exact(source: Source, size: int, device: torch.device) -> Contestant:
    """Run two shards one after the other, each token as transformers does."""
    shards = [
        load_shard(source, part.span, embed=part.embed, head=part.head, device=device)
        for part in divide(source.config.num_hidden_layers, 2)
    ]

    def begin(task: Task) -> Forward:
        caches = [shard.new_cache() for shard in shards]

        def forward(ids: Tensor) -> Tensor:
            x = put(ids, device)
            for shard, cache in zip(shards, caches, strict=True):
                x = shard.forward(x, cache, rows=LAST if shard.head else None)
            return fetch(x)

        if task.kind == "decode":
            forward(_context())
        return forward

    return Contestant("two shards, exact", size, begin, ("prefill", "decode"), is_single=True)


def _all(source: Source) -> Span:
    return Span(0, source.config.num_hidden_layers)


def _context() -> Tensor:
    """Make token ids [1, T] that come before what is decoded."""
    return torch.tensor([[(7 * place + 3) % 500 for place in range(CONTEXT)]])


def _matrix_bytes(model: nn.Module) -> int:
    linears = (module for module in model.modules() if isinstance(module, nn.Linear))
    return sum(linear.weight.nbytes for linear in linears)
