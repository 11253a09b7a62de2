"""What clients of a mesh and keys of the API may ask today, as a ticket or the key may limit.

Each node counts the tokens that clients ask through it, from 00:00 UTC or its start on. Those of
keys are also stored: `ClientQuota.learn` counts what was stored before, or by another process.

Theory of operation
-------------------
A request reserves the estimated tokens of its prompt and all of its answer, which is limited to
what is left; one without a limit reserves those of a typical answer. So requests at the same time
share what is left, in the order in which they begin. When the ring reports the length of the
prompt, or pieces exceed the reservation, it grows; once nothing is left, the request ends. When it
ends, it pays for what was computed, and no more. A client without a daily limit reserves nothing.

The answer of an earlier ring that a request continues was counted by whom it was asked. Its tokens
do not have to fit into what is left, so that no answer is cut, but they count as read.
"""

from collections import Counter
from dataclasses import replace
from typing import Protocol, TypeAlias

from meshllm.errors import QuotaUsed
from meshllm.names import NodeId
from meshllm.protocol.trust.credential import ClientLimits
from meshllm.request import Answer, Event, Piece, Prefilled, Request

DAY_S = 86_400
TOKEN_BYTES = 4  # of a text, for one token of a prompt whose length is not known yet
TURN_TOKENS = 8  # that a chat template adds to a turn, about
MAX_TOKENS_PER_DAY = 1 << 48
SOON_S = 2  # s until a request that holds tokens may have ended

Client: TypeAlias = NodeId | str
"""A client of the mesh, or the name of a key."""


class DailyLimit(Protocol):
    """The limits of a client, one of them on its tokens."""

    @property
    def tokens_per_day(self) -> int | None:
        """Read and written, in a day of UTC; 0 and None mean no limit."""


def places(limits: ClientLimits, most: int) -> int:
    """Return how many requests a client may have at a time: a ticket only lowers ``most``."""
    return min(limits.concurrency or most, most)


def estimate(request: Request) -> int:
    """Estimate the tokens of a prompt; 0 if the request only counts them."""
    if not request.computes:
        return 0
    texts = [request.raw or "", *(turn["content"] for turn in request.turns)]
    texts += [request.tools.functions] if request.tools else []
    text_bytes = sum(len(text.encode(errors="replace")) for text in texts)
    return len(request.ids) + text_bytes // TOKEN_BYTES + TURN_TOKENS * len(request.turns)


