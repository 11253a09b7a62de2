"""The task of an entry, and the actions that it requests of its driver."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from meshllm.errors import ContextTooLong, UserError
from meshllm.names import SessionId
from meshllm.protocol.drafting.window import MAX_STEP_ROWS
from meshllm.protocol.session.codec import MAX_POSITION
from meshllm.protocol.session.messages import Blob, FaultCode, Forward, RankStats
from meshllm.request import FinishReason


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """One generation."""

    session: SessionId
    epoch: int
    ring: int
    """Ranks; 1 is this node alone, which sends nothing."""
    prompt: tuple[int, ...]
    max_tokens: int
    context: int
    """Maximum tokens that the model takes, prompt included."""
    max_crop: int | None = None
    """Positions by which a cache can be cropped; None is any number. All can be cropped to 0."""
    given: int = 0
    """How many of the last tokens of the prompt were decode steps of an earlier ring. They are
    computed as such again, with the same bits."""
    recompute_rows: int = MAX_STEP_ROWS
    """Rows of decode steps that are computed again at a time, after a loss."""
    keep_from: int | None = None
    """Fewest positions that are worth keeping when the session ends; None keeps nothing."""
    resumes: bool = True
    """Whether the caches are kept if the ring is lost."""
    is_own: bool = False
    """Whether it is a request of the owner of the entry."""
    hands_over: bool = True
    """Whether ranks that leave may hand its caches over."""

    @property
    def limit(self) -> int:
        """Maximum positions that the session may reach.

        Raises:
            UserError: the prompt is empty or leaves no room in the context, or no token is wanted.
        """
        check_prompt(len(self.prompt), self.context)
        if self.max_tokens < 1:
            raise UserError(f"Invalid answer length: at most {self.max_tokens} tokens")
        return min(len(self.prompt) + self.max_tokens, self.context, MAX_POSITION)


def check_prompt(tokens: int, context: int) -> None:
    """Raise `ContextTooLong` for a prompt that is empty or leaves no room in the context."""
    most = min(context, MAX_POSITION)
    if not 0 < tokens < most:
        raise ContextTooLong(
            f"This model's maximum context length is {most} tokens; the prompt has"
            f" {tokens}, not 1 to {most - 1}",
            hint="shorten the prompt or the chat",
        )


@dataclass(frozen=True, slots=True)
class Embed:
    """Crop the local cache to ``pos``, embed, run the local layers; then call ``computed``."""

    gen: int
    pos: int
    tokens: tuple[int, ...]
    drafts: int = 0
    """How many of the last tokens are drafts, after one that is known, or will be when this comes
    back. In a ring of one, the rows of the drafts and the one before them stay for a
    `SampleTokens`; in a
    larger ring all rows are returned."""
    is_step: bool = True
    """Rows of a decode step, each as if computed alone; else a chunk of the prompt."""
    recomputes: bool = False
    """Do not crop: compute the rows only in the local layers that lack them. The rows that were
    sent to the next rank are returned, if it lacks them."""


@dataclass(frozen=True, slots=True)
class SampleTokens:
    """Final norm, head and sampling of the tokens from ``pos`` on; then call ``picked``.

    The digest of the blob is not checked yet: hashing belongs on the compute thread.
    """

    gen: int
    pos: int
    blob: Blob | None
    """``[1, 1 + G, D]``; None means the last rows of the last Embed."""
    drafts: tuple[int, ...]
    """G draft tokens from ``pos`` on."""
    limit: int
    """First position beyond the answer, for tokens and drafts."""
    ahead: tuple[int, ...] = ()
    """Draft tokens in flight after those."""
    max_drafts: int = MAX_POSITION
    """Maximum draft tokens in flight at a time."""
    room: int = MAX_POSITION
    """First position for which the caches have no room yet: nothing is computed there."""

    def accepted(self, tokens: Sequence[int]) -> int:
        """Count the drafts that equal the sampled ``tokens``, up to the first that does not."""
        pairs = zip(tokens, (*self.drafts, *self.ahead), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def flying(self, tokens: Sequence[int]) -> tuple[int, ...] | None:
        """Return the drafts that stay in flight after these tokens.

        None means that the last token is not in flight itself and is yet to be embedded.
        """
        is_right = self.accepted(tokens) == len(tokens) > len(self.drafts)
        return (*self.drafts, *self.ahead)[len(tokens) :] if is_right else None


@dataclass(frozen=True, slots=True)
class Emit:
    """A token of the answer, which is final."""

    token: int


@dataclass(frozen=True, slots=True)
class Reserve:
    """Get room for this many positions of the session; then call ``grown``."""

    positions: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Prefill progress: ``done`` tokens of the prompt have been all round the ring."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Done:
    """The answer is complete."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Failed:
    """The generation ended with an error."""

    code: FaultCode
    text: str
    rank: int
    is_seen: bool = False
    """A result broke the rules here; else a rank refused to go on, which versions or losses may
    cause."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The session has ended on every reachable rank; free the local cache. The last action."""

    tallies: tuple[RankStats, ...]
    """Of rank 1, 2, and so on; empty if Close did not come back."""


Action = Embed | SampleTokens | Emit | Reserve | Forward | Progress | Done | Failed | Closed
"""What an entry wants its driver to do."""
