"""The first session of an answer by outline: what it is asked, and the points that it yields."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from meshllm.outline.directive import Directive
from meshllm.outline.eligibility import (
    MAX_OUTLINE_TOKENS,
    MAX_POINT_TOKENS,
    MAX_POINTS,
    most_tokens,
)
from meshllm.outline.join import TokenUsage
from meshllm.outline.points import Point, declines, is_independent
from meshllm.request import Event, Piece, Request, Turn

WORTH_TOKENS = 64  # fewest of an answer that make a point worth a session
WORDS_PER_TOKEN = 0.6  # of English, less what ends a sentence
SEEDS = 1 << 63


@dataclass(slots=True)
class Outlining:
    """The outline of the answer to a request, as far as it has come."""

    request: Request
    directive: Directive
    may_decline: bool
    """Whether the model may choose an ordinary answer."""
    usage: TokenUsage = field(default_factory=TokenUsage)
    text: str = ""

    @property
    def asked(self) -> Request:
        """The request of the outline; it ends after the most points that fit."""
        most = min(MAX_OUTLINE_TOKENS, most_tokens(self.request) // 4)
        stop = (f"\n{self._most + 1}.",)
        return replace(self.request, turns=self._turns, max_tokens=most, stop=stop, max_reasoning=0)

    def take(self, event: Event) -> bool:
        """Take an event of the outline; return whether it is worth waiting for more."""
        self.usage.take(event)
        if isinstance(event, Piece):
            self.text += event.text
        return not (self.may_decline and declines(self.text))

    def points(self) -> Sequence[Point]:
        """Return the points; none if the request is better answered as usual."""
        points = self.directive.read(self.text, self._most)
        is_declined = self.may_decline and (declines(self.text) or not is_independent(points))
        return points if len(points) > 1 and not is_declined else ()

    def expansions(self, points: Sequence[Point]) -> list[Request]:
        """Return the requests of the points, which continue the text of the outline.

        What remains of the tokens is shared equally.
        """
        left = (most_tokens(self.request) - len(self.usage.written)) // len(points)
        most = min(MAX_POINT_TOKENS, left)
        words = int(most * WORDS_PER_TOKEN)
        sampling = self.request.sampling
        outline = (*self._turns, Turn(role="assistant", content=self.text))
        return [
            replace(
                self.request,
                turns=(*outline, Turn(role="user", content=self.directive.expand(point, words))),
                max_tokens=most,
                sampling=replace(sampling, seed=derived_seed(sampling.seed, point.number)),
                max_reasoning=0,
                shares_prefix=True,
            )
            for point in points
        ]

    @property
    def _most(self) -> int:
        return min(MAX_POINTS, most_tokens(self.request) // WORTH_TOKENS)

    @property
    def _turns(self) -> tuple[Turn, ...]:
        *before, last = self.request.turns
        text = self.directive.outline(self._most, may_decline=self.may_decline)
        return (*before, Turn(role="user", content=last["content"] + text))


def derived_seed(seed: int, number: int) -> int:
    """Return the seed of a point by its number."""
    return int.from_bytes(blake2b(f"{seed} {number}".encode(), digest_size=8).digest()) % SEEDS
