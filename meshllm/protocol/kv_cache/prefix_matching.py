"""Prefix matching on the entry: which finished text a prompt continues, and whether by a copy.

Texts are compared token by token; the other ranks only need the id of a session, see
`meshllm.protocol.kv_cache.prefix_index`.
"""

from array import array
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from meshllm.names import SessionId, Span
from meshllm.protocol.kv_cache.budget import KvBudget
from meshllm.protocol.kv_cache.prefix_index import Chunk, PrefixHit, PrefixIndex, crop_chunks

MIN_SHARED = 16
"""Tokens; all chats of a model begin with the same few."""
_TURN_TOKENS = 6  # tokens at the end of a prompt that the next turn may render differently

Cache = TypeVar("Cache")


@dataclass(frozen=True, slots=True)
class _Text(Generic[Cache]):
    tokens: "array[int]"
    prompt: int
    cache: Cache
    chunks: tuple[Chunk, ...] = ()
    lost: frozenset[int] = frozenset()
    """Layers whose caches are lost."""


class PrefixCache(Generic[Cache]):
    """Finished texts of an entry and their caches; times are seconds on the caller's clock."""

    def __init__(self, index: PrefixIndex, max_crop: int | None) -> None:
        """Keep what ``index`` allows; caches can be cropped by ``max_crop`` tokens, None is any."""
        self.index = index
        self._max_crop = max_crop
        self._texts: dict[SessionId, _Text[Cache]] = {}  # the newest last

    def find(
        self, prompt: Sequence[int], now: float, *, resumes: bool = False
    ) -> tuple[PrefixHit, Cache] | None:
        """Find the text with the longest common prefix, and its cache; None is a fresh start.

        With ``resumes`` the prompt ends with an answer whose ring was lost: any prefix is used.

        The next turn of a chat takes over the cache of the previous one; if much of the cache would
        be thrown away, it is copied instead, provided there is room. The session has reserved its
        room before: sessions in its way are evicted, the one that it continues last.
        """
        wanted = array("i", prompt)
        shares = {name: self._shared(wanted, self._texts[name]) for name in reversed(self._texts)}
        name = max(shares, key=lambda each: shares[each], default=None)
        if name is None or shares[name] < (1 if resumes else MIN_SHARED):
            self._drop(self.index.make_room())
            return None
        length, text = shares[name], self._texts[name]
        whole = length >= text.prompt - _TURN_TOKENS and 2 * length >= len(text.tokens)
        capacity = self.index.take(name, length, now, whole=whole)
        self._drop(self.index.make_room(spare=name))
        if self.index.budget.is_over:  # no room for a copy
            whole = bool(self.index.take(name, length, now, whole=True))
        if whole:
            del self._texts[name]
        chunks = tuple(crop_chunks(text.chunks, length))
        return PrefixHit(name, length, whole, capacity, chunks, spans_of(text.lost)), text.cache

    def keep(  # noqa: PLR0913 -- what is kept, and how it was computed
        self,
        session: SessionId,
        tokens: Sequence[int],
        prompt: int,
        cache: Cache,
        capacity: int,
        now: float,
        *,
        chunks: Sequence[Chunk] = (),
        lost: Sequence[Span] = (),
        is_lost: bool = False,
    ) -> None:
        """Keep the cache of a session, of which the first ``prompt`` tokens were a prompt.

        It holds ``tokens`` and perhaps more, and has room for ``capacity``; ``chunks`` tell how it
        was computed, ``lost`` are layers without a cache. ``is_lost``: its ring was lost.
        """
        layers = frozenset(at for span in lost for at in range(span.start, span.stop))
        text = _Text(array("i", tokens), min(prompt, len(tokens)), cache, tuple(chunks), layers)
        self._texts[session] = text
        self._drop(self.index.put(session, len(tokens), capacity, now, is_lost=is_lost))

    def lose(self, layers: Collection[int]) -> None:
        """Note that the caches of these layers are lost, as another node holds them from now on."""
        for name, text in self._texts.items():
            self._texts[name] = replace(text, lost=text.lost.union(layers))

    def forget_texts(self) -> dict[SessionId, Cache]:
        """Forget the texts; return their caches, which stay counted in the index."""
        caches, self._texts = self.caches, {}
        return caches

    @property
    def caches(self) -> dict[SessionId, Cache]:
        """The kept caches."""
        return {name: text.cache for name, text in self._texts.items()}

    def move(self, budget: KvBudget) -> list[SessionId]:
        """Count what is kept in another budget; return the sessions that this evicts."""
        gone = self.index.move(budget)
        self._drop(gone)
        return gone

    def forget(self, session: SessionId) -> None:
        """Drop a text whose cache another rank has lost."""
        if self.index.take(session, 0, 0.0, whole=True):
            self._drop([session])

    def expire(self, now: float) -> None:
        """Drop the texts that were not used in a while."""
        self._drop(self.index.expire(now))

    def _drop(self, sessions: Sequence[SessionId]) -> None:
        for session in sessions:
            self._texts.pop(session, None)

    def _shared(self, prompt: "array[int]", text: _Text[Cache]) -> int:
        """Count the tokens that a prompt can reuse; never its last, which gives the first row."""
        most = min(len(prompt) - 1, len(text.tokens))
        shared = _common_prefix(prompt, text.tokens, most)
        is_far = self._max_crop is not None and len(text.tokens) - shared > self._max_crop
        return 0 if is_far else shared


def spans_of(layers: Collection[int]) -> tuple[Span, ...]:
    """Return layers as spans, in order."""
    spans = list[Span]()
    for layer in sorted(layers):
        if spans and spans[-1].stop == layer:
            spans[-1] = Span(spans[-1].start, layer + 1)
        else:
            spans.append(Span(layer, layer + 1))
    return tuple(spans)


def _common_prefix(one: "array[int]", other: "array[int]", most: int) -> int:
    """Return the length of the common prefix of two texts, at most ``most``."""
    a, b = memoryview(one).cast("B"), memoryview(other).cast("B")
    size = one.itemsize

    def differs(length: int) -> bool:
        return a[: length * size] != b[: length * size]

    return bisect_left(range(1, most + 1), True, key=differs)
