"""A draft model for speculative decoding: a small model proposes tokens for a large one.

Theory of operation: the draft model decodes greedily (Leviathan et al., 2023; the ring verifies by
plain equality, so a draft token enters the text only if the large model chooses it too). Its KV
cache holds the text and, after it, the draft tokens. Accepted ones are in the cache already at the
next draft; the cache is cropped to the first rejected one, and only new tokens are read. A long
text, such as a prompt, is prefilled in chunks, one per call, so that nothing waits long for it;
until it is up to date there is no draft. The cache of the last finished text is kept for a text
of the same scope with the same prefix: the next turn of a conversation. All caches together take
about as much memory as the weights; a text that finds no room goes on without drafts.

Both models need the same vocabulary. The number of rows of their embeddings does not matter:
families pad them differently.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from weakref import WeakSet

import torch

from meshllm.errors import ModelError
from meshllm.model.capacity import shape_of
from meshllm.model.device import CPU
from meshllm.model.files.source import Source
from meshllm.model.modules.linear_bf16 import MAX_ROWS
from meshllm.model.parity.check import check
from meshllm.model.shape import ModelShape
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.steps.execution import Execution
from meshllm.model.steps.load import load_shard
from meshllm.model.steps.runner import Runner
from meshllm.model.text.tokenizer import Text
from meshllm.names import Span

CHUNK = 128  # tokens of a prefill chunk; other work waits for it
STRIDE = 32  # tokens that take about the time of one: the weights are read once
MIN_CACHED = 4096  # tokens of all caches, if the weights take less than these
LEAST = 0.2  # probability that the whole draft is accepted; below it one more token costs too much
LEVELS = (0.4, 0.6, 0.75)
"""Probabilities of the next draft token at which confidence rises: between the acceptance rates
that `meshllm.protocol.drafting.window` expects at each confidence."""

_HINT = "choose a smaller model of the same family, or leave out `--draft`"


@dataclass(frozen=True, slots=True)
class Draft:
    """A model that can draft for another one; not loaded yet."""

    source: Source
    shape: ModelShape
    vocabulary: int
    """Draft tokens are below this one: both models have them."""

    @property
    def bytes(self) -> int:
        """The memory of its weights, and of its KV caches at most."""
        return self.weight_bytes + self.most_cached * self.token_bytes

    @property
    def weight_bytes(self) -> int:
        """The memory of its weights."""
        return self.shape.embed_bytes + sum(self.shape.layer_bytes) + self.shape.head_bytes

    @property
    def token_bytes(self) -> int:
        """The memory of a token in a KV cache."""
        return sum(self.shape.kv_bytes_per_token)

    @property
    def most_cached(self) -> int:
        """Maximum tokens of all KV caches."""
        return max(MIN_CACHED, self.weight_bytes // max(1, self.token_bytes))

    def load(self, device: torch.device = CPU) -> "ModelDrafting":
        """Load the whole model in its stored dtype.

        Raises:
            ModelError: the weights are missing or damaged.
        """
        return ModelDrafting(self, device)


def find_draft(source: Source, target: Source) -> Draft:
    """Check that a model can draft for ``target``.

    Raises:
        ModelError: it cannot be run, a cache cannot be cropped, or the vocabularies differ.
    """
    for each in (source, target):
        verdict = check(each.config)
        verdict.require(1)
        if not (verdict.croppable and verdict.chunkable):
            raise ModelError(
                f"`{source.name}` cannot draft for `{target.name}`:"
                f" the cache of a `{verdict.model_type}` cannot be cropped",
                hint="choose a model with attention in all layers, or leave out `--draft`",
            )
    sizes = [each.config.get_text_config(decoder=True).vocab_size for each in (source, target)]
    _check_vocabularies(source, target, sizes)
    return Draft(source, shape_of(source), min(sizes))


class ModelDrafting:
    """A loaded draft model; used on one thread."""

    def __init__(self, draft: Draft, device: torch.device) -> None:
        self.context = draft.shape.context
        self._draft = draft
        self._cached = 0  # tokens of all caches, when the last text was read
        self._drafters: WeakSet[ModelDrafter] = WeakSet()  # that have filled a cache
        self._spare: tuple[Hashable, list[int], SpanCache] | None = None
        whole = Span(0, draft.shape.layers)
        shard = load_shard(draft.source, whole, embed=True, head=True, device=device)
        self._runner = Runner(shard, (MAX_ROWS,))
        self.read([0], self.new_cache())  # the first call is slower

    def begin(self, scope: Hashable = None) -> "ModelDrafter":
        """Start a text."""
        return ModelDrafter(self, scope)

    def keep(self, tokens: Sequence[int], scope: Hashable = None) -> None:
        """Keep the cache of a finished text.

        Others may have written the same so far and go on: these open a cache again.
        """
        for drafter in [each for each in self._drafters if each.has_text(tokens, scope)]:
            self._drafters.discard(drafter)
            self._spare = scope, *drafter.release_cache()

    def forget(self, drafter: "ModelDrafter") -> None:
        """Keep nothing of a text that has no drafts any more."""
        self._drafters.discard(drafter)

    @property
    def execution(self) -> Execution:
        """How it is run; any thread may ask."""
        return self._runner.execution

    def new_cache(self) -> SpanCache:
        """Make an empty cache for one text."""
        return self._runner.new_cache()

    def open(self, drafter: "ModelDrafter", text: Sequence[int]) -> tuple[SpanCache, int]:
        """Return a cache for a drafter, and how many tokens of its text are in it."""
        self._drafters.add(drafter)
        if self._spare and self._spare[0] == drafter.scope:
            _, tokens, cache = self._spare
            same = _count_same(tokens, text)
            if same > max(STRIDE, cache.floor):
                self._spare = None
                return cache, same
        return self.new_cache(), 0

    @property
    def bytes(self) -> int:
        """The memory of the weights and of the caches."""
        return self._draft.weight_bytes + self._cached * self._draft.token_bytes

    def has_room(self, count: int) -> bool:
        """Return whether ``count`` more tokens may be cached; a finished text makes room."""
        self._cached = sum(each.cached for each in self._drafters)
        is_room = self._cached + count <= self._draft.most_cached
        self._cached += count if is_room else 0
        if self._spare and self._cached + len(self._spare[1]) > self._draft.most_cached:
            self._spare = None
        self._cached += len(self._spare[1]) if self._spare else 0
        return is_room

    def covers(self, tokens: Sequence[int]) -> bool:
        """Return whether both models have all of these tokens; the large one may emit padding."""
        return all(token < self._draft.vocabulary for token in tokens)

    def read(self, tokens: Sequence[int], cache: SpanCache) -> tuple[int, float]:
        """Append tokens to a cache; return the most likely next token and its probability."""
        text, run = torch.tensor([tokens]), self._runner
        is_step = run.runs_in_one_pass(len(tokens)) and cache.length
        output = run.step(text, cache) if is_step else run.prefill(text, cache, 1)  # [1, T or 1, V]
        logits = output[0, -1, : self._draft.vocabulary].float()
        best, token = logits.max(0)
        return int(token), float((best - logits.logsumexp(0)).exp())


class ModelDrafter:
    """Drafts for one text."""

    def __init__(self, drafting: ModelDrafting, scope: Hashable) -> None:
        self._drafting, self.scope = drafting, scope
        self._cache = drafting.new_cache()
        self._text: list[int] = []
        self._held = 0  # tokens of the text that are in the cache
        self._drafted: list[int] = []  # draft tokens in the cache after them
        self._next = 0, 0.0  # a token and its probability
        self._can_draft = True

    @property
    def cached(self) -> int:
        """Tokens in the cache."""
        return self._cache.length

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        self._text.extend(tokens)
        self._can_draft = self._can_draft and self._drafting.covers(tokens)

    def look(self) -> int | None:
        """Read new tokens; return the confidence of the next draft, None during prefill."""
        if not self._can_draft or not 0 < len(self._text) < self._drafting.context:
            return None
        self._crop_rejected()
        new = self._text[self._held :]
        is_much = len(new) > STRIDE
        if is_much:
            new = new[: min(CHUNK, len(new) - 1)]
        if not self._drafting.has_room(len(self._text) - self._held):
            self._can_draft = False
            self._drafting.forget(self)
            self.release_cache()  # drops the cache
            return None
        self._next = self._drafting.read(new, self._cache)
        self._held += len(new)
        return None if is_much else sum(self._next[1] >= level for level in LEVELS)

    def draft(self, most: int) -> tuple[int, ...]:
        """Draft up to ``most`` tokens after `look`, while all are likely to be accepted."""
        most = min(most, self._drafting.context - len(self._text))
        token, likely = self._next
        draft = [token]
        while len(draft) < most and likely >= LEAST:
            token, probability = self._drafting.read(draft[-1:], self._cache)
            self._drafted.append(draft[-1])
            draft.append(token)
            likely *= probability
        return tuple(draft)

    def has_text(self, text: Sequence[int], scope: Hashable) -> bool:
        """Return whether this is the text of the drafter, and its scope."""
        return self.scope == scope and self._text == list(text)

    def release_cache(self) -> tuple[list[int], SpanCache]:
        """Return the text as far as it was read, and its cache, which is another text's now."""
        found = self._text[: self._held], self._cache
        self._cache, self._held, self._drafted = self._drafting.new_cache(), 0, []
        return found

    def _crop_rejected(self) -> None:
        """Crop rejected draft tokens from the cache, so that at least one token is left to read."""
        if not self._cache.length:
            self._cache, self._held = self._drafting.open(self, self._text)
        self._held += _count_same(self._drafted, self._text[self._held :])
        self._held = min(self._held, len(self._text) - 1)
        self._drafted = []
        self._cache.crop(self._held)


def _count_same(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _check_vocabularies(source: Source, target: Source, sizes: Sequence[int]) -> None:
    """Raise `ModelError` if the vocabularies differ; without tokenizers compare their sizes."""
    names = f"`{source.name}` cannot draft for `{target.name}`"
    try:
        own, other = (Text.load(each.folder).words for each in (source, target))
    except ModelError:
        if sizes[0] == sizes[1]:
            return
        raise ModelError(f"{names}: it has {sizes[0]} tokens, not {sizes[1]}", hint=_HINT) from None
    differing = [token for token in own.keys() & other.keys() if own[token] != other[token]]
    if differing:
        token = min(differing)
        raise ModelError(
            f"{names}: its token {token} is {own[token]!r}, not {other[token]!r}", hint=_HINT
        )
