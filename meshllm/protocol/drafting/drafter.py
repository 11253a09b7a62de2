"""Ports of whatever guesses at the next tokens: a lookup or a draft model."""

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """Guesses at what follows one text; used on one thread."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Take what follows the text so far."""

    def look(self) -> int | None:
        """Say how sure the next guess is, from 0 to 3; None is no guess."""

    def guess(self, most: int) -> tuple[int, ...]:
        """Guess at up to ``most`` tokens."""


class Drafting(Protocol):
    """Makes drafters, and learns from finished texts."""

    def begin(self) -> Drafter:
        """Start a text."""

    def keep(self, tokens: Sequence[int]) -> None:
        """Remember a finished text, prompt included."""
