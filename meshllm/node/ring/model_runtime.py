"""The model on one node: loads the span of the plan in force, and configures how it runs."""

import logging
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch

from meshllm.errors import MeshError, OutOfMemory
from meshllm.model.capacity import shape_of
from meshllm.model.device import CPU, choose
from meshllm.model.files.source import Source
from meshllm.model.parity.check import check
from meshllm.model.parity.verdict import Verdict
from meshllm.model.shape import ModelShape
from meshllm.model.speculation.draft_model import Draft, ModelDrafting, find_draft
from meshllm.model.speculation.prompt_lookup import SuffixDrafting
from meshllm.model.split.kv_cache import slack_of
from meshllm.model.steps.lm_head import Parts, find_parts, parts_of
from meshllm.model.steps.load import load_shard
from meshllm.model.steps.runner import Runner
from meshllm.model.steps.trial import CachedTrial
from meshllm.model.text.tokenizer import Text
from meshllm.names import NodeId, Quant, Span
from meshllm.node.compute.worker import Worker, calibrate
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.kv_rooms import budget_for
from meshllm.node.session.activation_codec import resolve_wire_mode
from meshllm.node.session.generation import EntryRunners
from meshllm.node.session.wire import is_out_of_memory
from meshllm.protocol.drafting.drafter import Drafting
from meshllm.protocol.drafting.window import STEPS
from meshllm.protocol.kv_cache.budget import KvBudget
from meshllm.protocol.planning.chunking import RingTimes, usual_pace
from meshllm.protocol.planning.plan import Ends, Plan
from meshllm.protocol.planning.problem import HEADROOM_PERCENT
from meshllm.protocol.session.codec import MAX_POSITION, MAX_ROWS
from meshllm.protocol.session.pace import Pace
from meshllm.protocol.session.stage import MAX_PENDING
from meshllm.transport.contract import MAX_MESSAGE_BYTES

DEFAULTS = InferenceConfig()

logger = logging.getLogger(__name__)

_HEADER_BYTES = 256  # upper bound of a sealed message without its rows
_WIDEST = 4  # bytes of the widest element on the wire
_HELP_SHARE = 0.5  # of the headroom, at most, for a part of the LM head


