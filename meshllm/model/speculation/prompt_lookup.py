"""Speculative decoding by prompt lookup: drafts from earlier occurrences of the end of a text.

A text often repeats itself or an earlier one: code, tables, quotations, a question in its answer.
The longest suffix of the text that occurred before is looked up, and what followed it there is the
draft (Saxena, "Prompt Lookup Decoding", 2023; Oliaro et al., "SuffixDecoding", 2024). The index is
that of LZ77: a table of the last position of every pair of tokens, and a chain from each position
to the previous one of the same pair.
"""

from array import array
from collections.abc import Hashable, Sequence
from sys import getsizeof

KEY = 2  # tokens of an n-gram key; fewer match anywhere
MAX_MATCH = 32  # tokens compared; a longer match is not more reliable
MAX_CHAIN = 24  # positions compared
MAX_STORE = 1 << 17  # tokens of past sessions; when full, the older half is dropped
_STEPS = (4, 8, 16)  # lengths of a match at which confidence rises
_PAIR_BYTES = 64  # of a key and its value (two ints), without the table itself
_BITS = 32  # of a token
_BETWEEN = -1  # separates sessions; not a token


class NgramIndex:
    """A text with an index of its n-grams, to look up the end of another text."""

    def __init__(self) -> None:
        self.tokens = array("i")
        self._last: dict[int, int] = {}  # of a pair of tokens, as one number
        self._previous = array("i")  # position of the previous same pair, by position

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        before = self.tokens[-1] if self.tokens else _BETWEEN
        last, previous = self._last, self._previous
        for place, token in enumerate(tokens, len(self.tokens) + 1):
            pair = (before << _BITS) + token
            previous.append(last.get(pair, 0))
            last[pair] = place
            before = token
        self.tokens.extend(tokens)

    @property
    def bytes(self) -> int:
        """The memory of the text and its table."""
        return sum(map(getsizeof, (self.tokens, self._previous, self._last))) + (
            len(self._last) * _PAIR_BYTES
        )

    def find(self, end: "array[int]") -> tuple[int, int]:
        """Find the longest match of the end of ``end``: (its length, the position after it)."""
        place = self._last.get((end[-2] << _BITS) + end[-1], 0) if len(end) >= KEY else 0
        best, found = 0, 0
        for _ in range(MAX_CHAIN):
            if place == 0 or best == MAX_MATCH:
                break
            if place < len(self.tokens):  # else nothing follows it: it is the end of this text
                length = self._match(end, place)
                if length > best:
                    best, found = length, place
            place = self._previous[place - 1]
        return best, found

    def follow(self, place: int, most: int) -> tuple[int, ...]:
        """Return the tokens from a position; at the end of the text, repeat them periodically."""
        period = len(self.tokens) - place
        tokens = self.tokens[place : place + most].tolist()
        while 0 < len(tokens) < most:
            tokens.append(tokens[len(tokens) - period])
        return tuple(tokens[: tokens.index(_BETWEEN)] if _BETWEEN in tokens else tokens)

    def _match(self, end: "array[int]", place: int) -> int:
        """Count how many tokens before a position match the end of ``end``."""
        longest = min(MAX_MATCH, place, len(end))
        for length in range(KEY, longest):
            if self.tokens[place - 1 - length] != end[-1 - length]:
                return length
        return longest


class SuffixDrafting:
    """Prompt lookup in each text and in those before it of the same scope; used on one thread.

    An accepted draft shows that a text was stored: nobody is drafted the texts of others.
    """

    def __init__(self) -> None:
        self._stores: dict[Hashable, NgramIndex] = {}  # by scope, the latest last

    @property
    def bytes(self) -> int:
        """The memory of the stored texts."""
        return sum(store.bytes for store in list(self._stores.values()))

    def store(self, scope: Hashable = None) -> NgramIndex:
        """Return the texts of a scope."""
        return self._stores.get(scope) or NgramIndex()

    def begin(self, scope: Hashable = None) -> "SuffixDrafter":
        """Start a text."""
        return SuffixDrafter(self, scope)

    def keep(self, tokens: Sequence[int], scope: Hashable = None) -> None:
        """Store a finished text; a store that is full drops its older half, or the oldest store."""
        store = self._stores.pop(scope, None) or NgramIndex()
        if len(store.tokens) + len(tokens) > MAX_STORE:
            newest = store.tokens[-MAX_STORE // 2 :]
            store = NgramIndex()
            store.extend(newest)
        store.extend((*tokens[-MAX_STORE // 2 :], _BETWEEN))
        self._stores[scope] = store
        while len(self._stores) > 1 and self._size > MAX_STORE:
            del self._stores[next(iter(self._stores))]

    @property
    def _size(self) -> int:
        return sum(len(store.tokens) for store in self._stores.values())


class SuffixDrafter:
    """Drafts for one text."""

    def __init__(self, drafting: SuffixDrafting, scope: Hashable) -> None:
        self._drafting, self._scope = drafting, scope
        self._own = NgramIndex()
        self._found: tuple[NgramIndex, int] | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text; of a longer prompt, its end is indexed."""
        self._own.extend(tokens[-MAX_STORE:])

    def look(self) -> int | None:
        """Return the confidence of the next draft, by the longest match; None without one."""
        end = self._own.tokens[-MAX_MATCH:]
        stores = self._own, self._drafting.store(self._scope)
        finds = [(index, *index.find(end)) for index in stores]
        index, length, place = max(finds, key=lambda found: found[1])  # its own text on a tie
        self._found = (index, place) if length >= KEY else None
        return sum(length >= step for step in _STEPS) if self._found else None

    def draft(self, most: int) -> tuple[int, ...]:
        """Draft up to ``most`` tokens from the match that `look` found."""
        if self._found is None:
            return ()
        index, place = self._found
        return index.follow(place, most)
