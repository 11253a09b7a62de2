"""Failover of one request: the ledger of its tokens, and retries with backoff.

Theory of operation
-------------------
The ingress holds a request and the tokens of its answer until it is complete. When the ring breaks,
the ingress waits for the next one and sends the request again with those tokens as
`Request.given`, and with the latest `Resumable`: the new entry continues from the caches that are
left, or prefills prompt and tokens together, and samples the next token. No decode step is
repeated, and a token that was shown never changes, whatever the new ring rounds.
What depends on earlier tokens (seed and position, penalties, stop texts, the length) is that of one
answer, since it is a function of prompt and tokens.

What was held back until the end of the answer has no tokens of its own. If the ring breaks after
it, the next one repeats it, piece by piece, and it is shown once.

An answer whose text has no tokens at all, from the engine of a provider, ends with the loss: the
next engine would write another one.

Only the ingress retries: the loss that it reports to a client (`RetriesExhausted`) is final. The
client may turn to another ingress, with the tokens that it has.
"""

from dataclasses import replace
from typing import assert_never

from meshllm.errors import Busy, LinkLost, QuotaUsed
from meshllm.request import (
    Answer,
    Event,
    Interruption,
    Piece,
    Prefilled,
    PromptTokens,
    Request,
    Resumable,
    Waiting,
    Written,
)

ATTEMPTS = 8  # tries in a row without a new token, including the first
RETRY_DELAY_S = (
    0.25  # s before the second retry in a row, the first is immediate; then that much longer
)


class RetriesExhausted(LinkLost):
    """The ingress has used up its retries."""


class Failover:
    """The state of one request across its attempts."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._attempts = 1
        self._written = Written()
        self._tokens: list[int] = []
        self._tail = 0  # pieces at the end, which were held back and have no tokens
        self._skip = 0  # of them that this attempt has yet to repeat
        self._resume = request.resume
        self.resumed = 0
        """Tokens that earlier attempts gave to this one."""

    @property
    def is_new(self) -> bool:
        """Whether no attempt has been lost so far."""
        return self._attempts == 1 and not self._tokens

    @property
    def request(self) -> Request:
        """The request of this attempt."""
        given = self._tokens[: self.resumed]
        return replace(self._request, given=(*self._request.given, *given), resume=self._resume)

    def failed(
        self, error: LinkLost | Busy, *, has_other: bool = False, is_late: bool = False
    ) -> float:
        """Start another attempt; return the seconds to wait before it.

        A request that no ring has accepted yet goes to another one at once if ``has_other``: there
        is one that has not refused it. That counts as no attempt.

        Raises:
            LinkLost: ``error``, after the last attempt, if ``is_late``, or if text was shown that
                has no tokens.
            QuotaUsed: ``error``: no attempt would have more tokens.
            Busy: ``error``, if no ring has accepted the request yet, and all have refused it; later
                ones may still hold the place of the attempt that was lost.
        """
        is_refused = self.is_new and isinstance(error, Busy)
        if is_refused and has_other:
            return 0.0
        is_final = isinstance(error, RetriesExhausted | QuotaUsed)
        is_last = is_final or is_late or self._attempts == ATTEMPTS
        if is_refused or is_last or self._lacks_tokens:
            raise error
        delay = (self._attempts - 1) * RETRY_DELAY_S
        self._attempts += 1
        self.resumed, self._skip = len(self._tokens), self._tail
        return delay

    @property
    def _lacks_tokens(self) -> bool:
        """Whether the text that was shown cannot be continued: no token of it is known."""
        return bool(self._tail) and not (self._tokens or self._request.given)

    def take(self, event: Event) -> Event | None:
        """Return the new part of an event, None if nothing is new; an `Answer` becomes whole."""
        match event:
            case Prefilled():
                return None if self._tokens else event
            case Resumable():
                self._resume = event
                return event
            case Waiting() | PromptTokens() | Interruption():
                return event
            case Piece():
                return self._piece(event)
            case Answer(tokens=tokens):
                known = self._tokens[: self.resumed]
                return self._written.complete(replace(event, tokens=(*known, *tokens)))
            case _:
                assert_never(event)

    def _piece(self, piece: Piece) -> Piece | None:
        if piece.tokens:
            self._tokens += piece.tokens
            self._attempts, self._tail = 1, 0
        elif self._skip:
            self._skip -= 1
            return None
        else:
            self._tail += 1
        self._written.add(piece)
        return piece if piece.has_text or piece.tokens else None