@dataclass(frozen=True, slots=True)
class LoadedSpan:
    """What a node has loaded as a rank of a plan."""

    span: Span
    ends: EntryRunners | None
    """On the entry."""
    runner: Runner | None
    """On every other rank."""
    draft: ModelDrafting | None = None
    """On the entry: the draft model, if there is one."""
    help: Runner | None = None
    """On the last rank: its part of the LM head, if the entry may request logits."""

    @property
    def runners(self) -> list[Runner]:
        """All runners of steps with several rows."""
        return self.ends.runners if self.ends else [self.runner] if self.runner else []


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
        self.wire = config.wire
        self.slack = slack_of(source.config, shape.layers) if verdict.croppable else 0
        """Most tokens by which a KV cache can be cropped; None is unlimited."""
        self._steps = STEPS if verdict.croppable and not config.exact else ()
        drafts = self._steps and config.speculation
        self.drafting: Drafting | None = config.drafting or SuffixDrafting() if drafts else None
        """Drafter for speculative decoding; None disables it."""
        self.draft = draft
        """Draft model, used when this node is the entry."""
        self.divides_head = bool(self._steps) and self.device == CPU
        """Whether the last rank may compute a part of the logits."""
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        self._held: LoadedSpan | None = None
        self._head_parts: list[Parts | None] | None = None  # how the LM head is split, once known
        self._text: Text | None = None

    @classmethod
    async def open(
        cls,
        source: Source,
        worker: Worker,
        config: InferenceConfig = DEFAULTS,
        draft: Source | None = None,
    ) -> "ModelRuntime":
        """Inspect a model, and its draft model; load no weights yet.

        Raises:
            ModelError: it cannot run, or not on that device, or its draft model does not match.
            UserError: no such device.
        """
        verdict = await worker.run(check, source.config)
        verdict.require(1)
        dtype: torch.dtype | None = getattr(torch, config.dtype) if config.dtype else None
        quant = config.quant or Quant.NONE
        shape = await worker.run(shape_of, source, dtype, quant, config.cache)
        kind: torch.dtype = getattr(torch, shape.dtype)
        device = await worker.run(choose, config.device, kind, quant)
        drafts = await worker.run(find_draft, draft, source) if draft else None
        wire = await worker.run(resolve_wire_mode, config.wire, source.config, kind)
        config = replace(config, wire=wire, device=str(device))
        return cls(source, worker, shape, verdict, config, drafts)

    def rank(self, worker: Worker, *, divides_head: bool, **changes: Any) -> Self:
        """Return a runtime of the same model for another rank in this process."""
        other = copy(self)
        other.worker, other.config, other._held = worker, replace(self.config, **changes), None
        other.divides_head = self.divides_head and divides_head
        return other

    async def calibrate(self) -> None:
        """Measure which number of threads is fastest, unless one is configured."""
        if self.config.threads is None and self.device == CPU:
            await self.worker.run(calibrate, self.worker.cores, self.shape.hidden_size, self._dtype)

    def pace(self, ring: int, prompt: int, others: int, times: RingTimes | None) -> Pace:
        """Return the prefill pace beside ``others`` sessions, by the ring's times if known."""
        chunk = self.config.chunk
        if self.config.exact or not self.verdict.chunkable:  # transformers takes a prompt whole
            chunk = chunk if self.verdict.chunkable and chunk else self._max_rows
        if chunk is not None:
            return Pace(min(chunk, self._max_rows), window=min(ring, MAX_PENDING))
        if times is None:
            return usual_pace(prompt, ring, self._max_rows)
        return times.best_pace(prompt, others, self._max_rows)

    @property
    def context(self) -> int:
        """Most tokens of a session."""
        context = self.shape.context or MAX_POSITION
        # Without chunked prefill a prompt travels in one message, which has a limit.
        return context if self.verdict.chunkable else min(context, self._max_rows)

    async def text(self) -> Text:
        """Return the tokenizer and chat template; raise `ModelError` if there is none."""
        if self._text is None:  # slow to read
            self._text = await self.worker.run(Text.load, self.source.folder)
        return self._text

    async def hold(self, plan: Plan, me: NodeId, room: int = 0) -> LoadedSpan:
        """Load this node's span of the plan, unless it is loaded; release another one first.

        This node has ``room`` bytes for caches in addition to its layers.

        Raises:
            ModelError: the weights are missing or damaged.
            OutOfMemory: they do not fit into free memory.
        """
        rank = plan.rank(me)
        assert rank is not None  # the caller is in the plan
        self.verdict.require(len(plan.stages))
        span, alone = plan.stages[rank].span, len(plan.stages) == 1
        is_divided = self.divides_head and plan.ends is Ends.ENTRY  # a client hides its tokens
        held = self._held
        if not (held and held.span == span and self._matches(held, rank, alone)):
            self._held = held = None
            self._held = held = await self.worker.run(
                self._load_or_raise, span, rank == 0, alone, is_divided
            )
        if is_divided and 0 < rank == len(plan.stages) - 1 and held.help is None:
            part = await self.worker.run(self._try_load_help, span, room)
            self._held = held = replace(held, help=part) if part else held
        return held

    @property
    def prefix_bytes(self) -> int | None:
        """Bytes for the prefix cache; None is what sessions leave of the budget."""
        is_kept = not self.config.exact and self.verdict.chunkable
        return self.config.prefix_bytes if is_kept else 0

    def budget(self, plan: Plan, rooms: Sequence[int]) -> KvBudget:
        """Return the KV budget of the ranks of a plan."""
        return budget_for(self.shape, [stage.span for stage in plan.stages], rooms)

    def release(self) -> None:
        """Release the loaded span."""
        self._held = None

    @property
    def _max_rows(self) -> int:
        row = self.shape.hidden_size * _WIDEST
        return min(MAX_ROWS, (MAX_MESSAGE_BYTES - _HEADER_BYTES) // row)

    @staticmethod
    def _matches(held: LoadedSpan, rank: int, alone: bool) -> bool:
        if rank > 0:
            return held.runner is not None
        return held.ends is not None and (held.ends.head is None) is alone

    def _load_or_raise(self, span: Span, *what: bool) -> LoadedSpan:
        """Load; raise `OutOfMemory` if an allocation fails."""
        try:
            return self._load(span, *what)
        except (MemoryError, RuntimeError) as error:  # torch raises the latter
            if not is_out_of_memory(error):
                raise
            weights = sum(self.shape.layer_bytes[span.start : span.stop])
            raise OutOfMemory(
                f"Not enough memory for layers {span} of `{self.shape.name}`: {error}",
                hint="offer less with `--memory`, or free memory",
                needed_bytes=weights,
            ) from error

    def _load(self, span: Span, is_entry: bool, alone: bool, is_divided: bool) -> LoadedSpan:
        if not is_entry:
            return LoadedSpan(span, None, self._build(span))
        draft = self.draft.load(self.device) if self.draft else None
        front = self._build(span, embed=True, head=alone)
        if alone:
            return LoadedSpan(span, EntryRunners(front, None, self.context), None, draft)
        theirs, ours = (is_divided and self._split_head()) or (None, None)
        build = partial(self._build, self._empty_span, head=True, share=front.shard)
        head, helped = build(outputs=ours), build(outputs=theirs) if theirs else None
        return LoadedSpan(span, EntryRunners(front, head, self.context, helped), None, draft)

    def _try_load_help(self, span: Span, room: int) -> Runner | None:
        try:
            return self._load_help(span, room)
        except (MeshError, RuntimeError, MemoryError, OSError) as error:  # the layers can be served
            name = type(error).__name__
            logger.warning("layers %s without a part of the LM head: %s: %s", span, name, error)
            return None

    def _load_help(self, span: Span, room: int) -> Runner | None:
        """Load the last rank's part of the LM head, if it is split and the headroom suffices.

        The plan does not count it, so it must not use the memory of layers or caches.
        """
        shape = self.shape
        if not (parts := parts_of(shape.vocab_size, shape.hidden_size)):
            return None
        size = len(parts[0]) * shape.hidden_size * shape.itemsize
        used = sum(shape.layer_bytes[span.start : span.stop]) + max(0, room)
        headroom = used * HEADROOM_PERCENT // (100 - HEADROOM_PERCENT)
        if size > headroom * _HELP_SHARE or not self._split_head():
            return None
        return self._build(self._empty_span, head=True, outputs=parts[0])

    def _split_head(self) -> Parts | None:
        """Return how the LM head is split, the same on every node that splits it; None if whole."""
        if self._head_parts is None:
            self._head_parts = [find_parts(self.source, self.shape)]
        return self._head_parts[0]

    @property
    def _empty_span(self) -> Span:
        return Span(self.shape.layers, self.shape.layers)

    def _build(self, span: Span, *, embed: bool = False, head: bool = False, **more: Any) -> Runner:
        shard = load_shard(
            self.source,
            span,
            embed=embed,
            head=head,
            dtype=self._dtype,
            quant=self.quant,
            cache=self.config.cache,
            device=self.device,
            **more,
        )
        cache = self.config.cache
        return Runner(shard, self._steps, CachedTrial(cache) if cache else None)
