"""A drafter with a known acceptance rate, for tests and benchmarks.

Random weights cannot measure the quality of a drafter: their greedy text repeats itself. So the
text of a run without drafts is recorded, and drafted in a second run with a share of wrong tokens.
"""

import random
from collections.abc import Sequence


class Oracle:
    """Drafts one known text, each token right with probability ``acceptance``."""

    def __init__(self, text: Sequence[int], acceptance: float, seed: int = 0) -> None:
        """Take the ``text``, prompt included; a ``seed`` determines which tokens are wrong."""
        draw = random.Random(seed)
        self._text = text
        self._wrong = [draw.random() >= acceptance for _ in text]

    def begin(self) -> "OracleDrafter":
        """Start a session."""
        return OracleDrafter(
            [token ^ is_wrong for token, is_wrong in zip(self._text, self._wrong, strict=True)]
        )

    def keep(self, tokens: Sequence[int]) -> None:
        """Do nothing: the oracle does not learn."""


class OracleDrafter:
    """Drafts by position."""

    def __init__(self, drafts: Sequence[int]) -> None:
        self._drafts = drafts
        self._length = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Advance by these tokens of the session."""
        self._length += len(tokens)

    def look(self) -> int | None:
        """Return a constant confidence; None after the end of the text."""
        return 2 if self._length < len(self._drafts) else None

    def draft(self, most: int) -> tuple[int, ...]:
        """Return up to ``most`` drafts."""
        return tuple(self._drafts[self._length : self._length + most])
