"""Sampling for several sessions at once: one pass for all, and errors that end one session only."""

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from meshllm.errors import ModelError
from meshllm.model.steps.runner import Runner, SpanRunner
from meshllm.names import SessionId
from meshllm.node.compute.stopwatch import Stopwatch
from meshllm.node.session.continued_cache import CacheMiss
from meshllm.node.session.generation import EntryRunners, Generation
from meshllm.node.session.sample_batch import SampleJob, compute_own_logits, sample_batch
from meshllm.node.session.split_head import HeadParts, LogitsRequest
from meshllm.protocol.session.actions import Embed, SampleTokens
from meshllm.protocol.session.blob import session_key
from tests.builders.session import CountedCache, CountingLayers

KEY = session_key(SessionId(bytes(16)))
PICK = SampleTokens(0, 1, None, (), 10)
NEXT = Embed(0, 1, (7,))


class Head:
    """An LM head that adds to each row, and counts its passes."""

    def __init__(self, add: float = 10.0) -> None:
        self.add = add
        self.passes: list[int] = []
        """Sessions of each pass."""

    def step_many(self, rows: list[Tensor], _caches: list[None]) -> list[Tensor]:
        self.passes.append(len(rows))
        return [row + self.add for row in rows]

    def step(self, row: Tensor, _cache: None) -> Tensor:
        return self.step_many([row], [None])[0]


@dataclass
class FakeGeneration:
    """Samples its logits as they are; a step follows if ``cache`` is given."""

    row: float = 0.0
    rows: int = 1
    cache: CountedCache | None = None
    errors: dict[str, Exception] = field(default_factory=dict)
    key: Any = KEY
    opened: int = 0

    def _maybe_fail(self, name: str) -> None:
        if name in self.errors:
            raise self.errors[name]

    def open(self, _job: SampleTokens, _watch: Stopwatch) -> Tensor:
        self._maybe_fail("open")
        self.opened += 1
        return torch.full((1, self.rows, 1), self.row)

    def sample(self, _job: SampleTokens, logits: Tensor, _watch: Stopwatch) -> list[float]:
        self._maybe_fail("sample")
        return [float(value) for value in logits.flatten()]

    def next_step(self, _watch: Stopwatch) -> tuple[Embed, Tensor, CountedCache] | None:
        self._maybe_fail("next_step")
        return (NEXT, torch.tensor([NEXT.tokens]), self.cache) if self.cache else None

    def embedded(self, job: Embed, output: Tensor, _watch: Stopwatch) -> tuple[Embed, float]:
        self._maybe_fail("embedded")
        return job, float(output)


def ends_of(head: Head) -> tuple[EntryRunners, CountingLayers]:
    """Make the runners of an entry, whose layers double each token."""
    front = CountingLayers(lambda tokens: 2 * tokens)
    return EntryRunners(cast("SpanRunner", front), cast("Runner", head), 100), front


def job(generation: FakeGeneration) -> SampleJob:
    return SampleJob(cast("Generation", generation), PICK, Stopwatch(), Stopwatch())


def test_one_pass_samples_all_sessions_and_another_begins_their_next_steps() -> None:
    ends, front = ends_of(head := Head())
    jobs = [
        job(FakeGeneration(1.0, cache=CountedCache(1))),
        job(FakeGeneration(2.0, rows=2, cache=CountedCache(5))),
    ]

    sampled, steps = sample_batch(ends, None, jobs)

    assert sampled == [[11.0], [12.0, 12.0]]
    assert steps == [(NEXT, 14.0), (NEXT, 14.0)]
    assert head.passes == [2]
    assert front.passes == [("step", [1, 5])]


def test_the_tokens_are_reported_before_the_next_steps_run() -> None:
    ends, front = ends_of(Head())

    phases = sample_batch(ends, None, [job(FakeGeneration(cache=CountedCache()))])
    next(phases)

    assert front.passes == []


def test_a_session_whose_answer_ended_has_no_next_step() -> None:
    ends, front = ends_of(Head())

    _, steps = sample_batch(ends, None, [job(FakeGeneration(cache=None))])

    assert steps == [None]
    assert front.passes == []


