"""Interface of drafters for speculative decoding, and drafting within one scope.

A drafter is an n-gram lookup or a draft model. Nobody is drafted the texts of another scope.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Drafter(Protocol):
    """Drafts the continuation of one text; used on one thread."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""

    def look(self) -> int | None:
        """Return the confidence in the next draft token, from 0 to 3; None if there is none."""

    def draft(self, most: int) -> tuple[int, ...]:
        """Draft up to ``most`` tokens."""


class Drafting(Protocol):
    """Makes drafters, and learns from finished texts."""

    def begin(self) -> Drafter:
        """Start a drafter for a new text."""

    def keep(self, tokens: Sequence[int]) -> None:
        """Remember a finished text, prompt included."""


class SharedDrafting(Protocol):
    """Makes drafters for several scopes, and learns from the texts of each."""

    def begin(self, scope: Hashable = None) -> Drafter:
        """Start a drafter for a new text of a scope."""

    def keep(self, tokens: Sequence[int], scope: Hashable = None) -> None:
        """Remember a finished text for its scope, prompt included."""


@dataclass(frozen=True, slots=True)
class ScopedDrafting:
    """The drafting of one scope, see `Drafting`."""

    shared: SharedDrafting
    scope: Hashable

    def begin(self) -> Drafter:
        """Start a drafter for a new text."""
        return self.shared.begin(self.scope)

    def keep(self, tokens: Sequence[int]) -> None:
        """Remember a finished text, prompt included."""
        self.shared.keep(tokens, self.scope)
