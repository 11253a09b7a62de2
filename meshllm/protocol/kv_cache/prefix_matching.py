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
from meshllm.protocol.kv_cache.prefix_scope import OWN, PrefixScope, is_owners

MIN_SHARED = 16
"""Tokens; all chats of a model begin with the same few."""
_TURN_TOKENS = 6  # tokens at the end of a prompt that the next turn may render differently

Cache = TypeVar("Cache")


@dataclass(frozen=True, slots=True)
class _Text:
    tokens: "array[int]"
    prompt: int
    chunks: tuple[Chunk, ...] = ()
    scope: PrefixScope = OWN


class PrefixCache(Generic[Cache]):
    """The prefix cache: finished sessions, with their texts on an entry; times are in s."""

    def __init__(self, index: PrefixIndex, max_crop: int | None) -> None:
        """Keep what ``index`` allows; caches can be cropped by ``max_crop`` tokens, None is any."""
        self.index = index
        self._max_crop = max_crop
        self.caches: dict[SessionId, Cache] = {}
        """The kept caches."""
        self._texts: dict[SessionId, _Text] = {}  # the newest last
        self._lost: dict[SessionId, frozenset[int]] = {}  # layers of which a cache has nothing
        self._moved = frozenset[int]()  # layers that have changed nodes, see `forget_moves`

    def find(
        self,
        prompt: Sequence[int],
        now: float,
        *,
        is_shared: bool = False,
        scope: PrefixScope = OWN,
    ) -> tuple[PrefixHit, Cache] | None:
        """Find the text of a scope with the longest common prefix, and its cache.

        None is a fresh start.

        The next turn of a chat takes over the cache of the previous one; if much of the cache would
        be thrown away, or the text ``is_shared`` with other prompts that continue it, the cache is
        copied instead, provided there is room. The session has reserved its room before: sessions
        in its way are evicted, the one that it continues last.
        """
        wanted = array("i", prompt)
        shares = {
            name: self._shared(wanted, self._texts[name])
            for name in reversed(self._texts)
            if self._texts[name].scope == scope
        }
        name = max(shares, key=lambda each: shares[each], default=None)
        if name is None or shares[name] < MIN_SHARED:
            self._drop(self.index.make_room())
            return None
        length, text = shares[name], self._texts[name]
        is_next = length >= text.prompt - _TURN_TOKENS and 2 * length >= len(text.tokens)
        whole = is_next and not is_shared
        capacity = self.index.take(name, length, now, whole=whole)
        self._drop(self.index.make_room(spare=name))
        if self.index.budget.is_exceeded:  # no room for a copy
            whole = bool(self.index.take(name, length, now, whole=True))
        return self._hit(name, length, capacity, text.chunks, whole=whole)

    def resume(
        self, session: SessionId, tokens: Sequence[int], chunks: Sequence[Chunk], now: float
    ) -> tuple[PrefixHit, Cache] | None:
        """Take over the first positions of a session, which hold ``tokens``, after a lost ring.

        None if the cache is gone or too short, or holds other tokens. A rank that was not the entry
        knows neither the tokens nor how they were computed: the hit is claimed, and ``chunks`` say.
        """
        length = len(tokens)
        name = self.index.name_of(session, length)
        text = self._texts.get(name)
        if not tokens or (text and text.tokens[:length] != array("i", tokens)):
            return None
        capacity = self.index.take(name, length, now, whole=True)
        if not capacity or name not in self.caches:  # as a stage, it may have had no cache yet
            return None
        self._drop(self.index.make_room())
        held = text.chunks if text else chunks
        hit, cache = self._hit(name, length, capacity, held, whole=True)
        return replace(hit, session=session, is_claimed=text is None), cache

    def resume_empty(
        self, session: SessionId, length: int, chunks: Sequence[Chunk], span: Span
    ) -> tuple[PrefixHit, Cache | None] | None:
        """Continue a session that this entry did not have, as its ``span`` came with the plan.

        Its layers are computed again, like the other ones that have moved, and no others. None if
        the entry should have a cache, or none can be resumed. The cache is what was handed over.
        """
        own, name = range(span.start, span.stop), self.index.name_of(session, length)
        is_new = bool(own) and self._moved.issuperset(own)
        if not (length and is_new and self.index.resumes) or name in self._texts:
            return None
        held, lost = tuple(crop_chunks(chunks, length)), spans_of(self._moved)
        begun = self.caches.get(name) if self.index.take(name, 0, 0.0, whole=True) else None
        self._drop([name])
        return PrefixHit(session, length, True, length, held, lost, is_claimed=True), begun

    def keep_begun(
        self,
        session: SessionId,
        length: int,
        capacity: int,
        cache: Cache,
        span: Span,
        now: float,
    ) -> None:
        """Keep a cache that was handed over with the ``span`` of this node, all of it or a part.

        All its layers hold ``length`` positions, and none more than ``capacity``.
        """
        self.caches[session] = cache
        self._lost[session] = self._moved.difference(range(span.start, span.stop))
        self._drop(self.index.put(session, length, capacity, now, is_lost=True))

    def fit(self) -> None:
        """Evict sessions until those kept fit into the budget, which has changed."""
        self._drop(self.index.make_room())

    def make_room(self, size: int) -> None:
        """Evict sessions until this many bytes of this rank are free, or none is left."""
        self._drop(self.index.free(size))

    def _hit(
        self, name: SessionId, length: int, capacity: int, chunks: Sequence[Chunk], *, whole: bool
    ) -> tuple[PrefixHit, Cache]:
        cache, lost = self.caches[name], self._lost.get(name, ())
        if whole:
            self._drop([name])
        cropped = tuple(crop_chunks(chunks, length))
        return PrefixHit(name, length, whole, capacity, cropped, spans_of(lost)), cache

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
        is_claimed: bool = False,
        scope: PrefixScope = OWN,
        base: tuple[SessionId, int] | None = None,
    ) -> None:
        """Keep the cache of a session, of which the first ``prompt`` tokens were a prompt.

        It holds ``tokens`` and perhaps more, and has room for ``capacity``; ``chunks`` tell how it
        was computed, ``lost`` are layers without a cache. ``is_lost``: its ring was lost; it
        may be resumed by the name of the ``base``, of which it took over this many positions, too.
        ``is_claimed``: the cache may hold other tokens, so that no prompt may match them. Others
        of the ``scope`` may.
        """
        self.caches[session] = cache
        self._lost[session] = frozenset(at for span in lost for at in range(span.start, span.stop))
        if not is_claimed:
            held = array("i", tokens)
            self._texts[session] = _Text(held, min(prompt, len(tokens)), tuple(chunks), scope)
        is_own = is_owners(scope) and not is_lost  # the other ranks got no Close that says so
        gone = self.index.put(session, len(tokens), capacity, now, is_own=is_own, is_lost=is_lost)
        if base and is_lost:
            self.index.name(session, *base)
        self._drop(gone)

    def lose(self, layers: Collection[int]) -> None:
        """Note that the caches of these layers are lost, as another node holds them from now on."""
        was_lost, self._moved = self._lost, self._moved.union(layers)
        self._lost = {each: was_lost.get(each, frozenset()).union(layers) for each in self.caches}

    def forget_moves(self) -> None:
        """Forget which layers have changed nodes: no session of a ring before may go on."""
        self._moved = frozenset()

    def change_entry(self, *, is_entry: bool) -> None:
        """Keep the caches, but as those of no owner; texts are for an entry only."""
        self.index.clear_ownership()
        if not is_entry:
            self._texts.clear()

    def move(self, budget: KvBudget) -> list[SessionId]:
        """Count what is kept in another budget; return the sessions that this evicts."""
        gone = self.index.move(budget)
        self._drop(gone)
        self._drop([session for session in self.caches if not self.index.holds(session)])
        return gone

    def clear(self) -> None:
        """Drop all texts and caches."""
        self.index.clear()
        self._drop([*self.caches])

    def forget(self, session: SessionId) -> None:
        """Drop a text whose cache another rank has lost."""
        if self.index.take(session, 0, 0.0, whole=True):
            self._drop([session])

    def expire(self, now: float) -> None:
        """Drop the texts that were not used in a while."""
        self._drop(self.index.expire(now))

    def _drop(self, sessions: Sequence[SessionId]) -> None:
        for session in sessions:
            for kept in (self._texts, self._lost, self.caches):
                kept.pop(session, None)

    def _shared(self, prompt: "array[int]", text: _Text) -> int:
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
