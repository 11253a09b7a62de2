"""How many tokens each client used today, as its ticket may limit.

Each node counts what is asked through it, from 00:00 UTC or its start on.
"""

from collections import Counter

from meshllm.names import NodeId
from meshllm.protocol.trust.credential import ClientLimits
from meshllm.request import Answer, Event, Piece

DAY_S = 86_400
TOKEN_BYTES = 4  # of a request, for one token of a prompt whose length is not known yet
MAX_TOKENS_PER_DAY = 1 << 48


def places(limits: ClientLimits, most: int) -> int:
    """Return how many requests a client may have at a time: a ticket only lowers ``most``."""
    return min(limits.concurrency or most, most)


class ClientQuota:
    """The tokens of the clients on the current day; ``wall_s`` is the time of day since 1970."""

    def __init__(self) -> None:
        self._day = 0
        self._used: Counter[NodeId] = Counter()  # as many as members invite

    def used(self, client: NodeId, wall_s: float) -> int:
        """Return how many tokens a client used today."""
        return self._today(wall_s)[client]

    def left(self, client: NodeId, limits: ClientLimits, wall_s: float) -> int:
        """Return how many tokens a client has left today, 1 at least."""
        most = limits.tokens_per_day or MAX_TOKENS_PER_DAY
        return max(1, most - self.used(client, wall_s))

    def spend(self, client: NodeId, tokens: int, wall_s: float) -> None:
        """Count tokens of a client."""
        self._today(wall_s)[client] += tokens

    def objection(self, client: NodeId, limits: ClientLimits, wall_s: float) -> str:
        """Return why a client may not ask now; empty if it may."""
        used, most = self.used(client, wall_s), limits.tokens_per_day
        if 0 < most <= used:
            return f"{used} of {most} tokens of today (UTC) are used, the limit of the ticket"
        return ""

    def _today(self, wall_s: float) -> Counter[NodeId]:
        if (day := int(wall_s // DAY_S)) != self._day:
            self._day, self._used = day, Counter()
        return self._used


class SpentTokens:
    """The tokens of one request, whether its answer ends or is cancelled."""

    def __init__(self, request_bytes: int) -> None:
        self._written = 0
        self._prompt = request_bytes // TOKEN_BYTES
        self._answered = 0

    def take(self, event: Event) -> None:
        """Count an event of the answer."""
        match event:
            case Piece():
                self._written += max(len(event.tokens), event.has_text)
            case Answer():
                self._answered += event.prompt_tokens + event.completion_tokens
                self._written = self._prompt = 0
            case _:
                pass

    @property
    def total(self) -> int:
        """The tokens read and written; estimated for the prompt of an answer that did not end."""
        return self._prompt + self._written + self._answered
