"""Step tracing and replay policy: which steps are traced, verified, and replayed.

A trace does not show how a forward uses Python values. The only one that changes from step to step
is the length of the KV cache, so before the trace the rows are run with caches that report a short
and a very long length. The next steps are run both ways. The outputs must be bit-equal each time.
All of this happens in steps that are needed anyway, or during warm-up.

The time of a step is mostly that of reading the weights, and every number of rows takes a trace of
its own, for which running sessions wait as long as for ten steps. So rows of several sessions,
whose total changes from step to step, are padded to the next larger number that has one, if there
is one within reach: the warm-up of a ring that drafts sees to that.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter

import torch
from torch import Tensor

from meshllm.model.kernels import jit
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.split.structure import PROBE_ERRORS
from meshllm.model.steps.compiled_step import CompiledStep, ScoreBuffer
from meshllm.model.steps.execution import level_of
from meshllm.model.steps.trace import NotReplayable, Tracer

EAGER_STEPS = 4
"""Eager steps of more than one row before the trace: some row counts occur once or twice.

Of one row there is one: the next token after a loss is awaited, and the layers that came for it
have no trace.
"""
CHECKS = 2
"""Steps after the trace that are run both ways and compared."""
STEPS_BEFORE_REPLAY = EAGER_STEPS + 1 + CHECKS
"""Steps of the same number of rows before the next ones are replayed."""
MAX_PADDING = 1 / 3
"""A step is padded by this fraction of its rows at most."""
MAX_TRIES = 16
"""Steps that are traced or run both ways, at most; those with NaN prove nothing."""

_DTYPES = torch.int64, torch.bfloat16  # of token ids, and of hidden states
_NEAR, _FAR = 1, 100_000  # tokens; cache lengths that no step may distinguish
_REFUSALS = NotReplayable, MemoryError, OSError, *PROBE_ERRORS
"""What model code raises with other inputs than it expects, and the compiler of its trace."""

logger = logging.getLogger(__name__)

Forward = Callable[[Tensor, Tensor], Tensor]
"""Runs rows at positions, and adds them to their caches."""


@dataclass(slots=True)
class _State:
    """State of the steps of one number of rows."""

    uses: int = 0
    tries: int = 0
    compiled: CompiledStep | None = None
    checks: int = 0
    unfit: str = ""
    """Why such steps run eagerly; empty if they may be replayed."""


@dataclass(slots=True)
class Replay:
    """The traced steps of a shard."""

    tracer: Tracer | None = None
    """The active tracer, if any."""
    prepared: int = 0
    """Steps slower than later ones of as many rows: the first, traced and compared ones."""
    warned: set[str] = field(default_factory=set[str])
    """Reasons for slower steps that were warned of, perhaps of other shards."""
    _states: dict[tuple[int, int], _State] = field(default_factory=dict[tuple[int, int], _State])
    _threads: int = 0  # of the latest step; each thread of Python has its own number
    _scores: ScoreBuffer = field(default_factory=ScoreBuffer)
    _wanted: int = 0  # rows that are traced now, see `tracing`

    @property
    def bytes(self) -> int:
        """The memory of compiled steps; any thread may ask."""
        compiled = [state.compiled for state in list(self._states.values())]
        return self._scores.bytes + sum(each.bytes for each in compiled if each)

    @property
    def unfit(self) -> dict[int, str]:
        """Why steps are not replayed, by their number of rows; any thread may ask.

        With the number of threads of the latest step.
        """
        states, now = list(self._states.items()), self._threads
        return {rows: state.unfit for (rows, used), state in states if state.unfit and used == now}

    def step(
        self,
        x: Tensor,
        places: Tensor,
        caches: Sequence[SpanCache],
        rows: Sequence[int],
        forward: Forward,
    ) -> Tensor:
        """Run rows ``x`` at positions ``places`` [1, T]; ``rows[i]`` belong to ``caches[i]``.

        The layers of the caches hold at least one row, and can be cropped.
        """
        if x.dtype not in _DTYPES or len(x) > 1 or min(rows) < 1 or _is_shared(caches):
            return forward(x, places)
        self._threads = threads = torch.get_num_threads()
        state = self._states.setdefault((x.shape[1], threads), _State())
        if state.compiled and not state.compiled.takes(x):
            return forward(x, places)
        if compiled := self._ready(state, x, threads):
            return compiled.run(x, places, caches, rows)
        state.uses += 1
        self.prepared += state.uses == 1
        is_early = state.uses <= (EAGER_STEPS if x.shape[1] > 1 else 1)
        if state.unfit or is_early or not jit.jit_available():
            return forward(x, places)
        state.tries += 1
        self.prepared += 1
        if state.tries > MAX_TRIES:
            self._disable(state, x, "too many of them have NaN")
            return forward(x, places)
        if state.compiled:
            return self._check(state, x, places, caches, rows, forward)
        return self._record(state, x, places, caches, forward)

    def _ready(self, state: _State, x: Tensor, threads: int) -> CompiledStep | None:
        """Return the compiled step of this many rows, or of a few more."""
        if state.compiled and state.checks >= CHECKS:
            return state.compiled
        if state.tries or state.unfit or self._wanted == x.shape[1]:
            return None
        least, most = x.shape[1], (1 + MAX_PADDING) * x.shape[1]
        larger = (
            (rows, each.compiled)
            for (rows, used), each in self._states.items()
            if used == threads and least < rows <= most and each.checks >= CHECKS
            if each.compiled and each.compiled.takes(x)
        )
        return min(larger, key=itemgetter(0), default=(0, None))[1]

    def needs(self, rows: int) -> bool:
        """Return whether steps of this many rows can still be traced or compared."""
        state = self._states.get((rows, torch.get_num_threads()), _State())
        return not state.unfit and (state.compiled is None or state.checks < CHECKS)

    @contextmanager
    def tracing(self, rows: int) -> Iterator[None]:
        """Trace or compare each step of this many rows that runs inside."""
        state = self._states.setdefault((rows, torch.get_num_threads()), _State())
        state.uses, self._wanted = max(state.uses, EAGER_STEPS), rows
        try:
            yield
        finally:
            self._wanted = 0

    def _disable(self, state: _State, x: Tensor, reason: str) -> None:
        """Run steps of as many rows eagerly from now on."""
        line = reason.partition("\n")[0]
        level = level_of(line, self.warned)
        state.compiled, state.unfit = None, line
        logger.log(level, "steps of %d rows are not replayed: %s", x.shape[1], reason)

    def _record(
        self,
        state: _State,
        x: Tensor,
        places: Tensor,
        caches: Sequence[SpanCache],
        forward: Forward,
    ) -> Tensor:
        with torch.inference_mode():
            whole = torch.contiguous_format
            x, places = x.clone(memory_format=whole), places.clone(memory_format=whole)
        try:
            outputs = [_run_behind(length, x, places, caches, forward) for length in (_NEAR, _FAR)]
        except _REFUSALS as reason:  # of model code; invalid rows fail below, too
            output = forward(x, places)
            self._disable(state, x, f"the forward fails with another cache length: {reason}")
            return output
        self.tracer = tracer = Tracer([x, places])
        try:
            with tracer:
                output = forward(x, places)
        finally:
            self.tracer = None
        if output.isnan().any():  # NaN never compares equal
            return output
        if not all(torch.equal(output, each) for each in outputs):
            self._disable(state, x, "the forward depends on the cache length as a Python value")
            return output
        try:
            threads = torch.get_num_threads()
            state.compiled = CompiledStep(tracer.end(output), x, threads, self._scores)
        except _REFUSALS as reason:
            self._disable(state, x, str(reason).strip() or type(reason).__name__)
        return output

    def _check(
        self,
        state: _State,
        x: Tensor,
        places: Tensor,
        caches: Sequence[SpanCache],
        rows: Sequence[int],
        forward: Forward,
    ) -> Tensor:
        assert state.compiled is not None
        lengths = [cache.length for cache in caches]
        again = state.compiled.run(x, places, caches, rows)
        for cache, length in zip(caches, lengths, strict=True):
            cache.crop(length)
        output = forward(x, places)
        if output.isnan().any():
            return output
        state.checks += 1
        if not torch.equal(again, output):
            self._disable(state, x, "replayed steps differ from the forward")
        return output


def _run_behind(
    length: int, x: Tensor, places: Tensor, caches: Sequence[SpanCache], forward: Forward
) -> Tensor:
    """Run rows with caches that report ``length`` tokens, then crop the rows again."""
    lengths = [cache.length for cache in caches]
    layers = [layer for cache in caches for layer in cache.layers]
    try:
        for cache in caches:
            cache.length = length
        for layer in layers:
            layer.get_seq_length = lambda: length
        return forward(x, places)
    finally:
        for layer in layers:
            del layer.get_seq_length
        for cache, before in zip(caches, lengths, strict=True):
            cache.length = before
            cache.crop(before)


def _is_shared(caches: Sequence[SpanCache]) -> bool:
    """Return whether a session occurs twice."""
    return len({id(cache) for cache in caches}) < len(caches)
