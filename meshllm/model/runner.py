"""Runs a shard for sessions: prompts as the stock model does, decode steps steadily.

Theory of operation: guesses may be checked many at a time, and sessions computed together, only if
that changes no text. So from the second token on matrices and attention compute each row as they
would in any company, see `meshllm.model.steady` and `meshllm.model.attention`. Whether a model
allows that is told from the whole of it, so that every shard of it does the same; whether these
parts are all of it is tried on load, on rows that never change: together, alone, and by the stock
forward. Where that fails, steps are those of the stock model, one row at a time, which costs time
but no text.

Most of what is left of a step of a few rows is Python, so on the CPU steps are recorded and done
again without it, see `meshllm.model.replay`.

Rows come from the CPU and what they give goes there, whatever the device of the shard. The kernels
of a GPU may add up otherwise for any number of rows, in norms too: there a step is one graph, of
always the same number of rows, see `meshllm.model.graph`.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from meshllm.model import native
from meshllm.model.attention import attend_alone, attend_chunk
from meshllm.model.bundle import Bundle
from meshllm.model.cache import SpanCache, WindowLayer
from meshllm.model.device import CPU, fetch, fetch_all, lacks, put, put_all
from meshllm.model.graph import Graph
from meshllm.model.native_linear import Bits, Mode, adopt
from meshllm.model.quant_attention import NAME as SHARED_KEYS
from meshllm.model.replay import PROOFS, Replay
from meshllm.model.shard import Shard
from meshllm.model.skeleton import build
from meshllm.model.steady import find_floors, loosen, steady
from meshllm.model.tail import find_tail, run_tail
from meshllm.model.trial import BEFORE, TRIED, draw_rows, read_prompt, try_steps

STOCK = {"sdpa", SHARED_KEYS}
STEADY = "meshllm_steady"
"""Names of attention functions, as transformers calls them; the last one begins so."""
MOST_ROWS = 17
"""Of all sessions that compute together."""

_REHEARSALS = 2 * (1 + PROOFS)  # of a step at most; a text has more tries, if that is not enough
_KINDS = {"full_attention", "sliding_attention"}
_KNOWN = {
    "cache_position",
    "dropout",
    "is_causal",
    "output_attentions",
    "position_ids",
    "scaling",
    "sliding_window",
    "use_cache",
}
"""Options of attention that are heeded, or change nothing where a row sees all before it."""

logger = logging.getLogger(__name__)

Forward = Callable[[Tensor, SpanCache | None], Tensor]


class Runner:
    """Runs one shard."""

    def __init__(self, shard: Shard, counts: Sequence[int] = ()) -> None:
        """Prepare for steps of one row and of each of ``counts``; none are stock steps.

        A shard has one runner; another one would tell its matrices what to do, too.
        """
        self.shard = shard
        self._counts = frozenset((1, *counts))
        self._slides = any(isinstance(layer, WindowLayer) for layer in self.new_cache().layers)
        self._records = shard.device == CPU and self.new_cache().extends
        self._is_quantised = shard.model.config._attn_implementation == SHARED_KEYS
        self._bundle: Bundle | None = None
        self._is_chunk = False
        self._mode = Mode()
        self._steady_name = f"{STEADY}_{id(self)}"  # of its own: another thread may run another one
        self._tail = find_tail(shard)
        self._replay = Replay()
        self._graph: Graph | None = None
        self.is_steady = bool(counts) and self._exchange() and self._agrees()
        """Whether several rows are computed in the time of one, or nearly."""
        if not self.is_steady:
            loosen(shard.model)
            self._replay, self._graph = Replay(), None  # what was recorded is of no use
        self._mode.bits = Bits.PROMPT if self.is_steady else Bits.STOCK

    @property
    def recorded_bytes(self) -> int:
        """Memory of recorded steps."""
        return self._replay.bytes

    @property
    def prepared(self) -> int:
        """Steps so far that took longer than others of as many rows will."""
        return self._replay.prepared

    def new_cache(self) -> SpanCache:
        """Make an empty cache for one session."""
        return self.shard.new_cache()

    def prefill(self, x: Tensor, cache: SpanCache, rows: int | None = None) -> Tensor:
        """Run a part of a prompt, see `Shard.forward`; the first one gives the stock bits.

        But where a matrix needs company, a head that is asked for one row computes it as later;
        compiled products have the bits that torch has with one thread; and quantised matrices have
        bits of their own, so all parts attend as the later ones do.
        """
        if self.is_steady and self.shard.device == CPU and (cache.length or self._is_quantised):
            return self._chunk(x, cache, rows)
        return fetch(self.shard.forward(put(x, self.shard.device), cache, rows=rows))

    @torch.inference_mode()
    def rehearsal(self) -> Iterator[None]:
        """Record the steps that this runner is for; each ``next`` does one, of rows of no text.

        The first one reads a prompt for them. Others may be done in between, on the same thread.
        """
        can_record = self.is_steady and self._records and native.works()
        if not (can_record and any(map(self._replay.expect, self._counts))):
            return
        rows, cache = draw_rows(self.shard), self.new_cache() if self.shard.span else None
        if cache is not None:
            self.shard.forward(rows[:, :BEFORE], cache, rows=1)
        for count in sorted(self._counts):
            for number in range(_REHEARSALS):
                if not self._replay.expect(count):
                    break
                yield
                self._steady(rows.roll(number, 1)[:, :count], cache)
            if cache is not None:
                cache.crop(BEFORE)

    def _chunk(self, x: Tensor, cache: SpanCache, rows: int | None = None) -> Tensor:
        """Run rows of a prompt where stock attention takes longer: many, or behind others."""
        self._is_chunk = True
        try:
            with self._steadily():
                return self.shard.forward(x, cache, rows=rows)
        finally:
            self._is_chunk = False

    def is_one_step(self, rows: int) -> bool:
        """Whether so many rows of a session are computed together."""
        if self._graph:
            return rows <= MOST_ROWS
        return self.is_steady and rows in self._counts

    def step(self, x: Tensor, cache: SpanCache | None) -> Tensor:
        """Run rows ``x`` [1, T or T, D], each as if it came alone; return what all give."""
        if self._graph:
            return self.step_many([x], [cache])[0]
        return fetch(self._step(put(x, self.shard.device), cache))

    def step_many(
        self, parts: Sequence[Tensor], caches: Sequence[SpanCache | None]
    ) -> list[Tensor]:
        """Run steps of several sessions; each gives what `step` would give."""
        if self._graph:
            return self._launched(self._graph, parts, caches)
        parts, outputs = put_all(parts, self.shard.device), list[Tensor]()
        for group in _groups(parts):
            outputs += self._bundled(parts[group], caches[group])
        return fetch_all(outputs)

    def _step(self, x: Tensor, cache: SpanCache | None) -> Tensor:
        if self.is_one_step(x.shape[1]):
            return self._steady(x, cache)
        one: Forward = self._steady if self.is_steady else self._forward
        return torch.cat([one(row, cache) for row in _alone(x)], 1)

    def _forward(
        self, x: Tensor, cache: SpanCache | Bundle | None, places: Tensor | None = None
    ) -> Tensor:
        if self._tail:
            return run_tail(self.shard, self._tail, x)
        return self.shard.forward(x, cache, position_ids=places)

    def _bundled(self, parts: Sequence[Tensor], caches: Sequence[SpanCache | None]) -> list[Tensor]:
        if len(parts) == 1 or not self.is_steady:
            return [self._step(part, cache) for part, cache in zip(parts, caches, strict=True)]
        rows, x = [part.shape[1] for part in parts], torch.cat(list(parts), 1)
        held = [cache for cache in caches if cache is not None]
        if not held:
            return list(torch.split(self._steady(x, None), rows, 1))
        bundle = Bundle(held, rows)

        def forward(x: Tensor, places: Tensor) -> Tensor:
            self._bundle = bundle
            try:
                output = self._laid(x, bundle, places)
            finally:
                self._bundle = None
            bundle.advance()
            return output

        output = self._played(x, bundle.position_ids, held, rows, forward)
        return list(torch.split(output, rows, 1))

    def _launched(
        self, graph: Graph, parts: Sequence[Tensor], caches: Sequence[SpanCache | None]
    ) -> list[Tensor]:
        outputs = list[Tensor]()
        for group in _groups(parts):
            x, rows = torch.cat(list(parts[group]), 1), [part.shape[1] for part in parts[group]]
            if x.shape[1] > MOST_ROWS:  # one part
                pieces = torch.split(x, MOST_ROWS, 1)
                given = [graph.step(piece, caches[group], [piece.shape[1]]) for piece in pieces]
                outputs.append(torch.cat(given, 1))
            else:
                outputs += torch.split(graph.step(x, caches[group], rows), rows, 1)
        return outputs

    def _exchange(self) -> bool:
        """Make the matrices steady, if all of the model can be; say if it can."""
        model, device = self.shard.model, self.shard.device
        whole = build(model.config, model.dtype).model
        if not may_be_steady(model.config, whole, device):
            return False
        if device != CPU:
            return self.new_cache().extends
        floors = find_floors(whole, model.dtype, range(1, MOST_ROWS + 1))
        if floors is None or not steady(model, floors):
            return False
        adopt(model, self._mode)
        return True

    def _agrees(self) -> bool:
        """Try rows together and alone, sessions together and alone, and the stock forward."""
        records, self._records = self._records, False  # of a part of the layers
        self.is_steady = True
        try:
            if self.shard.device != CPU:
                with torch.inference_mode():
                    rows = draw_rows(self.shard, MOST_ROWS)
                    graph = self._graph = Graph(self.shard, MOST_ROWS)
                    graph.record(self._laid, rows[:, BEFORE:], read_prompt(self.shard, rows))
            reason = try_steps(self.shard, self, TRIED if self._graph is None else MOST_ROWS)
        except Exception as error:  # foreign code meets what it was not made for
            level = logging.INFO if self.shard.device == CPU or not lacks() else logging.WARNING
            logger.log(level, "one row at a time: %s: %s", type(error).__name__, error)
            return False
        self._records = records
        if reason:
            logger.info("one row at a time: %s", reason)
        return not reason

    def _steady(self, x: Tensor, cache: SpanCache | None) -> Tensor:
        start, count = cache.length if cache is not None else 0, x.shape[1]
        places = torch.arange(start, start + count)[None]
        held = [] if cache is None else [cache]

        def forward(x: Tensor, places: Tensor) -> Tensor:
            return self._laid(x, cache, places)

        return self._played(x, places, held, [count], forward)

    def _laid(self, x: Tensor, cache: SpanCache | Bundle | None, places: Tensor) -> Tensor:
        """Run rows at their places [1, T], as the stock model does but for what is steady."""
        recorder, held = self._replay.recorder, cast("Any", cache)
        with self._steadily():
            if held is None or recorder is None:
                return self._forward(x, cache, places)
            held.update = recorder.update(held.update)
            try:
                return self._forward(x, cache, places)
            finally:
                del held.update

    def _played(
        self,
        x: Tensor,
        places: Tensor,
        caches: Sequence[SpanCache],
        rows: Sequence[int],
        forward: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Do a step, from the record where there is one."""
        if not self._records or not all(cache.length for cache in caches):
            return forward(x, places)
        return self._replay.step(x, places, caches, rows, forward)

    @contextmanager
    def _steadily(self) -> Iterator[None]:
        config: Any = self.shard.model.config
        stock = config._attn_implementation
        ALL_ATTENTION_FUNCTIONS[self._steady_name] = self._attend
        config._attn_implementation = self._steady_name  # no masks are made for an unknown name
        before, self._mode.bits = self._mode.bits, Bits.PROMPT if self._is_chunk else Bits.STEP
        try:
            yield
        finally:
            self._mode.bits = before
            config._attn_implementation = stock
            del ALL_ATTENTION_FUNCTIONS[self._steady_name]  # it would keep the weights

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attend in the place of a function of transformers: query [1, H, T, D] to [1, T, H, E]."""
        strange = {name for name in options.keys() - _KNOWN if options[name] is not None}
        if self._slides and "sliding_window" not in options:
            strange.add("a window")
        if strange or attention_mask is not None:
            wish = ", ".join(sorted(strange)) or "a mask"
            raise NotImplementedError(f"attention with {wish}")
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        window = options.get("sliding_window")
        if self._graph:
            return self._graph.attend(query, key, value, scale, window), None
        if self._is_chunk:
            return attend_chunk(query, key, value, scale, window), None
        with self._replay.paused():
            attended = self._attend_steadily(query, key, value, scale, window)
        if self._replay.recorder:
            self._replay.recorder.attended(query, (key, value), attended, scale, window)
        return attended, None

    def _attend_steadily(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        if self._bundle is None:
            return attend_alone(query, key, value, scale, window)
        queries = torch.split(query, self._bundle.rows, 2)
        attended = [
            attend_alone(own, *seen, scale, window)
            for own, seen in zip(queries, self._bundle.seen, strict=True)
        ]
        return torch.cat(attended, 1)


def may_be_steady(config: Any, whole: nn.Module, device: torch.device) -> bool:
    """Whether rows of a whole model, which may be on meta, could be what they are alone."""
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    return (
        config._attn_implementation in STOCK
        and (device != CPU or whole.dtype == torch.bfloat16)
        and _KINDS.issuperset(kinds)
        and not mixes(whole)
    )


def mixes(model: nn.Module) -> bool:
    """Whether rows share matrices of experts: which ones do is another matter with each text."""
    return any(
        "expert" in name or (parameter.dim() > 2 and min(parameter.shape) > 1)
        for name, parameter in model.named_parameters()
    )


def _groups(parts: Sequence[Tensor]) -> Iterator[slice]:
    """Part what came so that each group has `MOST_ROWS` rows at most, or is one part."""
    at = 0
    while at < len(parts):
        totals = accumulate(part.shape[1] for part in parts[at:])
        stop = at + max(1, sum(total <= MOST_ROWS for total in totals))
        yield slice(at, stop)
        at = stop


def _alone(x: Tensor) -> list[Tensor]:
    """Give each row [1, 1 or 1, D] of ``x`` by itself."""
    return [x[:, at : at + 1] for at in range(x.shape[1])]
