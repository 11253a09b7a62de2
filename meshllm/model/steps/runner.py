"""Runners: a shard with its strategy, and a span of layers that was loaded in several pieces."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from meshllm.errors import ModelError
from meshllm.model.modules.replacement import packed_tensors, plain_tensors
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.split.received_rows import ReceivedRows
from meshllm.model.split.session_cache import SentRows, SessionCache
from meshllm.model.split.shard import Shard
from meshllm.model.steps.execution import Execution, Strategy
from meshllm.model.steps.strategies import ReplayedSteps, StepTrial, choose_steps
from meshllm.model.steps.trial import try_steps
from meshllm.names import Span


class Runner:
    """Runs one shard, see `meshllm.model.steps.strategies`."""

    def __init__(
        self,
        shard: Shard,
        counts: Sequence[int] = (),
        trial: StepTrial | None = None,
        whole: nn.Module | None = None,
        warned: set[str] | None = None,
    ) -> None:
        """Prepare steps of one row and of each number of rows in ``counts``; if empty, stock steps.

        ``trial`` returns why they cannot be used, or ""; None runs `try_steps`. ``whole`` is the
        whole model on meta; None builds it. Runners that share ``warned`` warn of each reason for
        slower steps once.

        A shard has one runner, because a runner exchanges modules.
        """
        self.shard = shard
        self.steps, self._execution = choose_steps(
            shard, counts, trial or try_steps, whole, set() if warned is None else warned
        )
        self.step, self.step_many = self.steps.step, self.steps.step_many
        self.recompute, self.fill = self.steps.recompute, self.steps.fill
        self.runs_in_one_pass, self.warm_up_steps = self.steps.runs_in_one_pass, self.steps.warm_up
        self.new_cache = shard.new_cache

    def prefill(self, x: Tensor, cache: SpanCache, rows: int | None = None) -> Tensor:
        """Run a chunk of a prompt, see `Shard.forward`."""
        return self.steps.prefill(x, cache, rows)

    def one_row(self) -> SpanCache:
        """Return a cache with one row, which has the shapes and dtypes of any other."""
        width, dtype = self.shard.row_format.width, self.shard.row_format.dtype
        shape, kind = ((1, 1), torch.long) if self.shard.embed else ((1, 1, width), dtype)
        cache = self.new_cache()
        self.prefill(torch.zeros(shape, dtype=kind), cache)
        return cache

    def final_rows(self, x: Tensor, cache: SpanCache | None) -> Tensor:
        """Run a chunk as `prefill` does, but to the final norm: return rows [1, T, D]."""
        with self.shard.without_head():
            return self.steps.prefill(x, cache)

    @property
    def span(self) -> Span:
        """The layers of its shard."""
        return self.shard.span

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model knows."""
        return int(self.shard.model.config.get_text_config(decoder=True).vocab_size)

    @property
    def name(self) -> str:
        """What of the model it runs."""
        return f"layers {self.span}" if self.span else "LM head"

    @property
    def execution(self) -> Execution:
        """How it runs steps, as far as they were traced; any thread may ask."""
        if not isinstance(self.steps, ReplayedSteps):
            return self._execution
        return self._execution.without_replay(self.steps.replay.unfit, self.steps.inner.counts)

    @property
    def is_row_invariant(self) -> bool:
        """Whether several rows run in one pass, in about the time of one row."""
        return self._execution.strategy is not Strategy.STOCK

    @property
    def plain(self) -> Iterator[Tensor]:
        """The weights as they are stored, see `plain_tensors`."""
        return plain_tensors(self.shard.model)

    @property
    def packed(self) -> Collection[Tensor]:
        """Packed weights, see `packed_tensors`."""
        return packed_tensors(self.shard.model)

    @property
    def recorded_bytes(self) -> int:
        """The memory of compiled steps."""
        return self.steps.replay.bytes if isinstance(self.steps, ReplayedSteps) else 0

    @property
    def prepared(self) -> int:
        """Steps so far that were slower than later ones of as many rows."""
        return self.steps.replay.prepared if isinstance(self.steps, ReplayedSteps) else 0


