"""The model on one node: loads the span of the plan in force, and configures how it runs."""

import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Self

import torch

from meshllm.errors import OutOfMemory
from meshllm.model.capacity import shape_of
from meshllm.model.device import CPU, choose, free_bytes, refused_gpu
from meshllm.model.files.source import Source
from meshllm.model.parity.check import check
from meshllm.model.parity.verdict import Verdict
from meshllm.model.shape import ModelShape, cache_cost, free_memory, rows_for
from meshllm.model.speculation.draft_model import Draft, find_draft
from meshllm.model.speculation.prompt_lookup import SuffixDrafting
from meshllm.model.split.kv_cache import max_crop_of
from meshllm.model.steps.runner import Runner
from meshllm.model.text.tokenizer import Text
from meshllm.model.training.frozen_span import FrozenSpan
from meshllm.names import NodeId, Quant, Span
from meshllm.node.compute.worker import Worker, calibrate
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.span_loader import LoadedSpan, RankPart, SpanLoader
from meshllm.node.session.activation_codec import resolve_wire_mode
from meshllm.protocol.drafting.drafter import Drafting
from meshllm.protocol.drafting.window import STEPS
from meshllm.protocol.kv_cache.budget import KvBudget, KvCapacity
from meshllm.protocol.planning.chunking import RingTimes, default_pace
from meshllm.protocol.planning.plan import Ends, Plan
from meshllm.protocol.ring.hang import result_limit_s
from meshllm.protocol.session.codec import MAX_POSITION, MAX_ROWS
from meshllm.protocol.session.pace import PrefillPacing
from meshllm.protocol.session.stage import MAX_PATIENCE_S, MAX_PENDING
from meshllm.protocol.weights.holders import needed_parts
from meshllm.transport.contract import MAX_MESSAGE_BYTES

DEFAULTS = InferenceConfig()

logger = logging.getLogger(__name__)

PRELOAD_IDLE_S = 1.0  # s without other computation before layers are loaded in advance

_HEADER_BYTES = 256  # upper bound of a sealed message without its rows
_WIDEST = 4  # bytes of the widest element on the wire


