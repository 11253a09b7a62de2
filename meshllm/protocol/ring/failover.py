"""Failover of one request: whether it is asked again, and what of the new answer is new.

Theory of operation
-------------------
The ingress holds a request until it is answered. When the ring breaks, it waits for the next one
and asks again, with a longer pause each time. The text is a pure function of the request, so the
new ring writes the same text, and what was already shown is skipped. Where it differs, the request
ends with an error, since what was shown cannot be taken back.

Only the ingress asks again: what it reports to a client is final, as `Reported`.
"""

from meshllm.errors import LinkLost, MeshError
from meshllm.request import Answer, Event, Piece

ATTEMPTS = 8  # rings that one request may see break
AGAIN_S = 0.25  # s of pause before the second attempt; each later one waits that much longer


class Reported(LinkLost):
    """An ingress has asked again as often as it may."""


class Failover:
    """One request through all attempts to answer it."""

    def __init__(self) -> None:
        self._attempts = 1
        self._shown = ""
        self._skip = 0  # characters of it that this attempt has still to repeat

    def lost(self, error: LinkLost) -> float:
        """Begin another attempt; return the seconds to wait before it.

        Raises:
            LinkLost: ``error``, after the last attempt.
        """
        if self._attempts == ATTEMPTS or isinstance(error, Reported):
            raise error
        delay = self._attempts * AGAIN_S
        self._attempts += 1
        self._skip = len(self._shown)
        return delay

    def take(self, event: Event) -> Event | None:
        """Return what of an event is new; None when nothing is.

        Raises:
            MeshError: the new ring writes another text, which cannot go on from what was shown.
        """
        match event:
            case Piece(text):
                at = len(self._shown) - self._skip
                self._check(self._shown.startswith(text[: self._skip], at))
                new, self._skip = text[self._skip :], max(0, self._skip - len(text))
                self._shown += new
                return Piece(new) if new else None
            case Answer():
                self._check(self._skip == 0)
        return event

    @staticmethod
    def _check(is_same: bool) -> None:
        if not is_same:
            raise MeshError(
                "The answer cannot go on after its ring broke: the next one wrote another"
            )
