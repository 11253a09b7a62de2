"""Four strategies that run the steps of a shard; `choose_steps` selects one and says why.

Theory of operation: speculative decoding verifies several draft tokens in one pass, and batching
computes several sessions in one; neither may change a text. So linear modules and attention are
row-invariant, see `meshllm.model.modules.linear_padded` and `meshllm.model.steps.attention`.
Whether a model allows that is decided from the whole model, so that all of its shards do the same;
that no other module breaks it is tested on load, see `meshllm.model.steps.trial`. If the test
fails, steps are those of the stock model, one row at a time, which costs time but changes no text.

Most of the remaining time of a step of a few rows is Python overhead. So on the CPU steps are
traced and replayed without it, where that pays off, see `meshllm.model.steps.replay`.

GPU kernels may use another summation order for each number of rows, in norms too: there a step is
one CUDA graph with a fixed number of rows, see `meshllm.model.steps.cuda_graph`.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshllm.model.device import (
    CPU,
    all_to_device,
    all_to_host,
    is_out_of_memory,
    to_device,
    to_host,
)
from meshllm.model.modules.linear_bf16 import MAX_ROWS
from meshllm.model.modules.replacement import (
    most_invariant_rows,
    replace_modules,
    restore_modules,
)
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.split.meta_model import build
from meshllm.model.split.shard import Shard
from meshllm.model.split.structure import PROBE_ERRORS
from meshllm.model.steps.attention import decode_attention, prefill_attention
from meshllm.model.steps.attention_switch import Attend, AttentionSwitch
from meshllm.model.steps.batched_cache import BatchedCache
from meshllm.model.steps.cuda_graph import Graph
from meshllm.model.steps.execution import (
    NOT_CROPPABLE,
    Execution,
    Strategy,
    graph_obstacle,
    lacks_for_graphs,
    lacks_invariance,
    level_of,
    linears_of,
    own_attention,
    replay_obstacle,
)
from meshllm.model.steps.lm_head_only import find_head_modules, run_modules
from meshllm.model.steps.replay import CHECKS, Replay
from meshllm.model.steps.trace import NotReplayable, Tracer
from meshllm.model.steps.trial import BEFORE, TRIED, CachedTrial, draw_rows, read_prompt

RECOMPUTED_ROWS = 7 * MAX_ROWS
"""Rows of a session that are computed again in one pass, where the kernels of matrices allow."""

BATCH_ROWS = 7, 8
"""Rows of several sessions that are traced too: with those of drafts, a batch of up to 12 rows is
padded by a quarter at most, and one of more rows by a third."""

_WARM_UPS = 2 * (1 + CHECKS)  # steps at most; if these are not enough, real steps continue

logger = logging.getLogger(__name__)

Caches = Sequence[SpanCache | None]
Run = Callable[[Tensor, Sequence[SpanCache], Sequence[int]], Tensor]
"""Runs rows [1, T or T, D] of several sessions; ``rows[i]`` of them belong to ``caches[i]``."""


class Steps(Protocol):
    """Runs a shard for sessions. Inputs and outputs are on the CPU."""

    def prefill(self, x: Tensor, cache: SpanCache | None, rows: int | None = None) -> Tensor:
        """Run a chunk of a prompt, see `Shard.forward`."""
        ...

    def step(self, x: Tensor, cache: SpanCache | None) -> Tensor:
        """Run rows [1, T or T, D] of a session, each as if computed alone."""
        ...

    def step_many(self, parts: Sequence[Tensor], caches: Caches) -> list[Tensor]:
        """Run rows of several sessions; each gets what `step` would return."""
        ...

    def recompute(self, x: Tensor, cache: SpanCache) -> Tensor:
        """Run rows that were computed in steps before; each gets what `step` would return."""
        ...

    def fill(self, x: Tensor, cache: SpanCache, *, is_step: bool) -> None:
        """Add to the cache what `recompute` or `prefill` of rows would."""
        ...

    def runs_in_one_pass(self, rows: int) -> bool:
        """Return whether this many rows of a session run in one pass."""
        ...

    def warm_up(self) -> Iterator[None]:
        """Make later steps faster: each ``next`` runs one step, with rows of no session."""
        ...


StepTrial = Callable[[Shard, Steps, int], str]
"""Returns why steps of a shard, with at most this many rows, cannot be used; or ""."""


class StockSteps:
    """The stock forward, one row at a time."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._head_modules = find_head_modules(shard)

    def prefill(self, x: Tensor, cache: SpanCache | None, rows: int | None = None) -> Tensor:
        """Run a chunk of a prompt, with the bits of the stock model."""
        return to_host(self._shard.forward(to_device(x, self._shard.device), cache, rows=rows))

    def step(self, x: Tensor, cache: SpanCache | None) -> Tensor:
        """Run rows one after the other."""
        return self.step_many([x], [cache])[0]

    def step_many(self, parts: Sequence[Tensor], caches: Caches) -> list[Tensor]:
        """Run sessions one after the other, with one copy to the device and one back."""
        outputs = [
            torch.cat([self.forward(row, cache) for row in torch.split(x, 1, 1)], 1)
            for x, cache in zip(all_to_device(parts, self._shard.device), caches, strict=True)
        ]
        return all_to_host(outputs)

    def recompute(self, x: Tensor, cache: SpanCache) -> Tensor:
        """Run rows one after the other."""
        return self.step(x, cache)

    def fill(self, x: Tensor, cache: SpanCache, *, is_step: bool) -> None:
        """Run rows."""
        _fill(self, x, cache, is_step=is_step)

    def runs_in_one_pass(self, rows: int) -> bool:
        """Return False: rows run one at a time."""
        return False

    def warm_up(self) -> Iterator[None]:
        """Nothing gets faster."""
        return iter(())

    def forward(
        self, x: Tensor, cache: SpanCache | BatchedCache | None, places: Tensor | None = None
    ) -> Tensor:
        """Run the shard, or the modules of its head if it has nothing else."""
        if self._head_modules:
            return run_modules(self._shard, self._head_modules, x)
        return self._shard.forward(x, cache, position_ids=places)


