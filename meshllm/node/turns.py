"""What the entry does for several sessions at once: head, sampling, the next step; no messages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshllm.model.cache import SpanCache
from meshllm.node.batch import attempt, through
from meshllm.node.helper import Helper, Wish
from meshllm.node.session import Ends, Generation
from meshllm.node.stopwatch import Stopwatch
from meshllm.protocol.task import Embed, Pick


@dataclass(frozen=True, slots=True)
class Turn:
    """A Pick of one session, and the Embed behind it that nobody has asked for yet."""

    generation: Generation
    job: Pick
    watch: Stopwatch
    """Of the Pick."""
    watch_ahead: Stopwatch
    """Of the Embed."""
    wish: Wish | None = None
    """What the last rank was asked for."""


def take_turns(ends: Ends, helper: Helper | None, turns: Sequence[Turn]) -> Iterator[Sequence[Any]]:
    """Yield what was picked, then what was embedded; an Embed follows before anybody is told.

    Runs on the compute thread.
    """
    rows = [attempt(turn.generation.open, turn.job, turn.watch) for turn in turns]
    logits = through(lambda good: _heads(ends, helper, turns, good), rows)  # [1, 1 + G, V] each
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
    ends: Ends, helper: Helper | None, turns: Sequence[Turn], rows: list[Tensor]
) -> Sequence[Tensor]:
    """Compute logits; several sessions do not wait for what one of them asked for."""
    first = turns[0]
    if helper and len(turns) == 1 and rows[0].shape[1] == 1:
        return [helper.logits(rows[0], first.wish, first.generation.key)]
    return ends.logits(rows)


def _fronts(ends: Ends, steps: list[tuple[Embed, Tensor, SpanCache]]) -> list[tuple[Embed, Tensor]]:
    tokens, caches = [tokens for _, tokens, _ in steps], [cache for _, _, cache in steps]
    outputs = ends.front.step_many(tokens, caches)
    return [(job, output) for (job, _, _), output in zip(steps, outputs, strict=True)]