class SpanRunner:
    """Runs the layers of a rank, which were loaded in one or more pieces, for its sessions."""

    def __init__(self, pieces: Sequence[Runner], sent: SentRows | None = None) -> None:
        """Run consecutive ``pieces``; the rows for the next rank are recorded in ``sent``."""
        self.pieces = list(pieces)
        self.recomputed = 0
        """Rows that `recompute` computed, times the layers that computed them."""
        self.on_step: Callable[[int, int, float, float], None] | None = None
        """Called after each step: its rows, the most rows before them, its seconds, and when it
        ended (`time.monotonic`)."""
        self.row_format = pieces[0].shard.row_format
        """Of the hidden states between ranks."""
        self._sent = sent

    @property
    def span(self) -> Span:
        """The layers of all pieces."""
        return Span(self.pieces[0].span.start, self.pieces[-1].span.stop)

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model knows."""
        return self.pieces[0].vocabulary

    @property
    def is_row_invariant(self) -> bool:
        """Whether several rows run in one pass, in about the time of one row."""
        return all(piece.is_row_invariant for piece in self.pieces)

    @property
    def sent_bytes(self) -> int:
        """The memory of the rows that were sent to the next rank."""
        return self._sent.bytes if self._sent else 0

    def new_cache(self) -> SessionCache:
        """Return an empty cache for one session."""
        return SessionCache([piece.new_cache() for piece in self.pieces])

    def regroup(self, cache: SessionCache) -> None:
        """Move a session's cache to these pieces, from those of an earlier span."""
        cache.regroup([piece.new_cache() for piece in self.pieces])
        if self._sent:
            self._sent.count(cache)

    def adopt(self, caches: Sequence[tuple[SessionCache, ReceivedRows]]) -> None:
        """Give caches of these pieces the rows that another node has handed over."""
        likes = [piece.one_row() for piece in self.pieces] if caches else []
        form = self.row_format
        for cache, received in caches:
            received.drop_sent_unlike(form.width, form.dtype)
            cache.adopt(received, likes)
            if self._sent:
                self._sent.count(cache)

    def prefill(self, x: Tensor, cache: SessionCache, rows: int | None = None) -> Tensor:
        """Run a chunk of a prompt, see `Shard.forward`."""
        start = cache.length
        for piece, part in zip(self.pieces, cache.parts, strict=True):
            x = piece.prefill(x, part, rows)
        self._record(cache, start, x)
        return x

    def final_rows(self, x: Tensor, cache: SessionCache) -> Tensor:
        """Run a chunk to the final norm, if the last piece has it: return rows [1, T, D]."""
        *before, last = zip(self.pieces, cache.parts, strict=True)
        for piece, part in before:
            x = piece.prefill(x, part)
        piece, part = last
        return piece.final_rows(x, part)

    def step(self, x: Tensor, cache: SessionCache) -> Tensor:
        """Run rows [1, T or T, D] of a session, each as if computed alone."""
        return self.step_many([x], [cache])[0]

    def step_many(self, parts: Sequence[Tensor], caches: Sequence[SessionCache]) -> list[Tensor]:
        """Run rows of several sessions; each gets what `step` would return."""
        starts, outputs, begin = [cache.length for cache in caches], list(parts), time.monotonic()
        for index, piece in enumerate(self.pieces):
            outputs = piece.step_many(outputs, [cache.parts[index] for cache in caches])
        for cache, start, output in zip(caches, starts, outputs, strict=True):
            self._record(cache, start, output)
        if self.on_step is not None:
            now = time.monotonic()
            self.on_step(sum(part.shape[1] for part in parts), max(starts), now - begin, now)
        return outputs

    def recompute(
        self, x: Tensor | None, cache: SessionCache, places: range, *, is_step: bool, is_sent: bool
    ) -> Tensor | None:
        """Compute rows only in the pieces that lack them, after the layers came from a lost rank.

        ``x`` is the input of the first piece at the positions ``places``; None if it is unknown.
        Returns the output of the last piece ``[1, T, D]`` if it ``is_sent``: if the next rank lacks
        the rows too. A piece that has the rows runs again only for an output that is needed and was
        not recorded. One whose output nobody needs ends with the keys and values of its last layer.

        Raises:
            ModelError: the input of a piece that must run is unknown.
        """
        parts = [*zip(self.pieces, cache.parts, strict=True)]
        runs, is_needed = list[bool](), is_sent
        for piece, part in reversed(parts):
            is_known = cache.recorded(piece.span.stop, places.start, places.stop) is not None
            is_needed = part.length < places.stop or (is_needed and not is_known)
            runs.insert(0, is_needed)
        for (piece, part), runs_it, goes_on in zip(parts, runs, [*runs[1:], is_sent], strict=True):
            if not runs_it:
                x = cache.recorded(piece.span.stop, places.start, places.stop)
                continue
            if x is None:
                raise ModelError(f"Nothing to compute layers {piece.span} at {places} from")
            part.crop(places.start)
            self.recomputed += len(places) * len(piece.span)
            if not (goes_on or (self._sent and piece is self.pieces[-1])):
                piece.fill(x, part, is_step=is_step)
                continue
            x = piece.recompute(x, part) if is_step else piece.prefill(x, part, 1)
            self._record(cache, places.start, x, piece)
        return x if is_sent else None

    def _record(
        self, cache: SessionCache, start: int, output: Tensor, piece: Runner | None = None
    ) -> None:
        last = self.pieces[-1]
        if self._sent and piece in (None, last):
            self._sent.record(cache, last.span.stop, start, output)