class InvariantSteps:
    """Rows and sessions in one pass on the CPU, each row with the bits as if computed alone."""

    def __init__(self, shard: Shard, counts: frozenset[int]) -> None:
        """Run the rows of a session in one pass if their number is in ``counts``."""
        self.counts, self.shard = counts, shard
        self.most_recomputed = MAX_ROWS
        """Rows of a session in one pass, at most, when they are computed again."""
        self.untried: StepTrial | None = None
        """Tries `RECOMPUTED_ROWS` in the warm-up; None if they were tried, or cannot be used."""
        self.attention = AttentionSwitch(shard)
        self._stock = StockSteps(shard)

    def prefill(self, x: Tensor, cache: SpanCache | None, rows: int | None = None) -> Tensor:
        """Run a chunk of a prompt."""
        with self.attention.using(prefill_attention):
            return self.shard.forward(x, cache, rows=rows)

    def step(self, x: Tensor, cache: SpanCache | None) -> Tensor:
        """Run rows of a session, in one pass if their number is in ``counts``."""
        return self.step_many([x], [cache])[0]

    def step_many(self, parts: Sequence[Tensor], caches: Caches) -> list[Tensor]:
        """Run rows of several sessions together."""
        return _in_groups(self.run, self.counts, parts, caches)

    def recompute(self, x: Tensor, cache: SpanCache) -> Tensor:
        """Run rows in passes of up to `most_recomputed`."""
        parts = torch.split(x, self.most_recomputed, 1)
        return torch.cat([self.run(part, [cache], [part.shape[1]]) for part in parts], 1)

    def fill(self, x: Tensor, cache: SpanCache, *, is_step: bool) -> None:
        """Run rows up to the keys and values of the last layer."""
        with self.attention.ending_at(self.shard.layer(self.shard.span.stop - 1)):
            _fill(self, x, cache, is_step=is_step)

    def runs_in_one_pass(self, rows: int) -> bool:
        """Return whether this many rows of a session run in one pass."""
        return rows in self.counts

    def warm_up(self) -> Iterator[None]:
        """Try `RECOMPUTED_ROWS` rows in one pass, unless that was done on load."""
        if self.untried is not None:
            yield
            trial, self.untried = self.untried, None
            self.try_recompute(trial)

    def try_recompute(self, trial: StepTrial) -> None:
        """Recompute `RECOMPUTED_ROWS` at a time, if they are like those of steps."""
        tried = copy(self)  # in pauses, steps run with the counts that were tried before
        tried.counts = self.counts | {MAX_ROWS, RECOMPUTED_ROWS}
        try:
            reason = trial(self.shard, tried, RECOMPUTED_ROWS)
        except PROBE_ERRORS as error:  # such as more rows than the model has positions
            reason = f"{type(error).__name__}: {error}"
        if reason:
            logger.warning("recomputation is limited to %d rows at a time: %s", MAX_ROWS, reason)
        else:
            self.most_recomputed = RECOMPUTED_ROWS

    def run(self, x: Tensor, caches: Sequence[SpanCache], rows: Sequence[int]) -> Tensor:
        """Run a step."""
        return self.forward(x, positions_of(x, caches, rows), caches, rows)

    def forward(
        self,
        x: Tensor,
        places: Tensor,
        caches: Sequence[SpanCache],
        rows: Sequence[int],
        tracer: Tracer | None = None,
    ) -> Tensor:
        """Run rows at positions ``places`` [1, T]; ``tracer`` traces caches and attention."""
        bundle = BatchedCache(caches, rows) if len(caches) > 1 else None  # falsy: no items
        attend: Attend = decode_attention if bundle is None else bundle.attend
        cache: Any = next(iter(caches), None) if bundle is None else bundle
        if tracer is not None and cache is not None:
            attend = partial(_traced_attention, tracer, attend)
            cache.update = tracer.update(cache.update)
        try:
            with self.attention.using(attend):
                output = self._stock.forward(x, cache, places)
        finally:
            if tracer is not None and cache is not None:
                del cache.update
        if bundle is not None:
            bundle.advance()
        return output