class ClientQuota:
    """The tokens of the clients on the current day; ``wall_s`` is in seconds since 1970."""

    def __init__(self, limited_by: str = "ticket") -> None:
        """Count; ``limited_by`` says in messages what has the limits."""
        self._limited_by = limited_by
        self._day = 0
        self._used: Counter[Client] = Counter()  # as many as members invite, or keys
        self._reserved: Counter[Client] = Counter()

    def left(self, client: Client, limits: DailyLimit, wall_s: float) -> int:
        """Return how many tokens of today a client has neither used nor reserved."""
        return max(0, _most(limits) - self._taken(client, wall_s))

    def objection(self, client: Client, limits: DailyLimit, wall_s: float) -> QuotaUsed | None:
        """Return why a client may not ask now; None if it may."""
        if self.left(client, limits, wall_s):
            return None
        taken = self._taken(client, wall_s)
        text = f"{taken} of {_most(limits)} tokens of today (UTC) are used or reserved"
        return self.refusal(text, client, limits, 1, wall_s)

    def refusal(
        self, text: str, client: Client, limits: DailyLimit, wanted: int, wall_s: float
    ) -> QuotaUsed:
        """Return the error of a client that wants more tokens than are left."""
        is_soon = wanted <= _most(limits) - self._today(wall_s)[client]  # once others have ended
        return QuotaUsed(
            f"{text}, the limit of the {self._limited_by}",
            hint="retry soon" if is_soon else "request fewer tokens, or retry after 00:00 UTC",
            retry_s=SOON_S if is_soon else DAY_S - int(wall_s) % DAY_S,
        )

    def reserve(
        self,
        client: Client,
        limits: DailyLimit,
        request: Request,
        wall_s: float,
        *,
        reads: int = 1,
    ) -> "Reservation":
        """Reserve the tokens of a request, to be ended; its answer is limited to what is left.

        Its prompt may be read ``reads`` times, by an answer that is outlined.

        Raises:
            QuotaUsed: nothing is left for an answer.
        """
        if not limits.tokens_per_day:
            return Reservation(self, client, limits, request, 0)
        left, given = self.left(client, limits, wall_s), len(request.given)
        prompt = reads * estimate(request)
        wanted = max(0, request.expected_tokens - given)
        room = left - prompt
        if room < (least := min(1, wanted)):
            text = (
                f"The prompt has about {prompt} tokens; {left} of {_most(limits)} tokens of today"
                " (UTC) are left"
            )
            raise self.refusal(text, client, limits, prompt + least, wall_s)
        limited = request
        if request.max_tokens is not None:
            limited = replace(request, max_tokens=min(request.max_tokens, given + room))
        else:
            limited = replace(request, bound=given + room)
        tokens = prompt + given + min(wanted, room)
        return Reservation(self, client, limits, limited, tokens)

    def learn(self, client: Client, tokens: int, wall_s: float) -> None:
        """Count at least this many tokens of today as used: they were stored."""
        used = self._today(wall_s)
        used[client] = max(used[client], tokens)

    def hold(self, client: Client, tokens: int) -> None:
        """Reserve tokens; negative ones are returned."""
        self._reserved[client] += tokens
        if not self._reserved[client]:
            del self._reserved[client]

    def spend(self, client: Client, tokens: int, wall_s: float) -> None:
        """Count tokens of a client as used."""
        self._today(wall_s)[client] += tokens

    def _taken(self, client: Client, wall_s: float) -> int:
        return self._today(wall_s)[client] + self._reserved[client]

    def _today(self, wall_s: float) -> Counter[Client]:
        if (day := int(wall_s // DAY_S)) != self._day:
            self._day, self._used = day, Counter()
        return self._used


class Reservation:
    """The tokens of one request, from its begin to its end."""

    def __init__(
        self,
        quota: ClientQuota,
        client: Client,
        limits: DailyLimit,
        request: Request,
        tokens: int,
    ) -> None:
        self.request = request
        """With the answer that fits."""
        self._quota, self._client, self._limits = quota, client, limits
        self._spent = SpentTokens(request)
        self._tokens = 0
        self._grow(tokens)

    def take(self, event: Event, wall_s: float) -> None:
        """Count an event of the answer.

        Raises:
            QuotaUsed: prompt and answer exceed what is left.
        """
        self._spent.take(event)
        more = self._spent.needed - self._tokens
        if isinstance(event, Answer) or more <= 0:
            return
        if more > self._quota.left(self._client, self._limits, wall_s):
            text = (
                f"The request exceeds what is left of the {_most(self._limits)} tokens of today"
                " (UTC)"
            )
            wanted = self._spent.needed
            raise self._quota.refusal(text, self._client, self._limits, wanted, wall_s)
        self._grow(more)

    def end(self, wall_s: float) -> None:
        """Return what is reserved, and count what was computed; once."""
        self._grow(-self._tokens)
        self._quota.spend(self._client, self._spent.total, wall_s)

    def _grow(self, tokens: int) -> None:
        self._tokens += tokens
        self._quota.hold(self._client, tokens)


class SpentTokens:
    """The tokens of one request that were computed, whether its answer ends or is cancelled."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._length = len(request.given)  # of what is read before the answer
        if not request.scores_prompt:  # else the prompt is part of the answer
            self._length += estimate(request)
        self._read = 0  # of it
        self._written = 0
        self._texts = 0  # pieces without tokens
        self._total: int | None = None  # of a whole answer

    def take(self, event: Event) -> None:
        """Count an event of the answer."""
        match event:
            case Prefilled(done, total):
                self._read, self._length = max(self._read, done), max(0, total)
            case Piece():
                self._read = self._length
                self._written += len(event.tokens)
                self._texts += event.has_text
            case Answer():
                written = event.written_for(self._request)
                is_computed = self.total or event.completion_tokens or event.embedding
                whole = event.prompt_tokens + len(self._request.given) + written
                self._total = max(0, whole) if is_computed else 0
            case _:
                pass

    @property
    def needed(self) -> int:
        """The tokens of the whole prompt, which may be an estimate, and those written."""
        return self._length + self._answered

    @property
    def total(self) -> int:
        """The tokens read and written; the length of a prompt may be an estimate."""
        return self._read + self._answered if self._total is None else self._total

    @property
    def _answered(self) -> int:
        """The tokens of the answer; an engine that does not tell them sends one in a piece."""
        return self._written or self._texts


def _most(limits: DailyLimit) -> int:
    return limits.tokens_per_day or MAX_TOKENS_PER_DAY
