"""Drafting for the requests of one scope: nobody is drafted the texts of others."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from meshllm.protocol.drafting.drafter import Drafter


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