class ReplayedSteps:
    """Row-invariant steps replayed from a trace, without Python in between; eager prefill."""

    def __init__(self, inner: InvariantSteps, warned: set[str] | None = None) -> None:
        """Trace the steps of ``inner``; ``warned`` is that of `choose_steps`."""
        self.inner = inner
        self.replay = Replay() if warned is None else Replay(warned=warned)
        self.prefill = inner.prefill
        self.runs_in_one_pass = inner.runs_in_one_pass

    def step(self, x: Tensor, cache: SpanCache | None) -> Tensor:
        """Run rows of a session."""
        return self.step_many([x], [cache])[0]

    def step_many(self, parts: Sequence[Tensor], caches: Caches) -> list[Tensor]:
        """Run rows of several sessions together."""
        return _in_groups(self.run, self.inner.counts, parts, caches)

    def recompute(self, x: Tensor, cache: SpanCache) -> Tensor:
        """Run rows in passes, replayed if these have as many rows as steps."""
        outputs = list[Tensor]()
        for part in torch.split(x, self.inner.most_recomputed, 1):
            rows = part.shape[1]
            run = self.run if rows in self.inner.counts else self.inner.run
            outputs.append(run(part, [cache], [rows]))
        return torch.cat(outputs, 1)

    def fill(self, x: Tensor, cache: SpanCache, *, is_step: bool) -> None:
        """Run rows up to the keys and values of the last layer, unless steps are to be replayed."""
        if is_step and self.inner.most_recomputed in self.inner.counts:
            self.recompute(x, cache)
        else:
            self.inner.fill(x, cache, is_step=is_step)

    def run(self, x: Tensor, caches: Sequence[SpanCache], rows: Sequence[int]) -> Tensor:
        """Run a step, replayed if its trace is ready."""

        def forward(x: Tensor, places: Tensor) -> Tensor:
            return self.inner.forward(x, places, caches, rows, self.replay.tracer)

        places = positions_of(x, caches, rows)
        if not all(cache.length for cache in caches):
            return forward(x, places)
        return self.replay.step(x, places, caches, rows, forward)

    @torch.inference_mode()
    def warm_up(self) -> Iterator[None]:
        """Trace steps of ``counts`` and `BATCH_ROWS`, then do what `InvariantSteps.warm_up` does.

        The first one also reads a prompt. Other steps may run in between, on the same thread.
        """
        yield from self._trace()
        yield from self.inner.warm_up()

    def _trace(self) -> Iterator[None]:
        shard, counts = self.inner.shard, [*sorted(self.inner.counts), *BATCH_ROWS]
        if not any(map(self.replay.needs, counts)):
            return
        rows, caches = draw_rows(shard), [shard.new_cache()] if shard.span else []
        for cache in caches:
            shard.forward(rows[:, :BEFORE], cache, rows=1)
        for count in counts:
            for number in range(_WARM_UPS):
                if not self.replay.needs(count):
                    break
                yield
                with self.replay.tracing(count):
                    self.run(rows.roll(number, 1)[:, :count], caches, [count])
            for cache in caches:
                cache.crop(BEFORE)


