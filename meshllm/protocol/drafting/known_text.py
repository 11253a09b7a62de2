"""A drafter for a text that is known, of which only the log probabilities are wanted."""

from collections.abc import Sequence
from typing import Self

from meshllm.protocol.drafting.window import MAX_CONFIDENCE


class KnownText:
    """Drafts the rest of one text, and nothing after it."""

    def __init__(self, text: Sequence[int]) -> None:
        self._text = tuple(text)
        self._length = 0

    def begin(self) -> Self:
        """Start at the first token."""
        return type(self)(self._text)

    def keep(self, tokens: Sequence[int]) -> None:
        """Do nothing: there is only one text."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Go on after these tokens."""
        self._length += len(tokens)

    def look(self) -> int | None:
        """Return full confidence until the end of the text."""
        return MAX_CONFIDENCE if self._length < len(self._text) else None

    def draft(self, most: int) -> tuple[int, ...]:
        """Return the next tokens of the text."""
        return self._text[self._length : self._length + most]
