"""Counters of the requests whose ingress is a node, and the times of its latest answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from meshllm.names import GroupId, LossCause
from meshllm.protocol.membership.records import MAX_RINGS
from meshllm.request import Answer, Interruption
from meshllm.status import LossCounts

_NO_ROWS: Mapping[LossCause, int] = MappingProxyType({})


@dataclass(slots=True)
class RequestCounters:
    """Counters of the requests whose ingress is this node."""

    active: int = 0
    """In progress, waiting or begun."""
    served: int = 0
    failed: int = 0
    tokens: int = 0
    losses: Mapping[LossCause, LossCounts] = field(default_factory=dict)
    """Losses of a ring that an answer survived, by cause; without rows."""
    last: Answer | None = None
    """The latest answer, for its times; without its text, tokens and embedding."""
    last_tokens: int = 0
    by_ring: Mapping[GroupId, tuple[Answer, int]] = field(default_factory=dict)
    """The same for each of the rings that answered last."""
    begun: int = 0
    """Of the active ones: their first event has come, after the first chunk of the prompt."""

    def loss_counts(self, rows: Mapping[LossCause, int] = _NO_ROWS) -> tuple[LossCounts, ...]:
        """Return the losses, with the rows that they cost this node, for the status."""
        return tuple(
            replace(lost, paused_s=round(lost.paused_s, 3), rows=rows.get(cause, 0))
            for cause in sorted({*self.losses, *rows})
            for lost in [self.losses.get(cause, LossCounts(cause))]
        )

    def count(self, answer: Answer, ring: GroupId | None) -> None:
        """Count an answer that has ended, of a ring or of a provider."""
        self.served += 1
        self.tokens += answer.completion_tokens
        last = replace(answer, text="", reasoning="", calls=(), tokens=(), embedding="")
        self.last, self.last_tokens = last, answer.completion_tokens
        if ring is not None:
            others = [each for each in self.by_ring.items() if each[0] != ring]
            self.by_ring = dict([*others[1 - MAX_RINGS :], (ring, (last, self.last_tokens))])

    def survived(self, interruption: Interruption, given: int) -> None:
        """Count the loss of a ring; the next one was ``given`` this many tokens of the answer."""
        cause = interruption.cause
        lost = self.losses.get(cause, LossCounts(cause))
        paused_s, tokens = lost.paused_s + interruption.pause_s, lost.tokens + given
        lost = LossCounts(cause, lost.count + 1, paused_s, tokens)
        self.losses = {**self.losses, cause: lost}