class ModelRuntime:
    """Loads spans of one model, one at a time, on the compute thread."""

    def __init__(
        self,
        source: Source,
        worker: Worker,
        shape: ModelShape,
        verdict: Verdict,
        config: InferenceConfig = DEFAULTS,
        draft: Draft | None = None,
    ) -> None:
        """Load nothing yet."""
        self.source = source
        self.worker = worker
        self.shape = shape
        self.verdict = verdict
        self.config = config
        self.quant = config.quant or Quant.NONE
        self.device = torch.device(config.device)
        self.refused_gpu = ""
        """Why the CPU is used though there is a GPU; empty if it is not."""
        self.wire = config.wire
        self.max_crop = max_crop_of(source.config, shape.layers) if verdict.croppable else 0
        """Maximum tokens by which a KV cache can be cropped; None is unlimited."""
        self._steps = STEPS if verdict.croppable and not config.exact else ()
        drafts = self._steps and config.speculation
        self.drafting: Drafting | None = config.drafting or SuffixDrafting() if drafts else None
        """Drafter for speculative decoding; None disables it."""
        self.draft = draft
        """Draft model, used when this node is the entry."""
        self.obtain: Callable[[Collection[int]], Awaitable[None]] | None = None
        """Fetches parts whose weights are not on this machine; None if all are."""
        self.divides_head = bool(self._steps) and self.device == CPU
        """Whether the last rank may compute a part of the logits."""
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        self._held: LoadedSpan | None = None
        self._warned = set[str]()  # of which slower steps, by all ranks of this process
        self._loader = self._new_loader()
        self._text: Text | None = None

    @classmethod
    async def open(
        cls,
        source: Source,
        worker: Worker,
        config: InferenceConfig = DEFAULTS,
        draft: Source | None = None,
        *,
        is_whole: bool = False,
    ) -> "ModelRuntime":
        """Inspect a model, and its draft model; load no weights yet.

        ``is_whole`` says that it will not be split.

        Raises:
            ModelError: it cannot run, or not on that device, or its draft model does not match.
            UserError: no such device.
        """
        verdict = await worker.run(check, source.config, is_whole=is_whole)
        verdict.require(1)
        dtype: torch.dtype | None = getattr(torch, config.dtype) if config.dtype else None
        quant = config.quant or Quant.NONE
        shape = await worker.run(shape_of, source, dtype, quant, config.cache)
        kind: torch.dtype = getattr(torch, shape.dtype)
        device = await worker.run(choose, config.device, kind, quant)
        refusal = await worker.run(refused_gpu, config.device, kind, quant)
        if refusal:
            logger.warning("computing on the CPU: %s", refusal)
        drafts = await worker.run(find_draft, draft, source) if draft else None
        wire = await worker.run(resolve_wire_mode, config.wire, source.config, kind)
        config = replace(config, wire=wire, device=str(device))
        runtime = cls(source, worker, shape, verdict, config, drafts)
        runtime.refused_gpu = refusal
        return runtime

    def rank(self, worker: Worker, *, divides_head: bool, **changes: Any) -> Self:
        """Return a runtime of the same model for another rank in this process."""
        other = copy(self)
        other.worker, other.config, other._held = worker, replace(self.config, **changes), None
        other._loader = other._new_loader()
        other.divides_head = self.divides_head and divides_head
        return other

    async def calibrate(self) -> None:
        """Choose the number of threads by measurement, unless one is configured."""
        if self.config.threads is None and self.device == CPU:
            await self.worker.run(calibrate, self.worker.cores, self.shape.hidden_size, self._dtype)

    def pace(self, ring: int, prompt: int, others: int, times: RingTimes | None) -> PrefillPacing:
        """Return the prefill pace beside ``others`` sessions, by the ring's times if known."""
        pace = self._chunks(ring, prompt, others, times)
        if times is None:
            return pace
        jobs = pace.window * (1 + others)
        limit_s = result_limit_s(times, pace.chunk, self.context, jobs)
        return replace(pace, patience_s=min(limit_s, MAX_PATIENCE_S))

    def _chunks(
        self, ring: int, prompt: int, others: int, times: RingTimes | None
    ) -> PrefillPacing:
        chunk = self.config.chunk
        if self.config.exact or not self.verdict.chunkable:  # transformers takes a prompt whole
            chunk = chunk if self.verdict.chunkable and chunk else self.max_rows
        if chunk is not None:
            return PrefillPacing(min(chunk, self.max_rows), window=min(ring, MAX_PENDING))
        if times is None:
            return default_pace(prompt, ring, self.max_rows)
        return times.best_pace(prompt, others, self.max_rows)

    @property
    def context(self) -> int:
        """Maximum tokens of a session."""
        context = self.shape.context or MAX_POSITION
        # Without chunked prefill a prompt travels in one message, which has a limit.
        return context if self.verdict.chunkable else min(context, self.max_rows)

    def load_frozen(self, span: Span) -> FrozenSpan:
        """Load layers for training, beside those that serve; runs on the compute thread.

        Raises:
            ModelError: the weights are missing or damaged.
        """
        return FrozenSpan(self.source, span, self.device)

    async def text(self) -> Text:
        """Return the tokenizer and chat template; raise `ModelError` if there is none."""
        if self._text is None:  # slow to read
            self._text = await self.worker.run(Text.load, self.source.folder)
        return self._text

    async def hold(
        self, plan: Plan, me: NodeId, room: int = 0, *, has_caches: bool = False
    ) -> LoadedSpan:
        """Load this node's span of the plan, unless it is loaded; release another one first.

        This node has ``room`` bytes for caches in addition to its layers; ``has_caches`` if some
        are kept, for layers of the last plan.

        Raises:
            ModelError: the weights are missing or damaged.
            OutOfMemory: they do not fit into free memory.
        """
        part, held = self._part(plan, me, room, has_caches=has_caches), self._held
        if not (held and _is_met(part, held)):
            if self.obtain is not None:
                await self.obtain(needed_parts(plan, me))
            self._held = held = None
            self._held = held = await self.worker.run(self._loader.load, part)
        else:
            await self.release_ahead()
        helps = part.is_divided and not part.is_entry and plan.stages[-1].node == me
        if helps and held.help is None:
            help_ = await self.worker.run(self._loader.load_partial_head, part)
            self._held = held = replace(held, help=help_) if help_ else held
        elif held.help is not None and not helps:
            self._held = held = replace(held, help=None)
        return held

    async def preload(
        self,
        plan: Plan,
        me: NodeId,
        lend: Callable[[int], bool],
        *,
        is_urgent: bool,
        has_caches: bool,
    ) -> None:
        """Load this node's span of a plan that may follow, beside what it holds.

        A later `hold` uses what of it the plan in force needs. Unless it ``is_urgent``, the compute
        thread loads once it is idle. ``lend`` returns whether this many bytes may be used.

        Raises:
            ModelError: the weights are missing or damaged.
            OutOfMemory: they do not fit into memory that is free.
        """
        part, worker = self._part(plan, me, 0, has_caches=has_caches), self.worker
        if self.obtain is not None:
            await self.obtain(needed_parts(plan, me))
        needed = await worker.run(self._loader.missing_bytes, part)
        free = free_memory() if self.device == CPU else free_bytes(self.device)
        if needed > free or not lend(needed):
            raise OutOfMemory(f"{needed} bytes are needed, {free} are free", needed_bytes=needed)
        if is_urgent:
            await worker.run(self._loader.load_ahead, part)
        else:
            await worker.run_when_idle(PRELOAD_IDLE_S, self._loader.load_ahead, part)
            worker.reclaim_later()

    async def release_ahead(self) -> None:
        """Release what was loaded for a plan that may follow."""
        await self.worker.run(self._loader.release_ahead)

    def _part(self, plan: Plan, me: NodeId, room: int, *, has_caches: bool) -> RankPart:
        """Return what a node loads for a plan of which it is a rank."""
        rank = plan.rank(me)
        assert rank is not None  # the caller is in the plan
        self.verdict.require(len(plan.stages))
        is_divided = self.divides_head and plan.ends is Ends.ENTRY  # a client hides its tokens
        span, is_alone = plan.stages[rank].span, len(plan.stages) == 1
        return RankPart(span, rank == 0, is_alone, is_divided, room, has_caches)

    @property
    def prefix_bytes(self) -> int | None:
        """Bytes for the prefix cache; None is what sessions leave of the budget."""
        return self.config.prefix_bytes if self.resumes else 0

    @property
    def resumes(self) -> bool:
        """Whether a session may continue from cached positions."""
        return not self.config.exact and self.verdict.chunkable

    def budget(self, plan: Plan, rooms: Sequence[int]) -> KvBudget:
        """Return the KV budget of the ranks of a plan with this many bytes for caches each.

        Where weights take more than there is, no bytes are left for caches.
        """
        pairs = zip(plan.stages, rooms, strict=True)
        return KvBudget(
            [
                KvCapacity(max(0, total), cache_cost(self.shape, stage.span))
                for stage, total in pairs
            ]
        )

    @property
    def hidden_row_bytes(self) -> int:
        """Bytes of a hidden state between two layers, at most."""
        return self.shape.hidden_size * _WIDEST

    def hidden_bytes(self, positions: int) -> int:
        """Return what hidden states of this many positions take, at most."""
        return rows_for(positions) * self.hidden_row_bytes

    def kv_row_bytes(self, layer: int) -> int:
        """Return the bytes of a position in the KV cache of a layer."""
        return self.shape.kv_bytes_per_token[layer]

    def kv_bytes(self, layer: int, positions: int) -> int:
        """Return what the KV cache of a layer takes for a session of this many positions."""
        return cache_cost(self.shape, Span(layer, layer + 1))(positions)[0]

    def unload(self) -> None:
        """Release the loaded span; what was loaded for a plan that may follow stays."""
        self._held = None
        self._loader.release()

    def release(self) -> None:
        """Release all that is loaded."""
        self.unload()
        self._loader.release_ahead()

    async def unload_late(self) -> None:
        """Release what a load has brought that could not be stopped, and free its memory."""
        await self.worker.run(self._loader.release)
        await self.tidy()

    async def tidy(self) -> None:
        """Free the memory of what was released, once nothing uses it."""
        await self.worker.run(self._loader.tidy)

    @property
    def runners(self) -> set[Runner]:
        """Runners of all that is loaded, in advance too."""
        return self._loader.runners

    def _new_loader(self) -> SpanLoader:
        return SpanLoader(
            self.source,
            self.shape,
            self.config,
            self.context,
            self._steps,
            self.draft,
            self._warned,
        )

    @property
    def max_rows(self) -> int:
        """Maximum rows of a message."""
        row = self.shape.hidden_size * _WIDEST
        return min(MAX_ROWS, (MAX_MESSAGE_BYTES - _HEADER_BYTES) // row)


def _is_met(part: RankPart, held: LoadedSpan) -> bool:
    """Return whether all that a part has to load is loaded."""
    if held.span != part.span or (held.entry is not None) is not part.is_entry:
        return False
    return held.entry is None or part.is_alone or held.entry.head is not None