class GraphSteps:
    """Up to `MAX_ROWS` rows of all sessions in one launch of a CUDA graph."""

    def __init__(self, shard: Shard) -> None:
        """Capture the graph.

        Raises:
            NotReplayable: the forward depends on more than the inputs of a graph.
        """
        self._stock = StockSteps(shard)
        self._graph = graph = Graph(shard, MAX_ROWS)
        self.attention = switch = AttentionSwitch(shard)  # the graph does not own it
        rows = draw_rows(shard, MAX_ROWS)

        def forward(x: Tensor, cache: SpanCache | None, places: Tensor) -> Tensor:
            with switch.using(graph.attend):
                return self._stock.forward(x, cache, places)

        try:
            graph.record(forward, rows[:, BEFORE:], read_prompt(shard, rows))
        except BaseException:
            switch.close()
            raise
        self.prefill = self._stock.prefill
        self.warm_up = self._stock.warm_up

    def step(self, x: Tensor, cache: SpanCache | None) -> Tensor:
        """Run rows of a session."""
        return self.step_many([x], [cache])[0]

    def step_many(self, parts: Sequence[Tensor], caches: Caches) -> list[Tensor]:
        """Run rows of several sessions, in as few launches as possible."""
        outputs = list[Tensor]()
        for group in _groups(parts):
            x, rows = torch.cat(list(parts[group]), 1), [part.shape[1] for part in parts[group]]
            if x.shape[1] > MAX_ROWS:  # one part
                pieces = torch.split(x, MAX_ROWS, 1)
                given = [self._graph.step(each, caches[group], [each.shape[1]]) for each in pieces]
                outputs.append(torch.cat(given, 1))
            else:
                outputs += torch.split(self._graph.step(x, caches[group], rows), rows, 1)
        return outputs

    def recompute(self, x: Tensor, cache: SpanCache) -> Tensor:
        """Run rows in as few launches as possible."""
        return self.step(x, cache)

    def fill(self, x: Tensor, cache: SpanCache, *, is_step: bool) -> None:
        """Run rows."""
        _fill(self, x, cache, is_step=is_step)

    def runs_in_one_pass(self, rows: int) -> bool:
        """Return whether this many rows of a session run in one pass."""
        return rows <= MAX_ROWS


class NotInvariant(Exception):
    """Says why steps are not row-invariant, though the model allows it."""


def choose_steps(
    shard: Shard,
    counts: Sequence[int],
    trial: StepTrial,
    whole: nn.Module | None,
    warned: set[str],
) -> tuple[Steps, Execution]:
    """Choose how steps of one row and of each of ``counts`` run; if empty, stock steps.

    ``whole`` is the whole model on meta; None builds it. Warns of a fallback, unless its reason is
    in ``warned`` already.
    """
    if not counts:
        is_able = shard.new_cache().croppable
        reason = "one row per step is requested" if is_able else NOT_CROPPABLE
        return _stock(shard, reason, None if is_able else warned)
    config, device = shard.model.config, shard.device
    whole = build(config, shard.model.dtype).model if whole is None else whole
    if reason := lacks_invariance(config, whole, device):
        return _stock(shard, reason, warned)
    try:
        if device != CPU:
            return _on_gpu(shard, trial)
        steps = _on_cpu(shard, whole, frozenset((1, *counts)), trial)
    except (NotInvariant, NotReplayable, *PROBE_ERRORS) as error:
        restore_modules(shard.model)
        if device == CPU and is_out_of_memory(error):  # a GPU may have enough for stock steps
            raise
        return _stock(shard, _reason_of(error, device), warned)
    return _replayed(shard, steps, warned)


def positions_of(x: Tensor, caches: Sequence[SpanCache], rows: Sequence[int]) -> Tensor:
    """Return the positions [1, T] of rows in their texts."""
    if not caches:
        return torch.arange(x.shape[1])[None]
    starts = (cache.length for cache in caches)
    parts = [torch.arange(at, at + count) for at, count in zip(starts, rows, strict=True)]
    return torch.cat(parts)[None]


def _stock(shard: Shard, reason: str, warned: set[str] | None) -> tuple[Steps, Execution]:
    """Return stock steps; without ``warned`` they were requested."""
    if warned is not None:
        logger.log(
            level_of(reason, warned),
            "row-invariant kernels disabled (%s): no batched verification, no session batching",
            reason,
        )
    return StockSteps(shard), _execution(
        shard, Strategy.STOCK, "torch", reason, is_fallback=warned is not None
    )


def _reason_of(error: Exception, device: torch.device) -> str:
    """Return why steps are not row-invariant, first what the user can install."""
    if isinstance(error, NotInvariant):
        return str(error)
    lacking = lacks_for_graphs() if device != CPU else ""
    return "; ".join(filter(None, (lacking, f"{type(error).__name__}: {error}")))


