"""Guesses of known quality, for tests and benchmarks; knows the text before it is computed.

Random weights say nothing about how well a drafter guesses: their greedy text runs in circles. So
the text of a plain run is recorded, and drafted again with a share of wrong tokens.
"""

import random
from collections.abc import Sequence


class Oracle:
    """Drafts one known text, each token right with probability ``acceptance``."""

    def __init__(self, text: Sequence[int], acceptance: float, seed: int = 0) -> None:
        """Know ``text``, prompt included; the same tokens are wrong in every run of a seed."""
        draw = random.Random(seed)
        self._text = text
        self._wrong = [draw.random() >= acceptance for _ in text]

    def begin(self) -> "OracleDrafter":
        """Start the text."""
        return OracleDrafter(
            [token ^ is_wrong for token, is_wrong in zip(self._text, self._wrong, strict=True)]
        )

    def keep(self, tokens: Sequence[int]) -> None:
        """Learn nothing."""


class OracleDrafter:
    """Drafts by position."""

    def __init__(self, drafts: Sequence[int]) -> None:
        self._drafts = drafts
        self._length = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Count what the text has."""
        self._length += len(tokens)

    def look(self) -> int | None:
        """Be equally sure everywhere, but behind the end."""
        return 2 if self._length < len(self._drafts) else None

    def guess(self, most: int) -> tuple[int, ...]:
        """Give the next drafts."""
        return tuple(self._drafts[self._length : self._length + most])
