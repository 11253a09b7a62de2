"""What a user asks for, what comes back, and the port of whatever computes it.

The string under each field is its help text: the command line and the man page show it.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol, TypedDict

from meshllm.names import Span


class Turn(TypedDict):
    """One message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen; a pure function of (logits, seed, position, history)."""

    temperature: float = 0.0
    """Randomness: 0 takes the likeliest token."""
    top_k: int = 0
    """Keep the K likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens that sum to P."""
    min_p: float = 0.0
    """Drop tokens below P times the likeliest."""
    repetition_penalty: float = 1.0
    """Divide the logits of tokens already seen; 1 is off."""
    frequency_penalty: float = 0.0
    """Subtract this per earlier use in the answer."""
    presence_penalty: float = 0.0
    """Subtract this once a token was used in the answer."""
    seed: int = 0
    """Same seed, same text, on any ring."""


@dataclass(frozen=True, slots=True)
class Request:
    """One generation: the prompt, how to sample, when to stop."""

    turns: tuple[Turn, ...] = ()
    """The chat so far, oldest first; empty when `raw` is given."""
    raw: str | None = None
    """A prompt that is used as it is, without the chat template."""
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 512
    """Longest answer, in tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; they are not part of it."""
    given: tuple[int, ...] = ()
    """Tokens of the answer that an earlier ring sampled. The answer continues behind them: they
    count against `max_tokens`, for penalties and stop texts, and are not repeated."""


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class HopReport:
    """What one rank did for a session, as means per token behind the first."""

    rank: int
    node: str
    span: Span
    compute_ms: float
    """Time in the model."""
    serialise_ms: float
    """Time between bytes and tensors, the keyed hash included."""
    queue_ms: float
    """Time that work which had arrived here waited for its turn."""
    wire_ms: float
    """Time from this rank to the next."""
    bytes_per_token: float
    """What this rank sent to the next."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished generation."""

    text: str
    tokens: tuple[int, ...]
    """The generated token ids, end token included."""
    prompt_tokens: int
    finish_reason: FinishReason
    ttft_ms: float
    """Time from the request to the first token."""
    ms_per_token: float
    """Mean time of every later token; 0 with fewer than two."""
    tokens_per_second: float
    tokens_per_step: float
    """Mean of the trips round the ring behind the first token: more than 1 where guesses at the
    next tokens were right."""
    hops: tuple[HopReport, ...]
    cached_tokens: int = 0
    """Tokens of the prompt that were kept from an earlier answer, and not computed again."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Progress: so many prompt tokens went round the ring."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of the answer, whole characters only, and the new tokens."""

    text: str
    """Empty while it depends on tokens to come."""
    tokens: tuple[int, ...] = ()
    """None for text that was held back until the end."""


Event = Prefilled | Piece | Answer
"""What a generation yields: progress, pieces, and the answer last."""


class Backend(Protocol):
    """Answers requests: a local ring, the entry of a ring, another node, a mesh, a provider."""

    def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Yield progress, pieces of text, and the `Answer` last.

        Raises:
            UserError: the request cannot be served as it is.
            MeshError: the generation failed; nothing of it is left on any node.

        Closing the generator cancels the generation on every node.
        """
