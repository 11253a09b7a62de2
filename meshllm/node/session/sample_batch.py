"""Batched jobs of the entry for several sessions: LM head, sampling, the next Embed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshllm.model.split.session_cache import SessionCache
from meshllm.node.compute.batcher import attempt, map_valid
from meshllm.node.compute.stopwatch import Stopwatch
from meshllm.node.session.continued_cache import undo_step
from meshllm.node.session.generation import EntryRunners, Generation
from meshllm.node.session.split_head import HeadParts, SplitStep
from meshllm.protocol.session.actions import Embed, SampleTokens


@dataclass(slots=True)
class SampleJob:
    """A `SampleTokens` of one session, and the prefetched Embed that follows it."""

    generation: Generation
    job: SampleTokens
    watch: Stopwatch
    """Of the sampling job."""
    watch_ahead: Stopwatch
    """Of the Embed."""
    split: SplitStep | None = None
    """Set if the LM head is split."""
    rows: Tensor | None = None  # [1, 1 + G, D], once opened


def compute_own_logits(head: HeadParts, sample: SampleJob) -> None:
    """Compute the entry's part of the logits; runs on the compute thread."""
    rows = _rows(sample)
    if rows.shape[1] == 1 and sample.split:
        head.compute(rows, sample.split)
    sample.watch.computed()


def sample_batch(
    runners: EntryRunners,
    head: HeadParts | None,
    samples: Sequence[SampleJob],
    again: Callable[[int, int], None] = lambda _rows, _before: None,
) -> Iterator[Sequence[Any]]:
    """Yield the sampled tokens, then those of the Embeds that follow them.

    Runs on the compute thread, without waiting for the event loop in between. ``again`` is called
    before a step runs by itself after it failed with others, with its rows and those before it.
    """
    rows = [attempt(_rows, sample) for sample in samples]
    logits = map_valid(
        lambda good: _heads(runners, head, samples, good), rows
    )  # [1, 1 + G, V] each
    sampled = [
        each
        if isinstance(each, Exception)
        else attempt(sample.generation.sample, sample.job, each, sample.watch)
        for sample, each in zip(samples, logits, strict=True)
    ]
    yield sampled
    steps = [
        None
        if isinstance(each, Exception)
        else attempt(sample.generation.next_step, sample.watch_ahead)
        for sample, each in zip(samples, sampled, strict=True)
    ]

    def run_again(step: tuple[Embed, Tensor, SessionCache]) -> None:
        job, _, cache = step
        again(len(job.tokens), job.pos)
        undo_step(cache, job.pos)

    ran = map_valid(lambda good: _fronts(runners, good), steps, run_again)
    yield [
        each
        if each is None or isinstance(each, Exception)
        else attempt(sample.generation.embedded, *each, sample.watch_ahead)
        for sample, each in zip(samples, ran, strict=True)
    ]


def _heads(
    runners: EntryRunners, head: HeadParts | None, samples: Sequence[SampleJob], rows: list[Tensor]
) -> Sequence[Tensor]:
    """Compute logits; several sessions share one pass, which uses no logits of the last rank."""
    first = samples[0]
    if head and first.split and len(samples) == 1 and rows[0].shape[1] == 1:
        return [head.finish(rows[0], first.split, first.generation.key)]
    return runners.logits(rows)


def _rows(sample: SampleJob) -> Tensor:
    """Return the rows [1, 1 + G, D] of a `SampleTokens`."""
    if sample.rows is None:
        sample.rows = sample.generation.open(sample.job, sample.watch)
    else:
        sample.watch.queued()  # until the last rank answered, or was late
    return sample.rows


def _fronts(
    runners: EntryRunners, steps: list[tuple[Embed, Tensor, SessionCache]]
) -> list[tuple[Embed, Tensor]]:
    tokens, caches = [tokens for _, tokens, _ in steps], [cache for _, _, cache in steps]
    outputs = runners.front.step_many(tokens, caches)
    return [(job, output) for (job, _, _), output in zip(steps, outputs, strict=True)]
