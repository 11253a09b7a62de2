"""The model of one node: what it holds for the plan in force; knows no links and no requests."""

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshllm.errors import ModelError
from meshllm.model.cache import slack_of
from meshllm.model.capacity import ModelShape, room_for, shape_of
from meshllm.model.check import check
from meshllm.model.device import CPU, choose
from meshllm.model.draft import Drafting, SuffixDrafting
from meshllm.model.draft_model import Draft, ModelDrafting, find_draft
from meshllm.model.head import Parts, find_parts, parts_of
from meshllm.model.runner import Runner
from meshllm.model.shard import Shard
from meshllm.model.source import Source
from meshllm.model.speed import memory_budget, prefix_budget
from meshllm.model.text import Text
from meshllm.model.verdict import Verdict
from meshllm.names import NodeId, Quant, Span, WireMode
from meshllm.node.assembly import CONTEXT
from meshllm.node.outgoing import settle
from meshllm.node.session import Ends as HeldEnds
from meshllm.node.worker import Worker
from meshllm.protocol.chunking import RingTimes, usual_pace
from meshllm.protocol.codec import MAX_POSITION, MAX_ROWS
from meshllm.protocol.lookahead import STEPS
from meshllm.protocol.pace import Pace
from meshllm.protocol.plan import Ends, Plan
from meshllm.protocol.stage import MAX_PENDING
from meshllm.transport.contract import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

_HEADER_BYTES = 256  # more than a message has beside its rows, sealed
_WIDEST = 4  # bytes of an element on the wire
_HELP_SHARE = 0.25  # of what is free beside the layers, at most, for a part of the head


@dataclass(frozen=True, slots=True)
class Held:
    """What a node holds as a rank of a plan."""

    span: Span
    ends: HeldEnds | None
    """On the entry."""
    runner: Runner | None
    """On every other rank."""
    draft: ModelDrafting | None = None
    """On the entry, where a model guesses."""
    help: Runner | None = None
    """On the last rank: its part of the head, where the entry may ask for it."""

    @property
    def runners(self) -> list[Runner]:
        """Whatever runs steps of several rows."""
        return self.ends.runners if self.ends else [self.runner] if self.runner else []


@dataclass(frozen=True, slots=True)
class Decoding:
    """How a model is held and run."""

    quant: Quant = Quant.NONE
    cache: Path | None = None
    """Folder in which quantised matrices are kept."""
    exact: bool = False
    """Compute each token as transformers does."""
    speculation: bool = True
    """Guess at tokens, where that is allowed."""
    wire: WireMode = WireMode.EXACT
    """How hidden states leave for the next rank."""
    draft: Source | None = None
    """A model that guesses too, held as stored."""
    prefix_bytes: int | None = None
    """For what finished sessions leave; None is a share of what is free."""
    device: str = "cpu"
    """Where layers are computed, as `model.device.choose` reads it."""
    memory_bytes: int | None = None
    """For weights and states; None is what is free."""


