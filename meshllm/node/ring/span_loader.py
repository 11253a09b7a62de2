"""Loads the span of a rank, and keeps what the next plan needs too; runs on the compute thread."""

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from meshllm.errors import MeshError, OutOfMemory
from meshllm.model.device import is_out_of_memory
from meshllm.model.files.source import Source
from meshllm.model.pauses import pause
from meshllm.model.shape import ModelShape, reclaim
from meshllm.model.speculation.draft_model import Draft, ModelDrafting
from meshllm.model.split.meta_model import MetaModel, build
from meshllm.model.split.session_cache import SentRows
from meshllm.model.steps.lm_head import Parts, find_parts, parts_of
from meshllm.model.steps.load import load_shard
from meshllm.model.steps.runner import Runner, SpanRunner
from meshllm.model.steps.trial import CachedTrial
from meshllm.names import Quant, Span
from meshllm.node.options import InferenceConfig
from meshllm.node.session.generation import EntryRunners
from meshllm.protocol.planning.problem import HEADROOM_PERCENT

MAX_PIECES = 3
"""Pieces of a span; each costs a step some dispatch, so a span of more is loaded again as one."""

_HELP_SHARE = 0.5  # of the headroom, at most, for a part of the LM head
_SENT_SHARE = 0.25  # of the headroom, at most, for the rows sent to the next rank

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankPart:
    """What a rank of a plan has to load."""

    span: Span
    is_entry: bool = False
    is_alone: bool = False
    """In a ring of one."""
    is_divided: bool = False
    """The last rank may compute a part of the logits."""
    room: int = 0
    """Bytes for caches, in addition to the layers."""
    has_caches: bool = False
    """Whether KV caches of the layers in force are kept: they move to the new pieces."""


@dataclass(frozen=True, slots=True)
class LoadedSpan:
    """What a node has loaded as a rank of a plan."""

    span: Span
    entry: EntryRunners | None
    """On the entry."""
    runner: SpanRunner | None
    """On every other rank."""
    draft: ModelDrafting | None = None
    """On the entry: the draft model, if there is one."""
    help: Runner | None = None
    """On the last rank: its part of the LM head, if the entry may request logits."""

    @property
    def layers(self) -> SpanRunner:
        """The layers of this rank."""
        runner = self.entry.front if self.entry else self.runner
        assert runner is not None  # a rank is the entry or a stage
        return runner

    @property
    def runners(self) -> list[Runner]:
        """All runners of steps with several rows."""
        return self.entry.runners if self.entry else self.layers.pieces


@dataclass(frozen=True, slots=True)
class _Kept:
    """What was loaded for one plan and serves the next one."""

    pieces: list[Runner] = field(default_factory=list)
    head: Runner | None = None
    helped: Runner | None = None
    draft: ModelDrafting | None = None

    @property
    def runners(self) -> set[Runner]:
        """All runners of loaded layers and heads."""
        return {each for each in (*self.pieces, self.head, self.helped) if each}


