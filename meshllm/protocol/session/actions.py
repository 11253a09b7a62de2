"""What an entry is asked for, and what it asks its driver for."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from meshllm.errors import UserError
from meshllm.names import SessionId
from meshllm.protocol.session.codec import MAX_POSITION
from meshllm.protocol.session.messages import Blob, FaultCode, Forward, Tally
from meshllm.request import FinishReason


@dataclass(frozen=True, slots=True)
class Task:
    """One generation."""

    session: SessionId
    epoch: int
    ring: int
    """Ranks; 1 is this node alone, which sends nothing."""
    prompt: tuple[int, ...]
    max_tokens: int
    context: int
    """Most tokens that the model takes, prompt included."""
    slack: int | None = None
    """How many positions a cache can go back; None is any number. To 0 all can."""
    keep_from: int | None = None
    """Positions from which on it is worth keeping what a session leaves; None is never."""

    @property
    def limit(self) -> int:
        """Count the positions that the session may come to have.

        Raises:
            UserError: the prompt is empty or leaves no room in the context, or no token is asked.
        """
        context = min(self.context, MAX_POSITION)
        if not 0 < len(self.prompt) < context:
            raise UserError(
                f"A prompt of {len(self.prompt)} tokens; the model takes 1 to {context - 1}",
                hint="shorten the prompt or the chat",
            )
        if self.max_tokens < 1:
            raise UserError(f"An answer of at most {self.max_tokens} tokens is none")
        return min(len(self.prompt) + self.max_tokens, context)


@dataclass(frozen=True, slots=True)
class Embed:
    """Crop the local cache to ``pos``, embed, run the local layers; answer ``computed``."""

    gen: int
    pos: int
    tokens: tuple[int, ...]
    guesses: int = 0
    """How many of the last tokens are guesses behind one that is known, or will be when this comes
    back. Alone in the ring, the rows of the guesses and the one before them stay for a Pick; in a
    larger one all rows are handed back."""


@dataclass(frozen=True, slots=True)
class Pick:
    """Norm, head and sampling of the tokens from position ``pos`` on; answer ``picked``.

    The digest of the blob is not checked yet: hashing belongs on the thread that computes.
    """

    gen: int
    pos: int
    blob: Blob | None
    """``[1, 1 + G, D]``; None stands for the last rows of the last Embed."""
    guesses: tuple[int, ...]
    """G tokens that were guessed for ``pos`` and behind it."""
    limit: int
    """Position that no token of the answer may have, nor a guess."""
    ahead: tuple[int, ...] = ()
    """Tokens that were guessed behind those, and are in flight."""
    reach: int = MAX_POSITION
    """Most guesses in flight at a time."""

    def right(self, tokens: Sequence[int]) -> int:
        """Count the guesses that were right, given the tokens that were sampled."""
        pairs = zip(tokens, (*self.guesses, *self.ahead), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def flying(self, tokens: Sequence[int]) -> tuple[int, ...] | None:
        """Return the guesses that stay in flight behind these tokens.

        None is that the last token is not in flight itself: it is yet to be embedded.
        """
        is_right = self.right(tokens) == len(tokens) > len(self.guesses)
        return (*self.guesses, *self.ahead)[len(tokens) :] if is_right else None


@dataclass(frozen=True, slots=True)
class Emit:
    """This token is part of the answer, for good."""

    token: int


@dataclass(frozen=True, slots=True)
class Progress:
    """So many tokens of the prompt have been all round the ring."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Done:
    """The answer is complete."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Failed:
    """There is no more answer to come, and why."""

    code: FaultCode
    text: str
    rank: int


@dataclass(frozen=True, slots=True)
class Closed:
    """The session is over on every rank that can be reached; free the local cache. Comes last."""

    tallies: tuple[Tally, ...]
    """Of rank 1, 2, and so on; empty when Close did not come back."""


Action = Embed | Pick | Emit | Forward | Progress | Done | Failed | Closed
"""What an entry wants its driver to do."""