@pytest.mark.parametrize("place", ["open", "sample"])
def test_an_error_before_the_tokens_ends_one_session_only(place: str) -> None:
    ends, front = ends_of(Head())
    error = ModelError("no row")
    bad = FakeGeneration(cache=CountedCache(3), errors={place: error})

    sampled, steps = sample_batch(
        ends, None, [job(bad), job(FakeGeneration(cache=CountedCache(4)))]
    )

    assert sampled == [error, [10.0]]
    assert steps == [None, (NEXT, 14.0)]
    assert front.passes == [("step", [4])]


@pytest.mark.parametrize("place", ["next_step", "embedded"])
def test_an_error_in_the_next_step_spares_the_tokens_and_the_others(place: str) -> None:
    ends, _ = ends_of(Head())
    error = ModelError("no cache")
    bad = FakeGeneration(cache=CountedCache(3), errors={place: error})

    sampled, steps = sample_batch(
        ends, None, [job(bad), job(FakeGeneration(cache=CountedCache(4)))]
    )

    assert sampled == [[10.0], [10.0]]
    assert steps == [error, (NEXT, 14.0)]


def test_without_a_valid_row_the_head_does_not_run() -> None:
    ends, _ = ends_of(head := Head())

    sampled, steps = sample_batch(ends, None, [job(FakeGeneration(errors={"open": KeyError("x")}))])

    assert isinstance(sampled[0], KeyError)
    assert steps == [None]
    assert head.passes == []


def split_job(parts: HeadParts, generation: FakeGeneration) -> SampleJob:
    """Make a job of which the last rank was asked for its part of the logits, and is late."""
    sample = job(generation)
    sample.split = parts.begin(LogitsRequest(0, 0))
    return sample


def test_the_entry_computes_its_part_while_it_waits_for_the_other() -> None:
    theirs, ours = Head(100.0), Head()
    ends, _ = ends_of(whole := Head())
    parts = HeadParts(cast("Runner", theirs), cast("Runner", ours), lambda: 1.0)
    sample = split_job(parts, generation := FakeGeneration(1.0))

    compute_own_logits(parts, sample)
    before = len(ours.passes)
    sampled, _ = sample_batch(ends, parts, [sample])

    assert sampled == [[101.0, 11.0]]
    assert (before, len(ours.passes), whole.passes) == (1, 1, [])
    assert generation.opened == 1


def test_the_own_part_of_several_rows_is_not_computed_ahead() -> None:
    ours = Head()
    parts = HeadParts(cast("Runner", Head()), cast("Runner", ours), lambda: 1.0)
    sample = split_job(parts, FakeGeneration(rows=2))

    compute_own_logits(parts, sample)

    assert ours.passes == []


@pytest.mark.parametrize(("rows", "others"), [(2, 0), (1, 1)], ids=["drafts", "two sessions"])
def test_several_rows_use_no_logits_of_the_last_rank(rows: int, others: int) -> None:
    theirs, ours = Head(100.0), Head()
    ends, _ = ends_of(whole := Head())
    parts = HeadParts(cast("Runner", theirs), cast("Runner", ours), lambda: 1.0)
    sample = split_job(parts, FakeGeneration(1.0, rows=rows))

    sampled, _ = sample_batch(ends, parts, [sample, *(job(FakeGeneration(2.0)),) * others])

    assert sampled[0] == [11.0] * rows
    assert (theirs.passes, ours.passes, whole.passes) == ([], [], [1 + others])


def test_steps_that_fail_together_are_undone_and_run_one_by_one() -> None:
    ends, front = ends_of(Head())
    front.most, again = 1, list[tuple[int, int]]()
    caches = CountedCache(1), CountedCache(1, croppable=False)
    jobs = [job(FakeGeneration(cache=cache)) for cache in caches]

    _, steps = sample_batch(ends, None, jobs, lambda *rows: again.append(rows))

    assert steps[0] == (NEXT, 14.0)
    assert isinstance(steps[1], CacheMiss)
    assert front.passes == [("step", [1, 1]), ("step", [NEXT.pos])]
    assert again == [(1, NEXT.pos), (1, NEXT.pos)]