class Engine:
    """Loads spans of one model, one at a time, on the compute thread."""

    def __init__(
        self,
        source: Source,
        worker: Worker,
        shape: ModelShape,
        verdict: Verdict,
        decoding: Decoding = Decoding(),
        draft: Draft | None = None,
    ) -> None:
        """Hold nothing yet."""
        self.source = source
        self.worker = worker
        self.shape = shape
        self.verdict = verdict
        self.quant = decoding.quant
        self.device = torch.device(decoding.device)
        self.wire = decoding.wire
        self.slack = slack_of(source.config, shape.layers) if verdict.croppable else 0
        """How many tokens caches can go back; None is any number."""
        self._exact, self._prefix_bytes = decoding.exact, decoding.prefix_bytes
        self._memory_bytes = decoding.memory_bytes
        self._steps = STEPS if verdict.croppable and not decoding.exact else ()
        guesses = self._steps and decoding.speculation
        self.drafting: Drafting | None = SuffixDrafting() if guesses else None
        """Who guesses at tokens; None is nobody."""
        self.draft = draft
        """Who guesses too when this node is the entry."""
        self._cache = decoding.cache
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        self._held: Held | None = None
        self._tried: list[Parts | None] | None = None  # how the head is divided, once it is known
        self._text: Text | None = None

    @classmethod
    async def open(
        cls,
        source: Source,
        worker: Worker,
        dtype: torch.dtype | None,
        decoding: Decoding = Decoding(),
    ) -> "Engine":
        """Look at a model; nothing of it is loaded yet.

        Raises:
            ModelError: it cannot be run, or not on that device, or the draft cannot guess for it.
            UserError: there is no such device.
        """
        verdict = await worker.run(check, source.config)
        verdict.require(1)
        shape = await worker.run(shape_of, source, dtype, decoding.quant)
        kind: torch.dtype = getattr(torch, shape.dtype)
        device = await worker.run(choose, decoding.device, kind, decoding.quant)
        draft = None
        if decoding.draft:
            draft = await worker.run(find_draft, decoding.draft, source)
        wire = await worker.run(settle, decoding.wire, source.config, kind)
        decoding = replace(decoding, wire=wire, device=str(device))
        return cls(source, worker, shape, verdict, decoding, draft)

    def pace(self, ring: int, prompt: int, others: int, times: RingTimes | None) -> Pace:
        """Choose how a prompt is fed to a ring beside so many others, by its times where known."""
        if self._exact or not self.verdict.chunkable:  # transformers takes a prompt whole
            return Pace(chunk=self._most_rows, window=min(ring, MAX_PENDING))
        if times is None:
            return usual_pace(prompt, ring, self._most_rows)
        return times.best_pace(prompt, others, self._most_rows)

    @property
    def context(self) -> int:
        """Count the tokens that a session may have."""
        context = self.shape.context or MAX_POSITION
        # A model that takes no chunks gets its prompt in one message, which has a limit.
        return context if self.verdict.chunkable else min(context, self._most_rows)

    async def text(self) -> Text:
        """Return the tokenizer and chat template; raise `ModelError` where there is none."""
        if self._text is None:  # reading it takes long, once
            self._text = await self.worker.run(Text.load, self.source.folder)
        return self._text

    async def hold(self, plan: Plan, me: NodeId) -> Held:
        """Load what the plan gives this node; what it held before is let go first.

        Raises:
            ModelError: the weights are not here, or damaged.
        """
        rank = plan.rank(me)
        assert rank is not None  # the caller asks for its own place
        self.verdict.require(len(plan.stages))
        if plan.ends is not Ends.ENTRY:
            raise ModelError("A mesh keeps the ends on the entry")
        span, alone = plan.stages[rank].span, len(plan.stages) == 1
        held = self._held
        if not (held and held.span == span and self._fits(held, rank, alone)):
            self._held = held = None
            self._held = held = await self.worker.run(self._load, span, rank == 0, alone)
        if 0 < rank == len(plan.stages) - 1 and held.help is None:
            part = await self.worker.run(self._help_beside, span)
            self._held = held = replace(held, help=part) if part else held
        return held

    def room(self, span: Span) -> int:
        """Count the tokens of finished sessions for which there is room beside a span."""
        if self._exact or not self.verdict.chunkable:
            return 0
        return room_for(self.shape, span, prefix_budget(self._prefix_bytes, self.device))

    def release(self) -> None:
        """Let go of what is held."""
        self._held = None

    @property
    def _most_rows(self) -> int:
        row = self.shape.hidden_size * _WIDEST
        return min(MAX_ROWS, (MAX_MESSAGE_BYTES - _HEADER_BYTES) // row)

    @staticmethod
    def _fits(held: Held, rank: int, alone: bool) -> bool:
        if rank > 0:
            return held.runner is not None
        return held.ends is not None and (held.ends.head is None) is alone

    def _load(self, span: Span, is_entry: bool, alone: bool) -> Held:
        if not is_entry:
            return Held(span, None, self._run(span))
        draft = self.draft.load(self.device) if self.draft else None
        front = self._run(span, embed=True, head=alone)
        if alone:
            return Held(span, HeldEnds(front, None, self.context), None, draft)
        theirs, ours = self._parts() or (None, None)
        run = partial(self._run, self._end, head=True, share=front.shard)
        head, helped = run(outputs=ours), run(outputs=theirs) if theirs else None
        return Held(span, HeldEnds(front, head, self.context, helped), None, draft)

    def _help_beside(self, span: Span) -> Runner | None:
        try:
            return self._load_help(span)
        except Exception as error:  # it only helps; whatever is wrong, the layers can be served
            name = type(error).__name__
            logger.warning("no part of the head beside layers %s: %s: %s", span, name, error)
            return None

    def _load_help(self, span: Span) -> Runner | None:
        """Load the last rank's part of the head, where there is one, and room for it."""
        shape, here = self.shape, slice(span.start, span.stop)
        if not (parts := parts_of(shape.vocab_size, shape.hidden_size)):
            return None
        size = len(parts[0]) * shape.hidden_size * shape.itemsize
        room = memory_budget(share=_HELP_SHARE)
        if self._memory_bytes is not None:
            states = sum(shape.kv_bytes_per_token[here]) * min(self.context, CONTEXT)
            room = min(room, self._memory_bytes - sum(shape.layer_bytes[here]) - states)
        if size > room or not self._parts():
            return None
        return self._run(self._end, head=True, outputs=parts[0])

    def _parts(self) -> Parts | None:
        """Say how the head is divided; the same on every node that does not leave it whole."""
        if self._tried is None:
            is_fit = self._steps and self.device == CPU
            self._tried = [find_parts(self.source, self.shape) if is_fit else None]
        return self._tried[0]

    @property
    def _end(self) -> Span:
        return Span(self.shape.layers, self.shape.layers)

    def _run(self, span: Span, *, embed: bool = False, head: bool = False, **more: Any) -> Runner:
        shard = Shard.load(
            self.source,
            span,
            embed=embed,
            head=head,
            dtype=self._dtype,
            quant=self.quant,
            cache=self._cache,
            device=self.device,
            **more,
        )
        return Runner(shard, self._steps)
