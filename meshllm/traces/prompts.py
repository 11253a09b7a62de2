"""Made-up prompts with the lengths and the shared prefixes of those of a trace.

Theory of operation
-------------------
The tokens of a bucket follow from its id, so prompts that shared buckets share tokens. A prompt
diverges from earlier ones inside a bucket, whose id then tells nothing: how many of its tokens were
shared is known from the hit in the prefix cache, and as many are taken of the first continuation of
the same prefix. The buckets of an answer are those that were generated in the replay, if the answer
is complete before the next prompt of its chat is made; otherwise they are made up, too.
"""

from collections.abc import Sequence
from hashlib import shake_128
from typing import Final

from meshllm.traces.buckets import BUCKET
from meshllm.traces.trace import TraceLine

FIRST: Final = 100  # special tokens have lower or the highest ids; 256 ids are in any vocabulary


class MadeUpPrompts:
    """The tokens of all buckets so far."""

    def __init__(self, salt: bytes = b"") -> None:
        """Begin; prompts of another ``salt`` share nothing with these."""
        self._salt = salt
        self._buckets: dict[str, tuple[int, ...]] = {}
        self._next: dict[str, tuple[int, ...]] = {}  # by the id before: a continuation

    def prompt(self, line: TraceLine, number: int) -> tuple[int, ...]:
        """Make the prompt of a request; ``number`` tells apart what no id does."""
        tokens: list[int] = []
        last = ""
        for each in line.ids[: line.prompt_tokens // BUCKET]:
            shared = line.cached_tokens - len(tokens)
            if each not in self._buckets:
                self._buckets[each] = self._continue(last, each, BUCKET, shared)
            tokens += self._buckets[each]
            last = each
        rest = line.prompt_tokens - len(tokens)
        tokens += self._continue(last, f"end {number}", rest, line.cached_tokens - len(tokens))
        return tuple(tokens)

    def answered(self, line: TraceLine, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Take the tokens of an answer, with which later prompts may go on."""
        tokens = (*prompt, *answer)
        begin = line.prompt_tokens // BUCKET
        for place, each in enumerate(line.ids[begin:], start=begin):
            bucket = tokens[place * BUCKET : (place + 1) * BUCKET]
            if len(bucket) == BUCKET:
                self._buckets.setdefault(each, bucket)
        whole = len(line.ids) * BUCKET
        if line.ids and len(tokens) > whole:
            self._note(line.ids[-1], tokens[whole : whole + BUCKET])

    def _continue(self, last: str, seed: str, count: int, shared: int) -> tuple[int, ...]:
        """Make ``count`` tokens after a bucket; those ``shared`` are of another continuation."""
        other = self._next.get(last, ())
        kept = other[: max(0, min(shared, BUCKET - 1, count))]
        made = shake_128(self._salt + seed.encode()).digest(count)[len(kept) :]
        tokens = (*kept, *(FIRST + byte for byte in made))
        self._note(last, tokens[:BUCKET])
        return tokens

    def _note(self, last: str, tokens: tuple[int, ...]) -> None:
        if len(tokens) > len(self._next.get(last, ())):
            self._next[last] = tokens
