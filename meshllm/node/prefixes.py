"""Texts of finished sessions and their caches on the entry: where a prompt can go on from.

Whole texts are compared, token by token; what the other ranks need is only the name of a session,
see `meshllm.protocol.shelf`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshllm.errors import ModelError
from meshllm.model.cache import SpanCache
from meshllm.names import SessionId
from meshllm.protocol.shelf import Base, Shelf

MIN_SHARED = 16
"""Tokens; every chat of a model begins with a few of the same."""
_TURN = 6  # tokens at the end of a prompt that the next turn may write in another way


class Missed(Exception):
    """A cache is not what a job was to go on from."""


def go_back(cache: SpanCache, length: int) -> None:
    """Crop a cache; raise `Missed` where it does not hold so much, or cannot go back so far."""
    try:
        cache.crop(length)
    except ModelError as error:
        raise Missed(str(error)) from None


@dataclass(frozen=True, slots=True)
class Start:
    """What a generation begins with; its cache is made on the compute thread."""

    base: Base | None
    make: Callable[[], SpanCache]
    """Called once; the cache holds the positions of the base, and perhaps more."""


@dataclass(frozen=True, slots=True)
class _Text:
    tokens: Tensor  # [S], int32
    prompt: int
    cache: SpanCache


class Prefixes:
    """What this entry keeps; times are seconds on the caller's clock."""

    def __init__(self, shelf: Shelf, slack: int | None, new_cache: Callable[[], SpanCache]) -> None:
        """Keep on ``shelf``; a cache can go back by ``slack`` tokens, None is any number."""
        self.shelf = shelf
        self._slack = slack
        self._new_cache = new_cache
        self._texts: dict[SessionId, _Text] = {}  # the newest last

    def find(self, prompt: Sequence[int], now: float) -> Start:
        """Find the text that shares most with a prompt.

        The next turn of a chat takes the cache of the turn before; where much of it would be thrown
        away, a copy is made if there is room. The session has reserved its room by now: what is in
        its way is evicted, and what it goes on from last.
        """
        wanted = torch.tensor(prompt, dtype=torch.int32)
        shares = {name: self._shared(wanted, self._texts[name]) for name in reversed(self._texts)}
        name = max(shares, key=lambda each: shares[each], default=None)
        if name is None or shares[name] < MIN_SHARED:
            self._drop(self.shelf.make_room())
            return Start(None, self._new_cache)
        length, text = shares[name], self._texts[name]
        whole = length >= text.prompt - _TURN and 2 * length >= len(text.tokens)
        reach = self.shelf.take(name, length, now, whole=whole)
        self._drop(self.shelf.make_room(spare=name))
        if self.shelf.budget.is_over:  # no room for a copy
            whole = bool(self.shelf.take(name, length, now, whole=True))
        if whole:
            del self._texts[name]
        cache = text.cache
        return Start(
            Base(name, length, whole, reach),
            (lambda: cache) if whole else lambda: cache.branch(length),
        )

    def keep(
        self,
        session: SessionId,
        tokens: Sequence[int],
        prompt: int,
        cache: SpanCache,
        reach: int,
        now: float,
    ) -> None:
        """Keep the cache of a session that ended, of which the first ``prompt`` tokens were asked.

        It holds ``tokens`` and perhaps more, and has room for ``reach``.
        """
        kept = torch.tensor(tokens, dtype=torch.int32)
        self._texts[session] = _Text(kept, min(prompt, len(tokens)), cache)
        self._drop(self.shelf.put(session, len(tokens), reach, now))

    def forget(self, session: SessionId) -> None:
        """Drop what another rank has lost."""
        if self.shelf.take(session, 0, 0.0, whole=True):
            self._drop([session])

    def expire(self, now: float) -> None:
        """Drop what nobody asked for in a while."""
        self._drop(self.shelf.expire(now))

    def _drop(self, sessions: Sequence[SessionId]) -> None:
        for session in sessions:
            del self._texts[session]

    def _shared(self, prompt: Tensor, text: _Text) -> int:
        """Count the tokens at which a prompt can begin; the last one gives the first row."""
        most = min(len(prompt) - 1, len(text.tokens))
        differs = prompt[:most] != text.tokens[:most]
        shared = int(differs.byte().argmax()) if differs.any() else most
        is_far = self._slack is not None and len(text.tokens) - shared > self._slack
        return 0 if is_far else shared