class SpanLoader:
    """Loads spans of one model, one at a time."""

    def __init__(  # noqa: PLR0913 -- what all its spans have in common
        self,
        source: Source,
        shape: ModelShape,
        config: InferenceConfig,
        context: int,
        steps: Sequence[int],
        draft: Draft | None,
        warned: set[str] | None = None,
    ) -> None:
        """Load nothing yet; runners run each of ``steps`` rows in one pass.

        Loaders that share ``warned`` warn of each reason for slower steps once.
        """
        self._source = source
        self._shape = shape
        self._config = config
        self._context = context
        self._steps = steps
        self._draft = draft
        self._warned = warned
        self._quant = config.quant or Quant.NONE
        self._device = torch.device(config.device)
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        self._kept = _Kept()
        self._ahead = _Kept()  # for the plan that may follow; some of it is also kept
        self._is_untidy = False  # something that was kept has been released
        self._whole: MetaModel | None = None  # once it was needed
        self._head_parts: list[Parts | None] | None = None  # how the LM head is split, once known

    def load(self, part: RankPart) -> LoadedSpan:
        """Load a part; keep what of it is loaded already, and release the rest before.

        Raises:
            ModelError: the weights are missing or damaged.
            OutOfMemory: they do not fit into free memory.
        """
        with self._reporting_memory(part):
            return self._load(part)

    def load_ahead(self, part: RankPart) -> None:
        """Load a part beside the one in force, with which it shares what is in both.

        A later `load` of the part loads nothing. Anything loaded ahead before is released.

        Raises:
            ModelError: the weights are missing or damaged.
            OutOfMemory: they do not fit into free memory.
        """
        self._keep(self._kept, self._reusable(part))
        self.tidy()
        with self._reporting_memory(part):
            self._ahead, _ = self._completed(part, self._ahead, self._borders)

    def missing_bytes(self, part: RankPart) -> int:
        """Return the bytes of a part that are not loaded yet."""
        kept, shape = self._reusable(part), self._shape
        size = sum(
            sum(shape.layer_bytes[gap.start : gap.stop]) for gap in _gaps(part.span, kept.pieces)
        )
        has_ends = kept.head or any(piece.shard.head for piece in kept.pieces)
        return size + (
            shape.embed_bytes + shape.head_bytes if part.is_entry and not has_ends else 0
        )

    @contextmanager
    def _reporting_memory(self, part: RankPart) -> Iterator[None]:
        try:
            yield
        except (MemoryError, RuntimeError) as error:  # torch raises the latter
            if not is_out_of_memory(error):
                raise
            weights = sum(self._shape.layer_bytes[part.span.start : part.span.stop])
            reason = f": {error}" if str(error) else ""  # Python's own has no text
            raise OutOfMemory(
                f"Not enough memory for layers {part.span} of `{self._shape.name}`{reason}",
                hint="offer less with `--memory`, or free memory",
                needed_bytes=weights,
            ) from error

    def release(self) -> None:
        """Keep nothing but what was loaded ahead."""
        self._keep(_Kept(), self._ahead)

    def release_ahead(self) -> None:
        """Release what was loaded ahead, except what is in force."""
        self._keep(self._kept, _Kept())

    def tidy(self) -> None:
        """Free the memory of what is not kept any more."""
        if self._is_untidy:
            self._is_untidy = False
            reclaim()

    @property
    def runners(self) -> set[Runner]:
        """Runners of what is loaded, but for the last rank's part of the LM head."""
        return self._kept.runners | self._ahead.runners

    def load_partial_head(self, part: RankPart) -> Runner | None:
        """Load the last rank's part of the LM head, if it is split and the headroom suffices.

        The plan does not count it, so it must not use the memory of layers or caches. Without it
        the layers can be served, so an error is a warning.
        """
        try:
            return self._load_help(part)
        except (MeshError, RuntimeError, MemoryError, OSError) as error:
            name = type(error).__name__
            logger.warning(
                "layers %s without a part of the LM head: %s: %s", part.span, name, error
            )
            return None

    def _load(self, part: RankPart) -> LoadedSpan:
        borders = self._borders
        self._keep(self._reusable(part), _Kept())
        self.tidy()  # before more is loaded
        self._kept, loaded = self._completed(part, self._kept, borders)
        return loaded

    def _completed(
        self, part: RankPart, kept: _Kept, borders: Collection[int]
    ) -> tuple[_Kept, LoadedSpan]:
        """Load what of a part is not kept; KV caches of the layers in force end at ``borders``."""
        span, draft = part.span, kept.draft if part.is_entry else None
        if part.is_entry and self._draft and draft is None:
            draft = self._draft.load(self._device)
        is_whole = part.is_alone and not kept.pieces
        gaps: Sequence[Span] = _gaps(span, kept.pieces)
        if part.has_caches and not is_whole:
            gaps = _cut(gaps, borders, MAX_PIECES - len(kept.pieces))
        pieces = self._pieces(gaps, span, kept.pieces, embed=part.is_entry, head=is_whole)
        sends = span.stop < self._shape.layers
        sent = SentRows(int(self._headroom(part) * _SENT_SHARE)) if sends else None
        layers = SpanRunner(pieces, sent)
        if not part.is_entry:
            return _Kept(pieces), LoadedSpan(span, None, layers)
        head, helped = kept.head, kept.helped
        if head is None and not pieces[-1].shard.head:
            theirs, ours = (self._split_head() if part.is_divided else None) or (None, None)
            build = partial(self._build, self._no_layers, head=True, share=pieces[0].shard)
            head, helped = build(outputs=ours), build(outputs=theirs) if theirs else None
        entry = EntryRunners(layers, head, self._context, helped)
        return _Kept(pieces, head, helped, draft), LoadedSpan(span, entry, None, draft)

    @property
    def _borders(self) -> set[int]:
        """The layers at which those in force begin, or after which they end."""
        spans = [piece.span for piece in self._kept.pieces]
        return {each.start for each in spans} ^ {each.stop for each in spans}

    def _reusable(self, part: RankPart) -> _Kept:
        """Return what of the loaded parts the next one needs: the more layers, the better."""
        found = [self._reusable_of(part, each) for each in (self._ahead, self._kept)]
        return max(found, key=lambda each: sum(len(piece.span) for piece in each.pieces))

    def _reusable_of(self, part: RankPart, kept: _Kept) -> _Kept:
        span = part.span
        if not part.is_entry:
            kept = _Kept(kept.pieces)
        keeps_head = part.is_alone or (kept.helped is not None) is self._divides(part)
        head, helped = (kept.head, kept.helped) if keeps_head else (None, None)
        pieces = []
        for piece in kept.pieces:
            shard, own = piece.shard, piece.span
            is_within = span.start <= own.start and own.stop <= span.stop
            has_ends = shard.embed is (part.is_entry and own.start == span.start)
            if is_within and has_ends and (part.is_alone or not shard.head):
                pieces.append(piece)
        if len(_gaps(span, pieces)) + len(pieces) > MAX_PIECES:
            pieces = []
        return _Kept(pieces, head if pieces else None, helped if pieces else None, kept.draft)

    def _divides(self, part: RankPart) -> bool:
        return part.is_entry and part.is_divided and self._split_head() is not None

    def _keep(self, kept: _Kept, ahead: _Kept) -> None:
        before = self.runners
        self._kept, self._ahead = kept, ahead
        self._is_untidy |= self.runners < before

    def _pieces(
        self, gaps: Sequence[Span], span: Span, kept: Sequence[Runner], *, embed: bool, head: bool
    ) -> list[Runner]:
        """Load the layers of a span that are not loaded yet, those in ``gaps``."""
        added = [
            self._build(
                gap, embed=embed and gap.start == span.start, head=head and gap.stop == span.stop
            )
            for gap in gaps
        ]
        return sorted((*kept, *added), key=lambda piece: piece.span.start)

    def _load_help(self, part: RankPart) -> Runner | None:
        shape = self._shape
        if not (parts := parts_of(shape.vocab_size, shape.hidden_size)):
            return None
        size = len(parts[0]) * shape.hidden_size * shape.itemsize
        if size > self._headroom(part) * _HELP_SHARE or not self._split_head():
            return None
        return self._build(self._no_layers, head=True, outputs=parts[0])

    def _headroom(self, part: RankPart) -> int:
        """Return the bytes that the plan leaves free besides the layers and caches of a part."""
        used = sum(self._shape.layer_bytes[part.span.start : part.span.stop]) + max(0, part.room)
        return used * HEADROOM_PERCENT // (100 - HEADROOM_PERCENT)

    def _split_head(self) -> Parts | None:
        """Return how the LM head is split, the same on every node that splits it; None if whole."""
        if self._head_parts is None:
            self._head_parts = [find_parts(self._source, self._shape, self._config.cache)]
        return self._head_parts[0]

    @property
    def _no_layers(self) -> Span:
        return Span(self._shape.layers, self._shape.layers)

    def _build(self, span: Span, *, embed: bool = False, head: bool = False, **more: Any) -> Runner:
        pause()
        cache = self._config.cache
        if self._whole is None:
            self._whole = build(self._source.config, self._dtype)
        shard = load_shard(
            self._source,
            span,
            embed=embed,
            head=head,
            dtype=self._dtype,
            quant=self._quant,
            cache=cache,
            device=self._device,
            exact=not self._steps,
            whole=self._whole,
            **more,
        )
        trial = CachedTrial(cache) if cache else None
        return Runner(shard, self._steps, trial, self._whole.model, self._warned)


def _gaps(span: Span, pieces: Sequence[Runner]) -> list[Span]:
    """Return the parts of a span that no piece holds; an empty span is one itself."""
    gaps, at = list[Span](), span.start
    for piece in sorted(pieces, key=lambda each: each.span.start):
        if at < piece.span.start:
            gaps.append(Span(at, piece.span.start))
        at = piece.span.stop
    return [*gaps, Span(at, span.stop)] if at < span.stop or not pieces else gaps


def _cut(gaps: Sequence[Span], borders: Collection[int], most: int) -> Sequence[Span]:
    """Cut gaps at the borders inside them, unless that makes more than ``most``.

    A piece takes over the KV caches of all of its layers, or none.
    """
    cut = list[Span]()
    for gap in gaps:
        inner = sorted(border for border in borders if gap.start < border < gap.stop)
        cut += [Span(*pair) for pair in pairwise([gap.start, *inner, gap.stop])]
    return cut if len(cut) <= most else gaps
