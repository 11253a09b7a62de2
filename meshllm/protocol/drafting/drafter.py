"""Interface of drafters for speculative decoding: an n-gram lookup or a draft model."""

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """Drafts the continuation of one text; used on one thread."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""

    def look(self) -> int | None:
        """Return the confidence in the next draft token, from 0 to 3; None if there is none."""

    def guess(self, most: int) -> tuple[int, ...]:
        """Draft up to ``most`` tokens."""


class Drafting(Protocol):
    """Makes drafters, and learns from finished texts."""

    def begin(self) -> Drafter:
        """Start a drafter for a new text."""

    def keep(self, tokens: Sequence[int]) -> None:
        """Remember a finished text, prompt included."""