def _replayed(shard: Shard, steps: InvariantSteps, warned: set[str]) -> tuple[Steps, Execution]:
    own = own_attention(shard.model.config, shard.model.dtype)
    layers = [shard.layer(at) for at in range(shard.span.start, shard.span.stop)]
    obstacle, is_fallback = replay_obstacle(layers or [shard.model], shard.new_cache(), shard.quant)
    if is_fallback:
        logger.log(level_of(obstacle, warned), "steps are slower: %s", obstacle)
    if obstacle:
        return steps, _execution(shard, Strategy.INVARIANT, own, obstacle, is_fallback=is_fallback)
    return ReplayedSteps(steps, warned), _execution(shard, Strategy.REPLAYED, own)


def _execution(
    shard: Shard, strategy: Strategy, attention: str, reason: str = "", *, is_fallback: bool = False
) -> Execution:
    threads = torch.get_num_threads() if shard.device == CPU else 0
    linears = linears_of(shard.model)
    return Execution(strategy, linears, attention, reason, threads, is_fallback)


def _try(shard: Shard, steps: GraphSteps | InvariantSteps, trial: StepTrial, rows: int) -> None:
    """Try steps of some rows; raise `NotInvariant` if they fail."""
    reason = "not tried"
    try:
        reason = trial(shard, steps, rows)
    finally:
        if reason:
            steps.attention.close()
    if reason:
        raise NotInvariant(reason)


def _on_gpu(shard: Shard, trial: StepTrial) -> tuple[Steps, Execution]:
    if reason := graph_obstacle(shard.new_cache()):
        raise NotInvariant(reason)
    steps = GraphSteps(shard)
    _try(shard, steps, trial, MAX_ROWS)
    return steps, _execution(shard, Strategy.GRAPH, "own")


def _on_cpu(
    shard: Shard, whole: nn.Module, counts: frozenset[int], trial: StepTrial
) -> InvariantSteps:
    if reason := replace_modules(shard.model, shard.device, whole=whole):
        raise NotInvariant(reason)
    steps = InvariantSteps(shard, counts | {TRIED})
    passed = frozenset[int]()
    if isinstance(trial, CachedTrial):
        passed = trial.passed(shard, (TRIED, RECOMPUTED_ROWS))
    if TRIED not in passed:
        _try(shard, steps, trial, TRIED)
    steps.counts = counts
    if most_invariant_rows(shard.model) < RECOMPUTED_ROWS:
        return steps
    if RECOMPUTED_ROWS in passed:
        steps.most_recomputed = RECOMPUTED_ROWS
    elif isinstance(trial, CachedTrial):
        steps.untried = trial  # the first answer does not wait for it
    else:
        steps.try_recompute(trial)
    return steps


def _traced_attention(
    tracer: Tracer,
    attend: Attend,
    *inputs: Any,
) -> Tensor:
    """Compute attention with tracing suspended, and record it as one item."""
    with tracer.paused():
        attended = attend(*inputs)
    query, key, value, scale, window = inputs
    tracer.attended(query, (key, value), attended, scale, window)
    return attended


def _fill(steps: Steps, x: Tensor, cache: SpanCache, *, is_step: bool) -> None:
    if is_step:
        steps.recompute(x, cache)
    else:
        steps.prefill(x, cache, 1)


def _in_groups(
    run: Run, counts: frozenset[int], parts: Sequence[Tensor], caches: Caches
) -> list[Tensor]:
    """Run rows of sessions, up to `MAX_ROWS` per pass; a part that is alone in its group runs
    one row at a time unless its number of rows is in ``counts``.
    """
    outputs = list[Tensor]()
    for group in _groups(parts):
        x, rows = torch.cat(list(parts[group]), 1), [part.shape[1] for part in parts[group]]
        held = [cache for cache in caches[group] if cache is not None]
        if len(rows) > 1 or rows[0] in counts:
            outputs += torch.split(run(x, held, rows), rows, 1)
        else:
            outputs.append(torch.cat([run(row, held, [1]) for row in torch.split(x, 1, 1)], 1))
    return outputs


def _groups(parts: Sequence[Tensor]) -> Iterator[slice]:
    """Group parts so that each group has at most `MAX_ROWS` rows or is a single part."""
    if len(parts) == 1:
        yield slice(0, 1)
        return
    at = 0
    while at < len(parts):
        totals = accumulate(part.shape[1] for part in parts[at:])
        stop = at + max(1, sum(total <= MAX_ROWS for total in totals))
        yield slice(at, stop)
        at = stop
