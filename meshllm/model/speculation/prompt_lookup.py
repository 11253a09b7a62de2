"""Guesses at the next tokens, which a ring checks many at a time.

A text often repeats itself or an earlier one: code, tables, quotations, a question in its answer.
The longest end of the text that stood somewhere before is looked up, and what followed it there is
the guess (Saxena, "Prompt Lookup Decoding", 2023; Oliaro et al., "SuffixDecoding", 2024). The
lookup is that of LZ77: a table of the last place of every pair of tokens and a chain from each
place to the one before.
"""

from array import array
from collections.abc import Sequence
from sys import getsizeof

KEY = 2  # tokens that must be the same; fewer match anywhere
MAX_MATCH = 32  # tokens compared: a longer match says no more
MAX_CHAIN = 24  # places looked at
MAX_STORE = 1 << 17  # tokens of past sessions that are kept, half of them when it is full
_STEPS = (4, 8, 16)  # lengths of a match at which confidence rises
_PAIR_BYTES = 120  # of a key and its value: a tuple and two numbers, beside the table itself
_BETWEEN = -1  # two sessions; no token


class Echoes:
    """A text in which the end of a text is looked up."""

    def __init__(self) -> None:
        self.tokens = array("i")
        self._last: dict[tuple[int, ...], int] = {}
        self._before = array("i")  # the place of the same pair before, by place

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self.tokens.append(token)
            place = len(self.tokens)
            pair = tuple(self.tokens[place - KEY :])
            self._before.append(self._last.get(pair, 0))
            self._last[pair] = place

    @property
    def bytes(self) -> int:
        """Memory of the text and its table."""
        return sum(map(getsizeof, (self.tokens, self._before, self._last))) + (
            len(self._last) * _PAIR_BYTES
        )

    def find(self, end: "array[int]") -> tuple[int, int]:
        """Find where the longest end of ``end`` stood last: (its length, the place behind it)."""
        place = self._last.get(tuple(end[-KEY:]), 0)
        best, found = 0, 0
        for _ in range(MAX_CHAIN):
            if place == 0 or best == MAX_MATCH:
                break
            if place < len(self.tokens):  # else nothing follows it: the end of this very text
                length = self._match(end, place)
                if length > best:
                    best, found = length, place
            place = self._before[place - 1]
        return best, found

    def follow(self, place: int, most: int) -> tuple[int, ...]:
        """Read on from a place; behind the end, a text that repeats itself goes on doing so."""
        period = len(self.tokens) - place
        tokens = self.tokens[place : place + most].tolist()
        while 0 < len(tokens) < most:
            tokens.append(tokens[len(tokens) - period])
        return tuple(tokens[: tokens.index(_BETWEEN)] if _BETWEEN in tokens else tokens)

    def _match(self, end: "array[int]", place: int) -> int:
        """Count how many tokens before a place are those at the end."""
        longest = min(MAX_MATCH, place, len(end))
        for length in range(KEY, longest):
            if self.tokens[place - 1 - length] != end[-1 - length]:
                return length
        return longest


class SuffixDrafting:
    """Looks texts up in themselves and in those before them; used on one thread."""

    def __init__(self) -> None:
        self.store = Echoes()

    @property
    def bytes(self) -> int:
        """Memory of the texts that are kept."""
        return self.store.bytes

    def begin(self) -> "SuffixDrafter":
        """Start a text."""
        return SuffixDrafter(self)

    def keep(self, tokens: Sequence[int]) -> None:
        """Remember a finished text; when the store is full, its older half goes."""
        if len(self.store.tokens) + len(tokens) > MAX_STORE:
            newest = self.store.tokens[-MAX_STORE // 2 :]
            self.store = Echoes()
            self.store.extend(newest)
        self.store.extend((*tokens[-MAX_STORE // 2 :], _BETWEEN))


class SuffixDrafter:
    """Guesses at what follows one text."""

    def __init__(self, drafting: SuffixDrafting) -> None:
        self._drafting = drafting
        self._own = Echoes()
        self._found: tuple[Echoes, int] | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        """Take what follows the text so far."""
        self._own.extend(tokens)

    def look(self) -> int | None:
        """Say how sure the next guess is, by the length of the longest match; None is no match."""
        end = self._own.tokens[-MAX_MATCH:]
        finds = [(echoes, *echoes.find(end)) for echoes in (self._own, self._drafting.store)]
        echoes, length, place = max(finds, key=lambda found: found[1])  # the own text where equal
        self._found = (echoes, place) if length >= KEY else None
        return sum(length >= step for step in _STEPS) if self._found else None

    def guess(self, most: int) -> tuple[int, ...]:
        """Guess at what `look` found."""
        if self._found is None:
            return ()
        echoes, place = self._found
        return echoes.follow(place, most)
