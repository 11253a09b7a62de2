"""Batched jobs of the entry for several sessions: LM head, sampling, the next Embed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshllm.model.split.kv_cache import SpanCache
from meshllm.node.compute.batcher import attempt, through
from meshllm.node.compute.stopwatch import Stopwatch
from meshllm.node.session.generation import Ends, Generation
from meshllm.node.session.split_head import HeadParts, SplitStep
from meshllm.protocol.session.actions import Embed, Pick


@dataclass(slots=True)
class Turn:
    """A Pick of one session, and the prefetched Embed that follows it."""

    generation: Generation
    job: Pick
    watch: Stopwatch
    """Of the Pick."""
    watch_ahead: Stopwatch
    """Of the Embed."""
    split: SplitStep | None = None
    """Set if the LM head is split."""
    rows: Tensor | None = None  # [1, 1 + G, D], once opened


def begin_split(head: HeadParts, turn: Turn) -> None:
    """Compute the entry's part of the logits; runs on the compute thread."""
    rows = _rows(turn)
    if rows.shape[1] == 1 and turn.split:
        head.compute(rows, turn.split)
    turn.watch.computed()


def take_turns(
    ends: Ends, head: HeadParts | None, turns: Sequence[Turn]
) -> Iterator[Sequence[Any]]:
    """Yield the results of the Picks, then those of the Embeds that follow them.

    Runs on the compute thread, without waiting for the event loop in between.
    """
    rows = [attempt(_rows, turn) for turn in turns]
    logits = through(lambda good: _heads(ends, head, turns, good), rows)  # [1, 1 + G, V] each
    picked = [
        each
        if isinstance(each, Exception)
        else attempt(turn.generation.pick, turn.job, each, turn.watch)
        for turn, each in zip(turns, logits, strict=True)
    ]
    yield picked
    steps = [
        None
        if isinstance(each, Exception)
        else attempt(turn.generation.next_step, turn.watch_ahead)
        for turn, each in zip(turns, picked, strict=True)
    ]
    ran = through(lambda good: _fronts(ends, good), steps)
    yield [
        each
        if each is None or isinstance(each, Exception)
        else attempt(turn.generation.embedded, *each, turn.watch_ahead)
        for turn, each in zip(turns, ran, strict=True)
    ]


def _heads(
    ends: Ends, head: HeadParts | None, turns: Sequence[Turn], rows: list[Tensor]
) -> Sequence[Tensor]:
    """Compute logits; several sessions share one pass, which uses no logits of the last rank."""
    first = turns[0]
    if head and first.split and len(turns) == 1 and rows[0].shape[1] == 1:
        return [head.finish(rows[0], first.split, first.generation.key)]
    return ends.logits(rows)


def _rows(turn: Turn) -> Tensor:
    """Return the rows [1, 1 + G, D] of a Pick."""
    if turn.rows is None:
        turn.rows = turn.generation.open(turn.job, turn.watch)
    else:
        turn.watch.queued()  # until the last rank answered, or was late
    return turn.rows


def _fronts(ends: Ends, steps: list[tuple[Embed, Tensor, SpanCache]]) -> list[tuple[Embed, Tensor]]:
    tokens, caches = [tokens for _, tokens, _ in steps], [cache for _, _, cache in steps]
    outputs = ends.front.step_many(tokens, caches)
    return [(job, output) for (job, _, _), output in zip(steps, outputs, strict=True)]
